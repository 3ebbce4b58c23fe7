//! Fatbins: what nvcc puts PTX and cubins into.
//!
//! NVIDIA does not document the layout; this is what the files of nvcc 12 and 13 show. All numbers are little-endian.
//!
//! ```text
//! file:  0 u32 magic | 4 u16 version = 1 | 6 u16 bytes of this header | 8 u64 bytes of all entries | entries
//! entry: 0 u16 kind: 1 PTX, 2 cubin | 2 u16 0x101 | 4 u32 bytes of this header | 8 u64 bytes of the payload, padded
//!       16 u32 bytes of the compressed payload | 24 u16 minor, 26 u16 major (of a PTX: its ISA) | 28 u32 architecture
//!       40 u64 flags: 0x2000 LZ4, 0x8000 zstd, 0x100000 `a`, 0x200000 `f` | 56 u64 bytes when uncompressed
//! ```

mod cubin;

use crate::ptx::ast::{Target, Variant};
use std::fmt;
use std::io::Read;

pub use cubin::{elf_len, registers};

/// First four bytes of a fatbin.
pub const MAGIC: [u8; 4] = 0xba55_ed50u32.to_le_bytes();
/// First four bytes of a cubin.
pub const ELF_MAGIC: [u8; 4] = *b"\x7fELF";

/// Least bytes of a fatbin's header, and of an entry's.
const HEADER: usize = 16;
const ENTRY_HEADER: usize = 64;
/// Largest file and largest uncompressed entry that are believed.
const MOST: u64 = 1 << 30;
/// LZ4 expands a byte to at most this many.
const LZ4_RATIO: usize = 255;

/// What an entry holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// PTX text.
    Ptx,
    /// A cubin.
    Elf,
    /// Something else, for example NVVM code for the linker.
    Other(u16),
}

/// How a payload is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    Stored,
    /// An LZ4 block.
    Lz4,
    /// A zstd frame.
    Zstd,
}

/// An entry of a fatbin.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// What it holds.
    pub kind: Kind,
    /// What it was compiled for.
    pub target: Target,
    /// Major and minor version; of a PTX that of its instruction set.
    pub version: (u16, u16),
    /// All flags.
    pub flags: u64,
    /// How the payload is compressed.
    pub compression: Compression,
    /// The payload as stored.
    pub payload: &'a [u8],
    /// Bytes of the payload when uncompressed.
    pub bytes: u64,
}

/// Why an image cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FatbinError {
    /// The bytes are not a fatbin, or are cut short: a sentence.
    Malformed(String),
    /// It has machine code only, for these targets.
    NoPtx(Vec<Target>),
    /// All its PTX is for other cards: the card's compute capability and the targets.
    NoSuitable(u32, Vec<Target>),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self.variant {
            Variant::Plain => "",
            Variant::Arch => "a",
            Variant::Family => "f",
        };
        write!(f, "{}{suffix}", self.arch)
    }
}

impl fmt::Display for FatbinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |prefix: &str, targets: &[Target]| {
            targets.iter().map(|t| format!("{prefix}{t}")).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::Malformed(what) => write!(f, "this is not a valid fatbin: {what}"),
            Self::NoPtx(targets) if targets.is_empty() => write!(f, "this fatbin is empty"),
            Self::NoPtx(targets) => write!(
                f,
                "this fatbin has machine code only ({}), and ptxsim runs PTX: compile with \
                 -gencode arch=compute_80,code=[sm_80,compute_80] or the like",
                list("sm_", targets)
            ),
            Self::NoSuitable(cc, targets) => write!(
                f,
                "a card of compute capability {}.{} cannot run the PTX in this fatbin, which is for {}: compile for \
                 compute_{cc} or an older architecture, or choose another card",
                cc / 10,
                cc % 10,
                list("compute_", targets)
            ),
        }
    }
}

impl std::error::Error for FatbinError {}

fn malformed<T>(what: impl Into<String>) -> Result<T, FatbinError> {
    Err(FatbinError::Malformed(what.into()))
}

/// `N` bytes at `at`.
fn take<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    take(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    take(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    take(bytes, at).map(u64::from_le_bytes)
}

/// Bytes of a whole fatbin by its first 16 bytes; `None` if it is none or cannot be that long.
pub fn total_len(header: &[u8; HEADER]) -> Option<usize> {
    let own = u64::from(u16_at(header, 6)?);
    let entries = u64_at(header, 8)?;
    let known = header.starts_with(&MAGIC) && u16_at(header, 4) == Some(1);
    (known && own >= HEADER as u64 && entries <= MOST).then(|| (own + entries) as usize)
}

/// The entries of a fatbin.
///
/// # Errors
/// [`FatbinError::Malformed`]
pub fn entries(fatbin: &[u8]) -> Result<Vec<Entry<'_>>, FatbinError> {
    let Some(header) = take(fatbin, 0) else { return malformed("it is shorter than its header") };
    let Some(len) = total_len(&header) else {
        return malformed("its first bytes are not those of a fatbin of version 1");
    };
    let Some(mut rest) = fatbin.get(u16_at(fatbin, 6).unwrap_or(0).into()..len) else {
        return malformed(format!("its header says {len} bytes, here are {}", fatbin.len()));
    };
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let (entry, len) = match entry(rest) {
            Some(found) => found,
            None => return malformed(format!("entry {} is cut short or contradicts itself", entries.len())),
        };
        entries.push(entry);
        rest = &rest[len..];
    }
    Ok(entries)
}

/// The first entry and the bytes it takes.
fn entry(bytes: &[u8]) -> Option<(Entry<'_>, usize)> {
    let header = u32_at(bytes, 4)? as usize;
    let padded = usize::try_from(u64_at(bytes, 8)?).ok()?;
    let end = header.checked_add(padded)?;
    if header < ENTRY_HEADER || end > bytes.len() {
        return None;
    }
    let flags = u64_at(bytes, 40)?;
    let compression = match flags & 0xa000 {
        0 => Compression::Stored,
        0x2000 => Compression::Lz4,
        0x8000 => Compression::Zstd,
        _ => return None,
    };
    let payload = &bytes[header..end];
    let (payload, uncompressed) = match compression {
        Compression::Stored => (payload, padded as u64),
        _ => (payload.get(..u32_at(bytes, 16)? as usize)?, u64_at(bytes, 56)?),
    };
    let variant = match flags & 0x30_0000 {
        0 => Variant::Plain,
        0x10_0000 => Variant::Arch,
        _ => Variant::Family,
    };
    let kind = match u16_at(bytes, 0)? {
        1 => Kind::Ptx,
        2 => Kind::Elf,
        other => Kind::Other(other),
    };
    let target = Target { arch: u32_at(bytes, 28)?, variant };
    let version = (u16_at(bytes, 26)?, u16_at(bytes, 24)?);
    Some((Entry { kind, target, version, flags, compression, payload, bytes: uncompressed }, end))
}

impl Entry<'_> {
    /// The payload, uncompressed.
    ///
    /// # Errors
    /// [`FatbinError::Malformed`], also if it is not as long as the entry says.
    pub fn contents(&self) -> Result<Vec<u8>, FatbinError> {
        if self.bytes > MOST {
            return malformed(format!("an entry of {} bytes is too large", self.bytes));
        }
        let size = self.bytes as usize;
        let contents = match self.compression {
            Compression::Stored => return Ok(self.payload.to_vec()),
            Compression::Lz4 => {
                // before making room for what the entry says
                if size > self.payload.len().saturating_mul(LZ4_RATIO).saturating_add(64) {
                    return malformed("an LZ4 payload cannot be as large as its entry says");
                }
                let mut contents = vec![0; size];
                lz4_flex::block::decompress_into(self.payload, &mut contents).map(|len| {
                    contents.truncate(len);
                    contents
                })
            }
            .map_err(|e| e.to_string()),
            Compression::Zstd => unzstd(self.payload, size),
        };
        match contents {
            Ok(contents) if contents.len() == size => Ok(contents),
            Ok(contents) => malformed(format!(
                "an entry has {} bytes, not the {size} that it says (or more)",
                contents.len()
            )),
            Err(reason) => malformed(format!("an entry cannot be uncompressed: {reason}")),
        }
    }

    /// The PTX text of an entry.
    ///
    /// # Errors
    /// [`FatbinError::Malformed`]
    pub fn text(&self) -> Result<String, FatbinError> {
        let mut contents = self.contents()?;
        // padded with zeros
        contents.truncate(contents.iter().position(|&b| b == 0).unwrap_or(contents.len()));
        String::from_utf8(contents).or_else(|_| malformed("its PTX is not text"))
    }
}

/// At most `size` + 1 bytes of a zstd frame.
fn unzstd(payload: &[u8], size: usize) -> Result<Vec<u8>, String> {
    // the window is made at once: it need not be larger than the contents, but small ones have a least size
    let window = (size as u64).next_power_of_two().max(1 << 20);
    let decoder = ruzstd::decoding::StreamingDecoder::new_with_max_window_size(payload, window);
    let mut contents = Vec::new();
    decoder
        .map_err(|e| e.to_string())?
        .take(size as u64 + 1)
        .read_to_end(&mut contents)
        .map_err(|e| e.to_string())?;
    Ok(contents)
}

/// The newest PTX that a card of compute capability `cc` (90 for 9.0) runs.
///
/// # Errors
/// [`FatbinError`]
pub fn select_ptx(entries: &[Entry<'_>], cc: u32) -> Result<String, FatbinError> {
    let of_kind = |kind| entries.iter().filter(move |e: &&Entry<'_>| e.kind == kind);
    let rank = |e: &Entry<'_>| {
        let special = match e.target.variant {
            Variant::Plain => 0,
            Variant::Family => 1,
            Variant::Arch => 2,
        };
        (e.target.arch, special)
    };
    match of_kind(Kind::Ptx).filter(|e| e.target.runs_on(cc)).max_by_key(|e| rank(e)) {
        Some(entry) => entry.text(),
        None => {
            let targets = |kind| of_kind(kind).map(|e| e.target).collect::<Vec<_>>();
            let ptx = targets(Kind::Ptx);
            Err(if ptx.is_empty() {
                FatbinError::NoPtx(targets(Kind::Elf))
            } else {
                FatbinError::NoSuitable(cc, ptx)
            })
        }
    }
}

/// Registers of each function by the cubin that a card of compute capability `cc` would run: the newest of its major
/// version that is not newer than it. Empty if there is none or it is damaged.
pub fn registers_for(entries: &[Entry<'_>], cc: u32) -> std::collections::HashMap<String, u32> {
    let runs = |t: Target| t.runs_on(cc) && t.arch / 10 == cc / 10;
    let cubins = entries.iter().filter(|e| e.kind == Kind::Elf && runs(e.target));
    let newest = cubins.max_by_key(|e| e.target.arch);
    newest.and_then(|e| e.contents().ok()).map(|elf| registers(&elf)).unwrap_or_default()
}

#[cfg(test)]
mod tests;

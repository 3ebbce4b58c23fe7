//! Arguments of a kernel: `i32:5`, `buf:in.bin`.

use half::{bf16, f16};
use ptxsim::memory::GlobalMemory;
use ptxsim::ptx::ast::{Type, Variable};

/// For `--help`.
pub(crate) const HELP: &str = "\
Arguments (one --arg for each parameter, in order):
  i8 u8 i16 u16 i32 u32 i64 u64 f16 bf16 f32 f64 :VALUE   a number; integers also as 0x…
  hex:BYTES                   a parameter by value, its bytes in order of memory: hex:0100ff00
  buf:FILE                    a pointer to a copy of the file
  zeros:BYTES ones:BYTES      a pointer to bytes of 0, of 0xff
  fresh:BYTES                 a pointer to memory that nobody wrote
  rand:BYTES:SEED             a pointer to random bytes
  randf32:COUNT:SEED randf16:COUNT:SEED randbf16:COUNT:SEED   … to random numbers from -1 to 1
  iota:COUNT                  … to the i32 0, 1, 2 …
  TYPE:VALUE,VALUE,…          … to these numbers (two or more; f32:1, is one)
Bytes and counts may end in K or M (1024, 1024 * 1024).

Exit status: 0; 1 after a fault, or if the file, the kernel or its arguments do not fit; 2 if the command line does not.";

/// A parsed argument.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Argument {
    /// Passed by value: its bytes, and its type if it is a number.
    Value(Vec<u8>, Option<Type>),
    /// Device memory: contents.
    Memory(Vec<u8>),
    /// Device memory without contents.
    Fresh(u64),
}

/// Device memory of an argument.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

/// What a kernel gets.
#[derive(Debug)]
pub(crate) struct Placed {
    /// The parameter's bytes.
    pub(crate) value: Vec<u8>,
    pub(crate) buffer: Option<Buffer>,
}

/// `4096`, `4K`, `0x100`
fn size(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let value = integer(digits).ok().and_then(|v| usize::try_from(v).ok()).and_then(|v| v.checked_mul(unit));
    value.filter(|&v| v <= 16 << 30).ok_or_else(|| format!("`{text}` is not a size up to 16384M"))
}

fn integer(text: &str) -> Result<i128, String> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let value = match digits.strip_prefix("0x") {
        Some(hex) => i128::from_str_radix(hex, 16),
        None => digits.parse(),
    };
    let value = value.map_err(|_| format!("`{text}` is not an integer"))?;
    Ok(if negative { -value } else { value })
}

/// The bytes of a number, and its type.
fn number(kind: &str, text: &str) -> Option<Result<(Vec<u8>, Type), String>> {
    let (ty, signed) = match kind {
        "i8" => (Type::S8, true),
        "u8" => (Type::U8, false),
        "i16" => (Type::S16, true),
        "u16" => (Type::U16, false),
        "i32" => (Type::S32, true),
        "u32" => (Type::U32, false),
        "i64" => (Type::S64, true),
        "u64" => (Type::U64, false),
        "f16" => (Type::F16, true),
        "bf16" => (Type::BF16, true),
        "f32" => (Type::F32, true),
        "f64" => (Type::F64, true),
        _ => return None,
    };
    let float = || text.parse::<f64>().map_err(|_| format!("`{text}` is not a number"));
    let bytes = match ty {
        Type::F16 => float().map(|v| f16::from_f64(v).to_le_bytes().to_vec()),
        Type::BF16 => float().map(|v| bf16::from_f64(v).to_le_bytes().to_vec()),
        // straight from the text: by way of f64 it would be rounded twice
        Type::F32 => text
            .parse::<f32>()
            .map(|v| v.to_le_bytes().to_vec())
            .map_err(|_| format!("`{text}` is not a number")),
        Type::F64 => float().map(|v| v.to_le_bytes().to_vec()),
        _ => integer(text).and_then(|v| {
            let (bits, least) = (ty.bits(), if signed { -(1i128 << (ty.bits() - 1)) } else { 0 });
            // hexadecimal digits give the bits of a signed number as well
            let most = if signed && !text.starts_with("0x") {
                (1i128 << (bits - 1)) - 1
            } else {
                (1i128 << bits) - 1
            };
            if (least..=most).contains(&v) {
                Ok(v.to_le_bytes()[..ty.bytes() as usize].to_vec())
            } else {
                Err(format!("{text} does not fit into {kind}"))
            }
        }),
    };
    Some(bytes.map(|bytes| (bytes, ty)))
}

/// A generator whose numbers are the same everywhere (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// From -1 to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Parses `--arg`.
pub(crate) fn parse(text: &str) -> Result<Argument, String> {
    let (kind, rest) = text.split_once(':').ok_or_else(|| {
        format!("`{text}` is not KIND:VALUE, as i32:5 or zeros:4K; `ptxsim run --help` lists kinds")
    })?;
    let numbers = rest.trim_end_matches(',').split(',').map(|one| number(kind, one.trim()));
    if let Some(numbers) = numbers.collect::<Option<Vec<_>>>() {
        let mut numbers = numbers.into_iter().collect::<Result<Vec<_>, _>>()?;
        return Ok(match numbers.pop() {
            Some((bytes, ty)) if !rest.contains(',') => Argument::Value(bytes, Some(ty)),
            last => Argument::Memory(numbers.into_iter().chain(last).flat_map(|n| n.0).collect()),
        });
    }
    let seeded = || {
        let (count, seed) =
            rest.split_once(':').ok_or_else(|| format!("`{text}`: expected {kind}:SIZE:SEED"))?;
        let seed = seed.parse().map_err(|_| format!("`{seed}` is not a seed"))?;
        Ok::<_, String>((size(count)?, Random(seed)))
    };
    Ok(match kind {
        "hex" => {
            let digits: Option<Vec<u8>> = rest.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect();
            match digits {
                Some(d) if d.len().is_multiple_of(2) => {
                    Argument::Value(d.chunks(2).map(|d| d[0] << 4 | d[1]).collect(), None)
                }
                _ => return Err(format!("`{rest}` is not pairs of hexadecimal digits")),
            }
        }
        "buf" => Argument::Memory(ptxsim::files::read(rest.as_ref()).map_err(|e| format!("{rest}: {e}"))?),
        "zeros" => Argument::Memory(vec![0; size(rest)?]),
        "ones" => Argument::Memory(vec![0xff; size(rest)?]),
        "fresh" => Argument::Fresh(size(rest)? as u64),
        "rand" => {
            let (bytes, mut random) = seeded()?;
            Argument::Memory((0..bytes).map(|_| random.next() as u8).collect())
        }
        "randf32" => {
            let (count, mut random) = seeded()?;
            Argument::Memory((0..count).flat_map(|_| random.unit().to_le_bytes()).collect())
        }
        "randf16" => {
            let (count, mut random) = seeded()?;
            Argument::Memory((0..count).flat_map(|_| f16::from_f32(random.unit()).to_le_bytes()).collect())
        }
        "randbf16" => {
            let (count, mut random) = seeded()?;
            Argument::Memory((0..count).flat_map(|_| bf16::from_f32(random.unit()).to_le_bytes()).collect())
        }
        "iota" => Argument::Memory((0..size(rest)? as u32).flat_map(u32::to_le_bytes).collect()),
        _ => return Err(format!("`{kind}` is no kind of argument; `ptxsim run --help` lists them")),
    })
}

impl Argument {
    /// Why it cannot be this parameter's.
    pub(crate) fn mismatch(&self, parameter: &Variable) -> Option<String> {
        let (bytes, ty) = match self {
            Self::Value(bytes, ty) => (bytes.len() as u64, *ty),
            Self::Memory(_) | Self::Fresh(_) => (8, None),
        };
        let float = |ty| matches!(ty, Type::F16 | Type::BF16 | Type::F32 | Type::F64);
        let integer = |ty: Type| ty.is_signed() || matches!(ty, Type::U8 | Type::U16 | Type::U32 | Type::U64);
        if bytes != parameter.bytes {
            return Some(format!("has {bytes} bytes, not {}", parameter.bytes));
        }
        match ty {
            Some(ty) if float(ty) && integer(parameter.ty) && !parameter.array => {
                Some("is no integer".into())
            }
            Some(ty) if !float(ty) && float(parameter.ty) => Some("is no floating-point number".into()),
            _ => None,
        }
    }

    /// Puts it into device memory, if that is where it belongs.
    pub(crate) fn place(&self, memory: &GlobalMemory) -> Result<Placed, String> {
        let (bytes, contents) = match self {
            Self::Value(bytes, _) => return Ok(Placed { value: bytes.clone(), buffer: None }),
            Self::Memory(contents) => (contents.len() as u64, &contents[..]),
            Self::Fresh(bytes) => (*bytes, &[][..]),
        };
        let address = memory.alloc(bytes).map_err(|e| e.to_string())?;
        memory.write(address, contents).map_err(|e| e.to_string())?;
        Ok(Placed { value: address.to_le_bytes().to_vec(), buffer: Some(Buffer { address, bytes }) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        for (text, bytes) in [
            ("i32:-1", &[0xff; 4][..]),
            ("i32:0xffffffff", &[0xff; 4]),
            ("u8:255", &[255]),
            ("i64:-2", &[0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
            ("f16:1", &[0x00, 0x3c]),
            ("bf16:1", &[0x80, 0x3f]),
            ("f32:-0.5", &[0, 0, 0, 0xbf]),
            ("f64:inf", &[0, 0, 0, 0, 0, 0, 0xf0, 0x7f]),
            ("hex:01fF", &[1, 0xff]),
        ] {
            let Argument::Value(found, _) = parse(text).unwrap() else { panic!("{text}") };
            assert_eq!(found, bytes, "{text}");
        }
        assert_eq!(parse("i16:1,-2").unwrap(), Argument::Memory(vec![1, 0, 0xfe, 0xff]));
        assert_eq!(parse("u8:7,").unwrap(), Argument::Memory(vec![7]));
        assert_eq!(parse("iota:3").unwrap(), Argument::Memory(vec![0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]));
        assert_eq!(parse("fresh:2K").unwrap(), Argument::Fresh(2048));
        assert_eq!(parse("rand:5:1").unwrap(), parse("rand:5:1").unwrap());
        assert_ne!(parse("rand:5:1").unwrap(), parse("rand:5:2").unwrap());
        for wrong in [
            "",
            "5",
            "i32:",
            "i32:x",
            "u8:256",
            "i8:-129",
            "u32:-1",
            "f32:one",
            "hex:1",
            "hex:zz",
            "zeros:-1",
            "zeros:99999999M",
            "rand:5",
            "rand:5:x",
            "i32:1,x",
            "what:1",
            "buf:/nowhere/at/all",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn random_numbers_are_in_range() {
        let Argument::Memory(bytes) = parse("randf32:1000:3").unwrap() else { panic!() };
        let values: Vec<f32> = bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert!(values.iter().all(|v| (-1.0..=1.0).contains(v)));
        let mean = values.iter().sum::<f32>() / 1000.0;
        assert!(mean.abs() < 0.1 && values.iter().any(|&v| v < -0.9) && values.iter().any(|&v| v > 0.9));
    }
}

//! Exported pages: for swapping to disk, for another process, for a cache on another backend.
//!
//! ```text
//! byte  0  magic "QKVPAGE\0" (sinks: "QKVSINK\0")
//!       8  version u32 = 1
//!      12  layer u32            (sinks: 0)
//!      16  head u32             (sinks: 0)
//!      20  mean flag u32        1 = dim f16 key means follow the header
//!      24  configuration hash u64
//!      32  token start u64      a multiple of 64
//!      40  mean bytes u64
//!      48  payload bytes u64
//!      56  xxh3 u64 of bytes 0..56, the means and the payload
//!      64  means, then the payload: the page in row order (sinks: f32 rows [layer][head][K rows, V rows])
//! ```
//! All numbers are little-endian.

use crate::error::{Error, Result};
use half::f16;
use xxhash_rust::xxh3::Xxh3;

const HEADER: usize = 64;
const VERSION: u32 = 1;
const PAGE: &[u8; 8] = b"QKVPAGE\0";
const SINKS: &[u8; 8] = b"QKVSINK\0";

/// Where a page belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) layer: usize,
    pub(crate) head: usize,
    pub(crate) token: usize,
}

/// A checked page.
#[derive(Debug)]
pub(crate) struct Page<'a> {
    pub(crate) place: Place,
    pub(crate) mean: Option<Vec<f16>>,
    pub(crate) payload: &'a [u8],
}

fn checksum(header: &[u8], rest: &[u8]) -> u64 {
    let mut h = Xxh3::new();
    h.update(&header[..HEADER - 8]);
    h.update(rest);
    h.digest()
}

fn write(magic: &[u8; 8], hash: u64, place: &Place, mean: Option<&[f16]>, payload: &[u8]) -> Vec<u8> {
    let mean_bytes: &[u8] = mean.map_or(&[], bytemuck::cast_slice);
    let mut out = Vec::with_capacity(HEADER + mean_bytes.len() + payload.len());
    out.extend_from_slice(magic);
    for x in [VERSION, place.layer as u32, place.head as u32, mean.is_some() as u32] {
        out.extend_from_slice(&x.to_le_bytes());
    }
    for x in [hash, place.token as u64, mean_bytes.len() as u64, payload.len() as u64, 0] {
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.extend_from_slice(mean_bytes);
    out.extend_from_slice(payload);
    let sum = checksum(&out[..HEADER], &out[HEADER..]);
    out[HEADER - 8..HEADER].copy_from_slice(&sum.to_le_bytes());
    out
}

pub(crate) fn write_page(hash: u64, place: &Place, mean: Option<&[f16]>, payload: &[u8]) -> Vec<u8> {
    write(PAGE, hash, place, mean, payload)
}

pub(crate) fn write_sinks(hash: u64, rows: &[f32]) -> Vec<u8> {
    write(SINKS, hash, &Place { layer: 0, head: 0, token: 0 }, None, bytemuck::cast_slice(rows))
}

fn bad<T>(problem: &'static str, expected: impl ToString, got: impl ToString) -> Result<T> {
    Err(Error::Page { problem, expected: expected.to_string(), got: got.to_string() })
}

/// Header fields of checked bytes: (layer, head, mean flag), (token, mean bytes, payload bytes).
fn read(magic: &[u8; 8], hash: u64, bytes: &[u8]) -> Result<([u32; 3], [u64; 3])> {
    if bytes.len() < HEADER {
        return bad("too short for a header", format!("at least {HEADER} bytes"), bytes.len());
    }
    if &bytes[..8] != magic {
        return bad("wrong magic", String::from_utf8_lossy(magic), String::from_utf8_lossy(&bytes[..8]));
    }
    let u32_at = |i: usize| bytes[i..i + 4].try_into().map_or(0, u32::from_le_bytes);
    let u64_at = |i: usize| bytes[i..i + 8].try_into().map_or(0, u64::from_le_bytes);
    if u32_at(8) != VERSION {
        return bad("unknown version", VERSION, u32_at(8));
    }
    if u64_at(24) != hash {
        return bad("another configuration", format!("{hash:016x}"), format!("{:016x}", u64_at(24)));
    }
    let rest = (bytes.len() - HEADER) as u64;
    if u64_at(40).checked_add(u64_at(48)) != Some(rest) {
        return bad("wrong size", format!("{} + {} bytes behind the header", u64_at(40), u64_at(48)), rest);
    }
    let sum = checksum(bytes, &bytes[HEADER..]);
    if sum != u64_at(56) {
        return bad("damaged: the checksum differs", format!("{:016x}", u64_at(56)), format!("{sum:016x}"));
    }
    Ok(([u32_at(12), u32_at(16), u32_at(20)], [u64_at(32), u64_at(40), u64_at(48)]))
}

/// Checks a page. `geometry(layer)` gives its page bytes and, if centred, the channels of its mean.
pub(crate) fn read_page(
    hash: u64,
    bytes: &[u8],
    geometry: impl Fn(usize) -> Option<(usize, Option<usize>)>,
) -> Result<Page<'_>> {
    let ([layer, head, flag], [token, mean_bytes, payload_bytes]) = read(PAGE, hash, bytes)?;
    let Some((page_bytes, mean_dim)) = geometry(layer as usize) else {
        return bad("no such layer", "a layer of this cache", layer);
    };
    let expected = (mean_dim.is_some() as u32, mean_dim.unwrap_or(0) as u64 * 2, page_bytes as u64);
    if expected != (flag, mean_bytes, payload_bytes) {
        return bad(
            "wrong mean or payload",
            format!("{} bytes of means and {} of payload", expected.1, expected.2),
            format!("{mean_bytes} and {payload_bytes}"),
        );
    }
    let (mean, payload) = bytes[HEADER..].split_at(mean_bytes as usize);
    let mean = mean_dim.map(|_| mean.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect());
    Ok(Page {
        place: Place { layer: layer as usize, head: head as usize, token: token as usize },
        mean,
        payload,
    })
}

/// Checks exported sinks of `n` values.
pub(crate) fn read_sinks(hash: u64, bytes: &[u8], n: usize) -> Result<Vec<f32>> {
    let (_, [_, _, payload]) = read(SINKS, hash, bytes)?;
    if payload != n as u64 * 4 {
        return bad("wrong number of sink values", n * 4, payload);
    }
    let value = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    Ok(bytes[HEADER..].chunks_exact(4).map(value).collect())
}

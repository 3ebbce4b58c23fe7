//! `printf` and `assert` of kernels.

use super::gang::Context;
use super::regs::Mask;
use super::rows::{Done, trouble};
use super::run::{byte_at, local_value};
use super::warp::{Warp, try_each};
use crate::fault::FaultKind;
use crate::program::System;

/// Longest text that is read from device memory.
const LONGEST: u64 = 4096;

/// A call of a system function, lane by lane.
pub(super) fn call(
    cx: &Context<'_>,
    warp: &mut Warp,
    mask: Mask,
    function: System,
    arguments: &[u32],
    result: Option<u32>,
) -> Done {
    let argument =
        |warp: &Warp, l: usize, i: usize| arguments.get(i).map_or(0, |a| local_value(cx, warp, l, *a));
    try_each(mask, |l| match function {
        System::Printf => {
            let (format, values) = (argument(warp, l, 0), argument(warp, l, 1));
            let format = text(cx, warp, l, format);
            print!("{}", printf(cx, warp, l, &format, values));
            if let Some(to) = result {
                let at = l * cx.kernel.local_bytes as usize + to as usize;
                if let Some(place) = warp.local.get_mut(at..at + 4) {
                    place.copy_from_slice(&(format.len() as u32).to_le_bytes());
                    super::access::mark_local(warp, at, 4);
                }
            }
            Ok(())
        }
        System::AssertFail => {
            let message = argument(warp, l, 0);
            let file = argument(warp, l, 1);
            let line = argument(warp, l, 2) as u32;
            let (message, file) = (text(cx, warp, l, message), text(cx, warp, l, file));
            trouble(FaultKind::Assert, l, format!("{file}:{line}: assertion failed: {message}"))
        }
    })
}

/// The zero-terminated text at an address.
fn text(cx: &Context<'_>, warp: &mut Warp, lane: usize, address: u64) -> String {
    let bytes: Vec<u8> =
        (0..LONGEST).map_while(|i| byte_at(cx, warp, &[], lane, address + i).filter(|b| *b != 0)).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The text of a `printf`. Arguments are packed at their natural alignment: 4 bytes, or 8 for `l`, `f`, `p`, `s`.
fn printf(cx: &Context<'_>, warp: &mut Warp, lane: usize, format: &str, values: u64) -> String {
    let mut out = String::new();
    let mut at = 0u64;
    let mut take = |warp: &mut Warp, n: u64| {
        at = at.next_multiple_of(n);
        let v = (0..n).rev().fold(0u64, |v, i| {
            v << 8 | u64::from(byte_at(cx, warp, &[], lane, values + at + i).unwrap_or(0))
        });
        at += n;
        v
    };
    let mut rest = format;
    while let Some(i) = rest.find('%') {
        out.push_str(&rest[..i]);
        rest = &rest[i + 1..];
        let end = rest.find(|c: char| "diouxXeEfFgGaAcspn%".contains(c));
        let Some(end) = end else { break };
        let (flags, kind) = (&rest[..end], rest.as_bytes()[end]);
        rest = &rest[end + 1..];
        let long = flags.contains('l');
        let width: usize = flags
            .trim_start_matches(['-', '+', ' ', '#', '0'])
            .split('.')
            .next()
            .and_then(|w| w.trim_end_matches(['l', 'h']).parse().ok())
            .unwrap_or(0);
        let precision: Option<usize> =
            flags.split_once('.').and_then(|(_, p)| p.trim_end_matches(['l', 'h']).parse().ok());
        let piece = match kind {
            b'%' => "%".to_string(),
            b'd' | b'i' if long => (take(warp, 8) as i64).to_string(),
            b'd' | b'i' => (take(warp, 4) as i32).to_string(),
            b'u' => take(warp, if long { 8 } else { 4 }).to_string(),
            b'x' => format!("{:x}", take(warp, if long { 8 } else { 4 })),
            b'X' => format!("{:X}", take(warp, if long { 8 } else { 4 })),
            b'o' => format!("{:o}", take(warp, if long { 8 } else { 4 })),
            b'c' => char::from(take(warp, 4) as u8).to_string(),
            b'p' => format!("{:#x}", take(warp, 8)),
            b's' => {
                let address = take(warp, 8);
                text(cx, warp, lane, address)
            }
            b'e' | b'E' => format!("{:.*e}", precision.unwrap_or(6).min(40), f64::from_bits(take(warp, 8))),
            b'g' | b'G' => f64::from_bits(take(warp, 8)).to_string(),
            _ => format!("{:.*}", precision.unwrap_or(6).min(40), f64::from_bits(take(warp, 8))),
        };
        let width = width.min(200);
        if flags.starts_with('-') {
            out.push_str(&format!("{piece:<width$}"));
        } else if flags.starts_with('0') {
            out.push_str(&format!("{piece:0>width$}"));
        } else {
            out.push_str(&format!("{piece:>width$}"));
        }
    }
    out.push_str(rest);
    out
}

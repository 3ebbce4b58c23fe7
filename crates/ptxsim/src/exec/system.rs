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
            let (text, taken) = printf(cx, warp, l, &format, values);
            print!("{text}");
            if let Some(to) = result {
                let at = l * cx.kernel.local_bytes as usize + to as usize;
                if let Some(place) = warp.local.get_mut(at..at + 4) {
                    place.copy_from_slice(&taken.to_le_bytes());
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

/// The text of a `printf`, and how many arguments it took. Arguments are packed at their natural alignment: 4 bytes, or 8 for
/// `l`, `z`, floats, pointers and strings.
fn printf(cx: &Context<'_>, warp: &mut Warp, lane: usize, format: &str, values: u64) -> (String, u32) {
    let mut out = String::new();
    let (mut at, mut taken) = (0u64, 0);
    let mut take = |warp: &mut Warp, n: u64| {
        at = at.next_multiple_of(n);
        let v = (0..n).rev().fold(0u64, |v, i| {
            v << 8 | u64::from(byte_at(cx, warp, &[], lane, values + at + i).unwrap_or(0))
        });
        at += n;
        taken += 1;
        v
    };
    let mut rest = format;
    while let Some(i) = rest.find('%') {
        out.push_str(&rest[..i]);
        rest = &rest[i + 1..];
        let end = rest.find(|c: char| !"-+ #0123456789.*hlLqjzt".contains(c));
        let Some(end) = end else { break };
        let (head, kind) = (&rest[..end], rest[end..].chars().next().unwrap_or('%'));
        rest = &rest[end + kind.len_utf8()..];
        if kind == '%' {
            out.push('%');
            continue;
        }
        let sizes = head.trim_start_matches(|c: char| "-+ #0123456789.*".contains(c));
        let numbers = &head[..head.len() - sizes.len()];
        let digits = numbers.trim_start_matches(['-', '+', ' ', '#', '0']);
        let flags = &numbers[..numbers.len() - digits.len()];
        let (width, precision) = digits.split_once('.').map_or((digits, None), |(w, p)| (w, Some(p)));
        let mut number = |warp: &mut Warp, n: &str| match n {
            "*" => i64::from(take(warp, 4) as i32),
            n => n.parse().unwrap_or(0),
        };
        let width = number(warp, width);
        // A negative precision counts as none.
        let precision = precision.map(|p| number(warp, p)).filter(|p| *p >= 0).map(|p| p.min(200) as usize);
        let left = flags.contains('-') || width < 0;
        let long = sizes.contains(['l', 'L', 'q', 'j', 'z', 't']);
        let sign = |negative: bool| match () {
            () if negative => "-",
            () if flags.contains('+') => "+",
            () if flags.contains(' ') => " ",
            () => "",
        };
        // Sign or prefix, and the rest: zeros go between.
        let (head, body, numeric) = match kind {
            'd' | 'i' => {
                let raw = take(warp, if long { 8 } else { 4 });
                let v = match sizes {
                    "hh" => i64::from(raw as i8),
                    "h" => i64::from(raw as i16),
                    _ if long => raw as i64,
                    _ => i64::from(raw as i32),
                };
                (
                    sign(v < 0),
                    format!("{:0>1$}", v.unsigned_abs(), precision.unwrap_or(1)),
                    precision.is_none(),
                )
            }
            'u' | 'x' | 'X' | 'o' => {
                let raw = take(warp, if long { 8 } else { 4 });
                let v = match sizes {
                    "hh" => raw & 0xff,
                    "h" => raw & 0xffff,
                    _ => raw,
                };
                let (prefix, digits) = match kind {
                    'u' => ("", v.to_string()),
                    'o' => ("0", format!("{v:o}")),
                    'x' => ("0x", format!("{v:x}")),
                    _ => ("0X", format!("{v:X}")),
                };
                let prefix = if flags.contains('#') && v != 0 { prefix } else { "" };
                (prefix, format!("{digits:0>0$}", precision.unwrap_or(1)), precision.is_none())
            }
            'c' => ("", char::from(take(warp, 4) as u8).to_string(), false),
            'p' => ("", format!("{:#x}", take(warp, 8)), false),
            's' => {
                let address = take(warp, 8);
                let s = text(cx, warp, lane, address);
                ("", s.chars().take(precision.unwrap_or(usize::MAX)).collect(), false)
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' | 'a' | 'A' => {
                let v = f64::from_bits(take(warp, 8));
                let body = float(v.abs(), kind, precision.unwrap_or(6), flags.contains('#'));
                (sign(v.is_sign_negative()), body, v.is_finite())
            }
            // Not a conversion: as it stands.
            other => ("", format!("%{numbers}{sizes}{other}"), false),
        };
        let missing =
            (width.unsigned_abs().min(200) as usize).saturating_sub(head.len() + body.chars().count());
        match () {
            () if left => out.extend([head, &body, &" ".repeat(missing)]),
            () if numeric && flags.contains('0') => out.extend([head, &"0".repeat(missing), &body]),
            () => out.extend([&" ".repeat(missing), head, &body]),
        }
    }
    out.push_str(rest);
    (out, taken)
}

/// A float that is not negative, as C writes it.
fn float(v: f64, kind: char, precision: usize, keep_zeros: bool) -> String {
    let lower = kind.to_ascii_lowercase();
    let exponential = |precision: usize| {
        let s = format!("{v:.precision$e}");
        let (digits, exponent) = s.split_once('e').unwrap_or((&s, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        (digits.to_string(), exponent)
    };
    let written = |digits: &str, e: i32| format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.abs());
    let s = match lower {
        _ if v.is_nan() => "nan".to_string(),
        _ if v.is_infinite() => "inf".to_string(),
        'e' => {
            let (digits, e) = exponential(precision);
            written(&digits, e)
        }
        'g' => {
            let precision = precision.max(1);
            let (digits, e) = exponential(precision - 1);
            let trim = |s: &str| match s.contains('.') && !keep_zeros {
                true => s.trim_end_matches('0').trim_end_matches('.').to_string(),
                false => s.to_string(),
            };
            if e < -4 || e >= precision as i32 {
                written(&trim(&digits), e)
            } else {
                let after = (precision as i32 - 1 - e).max(0) as usize;
                trim(&format!("{v:.after$}"))
            }
        }
        _ => format!("{v:.precision$}"),
    };
    if kind.is_ascii_uppercase() { s.to_uppercase() } else { s }
}

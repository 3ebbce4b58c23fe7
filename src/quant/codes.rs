//! Rows of codes as dense bit streams, low bits first, in row order: `bits` = 1, 2, 3, 4 or 8, eight codes to
//! `bits` bytes; a row ends on a whole byte, unused high bits are 0.

use crate::simd::{Isa, dispatch};

/// Eight codes of `B` bits from `B` bytes, as integers.
#[inline(always)]
fn eight<const B: usize>(bytes: &[u8]) -> [u32; 8] {
    if B == 8 {
        return std::array::from_fn(|i| bytes[i] as u32);
    }
    let mut w = [0u8; 4];
    w[..B].copy_from_slice(&bytes[..B]);
    let w = u32::from_le_bytes(w);
    std::array::from_fn(|i| (w >> (B * i)) & ((1 << B) - 1))
}

/// The codes of a short tail, one at a time.
#[inline(always)]
fn one<const B: usize>(row: &[u8], i: usize) -> u8 {
    let bit = i * B;
    let low = row[bit / 8] as u32;
    let high = row.get(bit / 8 + 1).map_or(0, |x| *x as u32);
    (((low | high << 8) >> (bit % 8)) & ((1 << B) - 1)) as u8
}

#[inline(always)]
fn unpack_f32_body<const B: usize, const FMA: bool>(row: &[u8], out: &mut [f32]) {
    let n = out.len() / 8;
    let (head, tail) = out.split_at_mut(n * 8);
    for (bytes, o) in row.chunks_exact(B).zip(head.chunks_exact_mut(8)) {
        let c = eight::<B>(bytes);
        for i in 0..8 {
            o[i] = c[i] as i32 as f32;
        }
    }
    for (i, o) in tail.iter_mut().enumerate() {
        *o = one::<B>(row, n * 8 + i) as f32;
    }
}

/// `step * code + min` of a row in groups of `group` codes. `pairs` are (step, min).
#[inline(always)]
fn decode_groups_body<const B: usize, const FMA: bool>(
    row: &[u8],
    group: usize,
    pairs: &[(f32, f32)],
    out: &mut [f32],
) {
    if !group.is_multiple_of(8) {
        unpack_f32_body::<B, FMA>(row, out);
        for (out, (step, min)) in out.chunks_mut(group).zip(pairs) {
            for o in out {
                *o = step * *o + min;
            }
        }
        return;
    }
    for ((row, out), (step, min)) in row.chunks(group / 8 * B).zip(out.chunks_mut(group)).zip(pairs) {
        let n = out.len() / 8;
        let (head, tail) = out.split_at_mut(n * 8);
        for (bytes, o) in row.chunks_exact(B).zip(head.chunks_exact_mut(8)) {
            let c = eight::<B>(bytes);
            for i in 0..8 {
                o[i] = step * (c[i] as i32 as f32) + min;
            }
        }
        for (i, o) in tail.iter_mut().enumerate() {
            *o = step * one::<B>(row, n * 8 + i) as f32 + min;
        }
    }
}

/// `step * code + min` of a row with a pair a channel.
#[inline(always)]
fn decode_channels_body<const B: usize, const FMA: bool>(
    row: &[u8],
    step: &[f32],
    min: &[f32],
    out: &mut [f32],
) {
    let n = out.len() / 8;
    let (head, tail) = out.split_at_mut(n * 8);
    let pairs = step.chunks_exact(8).zip(min.chunks_exact(8));
    for ((bytes, o), (s, m)) in row.chunks_exact(B).zip(head.chunks_exact_mut(8)).zip(pairs) {
        let c = eight::<B>(bytes);
        for i in 0..8 {
            o[i] = s[i] * (c[i] as i32 as f32) + m[i];
        }
    }
    for (i, o) in tail.iter_mut().enumerate() {
        *o = step[n * 8 + i] * one::<B>(row, n * 8 + i) as f32 + min[n * 8 + i];
    }
}

#[inline(always)]
fn unpack_u8_body<const B: usize, const FMA: bool>(row: &[u8], out: &mut [u8]) {
    let n = out.len() / 8;
    let (head, tail) = out.split_at_mut(n * 8);
    for (bytes, o) in row.chunks_exact(B).zip(head.chunks_exact_mut(8)) {
        let c = eight::<B>(bytes);
        for i in 0..8 {
            o[i] = c[i] as u8;
        }
    }
    for (i, o) in tail.iter_mut().enumerate() {
        *o = one::<B>(row, n * 8 + i);
    }
}

#[inline(always)]
fn pack_body<const B: usize, const FMA: bool>(codes: &[u8], row: &mut [u8]) {
    let n = codes.len() / 8;
    let (head, tail) = row.split_at_mut(n * B);
    for (c, bytes) in codes.chunks_exact(8).zip(head.chunks_exact_mut(B)) {
        if B == 8 {
            bytes.copy_from_slice(c);
        } else {
            let mut w = 0u32;
            for (i, c) in c.iter().enumerate() {
                w |= (*c as u32) << (B * i);
            }
            bytes.copy_from_slice(&w.to_le_bytes()[..B]);
        }
    }
    tail.fill(0);
    for (i, c) in codes[n * 8..].iter().enumerate() {
        let bit = i * B;
        let w = (*c as u32) << (bit % 8);
        tail[bit / 8] |= w as u8;
        if bit % 8 + B > 8 {
            tail[bit / 8 + 1] |= (w >> 8) as u8;
        }
    }
}

dispatch! { fn decode_groups_b<const B: usize>(row: &[u8], group: usize, pairs: &[(f32, f32)], out: &mut [f32]) = decode_groups_body; }
dispatch! { fn decode_channels_b<const B: usize>(row: &[u8], step: &[f32], min: &[f32], out: &mut [f32]) = decode_channels_body; }
dispatch! { fn unpack_u8_b<const B: usize>(row: &[u8], out: &mut [u8]) = unpack_u8_body; }
dispatch! { fn pack_b<const B: usize>(codes: &[u8], row: &mut [u8]) = pack_body; }

/// Decodes one row of per-token groups: `step * code + min`, both operations rounded. `pairs` are (step, min).
#[inline]
pub(crate) fn decode_groups(
    isa: Isa,
    bits: usize,
    row: &[u8],
    group: usize,
    pairs: &[(f32, f32)],
    out: &mut [f32],
) {
    match bits {
        1 => decode_groups_b::<1>(isa, row, group, pairs, out),
        2 => decode_groups_b::<2>(isa, row, group, pairs, out),
        3 => decode_groups_b::<3>(isa, row, group, pairs, out),
        4 => decode_groups_b::<4>(isa, row, group, pairs, out),
        _ => decode_groups_b::<8>(isa, row, group, pairs, out),
    }
}

/// Decodes one row of per-channel groups: `step * code + min` with a pair a channel, both operations rounded.
#[inline]
pub(crate) fn decode_channels(isa: Isa, bits: usize, row: &[u8], step: &[f32], min: &[f32], out: &mut [f32]) {
    match bits {
        1 => decode_channels_b::<1>(isa, row, step, min, out),
        2 => decode_channels_b::<2>(isa, row, step, min, out),
        3 => decode_channels_b::<3>(isa, row, step, min, out),
        4 => decode_channels_b::<4>(isa, row, step, min, out),
        _ => decode_channels_b::<8>(isa, row, step, min, out),
    }
}

/// Unpacks one row of codes to bytes.
#[inline]
pub(crate) fn unpack_u8(isa: Isa, bits: usize, row: &[u8], out: &mut [u8]) {
    match bits {
        1 => unpack_u8_b::<1>(isa, row, out),
        2 => unpack_u8_b::<2>(isa, row, out),
        3 => unpack_u8_b::<3>(isa, row, out),
        4 => unpack_u8_b::<4>(isa, row, out),
        _ => unpack_u8_b::<8>(isa, row, out),
    }
}

/// Packs one row of codes (each below `2^bits`) into exactly `row_bytes(bits, codes.len())` bytes.
#[inline]
pub(crate) fn pack_row(isa: Isa, bits: usize, codes: &[u8], row: &mut [u8]) {
    match bits {
        1 => pack_b::<1>(isa, codes, row),
        2 => pack_b::<2>(isa, codes, row),
        3 => pack_b::<3>(isa, codes, row),
        4 => pack_b::<4>(isa, codes, row),
        _ => pack_b::<8>(isa, codes, row),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::row_bytes;

    #[test]
    fn rows_are_dense_little_endian_bit_streams_on_every_level() {
        let mut seed = 7u32;
        for bits in [1usize, 2, 3, 4, 8] {
            for n in [1usize, 5, 8, 16, 31, 64, 80, 100, 128] {
                let codes: Vec<u8> = (0..n)
                    .map(|_| {
                        seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
                        (seed >> 13) as u8 & ((1u16 << bits) - 1) as u8
                    })
                    .collect();
                let mut want = vec![0u8; row_bytes(bits, n)];
                for (i, c) in codes.iter().enumerate() {
                    for b in 0..bits {
                        let at = i * bits + b;
                        want[at / 8] |= (c >> b & 1) << (at % 8);
                    }
                }
                for &isa in Isa::available() {
                    let mut row = vec![0xffu8; want.len()];
                    pack_row(isa, bits, &codes, &mut row);
                    assert_eq!(row, want, "{bits} bits, {n} codes, {isa:?}");
                    let (mut f, mut u) = (vec![0f32; n], vec![0u8; n]);
                    unpack_u8(isa, bits, &row, &mut u);
                    assert_eq!(u, codes);
                    let step: Vec<f32> = (0..n).map(|i| 0.1 + i as f32).collect();
                    let min: Vec<f32> = (0..n).map(|i| 0.3 - i as f32).collect();
                    decode_channels(isa, bits, &row, &step, &min, &mut f);
                    assert!((0..n).all(|i| f[i] == step[i] * codes[i] as f32 + min[i]), "{bits} {n} {isa:?}");
                    for group in [2, 5, 8, 24, 32, n.max(2)] {
                        let pairs: Vec<(f32, f32)> = step.iter().copied().zip(min.iter().copied()).collect();
                        decode_groups(isa, bits, &row, group, &pairs[..n.div_ceil(group)], &mut f);
                        let want = |i: usize| step[i / group] * codes[i] as f32 + min[i / group];
                        assert!((0..n).all(|i| f[i] == want(i)), "{bits} {n} {group} {isa:?}");
                    }
                }
            }
        }
    }
}

//! Where every bit of a page lies, in both orders, and conversion between them.
//!
//! **Row order** is a dense bit stream a token, low bits first; pairs are little-endian words, step in the low
//! half, in the order `[token][group]` or `[token group][channel]`:
//!
//! ```text
//! 4 bits, D = 128    byte 0   byte 1   ..  byte 63
//! token 0            c1|c0    c3|c2    ..  c127|c126        (high nibble | low nibble)
//! token 1            c1|c0    ..                            64 bytes further
//! ```
//!
//! **Fragment order** stores what a lane of a warp feeds to a tensor core as operand A. Keys are taken as a matrix
//! of 64 tokens (rows) by D channels (columns), values transposed, as D channels by 64 tokens. A 16 x 16 block of
//! it is one `m16n8k16` fragment: lane `4g + t` holds rows g and g + 8 (`half`), columns 2t, 2t+1, 2t+8, 2t+9. A
//! lane's 32-bit words are numbered; word w lies in the 16-byte vector w/4, and vectors are stored lane after
//! lane, so that a warp reads 512 contiguous bytes at a time:
//!
//! ```text
//! one word at 4 bits:   byte 3     byte 2     byte 1     byte 0
//!   column                2t+9       2t+1       2t+8       2t
//!   row (high|low)      g+8 | g    g+8 | g    g+8 | g    g+8 | g
//!
//! vectors:   |lane 0: words 0-3|lane 1: words 0-3| .. |lane 31: words 0-3|   512 bytes
//!            |lane 0: words 4-7|lane 1: words 4-7| ..
//! rest:      the last N mod 4 words of a lane, 128 bytes (32 lanes) each
//! ```
//!
//! Words of a lane, for the block of 16 rows `mt` and of 16 columns `kb` (NB blocks of columns), and bits inside
//! a word, for byte b:
//!
//! | format | word | bits of byte b |
//! |---|---|---|
//! | 8 bits | `2 (mt NB + kb) + half` | all |
//! | 4 bits | `mt NB + kb` | `4 half ..` |
//! | 2 bits | `(mt/2) NB + kb` | `2f ..`, f = 2 (mt mod 2) + half |
//! | 1 bit | `(mt/4) NB + kb` | `f`, f = 2 (mt mod 4) + half |
//! | 3 bits | `w = 3 ((mt/4) NB + kb)`, f as at 1 bit | f < 6: word w + f/2, bits `3 (f mod 2) ..`; f = 6, 7: the high two bits at 6 of word w + f - 6, the low bit at f of word w + 2 |
//! | FP8 | as 8 bits, bytes 0-3 hold columns 2t, 2t+1, 2t+8, 2t+9 | all |
//! | F16, BF16 | `4 (mt NB + kb) + 2 (column half) + half` | low half = even column |

use super::{Operand, OperandLayout, PageLayout, TILE};
use crate::error::{Error, Result};
use crate::format::{Axis, Bits, Format};

/// Channels of a head that a conversion takes at most: far more than a cache does, and no size overflows.
const MAX_DIM: usize = 1 << 20;

/// One of the two orders of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// Rows of tokens: this crate's CPU backend, interchange, exported pages.
    Row,
    /// Tensor-core fragments: CUDA.
    Fragment,
}

/// Where bit `bit` of the code of `(token, channel)` lies in an operand's codes section: (byte, bit of the byte).
///
/// `at` is the operand's geometry in a page of this format; `token` < 64, `channel` < `at.dim`, `bit` <
/// [`Format::code_bits`], which debug builds assert.
pub fn code_bit(
    format: &Format,
    operand: Operand,
    at: &OperandLayout,
    order: Order,
    token: usize,
    channel: usize,
    bit: usize,
) -> (usize, usize) {
    debug_assert!(token < TILE && channel < at.dim && bit < format.code_bits());
    if order == Order::Row {
        let stream = channel * format.code_bits() + bit;
        return (token * at.row_bytes + stream / 8, stream % 8);
    }
    let (row, column, columns) = match operand {
        Operand::Key => (token, channel, at.dim),
        Operand::Value => (channel, token, TILE),
    };
    let nb = columns / 16;
    let (mt, half, g) = (row / 16, row / 8 % 2, row % 8);
    let (kb, x) = (column / 16, column % 16);
    let t = x / 2 % 4;
    // Which of the lane's four columns: 2t, 2t+8, 2t+1, 2t+9.
    let b = x % 2 * 2 + x / 8;
    let (word, place) = match format {
        Format::F16 | Format::Bf16 => (4 * (mt * nb + kb) + 2 * (x / 8) + half, 16 * (x % 2) + bit),
        // The conversion instructions want neighbouring columns in neighbouring bytes.
        Format::Fp8(_) => (2 * (mt * nb + kb) + half, 8 * (x % 2 + x / 8 * 2) + bit),
        Format::Affine(a) => {
            let f = 2 * (mt % 4) + half;
            match a.bits {
                Bits::B8 => (2 * (mt * nb + kb) + half, 8 * b + bit),
                Bits::B4 => (mt * nb + kb, 8 * b + 4 * half + bit),
                Bits::B2 => (mt / 2 * nb + kb, 8 * b + 2 * (f % 4) + bit),
                Bits::B1 => (mt / 4 * nb + kb, 8 * b + f),
                Bits::B3 => {
                    let w = 3 * (mt / 4 * nb + kb);
                    match (f, bit) {
                        (0..6, _) => (w + f / 2, 8 * b + 3 * (f % 2) + bit),
                        (_, 0) => (w + 2, 8 * b + f),
                        _ => (w + f - 6, 8 * b + 6 + bit - 1),
                    }
                }
            }
        }
    };
    let byte = word_byte(at.code_bytes / 128, 4 * g + t, word) + place / 8;
    (byte, place % 8)
}

/// First byte of a lane's word, of `words` a lane.
fn word_byte(words: usize, lane: usize, word: usize) -> usize {
    let vectors = words / 4;
    if word < 4 * vectors {
        word / 4 * 512 + lane * 16 + word % 4 * 4
    } else {
        vectors * 512 + (word - 4 * vectors) * 128 + lane * 4
    }
}

/// Where the pair (or FP8 scale) of `(token, channel)` lies in an operand's pairs section: first bytes of its two
/// 16-bit halves. Of a pair they are step and min, of an f32 scale the low and the high half. `None` if the
/// page holds none.
pub fn pair_bytes(
    format: &Format,
    operand: Operand,
    at: &OperandLayout,
    order: Order,
    token: usize,
    channel: usize,
) -> Option<[usize; 2]> {
    debug_assert!(token < TILE && channel < at.dim);
    if at.pair_count == 0 {
        return None;
    }
    let d = at.dim;
    let (group, per_channel) = match format {
        Format::Affine(a) if a.axis == Axis::PerChannel => (a.group, true),
        Format::Affine(a) => (a.group, false),
        _ => (d, false),
    };
    let word = |index: usize| Some([4 * index, 4 * index + 2]);
    match (per_channel, order, operand) {
        (true, Order::Row, _) => word(token / group * d + channel),
        (false, Order::Row, _) => word(token * d.div_ceil(group) + channel / group),
        // Tokens 8 apart side by side: what one lane's accumulator rows need.
        (false, Order::Fragment, _) => {
            word((token % 8 * d.div_ceil(group) + channel / group) * 8 + token / 8)
        }
        (true, Order::Fragment, Operand::Key) => {
            // Steps, then mins; a lane's channels side by side.
            let x = channel % 16;
            let element = x / 2 % 4 * (d / 4) + channel / 16 * 4 + x / 8 * 2 + x % 2;
            let first = token / group * 4 * d;
            Some([first + 2 * element, first + 2 * (d + element)])
        }
        (true, Order::Fragment, Operand::Value) => {
            word(token / group * d + channel % 8 * (d / 8) + channel / 8)
        }
    }
}

/// Rewrites a page from one order to the other. Sections keep their places; padding becomes 0.
///
/// # Errors
/// [`Error::Length`] if a slice is not one page; [`Error::Unsupported`] for a layout that is not these formats' own, and for
/// head dims that are no multiple of 16, which fragment order does not have.
pub fn convert_page(
    key: &Format,
    value: &Format,
    layout: &PageLayout,
    from: Order,
    page: &[u8],
    to: Order,
    out: &mut [u8],
) -> Result<()> {
    for (what, len) in [("page", page.len()), ("converted page", out.len())] {
        if len != layout.page_bytes {
            return Err(Error::Length { what, expected: layout.page_bytes, got: len });
        }
    }
    let whole = |d: usize| d.is_multiple_of(16) && d <= MAX_DIM;
    let groups = |f: &Format| f.as_affine().is_none_or(|a| a.group > 0);
    let (k, v) = (layout.key.dim, layout.value.dim);
    if !(whole(k) && whole(v) && groups(key) && groups(value)) || *layout != PageLayout::new(key, value, k, v)
    {
        return Err(Error::Unsupported {
            what: "page layout",
            got: format!("that of heads of {k} and {v} channels"),
            why: "a page has the one that PageLayout::new makes for these formats, and head dims are multiples of 16"
                .into(),
        });
    }
    let operands = [(key, Operand::Key, &layout.key), (value, Operand::Value, &layout.value)];
    out.fill(0);
    for (format, operand, at) in operands {
        let codes = at.codes..at.codes + at.code_bytes;
        convert_codes(format, operand, at, (from, &page[codes.clone()]), (to, &mut out[codes]));
        let pairs = at.pairs..at.pairs + at.pair_bytes;
        convert_pairs(format, operand, at, (from, &page[pairs.clone()]), (to, &mut out[pairs]));
    }
    Ok(())
}

fn convert_codes(
    format: &Format,
    operand: Operand,
    at: &OperandLayout,
    (from, source): (Order, &[u8]),
    (to, out): (Order, &mut [u8]),
) {
    // Runs of bits that stay together in both orders; a 3-bit code is taken apart.
    let bits = format.code_bits();
    let run = if bits == 3 { 1 } else { bits.min(8) };
    let mask = ((1u16 << run) - 1) as u8;
    for token in 0..TILE {
        for channel in 0..at.dim {
            for bit in (0..bits).step_by(run) {
                let (a, i) = code_bit(format, operand, at, from, token, channel, bit);
                let (b, j) = code_bit(format, operand, at, to, token, channel, bit);
                out[b] |= (source[a] >> i & mask) << j;
            }
        }
    }
}

fn convert_pairs(
    format: &Format,
    operand: Operand,
    at: &OperandLayout,
    (from, source): (Order, &[u8]),
    (to, out): (Order, &mut [u8]),
) {
    // One element of every group.
    let (tokens, channels) = match format {
        Format::Affine(a) if a.axis == Axis::PerChannel => (a.group, 1),
        Format::Affine(a) => (1, a.group),
        _ => (1, at.dim),
    };
    for token in (0..TILE).step_by(tokens) {
        for channel in (0..at.dim).step_by(channels) {
            let a = pair_bytes(format, operand, at, from, token, channel);
            let b = pair_bytes(format, operand, at, to, token, channel);
            for (a, b) in a.into_iter().flatten().zip(b.into_iter().flatten()) {
                out[b..b + 2].copy_from_slice(&source[a..a + 2]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Affine, Fp8, Granularity};
    use crate::layout::padded_rows;

    fn formats(dim: usize) -> Vec<Format> {
        let mut all: Vec<Format> = vec![Format::F16, Format::Bf16];
        for g in [Granularity::Tensor, Granularity::TokenHead] {
            all.extend([Format::Fp8(Fp8::e4m3(g)), Format::Fp8(Fp8::e5m2(g))]);
        }
        for bits in Bits::ALL {
            for affine in [
                Affine::per_token(bits, 32),
                Affine::per_token(bits, dim),
                Affine::per_channel(bits, 32),
                Affine::per_channel(bits, 64),
            ] {
                all.push(affine.into());
            }
        }
        all
    }

    fn operands(layout: &PageLayout) -> [(Operand, OperandLayout); 2] {
        [(Operand::Key, layout.key), (Operand::Value, layout.value)]
    }

    const DIMS: [usize; 6] = [16, 64, 80, 96, 128, 256];

    #[test]
    fn every_bit_has_a_place_of_its_own() {
        for dim in DIMS {
            for format in formats(dim) {
                let layout = PageLayout::new(&format, &format, dim, dim);
                for (operand, at) in operands(&layout) {
                    for order in [Order::Row, Order::Fragment] {
                        let mut seen = vec![0u8; at.code_bytes];
                        for (t, c) in (0..TILE).flat_map(|t| (0..dim).map(move |c| (t, c))) {
                            for bit in 0..format.code_bits() {
                                let (byte, i) = code_bit(&format, operand, &at, order, t, c, bit);
                                assert_eq!(
                                    seen[byte] >> i & 1,
                                    0,
                                    "{format:?} {operand:?} {order:?} {t} {c}"
                                );
                                seen[byte] |= 1 << i;
                            }
                        }
                        let mut pairs = vec![0u8; at.pair_bytes];
                        let mut places = std::collections::BTreeSet::new();
                        for (t, c) in (0..TILE).flat_map(|t| (0..dim).map(move |c| (t, c))) {
                            if let Some([a, b]) = pair_bytes(&format, operand, &at, order, t, c) {
                                places.insert((a, b));
                            }
                        }
                        assert_eq!(places.len(), at.pair_count, "{format:?} {operand:?} {order:?}");
                        for (a, b) in places {
                            for byte in [a, a + 1, b, b + 1] {
                                assert_eq!(pairs[byte], 0, "{format:?} {operand:?} {order:?}");
                                pairs[byte] = 1;
                            }
                        }
                        assert!(pairs.iter().all(|x| *x == 1));
                    }
                }
            }
        }
    }

    /// What a lane's words hold, told from the lane's side: register `i` of an `m16n8k16` A fragment has row
    /// `g + 8 (i mod 2)` and columns `2t + 8 (i / 2)` and the next. Returns the code a lane finds.
    fn lane_code(
        format: &Format,
        section: &[u8],
        lane: usize,
        block: (usize, usize, usize),
        i: usize,
        e: usize,
    ) -> u32 {
        let words = section.len() / 128;
        let word = |w: usize| {
            let vectors = words / 4;
            let at = if w / 4 < vectors {
                (w / 4 * 32 + lane) * 16 + w % 4 * 4
            } else {
                vectors * 512 + (w - vectors * 4) * 128 + lane * 4
            };
            u32::from_le_bytes(section[at..at + 4].try_into().unwrap())
        };
        let (mt, kb, nb) = block;
        let (half, high) = (i & 1, i >> 1);
        match format {
            Format::F16 | Format::Bf16 => word(4 * (mt * nb + kb) + i) >> (16 * e) & 0xffff,
            // cvt.f16x2.e4m3x2 takes two neighbouring bytes: the low pair is a0 or a1, the high pair a2 or a3.
            Format::Fp8(_) => word(2 * (mt * nb + kb) + half) >> (16 * high + 8 * e) & 0xff,
            Format::Affine(a) => {
                // word & 0x00ff00ff: bytes 0 and 2 are the two elements of a0 or a1; the same of word >> 8 of a2 or a3.
                let byte = |w: usize| word(w) >> (8 * high + 16 * e) & 0xff;
                match a.bits {
                    Bits::B8 => byte(2 * (mt * nb + kb) + half),
                    Bits::B4 => byte(mt * nb + kb) >> (4 * half) & 15,
                    Bits::B2 => byte((mt / 2) * nb + kb) >> (4 * (mt & 1) + 2 * half) & 3,
                    Bits::B1 => byte((mt / 4) * nb + kb) >> (2 * (mt & 3) + half) & 1,
                    Bits::B3 => {
                        let w = 3 * ((mt / 4) * nb + kb);
                        let (w0, w1, w2) = (byte(w), byte(w + 1), byte(w + 2));
                        match 2 * (mt & 3) + half {
                            0 => w0 & 7,
                            1 => w0 >> 3 & 7,
                            2 => w1 & 7,
                            3 => w1 >> 3 & 7,
                            4 => w2 & 7,
                            5 => w2 >> 3 & 7,
                            6 => w0 >> 6 << 1 | w2 >> 6 & 1,
                            _ => w1 >> 6 << 1 | w2 >> 7,
                        }
                    }
                }
            }
        }
    }

    /// A code that tells its place well enough.
    fn mark(format: &Format, token: usize, channel: usize) -> u32 {
        let h = (token as u32 * 40503 + channel as u32 * 9973 + 77).wrapping_mul(2654435761) >> 11;
        h & ((1u32 << format.code_bits()) - 1)
    }

    fn row_page(format: &Format, operand: Operand, at: &OperandLayout, bytes: usize) -> Vec<u8> {
        let mut page = vec![0u8; bytes];
        for (t, c) in (0..TILE).flat_map(|t| (0..at.dim).map(move |c| (t, c))) {
            for bit in 0..format.code_bits() {
                let (byte, i) = code_bit(format, operand, at, Order::Row, t, c, bit);
                page[at.codes + byte] |= ((mark(format, t, c) >> bit & 1) as u8) << i;
            }
        }
        for (i, b) in page[at.pairs..at.pairs + at.pair_bytes].iter_mut().enumerate() {
            *b = (i * 31 + i / 256 * 7) as u8;
        }
        page
    }

    #[test]
    fn lanes_find_their_fragments_and_padding_is_zero() {
        for dim in DIMS {
            for format in formats(dim) {
                let layout = PageLayout::new(&format, &format, dim, dim);
                for (operand, at) in operands(&layout) {
                    let page = row_page(&format, operand, &at, layout.page_bytes);
                    let mut out = vec![0xffu8; page.len()];
                    convert_page(&format, &format, &layout, Order::Row, &page, Order::Fragment, &mut out)
                        .unwrap();
                    let section = &out[at.codes..at.codes + at.code_bytes];
                    let rows = padded_rows(&format, operand, dim);
                    let columns = if operand == Operand::Key { dim } else { TILE };
                    for (mt, kb) in (0..rows / 16).flat_map(|m| (0..columns / 16).map(move |k| (m, k))) {
                        for (lane, i, e) in
                            (0..32).flat_map(|l| (0..4).flat_map(move |i| [(l, i, 0), (l, i, 1)]))
                        {
                            let row = mt * 16 + lane / 4 + 8 * (i & 1);
                            let column = kb * 16 + lane % 4 * 2 + 8 * (i >> 1) + e;
                            let (t, c) = if operand == Operand::Key { (row, column) } else { (column, row) };
                            let want = if c < dim { mark(&format, t, c) } else { 0 };
                            let got = lane_code(&format, section, lane, (mt, kb, columns / 16), i, e);
                            assert_eq!(got, want, "{format:?} {operand:?} token {t} channel {c}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn pairs_lie_where_the_kernels_read_them() {
        let dim = 128;
        for format in formats(dim) {
            let layout = PageLayout::new(&format, &format, dim, dim);
            for (operand, at) in operands(&layout) {
                let page = row_page(&format, operand, &at, layout.page_bytes);
                let mut out = vec![0u8; page.len()];
                convert_page(&format, &format, &layout, Order::Row, &page, Order::Fragment, &mut out)
                    .unwrap();
                let (old, new) = (&page[at.pairs..], &out[at.pairs..]);
                let half = |x: &[u8], at: usize| u16::from_le_bytes([x[at], x[at + 1]]);
                match &format {
                    Format::Affine(a) if a.axis == Axis::PerChannel => {
                        for (g, c) in (0..TILE / a.group).flat_map(|g| (0..dim).map(move |c| (g, c))) {
                            let (step, min) =
                                (half(old, (g * dim + c) * 4), half(old, (g * dim + c) * 4 + 2));
                            let (i, x) = (c >> 4, c & 15);
                            let (s, m) = match operand {
                                // step[D], then min[D]
                                Operand::Key => {
                                    let e = ((x >> 1) & 3) * dim / 4 + 4 * i + 2 * (x >> 3) + (x & 1);
                                    (g * dim * 4 + e * 2, g * dim * 4 + dim * 2 + e * 2)
                                }
                                Operand::Value => {
                                    let w = (g * dim + (c & 7) * dim / 8 + (c >> 3)) * 4;
                                    (w, w + 2)
                                }
                            };
                            assert_eq!((half(new, s), half(new, m)), (step, min));
                        }
                    }
                    _ if at.pair_count > 0 => {
                        let groups = at.pair_count / TILE;
                        for (r, j) in (0..TILE).flat_map(|r| (0..groups).map(move |j| (r, j))) {
                            let place = ((r & 7) * groups + j) * 32 + (r >> 3) * 4;
                            assert_eq!(new[place..place + 4], old[(r * groups + j) * 4..][..4]);
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn there_and_back_is_the_same_page() {
        for (key_dim, value_dim) in [(128, 128), (80, 96), (64, 48), (256, 16)] {
            for key in formats(key_dim) {
                for value in formats(value_dim).into_iter().step_by(3) {
                    let layout = PageLayout::new(&key, &value, key_dim, value_dim);
                    let mut page = row_page(&key, Operand::Key, &layout.key, layout.page_bytes);
                    let values = row_page(&value, Operand::Value, &layout.value, layout.page_bytes);
                    page.iter_mut().zip(values).for_each(|(a, b)| *a |= b);
                    let (mut there, mut back) = (vec![1u8; page.len()], vec![1u8; page.len()]);
                    let go = |a: Order, x: &[u8], b: Order, y: &mut [u8]| {
                        convert_page(&key, &value, &layout, a, x, b, y).unwrap();
                    };
                    go(Order::Row, &page, Order::Fragment, &mut there);
                    go(Order::Fragment, &there, Order::Row, &mut back);
                    assert!(page == back, "{key:?} {value:?}");
                    go(Order::Row, &page, Order::Row, &mut back);
                    assert!(page == back, "{key:?} {value:?}");
                }
            }
        }
    }

    #[test]
    fn pages_of_another_size_or_shape_are_refused() {
        let format = Affine::per_token(Bits::B4, 32).into();
        let layout = PageLayout::new(&format, &format, 64, 64);
        let (page, mut out) = (vec![0u8; layout.page_bytes], vec![0u8; layout.page_bytes - 1]);
        let go =
            |out: &mut [u8]| convert_page(&format, &format, &layout, Order::Row, &page, Order::Fragment, out);
        assert!(matches!(go(&mut out), Err(Error::Length { .. })));
        let odd = PageLayout::new(&format, &format, 40, 64);
        let (page, mut out) = (vec![0u8; odd.page_bytes], vec![0u8; odd.page_bytes]);
        let r = convert_page(&format, &format, &odd, Order::Row, &page, Order::Fragment, &mut out);
        assert!(matches!(r, Err(Error::Unsupported { .. })));
    }
}

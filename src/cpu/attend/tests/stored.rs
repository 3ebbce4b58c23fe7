//! Pages, windows and sinks made by hand from random codes and pairs.

use super::*;

/// The stored bytes of a case and what they decode as.
pub(super) struct Stored {
    pub(super) layout: PageLayout,
    pub(super) pages: Vec<u8>,
    pub(super) blocks: Vec<i32>,
    pub(super) sinks: [Vec<f32>; 2],
    pub(super) window: [Vec<f32>; 2],
    pub(super) window_rows: usize,
    pub(super) fresh: [Vec<f32>; 2],
    pub(super) mean: Vec<f16>,
    pub(super) scales: (f32, f32),
    /// `[token][head][dim]`
    pub(super) k: Vec<f64>,
    pub(super) v: Vec<f64>,
    pub(super) q: Vec<f32>,
    pub(super) sink_logits: Vec<f32>,
}

fn put_bits(bytes: &mut [u8], bit: usize, n: usize, code: u32) {
    for i in 0..n {
        let at = bit + i;
        bytes[at / 8] = bytes[at / 8] & !(1 << (at % 8)) | (((code >> i & 1) as u8) << (at % 8));
    }
}

/// One f32 that the dtype holds exactly.
fn round(dtype: Dtype, x: f64) -> f32 {
    match dtype {
        Dtype::F32 => x as f32,
        Dtype::F16 => f16::from_f64(x).to_f32(),
        Dtype::Bf16 => bf16::from_f64(x).to_f32(),
    }
}

fn fp8_value(kind: Fp8Kind, byte: u8) -> f64 {
    let (m_bits, bias) = if kind == Fp8Kind::E4M3 { (3, 7) } else { (2, 15) };
    let (e, m) =
        (((byte & 0x7f) >> m_bits) as i32, (byte & ((1 << m_bits) - 1)) as f64 / (1 << m_bits) as f64);
    let x = if e == 0 { m * 2f64.powi(1 - bias) } else { (1.0 + m) * 2f64.powi(e - bias) };
    if byte & 0x80 != 0 { -x } else { x }
}

/// Fills one operand of one page and decodes it: `[token][dim]`, rotated as stored.
fn fill_operand(
    rng: &mut Rng,
    page: &mut [u8],
    f: &Format,
    at: &crate::layout::OperandLayout,
    scale: f32,
    poison: bool,
) -> Vec<f64> {
    let dim = at.dim;
    let mut x = vec![0f64; TILE * dim];
    match f {
        Format::F16 | Format::Bf16 => {
            for t in 0..TILE {
                for c in 0..dim {
                    let bad = poison && rng.below(20_000) == 0;
                    let value = if bad { f64::NAN } else { rng.unit() };
                    let (bits, value) = if matches!(f, Format::F16) {
                        (f16::from_f64(value).to_bits(), f16::from_f64(value).to_f64())
                    } else {
                        (bf16::from_f64(value).to_bits(), bf16::from_f64(value).to_f64())
                    };
                    page[at.codes + t * dim * 2 + c * 2..][..2].copy_from_slice(&bits.to_le_bytes());
                    x[t * dim + c] = value;
                }
            }
        }
        Format::Fp8(p) => {
            for t in 0..TILE {
                let factor = if p.granularity == Granularity::TokenHead {
                    let s = 0.003 + 0.002 * rng.unit() as f32;
                    page[at.pairs + t * 4..][..4].copy_from_slice(&s.to_le_bytes());
                    s
                } else {
                    scale
                };
                for c in 0..dim {
                    // Large exponents are left out: they would drown the rest.
                    let mut byte = rng.next() as u8;
                    if p.kind == Fp8Kind::E5M2 && byte & 0x7f > 0x56 || byte & 0x7f == 0x7f {
                        byte &= 0x8f;
                    }
                    let bad = poison && rng.below(20_000) == 0;
                    page[at.codes + t * dim + c] = if bad { 0x7f } else { byte };
                    x[t * dim + c] = if bad { f64::NAN } else { factor as f64 * fp8_value(p.kind, byte) };
                }
            }
        }
        Format::Affine(a) => {
            let (bits, most) = (a.bits.get(), a.bits.max_code() as u32);
            let per_token = a.axis == Axis::PerToken;
            let groups = if per_token { dim.div_ceil(a.group) } else { TILE / a.group };
            let count = if per_token { TILE * groups } else { groups * dim };
            let mut pairs = Vec::new();
            for i in 0..count {
                let mut step = f16::from_f64((2.0 + 0.5 * rng.unit()) / most as f64);
                let min = f16::from_f64(-1.0 + 0.3 * rng.unit());
                if poison && rng.below(1500) == 0 {
                    step = f16::NAN;
                }
                page[at.pairs + i * 4..][..2].copy_from_slice(&step.to_bits().to_le_bytes());
                page[at.pairs + i * 4 + 2..][..2].copy_from_slice(&min.to_bits().to_le_bytes());
                pairs.push((step.to_f64(), min.to_f64()));
            }
            let row_bits = (dim * bits).div_ceil(8) * 8;
            for t in 0..TILE {
                for c in 0..dim {
                    let code = rng.next() as u32 & most;
                    put_bits(&mut page[at.codes..], t * row_bits + c * bits, bits, code);
                    let i = if per_token { t * groups + c / a.group } else { t / a.group * dim + c };
                    x[t * dim + c] = pairs[i].0 * code as f64 + pairs[i].1;
                }
            }
        }
        #[allow(unreachable_patterns)]
        _ => unreachable!(),
    }
    x
}

/// Makes what lies beyond `tokens` and below `sinks` NaN where a token's data are its own.
fn spoil(page: &mut [u8], f: &Format, at: &crate::layout::OperandLayout, token: usize) {
    match f {
        Format::Affine(a) if a.axis == Axis::PerToken => {
            let n = at.dim.div_ceil(a.group) * 4;
            page[at.pairs + token * n..][..n].fill(0xff);
        }
        Format::Affine(_) => {}
        Format::Fp8(_) => page[at.codes + token * at.row_bytes..][..at.row_bytes].fill(0xff),
        _ => page[at.codes + token * at.row_bytes..][..at.row_bytes].fill(0xff),
    }
}

/// Hadamard rotation straight from the matrix: entry (i, j) is the parity of `i & j`.
fn rotate(x: &mut [f64], block: usize) {
    for b in x.chunks_exact_mut(block) {
        let old = b.to_vec();
        for (i, o) in b.iter_mut().enumerate() {
            let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            *o = old.iter().enumerate().map(|(j, x)| sign(j) * x).sum::<f64>() / (block as f64).sqrt();
        }
    }
}

pub(super) fn store(case: &Case) -> Stored {
    let mut rng = Rng(case.seed);
    let layout = PageLayout::new(&case.key, &case.value, case.key_dim, case.value_dim);
    let tiles = case.packed.div_ceil(TILE);
    // Blocks in another order than tiles, with one unused in front.
    let blocks: Vec<i32> = (0..tiles).map(|i| (tiles - i) as i32).collect();
    let mut pages = vec![0u8; (tiles + 1) * case.kv_heads * layout.page_bytes];
    let total = case.len + case.fresh;
    let (kd, vd, h) = (case.key_dim, case.value_dim, case.kv_heads);
    let (mut k, mut v) = (vec![f64::NAN; total * h * kd], vec![f64::NAN; total * h * vd]);
    let scales = (0.0041f32, 0.0057f32);
    let mean: Vec<f16> = (0..h * kd).map(|_| f16::from_f64(2.0 * rng.unit())).collect();
    for (tile, block) in blocks.iter().enumerate() {
        for head in 0..h {
            let page = &mut pages[(*block as usize * h + head) * layout.page_bytes..][..layout.page_bytes];
            let mut pk = fill_operand(&mut rng, page, &case.key, &layout.key, scales.0, case.poison);
            let mut pv = fill_operand(&mut rng, page, &case.value, &layout.value, scales.1, case.poison);
            if let Some(b) = case.key.rotation() {
                pk.chunks_exact_mut(kd).for_each(|row| rotate(row, b));
            }
            if let Some(b) = case.value.rotation() {
                pv.chunks_exact_mut(vd).for_each(|row| rotate(row, b));
            }
            for t in 0..TILE {
                let token = tile * TILE + t;
                if token < case.sinks || token >= case.packed {
                    spoil(page, &case.key, &layout.key, t);
                    spoil(page, &case.value, &layout.value, t);
                    continue;
                }
                for c in 0..kd {
                    let m = if case.mean { mean[head * kd + c].to_f64() } else { 0.0 };
                    k[(token * h + head) * kd + c] = pk[t * kd + c] + m;
                }
                v[(token * h + head) * vd..][..vd].copy_from_slice(&pv[t * vd..][..vd]);
            }
        }
    }
    // Exact rows, head by head; slots that hold nothing are NaN.
    let window_rows = (case.len - case.packed + 7).next_multiple_of(16);
    let sinks = [vec![f32::NAN; h * 16 * kd], vec![f32::NAN; h * 16 * vd]];
    let window = [vec![f32::NAN; h * window_rows * kd], vec![f32::NAN; h * window_rows * vd]];
    let fresh = [vec![0f32; case.fresh * h * kd], vec![0f32; case.fresh * h * vd]];
    let mut s = Stored {
        layout,
        pages,
        blocks,
        sinks,
        window,
        window_rows,
        fresh,
        mean,
        scales,
        k,
        v,
        q: Vec::new(),
        sink_logits: Vec::new(),
    };
    for operand in 0..2 {
        let d = [kd, vd][operand];
        for head in 0..h {
            for token in 0..total {
                if token >= case.sinks && token < case.packed {
                    continue;
                }
                for c in 0..d {
                    let mut x = round(case.rows, rng.unit());
                    if case.poison && rng.below(20_000) == 0 {
                        x = if operand == 0 && rng.chance(80) { f32::NEG_INFINITY } else { f32::NAN };
                    }
                    let all = if operand == 0 { &mut s.k } else { &mut s.v };
                    all[(token * h + head) * d + c] = x as f64;
                    if token >= case.len {
                        s.fresh[operand][((token - case.len) * h + head) * d + c] = x;
                    } else if token < case.sinks {
                        s.sinks[operand][(head * 16 + token) * d + c] = x;
                    } else {
                        s.window[operand][(head * window_rows + token % window_rows) * d + c] = x;
                    }
                }
            }
        }
    }
    // The released prefix is not there any more.
    for b in &mut s.blocks[..case.first / TILE] {
        *b = -1;
    }
    s.q = (0..case.queries * h * case.group * kd).map(|_| (3.0 * rng.unit()) as f32).collect();
    s.sink_logits = (0..h * case.group).map(|_| (2.0 * rng.unit()) as f32).collect();
    s
}

//! Quantization of whole tensors, without a cache: codes and pairs as plain data.
//!
//! ```
//! use qkv::{Affine, Bits, Fit, TensorMut, TensorRef};
//! use qkv::quant::{dequantize, quantize};
//!
//! let x: Vec<f32> = (0..6 * 2 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
//! // 6 tokens, 2 heads, 64 channels; 4 bits, groups of 32 channels
//! let format = Affine::per_token(Bits::B4, 32).with_fit(Fit::MinMax);
//! let q = quantize(&TensorRef::thd(&x, [6, 2, 64])?, &format)?;
//! assert_eq!(q.packed().len(), 6 * 2 * 64 / 2);
//! assert_eq!(q.pairs().len(), 6 * 2 * 2);
//!
//! let mut y = vec![0f32; x.len()];
//! dequantize(&q, &mut TensorMut::thd(&mut y, [6, 2, 64])?)?;
//! assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 0.07));
//! # Ok::<(), qkv::Error>(())
//! ```

use crate::error::{Error, Result};
use crate::format::{Affine, Axis, Bits};
use crate::layout::row_bytes;
use crate::quant::affine::{self, MAX_GROUP, Pair};
use crate::quant::rows::RowsMut;
use crate::quant::{codes, columns, hadamard};
use crate::simd::Isa;
use crate::tensor::{TensorMut, TensorRef};
use rayon::prelude::*;

/// The (step, min) of every group.
///
/// Per token in the order `[token][head][group]`, per channel `[head][token group][channel]`.
#[derive(Debug, Clone, PartialEq)]
pub enum Pairs {
    /// Pairs made by [`quantize`], as a cache stores them.
    F16(Vec<Pair>),
    /// (step, min) given by the caller of [`quantize_with`].
    F32(Vec<(f32, f32)>),
}

impl Pairs {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Pairs::F16(p) => p.len(),
            Pairs::F32(p) => p.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All as (step, min) in f32, exact.
    pub fn to_f32(&self) -> Vec<(f32, f32)> {
        match self {
            Pairs::F16(p) => p.iter().map(|p| p.to_f32()).collect(),
            Pairs::F32(p) => p.clone(),
        }
    }

    #[inline]
    fn get(&self, index: usize) -> (f32, f32) {
        match self {
            Pairs::F16(p) => p[index].to_f32(),
            Pairs::F32(p) => p[index],
        }
    }
}

/// A quantized tensor `[tokens, heads, dim]`.
///
/// Codes are stored as rows `[token][head]`, each a bit stream of `dim` codes, low bits first, rounded up to
/// whole bytes: see [`pack`]. Groups never cross a head, nor, in a tensor with several batch rows, a batch row.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    plan: Plan,
    rotate: Option<usize>,
    packed: Vec<u8>,
    pairs: Pairs,
    clamped: usize,
}

/// Elements of a tensor at most: codes, pairs and bytes of that many have sizes that a `usize` counts.
pub(crate) const MAX_ELEMENTS: usize = isize::MAX as usize / 64;

/// Which element belongs to which pair.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Plan {
    dims: [usize; 3],
    batch_tokens: usize,
    bits: Bits,
    group: usize,
    axis: Axis,
}

impl Plan {
    fn new(dims: [usize; 3], batch_tokens: usize, bits: Bits, group: usize, axis: Axis) -> Result<Self> {
        let no = |why: String| Err(Error::Unsupported { what: "group", got: group.to_string(), why });
        let [t, h, d] = dims;
        if t == 0 || h == 0 || d == 0 {
            return Err(Error::Shape {
                what: "tensor",
                expected: "at least one token, head and channel".into(),
                got: format!("{dims:?}"),
            });
        }
        // A view with strides of 0 can claim more elements than any memory holds.
        if t.checked_mul(h).and_then(|n| n.checked_mul(d)).is_none_or(|n| n > MAX_ELEMENTS) {
            return Err(Error::Shape {
                what: "tensor",
                expected: format!("at most {MAX_ELEMENTS} elements"),
                got: format!("{dims:?}"),
            });
        }
        if !(2..=MAX_GROUP).contains(&group) {
            return no(format!("groups have 2 to {MAX_GROUP} elements"));
        }
        if axis == Axis::PerToken && group > d {
            return no(format!("it is larger than the head ({d} channels); use {d} or less"));
        }
        if batch_tokens == 0 || t % batch_tokens != 0 {
            return Err(Error::Shape {
                what: "tensor",
                expected: format!("a multiple of {batch_tokens} tokens"),
                got: format!("{dims:?}"),
            });
        }
        Ok(Self { dims, batch_tokens, bits, group, axis })
    }

    fn row_bytes(&self) -> usize {
        row_bytes(self.bits.get(), self.dims[2])
    }

    /// Groups in a row, or token groups in the tensor.
    fn groups(&self) -> usize {
        match self.axis {
            Axis::PerToken => self.dims[2].div_ceil(self.group),
            Axis::PerChannel => self.dims[0] / self.batch_tokens * self.batch_tokens.div_ceil(self.group),
        }
    }

    fn pair_count(&self) -> usize {
        let [t, h, d] = self.dims;
        match self.axis {
            Axis::PerToken => t * h * self.groups(),
            Axis::PerChannel => h * self.groups() * d,
        }
    }

    /// First token and tokens of every token group.
    fn token_groups(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        (0..self.dims[0]).step_by(self.batch_tokens).flat_map(move |b| {
            (0..self.batch_tokens)
                .step_by(self.group)
                .map(move |s| (b + s, self.group.min(self.batch_tokens - s)))
        })
    }
}

impl Quantized {
    /// A quantized tensor from codes `[token][head][channel]` (one a byte) and f32 pairs in the order of
    /// [`Pairs`]. All tokens are one sequence.
    ///
    /// # Errors
    /// [`Error::Length`] for the wrong number of codes or pairs, [`Error::OutOfRange`] for a code of more than
    /// `bits` bits, [`Error::Unsupported`] for a group outside 2..=256 or larger than a head,
    /// [`Error::Shape`] for an empty shape.
    pub fn from_codes(
        dims: [usize; 3],
        bits: Bits,
        group: usize,
        axis: Axis,
        codes: &[u8],
        pairs: &[(f32, f32)],
    ) -> Result<Self> {
        let plan = Plan::new(dims, dims[0].max(1), bits, group, axis)?;
        check_len("codes", dims[0] * dims[1] * dims[2], codes.len())?;
        check_len("pairs", plan.pair_count(), pairs.len())?;
        check_codes(codes, bits)?;
        let isa = Isa::detect();
        let mut packed = vec![0u8; dims[0] * dims[1] * plan.row_bytes()];
        for (c, row) in codes.chunks_exact(dims[2]).zip(packed.chunks_exact_mut(plan.row_bytes())) {
            codes::pack_row(isa, bits.get(), c, row);
        }
        Ok(Self { plan, rotate: None, packed, pairs: Pairs::F32(pairs.to_vec()), clamped: 0 })
    }

    /// `[tokens, heads, dim]`.
    pub fn dims(&self) -> [usize; 3] {
        self.plan.dims
    }

    /// Bits of a code.
    pub fn bits(&self) -> Bits {
        self.plan.bits
    }

    /// Elements that share a pair.
    pub fn group(&self) -> usize {
        self.plan.group
    }

    /// Which elements share a pair.
    pub fn axis(&self) -> Axis {
        self.plan.axis
    }

    /// The rotation whose inverse [`dequantize`] applies.
    pub fn rotation(&self) -> Option<usize> {
        self.rotate
    }

    /// The packed codes: rows `[token][head]`, each in the bit order of [`pack`].
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// The pairs.
    pub fn pairs(&self) -> &Pairs {
        &self.pairs
    }

    /// Finite elements that were clamped to ±65504.
    pub fn clamped(&self) -> usize {
        self.clamped
    }

    /// Bytes of codes and pairs together.
    pub fn bytes(&self) -> usize {
        let pair = match self.pairs {
            Pairs::F16(_) => 4,
            Pairs::F32(_) => 8,
        };
        self.packed.len() + pair * self.pairs.len()
    }

    /// The codes, one a byte, `[token][head][channel]`.
    pub fn codes(&self) -> Vec<u8> {
        let [t, h, d] = self.plan.dims;
        let isa = Isa::detect();
        let mut out = vec![0u8; t * h * d];
        for (row, c) in self.packed.chunks_exact(self.plan.row_bytes()).zip(out.chunks_exact_mut(d)) {
            codes::unpack_u8(isa, self.plan.bits.get(), row, c);
        }
        out
    }
}

fn check_len(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Length { what, expected, got }) }
}

fn check_codes(codes: &[u8], bits: Bits) -> Result<()> {
    match codes.iter().find(|c| **c > bits.max_code()) {
        Some(c) => {
            Err(Error::OutOfRange { what: "code", got: *c as i64, limit: bits.max_code() as usize + 1 })
        }
        None => Ok(()),
    }
}

/// Packs codes (one a byte) to a dense bit stream: code `i` takes bits `bits * i` to `bits * (i + 1)` of the
/// stream, and bit `n` of the stream is bit `n % 8` of byte `n / 8`. So codes lie low bits first; at 3 bits 32
/// codes fill three little-endian 32-bit words. The last byte's unused high bits are 0.
///
/// # Errors
/// [`Error::OutOfRange`] for a code that does not fit.
///
/// ```
/// use qkv::{Bits, quant::{pack, unpack}};
/// let codes = [1, 2, 3, 4, 5, 6, 7, 0, 1];
/// let bytes = pack(&codes, Bits::B3)?;
/// assert_eq!(bytes, [0b11_010_001, 0b0_101_100_0, 0b000_111_11, 0b001]);
/// assert_eq!(unpack(&bytes, Bits::B3, 9)?, codes);
/// # Ok::<(), qkv::Error>(())
/// ```
pub fn pack(codes: &[u8], bits: Bits) -> Result<Vec<u8>> {
    check_codes(codes, bits)?;
    let mut out = vec![0u8; row_bytes(bits.get(), codes.len())];
    codes::pack_row(Isa::detect(), bits.get(), codes, &mut out);
    Ok(out)
}

/// The first `count` codes of a stream made by [`pack`], one a byte.
///
/// # Errors
/// [`Error::Length`] if `bytes` is not exactly what `count` codes take.
pub fn unpack(bytes: &[u8], bits: Bits, count: usize) -> Result<Vec<u8>> {
    check_len("packed bytes", row_bytes(bits.get(), count), bytes.len())?;
    let mut out = vec![0u8; count];
    codes::unpack_u8(Isa::detect(), bits.get(), bytes, &mut out);
    Ok(out)
}

/// Quantizes a tensor `[tokens, heads, dim]` of any dtype and strides, on all cores.
///
/// The arithmetic is f32 and the same on every machine; the pair of a group is rounded to f16 before its codes are
/// made. A group with NaN or infinity decodes to NaN, that group only; finite values beyond ±65504 are clamped
/// and counted; a constant group decodes to its value rounded to f16. Where `group` does not divide a row (or,
/// per channel, the tokens of a batch row), the last group is short.
///
/// # Errors
/// [`Error::Unsupported`] for a group outside 2..=256, a per-token group larger than a head, a rotation that
/// does not divide a head, a fit's parameter out of range, or `center` (it belongs to a cache);
/// [`Error::Shape`] for an empty tensor.
pub fn quantize(x: &TensorRef<'_>, format: &Affine) -> Result<Quantized> {
    let plan = Plan::new(x.dims(), x.shape().batch_tokens, format.bits, format.group, format.axis)?;
    affine::check_fit(&format.fit)?;
    if let Some(block) = format.rotate {
        hadamard::check_block(block, plan.dims[2])?;
    }
    if format.center {
        return Err(Error::Unsupported {
            what: "center",
            got: "true".into(),
            why: "the mean belongs to a sequence of a cache; subtract it before the call".into(),
        });
    }
    let mut packed = vec![0u8; plan.dims[0] * plan.dims[1] * plan.row_bytes()];
    let mut pairs = vec![Pair::default(); plan.pair_count()];
    let clamped = match format.axis {
        Axis::PerToken => rows(x, format, &plan, &mut packed, &mut pairs),
        Axis::PerChannel => token_groups(x, format, &plan, &mut packed, &mut pairs),
    };
    Ok(Quantized { plan, rotate: format.rotate, packed, pairs: Pairs::F16(pairs), clamped })
}

/// Rows of one job: enough to hide its start, few enough to spread over the cores.
fn rows_per_job(rows: usize) -> usize {
    rows.div_ceil(4 * rayon::current_num_threads()).clamp(1, 128)
}

fn rows(x: &TensorRef<'_>, format: &Affine, plan: &Plan, packed: &mut [u8], pairs: &mut [Pair]) -> usize {
    let [t, h, d] = plan.dims;
    let (groups, bytes, isa) = (plan.groups(), plan.row_bytes(), Isa::detect());
    let job = rows_per_job(t * h);
    packed
        .par_chunks_mut(job * bytes)
        .zip(pairs.par_chunks_mut(job * groups))
        .enumerate()
        .map_init(
            || (vec![0f32; d], vec![0u8; d]),
            |(row, codes), (i, (packed, pairs))| {
                let mut clamped = 0;
                for (r, (packed, pairs)) in
                    packed.chunks_exact_mut(bytes).zip(pairs.chunks_exact_mut(groups)).enumerate()
                {
                    let r = i * job + r;
                    x.read_row(r / h, r % h, row);
                    if let Some(block) = format.rotate {
                        hadamard::rotate(isa, row, block);
                    }
                    clamped += affine::quantize_groups(
                        isa,
                        row,
                        plan.group,
                        0,
                        plan.bits,
                        &format.fit,
                        codes,
                        pairs,
                    );
                    codes::pack_row(isa, plan.bits.get(), codes, packed);
                }
                clamped
            },
        )
        .sum()
}

/// One token group of all heads: its rows of codes and, a head, its pairs.
struct TokenGroup<'a, P> {
    token: usize,
    len: usize,
    packed: &'a mut [u8],
    pairs: Vec<&'a mut [P]>,
}

/// Cuts codes and pairs into token groups.
fn split<'a, P>(plan: &Plan, mut packed: &'a mut [u8], pairs: &'a mut [P]) -> Vec<TokenGroup<'a, P>> {
    let [_, h, d] = plan.dims;
    let row = h * plan.row_bytes();
    let mut all: Vec<TokenGroup<'a, P>> = Vec::with_capacity(plan.groups());
    for (token, len) in plan.token_groups() {
        let (head, rest) = packed.split_at_mut(len * row);
        packed = rest;
        all.push(TokenGroup { token, len, packed: head, pairs: Vec::with_capacity(h) });
    }
    let groups = all.len();
    for (i, p) in pairs.chunks_exact_mut(d).enumerate() {
        all[i % groups].pairs.push(p);
    }
    all
}

fn token_groups(
    x: &TensorRef<'_>,
    format: &Affine,
    plan: &Plan,
    packed: &mut [u8],
    pairs: &mut [Pair],
) -> usize {
    let [_, h, d] = plan.dims;
    let isa = Isa::detect();
    split(plan, packed, pairs)
        .into_par_iter()
        .map_init(
            || vec![0f32; plan.group * d],
            |rows, job| {
                let mut clamped = 0;
                let rows = &mut rows[..job.len * d];
                for (head, pairs) in job.pairs.into_iter().enumerate() {
                    for (i, row) in rows.chunks_exact_mut(d).enumerate() {
                        x.read_row(job.token + i, head, row);
                        if let Some(block) = format.rotate {
                            hadamard::rotate(isa, row, block);
                        }
                    }
                    let mut out = columns::Codes {
                        bits: plan.bits.get(),
                        bytes: &mut *job.packed,
                        first: head * plan.row_bytes(),
                        stride: h * plan.row_bytes(),
                    };
                    clamped += columns::quantize(isa, rows, d, 0, plan.bits, &format.fit, pairs, &mut out);
                }
                clamped
            },
        )
        .sum()
}

/// Codes for pairs that are given: `code = clamp(rne((x - min) / step), 0, 2^bits - 1)` in f32, with IEEE
/// division and the pair as it is. NaN, and every element of a group with step 0, gets code 0; infinities
/// saturate. `pairs` holds (step, min) in the order of [`Pairs`].
///
/// # Errors
/// As [`quantize`], and [`Error::Length`] for the wrong number of pairs.
pub fn quantize_with(
    x: &TensorRef<'_>,
    bits: Bits,
    group: usize,
    axis: Axis,
    pairs: &[(f32, f32)],
) -> Result<Quantized> {
    let plan = Plan::new(x.dims(), x.shape().batch_tokens, bits, group, axis)?;
    check_len("pairs", plan.pair_count(), pairs.len())?;
    let [t, h, d] = plan.dims;
    let (bytes, isa, max) = (plan.row_bytes(), Isa::detect(), bits.max_code() as f32);
    let mut packed = vec![0u8; t * h * bytes];
    match axis {
        Axis::PerToken => {
            let groups = plan.groups();
            packed.par_chunks_mut(bytes).zip(pairs.par_chunks(groups)).enumerate().for_each_init(
                || (vec![0f32; d], vec![0u8; d]),
                |(row, codes), (r, (packed, pairs))| {
                    x.read_row(r / h, r % h, row);
                    for ((x, c), (step, min)) in row.chunks(group).zip(codes.chunks_mut(group)).zip(pairs) {
                        affine::codes_with(isa, x, affine::divisor(*step), *min, max, c);
                    }
                    codes::pack_row(isa, bits.get(), codes, packed);
                },
            );
        }
        Axis::PerChannel => {
            let groups = plan.groups();
            split::<u8>(&plan, &mut packed, &mut []).into_par_iter().enumerate().for_each_init(
                || (vec![0f32; d], vec![0u8; d]),
                |(row, codes), (g, job)| {
                    for (r, packed) in job.packed.chunks_exact_mut(bytes).enumerate() {
                        let (token, head) = (job.token + r / h, r % h);
                        x.read_row(token, head, row);
                        let pairs = &pairs[(head * groups + g) * d..][..d];
                        for ((x, c), (step, min)) in row.iter().zip(codes.iter_mut()).zip(pairs) {
                            *c = affine::round_code((x - min) / affine::divisor(*step), max) as u8;
                        }
                        codes::pack_row(isa, bits.get(), codes, packed);
                    }
                },
            );
        }
    }
    Ok(Quantized { plan, rotate: None, packed, pairs: Pairs::F32(pairs.to_vec()), clamped: 0 })
}

/// Decodes to a tensor of the same shape, any dtype and strides, on all cores: `step * code + min` in f32 (both
/// operations rounded), un-rotated if it was rotated, then rounded once to the dtype of `out`.
///
/// # Errors
/// [`Error::Shape`] if `out` has another shape.
pub fn dequantize(q: &Quantized, out: &mut TensorMut<'_>) -> Result<()> {
    let plan = &q.plan;
    let [t, h, d] = plan.dims;
    if out.dims() != plan.dims {
        return Err(Error::Shape {
            what: "out",
            expected: format!("{:?}", plan.dims),
            got: format!("{:?}", out.dims()),
        });
    }
    let (bytes, isa, bits) = (plan.row_bytes(), Isa::detect(), plan.bits.get());
    let rows = RowsMut::new(out);
    let finish = |row: &mut [f32], token: usize, head: usize| {
        if let Some(block) = q.rotate {
            hadamard::rotate(isa, row, block);
        }
        rows.write(token, head, row);
    };
    match plan.axis {
        Axis::PerToken => {
            let (groups, job) = (plan.groups(), rows_per_job(t * h));
            q.packed.par_chunks(job * bytes).enumerate().for_each_init(
                || (vec![0f32; d], vec![(0f32, 0f32); groups]),
                |(row, pairs), (i, packed)| {
                    for (r, packed) in packed.chunks_exact(bytes).enumerate() {
                        let r = i * job + r;
                        for (j, pair) in pairs.iter_mut().enumerate() {
                            *pair = q.pairs.get(r * groups + j);
                        }
                        codes::decode_groups(isa, bits, packed, plan.group, pairs, row);
                        finish(row, r / h, r % h);
                    }
                },
            );
        }
        Axis::PerChannel => {
            let groups: Vec<(usize, usize)> = plan.token_groups().collect();
            groups.par_iter().enumerate().for_each_init(
                || (vec![0f32; d], vec![0f32; d], vec![0f32; d]),
                |(row, step, min), (g, (token, len))| {
                    for head in 0..h {
                        for c in 0..d {
                            (step[c], min[c]) = q.pairs.get((head * groups.len() + g) * d + c);
                        }
                        for t in *token..token + len {
                            let packed = &q.packed[(t * h + head) * bytes..][..bytes];
                            codes::decode_channels(isa, bits, packed, step, min, row);
                            finish(row, t, head);
                        }
                    }
                },
            );
        }
    }
    Ok(())
}

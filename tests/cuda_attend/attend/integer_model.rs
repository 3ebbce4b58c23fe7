//! What decode attention on the integer path computes (`kernels/attend/integer_path.cuh` and what it includes), to the bit: loops over
//! tokens, channels and columns, without lanes, fragments or stored orders. A column is a query of a query head.
//!
//! A product of tensor cores on 16-bit elements is, as the simulator defines it, a chain of fused multiply-adds in f32; a card adds in
//! another order, so there the last bits differ, as those of `ex2` and `rcp` do. Sums of codes are exact in any order. All other
//! arithmetic is f32, rounded after every operation; only what is written as `mul_add` is fused. Columns do not touch each other.

use super::plan::{Item, Piece, Sequence, WARPS};
use half::{bf16, f16};
use qkv::{Axis, CacheConfig, Dtype};
use std::collections::BTreeMap;
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// A reference that every score exceeds. It moves to 7 below a score (log2 units) that exceeds it by more than 15.
const NO_REFERENCE: f32 = -1e30;
const HEADROOM: f32 = 7.0;
const LIMIT_ABOVE: f32 = 15.0;

/// Scores of pages with per-token keys are kept this much smaller.
const SMALL: f32 = 1.0 / 256.0;

/// What queries of per-channel keys are multiplied with until the first products with steps are seen: 2^100, too much for any.
const FIRST_NORM: f32 = 1_267_650_600_228_229_401_496_703_205_376.0;

/// A channel of per-channel keys that may add more than this to a score, in log2 units, gives its group a norm of its own.
const WIDE: f32 = 8.0;
/// Where 16-bit fixed point ends.
const ONE: f32 = 32_768.0;

const TWO_23: f32 = 8_388_608.0;

fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0f32.copysign(x) } else { x }
}

/// 2^x and 1 / x as `ex2.approx.ftz` and `rcp.approx.ftz` of the simulator: the nearest f32, without subnormals.
fn exp2(x: f32) -> f32 {
    flush(f64::from(flush(x)).exp2() as f32)
}

fn reciprocal(x: f32) -> f32 {
    flush(1.0 / flush(x))
}

/// A sum of products on tensor cores, 16-bit elements.
fn products(pairs: impl IntoIterator<Item = (f32, f32)>) -> f32 {
    pairs.into_iter().fold(0.0, |sum, (a, b)| a.mul_add(b, sum))
}

/// What product `i` of a token's pairs, of which there are `groups`, adds to its zero term: group and part of the group's sum. Four pairs
/// enter a product, those of group t modulo `groups` for t = 0 .. 3, so where there are fewer groups, several parts of each.
fn zero_parts(i: usize, groups: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..4).map(move |t| (t % groups, 4 / groups * i + t / groups)).filter(|(_, part)| *part < 2)
}

/// Adds up partial sums: element i takes up element i ^ stride, for each stride in turn.
fn add_up<const N: usize>(mut x: [f32; N], strides: &[usize]) -> f32 {
    for s in strides {
        x = std::array::from_fn(|i| x[i] + x[i ^ s]);
    }
    x[0]
}

/// Hadamard rotation in blocks, butterflies of these strides in turn.
fn hadamard(x: &mut [f32], block: usize, strides: [usize; 7]) {
    for s in strides.into_iter().filter(|s| *s < block) {
        for i in (0..x.len()).filter(|i| i & s == 0) {
            (x[i], x[i + s]) = (x[i] + x[i + s], x[i] - x[i + s]);
        }
    }
    let factor = 1.0 / (block as f32).sqrt();
    x.iter_mut().for_each(|x| *x *= factor);
}

/// Largest number; NaN is none.
fn largest(x: impl IntoIterator<Item = f32>, least: f32) -> f32 {
    x.into_iter().fold(least, f32::max)
}

fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23) as i32 - 127
}

/// The power of two that takes a magnitude into [0.5, 1).
fn normalizer(most: f32) -> f32 {
    if most == 0.0 { 1.0 } else { power_of_two((-1 - exponent(most)).clamp(-100, 100)) }
}

/// The power of two that takes a magnitude to [2^14, 2^15 - 256): 16 bits in two signed bytes hold up to 32639.
fn fixed_point_unit(most: f32) -> f32 {
    let nearly_two = 1 << 17;
    power_of_two((14 - exponent(f32::from_bits(most.to_bits() + nearly_two))).clamp(-126, 126))
}

/// What raw scores are multiplied with for log2 units.
fn score_factor(scale: f32, unit: f32) -> f32 {
    let scale = if scale == 0.0 { 1.0 } else { scale.abs() };
    (scale * LOG2_E / unit).max(1e-36)
}

/// `cap` * tanh(x / `cap`), x and result in log2 units.
fn soft_cap(x: f32, cap: f32) -> f32 {
    let e = exp2((x * (2.0 / cap)).min(126.0));
    let y = 1.0 - 2.0 * reciprocal(e + 1.0);
    if x.is_nan() { x } else { cap * LOG2_E * y }
}

fn round_half(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

/// Channels of an exact row in the order in which tensor cores add them: of 32 first those that are 0 and 1 modulo 8, then 2 and 3 ..
fn row_order(dim: usize) -> impl Iterator<Item = usize> {
    let block = |b| (0..4).flat_map(move |pair| (0..8).map(move |i| b + i / 2 * 8 + 2 * pair + i % 2));
    (0..dim).step_by(32).flat_map(block)
}

/// An operand of a page: codes, and the (step, min) that each has, `[token][channel]`.
pub(super) struct Stored {
    pub(super) dim: usize,
    pub(super) codes: Vec<i32>,
    pub(super) pairs: Vec<(f32, f32)>,
}

impl Stored {
    fn codes(&self, token: usize) -> &[i32] {
        &self.codes[token * self.dim..][..self.dim]
    }

    fn pairs(&self, token: usize) -> &[(f32, f32)] {
        &self.pairs[token * self.dim..][..self.dim]
    }

    /// A token's numbers, each rounded once.
    pub(super) fn values(&self, token: usize) -> Vec<f32> {
        let decode = |(code, (step, min)): (&i32, &(f32, f32))| (*code as f32).mul_add(*step, *min);
        self.codes(token).iter().zip(self.pairs(token)).map(decode).collect()
    }
}

/// What the cache holds of a sequence's kv head.
#[derive(Default)]
pub(super) struct Memory<'a> {
    /// Keys and values of tiles.
    pub(super) pages: BTreeMap<usize, &'a [Stored; 2]>,
    /// Keys and values of exact tokens.
    pub(super) exact: BTreeMap<usize, [Vec<f32>; 2]>,
    /// Of the keys, where they are centred.
    pub(super) mean: Option<Vec<f32>>,
}

/// A column's query, prepared.
struct Query {
    /// Tokens that it sees.
    sees: Range<usize>,
    /// High and low part in the type of exact rows.
    parts: [Vec<f32>; 2],
    row_factor: f32,
    page: PageQuery,
    page_factor: f32,
    /// Raw score of the keys' mean.
    mean: f32,
}

enum PageQuery {
    /// 16-bit fixed point, and of each group of channels the sum in two f16 parts, which hold its 22 bits.
    Token { fixed: Vec<i32>, sums: Vec<[f32; 2]> },
    /// The row below 1, and its high and low part in f16.
    Channel { row: Vec<f32>, parts: [Vec<f32>; 2] },
}

/// What a warp carries for a column.
struct Column {
    reference: f32,
    /// Of weights: token i of a page, or of 16 exact rows, is in sum i mod 8.
    sums: [f32; 8],
    /// Weights times mins of each group of value channels, likewise.
    zeros: Vec<[f32; 8]>,
    out: Vec<f32>,
    /// What the query is multiplied with so that its products with the steps of per-channel keys are fixed point.
    norm: f32,
}

impl Column {
    /// Moves the reference if a score, which `factor` takes to log2 units, is far above it.
    fn move_for(&mut self, most: f32, factor: f32) {
        let far = most.mul_add(factor, -self.reference) > LIMIT_ABOVE;
        let next = if far { most * factor - HEADROOM } else { self.reference };
        let down = exp2(self.reference - next);
        self.reference = next;
        let all = self.sums.iter_mut().chain(self.zeros.iter_mut().flatten()).chain(&mut self.out);
        all.for_each(|x| *x *= down);
    }
}

/// Output that is not divided by the sum of weights yet.
struct Partial {
    reference: f32,
    sum: f32,
    out: Vec<f32>,
}

/// A row of the result. Its LSE is the natural logarithm of sum * 2^reference.
pub(super) struct Row {
    pub(super) out: Vec<f32>,
    reference: f32,
    sum: f32,
}

impl Row {
    /// Whether this is the row's LSE. `log2f` comes with the toolkit, which promises the nearest number or one beside it.
    pub(super) fn has_lse(&self, lse: f32) -> bool {
        let log = f64::from(self.sum).log2() as f32;
        [log.next_down(), log, log.next_up()].iter().any(|log| {
            let own = (self.reference + log) * LN_2;
            own == lse || own.is_nan() && lse.is_nan()
        })
    }

    pub(super) fn lse(&self) -> f64 {
        (f64::from(self.reference) + f64::from(self.sum).log2()) * std::f64::consts::LN_2
    }
}

/// What a launch is told.
pub(super) struct Model<'a> {
    pub(super) config: &'a CacheConfig,
    pub(super) group: usize,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
}

impl Model<'_> {
    /// A unit's rows. `queries` and `sink_logits` are of its columns, `pieces` what each block does of it.
    pub(super) fn unit(
        &self,
        sequence: &Sequence,
        memory: &Memory<'_>,
        pieces: &[Piece],
        queries: &[Vec<f32>],
        sink_logits: Option<&[f32]>,
    ) -> Vec<Row> {
        let columns = queries.iter().enumerate().map(|(c, x)| {
            let at = sequence.old_len + c / self.group;
            let window = self.config.layers[0].sliding_window;
            let sees = window.map_or(0, |w| (at + 1).saturating_sub(w))..at + 1;
            let q = self.query(x, sees, memory.mean.as_deref());
            let piece = |piece: &Piece| {
                merge_warps(std::array::from_fn(|w| self.warp(piece.of_warp(w), sequence, memory, &q)))
            };
            let mut parts: Vec<Partial> = pieces.iter().map(piece).collect();
            let part = if parts.len() == 1 { parts.remove(0) } else { combine(&parts) };
            finish(part, sink_logits.map(|s| s[c]))
        });
        columns.collect()
    }

    fn round_row(&self, x: f32) -> f32 {
        match self.config.window_dtype {
            Dtype::Bf16 => bf16::from_f32(x).to_f32(),
            _ => round_half(x),
        }
    }

    fn query(&self, x: &[f32], sees: Range<usize>, mean: Option<&[f32]>) -> Query {
        let key = self.config.layers[0].key.as_affine().unwrap();
        let sign = if self.scale == 0.0 { 0.0 } else { 1f32.copysign(self.scale) };
        // A row with NaN or infinity is NaN throughout.
        let sound = x.iter().all(|x| x.is_finite());
        let mut x: Vec<f32> = x.iter().map(|x| if sound { x * sign } else { f32::NAN }).collect();
        let magnitude = |x: &[f32]| largest(x.iter().map(|x| x.abs()), 0.0);

        let norm = normalizer(magnitude(&x));
        let high: Vec<f32> = x.iter().map(|x| self.round_row(x * norm)).collect();
        let low = x.iter().zip(&high).map(|(x, h)| self.round_row(x * norm - h)).collect();
        let row_factor = score_factor(self.scale, norm);
        // Products of channels that are equal modulo 32 first.
        let mean = mean.map_or(0.0, |mean| {
            let partial = |i: usize| products((i..x.len()).step_by(32).map(|c| (x[c], mean[c])));
            add_up::<32>(std::array::from_fn(partial), &[16, 8, 4, 2, 1])
        });

        if let Some(block) = key.rotate {
            hadamard(&mut x, block, [64, 32, 16, 8, 4, 2, 1]);
        }
        let most = magnitude(&x);
        let (page, unit, factor) = if key.axis == Axis::PerChannel {
            let unit = normalizer(most);
            let row: Vec<f32> = x.iter().map(|x| x * unit).collect();
            let high: Vec<f32> = row.iter().map(|x| round_half(*x)).collect();
            let low = row.iter().zip(&high).map(|(x, h)| round_half(x - h)).collect();
            (PageQuery::Channel { row, parts: [high, low] }, unit, score_factor(self.scale, unit))
        } else {
            let unit = if most > 0.0 { fixed_point_unit(most) } else { 1.0 };
            let fixed: Vec<i32> = x.iter().map(|x| (x * unit).round_ties_even() as i32).collect();
            let sums = fixed.chunks(key.group).map(|f| two_parts(f.iter().sum::<i32>() as f32 * SMALL));
            let page = PageQuery::Token { sums: sums.collect(), fixed };
            (page, unit * SMALL, score_factor(self.scale, unit) / SMALL)
        };
        // A row that is not a number has no fixed point.
        let page_factor = if sound { factor } else { f32::NAN };
        Query { sees, parts: [high, low], row_factor, page, page_factor, mean: mean * unit }
    }

    /// The items of one warp.
    fn warp<'i>(
        &self,
        items: impl Iterator<Item = &'i Item> + Clone,
        sequence: &Sequence,
        memory: &Memory<'_>,
        q: &Query,
    ) -> Column {
        let value = self.config.layers[0].value.as_affine().unwrap();
        let mut column = Column {
            reference: NO_REFERENCE,
            sums: [0.0; 8],
            zeros: vec![[0.0; 8]; self.config.value_dim / value.group],
            out: vec![0.0; self.config.value_dim],
            norm: FIRST_NORM,
        };
        let mut pages = 0;
        for item in items.clone() {
            if let Item::Page(tile) = item {
                // Tokens behind the length do not exist.
                let tokens = 64 * tile..sequence.len.min(64 * tile + 64);
                self.page(tokens, memory.pages[tile], q, &mut column);
                pages += 1;
            }
        }
        if pages > 0 {
            for (out, zero) in column.out.chunks_mut(value.group).zip(&column.zeros) {
                let zero = add_up(*zero, &[1, 2, 4]);
                out.iter_mut().for_each(|o| *o += zero);
            }
            if let Some(block) = value.rotate {
                hadamard(&mut column.out, block, [64, 32, 16, 8, 1, 2, 4]);
            }
            // Scores of pages lack the keys' mean, which shifts all of them alike.
            column.reference = q.mean.mul_add(q.page_factor, column.reference);
        }
        for item in items {
            if let Item::Exact(tokens) = item {
                for first in tokens.clone().step_by(16) {
                    self.rows(first..tokens.end.min(first + 16), memory, q, &mut column);
                }
            }
        }
        column
    }

    fn page(&self, tokens: Range<usize>, [keys, values]: &[Stored; 2], q: &Query, column: &mut Column) {
        let mut scores = self.scores(q, keys, tokens.len(), column);
        for (token, s) in tokens.zip(&mut scores) {
            if let Some(cap) = self.softcap {
                *s = soft_cap((*s + q.mean) * q.page_factor, cap) * (1.0 / q.page_factor) - q.mean;
            }
            if token < self.config.sinks || !q.sees.contains(&token) {
                *s = f32::NEG_INFINITY;
            }
        }
        column.move_for(largest(scores.iter().copied(), f32::NEG_INFINITY), q.page_factor);
        self.values(&scores, q.page_factor, values, column);
    }

    /// Raw scores of the tokens of a page: codes times fixed point, exact; one rounding to f32; then step and min.
    fn scores(&self, q: &Query, keys: &Stored, tokens: usize, column: &mut Column) -> Vec<f32> {
        let group = self.config.layers[0].key.as_affine().unwrap().group;
        let sum = |codes: &[i32], q: &[i32]| codes.iter().zip(q).map(|(c, q)| c * q).sum::<i32>() as f32;
        match &q.page {
            PageQuery::Token { fixed, sums } => (0..tokens)
                .map(|t| {
                    let pairs: Vec<(f32, f32)> = keys.pairs(t).chunks(group).map(|p| p[0]).collect();
                    let codes = keys.codes(t).chunks(group).zip(fixed.chunks(group));
                    let mut score = 0.0;
                    for (i, ((codes, fixed), (step, _))) in codes.zip(&pairs).enumerate() {
                        let parts = zero_parts(i, sums.len()).map(|(j, part)| (pairs[j].1, sums[j][part]));
                        score = sum(codes, fixed).mul_add(step * SMALL, score + products(parts));
                    }
                    score
                })
                .collect(),
            PageQuery::Channel { row, parts } => {
                let codes = (1 << self.config.layers[0].key.code_bits()) as f32;
                let mut scores = Vec::new();
                for first in (0..tokens).step_by(group) {
                    let pairs = keys.pairs(first);
                    let fixed = fold(row, pairs, q.page_factor * (codes * ONE) / WIDE, &mut column.norm);
                    // Of each 16 channels the lower eight, then the upper ones; high part, low part.
                    let zero = [0, 8].map(|half| {
                        parts.each_ref().map(|part| {
                            let channels = (0..row.len()).filter(|c| c & 8 == half);
                            products(channels.map(|c| (pairs[c].1, part[c])))
                        })
                    });
                    let zero = (zero[0][0] + zero[0][1]) + (zero[1][0] + zero[1][1]);
                    let score = |t| sum(keys.codes(t), &fixed).mul_add(1.0 / column.norm, zero);
                    scores.extend((first..tokens.min(first + group)).map(score));
                }
                scores
            }
        }
    }

    /// Weights of a page's tokens, and what they make of its values: weights times steps in 16 bits, relative to the largest of the page.
    fn values(&self, scores: &[f32], factor: f32, values: &Stored, column: &mut Column) {
        let group = self.config.layers[0].value.as_affine().unwrap().group;
        let weights: Vec<f32> = scores.iter().map(|s| exp2(s.mul_add(factor, -column.reference))).collect();
        for (t, p) in weights.iter().enumerate() {
            column.sums[t % 8] += p;
        }
        let mut stepped: Vec<Vec<f32>> = Vec::new();
        for (j, zeros) in column.zeros.iter_mut().enumerate() {
            let pairs = |t: usize| values.pairs(t)[j * group];
            stepped.push(weights.iter().enumerate().map(|(t, p)| p * pairs(t).0).collect());
            for (t, p) in weights.iter().enumerate() {
                zeros[t % 8] = p.mul_add(pairs(t).1, zeros[t % 8]);
            }
        }
        let unit = largest(stepped.iter().flatten().copied(), 1e-30) * (1.0 / 65535.0);
        let inverse = reciprocal(unit);
        for (j, out) in column.out.chunks_mut(group).enumerate() {
            let mut sums = vec![0i32; out.len()];
            for (t, y) in stepped[j].iter().enumerate() {
                // Adding 2^23 rounds to an integer.
                let fixed = (y.mul_add(inverse, TWO_23) - TWO_23) as i32;
                for (sum, code) in sums.iter_mut().zip(&values.codes(t)[j * group..]) {
                    *sum += code * fixed;
                }
            }
            for (o, sum) in out.iter_mut().zip(sums) {
                *o = (sum as f32).mul_add(unit, *o);
            }
        }
    }

    /// Exact rows, at most 16: rows are what they are, queries and weights enter as high and low parts.
    fn rows(&self, tokens: Range<usize>, memory: &Memory<'_>, q: &Query, column: &mut Column) {
        let rows = || tokens.clone().map(|t| &memory.exact[&t]);
        let score = |(token, [key, _]): (usize, &[Vec<f32>; 2])| {
            let part = |p: &[f32]| products(row_order(key.len()).map(|c| (key[c], p[c])));
            let s = (part(&q.parts[0]) + part(&q.parts[1])) * q.row_factor;
            let s = self.softcap.map_or(s, |cap| soft_cap(s, cap));
            if q.sees.contains(&token) { s } else { f32::NEG_INFINITY }
        };
        let scores: Vec<f32> = tokens.clone().zip(rows()).map(score).collect();
        column.move_for(largest(scores.iter().copied(), f32::NEG_INFINITY), 1.0);
        let weights: Vec<f32> = scores.iter().map(|s| exp2(s - column.reference)).collect();
        for (i, p) in weights.iter().enumerate() {
            column.sums[i % 8] += p;
        }
        let high: Vec<f32> = weights.iter().map(|p| self.round_row(*p)).collect();
        let low: Vec<f32> = weights.iter().zip(&high).map(|(p, h)| self.round_row(p - h)).collect();
        for (d, o) in column.out.iter_mut().enumerate() {
            let part = |weights: &[f32]| products(rows().zip(weights).map(|([_, v], p)| (v[d], *p)));
            *o += part(&high) + part(&low);
        }
    }
}

/// Two f16 numbers that add up to x.
fn two_parts(x: f32) -> [f32; 2] {
    let first = round_half(x);
    [first, round_half(x - first)]
}

/// Products of a query and the steps of a group in 16-bit fixed point. `norm` changes so that the largest fits where one does not; where it
/// is below `least`, also to a larger one.
fn fold(row: &[f32], pairs: &[(f32, f32)], least: f32, norm: &mut f32) -> Vec<i32> {
    // Adding 2^23 rounds to an integer; what is added beside it makes both bytes of the low half positive.
    const ZERO: f32 = TWO_23 + 32_896.0;
    let sums = |norm: f32| -> Vec<f32> {
        row.iter().zip(pairs).map(|(x, (step, _))| step.mul_add(x * norm, ZERO)).collect()
    };
    let mut fixed = sums(*norm);
    if *norm < least || !fixed.iter().all(|x| (TWO_23..TWO_23 + 65_536.0).contains(x)) {
        let most = largest(row.iter().zip(pairs).map(|(x, (step, _))| (step * (x * *norm)).abs()), 0.0);
        let better = if most > 0.0 { (*norm * fixed_point_unit(most)).min(FIRST_NORM) } else { *norm };
        // Two bits less are kept.
        if better < *norm || better > 4.0 * *norm {
            *norm = better;
        }
        fixed = sums(*norm);
    }
    fixed.iter().map(|x| (x - ZERO) as i32).collect()
}

/// The warps of a block, all weights brought to the largest reference.
fn merge_warps(warps: [Column; WARPS]) -> Partial {
    let reference = largest(warps.iter().map(|w| w.reference), NO_REFERENCE);
    let factors = warps.each_ref().map(|w| exp2(w.reference - reference));
    let of = || warps.iter().zip(factors);
    let sum = of().fold(0.0, |sum, (w, factor)| sum + add_up(w.sums, &[1, 2, 4]) * factor);
    let channel = |d: usize| of().map(|(w, factor)| w.out[d] * factor).reduce(|a, b| a + b).unwrap();
    Partial { reference, sum, out: (0..warps[0].out.len()).map(channel).collect() }
}

/// The blocks of a unit.
fn combine(parts: &[Partial]) -> Partial {
    let reference = largest(parts.iter().map(|p| p.reference), NO_REFERENCE);
    let (mut sum, mut out) = (0.0, vec![0.0; parts[0].out.len()]);
    for part in parts {
        let factor = exp2(part.reference - reference);
        sum += part.sum * factor;
        out.iter_mut().zip(&part.out).for_each(|(o, x)| *o += x * factor);
    }
    Partial { reference, sum, out }
}

/// Takes up a sink logit and divides by the sum of weights.
fn finish(mut part: Partial, sink_logit: Option<f32>) -> Row {
    let mut scale = 1.0;
    if let Some(sink) = sink_logit {
        let sink = sink * LOG2_E;
        let most = part.reference.max(sink);
        scale = exp2(part.reference - most);
        part.sum = part.sum * scale + exp2(sink - most);
        part.reference = most;
    }
    // A row that sees nothing is 0, whatever its outputs are.
    let factor = if part.sum == 0.0 { 0.0 } else { scale / part.sum };
    part.out.iter_mut().for_each(|o| *o = if factor == 0.0 { 0.0 } else { *o * factor });
    Row { out: part.out, reference: part.reference, sum: part.sum }
}

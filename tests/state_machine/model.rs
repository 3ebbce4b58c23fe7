//! The model: a sequence is a `Vec` of tokens.

use crate::machine::{Machine, held};
use half::f16;
use qkv::*;
use std::rc::Rc;

pub(crate) const TILE: usize = 64;
pub(crate) const LAYERS: usize = 2;
pub(crate) const HEADS: usize = 2;
/// Heads that attention has kernels for.
pub(crate) const DIM: usize = 64;

/// A small generator, so that a failing history is named by its seed.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n.max(1)
    }
    pub(crate) fn f32(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32 * 4.0 - 2.0
    }
}

/// Keys and values of one token: `[layer][head][dim]` each.
#[derive(Clone, PartialEq)]
pub(crate) struct Token {
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

impl Token {
    /// Random values that f16 holds exactly, so that entering the window changes nothing.
    pub(crate) fn random(rng: &mut Rng) -> Self {
        let mut x = || (0..LAYERS * HEADS * DIM).map(|_| f16::from_f32(rng.f32()).to_f32()).collect();
        Self { k: x(), v: x() }
    }
}

/// Value formats of the histories, with what the model needs to know of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored {
    pub(crate) bits: Bits,
    pub(crate) group: usize,
    pub(crate) per_channel: bool,
}

impl Stored {
    pub(crate) fn format(&self) -> Format {
        let a = if self.per_channel {
            Affine::per_channel(self.bits, self.group)
        } else {
            Affine::per_token(self.bits, self.group)
        };
        a.with_fit(Fit::MinMax).into()
    }

    /// Min-max of one group, transcribed from the definition: min rounded down to f16, step rounded up, codes rounded half
    /// to even against the rounded pair.
    fn group(&self, x: &mut [f32]) {
        let max_code = self.bits.max_code() as f32;
        let lo = x.iter().copied().fold(f32::INFINITY, f32::min);
        let hi = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut min = f16::from_f32(lo);
        if min.to_f32() > lo {
            min = next(min, false);
        }
        if lo == hi {
            x.fill(f16::from_f32(lo).to_f32());
            return;
        }
        let exact = (hi - min.to_f32()) / max_code;
        let mut step = f16::from_f32(exact);
        if step.to_f32() < exact {
            step = next(step, true);
        }
        for x in x.iter_mut() {
            let code = ((*x - min.to_f32()) / step.to_f32()).round_ties_even().clamp(0.0, max_code);
            *x = step.to_f32() * code + min.to_f32();
        }
    }

    /// Quantizes the tokens of one tile in place; `skip` first ones are left out.
    fn tile(&self, tokens: &mut [Token], skip: usize, keys: bool) {
        fn side(t: &mut Token, keys: bool) -> &mut [f32] {
            if keys { &mut t.k } else { &mut t.v }
        }
        let mut group: Vec<f32> = Vec::with_capacity(TILE);
        for head in 0..LAYERS * HEADS {
            if self.per_channel {
                for c in head * DIM..(head + 1) * DIM {
                    for g in (0..TILE).step_by(self.group) {
                        let members = g.max(skip)..g + self.group;
                        group.clear();
                        group.extend(members.clone().map(|t| side(&mut tokens[t], keys)[c]));
                        self.group(&mut group);
                        members.zip(&group).for_each(|(t, x)| side(&mut tokens[t], keys)[c] = *x);
                    }
                }
            } else {
                for t in &mut tokens[skip..] {
                    let row = &mut side(t, keys)[head * DIM..(head + 1) * DIM];
                    row.chunks_mut(self.group).for_each(|g| self.group(g));
                }
            }
        }
    }
}

fn next(x: f16, up: bool) -> f16 {
    let bits = x.to_bits();
    let negative = bits >> 15 == 1;
    if bits & 0x7fff == 0 {
        return f16::from_bits(if up { 1 } else { 0x8001 });
    }
    f16::from_bits(if negative == up { bits - 1 } else { bits + 1 })
}

/// What all sequences of a history share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) residual: Option<usize>,
    pub(crate) sinks: usize,
    pub(crate) key: Stored,
    pub(crate) value: Stored,
}

impl Rules {
    pub(crate) fn config(&self, sequences: usize, tokens: usize) -> CacheConfig {
        CacheConfig::new(LAYERS, HEADS, DIM)
            .with_key(self.key.format())
            .with_value(self.value.format())
            .with_residual(self.residual)
            .with_sinks(self.sinks)
            .with_capacity(sequences, tokens)
    }
}

/// One sequence. A block is an `Rc`, so sharing and freeing can be counted.
#[derive(Clone, Default)]
pub(crate) struct Model {
    pub(crate) tokens: Vec<Token>,
    pub(crate) blocks: Vec<Rc<()>>,
    pub(crate) packed: usize,
    /// Window tokens below this came out of a page.
    pub(crate) decoded: usize,
    pub(crate) requantized: u64,
    pub(crate) closed: usize,
}

impl Model {
    pub(crate) fn append(&mut self, rules: &Rules, new: &[Token]) {
        self.tokens.extend_from_slice(new);
        let Some(r) = rules.residual else {
            let n = self.tokens.len();
            for t in &mut self.tokens[n - new.len()..] {
                rules.key.tile(std::slice::from_mut(t), 0, true);
                rules.value.tile(std::slice::from_mut(t), 0, false);
            }
            self.packed = n;
            while self.blocks.len() < n.div_ceil(TILE) {
                self.blocks.push(Rc::new(()));
            }
            self.closed = self.closed.max(n / TILE);
            return;
        };
        while self.packed + TILE + r <= self.tokens.len() {
            let skip = if self.packed == 0 { rules.sinks } else { 0 };
            let tile = &mut self.tokens[self.packed..self.packed + TILE];
            rules.key.tile(tile, skip, true);
            rules.value.tile(tile, skip, false);
            let again = self.decoded.min(self.packed + TILE).saturating_sub(self.packed + skip);
            self.requantized += again as u64;
            self.packed += TILE;
            self.blocks.push(Rc::new(()));
            self.closed = self.closed.max(self.packed / TILE);
        }
        if self.decoded <= self.packed {
            self.decoded = 0;
        }
    }

    /// Whether the cut tile must be copied (direct mode) is for the caller to know: the model's blocks do it on `Rc` counts.
    pub(crate) fn truncate(&mut self, rules: &Rules, n: usize) {
        let cut = n < self.packed;
        if rules.residual.is_none() {
            if !n.is_multiple_of(TILE)
                && n < self.tokens.len()
                && Rc::strong_count(&self.blocks[n / TILE]) > 1
            {
                self.blocks[n / TILE] = Rc::new(());
            }
            self.blocks.truncate(n.div_ceil(TILE));
            self.packed = self.packed.min(n);
        }
        self.tokens.truncate(n);
        self.decoded = self.decoded.min(n);
        if cut && rules.residual.is_some() {
            self.packed = n / TILE * TILE;
            self.blocks.truncate(n / TILE);
            if !n.is_multiple_of(TILE) {
                self.decoded = n;
            }
            for (i, t) in self.tokens[self.packed..].iter_mut().enumerate() {
                if self.packed + i >= rules.sinks {
                    t.k.iter_mut().chain(&mut t.v).for_each(|x| *x = f16::from_f32(*x).to_f32());
                }
            }
        }
    }

    pub(crate) fn fork(&self, rules: &Rules) -> Self {
        let mut copy = self.clone();
        copy.requantized = 0;
        if rules.residual.is_none() && !self.packed.is_multiple_of(TILE) {
            *copy.blocks.last_mut().unwrap() = Rc::new(());
        }
        copy
    }

    pub(crate) fn prefix(&self, tokens: usize) -> Self {
        let n = tokens.min(self.packed) / TILE * TILE;
        Self {
            tokens: self.tokens[..n].to_vec(),
            blocks: self.blocks[..n / TILE].to_vec(),
            packed: n,
            closed: n / TILE,
            ..Self::default()
        }
    }
}

/// Keys and values of a step, `[rows][heads][dim]` of one layer.
pub(crate) fn layer_rows(tokens: &[Token], layer: usize) -> (Vec<f32>, Vec<f32>) {
    let part = layer * HEADS * DIM..(layer + 1) * HEADS * DIM;
    let k = tokens.iter().flat_map(|t| t.k[part.clone()].to_vec()).collect();
    let v = tokens.iter().flat_map(|t| t.v[part.clone()].to_vec()).collect();
    (k, v)
}

/// Everything a sequence holds, `[layer][K, V]`.
pub(crate) fn contents<M: Machine>(
    m: &M,
    cache: &PagedKvCache<M::B>,
    seat: cache::Seat,
) -> Vec<[Vec<f32>; 2]> {
    (0..LAYERS).map(|layer| held(m, cache, layer, seat)).collect()
}

/// Compares a sequence with its model, bit for bit.
pub(crate) fn check<M: Machine>(
    m: &M,
    cache: &PagedKvCache<M::B>,
    seat: cache::Seat,
    model: &Model,
    what: &str,
) {
    assert_eq!(cache.len(seat).unwrap(), model.tokens.len(), "{what}: length");
    assert_eq!(cache.packed_len(seat).unwrap(), model.packed, "{what}: packed length");
    for (layer, [k, v]) in contents(m, cache, seat).iter().enumerate() {
        let (mk, mv) = layer_rows(&model.tokens, layer);
        for (name, got, want) in [("key", k, mk), ("value", v, mv)] {
            if let Some(i) = (0..want.len()).find(|i| got[*i].to_bits() != want[*i].to_bits()) {
                let (token, rest) = (i / (HEADS * DIM), i % (HEADS * DIM));
                panic!(
                    "{what}: layer {layer} {name} of token {token}, head {}, channel {}: {} instead of {} (packed {})",
                    rest / DIM,
                    rest % DIM,
                    got[i],
                    want[i],
                    model.packed
                );
            }
        }
    }
}

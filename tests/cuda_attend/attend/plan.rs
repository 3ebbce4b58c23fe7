//! Who does what in a launch of attention, as every block finds out for itself (`kernels/attend/work.cuh`): one unit for each
//! sequence and kv head, of which each block takes some neighbouring items.

use qkv::CacheConfig;
use qkv::cuda::launch::page_bytes;
use std::ops::Range;

/// Exact rows of an item at most.
pub(super) const ITEM_ROWS: usize = 16;
/// Warps of a block.
pub(super) const WARPS: usize = 4;

/// Tokens of a sequence before and after its step, and those in closed tiles after it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sequence {
    pub(super) old_len: usize,
    pub(super) len: usize,
    pub(super) packed: usize,
}

/// What a warp does at a time.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Item {
    /// A tile in a page.
    Page(usize),
    /// Tokens of the window, or the sinks.
    Exact(Range<usize>),
}

/// Items of a unit that one block has.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) block: usize,
    pub(super) items: Vec<Item>,
}

impl Piece {
    /// A warp has every fourth item.
    pub(super) fn of_warp(&self, warp: usize) -> impl Iterator<Item = &Item> + Clone {
        self.items.iter().skip(warp).step_by(WARPS)
    }
}

/// Weights of items, as `attend` gives them, in units of 256 bytes.
pub(super) struct Plan<'a> {
    config: &'a CacheConfig,
    page: u64,
    exact: u64,
    /// Of a unit's queries and merge, behind its items.
    pub(super) unit: u64,
}

impl<'a> Plan<'a> {
    pub(super) fn new(config: &'a CacheConfig) -> Self {
        let of = |bytes: usize| (bytes / 256).max(1) as u64;
        let row = 2 * (config.key_dim + config.value_dim);
        Self { config, page: of(page_bytes(config, 0).unwrap()), exact: of(ITEM_ROWS * row), unit: of(4096) }
    }

    pub(super) fn weight(&self, item: &Item) -> u64 {
        match item {
            Item::Page(_) => self.page,
            Item::Exact(_) => self.exact,
        }
    }

    /// Pages that the first query sees, then window rows, then the sinks.
    fn items(&self, s: &Sequence) -> Vec<Item> {
        let c = self.config;
        let low = c.layers[0].sliding_window.map_or(0, |w| (s.old_len + 1).saturating_sub(w));
        let mut all: Vec<Item> = (low / 64..s.packed.div_ceil(64)).map(Item::Page).collect();
        if c.residual.is_none() {
            return all;
        }
        let begin = s.packed.max(c.sinks).max(low);
        let rows = (begin..s.len).step_by(ITEM_ROWS);
        all.extend(rows.map(|at| Item::Exact(at..s.len.min(at + ITEM_ROWS))));
        let sinks = c.sinks.min(s.len);
        if low < sinks {
            all.push(Item::Exact(0..sinks));
        }
        all
    }

    /// The pieces of each (sequence, kv head): block b has the items that begin in [total b / blocks, total (b + 1) / blocks) of all
    /// weights laid end to end. A sequence without new tokens has none.
    pub(super) fn units(&self, sequences: &[Sequence], blocks: usize) -> Vec<Vec<Piece>> {
        let items = |s: &Sequence| if s.len > s.old_len { self.items(s) } else { Vec::new() };
        let all: Vec<_> =
            sequences.iter().flat_map(|s| std::iter::repeat_n(items(s), self.config.kv_heads)).collect();
        let weight = |unit: &Vec<Item>| match unit.len() {
            0 => 0,
            _ => unit.iter().map(|i| self.weight(i)).sum::<u64>() + self.unit,
        };
        let total: u64 = all.iter().map(weight).sum();
        let (mut at, mut block) = (0, 0);
        let mut units = Vec::new();
        for unit in all {
            let end = at + weight(&unit);
            let mut pieces: Vec<Piece> = Vec::new();
            for item in unit {
                while at >= total * (block as u64 + 1) / blocks as u64 {
                    block += 1;
                }
                at += self.weight(&item);
                match pieces.last_mut().filter(|p| p.block == block) {
                    Some(piece) => piece.items.push(item),
                    None => pieces.push(Piece { block, items: vec![item] }),
                }
            }
            at = end;
            units.push(pieces);
        }
        units
    }
}

//! Who does what: the plan that every block of a launch makes for itself, on the host, held against what blocks did; and how even
//! it is where one sequence is much longer than the others.

use super::config;
use crate::gpu::Gpu;
use crate::still::Still;
use qkv::cuda::launch::page_bytes;
use qkv::{Affine, Bits, CacheConfig, Format};

/// Weights of items, as `attend` gives them, in units of 256 bytes.
struct Weights {
    page: u64,
    row: u64,
    unit: u64,
}

impl Weights {
    fn new(c: &CacheConfig) -> Self {
        let of = |bytes: usize| (bytes / 256).max(1) as u64;
        let page = of(page_bytes(c, 0).unwrap());
        Self { page, row: of(64 * 2 * (c.key_dim + c.value_dim)), unit: of(4096) }
    }
}

/// What one block does: weight and tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Load {
    weight: u64,
    tokens: usize,
}

/// The items of a sequence of `len` tokens: (weight, tokens), pages first, then exact rows, then sinks.
fn items(c: &CacheConfig, w: &Weights, len: usize) -> Vec<(u64, usize)> {
    let residual = c.residual.unwrap();
    let tiles = len.saturating_sub(residual) / 64;
    let rows = len - (64 * tiles).max(c.sinks);
    let mut all: Vec<_> = (0..tiles).map(|t| (w.page, if t == 0 { 64 - c.sinks } else { 64 })).collect();
    all.extend((0..rows).step_by(64).map(|at| (w.row, 64.min(rows - at))));
    if c.sinks > 0 {
        all.push((w.row, c.sinks));
    }
    all
}

/// Block b does the items that begin in [total b / blocks, total (b + 1) / blocks) of all weights laid end to end.
fn plan(c: &CacheConfig, lens: &[usize], blocks: u64) -> Vec<Load> {
    let w = Weights::new(c);
    let units: Vec<_> =
        lens.iter().flat_map(|len| std::iter::repeat_n(items(c, &w, *len), c.kv_heads)).collect();
    let total: u64 = units.iter().map(|u| u.iter().map(|i| i.0).sum::<u64>() + w.unit).sum();
    let (mut loads, mut at, mut b) = (vec![Load::default(); blocks as usize], 0, 0u64);
    for unit in units {
        for (weight, tokens) in unit {
            while at >= total * (b + 1) / blocks {
                b += 1;
            }
            let load = &mut loads[b as usize];
            (load.weight, load.tokens) = (load.weight + weight, load.tokens + tokens);
            at += weight;
        }
        // Queries and the merge, where the unit ends.
        loads[b as usize].weight += w.unit;
        at += w.unit;
    }
    loads
}

/// One sequence of `long` tokens and fifteen of a sixteenth.
fn uneven(long: usize) -> Vec<usize> {
    std::iter::once(long).chain([long / 16; 15]).collect()
}

/// With queries of zeros every token has the same weight, so the sums of partial results count tokens.
#[test]
fn blocks_do_what_the_plan_says() {
    let gpu = Gpu::new();
    let Some(simulator) = gpu.simulator else { return };
    let (key, value) = CacheConfig::default_formats(Bits::B4, 64);
    let (long, group) = (16_384usize + 37, 4);
    let c = config(key, value, 2, 64).with_capacity(16, long.next_multiple_of(64) + 64);
    let before: Vec<usize> = uneven(long).iter().map(|n| n - 1).collect();
    let mut still = Still::with_blocks(&gpu, c.clone(), &before, 61).filled(&gpu);
    still.workspace = gpu.up(&vec![f32::NAN; still.workspace.len()]);
    let out = still.attend(&gpu, group, &vec![0.0; 16 * 2 * group * 64]);
    assert!(out.iter().all(|x| x.is_finite() && *x != 0.0));
    let blocks = simulator.take_stats()[0].grid[0] as usize;
    let (work, loads) = (gpu.down(&still.workspace), plan(&c, &uneven(long), blocks as u64));
    // A place has references, sums and outputs of four columns, and a block has two: for a unit that others began, for one that
    // others end.
    let place = 4 * (64 + 2);
    let mut counted = 0;
    for (b, load) in loads.iter().enumerate() {
        let tokens: f32 = [2 * b, 2 * b + 1]
            .map(|slot| (work[slot * place], work[slot * place + 4]))
            .iter()
            .filter(|(reference, _)| !reference.is_nan())
            .map(|(reference, sum)| sum * reference.exp2())
            .sum();
        assert!(
            (tokens - load.tokens as f32).abs() < 0.02 * tokens.max(1.0),
            "block {b}: {tokens} tokens, {load:?}"
        );
        counted += load.tokens;
    }
    // No unit fits into a block, so that everything was counted.
    assert_eq!(counted, 2 * uneven(long).iter().sum::<usize>());
}

/// One sequence of 64k tokens and fifteen of 4k. An item is never cut, and 64 exact rows weigh as much as six pages of 2 bits: on
/// the largest grid one of them is an eighth of a block's share.
#[test]
fn the_busiest_block_has_a_tenth_more_than_the_mean() {
    let token = |bits, group| Format::from(Affine::per_token(bits, group));
    for d in [64, 128] {
        for ((key, value), limit) in [
            ((Format::F16, Format::F16), 1.1),
            ((token(Bits::B8, d), token(Bits::B8, d)), 1.1),
            (CacheConfig::default_formats(Bits::B4, d), 1.1),
            (CacheConfig::default_formats(Bits::B2, d), 1.125),
        ] {
            let c = config(key, value, 8, d).with_capacity(16, 65_536 + 64);
            // Multiprocessors of A100 and H200 and what they hold.
            for blocks in [108 * 2, 108 * 3, 132 * 2, 132 * 3] {
                let loads = plan(&c, &uneven(65_536), blocks);
                let most = loads.iter().map(|l| l.weight).max().unwrap() as f64;
                let mean = loads.iter().map(|l| l.weight).sum::<u64>() as f64 / blocks as f64;
                let what = format!("{key:?} {value:?}, {d} channels, {blocks} blocks");
                assert!(most <= limit * mean, "{what}: {:.3} of the mean", most / mean);
            }
        }
    }
}

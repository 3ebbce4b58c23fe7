//! The plan of a launch, held against what blocks did; and how even it is where one sequence is much longer than the others.

use super::config;
use super::plan::{Item, Plan, Sequence};
use crate::gpu::Gpu;
use crate::still::Still;
use qkv::{Affine, Bits, CacheConfig, Format};

/// What one block does: weight and tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Load {
    weight: u64,
    tokens: usize,
}

/// Loads of the blocks of a step of one token each, after which sequences have so many tokens.
fn loads(c: &CacheConfig, lens: &[usize], blocks: usize) -> Vec<Load> {
    let plan = Plan::new(c);
    let packed = |len: usize| len.saturating_sub(c.residual.unwrap()) / 64 * 64;
    let sequences: Vec<_> =
        lens.iter().map(|len| Sequence { old_len: len - 1, len: *len, packed: packed(*len) }).collect();
    let mut loads = vec![Load::default(); blocks];
    for pieces in plan.units(&sequences, blocks) {
        for piece in &pieces {
            let load = &mut loads[piece.block];
            for item in &piece.items {
                load.weight += plan.weight(item);
                load.tokens += match item {
                    // Sinks are not read from their page.
                    Item::Page(0) => 64 - c.sinks,
                    Item::Page(_) => 64,
                    Item::Exact(tokens) => tokens.len(),
                };
            }
        }
        // Queries and the merge, where the unit ends.
        loads[pieces.last().unwrap().block].weight += plan.unit;
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
    let (work, loads) = (gpu.down(&still.workspace), loads(&c, &uneven(long), blocks));
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

/// One sequence of 64k tokens and fifteen of 4k.
#[test]
fn the_busiest_block_has_a_tenth_more_than_the_mean() {
    let token = |bits, group| Format::from(Affine::per_token(bits, group));
    for d in [64, 128] {
        for (key, value) in [
            (Format::F16, Format::F16),
            (token(Bits::B8, d), token(Bits::B8, d)),
            CacheConfig::default_formats(Bits::B4, d),
            CacheConfig::default_formats(Bits::B2, d),
            CacheConfig::default_formats(Bits::B1, d),
        ] {
            let c = config(key, value, 8, d).with_capacity(16, 65_536 + 64);
            // Multiprocessors of A100 and H200 and what they hold.
            for blocks in [108 * 2, 108 * 3, 132 * 2, 132 * 3] {
                let loads = loads(&c, &uneven(65_536), blocks);
                let most = loads.iter().map(|l| l.weight).max().unwrap() as f64;
                let mean = loads.iter().map(|l| l.weight).sum::<u64>() as f64 / blocks as f64;
                let what = format!("{key:?} {value:?}, {d} channels, {blocks} blocks");
                assert!(most <= 1.1 * mean, "{what}: {:.3} of the mean", most / mean);
            }
        }
    }
}

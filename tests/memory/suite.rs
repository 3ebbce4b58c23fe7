//! `bytes_allocated` is what the allocator saw, `bytes_used` equals it when the cache is full, and a decode step
//! allocates nothing after warm-up. On any backend.

use crate::machine::{Machine, Params};
use qkv::*;

const PAGE: usize = 4096;
const LAYERS: usize = 3;
pub(crate) const HEADS: usize = 2;
pub(crate) const DIM: usize = 64;

/// What the machine's allocator says.
pub(crate) struct Probe<'a> {
    /// Bytes in use.
    pub(crate) live: &'a dyn Fn() -> usize,
    /// Allocations so far.
    pub(crate) calls: &'a dyn Fn() -> usize,
}

/// Tokens that come at once, those after the warm-up, and those that fill a cache.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) bulk: usize,
    pub(crate) warm: usize,
    pub(crate) tokens: usize,
}

pub(crate) fn configs<M: Machine>(sizes: Sizes) -> Vec<CacheConfig> {
    let base = CacheConfig::new(LAYERS, HEADS, DIM).with_capacity(2, sizes.tokens);
    let token = Affine::per_token(Bits::B4, 64);
    vec![
        base.clone(),
        base.clone().with_bits(Bits::B3).with_window_dtype(*M::WINDOWS.last().unwrap()),
        base.clone().with_bits(Bits::B1).with_sinks(16).with_residual(Some(192)),
        base.clone().with_key(token.with_center().with_rotation(64)).with_value(token.with_rotation(32)),
        base.clone().with_bits(Bits::B8).direct(),
        base.with_key(Fp8::e4m3(Granularity::TokenHead)).with_value(Format::F16).with_residual(Some(0)),
    ]
}

pub(crate) fn check<M: Machine>(m: &M, config: CacheConfig, sizes: Sizes, probe: &Probe<'_>) {
    let what = format!("{config:?}");
    // What the caller holds.
    let rows = 2;
    let numbers = |n: usize, f: fn(f32) -> f32| (0..n).map(|i| f(i as f32)).collect::<Vec<_>>();
    let kv = m.input(Dtype::F32, &numbers(rows * HEADS * DIM, |i| (i * 0.37).sin()));
    let q = m.input(M::QUERIES[0], &numbers(rows * 3 * HEADS * DIM, |i| (i * 0.73).cos()));
    let mut out = m.output(Dtype::F32, rows * 3 * HEADS * DIM);
    let params = m.hold(&Params::default());

    let before = (probe.live)();
    let mut cache = m.contiguous(config.clone()).unwrap();
    let seen = (probe.live)() - before;
    let said = cache.bytes_allocated() + cache.scratch_bytes();
    // Tables, counts and the copy of the configuration: a few bytes a block and layer.
    assert!(seen.abs_diff(said) <= PAGE, "allocator {seen}, cache {said}: {what}");

    let mut step = |cache: &mut KvCache<M::B>| {
        let (t, q) = (M::view(&kv, [rows, HEADS, DIM]), M::view(&q, [rows, 3 * HEADS, DIM]));
        for layer in 0..LAYERS {
            let mut out = M::view_mut(&mut out, [rows, 3 * HEADS, DIM]);
            cache.append(layer, &t, &t).unwrap();
            cache.attend(layer, &q, &M::params(&params), &mut out, None).unwrap();
        }
    };
    if sizes.bulk > 0 {
        let x = m.input(Dtype::F32, &numbers(rows * sizes.bulk * HEADS * DIM, |i| (i * 0.29).sin()));
        let t = M::view(&x, [rows * sizes.bulk, HEADS, DIM]);
        (0..LAYERS).for_each(|layer| cache.append(layer, &t, &t).unwrap());
    }
    for _ in sizes.bulk..sizes.warm {
        step(&mut cache);
    }
    let calls = (probe.calls)();
    for _ in sizes.warm..sizes.tokens {
        step(&mut cache);
    }
    let steps = sizes.tokens - sizes.warm;
    assert_eq!((probe.calls)() - calls, 0, "allocations in {steps} steps: {what}");
    assert_eq!(cache.bytes_used(), cache.bytes_allocated(), "full: {what}");
    assert_eq!(cache.len(0), sizes.tokens);
    drop(cache);
    let left = (probe.live)().saturating_sub(before);
    assert!(left <= 16 * PAGE * 4, "left behind {left}: {what}");
    assert!(m.read(out).iter().any(|x| *x != 0.0), "nothing was attended: {what}");
}

//! Random steps of a cache on the device against the CPU's cache: lengths, pages, windows, sinks, means and counters, bit by
//! bit.

use crate::caches::any_format;
use crate::gpu::{Gpu, Random};
use crate::layer::Twins;
use qkv::{CacheConfig, Dtype, Format, Granularity, Scales, Seat};

fn any_config(random: &mut Random) -> CacheConfig {
    let residual = random.pick(&[None, Some(0), Some(32), Some(64), Some(128)]);
    let dims = [64, 64, 80, 96, 128, 112, 256];
    let (dk, dv) = (random.pick(&dims), random.pick(&dims));
    let heads = 1 + random.below(3);
    let direct = residual.is_none();
    let (key, value) = (any_format(random, dk, direct, true), any_format(random, dv, direct, false));
    let mut scales = || (0..heads).map(|_| 0.001 + random.unit() * 0.02).collect::<Vec<_>>();
    let (a, b) = (scales(), scales());
    let per = |f: &Format, s: Vec<f32>| match f {
        Format::Fp8(f) if f.granularity == Granularity::Head => s,
        _ => s[..1].to_vec(),
    };
    let scales = Scales::new(1, per(&key, a), per(&value, b)).unwrap();
    CacheConfig::new(1, heads, dk)
        .with_dims(dk, dv)
        .with_key(key)
        .with_value(value)
        .with_residual(residual)
        .with_sinks(if direct { 0 } else { random.pick(&[0, 4]) })
        .with_window_dtype(random.pick(&[Dtype::F16, Dtype::Bf16]))
        .with_scales(scales)
        .with_capacity(3, 640)
}

#[test]
fn random_histories_hold_what_the_cpu_holds() {
    let gpu = Gpu::new();
    let mut pages = 0;
    for seed in 0..24 {
        let mut random = Random::new(100 + seed);
        let config = any_config(&mut random);
        let l = config.layers[0];
        let what = format!(
            "history {seed}: {:?} {:?} R {:?} sinks {} {:?} dims {} {} heads {}",
            l.key,
            l.value,
            config.residual,
            config.sinks,
            config.window_dtype,
            config.key_dim,
            config.value_dim,
            config.kv_heads
        );
        let mut twins = Twins::new(&gpu, config, 30);
        let seats: Vec<Seat> = (0..3).map(|_| twins.cpu.open().unwrap()).collect();
        for _ in 0..4 {
            let chosen: Vec<Seat> = seats.iter().copied().filter(|_| random.below(4) > 0).collect();
            if chosen.is_empty() {
                continue;
            }
            let counts: Vec<usize> = chosen
                .iter()
                .map(|s| {
                    let most = 640 - twins.cpu.len(*s).unwrap();
                    random.pick(&[0, 1, 1, 5, 64, 70, 130, 200]).min(most)
                })
                .collect();
            let pad = random.below(2) == 0;
            twins.step(&gpu, &mut random, &chosen, &counts, pad);
        }
        // Whole tiles, so that direct mode's pages can be exported.
        let up = |twins: &Twins, s: &Seat| {
            twins.cpu.len(*s).unwrap().next_multiple_of(64) - twins.cpu.len(*s).unwrap()
        };
        let counts: Vec<usize> = seats.iter().map(|s| up(&twins, s)).collect();
        twins.step(&gpu, &mut random, &seats, &counts, false);
        pages += twins.compare(&gpu, &seats, &what);
    }
    assert!(pages >= 100, "only {pages} pages were written");
}

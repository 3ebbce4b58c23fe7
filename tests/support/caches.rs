//! Random formats and caches.

use crate::gpu::Random;
use qkv::{Affine, Axis, Bits, CacheConfig, Dtype, Fit, Format, Fp8, Granularity, Scales};

/// A format that a cache takes for heads of `d` channels.
pub(crate) fn any_format(random: &mut Random, d: usize, direct: bool, key: bool) -> Format {
    let fp8 = [Fp8::e4m3, Fp8::e5m2];
    match random.below(10) {
        0 => Format::F16,
        1 => Format::Bf16,
        2 | 3 => {
            let g = random.pick(&[Granularity::Tensor, Granularity::Head, Granularity::TokenHead]);
            random.pick(&fp8)(g).into()
        }
        _ => {
            let bits = random.pick(&Bits::ALL);
            let mut a = if direct || random.below(2) == 0 {
                let groups: Vec<usize> = [32, 64, 128, d].into_iter().filter(|g| *g <= d).collect();
                Affine::per_token(bits, random.pick(&groups))
            } else {
                Affine::per_channel(bits, random.pick(&[32, 64]))
            };
            a = a.with_fit(random.pick(&[Fit::MinMax, Fit::MinMax, Fit::ErrorOptimal, Fit::HQQ]));
            let blocks: Vec<usize> = [32, 64, 128].into_iter().filter(|b| d.is_multiple_of(*b)).collect();
            if random.below(3) == 0 && !blocks.is_empty() {
                a = a.with_rotation(random.pick(&blocks));
            }
            if key && !direct && a.axis == Axis::PerToken && random.below(2) == 0 {
                a = a.with_center();
            }
            a.into()
        }
    }
}

/// Two layers, each with formats of its own.
pub(crate) fn any_config(random: &mut Random) -> CacheConfig {
    let residual = random.pick(&[None, Some(0), Some(32), Some(64), Some(64)]);
    let direct = residual.is_none();
    let (dk, dv) = (random.pick(&[32, 64, 48]), random.pick(&[32, 64, 48]));
    let heads = 1 + random.below(2);
    let scale =
        |random: &mut Random| (0..2 * heads).map(|_| 0.001 + random.unit() * 0.02).collect::<Vec<_>>();
    let mut c = CacheConfig::new(2, heads, dk)
        .with_dims(dk, dv)
        .with_residual(residual)
        .with_sinks(if direct { 0 } else { random.pick(&[0, 4, 16]) })
        .with_window_dtype(random.pick(&[Dtype::F16, Dtype::Bf16]))
        .with_sliding_window(random.pick(&[None, Some(70)]))
        .with_capacity(3, 448);
    // One scale a tensor, so only that granularity or heads that share it.
    let (a, b) = (scale(random)[..2].to_vec(), scale(random)[..2].to_vec());
    c = c.with_scales(Scales::new(2, a, b).unwrap());
    for layer in 0..2 {
        let (k, v) = (any_format(random, dk, direct, true), any_format(random, dv, direct, false));
        c = c.with_layer(layer, k, v).unwrap();
    }
    c
}

//! Random steps and every format.

use super::{Case, Params, Step, Strided, agree, config};
use crate::caches::any_format;
use crate::gpu::{Gpu, Random, contiguous};
use crate::layer::Twins;
use qkv::{Affine, Bits, CacheConfig, Dtype, Format, Fp8, Granularity, Seat};

fn any_case(random: &mut Random, dims: (usize, usize), most: usize) -> Case {
    let residual = random.pick(&[None, Some(0), Some(32), Some(64), Some(128)]);
    let (direct, heads) = (residual.is_none(), 1 + random.below(2));
    let (key, value) = (any_format(random, dims.0, direct, true), any_format(random, dims.1, direct, false));
    let group = random.pick(&[1, 1, 3, 4, 8]);
    let dtype = random.pick(&[Dtype::F16, Dtype::Bf16]);
    let config = config(random, key, value, dims, heads)
        .with_residual(residual)
        .with_sinks(if direct { 0 } else { random.pick(&[0, 4]) })
        .with_window_dtype(random.pick(&[dtype, dtype, Dtype::F16, Dtype::Bf16]))
        .with_sliding_window(random.pick(&[None, None, Some(1), Some(50), Some(130)]));
    let n = 1 + random.below(3);
    let old: Vec<usize> = (0..n).map(|_| random.pick(&[0, 3, 64, 70, 200, 330]).min(most)).collect();
    let counts: Vec<usize> =
        (0..n).map(|_| random.pick(&[1, 1, 2, 5, 17, 64, 90, 200]).min(most / group + 1)).collect();
    let mut params = Params::default();
    if random.below(3) == 0 {
        params.scale = Some(random.pick(&[0.0, -0.1, 0.3]));
    }
    if random.below(3) == 0 {
        params.softcap = Some(random.pick(&[2.0, 30.0]));
    }
    if random.below(3) == 0 {
        let logits = (0..heads * group).map(|i| if i == 1 { f32::NEG_INFINITY } else { random.normal() });
        params.sink_logits = Some(logits.collect());
    }
    if random.below(3) == 0 {
        let start = random.below(old[0] + counts[0]);
        params.bidirectional = vec![(start, start + 1 + random.below(90)), (start + 100, start + 130)];
    }
    let size = [
        random.pick(&[1.0, 1.0, 3.0, 1e-3]),
        random.pick(&[1.0, 1.0, 1e-3]),
        random.pick(&[1.0, 1.0, 1e-3, 100.0]),
    ];
    Case { config, old, counts, group, dtype, size, params, wild: false, ahead: 0 }
}

#[test]
fn random_histories_agree_with_the_cpu_and_with_f64() {
    let gpu = Gpu::new();
    for seed in 0..60 {
        let mut random = Random::new(3000 + seed);
        let dims = random.pick(&[(64, 64), (64, 64), (128, 128), (80, 80), (96, 64), (64, 96), (112, 128)]);
        let most = if dims.0 + dims.1 > 160 { 200 } else { 400 };
        let mut case = any_case(&mut random, dims, most);
        // Fewer pages than there are, or as many.
        case.ahead = [0, 2, 10][seed as usize % 3];
        case.run(&gpu, &mut random, true, &format!("history {seed}"));
    }
}

#[test]
fn large_heads_and_all_outputs_agree_with_the_cpu() {
    let gpu = Gpu::new();
    for (seed, dims) in
        [(192, 128), (256, 256), (144, 64), (16, 48), (64, 64), (80, 80)].into_iter().enumerate()
    {
        let mut random = Random::new(4000 + seed as u64);
        let mut case = any_case(&mut random, dims, 150);
        case.ahead = 3;
        case.run(&gpu, &mut random, false, &format!("dims {seed}"));
    }
}

#[test]
fn every_format_agrees_with_f64() {
    let gpu = Gpu::new();
    let mut formats: Vec<Format> = vec![Format::F16, Format::Bf16];
    for g in [Granularity::Tensor, Granularity::Head, Granularity::TokenHead] {
        formats.extend([Format::from(Fp8::e4m3(g)), Fp8::e5m2(g).into()]);
    }
    for bits in Bits::ALL {
        formats.extend([
            Format::from(Affine::per_token(bits, 64)),
            Affine::per_token(bits, 32).with_rotation(32).into(),
            Affine::per_channel(bits, 32).into(),
            Affine::per_channel(bits, 64).with_rotation(64).into(),
        ]);
    }
    for (i, f) in formats.iter().enumerate() {
        let mut random = Random::new(5000 + i as u64);
        let key = match f {
            Format::Affine(a) if a.axis == qkv::Axis::PerToken => a.with_center().into(),
            f => *f,
        };
        let config = config(&mut random, key, *f, (64, 64), 1)
            .with_residual(Some(32))
            .with_sinks(random.pick(&[0, 4]));
        let old = vec![160 + random.below(70)];
        // The second has rows enough for pages to be decoded ahead.
        for (counts, group) in [(vec![1 + random.below(40)], 2), (vec![33 + random.below(20)], 8)] {
            let (size, params, config, old) = ([1.0; 3], Params::default(), config.clone(), old.clone());
            let dtype = Dtype::F16;
            let case = Case { config, old, counts, group, dtype, size, params, wild: false, ahead: 3 };
            case.run(&gpu, &mut random, true, &format!("format {i}"));
        }
    }
}

/// A tile with a mask and values that are no numbers clears the padding of keys; the copy of the next page does not meet that.
#[test]
fn masked_pages_before_pages_decoded_ahead() {
    let gpu = Gpu::new();
    // Histories without an infinite value, of which the CPU makes infinity and the device NaN.
    for seed in 0..5 {
        let mut random = Random::new(seed);
        let key = Affine::per_token(Bits::B8, 32).into();
        let config = config(&mut random, key, Format::F16, (80, 80), 1).with_residual(Some(0)).with_sinks(4);
        let (old, counts, params) = (vec![192], vec![25], Params::default());
        let dtype = Dtype::F16;
        let case =
            Case { config, old, counts, group: 8, dtype, size: [1.0; 3], params, wild: true, ahead: 3 };
        case.run(&gpu, &mut random, false, &format!("seed {seed}"));
    }
}

/// Heads, sequences and rows enough that blocks of 128 rows keep a device busy.
const BUSY: (usize, usize, usize) = (16, 8, 60);

#[test]
fn blocks_of_128_rows_agree_with_the_cpu() {
    let gpu = Gpu::new();
    let (heads, group, new) = BUSY;
    for seed in 0..6 {
        let mut random = Random::new(7000 + seed);
        let dims = [(64, 64), (80, 80), (128, 128), (96, 64), (112, 128), (64, 96)][seed as usize];
        let mut case = any_case(&mut random, dims, 150);
        let (key, value) = (case.config.layers[0].key, case.config.layers[0].value);
        let scales = super::scales(&mut random, &key, &value, heads);
        (case.config.kv_heads, case.config.scales) = (heads, Some(scales));
        (case.group, case.params.sink_logits) = (group, None);
        // The last one leaves most of its last block empty.
        (case.old, case.counts) = (vec![0, 70, 200], vec![new, new, new - 11]);
        case.ahead = [0, 2][seed as usize % 2];
        case.run(&gpu, &mut random, false, &format!("busy {seed}"));
    }
}

/// A sequence alone gets blocks of 64 rows, and the same bits.
#[test]
fn results_do_not_depend_on_the_rows_of_a_block() {
    let gpu = Gpu::new();
    let (heads, group, new) = BUSY;
    for (seed, window) in [None, Some(50), Some(130)].into_iter().enumerate() {
        for dtype in [Dtype::F16, Dtype::Bf16] {
            let run = |all: bool| {
                let mut random = Random::new(7100 + seed as u64);
                let config = CacheConfig::new(1, heads, 64)
                    .with_bits(Bits::B4)
                    .with_window_dtype(dtype)
                    .with_sliding_window(window)
                    .with_residual(Some(32))
                    .with_capacity(3, 640);
                let mut twins = Twins::new(&gpu, config, 16);
                twins.wild = false;
                let seats: Vec<Seat> = (0..3).map(|_| twins.cpu.open().unwrap()).collect();
                twins.step(&gpu, &mut random, &seats, &[201, 64, 3], false);
                let (seats, counts) = if all { (&seats[..], vec![new; 3]) } else { (&seats[..1], vec![new]) };
                let rows = Step::rows(&counts, 0);
                // The first sequence's come first, whoever comes behind.
                let mut tensor = |h: usize| {
                    let mut random = Random::new(random.below(1 << 30) as u64);
                    Strided::new(dtype, contiguous([rows, h, 64]), &random.normals(rows * h * 64))
                };
                let (q, k, v) = (tensor(heads * group), tensor(heads), tensor(heads));
                let out = (Dtype::F32, contiguous([rows, heads * group, 64]), rows * heads * group * 64);
                let (max_query_len, ahead) = (new, 0);
                let hide_pages = false;
                let step =
                    Step { seats, counts: &counts, pad: 0, q, k, v, out, max_query_len, hide_pages, ahead };
                let want = step.cpu(&mut twins, &Params::default());
                let got = step.device(&gpu, &mut twins, &Params::default());
                agree(&step, &got, &want, "busy");
                let (out, lse) = got;
                let bits: Vec<u64> = out.rows(0, new).iter().map(|x| x.to_bits()).collect();
                (bits, lse[..new * heads * group].iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            };
            let (busy, alone) = (run(true), run(false));
            assert!(busy == alone, "window {window:?}, {dtype:?}");
        }
    }
}

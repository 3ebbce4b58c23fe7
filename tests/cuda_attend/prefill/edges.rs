//! What is no number, what must not leak, what is counted, what it costs.

use super::{Params, Step, Strided, agree, distance};
use crate::gpu::{Gpu, Host, Random, contiguous};
use crate::layer::Twins;
use half::f16;
use qkv::cuda::launch::read_status;
use qkv::{Affine, Bits, CacheConfig, Dtype, Format, Fp8, Granularity, Seat};

/// One sequence of `old` tokens and a step of `n`, 4 bits, 64 channels, one kv head and a group of 2.
pub(super) fn simple(gpu: &Gpu, random: &mut Random, config: CacheConfig, old: usize) -> (Twins, Vec<Seat>) {
    let mut twins = Twins::new(gpu, config, 16);
    twins.wild = false;
    let seats = vec![twins.cpu.open().unwrap()];
    if old > 0 {
        twins.step(gpu, random, &seats, &[old], false);
    }
    (twins, seats)
}

pub(super) fn four_bits() -> CacheConfig {
    CacheConfig::new(1, 1, 64).with_bits(Bits::B4).with_residual(Some(32)).with_capacity(1, 640)
}

fn simple_step<'a>(random: &mut Random, seats: &'a [Seat], counts: &'a [usize]) -> Step<'a> {
    let rows = Step::rows(counts, 0);
    let mut tensor =
        |h: usize| Strided::new(Dtype::F16, contiguous([rows, h, 64]), &random.normals(rows * h * 64));
    let (q, k, v) = (tensor(2), tensor(1), tensor(1));
    let out = (Dtype::F32, contiguous([rows, 2, 64]), rows * 128);
    Step { seats, counts, pad: 0, q, k, v, out, max_query_len: rows, hide_pages: false, ahead: 0 }
}

fn set(x: &mut Strided, at: usize, value: f32) {
    if let Host::F16(x) = &mut x.data {
        x[at] = f16::from_f32(value);
    }
}

#[test]
fn a_query_that_is_no_number_makes_its_own_row_none() {
    let gpu = Gpu::new();
    let mut random = Random::new(6000);
    let (mut twins, seats) = simple(&gpu, &mut random, four_bits(), 200);
    let mut step = simple_step(&mut random, &seats, &[70]);
    let bad = [(3, f32::NAN), (40, f32::INFINITY), (41, f32::NEG_INFINITY), (139, f32::NAN)];
    for (row, x) in bad {
        set(&mut step.q, row * 64 + random.below(64), x);
    }
    let (want, _) = step.cpu(&mut twins, &Params::default());
    let (got, lse) = step.device(&gpu, &mut twins, &Params::default());
    let (got, want) = (got.rows(0, 70), want.rows(0, 70));
    for row in 0..140 {
        let none = bad.iter().any(|b| b.0 == row);
        assert_eq!(lse[row].is_nan(), none, "LSE of row {row}");
        assert!(got[row * 64..][..64].iter().all(|x| x.is_nan() == none), "row {row}");
        if !none {
            let d = distance(&got[row * 64..][..64], &want[row * 64..][..64]);
            assert!(d <= 1e-3, "row {row}: {d:e}");
        }
    }
}

#[test]
fn values_that_are_no_numbers_reach_only_rows_that_see_them() {
    let gpu = Gpu::new();
    for seed in 0..6 {
        let mut random = Random::new(6100 + seed);
        let mut config = four_bits();
        if seed % 2 == 1 {
            config = config.with_sliding_window(Some(20));
        }
        let (mut twins, seats) = simple(&gpu, &mut random, config, 150);
        let mut step = simple_step(&mut random, &seats, &[100]);
        for _ in 0..3 {
            set(&mut step.v, random.below(100 * 64), f32::NAN);
        }
        if seed > 3 {
            set(&mut step.k, (60 + random.below(40)) * 64 + 5, f32::NAN);
        }
        let want = step.cpu(&mut twins, &Params::default());
        let got = step.device(&gpu, &mut twins, &Params::default());
        assert!(
            want.0.rows(0, 100).iter().any(|x| x.is_nan())
                && want.0.rows(0, 5).iter().all(|x| !x.is_nan() || seed == 0)
        );
        agree(&step, &got, &want, &format!("seed {seed}"));
    }
}

#[test]
fn garbage_behind_the_last_token_of_a_page_does_not_leak() {
    let gpu = Gpu::new();
    let int8 = Affine::per_token(Bits::B8, 64);
    for (i, format) in
        [Format::from(int8), Format::F16, Fp8::e4m3(Granularity::TokenHead).into()].into_iter().enumerate()
    {
        let mut random = Random::new(6200 + i as u64);
        let config =
            CacheConfig::new(1, 1, 64).with_key(format).with_value(format).with_capacity(1, 640).direct();
        let (mut twins, seats) = simple(&gpu, &mut random, config, 0);
        let bytes = vec![0xffu8; gpu.down(&twins.layer.pages).len()];
        gpu.stream.memcpy_htod(&bytes, &mut twins.layer.pages).unwrap();
        twins.step(&gpu, &mut random, &seats, &[100], false);
        let step = simple_step(&mut random, &seats, &[30]);
        let want = step.cpu(&mut twins, &Params::default());
        let got = step.device(&gpu, &mut twins, &Params::default());
        agree(&step, &got, &want, &format!("{format:?}"));
    }
}

#[test]
fn rows_beyond_the_given_length_and_missing_pages_are_counted() {
    let gpu = Gpu::new();
    let mut random = Random::new(6300);
    let (mut twins, seats) = simple(&gpu, &mut random, four_bits(), 100);
    let mut step = simple_step(&mut random, &seats, &[80]);
    step.max_query_len = 50;
    let (want, _) = step.cpu(&mut twins, &Params::default());
    let (got, lse) = step.device(&gpu, &mut twins, &Params::default());
    assert!(distance(&got.rows(0, 50), &want.rows(0, 50)) <= 1e-3);
    assert!(got.rows(50, 30).iter().all(|x| *x == 7.0) && lse[100..].iter().all(|x| *x == 7.0));
    let status = read_status(gpu.down(&twins.status).try_into().unwrap());
    assert_eq!((status.bad_rows, status.missing_blocks), (1, 0));

    let (mut twins, seats) = simple(&gpu, &mut random, four_bits(), 200);
    let mut step = simple_step(&mut random, &seats, &[1]);
    step.hide_pages = true;
    step.cpu(&mut twins, &Params::default());
    let (got, _) = step.device(&gpu, &mut twins, &Params::default());
    // Window and sinks alone are seen.
    assert!(got.rows(0, 1).iter().all(|x| x.is_finite()));
    let status = read_status(gpu.down(&twins.status).try_into().unwrap());
    assert_eq!(status.missing_blocks, 2);
}

#[test]
fn tiles_meet_no_bank_conflicts() {
    let gpu = Gpu::new();
    let formats: [Format; 6] = [
        Affine::per_token(Bits::B4, 64).into(),
        Affine::per_channel(Bits::B4, 64).into(),
        Affine::per_token(Bits::B2, 32).into(),
        Affine::per_channel(Bits::B8, 32).into(),
        Fp8::e4m3(Granularity::TokenHead).into(),
        Format::Bf16,
    ];
    for (i, format) in formats.into_iter().enumerate() {
        let mut random = Random::new(7000 + i as u64);
        let config = four_bits().with_key(format).with_value(format);
        let (mut twins, seats) = simple(&gpu, &mut random, config, 400);
        let step = simple_step(&mut random, &seats, &[200]);
        step.cpu(&mut twins, &Params::default());
        let Some(simulator) = gpu.simulator else { return };
        simulator.take_stats();
        step.device(&gpu, &mut twins, &Params::default());
        let stats = simulator.take_stats();
        let prefill = &stats[1].total;
        assert!(prefill.mma > 0, "the second launch of a step is prefill");
        // 8 a block of 64 rows when finished rows are put down, once.
        let blocks = (200usize * 2).div_ceil(64) as u64;
        assert!(prefill.shared_conflicts <= 8 * blocks, "{format:?}: {} conflicts", prefill.shared_conflicts);
    }
}

/// Pages that many rows read are decoded once: fewer instructions, the same results.
#[test]
fn pages_decoded_ahead_save_instructions() {
    let gpu = Gpu::new();
    for (i, bits) in [Bits::B4, Bits::B2].into_iter().enumerate() {
        let mut results = Vec::new();
        for ahead in [0, 8] {
            let mut random = Random::new(7100 + i as u64);
            let config = CacheConfig::new(1, 1, 64).with_bits(bits).with_capacity(1, 1024);
            let (mut twins, seats) = simple(&gpu, &mut random, config, 600);
            let mut step = simple_step(&mut random, &seats, &[150]);
            step.ahead = ahead;
            let want = step.cpu(&mut twins, &Params::default());
            if let Some(s) = gpu.simulator {
                s.take_stats();
            }
            let got = step.device(&gpu, &mut twins, &Params::default());
            agree(&step, &got, &want, &format!("{bits:?}, {ahead} pages ahead"));
            let stats = gpu.simulator.map(|s| s.take_stats()).unwrap_or_default();
            let of = |kernel: &str| -> (usize, u64) {
                let launches = stats.iter().filter(|s| s.kernel.starts_with(kernel));
                launches.fold((0, 0), |(n, sum), s| (n + 1, sum + s.total.warp_instructions))
            };
            results.push((got.1, of("qkv_prefill_decode"), of("qkv_prefill")));
        }
        let ((lse, none, plain), (ahead_lse, decoded, all)) = (&results[0], &results[1]);
        // Codes are decoded alike in both places.
        assert_eq!(lse, ahead_lse);
        if gpu.simulator.is_some() {
            assert_eq!((none.0, plain.0, decoded.0, all.0), (0, 1, 1, 2));
            assert!(all.1 < plain.1, "{bits:?}: {} instructions, {} without", all.1, plain.1);
        }
    }
}

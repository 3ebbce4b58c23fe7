//! Where many weights round alike, errors add up instead of averaging out.

use super::{Case, Findings, config, describe, errors, own, run};
use crate::gpu::{Gpu, Random};
use qkv::Format;

/// Where attention is nearly uniform, weights are a hair below the largest, and products with steps round alike; where values are of
/// one size, they do so whatever the weights. Sums of codes and of mins nearly cancel.
#[test]
fn nearly_uniform_attention_over_many_tokens() {
    let (gpu, mut findings) = (Gpu::new(), Findings::default());
    let token = |bits| Format::from(qkv::Affine::per_token(bits, 64));
    let eight = token(qkv::Bits::B8);
    for (key, value) in [(eight, eight)]
        .into_iter()
        .chain([qkv::Bits::B4, qkv::Bits::B3, qkv::Bits::B2, qkv::Bits::B1].map(|b| (eight, token(b))))
        .chain(own(64).into_iter().skip(4))
    {
        for (group, sharpness) in [(4, 1e-4), (8, 0.0), (8, 1e-5), (8, 1e-4), (8, 1e-3), (16, 1e-4)] {
            let mut random = Random::new(1);
            let mut case = Case::new(config(key, value, 1, 64), group, &[960], &[1]);
            case.sharpness = sharpness;
            findings.check(&gpu, &case, &mut random);
        }
        for (group, sharpness) in [(4, 1e-4), (8, 1e-2), (16, 0.1)] {
            let mut random = Random::new(2);
            let mut case = Case::new(config(key, value, 1, 64), group, &[960], &[1]);
            (case.sharpness, case.signs) = (sharpness, true);
            findings.check(&gpu, &case, &mut random);
        }
    }
    // Kernels for any format, and more tokens.
    for (d, tokens, group) in
        [(80, 700, 7), (96, 700, 16), (112, 700, 8), (256, 700, 6), (128, 4000, 8), (128, 4000, 3)]
    {
        let run = if d % 64 == 0 { 64 } else { 32 };
        let value = Format::from(qkv::Affine::per_token(qkv::Bits::B4, run));
        for (sharpness, signs) in [(1e-4, false), (0.01, true)] {
            let mut random = Random::new(3);
            let c = config(eight, value, 1, d).with_capacity(1, 4096);
            let mut case = Case::new(c, group, &[tokens], &[1]);
            (case.sharpness, case.signs) = (sharpness, signs);
            findings.check(&gpu, &case, &mut random);
        }
    }
}

/// Where one channel of a group is far from the others, these have codes far from the middle: what weights round by reaches each of them,
/// up to 2^-12 of the group's range.
#[test]
fn values_with_an_outlier() {
    let gpu = Gpu::new();
    for d in [64, 80, 128] {
        let bytes = Format::from(qkv::Affine::per_token(qkv::Bits::B8, 32));
        for (key, value) in if d == 80 { vec![(bytes, bytes)] } else { own(d).split_off(3) } {
            for (group, outlier, sharpness) in [(4, 100.0, 1e-4), (8, 100.0, 1e-4), (8, -100.0, 1.0)] {
                let mut case = Case::new(config(key, value, 1, d), group, &[500], &[1]);
                (case.outlier, case.sharpness, case.magnitude) = (Some(outlier), sharpness, [1.0, 0.2]);
                let e = errors(&case, &run(&gpu, &case, &mut Random::new(6)));
                // Relative to the outlier, which is nearly all of the output.
                let most = (d as f64).sqrt() * 2f64.powi(-12) * 1.02;
                let good = e.device <= f64::max(3.0 * e.half, most) && e.cpu <= most + 1e-4;
                assert!(
                    good,
                    "{}: {:.2e} from f64 (f16 {:.2e}), {:.2e} from the CPU",
                    describe(&case),
                    e.device,
                    e.half,
                    e.cpu
                );
            }
        }
    }
}

/// Products of queries with the steps of per-channel keys are rounded once for a group of tokens, and what they are off by is the same for
/// all of these: with codes far from 0 it would shift the scores of whole pages, which the LSE shows best.
#[test]
fn keys_per_channel() {
    use qkv::{Affine, Bits};
    let (gpu, mut findings) = (Gpu::new(), Findings::default());
    for d in [64, 80, 96, 128, 256] {
        for (bits, run) in [(Bits::B8, 64), (Bits::B4, 64), (Bits::B3, 64), (Bits::B2, 32), (Bits::B1, 32)] {
            let key = Format::from(Affine::per_channel(bits, run));
            // With these values the keys of 4 and 2 bits have kernels of their own at 64 and 128 channels.
            let value = Affine::per_token(
                if bits == Bits::B2 { bits } else { Bits::B4 },
                if d % 64 == 0 { run } else { 32 },
            );
            for (group, sharpness) in [(4, 1.0), (8, 1.0), (8, 4.0), (if d == 256 { 8 } else { 16 }, 2.0)] {
                let mut case = Case::new(config(key, value.into(), 1, d), group, &[900], &[1]);
                case.sharpness = sharpness;
                let e = findings.check(&gpu, &case, &mut Random::new(8));
                let text =
                    format!("{}: LSE {:.2e} from f64 (f16 {:.2e})", describe(&case), e.lse, e.half_lse);
                assert!(e.lse < if sharpness == 1.0 { 1e-4 } else { 2.5e-3 }, "{text}");
            }
        }
    }
}

/// Large steps of keys make products with queries smaller, and have to do so in their own groups only.
#[test]
fn keys_with_large_steps_on_some_pages() {
    use qkv::{Affine, Bits};
    let (gpu, mut findings) = (Gpu::new(), Findings::default());
    for (d, bits, run) in
        [(64, Bits::B4, 64), (64, Bits::B2, 32), (128, Bits::B4, 64), (128, Bits::B2, 32), (96, Bits::B8, 64)]
    {
        let key = Format::from(Affine::per_channel(bits, run));
        let value =
            Affine::per_token(if bits == Bits::B2 { bits } else { Bits::B4 }, if d == 96 { 32 } else { run });
        for (group, huge, size, scale) in [
            (8, 3e4, 0.05, 2.0),
            (16, 3e3, 0.002, 50.0),
            (8, 1e3, 1.0, 0.1),
            (4, 3e4, 0.05, 2.0),
            (3, 3e3, 0.002, 50.0),
            (4, 1e3, 1.0, 0.1),
            (4, 50.0, 1.0, 0.1),
            // Around the range from which on groups have factors of their own, all other scores nearly the same.
            (4, 150.0, 0.001, 0.1),
            (4, 60.0, 0.001, 0.1),
            (4, 40.0, 0.001, 0.1),
            (4, 20.0, 0.001, 0.1),
        ] {
            let mut case = Case::new(config(key, value.into(), 1, d), group, &[900], &[1]);
            (case.huge, case.magnitude, case.scale) = (Some(huge), [size, 1.0], Some(scale));
            // All pages belong to one block, so a warp has several.
            case.split = Some(64);
            findings.check(&gpu, &case, &mut Random::new(4));
        }
    }
}

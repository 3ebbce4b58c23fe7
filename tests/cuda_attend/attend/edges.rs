//! Attention on the device: what must not leak, what it costs.

use super::{Case, channels, config, describe, errors, own, run};
use crate::gpu::{Gpu, Host, Random, contiguous};
use crate::layer::Twins;
use crate::still::Still;
use ptxsim::options::Options;
use qkv::cuda::launch::{DeviceAttendParams, attend, attend_workspace, page_bytes, read_status};
use qkv::{AttendParams, CacheConfig, Dtype, Format, Seat, TensorMut};

#[test]
fn a_page_is_read_once_in_whole_sectors() {
    let gpu = Gpu::new();
    let Some(simulator) = gpu.simulator else { return };
    for (key, value) in own(128) {
        // The integer path where there is one, and the f16 path. Where 16 rows are for the kernel for any format, it is counted by
        // `cargo xtask bytes`: it asks for pairs in smaller pieces.
        let affine = key.as_affine().is_some();
        let has_wide = key != Format::from(qkv::Affine::per_token(qkv::Bits::B8, 32));
        for group in [4, 8, 16].into_iter().filter(|g| (affine || *g > 4) && (has_wide || *g < 16)) {
            let (heads, n) = (8, 2);
            let base = config(key, value, heads, 128).with_residual(Some(32)).with_sinks(0);
            let len = 4096;
            let c = base.with_capacity(n, len + 64);
            let mut still = Still::new(&gpu, c.clone(), &vec![len + 31; n]);
            // Lanes share pairs, and take 32 bytes of them in two halves: the second finds its sector near.
            let cached = Options { first_level_cache: true, ..simulator.options() };
            simulator
                .with_options(&cached, || still.attend(&gpu, group, &vec![0.5; n * heads * group * 128]));
            let stats = simulator.take_stats();
            let (launch, combine) = (&stats[0], &stats[1]);
            assert!(combine.kernel.contains("combine"), "{}", combine.kernel);
            let tiles = n * heads * len / 64;
            let rows = n * heads * 32 * 2 * 2 * 128;
            let page = page_bytes(&c, 0).unwrap();
            let what = format!("{key:?} {value:?} group {group}: {tiles} tiles");
            // Loads of pages are those of ptx.cuh.
            let sectors = |file: &str| -> usize {
                let of = launch.lines.iter().filter(|l| l.line.contains(file));
                32 * of.map(|l| l.counts.l2_sectors).sum::<u64>() as usize
            };
            let traffic = sectors("ptx.cuh");
            assert!(traffic >= tiles * page, "{what}: {traffic} bytes are too few");
            let least = tiles * page;
            assert!(
                traffic as f64 <= 1.03 * least as f64,
                "{what}: {traffic} bytes of pages in sectors, {least} would do"
            );
            // Everything else: rows, queries and outputs, and what each block reads to find its work. Partial results stay in
            // the second-level cache; the grid bounds their number.
            let partial = sectors("merge.cuh");
            assert!(partial > 0, "no line of the merge was found");
            let rest = 32 * launch.total.l2_sectors as usize - traffic - partial;
            let once = rows + n * heads * group * 128 * (2 + 4);
            let blocks = launch.grid[0] as usize;
            assert!(rest <= 2 * once + blocks * 8192, "{what}: {rest} bytes beside pages, {once} would do");
            // Queries are prepared once a unit; the loop over pages and rows meets none.
            let conflicts: Vec<_> = launch
                .lines
                .iter()
                .filter(|l| l.counts.shared_conflicts > 0 && !l.line.contains("query.cuh"))
                .map(|l| &l.line)
                .collect();
            assert!(conflicts.is_empty(), "{what}: bank conflicts at {conflicts:?}");
        }
    }
}

#[test]
fn queries_that_are_no_numbers_stay_in_their_rows() {
    let gpu = Gpu::new();
    for (key, value) in own(64) {
        for group in [4, 8, 16] {
            let c = config(key, value, 1, 64).with_capacity(2, 512);
            let mut random = Random::new(3);
            let mut q = random.normals(2 * group * 64);
            let new = || Still::new(&gpu, c.clone(), &[300, 200]).filled(&gpu);
            let good = new().attend(&gpu, group, &q);
            assert!(good.iter().all(|x| x.is_finite() && *x != 0.0), "{key:?} {value:?}: {good:?}");
            q[64 + 5] = f32::NAN;
            q[3 * 64] = f32::INFINITY;
            let bad = new().attend(&gpu, group, &q);
            for (row, (x, y)) in bad.chunks(64).zip(good.chunks(64)).enumerate() {
                if row == 1 || row == 3 {
                    assert!(x.iter().all(|x| x.is_nan()), "{key:?} {value:?} row {row}: {x:?}");
                } else {
                    assert_eq!(x, y, "{key:?} {value:?} row {row}");
                }
            }
        }
    }
}

/// A group of values that is not a number is none, and no other channel: all groups of a token enter the tensor cores together.
#[test]
fn values_that_are_no_numbers_stay_in_their_group() {
    let gpu = Gpu::new();
    for d in [64, 96, 128] {
        let any = (Format::Bf16, Format::from(qkv::Affine::per_token(qkv::Bits::B3, 32)));
        let all = if d == 96 { vec![any] } else { own(d) };
        for (i, (key, value)) in all.into_iter().enumerate() {
            // In one row of the first page of a warp or of a later one, of a short sequence or before many good pages, or in all rows.
            for (group, channel, row, before) in [
                (4, 0, Some(130), 300),
                (7, d - 1, Some(130), 300),
                (13, d / 2, Some(400), 700),
                (4, d - 1, Some(70), 900),
                (8, 1, Some(70), 900),
                (3, d / 2, None, 600),
                (8, 0, None, 600),
                (16, d - 1, None, 300),
            ] {
                let mut case = Case::new(config(key, value, 1, d), group, &[before], &[1]);
                case.hole = Some((row, channel));
                let ran = run(&gpu, &case, &mut Random::new(40 + i as u64));
                for head in 0..group {
                    let (got, want) = (channels(&ran.out, 0, head), &ran.cpu_out[head * d..][..d]);
                    let what = format!("{key:?} {value:?} {group}");
                    // Others stay numbers, unless one group or rotation has all channels.
                    let part = value.as_affine().is_none_or(|a| a.group.max(a.rotate.unwrap_or(0)) < d);
                    assert!(
                        want[channel].is_nan() && part == want.iter().any(|x| x.is_finite()),
                        "{what}: {want:?}"
                    );
                    for (c, (x, y)) in got.iter().zip(want).enumerate() {
                        let same = if y.is_nan() { x.is_nan() } else { (x - y).abs() < 2e-3 };
                        assert!(same, "{what}, channel {c}: {x}, the CPU has {y}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_lies_behind_the_length_does_not_leak() {
    let gpu = Gpu::new();
    for (key, value) in own(64) {
        let c = config(key, value, 2, 64).direct().with_capacity(1, 256);
        if c.validate().is_err() {
            continue;
        }
        for group in [2, 8] {
            let mut random = Random::new(1);
            let mut twins = Twins::new(&gpu, c.clone(), 5);
            // NaN as a float of any width, and as a pair.
            twins.layer.pages = gpu.up(&vec![0xffu8; 5 * c.block_bytes().unwrap()]);
            twins.wild = false;
            let seats: Vec<Seat> = vec![twins.cpu.open().unwrap()];
            let heads = 2 * group;
            for count in [77, 1] {
                let q = random.normals(heads * 64);
                let mut compared = false;
                twins.step_with(&gpu, &mut Random::new(9), &seats, &[count], false, |a| {
                    if count > 1 {
                        return;
                    }
                    let q = Host::new(Dtype::F16, &q);
                    let mut out = gpu.zeros::<f32>(heads * 64);
                    let mut workspace = gpu.zeros(attend_workspace(&gpu.device, &c).unwrap());
                    attend(
                        &gpu.device,
                        gpu.raw(),
                        &c,
                        0,
                        &q.up(&gpu).view(contiguous([1, heads, 64])),
                        &DeviceAttendParams::new(),
                        1,
                        a.batch,
                        a.layer,
                        a.step,
                        &mut qkv::cuda::DeviceTensorMut::thd(&mut out, [1, heads, 64]).unwrap(),
                        None,
                        (&mut workspace).into(),
                    )
                    .unwrap();
                    let mut want = vec![0f32; heads * 64];
                    let view = qkv::TensorRef::new(q.data(), contiguous([1, heads, 64])).unwrap();
                    let mut o = TensorMut::thd(&mut want, [1, heads, 64]).unwrap();
                    a.cpu.attend(0, &view, &AttendParams::new(), &mut o, None).unwrap();
                    let got = gpu.down(&out);
                    let near = got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 0.02);
                    assert!(near, "{key:?} {value:?} group {group}: {got:?} {want:?}");
                    compared = true;
                });
                assert_eq!(compared, count == 1);
            }
        }
    }
}

#[test]
fn blocks_outside_the_pool_are_left_out_and_counted() {
    let gpu = Gpu::new();
    let (key, value) = CacheConfig::default_formats(qkv::Bits::B4, 64);
    let c = config(key, value, 2, 64).with_capacity(2, 512);
    let q = vec![0.5; 2 * 2 * 64];
    let mut still = Still::new(&gpu, c.clone(), &[330, 200]);
    let mut tables = gpu.down(&still.tables);
    tables[1] = -1;
    tables[9] = 16;
    still.tables = gpu.up(&tables);
    let out = still.attend(&gpu, 1, &q[..2 * 2 * 64]);
    assert!(out.iter().all(|x| x.is_finite()));
    let status = read_status(gpu.down(&still.status).try_into().unwrap());
    // Once a kv head.
    assert_eq!(status.missing_blocks, 4);
}

#[test]
fn equal_steps_have_equal_bits() {
    let gpu = Gpu::new();
    let (key, value) = CacheConfig::default_formats(qkv::Bits::B4, 128);
    let c = config(key, value, 2, 128).with_capacity(2, 1024);
    let q = Random::new(2).normals(2 * 2 * 4 * 128);
    let run = || Still::new(&gpu, c.clone(), &[900, 130]).filled(&gpu).attend(&gpu, 4, &q);
    let first = run();
    assert!(first.iter().all(|x| x.is_finite() && *x != 0.0), "{first:?}");
    assert_eq!(first, run());
}

/// A softcap with a factor of logits so small that it has no inverse.
#[test]
fn tiny_factors_with_a_softcap() {
    use qkv::{Fp8, Granularity, Scales};
    let gpu = Gpu::new();
    let key = Format::from(Fp8::e4m3(Granularity::Head));
    for (scale, of_keys) in [(1e-37, 0.01), (1e-36, 0.01), (1e-30, 1e-7), (1e-20, 1e-20)] {
        for group in [4, 8] {
            let c = config(key, key, 1, 64).with_scales(Scales::new(1, vec![of_keys], vec![0.01]).unwrap());
            let mut case = Case::new(c.direct(), group, &[300], &[1]);
            (case.scale, case.softcap, case.magnitude) = (Some(scale), Some(30.0), [of_keys / 0.01, 1.0]);
            let e = errors(&case, &run(&gpu, &case, &mut Random::new(5)));
            assert!(
                e.device <= 2.0 * e.half + 1e-6,
                "{}: {:.2e} ({:.2e})",
                describe(&case),
                e.device,
                e.half
            );
        }
    }
}

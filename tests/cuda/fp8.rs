//! FP8 on the device against the CPU: bytes, scales and values, and every 16-bit pattern.

use crate::gpu::{Gpu, Host, Memory, Random, contiguous, layout};
use half::{bf16, f16};
use qkv::cuda::launch::{
    fp8_absmax, fp8_absmax_workspace, fp8_decode, fp8_encode, fp8_encode_fitted, fp8_scale_count,
};
use qkv::cuda::{DeviceSlice, DeviceSliceMut};
use qkv::quant::fp8;
use qkv::{Dtype, Error, Fp8, Fp8Kind, Granularity, TensorMut, TensorRef};

const GRANULARITIES: [Granularity; 3] = [Granularity::Tensor, Granularity::Head, Granularity::TokenHead];

fn format(kind: Fp8Kind, granularity: Granularity) -> Fp8 {
    match kind {
        Fp8Kind::E4M3 => Fp8::e4m3(granularity),
        Fp8Kind::E5M2 => Fp8::e5m2(granularity),
    }
}

/// Bits of values, every NaN alike.
fn same(x: &Host) -> Vec<u32> {
    let nan = |bits: u32, x: f32| if x.is_nan() { u32::MAX } else { bits };
    match x {
        Host::F16(v) => v.iter().map(|x| nan(x.to_bits().into(), x.to_f32())).collect(),
        Host::Bf16(v) => v.iter().map(|x| nan(x.to_bits().into(), x.to_f32())).collect(),
        Host::F32(v) => v.iter().map(|x| nan(x.to_bits(), *x)).collect(),
    }
}

/// Values of all magnitudes, with what is not finite among them.
fn values(random: &mut Random, n: usize) -> Vec<f32> {
    let special =
        [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, 464.0, -465.0, 61440.0, 3e38];
    (0..n)
        .map(|_| match random.below(12) {
            0 => random.pick(&special),
            1 => random.normal() * 10f32.powi(random.below(12) as i32 - 8),
            _ => random.normal() * 3.0,
        })
        .collect()
}

#[test]
fn bytes_scales_and_values_are_the_cpus() {
    let gpu = Gpu::new();
    let mut random = Random::new(2);
    for case in 0..60 {
        let d = random.pick(&[16, 64, 80, 96, 112, 128, 256, 33, 600]);
        let dims = [1 + random.below(12), random.pick(&[1, 2, 8]), d];
        let kind = random.pick(&[Fp8Kind::E4M3, Fp8Kind::E5M2]);
        let f = format(kind, random.pick(&GRANULARITIES));
        let dtype = random.pick(&[Dtype::F32, Dtype::F16, Dtype::Bf16]);
        let ((from, n), (to, m)) = (layout(&mut random, dims), layout(&mut random, dims));
        let x = Host::new(dtype, &values(&mut random, n));
        let cpu = TensorRef::new(x.data(), from).unwrap();
        let what = format!("case {case}: {dims:?} {f:?} {dtype:?} {:?}", from.strides);

        let want = fp8::scales(&cpu, f).unwrap();
        let a = x.up(&gpu);
        let mut scales = gpu.zeros::<f32>(want.len());
        let mut work = gpu.zeros::<u32>(fp8_absmax_workspace(dims, f.granularity).max(1));
        for _ in 0..2 {
            let (s, w) = ((&mut scales).into(), (&mut work).into());
            fp8_absmax(&gpu.device, gpu.raw(), &a.view(from), f, s, w).unwrap();
            assert_eq!(gpu.down(&scales), want, "{what}");
            assert!(gpu.down(&work).iter().all(|w| *w == 0), "{what}");
        }

        // Scales that are too small for some elements.
        let small: Vec<f32> = want.iter().map(|s| s * random.pick(&[1.0, 0.4])).collect();
        let encoded = fp8::encode(&cpu, f, Some(&small)).unwrap();
        let scales = gpu.up(&small);
        let mut bytes = gpu.zeros::<u8>(dims.iter().product());
        let mut lost = gpu.zeros::<u64>(1);
        let (b, c) = ((&mut bytes).into(), (&mut lost).into());
        fp8_encode(&gpu.device, gpu.raw(), &a.view(from), f, (&scales).into(), b, Some(c)).unwrap();
        assert_eq!(gpu.down(&bytes), encoded.bytes(), "{what}");
        assert_eq!(gpu.down(&lost), [encoded.saturated() as u64], "{what}");

        let out = random.pick(&[Dtype::F32, Dtype::F16, Dtype::Bf16]);
        let blank = Host::new(out, &vec![0.25; m]);
        let mut y = blank.up(&gpu);
        fp8_decode(&gpu.device, gpu.raw(), (&bytes).into(), f, (&scales).into(), &mut y.view_mut(to))
            .unwrap();
        let mut decoded = blank.clone();
        let view = match &mut decoded {
            Host::F16(x) => TensorMut::new(x, to),
            Host::Bf16(x) => TensorMut::new(x, to),
            Host::F32(x) => TensorMut::new(x, to),
        };
        fp8::decode(&encoded, &mut view.unwrap()).unwrap();
        assert_eq!(same(&y.down(&gpu)), same(&decoded), "{what}");

        if f.granularity == Granularity::TokenHead {
            let encoded = fp8::encode(&cpu, f, None).unwrap();
            let mut scales = gpu.zeros::<f32>(want.len());
            let (s, b) = ((&mut scales).into(), (&mut bytes).into());
            fp8_encode_fitted(&gpu.device, gpu.raw(), &a.view(from), kind, s, b).unwrap();
            assert_eq!((gpu.down(&scales), gpu.down(&bytes)), (want, encoded.bytes().to_vec()), "{what}");
        }
    }
}

#[test]
fn every_16_bit_pattern_encodes_and_every_byte_decodes() {
    let gpu = Gpu::new();
    let dims = [512, 1, 128];
    let f16s = Host::F16((0..=u16::MAX).map(f16::from_bits).collect());
    let bf16s = Host::Bf16((0..=u16::MAX).map(bf16::from_bits).collect());
    for kind in [Fp8Kind::E4M3, Fp8Kind::E5M2] {
        let f = format(kind, Granularity::Tensor);
        let one = gpu.up(&[1f32]);
        for x in [&f16s, &bf16s] {
            let want = fp8::encode(&TensorRef::thd(x.data(), dims).unwrap(), f, Some(&[1.0])).unwrap();
            let (a, mut bytes) = (x.up(&gpu), gpu.zeros::<u8>(1 << 16));
            let (s, b) = ((&one).into(), (&mut bytes).into());
            fp8_encode(&gpu.device, gpu.raw(), &a.view(contiguous(dims)), f, s, b, None).unwrap();
            assert!(gpu.down(&bytes) == want.bytes(), "{kind:?} {dims:?}");
        }
        let all: Vec<u8> = (0..=255).collect();
        let bytes = gpu.up(&all);
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let mut y = Host::new(dtype, &[0.0; 256]).up(&gpu);
            let shape = contiguous([2, 1, 128]);
            fp8_decode(&gpu.device, gpu.raw(), (&bytes).into(), f, (&one).into(), &mut y.view_mut(shape))
                .unwrap();
            let want: Vec<f32> = all.iter().map(|b| fp8::value(kind, *b)).collect();
            assert_eq!(same(&y.down(&gpu)), same(&Host::new(dtype, &want)), "{kind:?} {dtype:?}");
        }
    }
}

#[test]
fn whole_sectors_and_no_byte_twice() {
    let gpu = Gpu::new();
    let Some(simulator) = gpu.simulator else { return };
    let mut random = Random::new(3);
    for dtype in [Dtype::F16, Dtype::F32] {
        for d in [64usize, 80, 128, 256] {
            let dims = [64, 8, d];
            let n = 64 * 8 * d;
            let f = Fp8::e4m3(Granularity::TokenHead);
            let mut a = Host::new(dtype, &random.normals(n)).up(&gpu);
            let (mut scales, mut bytes) = (gpu.zeros::<f32>(64 * 8), gpu.zeros::<u8>(n));
            simulator.take_stats();
            let (s, b) = ((&mut scales).into(), (&mut bytes).into());
            let view = a.view(contiguous(dims));
            fp8_encode_fitted(&gpu.device, gpu.raw(), &view, Fp8Kind::E4M3, s, b).unwrap();
            let (s, b) = (DeviceSlice::from(&scales), DeviceSlice::from(&bytes));
            fp8_decode(&gpu.device, gpu.raw(), b, f, s, &mut a.view_mut(contiguous(dims))).unwrap();
            gpu.stream.synchronize().unwrap();
            for stats in simulator.take_stats() {
                let (least, got) =
                    ((n * dtype.bytes() + n + 64 * 8 * 4) as f64, stats.total.global_bytes as f64);
                // A row's scale is asked for by each of its lanes; it is one sector all the same.
                let sectors = stats.total.global_sectors as f64 * 32.0;
                // 95 %; rows of 80 bytes end inside a sector, which two warps write then.
                let most = if (dtype, d) == (Dtype::F32, 80) { 1.11 } else { 1.05 };
                assert!(sectors <= least * most, "{} {dtype:?} {d}: {sectors} of {least}", stats.kernel);
                assert!(got >= least, "{} {dtype:?} {d}: {got} of {least}", stats.kernel);
            }
        }
    }
}

#[test]
fn wrong_lengths_and_addresses_start_nothing() {
    let gpu = Gpu::new();
    let Memory::F32(x) = Host::F32(vec![1.0; 128]).up(&gpu) else { unreachable!() };
    let x = qkv::cuda::DeviceTensor::thd(&x, [2, 1, 64]).unwrap();
    let f = Fp8::e4m3(Granularity::TokenHead);
    assert_eq!(fp8_scale_count([2, 1, 64], f.granularity), 2);
    let (mut scales, bytes) = (gpu.up(&[9f32; 4]), gpu.up(&[9u8; 256]));
    let (scale_at, byte_at) = (DeviceSlice::from(&scales).address(), DeviceSlice::from(&bytes).address());
    // SAFETY: a part of a live allocation, or deliberately odd, which must be refused before any use.
    let scale = |at: u64, n: usize| unsafe { DeviceSlice::<f32>::from_raw(at, n) };
    let run = |s: DeviceSlice<'_, f32>, b: DeviceSliceMut<'_, u8>| {
        fp8_encode(&gpu.device, gpu.raw(), &x, f, s, b, None)
    };
    let s = scale(scale_at, 2);
    // SAFETY: as above, deliberately odd or null, which must be refused before any use.
    let odd = |at: u64, n: usize| unsafe { DeviceSliceMut::<u8>::from_raw(at, n) };
    assert!(matches!(run(s, odd(byte_at, 127)), Err(Error::Length { .. })));
    assert!(matches!(run(s, odd(byte_at + 8, 128)), Err(Error::Address { .. })));
    assert!(matches!(run(s, odd(0, 128)), Err(Error::Address { .. })));
    assert!(matches!(run(scale(scale_at, 3), odd(byte_at, 128)), Err(Error::Length { .. })));
    assert!(matches!(run(scale(scale_at + 2, 2), odd(byte_at, 128)), Err(Error::Address { .. })));
    let mut work = gpu.zeros::<u32>(1);
    let (s, w) = ((&mut scales).into(), (&mut work).into());
    let tensor = Fp8::e4m3(Granularity::Tensor);
    assert!(fp8_absmax(&gpu.device, gpu.raw(), &x, tensor, s, w).is_err());
    assert_eq!((gpu.down(&scales), gpu.down(&bytes)), (vec![9f32; 4], vec![9u8; 256]));
}

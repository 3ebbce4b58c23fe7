//! `merge_states` on the device against the CPU's.

use crate::gpu::{Gpu, Host, Random, contiguous, layout, row};
use half::{bf16, f16};
use qkv::cuda::launch::merge_states;
use qkv::cuda::{DeviceSlice, DeviceSliceMut};
use qkv::{Dtype, Error, TensorMut, TensorRef};

const DTYPES: [Dtype; 3] = [Dtype::F16, Dtype::Bf16, Dtype::F32];

/// The distance to the next number of a dtype at a magnitude.
fn step(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F16 => {
            let h = f16::from_f32(x.abs());
            f16::from_bits(h.to_bits() + 1).to_f32() - h.to_f32()
        }
        Dtype::Bf16 => {
            let h = bf16::from_f32(x.abs());
            bf16::from_bits(h.to_bits() + 1).to_f32() - h.to_f32()
        }
        Dtype::F32 => 0.0,
    }
}

/// LSEs of all kinds: usual ones, far apart, nothing seen, NaN, infinite.
fn lse(random: &mut Random) -> f32 {
    match random.below(8) {
        0 | 1 => f32::NEG_INFINITY,
        2 if random.below(3) == 0 => random.pick(&[f32::NAN, f32::INFINITY]),
        3 => 200.0 * random.normal(),
        _ => 3.0 * random.normal(),
    }
}

#[test]
fn merged_states_are_the_cpu_s() {
    let gpu = Gpu::new();
    for seed in 0..40 {
        let mut random = Random::new(900 + seed);
        let dims = [1 + random.below(9), 1 + random.below(5), random.pick(&[1, 7, 16, 64, 80, 128, 256])];
        let (rows, dtype, other_dtype) = (dims[0] * dims[1], random.pick(&DTYPES), random.pick(&DTYPES));
        let (shape, n) = layout(&mut random, dims);
        let (other_shape, m) = layout(&mut random, dims);
        let mut lses = |n: usize| (0..n).map(|_| lse(&mut random)).collect::<Vec<_>>();
        let (mut a, b) = (lses(rows), lses(rows));
        let (mut x, mut y) = (random.normals(n), random.normals(m));
        // What a state that saw nothing holds does not matter.
        for (r, (a, b)) in a.iter().zip(&b).enumerate() {
            let (t, h) = (r / dims[1], r % dims[1]);
            if *a == f32::NEG_INFINITY {
                x[row(&shape, t, h)] = f32::NAN;
            }
            if *b == f32::NEG_INFINITY {
                y[row(&other_shape, t, h)] = f32::INFINITY;
            }
        }
        let (mut x, y) = (Host::new(dtype, &x), Host::new(other_dtype, &y));
        let (before, other) = (x.f32(), y.f32());
        let what = format!("case {seed}: {dims:?} {dtype:?} {other_dtype:?}");

        let (mut out, mut lse, other_lse) = (x.up(&gpu), gpu.up(&a), gpu.up(&b));
        let y_device = y.up(&gpu);
        merge_states(
            &gpu.device,
            gpu.raw(),
            &mut out.view_mut(shape),
            (&mut lse).into(),
            &y_device.view(other_shape),
            (&other_lse).into(),
        )
        .unwrap();
        let (got, got_lse) = (out.down(&gpu).f32(), gpu.down(&lse));

        let theirs = TensorRef::new(y.data(), other_shape).unwrap();
        qkv::merge_states(&mut TensorMut::new(x.data_mut(), shape).unwrap(), &mut a, &theirs, &b).unwrap();
        let want = x.f32();
        for (r, (got, want)) in got_lse.iter().zip(&a).enumerate() {
            let same = got == want || got.is_nan() && want.is_nan();
            assert!(same || (got - want).abs() <= 1e-6 * want.abs().max(1.0), "{what} row {r}: {got} {want}");
        }
        let mut touched = vec![false; n];
        for r in 0..rows {
            let (at, from) =
                (row(&shape, r / dims[1], r % dims[1]), row(&other_shape, r / dims[1], r % dims[1]));
            for c in 0..dims[2] {
                let i = at + c * shape.strides[3];
                touched[i] = true;
                let (got, want) = (got[i], want[i]);
                let size = before[i].abs().max(other[from + c * other_shape.strides[3]].abs());
                let size = if size.is_finite() { size } else { want.abs() };
                let same = got == want || got.is_nan() && want.is_nan();
                let close = (got - want).abs() <= 1e-6 * size + step(dtype, want);
                assert!(same || close, "{what} row {r} channel {c}: {got} {want}");
            }
        }
        // Gaps between rows stay as they were.
        for i in (0..n).filter(|i| !touched[*i]) {
            assert!(got[i].to_bits() == before[i].to_bits(), "{what}: element {i} is no row's");
        }
    }
}

#[test]
fn states_that_do_not_fit_are_refused() {
    let gpu = Gpu::new();
    let (mut x, y) = (gpu.zeros::<f32>(64), gpu.zeros::<f32>(64));
    let (mut a, b) = (gpu.zeros::<f32>(4), gpu.zeros::<f32>(4));
    let run = |x: &mut cudarc::driver::CudaSlice<f32>,
               dims: [usize; 3],
               a: &mut cudarc::driver::CudaSlice<f32>,
               other: [usize; 3]| {
        let mut out = qkv::cuda::DeviceTensorMut::new(x, contiguous(dims)).unwrap();
        let other = qkv::cuda::DeviceTensor::new(&y, contiguous(other)).unwrap();
        merge_states(&gpu.device, gpu.raw(), &mut out, a.into(), &other, (&b).into())
    };
    assert!(matches!(
        run(&mut x, [2, 2, 16], &mut a, [2, 2, 8]),
        Err(Error::Shape { what: "other_out", .. })
    ));
    assert!(matches!(run(&mut x, [1, 2, 16], &mut a, [1, 2, 16]), Err(Error::Length { what: "lse", .. })));
    assert!(run(&mut x, [2, 2, 16], &mut a, [2, 2, 16]).is_ok());
    // Nothing to merge.
    let (mut x, mut a) = (gpu.zeros::<f32>(1), gpu.zeros::<f32>(1));
    let mut out = qkv::cuda::DeviceTensorMut::new(&mut x, contiguous([0, 2, 16])).unwrap();
    let other = qkv::cuda::DeviceTensor::new(&y, contiguous([0, 2, 16])).unwrap();
    // SAFETY: no elements of live allocations.
    let none = unsafe { DeviceSliceMut::from_raw(DeviceSliceMut::from(&mut a).address(), 0) };
    // SAFETY: as above.
    let other_none = unsafe { DeviceSlice::from_raw(DeviceSlice::from(&b).address(), 0) };
    merge_states(&gpu.device, gpu.raw(), &mut out, none, &other, other_none).unwrap();
}

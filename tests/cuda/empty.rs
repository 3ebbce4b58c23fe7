//! Tensors without tokens, heads or channels: no error, no launch, nothing written.

use crate::gpu::{Gpu, Host, contiguous};
use qkv::cuda::launch::{
    CodeLengths, CodeOrder, DevicePairs, code_lengths, dequantize, fp8_absmax, fp8_absmax_workspace,
    fp8_decode, fp8_encode, fp8_encode_fitted, fp8_scale_count, hadamard, quantize, quantize_with,
};
use qkv::cuda::{DeviceSlice, DeviceSliceMut};
use qkv::layout::Operand;
use qkv::{Affine, Axis, Bits, Dtype, Error, Fp8, Fp8Kind, Granularity};

fn none<T>() -> DeviceSlice<'static, T> {
    // SAFETY: no elements, so nothing is read.
    unsafe { DeviceSlice::from_raw(0, 0) }
}

fn none_mut<T>() -> DeviceSliceMut<'static, T> {
    // SAFETY: no elements, so nothing is written.
    unsafe { DeviceSliceMut::from_raw(0, 0) }
}

#[test]
fn empty_tensors_are_fine_everywhere() {
    let gpu = Gpu::new();
    let (device, stream) = (&gpu.device, gpu.raw());
    let orders = [CodeOrder::Rows, CodeOrder::Fragments(Operand::Key), CodeOrder::Fragments(Operand::Value)];
    for dims in [[0, 2, 64], [3, 0, 64], [3, 2, 0], [0, 0, 0]] {
        let (memory, mut other) =
            (Host::new(Dtype::F32, &[7.0; 8]).up(&gpu), Host::new(Dtype::F16, &[7.0; 8]).up(&gpu));
        let x = memory.view(contiguous(dims));
        let mut out = other.view_mut(contiguous(dims));
        for f in [
            Affine::per_token(Bits::B4, 64),
            Affine::per_channel(Bits::B2, 32),
            Affine::per_token(Bits::B3, 32).with_rotation(64),
        ] {
            for order in orders {
                let no = CodeLengths { codes: 0, pairs: 0 };
                assert_eq!(code_lengths(dims, dims[0], &f, order), Ok(no), "{dims:?} {f:?} {order:?}");
                quantize(device, stream, &x, &f, order, none_mut(), none_mut(), None).unwrap();
                quantize_with(device, stream, &x, f.bits, f.group, f.axis, none(), order, none_mut())
                    .unwrap();
                dequantize(device, stream, none(), DevicePairs::F16(none()), &f, order, &mut out).unwrap();
            }
        }
        hadamard(device, stream, &x, 64, &mut out).unwrap();
        for granularity in [Granularity::Tensor, Granularity::Head, Granularity::TokenHead] {
            let f = Fp8::e4m3(granularity);
            // The driver allocates no 0 bytes.
            let (mut memory, mut work) = (gpu.up(&[9f32; 8]), gpu.zeros::<u32>(8));
            let mut scales = memory.slice_mut(..fp8_scale_count(dims, granularity));
            let mut work = work.slice_mut(..fp8_absmax_workspace(dims, granularity));
            fp8_absmax(device, stream, &x, f, (&mut scales).into(), (&mut work).into()).unwrap();
            fp8_encode(device, stream, &x, f, (&scales).into(), none_mut(), None).unwrap();
            fp8_decode(device, stream, none(), f, (&scales).into(), &mut out).unwrap();
            if granularity == Granularity::TokenHead {
                fp8_encode_fitted(device, stream, &x, Fp8Kind::E4M3, (&mut scales).into(), none_mut())
                    .unwrap();
            }
            assert_eq!(gpu.down(&memory), [9f32; 8], "{dims:?} {granularity:?}");
        }
        assert_eq!(other.down(&gpu), Host::new(Dtype::F16, &[7.0; 8]));
    }
    gpu.stream.synchronize().unwrap();
    if let Some(simulator) = gpu.simulator {
        assert!(simulator.take_stats().is_empty());
    }
}

#[test]
fn what_no_tensor_can_have_is_refused_of_an_empty_one() {
    let gpu = Gpu::new();
    let mut memory = Host::new(Dtype::F32, &[7.0; 8]).up(&gpu);
    for dims in [[0, 2, 64], [3, 2, 0]] {
        for f in [
            Affine::per_token(Bits::B4, 1),
            Affine::per_channel(Bits::B4, 257),
            Affine::per_token(Bits::B4, 32).with_center(),
        ] {
            let got = code_lengths(dims, dims[0], &f, CodeOrder::Rows);
            assert!(matches!(got, Err(Error::Unsupported { .. })), "{dims:?} {f:?} {got:?}");
        }
        let x = Host::new(Dtype::F32, &[7.0; 8]).up(&gpu);
        let got = hadamard(
            &gpu.device,
            gpu.raw(),
            &x.view(contiguous(dims)),
            48,
            &mut memory.view_mut(contiguous(dims)),
        );
        assert!(matches!(got, Err(Error::Unsupported { .. })), "{dims:?} {got:?}");
        let x = x.view(contiguous(dims));
        let one = gpu.zeros::<f32>(1);
        let (bits, axis) = (Bits::B4, Axis::PerToken);
        let got = quantize_with(
            &gpu.device,
            gpu.raw(),
            &x,
            bits,
            32,
            axis,
            (&one).into(),
            CodeOrder::Rows,
            none_mut(),
        );
        assert!(matches!(got, Err(Error::Length { what: "pairs", .. })), "{dims:?} {got:?}");
    }
}

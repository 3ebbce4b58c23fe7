//! Rotation against the matrix, and its refusals.

use crate::gpu::{Gpu, Host, Random, layout};
use qkv::cuda::launch::hadamard;
use qkv::{Dtype, Error, Shape};

/// `x * H / sqrt(block)` of one block in f64, H by its definition: the sign is the parity of the common bits.
fn reference(x: &[f32], block: usize) -> Vec<f64> {
    let one = |b: usize, i: usize| {
        let sum: f64 = (0..block)
            .map(
                |j| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 } * x[b * block + j] as f64,
            )
            .sum();
        sum / (block as f64).sqrt()
    };
    (0..x.len()).map(|k| one(k / block, k % block)).collect()
}

#[test]
fn it_equals_the_matrix_for_any_strides() {
    let gpu = Gpu::new();
    let mut random = Random::new(1);
    for case in 0..40 {
        let block = random.pick(&[32, 64, 128]);
        let dims = [1 + random.below(9), 1 + random.below(4), block * (1 + random.below(2))];
        let dtype = random.pick(&[Dtype::F32, Dtype::F16, Dtype::Bf16]);
        let ((from, n), (to, m)) = (layout(&mut random, dims), layout(&mut random, dims));
        let x = Host::new(dtype, &random.normals(n));
        let (a, mut b) = (x.up(&gpu), Host::new(Dtype::F32, &vec![0.0; m]).up(&gpu));
        hadamard(&gpu.device, gpu.raw(), &a.view(from), block, &mut b.view_mut(to)).unwrap();
        let Host::F32(got) = b.down(&gpu) else { unreachable!() };
        for token in 0..dims[0] {
            for head in 0..dims[1] {
                let at = |s: &Shape, c: usize| {
                    let (b, t) = (token / s.batch_tokens, token % s.batch_tokens);
                    b * s.strides[0] + t * s.strides[1] + head * s.strides[2] + c * s.strides[3]
                };
                let value = |i: usize| match &x {
                    Host::F16(x) => x[i].to_f32(),
                    Host::Bf16(x) => x[i].to_f32(),
                    Host::F32(x) => x[i],
                };
                let row: Vec<f32> = (0..dims[2]).map(|c| value(at(&from, c))).collect();
                for (c, want) in reference(&row, block).into_iter().enumerate() {
                    let got = got[at(&to, c)] as f64;
                    assert!((got - want).abs() < 1e-5, "case {case} {dims:?} {block} {c}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn wrong_shapes_start_nothing() {
    let gpu = Gpu::new();
    let x = gpu.up(&[1f32; 256]);
    let mut y = gpu.up(&[7f32; 256]);
    let shape = |dims: [usize; 3]| Shape { dims, batch_tokens: dims[0].max(1), strides: [256, 128, 128, 1] };
    let view = |dims| qkv::cuda::DeviceTensor::new(&x, shape(dims)).unwrap();
    let mut run = |dims, block, out: [usize; 3]| {
        let mut to = qkv::cuda::DeviceTensorMut::new(&mut y, shape(out)).unwrap();
        hadamard(&gpu.device, gpu.raw(), &view(dims), block, &mut to)
    };
    assert!(matches!(run([2, 1, 128], 16, [2, 1, 128]), Err(Error::Unsupported { .. })));
    assert!(matches!(run([2, 1, 96], 64, [2, 1, 96]), Err(Error::Unsupported { .. })));
    assert!(matches!(run([2, 1, 128], 64, [1, 1, 128]), Err(Error::Shape { .. })));
    assert!(run([0, 1, 128], 64, [0, 1, 128]).is_ok());
    assert_eq!(gpu.down(&y), [7f32; 256]);
}

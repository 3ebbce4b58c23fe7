//! Whole tensors of 8 heads x 4096 tokens x 128 channels in f16, on all cores: the size the peers are timed at.
//! Throughput counts the bytes a call has to move: f16 elements on one side, codes and pairs on the other.

use criterion::{BenchmarkId, Criterion, Throughput};
use half::f16;
use qkv::quant::{dequantize as decode, fp8 as fp8_tensor, quantize as encode};
use qkv::{Affine, Bits, Fit, Fp8, Granularity, TensorMut, TensorRef};
use rayon::prelude::*;
use std::hint::black_box;
use std::time::Duration;

const DIMS: [usize; 4] = [1, 8, 4096, 128];

/// About normal values.
fn input() -> Vec<f16> {
    let mut s = 1u64;
    let mut next = || {
        s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (s >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..DIMS.iter().product()).map(|_| f16::from_f32((next() + next() + next() + next()) * 1.7)).collect()
}

fn formats() -> Vec<(String, Affine)> {
    let mut all = Vec::new();
    for (bits, group) in
        [(Bits::B8, 128), (Bits::B8, 64), (Bits::B4, 64), (Bits::B3, 64), (Bits::B2, 64), (Bits::B1, 64)]
    {
        for (axis, format) in
            [("per token", Affine::per_token(bits, group)), ("per channel", Affine::per_channel(bits, group))]
        {
            for (fit, name) in
                [(Fit::MinMax, "min-max"), (Fit::HQQ, "hqq 20"), (Fit::ErrorOptimal, "error-optimal")]
            {
                // Fits other than the range are timed at one group size.
                if fit == Fit::MinMax || group == 64 {
                    let name = format!("{} bits, groups of {group} {axis}, {name}", bits.get());
                    all.push((name, format.with_fit(fit)));
                }
            }
        }
    }
    all
}

/// The machine's own copy of the f16 tensor, on all cores: read plus written bytes.
pub(crate) fn copy(c: &mut Criterion) {
    let x = input();
    let mut y = x.clone();
    let mut group = c.benchmark_group("copy");
    group.throughput(Throughput::Bytes(4 * x.len() as u64));
    group.bench_function("f16", |b| {
        b.iter(|| {
            y.par_chunks_mut(1 << 16).zip(x.par_chunks(1 << 16)).for_each(|(y, x)| y.copy_from_slice(x))
        });
    });
    group.finish();
}

pub(crate) fn quantize(c: &mut Criterion) {
    let x = input();
    let view = TensorRef::bhtd(&x, DIMS).unwrap();
    let mut group = c.benchmark_group("quantize");
    group.measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    for (name, format) in formats() {
        let q = encode(&view, &format).unwrap();
        group.throughput(Throughput::ElementsAndBytes {
            elements: x.len() as u64,
            bytes: (2 * x.len() + q.bytes()) as u64,
        });
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| black_box(encode(&view, &format).unwrap()));
        });
    }
    group.finish();
}

pub(crate) fn dequantize(c: &mut Criterion) {
    let x = input();
    let view = TensorRef::bhtd(&x, DIMS).unwrap();
    let mut out = vec![f16::ZERO; x.len()];
    let mut group = c.benchmark_group("dequantize");
    group.measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    for (name, format) in formats().into_iter().filter(|(_, f)| f.fit == Fit::MinMax) {
        let q = encode(&view, &format).unwrap();
        group.throughput(Throughput::ElementsAndBytes {
            elements: x.len() as u64,
            bytes: (2 * x.len() + q.bytes()) as u64,
        });
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| decode(&q, &mut TensorMut::bhtd(&mut out, DIMS).unwrap()).unwrap());
        });
    }
    group.finish();
}

pub(crate) fn fp8(c: &mut Criterion) {
    let x = input();
    let view = TensorRef::bhtd(&x, DIMS).unwrap();
    let mut out = vec![f16::ZERO; x.len()];
    let mut group = c.benchmark_group("fp8");
    group.throughput(Throughput::ElementsAndBytes { elements: x.len() as u64, bytes: 3 * x.len() as u64 });
    for (name, format) in [("e4m3", Fp8::e4m3(Granularity::Tensor)), ("e5m2", Fp8::e5m2(Granularity::Tensor))]
    {
        let q = fp8_tensor::encode(&view, format, None).unwrap();
        group.bench_function(BenchmarkId::new("encode", name), |b| {
            b.iter(|| black_box(fp8_tensor::encode(&view, format, Some(q.scales())).unwrap()));
        });
        group.bench_function(BenchmarkId::new("decode", name), |b| {
            b.iter(|| fp8_tensor::decode(&q, &mut TensorMut::bhtd(&mut out, DIMS).unwrap()).unwrap());
        });
    }
    group.finish();
}

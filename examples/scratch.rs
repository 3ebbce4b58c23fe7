//! scratch
use half::f16;
use qkv::quant::*;
use qkv::*;
use std::time::Instant;
fn cpu() -> f64 {
    let mut t = 0f64;
    for e in std::fs::read_dir("/proc/self/task").unwrap() {
        let p = e.unwrap().path().join("schedstat");
        if let Ok(x) = std::fs::read_to_string(p) { t += x.split(' ').next().unwrap().parse::<f64>().unwrap(); }
    }
    t / 1e9
}
fn best(name: &str, n: usize, mut f: impl FnMut()) {
    let mut b = f64::MAX;
    let start = Instant::now();
    let mut k = 0;
    while k < 5 || (start.elapsed().as_secs_f64() < 1.0 && k < 60) {
        let t = cpu();
        f();
        b = b.min(cpu() - t);
        k += 1;
    }
    println!("{name:40} {:8.1} M el/s  ({k} runs)", n as f64 / b / 1e6);
}
fn main() {
    let dims = [1usize, 8, 4096, 128];
    let n: usize = dims.iter().product();
    let mut s = 1u64;
    let x: Vec<f16> = (0..n)
        .map(|_| {
            let mut u = 0.0;
            for _ in 0..4 {
                s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                u += (s >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            }
            f16::from_f32(u * 1.7)
        })
        .collect();
    let v = TensorRef::bhtd(&x, dims).unwrap();
    let mut out = vec![f16::ZERO; n];
    let pat = std::env::args().nth(1).unwrap_or_default();
    let mut y = x.clone();
    if "copy".contains(&pat) { best("copy", n, || y.copy_from_slice(&x)); }
    for (name, f) in [
        ("tok minmax 4 g64", Affine::per_token(Bits::B4, 64)),
        ("tok minmax 8 g128", Affine::per_token(Bits::B8, 128)),
        ("tok minmax 2 g32", Affine::per_token(Bits::B2, 32).with_fit(Fit::MinMax)),
        ("tok minmax 3 g64", Affine::per_token(Bits::B3, 64)),
        ("chan minmax 4 g64", Affine::per_channel(Bits::B4, 64)),
        ("chan minmax 2 g32", Affine::per_channel(Bits::B2, 32).with_fit(Fit::MinMax)),
        ("tok opt 2 g32", Affine::per_token(Bits::B2, 32)),
        ("tok opt 1 g32", Affine::per_token(Bits::B1, 32)),
        ("tok hqq 4 g64", Affine::per_token(Bits::B4, 64).with_fit(Fit::HQQ)),
        ("chan hqq 4 g64", Affine::per_channel(Bits::B4, 64).with_fit(Fit::HQQ)),
        ("tok hqq 2 g64", Affine::per_token(Bits::B2, 64).with_fit(Fit::HQQ)),
        ("tok hqq 8 g64", Affine::per_token(Bits::B8, 64).with_fit(Fit::HQQ)),
    ] {
        if !name.contains(&pat) { continue; }
        best(&format!("quantize {name}"), n, || { std::hint::black_box(quantize(&v, &f).unwrap()); });
        let q = quantize(&v, &f).unwrap();
        best(&format!("  dequantize {name}"), n, || dequantize(&q, &mut TensorMut::bhtd(&mut out, dims).unwrap()).unwrap());
    }
    if "fp8".contains(&pat) {
    let f = Fp8::e4m3(Granularity::Tensor);
    best("fp8 encode", n, || { std::hint::black_box(fp8::encode(&v, f, Some(&[0.01])).unwrap()); });
    let q = fp8::encode(&v, f, Some(&[0.01])).unwrap();
    best("fp8 decode", n, || fp8::decode(&q, &mut TensorMut::bhtd(&mut out, dims).unwrap()).unwrap());
    }
}

//! Quantization of whole tensors through the public interface: shapes, strides, dtypes, errors, properties.

use half::{bf16, f16};
use proptest::prelude::*;
use qkv::quant::fp8::{self, Fp8Tensor};
use qkv::quant::{Pairs, Quantized, dequantize, pack, quantize, quantize_with, unpack};
use qkv::{Affine, Axis, Bits, Dtype, Error, Fit, Fp8, Fp8Kind, Granularity, Shape, TensorMut, TensorRef};

const FITS: [Fit; 3] = [Fit::MinMax, Fit::ErrorOptimal, Fit::HQQ];

/// Deterministic values, about normal, with a large channel here and there.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (s >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..n)
        .map(|i| {
            let u: f32 = (0..4).map(|_| next() - 0.5).sum();
            if i % 23 == 7 { u * 9.0 } else { u * 1.7 }
        })
        .collect()
}

/// A tensor in memory of one of the dtypes.
#[derive(Debug, Clone)]
enum Memory {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
}

impl Memory {
    fn new(dtype: Dtype, x: &[f32]) -> Self {
        match dtype {
            Dtype::F16 => Memory::F16(x.iter().map(|x| f16::from_f32(*x)).collect()),
            Dtype::Bf16 => Memory::Bf16(x.iter().map(|x| bf16::from_f32(*x)).collect()),
            Dtype::F32 => Memory::F32(x.to_vec()),
        }
    }

    fn view(&self, shape: Shape) -> TensorRef<'_> {
        match self {
            Memory::F16(x) => TensorRef::new(x, shape),
            Memory::Bf16(x) => TensorRef::new(x, shape),
            Memory::F32(x) => TensorRef::new(x, shape),
        }
        .unwrap()
    }

    fn view_mut(&mut self, shape: Shape) -> TensorMut<'_> {
        match self {
            Memory::F16(x) => TensorMut::new(x, shape),
            Memory::Bf16(x) => TensorMut::new(x, shape),
            Memory::F32(x) => TensorMut::new(x, shape),
        }
        .unwrap()
    }

    fn get(&self, i: usize) -> f32 {
        match self {
            Memory::F16(x) => x[i].to_f32(),
            Memory::Bf16(x) => x[i].to_f32(),
            Memory::F32(x) => x[i],
        }
    }
}

fn place(s: &Shape, t: usize, h: usize, c: usize) -> usize {
    let [b, ts, hs, cs] = s.strides;
    t / s.batch_tokens * b + t % s.batch_tokens * ts + h * hs + c * cs
}

/// A random shape with batches, and strides of one of several orders with gaps.
fn shapes() -> impl Strategy<Value = (Shape, usize)> {
    (1usize..3, 1usize..40, 1usize..4, 1usize..100, 0usize..4, 0usize..3).prop_map(
        |(b, t, h, d, order, gap)| {
            let sizes = [b, t, h, d];
            // Axes from the outermost to the innermost.
            let axes = [[0, 1, 2, 3], [0, 2, 1, 3], [2, 0, 3, 1], [3, 1, 0, 2]][order];
            let (mut strides, mut reach) = ([0usize; 4], 1usize);
            for a in axes.into_iter().rev() {
                strides[a] = reach;
                reach = reach * sizes[a] + gap;
            }
            (Shape { dims: [b * t, h, d], batch_tokens: t, strides }, reach)
        },
    )
}

/// What the format says, element by element: which pair an element has, and its distance from the decoded value.
fn pair_index(q: &Quantized, shape: &Shape, t: usize, h: usize, c: usize) -> usize {
    let [tokens, heads, d] = q.dims();
    match q.axis() {
        Axis::PerToken => (t * heads + h) * d.div_ceil(q.group()) + c / q.group(),
        Axis::PerChannel => {
            let each = shape.batch_tokens.div_ceil(q.group());
            let groups = tokens / shape.batch_tokens * each;
            let g = t / shape.batch_tokens * each + t % shape.batch_tokens / q.group();
            (h * groups + g) * d + c
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Any shape, strides, dtype, width, axis, group and fit: codes and pairs decode as the formula says, within
    /// half a step where the range is covered, and `quantize_with` of the same pairs gives the same codes.
    #[test]
    fn codes_mean_what_their_pairs_say(
        (shape, len) in shapes(), seed: u64, width in 0usize..5, fit in 0usize..3, group in 2usize..70,
        channel: bool, dtypes in (0usize..3, 0usize..3),
    ) {
        let kinds = [Dtype::F16, Dtype::Bf16, Dtype::F32];
        let (from, to) = (kinds[dtypes.0], kinds[dtypes.1]);
        let [tokens, heads, d] = shape.dims;
        let (bits, fit) = (Bits::ALL[width], FITS[fit]);
        let group = if channel { group } else { group.min(d) };
        prop_assume!(group >= 2);
        let format = if channel { Affine::per_channel(bits, group) } else { Affine::per_token(bits, group) };
        let x = Memory::new(from, &values(len, seed));
        let q = quantize(&x.view(shape), &format.with_fit(fit)).unwrap();
        prop_assert_eq!(q.clamped(), 0);
        let (codes, pairs) = (q.codes(), q.pairs().to_f32());
        let mut y = Memory::new(to, &vec![f32::NAN; len]);
        dequantize(&q, &mut y.view_mut(shape)).unwrap();
        let mut written = vec![false; len];
        for (t, h, c) in (0..tokens).flat_map(|t| (0..heads).flat_map(move |h| (0..d).map(move |c| (t, h, c)))) {
            let (i, p) = (place(&shape, t, h, c), pair_index(&q, &shape, t, h, c));
            let (step, min) = pairs[p];
            let decoded = step * codes[(t * heads + h) * d + c] as f32 + min;
            prop_assert_eq!(y.get(i), Memory::new(to, &[decoded]).get(0));
            written[i] = true;
            if fit == Fit::MinMax && step > 0.0 {
                let slack = 1e-6 * (min.abs() + step * bits.max_code() as f32);
                prop_assert!((decoded - x.get(i)).abs() <= step / 2.0 + slack);
            }
        }
        // Nothing but the view's elements is touched.
        prop_assert!((0..len).all(|i| written[i] || y.get(i).is_nan()));
        let again = quantize_with(&x.view(shape), bits, group, format.axis, &pairs).unwrap();
        prop_assert_eq!(again.packed(), q.packed());
        prop_assert!(matches!(q.pairs(), Pairs::F16(_)) && matches!(again.pairs(), Pairs::F32(_)));
        let rebuilt = Quantized::from_codes(shape.dims, bits, group, format.axis, &codes, &pairs);
        if shape.batch_tokens == tokens || !channel {
            let rebuilt = rebuilt.unwrap();
            prop_assert_eq!(rebuilt.packed(), q.packed());
        }
    }

    #[test]
    fn packing_is_a_dense_stream_low_bits_first(codes in proptest::collection::vec(any::<u8>(), 0..200), width in 0usize..5) {
        let bits = Bits::ALL[width];
        let codes: Vec<u8> = codes.iter().map(|c| c & bits.max_code()).collect();
        let bytes = pack(&codes, bits).unwrap();
        prop_assert_eq!(bytes.len(), (codes.len() * bits.get()).div_ceil(8));
        for i in 0..codes.len() * bits.get() {
            prop_assert_eq!(bytes[i / 8] >> (i % 8) & 1, codes[i / bits.get()] >> (i % bits.get()) & 1);
        }
        prop_assert_eq!(unpack(&bytes, bits, codes.len()).unwrap(), codes);
    }

    #[test]
    fn fp8_tensors_round_to_the_nearest_byte(
        (shape, len) in shapes(), seed: u64, e5: bool, granularity in 0usize..3, given: bool,
    ) {
        let granularity = [Granularity::Tensor, Granularity::Head, Granularity::TokenHead][granularity];
        let format = if e5 { Fp8::e5m2(granularity) } else { Fp8::e4m3(granularity) };
        let [tokens, heads, d] = shape.dims;
        let x = Memory::new(Dtype::F32, &values(len, seed));
        let count = match granularity { Granularity::Tensor => 1, Granularity::Head => heads, _ => tokens * heads };
        let scales: Vec<f32> = (0..count).map(|i| 0.01 + i as f32 * 0.003).collect();
        let q = fp8::encode(&x.view(shape), format, given.then_some(&scales)).unwrap();
        if given { prop_assert_eq!(q.scales(), &scales[..]); } else { prop_assert_eq!(q.saturated(), 0); }
        let mut y = Memory::new(Dtype::F32, &vec![0.0; len]);
        fp8::decode(&q, &mut y.view_mut(shape)).unwrap();
        for (t, h, c) in (0..tokens).flat_map(|t| (0..heads).flat_map(move |h| (0..d).map(move |c| (t, h, c)))) {
            let i = place(&shape, t, h, c);
            let s = q.scales()[match granularity { Granularity::Tensor => 0, Granularity::Head => h, _ => t * heads + h }];
            let (mantissa, lowest, top) = if e5 { (2, 2f32.powi(-16), 57344.0) } else { (3, 2f32.powi(-9), 448.0) };
            let v = (x.get(i) / s).clamp(-top, top);
            let ulp = (2f32.powi(v.abs().log2().floor() as i32 - mantissa)).max(lowest);
            prop_assert!((y.get(i) / s - v).abs() <= ulp * 0.5001, "{} {}", y.get(i) / s, v);
        }
        let again = Fp8Tensor::from_bytes(shape.dims, format, q.bytes().to_vec(), q.scales().to_vec()).unwrap();
        prop_assert_eq!(again.bytes(), q.bytes());
    }
}

/// The same codes and pairs on every instruction level, through the whole public path. Levels are chosen once a
/// process, so other levels run in child processes.
#[test]
fn every_level_gives_the_same_result() {
    let x = values(128 * 3 * 96, 5);
    let view = TensorRef::thd(&x, [128, 3, 96]).unwrap();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut put =
        |bytes: &[u8]| bytes.iter().for_each(|b| hash = (hash ^ *b as u64).wrapping_mul(0x100_0000_01b3));
    for bits in Bits::ALL {
        for fit in FITS {
            for format in [
                Affine::per_token(bits, 40),
                Affine::per_channel(bits, 64),
                Affine::per_token(bits, 96).with_rotation(32),
            ] {
                let q = quantize(&view, &format.with_fit(fit)).unwrap();
                put(q.packed());
                q.pairs().to_f32().iter().for_each(|(s, m)| {
                    put(&s.to_le_bytes());
                    put(&m.to_le_bytes());
                });
                let mut y = vec![f16::ZERO; x.len()];
                dequantize(&q, &mut TensorMut::thd(&mut y, [128, 3, 96]).unwrap()).unwrap();
                y.iter().for_each(|y| put(&y.to_le_bytes()));
            }
        }
    }
    for kind in [Fp8::e4m3(Granularity::TokenHead), Fp8::e5m2(Granularity::Tensor)] {
        put(fp8::encode(&view, kind, None).unwrap().bytes());
    }
    match std::env::var("QKV_TEST_EXPECT") {
        Ok(want) => assert_eq!(format!("{hash:x}"), want),
        Err(_) => {
            for isa in ["plain", "avx2", "avx512"] {
                let run = std::process::Command::new(std::env::current_exe().unwrap())
                    .args(["every_level_gives_the_same_result", "--exact"])
                    .env("QKV_ISA", isa)
                    .env("QKV_TEST_EXPECT", format!("{hash:x}"))
                    .output()
                    .unwrap();
                assert!(run.status.success(), "{isa}: {}", String::from_utf8_lossy(&run.stdout));
            }
        }
    }
}

#[test]
fn rotation_is_undone_and_lowers_the_error_of_outliers() {
    let mut x = values(64 * 128, 9);
    // One loud channel.
    x.iter_mut().skip(5).step_by(128).for_each(|x| *x += 30.0);
    let view = TensorRef::thd(&x, [64, 1, 128]).unwrap();
    let error = |format: Affine| {
        let q = quantize(&view, &format).unwrap();
        let mut y = vec![0f32; x.len()];
        dequantize(&q, &mut TensorMut::thd(&mut y, [64, 1, 128]).unwrap()).unwrap();
        x.iter().zip(&y).map(|(a, b)| (a - b).powi(2) as f64).sum::<f64>()
    };
    let plain = Affine::per_token(Bits::B4, 128);
    assert!(error(plain.with_rotation(128)) < 0.5 * error(plain));
}

#[test]
fn damage_stays_in_its_group_and_huge_values_are_clamped() {
    let mut x = values(64 * 2 * 64, 11);
    x[3 * 128 + 40] = f32::NAN; // token 3, head 0, channel 40
    x[10 * 128 + 64] = f32::INFINITY; // token 10, head 1, channel 0
    (x[20 * 128], x[21 * 128 + 70]) = (1e9, -70000.0);
    let view = TensorRef::thd(&x, [64, 2, 64]).unwrap();
    for fit in FITS {
        for (format, group) in
            [(Affine::per_token(Bits::B4, 32), 32), (Affine::per_channel(Bits::B4, 32), 32)]
        {
            let q = quantize(&view, &format.with_fit(fit)).unwrap();
            assert_eq!(q.clamped(), 2);
            let mut y = vec![0f32; x.len()];
            dequantize(&q, &mut TensorMut::thd(&mut y, [64, 2, 64]).unwrap()).unwrap();
            for (t, h, c) in (0..64).flat_map(|t| (0..2).flat_map(move |h| (0..64).map(move |c| (t, h, c)))) {
                let hit = match format.axis {
                    Axis::PerToken => (t, h, c / group) == (3, 0, 1) || (t, h, c / group) == (10, 1, 0),
                    Axis::PerChannel => (t / group, h, c) == (0, 0, 40) || (t / group, h, c) == (0, 1, 0),
                };
                assert_eq!(y[(t * 2 + h) * 64 + c].is_nan(), hit, "{fit:?} {format:?} {t} {h} {c}");
            }
            assert!((y[20 * 128] - 65504.0).abs() <= 65504.0 * 0.6, "{}", y[20 * 128]);
        }
    }
}

#[test]
fn wrong_calls_are_typed_errors() {
    let x = vec![0f32; 4 * 2 * 64];
    let view = TensorRef::thd(&x, [4, 2, 64]).unwrap();
    let unsupported =
        |f: Affine| assert!(matches!(quantize(&view, &f), Err(Error::Unsupported { .. })), "{f:?}");
    for group in [0, 1, 65, 257] {
        unsupported(Affine::per_token(Bits::B4, group));
    }
    unsupported(Affine::per_channel(Bits::B4, 257));
    unsupported(Affine::per_token(Bits::B4, 32).with_rotation(128));
    unsupported(Affine::per_token(Bits::B4, 32).with_rotation(7));
    unsupported(Affine::per_token(Bits::B4, 32).with_center());
    unsupported(Affine::per_token(Bits::B4, 32).with_fit(Fit::Hqq { p: 1.5, beta: 10.0, iterations: 20 }));
    let empty = TensorRef::thd(&x, [0, 2, 64]).unwrap();
    assert!(matches!(quantize(&empty, &Affine::per_token(Bits::B4, 32)), Err(Error::Shape { .. })));
    let few = vec![(1.0, 0.0); 15];
    let r = quantize_with(&view, Bits::B4, 32, Axis::PerToken, &few);
    assert!(matches!(r, Err(Error::Length { expected: 16, got: 15, .. })));
    let pairs = vec![(1.0, 0.0); 16];
    let r = Quantized::from_codes([4, 2, 64], Bits::B4, 32, Axis::PerToken, &[16; 512], &pairs);
    assert!(matches!(r, Err(Error::OutOfRange { got: 16, .. })));
    assert!(matches!(pack(&[4], Bits::B2), Err(Error::OutOfRange { .. })));
    assert!(matches!(unpack(&[0; 3], Bits::B3, 9), Err(Error::Length { expected: 4, .. })));
    let q = quantize(&view, &Affine::per_token(Bits::B4, 32)).unwrap();
    let mut y = vec![0f32; 512];
    let mut out = TensorMut::thd(&mut y, [2, 4, 64]).unwrap();
    assert!(matches!(dequantize(&q, &mut out), Err(Error::Shape { .. })));
    let tensor = Fp8::e4m3(Granularity::Tensor);
    assert!(matches!(fp8::encode(&view, tensor, Some(&[0.0])), Err(Error::Unsupported { .. })));
    assert!(matches!(fp8::encode(&view, tensor, Some(&[f32::NAN])), Err(Error::Unsupported { .. })));
    assert!(matches!(fp8::encode(&view, tensor, Some(&[1.0, 1.0])), Err(Error::Length { .. })));
    assert!(matches!(fp8::encode(&empty, tensor, None), Err(Error::Shape { .. })));
    assert!(fp8::value(Fp8Kind::E4M3, 0x7f).is_nan());
}

/// Sizes that no memory holds are refused, not computed with.
#[test]
fn sizes_that_overflow_are_refused() {
    assert!(matches!(unpack(&[], Bits::B8, 1 << 62), Err(Error::Length { .. })));
    assert!(unpack(&[], Bits::B3, usize::MAX).is_err());
    let codes = |dims| Quantized::from_codes(dims, Bits::B1, 2, Axis::PerChannel, &[], &[]);
    assert!(matches!(codes([1 << 63, 1, 4]), Err(Error::Shape { .. })));
    let tensor = Fp8::e4m3(Granularity::Tensor);
    assert!(Fp8Tensor::from_bytes([1 << 63, 2, 1], tensor, vec![], vec![1.0]).is_err());
    // A view with strides of 0 has any number of tokens.
    let shape = Shape { dims: [1 << 40, 1 << 30, 16], batch_tokens: 1 << 40, strides: [0, 0, 0, 1] };
    let x = [0f32; 16];
    let x = TensorRef::new(&x[..], shape).unwrap();
    assert!(quantize(&x, &Affine::per_token(Bits::B4, 16)).is_err());
    assert!(fp8::scales(&x, tensor).is_err() && fp8::encode(&x, tensor, None).is_err());
}

#[test]
fn views_whose_sizes_overflow_are_refused() {
    let x = [0f32; 4];
    assert!(TensorRef::thd(&x[..], [1 << 32, 1 << 32, 2]).is_err());
    assert!(TensorRef::bhtd(&x[..], [1 << 32, 1, 1 << 32, 2]).is_err());
    assert!(TensorRef::bhtd_strided(&x[..], [1 << 32, 1, 1 << 32, 2], [0, 0, 0, 1]).is_err());
}

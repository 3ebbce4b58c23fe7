//! Quantization and decoding of tensors, as a fraction of a copy of as many bytes.

use super::{Bench, Goal};
use crate::gpu::{Host, Random, contiguous};
use qkv::cuda::launch::{
    CodeOrder, DevicePairs, code_lengths, dequantize, fp8_decode, fp8_encode_fitted, quantize,
};
use qkv::{Affine, Bits, Dtype, Fit, Fp8, Fp8Kind, Granularity};

const HEADS: usize = 8;
const DIM: usize = 128;
/// 256 MB of f16.
const TOKENS: usize = 131_072;
const EIGHT_BITS: Goal = Goal::AtLeast(0.95);
const FEWER_BITS: Goal = Goal::AtLeast(0.92);

/// `copy` are bytes a millisecond, read and written ones counted.
pub(crate) fn run(bench: &mut Bench<'_>, copy: f64) {
    let gpu = bench.gpu;
    let tokens =
        if bench.smoke { 128 } else { TOKENS.max((bench.cache / (HEADS * DIM)).next_multiple_of(128)) };
    let n = tokens * HEADS * DIM;
    let dims = [tokens, HEADS, DIM];
    // One tile of numbers, again and again: values do not matter here, but they should differ.
    let some = Random::new(2).normals(n.min(1 << 20));
    let x: Vec<f32> = some.iter().copied().cycle().take(n).collect();
    let x = Host::new(Dtype::F16, &x).up(gpu);
    let mut decoded = Host::new(Dtype::F16, &vec![0.0; n]).up(gpu);
    let formats = [
        ("int8 per token, one pair", Affine::per_token(Bits::B8, DIM)),
        ("int4 per token, groups of 64", Affine::per_token(Bits::B4, 64)),
        ("int4 per channel, groups of 64", Affine::per_channel(Bits::B4, 64)),
        ("int2 per token, groups of 32", Affine::per_token(Bits::B2, 32)),
        ("int2 per channel, groups of 32", Affine::per_channel(Bits::B2, 32)),
        ("int1 per token, groups of 32", Affine::per_token(Bits::B1, 32)),
    ];
    for (name, format) in formats {
        let (format, order) = (format.with_fit(Fit::MinMax), CodeOrder::Rows);
        let goal = Some(if format.bits == Bits::B8 { EIGHT_BITS } else { FEWER_BITS });
        let lengths = code_lengths(dims, tokens, &format, order).expect("a valid format");
        let (mut codes, mut pairs) = (gpu.zeros::<u8>(lengths.codes), gpu.zeros::<u32>(lengths.pairs));
        let bytes = 2 * n + lengths.codes + 4 * lengths.pairs;
        let ms = bench.median(1, |_| {
            let (c, p) = ((&mut codes).into(), (&mut pairs).into());
            quantize(&gpu.device, gpu.raw(), &x.view(contiguous(dims)), &format, order, c, p, None)
                .expect("a launch");
        });
        bench.add("convert", format!("quantize {name}"), ms, bytes, Some(copy), goal);
        let ms = bench.median(1, |_| {
            let (c, p) = ((&codes).into(), DevicePairs::F16((&pairs).into()));
            let mut to = decoded.view_mut(contiguous(dims));
            dequantize(&gpu.device, gpu.raw(), c, p, &format, order, &mut to).expect("a launch");
        });
        bench.add("convert", format!("dequantize {name}"), ms, bytes, Some(copy), goal);
    }
    let (mut scales, mut codes) = (gpu.zeros::<f32>(tokens * HEADS), gpu.zeros::<u8>(n));
    let bytes = 3 * n + 4 * tokens * HEADS;
    let ms = bench.median(1, |_| {
        let (s, c) = ((&mut scales).into(), (&mut codes).into());
        fp8_encode_fitted(&gpu.device, gpu.raw(), &x.view(contiguous(dims)), Fp8Kind::E4M3, s, c)
            .expect("a launch");
    });
    let name = "e4m3, scale a token and head";
    bench.add("convert", format!("encode {name}"), ms, bytes, Some(copy), Some(EIGHT_BITS));
    let ms = bench.median(1, |_| {
        let (c, s) = ((&codes).into(), (&scales).into());
        let mut to = decoded.view_mut(contiguous(dims));
        fp8_decode(&gpu.device, gpu.raw(), c, Fp8::e4m3(Granularity::TokenHead), s, &mut to)
            .expect("a launch");
    });
    bench.add("convert", format!("decode {name}"), ms, bytes, Some(copy), Some(EIGHT_BITS));
}

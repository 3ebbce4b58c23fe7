//! Decoding of tensors against the CPU, what it costs, and its refusals.

use crate::gpu::{Gpu, Host, Random, layout};
use qkv::cuda::launch::{CodeOrder, DevicePairs, code_lengths, dequantize};
use qkv::layout::{Operand, Order, PageLayout, TILE, convert_page};
use qkv::quant::{self, Pairs, Quantized};
use qkv::{Affine, Axis, Bits, DataMut, Dtype, Error, Fit, Format, Shape, TensorMut, TensorRef};

/// Equal bits, or both NaN.
pub(crate) fn same(a: &Host, b: &Host) -> Result<(), String> {
    let values = |x: &Host| -> Vec<f32> {
        match x {
            Host::F16(x) => x.iter().map(|x| x.to_f32()).collect(),
            Host::Bf16(x) => x.iter().map(|x| x.to_f32()).collect(),
            Host::F32(x) => x.clone(),
        }
    };
    let (x, y) = (values(a), values(b));
    for (i, (p, q)) in a.bits().iter().zip(b.bits()).enumerate() {
        if *p != q && !(x[i].is_nan() && y[i].is_nan()) {
            return Err(format!("element {i}: {:e}, not {:e}", x[i], y[i]));
        }
    }
    Ok(())
}

pub(crate) fn host_mut(x: &mut Host) -> DataMut<'_> {
    match x {
        Host::F16(x) => x.into(),
        Host::Bf16(x) => x.into(),
        Host::F32(x) => x.into(),
    }
}

/// Codes and pairs of a tensor as tiles in fragment order.
fn fragments(q: &Quantized, format: &Affine, batch: usize, operand: Operand) -> (Vec<u8>, Vec<u32>) {
    let ([tokens, heads, dim], f) = (q.dims(), Format::Affine(*format));
    let layout = PageLayout::new(&f, &f, dim, dim);
    let at = if operand == Operand::Key { layout.key } else { layout.value };
    let Pairs::F16(words) = q.pairs() else { unreachable!() };
    let (row, groups) = (at.row_bytes, dim.div_ceil(format.group));
    let tiles_of_batch = batch.div_ceil(TILE);
    let groups_of_batch = batch.div_ceil(format.group);
    let all_groups = tokens / batch * groups_of_batch;
    let (mut codes, mut pairs) = (Vec::new(), Vec::new());
    for head in 0..heads {
        for tile in 0..tokens / batch * tiles_of_batch {
            let (b, first) = (tile / tiles_of_batch, tile % tiles_of_batch * TILE);
            let mut page = vec![0u8; layout.page_bytes];
            let put = |page: &mut Vec<u8>, index: usize, word: usize| {
                page[at.pairs + 4 * index..][..4].copy_from_slice(&words[word].to_bits().to_le_bytes());
            };
            for t in 0..TILE.min(batch - first) {
                let r = (b * batch + first + t) * heads + head;
                page[at.codes + t * row..][..row].copy_from_slice(&q.packed()[r * row..][..row]);
                for j in (0..groups).filter(|_| format.axis == Axis::PerToken) {
                    put(&mut page, t * groups + j, r * groups + j);
                }
                if format.axis == Axis::PerChannel && t % format.group == 0 {
                    let g = b * groups_of_batch + (first + t) / format.group;
                    for c in 0..dim {
                        put(&mut page, t / format.group * dim + c, (head * all_groups + g) * dim + c);
                    }
                }
            }
            let mut out = vec![0u8; page.len()];
            convert_page(&f, &f, &layout, Order::Row, &page, Order::Fragment, &mut out).unwrap();
            codes.extend(&out[at.codes..][..at.code_bytes]);
            let section = &out[at.pairs..][..at.pair_bytes];
            pairs.extend(section.chunks_exact(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())));
        }
    }
    (codes, pairs)
}

/// Values of all kinds: NaN, infinity, huge, zero, constant rows.
fn values(random: &mut Random, n: usize) -> Vec<f32> {
    let mut x = random.normals(n);
    for _ in 0..n / 500 {
        let i = random.below(n);
        x[i] = random.pick(&[f32::NAN, f32::INFINITY, 1e30, -0.0, 1e-6]);
    }
    x
}

fn check(gpu: &Gpu, random: &mut Random, format: Affine, dims: [usize; 3], orders: &[CodeOrder]) {
    let dtype = random.pick(&[Dtype::F32, Dtype::F16, Dtype::Bf16]);
    let (shape, n) = layout(random, dims);
    let x = values(random, dims.iter().product());
    // The batch rows of the output are those of the groups.
    let [_, h, d] = dims;
    let rows =
        Shape { dims, batch_tokens: shape.batch_tokens, strides: [shape.batch_tokens * h * d, h * d, d, 1] };
    let q = quant::quantize(&TensorRef::new(&x, rows).unwrap(), &format).unwrap();
    let mut want = Host::new(dtype, &vec![7.0; n]);
    quant::dequantize(&q, &mut TensorMut::new(host_mut(&mut want), shape).unwrap()).unwrap();
    for &order in orders {
        let (codes, pairs) = match order {
            CodeOrder::Rows => {
                let Pairs::F16(p) = q.pairs() else { unreachable!() };
                (q.packed().to_vec(), p.iter().map(|p| p.to_bits()).collect())
            }
            CodeOrder::Fragments(operand) => fragments(&q, &format, shape.batch_tokens, operand),
        };
        let lengths = code_lengths(dims, shape.batch_tokens, &format, order).unwrap();
        assert_eq!(
            (lengths.codes, lengths.pairs),
            (codes.len(), pairs.len()),
            "{format:?} {dims:?} {order:?}"
        );
        let (codes, pairs) = (gpu.up(&codes), gpu.up(&pairs));
        let mut out = Host::new(dtype, &vec![7.0; n]).up(gpu);
        let pairs = DevicePairs::F16((&pairs).into());
        dequantize(&gpu.device, gpu.raw(), (&codes).into(), pairs, &format, order, &mut out.view_mut(shape))
            .unwrap();
        let got = out.down(gpu);
        if let Err(e) = same(&got, &want) {
            panic!("{format:?} {dims:?} {order:?} {dtype:?} {shape:?}: {e}");
        }
    }
}

#[test]
fn rows_of_all_formats_and_shapes_decode_as_on_the_cpu() {
    let gpu = Gpu::new();
    let mut random = Random::new(11);
    for bits in Bits::ALL {
        for case in 0..16 {
            let dim = random.pick(&[64, 80, 96, 112, 128, 256, 5, 20, 24]);
            let dims =
                [1 + random.below(if case % 4 == 0 { 140 } else { 40 }), random.pick(&[1, 2, 3, 8]), dim];
            let group = random.pick(&[32, 64, 128, 2, 5, 24, 256]);
            let format = if case % 2 == 0 {
                Affine::per_channel(bits, group)
            } else {
                Affine::per_token(bits, group.min(dim))
            };
            let mut format = format.with_fit(Fit::MinMax);
            if dim.is_multiple_of(32) && case % 3 == 0 {
                format = format.with_rotation(
                    random.pick(&[32, 64, 128].map(|b| if dim.is_multiple_of(b) { b } else { 32 })),
                );
            }
            check(&gpu, &mut random, format, dims, &[CodeOrder::Rows]);
        }
    }
}

#[test]
fn tiles_of_all_formats_decode_as_on_the_cpu() {
    let gpu = Gpu::new();
    let mut random = Random::new(12);
    for bits in Bits::ALL {
        for (case, dim) in [64, 80, 96, 112, 128, 256].into_iter().enumerate() {
            let dims = [1 + random.below(150), random.pick(&[1, 2]), dim];
            let format = if (case + bits.get()) % 2 == 0 {
                Affine::per_channel(bits, random.pick(&[32, 64]))
            } else {
                Affine::per_token(bits, random.pick(&[32, 64, dim]))
            };
            let mut format = format.with_fit(Fit::MinMax);
            if dim.is_multiple_of(32) && random.below(2) == 0 {
                format = format.with_rotation(32);
            }
            let orders = [CodeOrder::Fragments(Operand::Key), CodeOrder::Fragments(Operand::Value)];
            check(&gpu, &mut random, format, dims, &orders);
        }
    }
}

#[test]
fn pairs_of_f32_are_taken_as_they_are() {
    let gpu = Gpu::new();
    let mut random = Random::new(13);
    for axis in [Axis::PerToken, Axis::PerChannel] {
        for (dims, group) in [([9, 3, 64], 32), ([70, 2, 128], 32), ([5, 1, 40], 7)] {
            let bits = random.pick(&Bits::ALL);
            let n: usize = dims.iter().product();
            let codes: Vec<u8> = (0..n).map(|_| random.below(bits.max_code() as usize + 1) as u8).collect();
            let count = match axis {
                Axis::PerToken => dims[0] * dims[1] * dims[2].div_ceil(group),
                Axis::PerChannel => dims[0].div_ceil(group) * dims[1] * dims[2],
            };
            let pairs: Vec<(f32, f32)> = (0..count).map(|_| (random.normal(), random.normal())).collect();
            let q = Quantized::from_codes(dims, bits, group, axis, &codes, &pairs).unwrap();
            let mut want = vec![0f32; n];
            quant::dequantize(&q, &mut TensorMut::thd(&mut want, dims).unwrap()).unwrap();
            let format = Affine::per_token(bits, group);
            let format = if axis == Axis::PerToken { format } else { Affine::per_channel(bits, group) };
            let flat: Vec<f32> = pairs.iter().flat_map(|p| [p.0, p.1]).collect();
            let (codes, flat) = (gpu.up(q.packed()), gpu.up(&flat));
            let mut out = Host::new(Dtype::F32, &vec![0.0; n]).up(&gpu);
            dequantize(
                &gpu.device,
                gpu.raw(),
                (&codes).into(),
                DevicePairs::F32((&flat).into()),
                &format,
                CodeOrder::Rows,
                &mut out.view_mut(crate::gpu::contiguous(dims)),
            )
            .unwrap();
            same(&out.down(&gpu), &Host::F32(want)).unwrap_or_else(|e| panic!("{axis:?} {dims:?}: {e}"));
        }
    }
}

#[test]
fn contiguous_tensors_cost_their_bytes() {
    let gpu = Gpu::new();
    let Some(simulator) = gpu.simulator else { return };
    let mut random = Random::new(14);
    let orders = [CodeOrder::Rows, CodeOrder::Fragments(Operand::Key), CodeOrder::Fragments(Operand::Value)];
    for bits in Bits::ALL {
        for format in
            [Affine::per_token(bits, 32), Affine::per_token(bits, 128), Affine::per_channel(bits, 64)]
        {
            for (rotate, dtype) in [(false, Dtype::F16), (false, Dtype::F32), (true, Dtype::Bf16)] {
                let format = if rotate { format.with_rotation(64) } else { format };
                for order in orders {
                    let dims = [128, 4, 128];
                    let n: usize = dims.iter().product();
                    let lengths = code_lengths(dims, dims[0], &format, order).unwrap();
                    let codes: Vec<u8> = (0..lengths.codes).map(|_| random.bits() as u8).collect();
                    let pairs = vec![0x3c00_3c00u32; lengths.pairs];
                    let (codes, pairs) = (gpu.up(&codes), gpu.up(&pairs));
                    let mut out = Host::new(dtype, &vec![0.0; n]).up(&gpu);
                    simulator.take_stats();
                    dequantize(
                        &gpu.device,
                        gpu.raw(),
                        (&codes).into(),
                        DevicePairs::F16((&pairs).into()),
                        &format,
                        order,
                        &mut out.view_mut(crate::gpu::contiguous(dims)),
                    )
                    .unwrap();
                    out.down(&gpu);
                    let least = lengths.codes + 4 * lengths.pairs + n * dtype.bytes();
                    crate::cost(simulator, least, &format!("{format:?} {order:?} {dtype:?}"));
                }
            }
        }
    }
}

#[test]
fn bad_arguments_start_nothing() {
    let gpu = Gpu::new();
    let format = Affine::per_token(Bits::B4, 32);
    let dims = [3, 2, 64];
    let codes = gpu.zeros::<u8>(3 * 2 * 32);
    let pairs = gpu.zeros::<u32>(3 * 2 * 2);
    let wide = gpu.zeros::<f32>(3 * 2 * 4);
    let mut out = Host::new(Dtype::F32, &[7.0; 384]).up(&gpu);
    let mut go = |codes: &cudarc::driver::CudaView<'_, u8>,
                  pairs: DevicePairs<'_>,
                  format: &Affine,
                  order,
                  dims: [usize; 3]| {
        dequantize(
            &gpu.device,
            gpu.raw(),
            codes.into(),
            pairs,
            format,
            order,
            &mut out.view_mut(crate::gpu::contiguous(dims)),
        )
    };
    let narrow = || DevicePairs::F16((&pairs).into());
    let all = codes.slice(..);
    let rows = CodeOrder::Rows;
    assert!(matches!(
        go(&codes.slice(1..), narrow(), &format, rows, dims),
        Err(Error::Length { what: "codes", .. })
    ));
    assert!(matches!(go(&all, narrow(), &format, rows, [3, 2, 32]), Err(Error::Length { .. })));
    assert!(matches!(
        go(&all, DevicePairs::F16((&pairs.slice(1..)).into()), &format, rows, dims),
        Err(Error::Length { what: "pairs", .. })
    ));
    assert!(matches!(
        go(&all, DevicePairs::F32((&wide.slice(1..)).into()), &format, rows, dims),
        Err(Error::Length { what: "pairs", .. })
    ));
    let key = CodeOrder::Fragments(Operand::Key);
    assert!(matches!(
        go(&all, DevicePairs::F32((&wide).into()), &format, key, dims),
        Err(Error::Unsupported { what: "pairs", .. })
    ));
    for bad in [
        Affine::per_token(Bits::B4, 1),
        Affine::per_token(Bits::B4, 65),
        Affine::per_channel(Bits::B4, 257),
        Affine::per_token(Bits::B4, 32).with_rotation(48),
        Affine::per_token(Bits::B4, 32).with_rotation(128),
        Affine::per_token(Bits::B4, 32).with_center(),
    ] {
        assert!(matches!(go(&all, narrow(), &bad, rows, dims), Err(Error::Unsupported { .. })), "{bad:?}");
    }
    let odd = Affine::per_token(Bits::B4, 24);
    assert!(matches!(go(&all, narrow(), &odd, key, dims), Err(Error::Unsupported { .. })));
    // A misaligned address with the right length.
    let longer = gpu.zeros::<u8>(3 * 2 * 32 + 1);
    assert!(matches!(go(&longer.slice(1..), narrow(), &format, rows, dims), Err(Error::Address { .. })));
    assert!(
        go(&codes.slice(..0), DevicePairs::F16((&pairs.slice(..0)).into()), &format, rows, [0, 2, 64])
            .is_ok()
    );
    let Host::F32(got) = out.down(&gpu) else { unreachable!() };
    assert!(got.iter().all(|x| *x == 7.0));
}

//! Pages: copied, gathered and rewritten, against the layout's functions and plain arithmetic.

use crate::dequantize::same;
use crate::gpu::{Gpu, Host, Random, layout};
use crate::layout::formats;
use cudarc::driver::CudaSlice;
use half::{bf16, f16};
use qkv::cuda::launch::{GatherInputs, PageList, check_copies, convert_pages, copy_blocks, gather};
use qkv::cuda::{PageFormat, Pages, PagesMut};
use qkv::layout::{Operand, OperandLayout, Order, TILE, code_bit, convert_page, pair_bytes};
use qkv::quant::{Pair, fp8};
use qkv::{Affine, Bits, Dtype, Error, Format, Fp8, Granularity};

/// A page with random codes and sensible pairs, in fragment order.
fn random_page(random: &mut Random, format: &PageFormat) -> Vec<u8> {
    let layout = format.layout();
    let mut row: Vec<u8> = (0..layout.page_bytes).map(|_| random.bits() as u8).collect();
    for (f, at) in [(format.key(), layout.key), (format.value(), layout.value)] {
        for i in 0..at.pair_count {
            let word = match f {
                Format::Fp8(_) => random.unit().to_bits(),
                _ => Pair {
                    step: f16::from_f32(random.unit()),
                    min: f16::from_f32(if random.below(3) == 0 {
                        random.pick(&[f32::NAN, -0.0])
                    } else {
                        random.normal()
                    }),
                }
                .to_bits(),
            };
            row[at.pairs + 4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
    let mut page = vec![0u8; row.len()];
    convert(format, Order::Row, &row, Order::Fragment, &mut page);
    page
}

fn convert(format: &PageFormat, from: Order, page: &[u8], to: Order, out: &mut [u8]) {
    convert_page(format.key(), format.value(), format.layout(), from, page, to, out).unwrap();
}

fn random_pool(random: &mut Random, format: &PageFormat, pages: usize) -> Vec<u8> {
    (0..pages).flat_map(|_| random_page(random, format)).collect()
}

/// One operand of a page in fragment order as f32 `[64][dim]`: by the place of every bit.
fn decode(
    format: &Format,
    operand: Operand,
    at: &OperandLayout,
    page: &[u8],
    scale: f32,
    mean: &[f16],
) -> Vec<f32> {
    let mut out = vec![0f32; TILE * at.dim];
    for token in 0..TILE {
        let row = &mut out[token * at.dim..][..at.dim];
        for (channel, o) in row.iter_mut().enumerate() {
            let code = (0..format.code_bits()).fold(0u32, |code, bit| {
                let (byte, i) = code_bit(format, operand, at, Order::Fragment, token, channel, bit);
                code | u32::from(page[at.codes + byte] >> i & 1) << bit
            });
            let halves = pair_bytes(format, operand, at, Order::Fragment, token, channel)
                .map(|p| p.map(|b| u16::from_le_bytes([page[at.pairs + b], page[at.pairs + b + 1]])));
            *o = match (format, halves) {
                (Format::F16, _) => f16::from_bits(code as u16).to_f32(),
                (Format::Bf16, _) => bf16::from_bits(code as u16).to_f32(),
                (Format::Fp8(f), None) => scale * fp8::value(f.kind, code as u8),
                (Format::Fp8(f), Some([low, high])) => {
                    f32::from_bits(u32::from(low) | u32::from(high) << 16) * fp8::value(f.kind, code as u8)
                }
                (_, Some([step, min])) => {
                    let product = f16::from_bits(step).to_f32() * code as f32;
                    product + f16::from_bits(min).to_f32()
                }
                _ => unreachable!(),
            };
        }
        if let Some(n) = format.rotation() {
            for block in row.chunks_exact_mut(n) {
                let mut s = n / 2;
                while s > 0 {
                    for i in (0..n).filter(|i| i & s == 0) {
                        (block[i], block[i + s]) = (block[i] + block[i + s], block[i] - block[i + s]);
                    }
                    s /= 2;
                }
                block.iter_mut().for_each(|x| *x *= 1.0 / (n as f32).sqrt());
            }
        }
        for (o, m) in row.iter_mut().zip(mean) {
            *o += m.to_f32();
        }
    }
    out
}

fn up_status(gpu: &Gpu) -> CudaSlice<u32> {
    gpu.zeros::<u32>(1)
}

#[test]
fn pages_convert_as_on_the_host() {
    let gpu = Gpu::new();
    let mut random = Random::new(21);
    for dim in [64, 80, 96, 112, 128, 256, 16] {
        let all: Vec<Format> =
            formats(dim).into_iter().filter(|f| PageFormat::new(*f, *f, dim, dim).is_ok()).collect();
        for (i, key) in all.iter().enumerate() {
            // Every format as keys and as values; all dims with themselves and one other.
            let value = all[(i * 7 + 3) % all.len()];
            let Ok(format) = PageFormat::new(*key, value, dim, dim) else { continue };
            let bytes = format.layout().page_bytes;
            let (blocks, heads) = (2, 2);
            let pool = random_pool(&mut random, &format, blocks * heads);
            let list: Vec<i64> = vec![3, -1, 0, 4, 1];
            let mut device = gpu.up(&pool);
            let (numbers, mut status) = (gpu.up(&list), up_status(&gpu));
            let mut out = gpu.up(&vec![9u8; list.len() * bytes]);
            convert_pages(
                &gpu.device,
                gpu.raw(),
                &mut PagesMut::new(&mut device, heads, format).unwrap(),
                Order::Fragment,
                (&numbers).into(),
                PageList::Export((&mut out).into()),
                Order::Row,
                (&mut status).into(),
            )
            .unwrap();
            let rows = gpu.down(&out);
            assert_eq!(gpu.down(&status), [1], "page 4 does not exist");
            for (got, page) in rows.chunks_exact(bytes).zip(&list) {
                let mut want = vec![9u8; bytes];
                if (0..4).contains(page) {
                    convert(
                        &format,
                        Order::Fragment,
                        &pool[*page as usize * bytes..][..bytes],
                        Order::Row,
                        &mut want,
                    );
                }
                assert!(
                    got == want,
                    "{key:?} {value:?} {dim} page {page}: {:?}",
                    first_difference(got, &want)
                );
            }
            // Back into another pool.
            let mut other = gpu.up(&vec![5u8; pool.len()]);
            convert_pages(
                &gpu.device,
                gpu.raw(),
                &mut PagesMut::new(&mut other, heads, format).unwrap(),
                Order::Fragment,
                (&numbers).into(),
                PageList::Import((&out).into()),
                Order::Row,
                (&mut status).into(),
            )
            .unwrap();
            let got = gpu.down(&other);
            let mut want = pool.clone();
            want[2 * bytes..3 * bytes].fill(5);
            assert!(got == want, "{key:?} {value:?} {dim} back: {:?}", first_difference(&got, &want));
        }
    }
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<(usize, u8, u8)> {
    a.iter().zip(b).enumerate().find(|(_, (x, y))| x != y).map(|(i, (x, y))| (i, *x, *y))
}

fn with_extras(random: &mut Random, f: Format, dim: usize) -> Format {
    match f {
        Format::Affine(a) if dim.is_multiple_of(32) && random.below(2) == 0 => {
            let block = random.pick(&[32, 64, 128]);
            a.with_rotation(if dim.is_multiple_of(block) { block } else { 32 }).into()
        }
        f => f,
    }
}

#[test]
fn a_sequence_is_gathered_as_its_bits_say() {
    let gpu = Gpu::new();
    let mut random = Random::new(22);
    let dims = [64, 80, 96, 112, 128, 256];
    for case in 0..90 {
        let (key_dim, value_dim) = (random.pick(&dims), random.pick(&dims));
        let (keys, values) = (formats(key_dim), formats(value_dim));
        let mut key = with_extras(&mut random, keys[case % keys.len()], key_dim);
        let value = with_extras(&mut random, values[(case * 5 + 1) % values.len()], value_dim);
        if let Format::Affine(a) = key
            && key.is_per_token()
            && random.below(2) == 0
        {
            key = a.with_center().into();
        }
        let Ok(format) = PageFormat::new(key, value, key_dim, value_dim) else { continue };
        let (heads, blocks) = (random.pick(&[1, 2, 3]), 4);
        let tokens = 1 + random.below(150);
        let pool = random_pool(&mut random, &format, blocks * heads);
        let tiles = tokens.div_ceil(TILE);
        let table: Vec<i32> = (0..tiles).map(|i| [2, 0, 3][i]).collect();
        let per_head = |random: &mut Random, f: &Format| match f {
            Format::Fp8(p) if p.granularity == Granularity::Head => heads,
            _ if random.below(2) == 0 => heads,
            _ => 1,
        };
        let scales =
            |random: &mut Random, n: usize| -> Vec<f32> { (0..n).map(|_| random.unit() + 0.1).collect() };
        let (nk, nv) = (per_head(&mut random, &key), per_head(&mut random, &value));
        let (ks, vs) = (scales(&mut random, nk), scales(&mut random, nv));
        let mean: Vec<f16> = (0..heads * key_dim).map(|_| f16::from_f32(random.normal())).collect();
        let dtype = random.pick(&[Dtype::F32, Dtype::F16, Dtype::Bf16]);
        let (k_shape, kn) = layout(&mut random, [tokens, heads, key_dim]);
        let (v_shape, vn) = layout(&mut random, [tokens, heads, value_dim]);
        let (device, numbers) = (gpu.up(&pool), gpu.up(&table));
        let (ks_up, vs_up, mean_up) = (gpu.up(&ks), gpu.up(&vs), gpu.up(&mean));
        let mut k = Host::new(dtype, &vec![7.0; kn]).up(&gpu);
        let mut v = Host::new(dtype, &vec![7.0; vn]).up(&gpu);
        let mut status = up_status(&gpu);
        let inputs = GatherInputs {
            key_scales: Some((&ks_up).into()),
            value_scales: Some((&vs_up).into()),
            key_mean: key.centered().then(|| (&mean_up).into()),
        };
        gather(
            &gpu.device,
            gpu.raw(),
            &Pages::new(&device, heads, format).unwrap(),
            Order::Fragment,
            (&numbers).into(),
            &inputs,
            &mut k.view_mut(k_shape),
            &mut v.view_mut(v_shape),
            (&mut status).into(),
        )
        .unwrap();
        assert_eq!(gpu.down(&status), [0]);
        let bytes = format.layout().page_bytes;
        let none: &[f16] = &[];
        for (operand, f, at, shape, n, out, scales) in [
            (Operand::Key, &key, format.layout().key, k_shape, kn, &k, &ks),
            (Operand::Value, &value, format.layout().value, v_shape, vn, &v, &vs),
        ] {
            let mut want = vec![7f32; n];
            for (tile, block) in table.iter().enumerate() {
                for head in 0..heads {
                    let page = &pool[(*block as usize * heads + head) * bytes..][..bytes];
                    let centred = operand == Operand::Key && f.centered();
                    let mean = if centred { &mean[head * at.dim..][..at.dim] } else { none };
                    let x = decode(f, operand, &at, page, scales[head % scales.len()], mean);
                    for t in 0..TILE.min(tokens - tile * TILE) {
                        for c in 0..at.dim {
                            let token = tile * TILE + t;
                            let (b, i) = (token / shape.batch_tokens, token % shape.batch_tokens);
                            let s = shape.strides;
                            want[b * s[0] + i * s[1] + head * s[2] + c * s[3]] = x[t * at.dim + c];
                        }
                    }
                }
            }
            same(&out.down(&gpu), &Host::new(dtype, &want))
                .unwrap_or_else(|e| panic!("case {case} {operand:?} {f:?} {shape:?} {dtype:?}: {e}"));
        }
    }
}

fn simple() -> PageFormat {
    let f = Affine::per_token(Bits::B4, 32);
    PageFormat::new(f.into(), f.into(), 64, 64).unwrap()
}

#[test]
fn a_table_without_a_block_is_reported_and_the_rest_decoded() {
    let gpu = Gpu::new();
    let mut random = Random::new(23);
    let format = simple();
    let pool = random_pool(&mut random, &format, 4);
    let (device, table) = (gpu.up(&pool), gpu.up(&[1i32, -1, 2, 0]));
    let mut status = up_status(&gpu);
    let mut out = [0, 1].map(|_| Host::new(Dtype::F32, &vec![7.0; 256 * 2 * 64]).up(&gpu));
    let [k, v] = &mut out;
    let shape = crate::gpu::contiguous([256, 2, 64]);
    gather(
        &gpu.device,
        gpu.raw(),
        &Pages::new(&device, 2, format).unwrap(),
        Order::Fragment,
        (&table).into(),
        &GatherInputs::default(),
        &mut k.view_mut(shape),
        &mut v.view_mut(shape),
        (&mut status).into(),
    )
    .unwrap();
    assert_eq!(gpu.down(&status), [2], "no block -1, no block 2");
    let Host::F32(k) = out[0].down(&gpu) else { unreachable!() };
    assert!(k[64 * 128..192 * 128].iter().all(|x| *x == 7.0));
    let f = format.key();
    let bytes = format.layout().page_bytes;
    let want = decode(f, Operand::Key, &format.layout().key, &pool[..bytes], 1.0, &[]);
    let rows: Vec<f32> = (192..256).flat_map(|t| k[t * 128..t * 128 + 64].to_vec()).collect();
    same(&Host::F32(rows), &Host::F32(want)).unwrap();
}

#[test]
fn blocks_are_copied_and_bad_pairs_counted() {
    let gpu = Gpu::new();
    let mut random = Random::new(24);
    for (heads, key_dim) in [(1, 16), (3, 64), (8, 128)] {
        let f = Affine::per_token(Bits::B3, key_dim);
        let format = PageFormat::new(f.into(), Format::F16, key_dim, 48).unwrap();
        let block = heads * format.layout().page_bytes;
        let pool: Vec<u8> = (0..6 * block).map(|_| random.bits() as u8).collect();
        let pairs = [0i32, 3, -1, 4, 1, -1, 6, 2, 2, 6, -2, 1, 5, 5, 1, 4, 0, i32::MIN];
        let (mut device, numbers, mut status) = (gpu.up(&pool), gpu.up(&pairs), up_status(&gpu));
        copy_blocks(
            &gpu.device,
            gpu.raw(),
            &mut PagesMut::new(&mut device, heads, format).unwrap(),
            (&numbers).into(),
            (&mut status).into(),
        )
        .unwrap();
        let mut want = pool.clone();
        want.copy_within(..block, 3 * block);
        want.copy_within(block..2 * block, 4 * block);
        assert!(gpu.down(&device) == want);
        assert_eq!(gpu.down(&status), [4]);
    }
}

#[test]
fn copies_are_checked_on_the_host() {
    let check = |pairs: &[i32]| check_copies(pairs, 6);
    for fine in [&[][..], &[0, 3, 0, 4], &[5, 5], &[-1, 9, 9, -1, 0, 1], &[2, 2, 0, 1], &[0, 1, 1, 1]] {
        assert_eq!(check(fine), Ok(()), "{fine:?}");
    }
    let odd = check(&[0, 1, 2]);
    assert!(matches!(odd, Err(Error::Length { expected: 4, got: 3, .. })), "{odd:?}");
    for bad in [[0, 6], [6, 0], [-2, 0], [0, i32::MIN], [6, 6]] {
        assert!(matches!(check(&bad), Err(Error::OutOfRange { limit: 6, .. })), "{bad:?}");
    }
    for bad in [[0, 3, 1, 3], [0, 3, 0, 3], [1, 2, 2, 3], [0, 1, 1, 0]] {
        assert!(matches!(check(&bad), Err(Error::Unsupported { what: "copies", .. })), "{bad:?}");
    }
}

#[test]
fn pages_cost_their_bytes() {
    let gpu = Gpu::new();
    let Some(simulator) = gpu.simulator else { return };
    let mut random = Random::new(25);
    let dim = 128;
    let (heads, blocks) = (4, 2);
    let mut all: Vec<(Format, Format)> = vec![
        (Format::F16, Format::Bf16),
        (Fp8::e4m3(Granularity::TokenHead).into(), Fp8::e5m2(Granularity::TokenHead).into()),
    ];
    for bits in Bits::ALL {
        let (t, c) = (Affine::per_token(bits, 32), Affine::per_channel(bits, 32));
        let whole = Affine::per_token(bits, dim);
        all.extend([
            (t.into(), c.into()),
            (c.into(), t.into()),
            (whole.into(), whole.with_rotation(128).into()),
        ]);
    }
    for (key, value) in all {
        let format = PageFormat::new(key, value, dim, dim).unwrap();
        let bytes = format.layout().page_bytes;
        let pool = random_pool(&mut random, &format, heads * blocks);
        let mut device = gpu.up(&pool);
        let mut status = up_status(&gpu);
        let what = format!("{key:?} {value:?}");

        let numbers = gpu.up(&(0..(heads * blocks) as i64).collect::<Vec<_>>());
        let mut list = gpu.zeros::<u8>(pool.len());
        for import in [false, true] {
            let ends =
                if import { PageList::Import((&list).into()) } else { PageList::Export((&mut list).into()) };
            simulator.take_stats();
            convert_pages(
                &gpu.device,
                gpu.raw(),
                &mut PagesMut::new(&mut device, heads, format).unwrap(),
                Order::Fragment,
                (&numbers).into(),
                ends,
                Order::Row,
                (&mut status).into(),
            )
            .unwrap();
            gpu.down(&status);
            // Each operand of a page reads its number: a broadcast, counted once a lane.
            let padding = 2 * 8 * 128 * heads * blocks;
            crate::cost(simulator, 2 * heads * blocks * bytes + padding, &format!("convert {what} {import}"));
        }

        let table = gpu.up(&(0..blocks as i32).collect::<Vec<_>>());
        for dtype in [Dtype::F16, Dtype::F32] {
            let tokens = blocks * TILE;
            let n = tokens * heads * dim;
            let mut out = [0, 1].map(|_| Host::new(dtype, &vec![0.0; n]).up(&gpu));
            let [k, v] = &mut out;
            let shape = crate::gpu::contiguous([tokens, heads, dim]);
            simulator.take_stats();
            gather(
                &gpu.device,
                gpu.raw(),
                &Pages::new(&device, heads, format).unwrap(),
                Order::Fragment,
                (&table).into(),
                &GatherInputs::default(),
                &mut k.view_mut(shape),
                &mut v.view_mut(shape),
                (&mut status).into(),
            )
            .unwrap();
            gpu.down(&status);
            let least = heads * blocks * bytes + 2 * n * dtype.bytes() + 2 * 4 * 128 * heads * blocks;
            crate::cost(simulator, least, &format!("gather {what} {dtype:?}"));
        }

        let pairs = gpu.up(&[0i32, 1]);
        simulator.take_stats();
        copy_blocks(
            &gpu.device,
            gpu.raw(),
            &mut PagesMut::new(&mut device, heads, format).unwrap(),
            (&pairs).into(),
            (&mut status).into(),
        )
        .unwrap();
        gpu.down(&status);
        let parts = (heads * bytes).div_ceil(8192);
        crate::cost(simulator, 2 * heads * bytes + parts * 128 * 8, &format!("copy {what}"));
    }
}

/// Both sections of a 4-bit page, codes and pairs, from row order to fragment order: what closes a tile does this after the fit.
#[test]
fn pages_pack_with_few_shuffles() {
    let gpu = Gpu::new();
    let Some(simulator) = gpu.simulator else { return };
    for dim in [64, 80, 128, 256] {
        let token = Affine::per_token(Bits::B4, 32);
        for (key, counted) in [(token, true), (Affine::per_channel(Bits::B4, 64), false)] {
            let format = PageFormat::new(key.into(), key.into(), dim, dim).unwrap();
            let mut memory = gpu.zeros::<u8>(format.layout().page_bytes);
            let (list, numbers) = (gpu.zeros::<u8>(format.layout().page_bytes), gpu.zeros::<i64>(1));
            let mut status = up_status(&gpu);
            simulator.take_stats();
            convert_pages(
                &gpu.device,
                gpu.raw(),
                &mut PagesMut::new(&mut memory, 1, format).unwrap(),
                Order::Fragment,
                (&numbers).into(),
                PageList::Import((&list).into()),
                Order::Row,
                (&mut status).into(),
            )
            .unwrap();
            gpu.stream.synchronize().unwrap();
            let what = format!("{key:?} {dim}");
            let n = crate::quantize::shuffles(simulator, &what);
            assert!(n <= 12.0, "{what}: {n} shuffles a warp");
            assert!(n > 0.0 || !counted, "{what}: {n} shuffles a warp");
        }
    }
}

#[test]
fn what_is_no_pool_is_refused() {
    let gpu = Gpu::new();
    let format = simple();
    let bytes = format.layout().page_bytes;
    let memory = gpu.zeros::<u8>(4 * bytes + 16);
    let pool = |len: usize, heads| Pages::new(&memory.slice(..len), heads, format).map(|p| p.blocks());
    assert_eq!(pool(4 * bytes, 2), Ok(2));
    assert_eq!(pool(0, 2), Ok(0));
    assert!(matches!(pool(3 * bytes, 2), Err(Error::Length { .. })));
    assert!(matches!(pool(4 * bytes + 16, 2), Err(Error::Length { .. })));
    assert!(matches!(pool(4 * bytes, 0), Err(Error::Unsupported { what: "heads", .. })));
    let shifted = memory.slice(8..8 + 4 * bytes);
    assert!(matches!(Pages::new(&shifted, 2, format), Err(Error::Address { .. })));
    for (key, dim) in [
        (Affine::per_token(Bits::B4, 32), 40),
        (Affine::per_token(Bits::B4, 32), 528),
        (Affine::per_token(Bits::B4, 32), 0),
        (Affine::per_token(Bits::B4, 48), 64),
        (Affine::per_token(Bits::B4, 128), 64),
        (Affine::per_channel(Bits::B4, 128), 64),
        (Affine::per_token(Bits::B4, 32).with_rotation(64), 96),
    ] {
        let r = PageFormat::new(key.into(), Format::F16, dim, 64);
        assert!(matches!(r, Err(Error::Unsupported { .. })), "{key:?} {dim}");
    }
}

#[test]
fn bad_arguments_and_empty_lists_start_nothing() {
    let gpu = Gpu::new();
    let format = simple();
    let bytes = format.layout().page_bytes;
    let mut memory = gpu.up(&vec![3u8; 4 * bytes]);
    let (numbers, table) = (gpu.zeros::<i64>(2), gpu.zeros::<i32>(3));
    let mut list = gpu.up(&vec![4u8; 2 * bytes + 16]);
    let mut status = gpu.zeros::<u32>(2);

    let mut copy = |n: usize, statuses: usize| {
        let mut pool = PagesMut::new(&mut memory, 2, format).unwrap();
        let mut s = status.slice_mut(..statuses);
        copy_blocks(&gpu.device, gpu.raw(), &mut pool, (&table.slice(..n)).into(), (&mut s).into())
    };
    assert!(matches!(copy(3, 1), Err(Error::Length { what: "pairs", .. })));
    assert!(matches!(copy(2, 2), Err(Error::Length { what: "status", .. })));
    assert!(copy(0, 1).is_ok());

    let mut go = |pages: usize, from: usize, to: usize| {
        let mut pool = PagesMut::new(&mut memory, 2, format).unwrap();
        let mut s = status.slice_mut(..1);
        let mut part = list.slice_mut(from..to);
        let list = PageList::Export((&mut part).into());
        let numbers = numbers.slice(..pages);
        convert_pages(
            &gpu.device,
            gpu.raw(),
            &mut pool,
            Order::Fragment,
            (&numbers).into(),
            list,
            Order::Row,
            (&mut s).into(),
        )
    };
    assert!(matches!(go(2, 0, bytes), Err(Error::Length { what: "list", .. })));
    assert!(matches!(go(2, 8, 2 * bytes + 8), Err(Error::Address { what: "list", .. })));
    assert!(go(0, 0, 0).is_ok());

    let fp8 = PageFormat::new(Fp8::e4m3(Granularity::Head).into(), Format::F16, 64, 64).unwrap();
    let centred =
        PageFormat::new(Affine::per_token(Bits::B8, 64).with_center().into(), Format::F16, 64, 64).unwrap();
    let scales = gpu.zeros::<f32>(3);
    let mean = gpu.zeros::<f16>(2 * 64);
    let mut out = [0, 1].map(|_| Host::new(Dtype::F32, &vec![7.0; 200 * 2 * 64]).up(&gpu));
    let mut run =
        |format: PageFormat, tokens: usize, heads: usize, inputs: GatherInputs<'_>, tiles: usize| {
            let pool = gpu.zeros::<u8>(2 * format.layout().page_bytes);
            let mut s = status.slice_mut(..1);
            let [k, v] = &mut out;
            let shape = |t| crate::gpu::contiguous([t, heads, 64]);
            gather(
                &gpu.device,
                gpu.raw(),
                &Pages::new(&pool, 2, format).unwrap(),
                Order::Fragment,
                (&table.slice(..tiles)).into(),
                &inputs,
                &mut k.view_mut(shape(tokens)),
                &mut v.view_mut(shape(tokens)),
                (&mut s).into(),
            )
        };
    let none = GatherInputs::default();
    assert!(matches!(run(format, 129, 2, none, 2), Err(Error::Length { what: "table", .. })));
    assert!(matches!(run(format, 10, 1, none, 1), Err(Error::Shape { what: "key", .. })));
    assert!(matches!(run(fp8, 10, 2, none, 1), Err(Error::Unsupported { what: "key scales", .. })));
    let three = GatherInputs { key_scales: Some((&scales).into()), ..none };
    assert!(matches!(run(fp8, 10, 2, three, 1), Err(Error::Length { what: "key scales", .. })));
    assert!(matches!(run(centred, 10, 2, none, 1), Err(Error::Unsupported { what: "key mean", .. })));
    let with_mean = GatherInputs { key_mean: Some((&mean).into()), ..none };
    assert!(matches!(run(format, 10, 2, with_mean, 1), Err(Error::Unsupported { what: "key mean", .. })));
    let part = mean.slice(..64);
    let short = GatherInputs { key_mean: Some((&part).into()), ..none };
    assert!(matches!(run(centred, 10, 2, short, 1), Err(Error::Length { what: "key mean", .. })));
    assert!(run(format, 0, 2, none, 0).is_ok());

    let Host::F32(k) = out[0].down(&gpu) else { unreachable!() };
    assert!(k.iter().all(|x| *x == 7.0));
    assert_eq!(gpu.down(&memory), vec![3u8; 4 * bytes]);
    assert_eq!(gpu.down(&list), vec![4u8; 2 * bytes + 16]);
}

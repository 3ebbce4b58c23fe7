//! Affine codes and pairs against the CPU's, in both orders: the same bits.

use crate::gpu::{Gpu, Host, Memory, Random, layout};
use cudarc::driver::CudaSlice;
use half::f16;
use qkv::cuda::launch::{CodeOrder, code_lengths, quantize, quantize_with};
use qkv::cuda::{DeviceSlice, DeviceTensor};
use qkv::layout::{Operand, Order, PageLayout, TILE, code_bit, pair_bytes};
use qkv::quant::{self, Pairs, Quantized};
use qkv::{Affine, Axis, Bits, Dtype, Error, Fit, Format, Shape, TensorRef};

const FITS: [Fit; 3] = [Fit::MinMax, Fit::ErrorOptimal, Fit::HQQ];
const DIMS: [usize; 6] = [64, 80, 96, 112, 128, 256];
const DTYPES: [Dtype; 3] = [Dtype::F16, Dtype::Bf16, Dtype::F32];

/// A format with this fit; groups of 32, 64, 128 where `page` or any.
fn format(random: &mut Random, dim: usize, axis: Axis, fit: Fit, page: bool) -> Affine {
    let bits = random.pick(&Bits::ALL);
    let group = match (axis, page) {
        (Axis::PerToken, true) => random.pick(&[32, 64, 128, dim]),
        (Axis::PerChannel, true) => random.pick(&[32, 64]),
        (_, false) if random.below(3) > 0 => random.pick(&[32, 64, 128]),
        _ => 2 + random.below(255),
    };
    let mut f = match axis {
        Axis::PerToken => Affine::per_token(bits, group.min(dim)),
        Axis::PerChannel => Affine::per_channel(bits, group),
    }
    .with_fit(fit);
    if page && axis == Axis::PerToken && ![32, 64, 128, dim].contains(&f.group) {
        f.group = dim;
    }
    let blocks: Vec<usize> = [32, 64, 128].into_iter().filter(|b| dim.is_multiple_of(*b)).collect();
    if !blocks.is_empty() && random.below(4) == 0 {
        f.rotate = Some(random.pick(&blocks));
    }
    f
}

/// Values with outliers, and here and there something a format has to survive.
fn values(random: &mut Random, n: usize, special: bool) -> Vec<f32> {
    let scale = 10f32.powf(random.unit() * 6.0 - 3.0);
    let mut x: Vec<f32> =
        (0..n).map(|i| random.normal() * scale * if i % 37 == 5 { 9.0 } else { 1.0 }).collect();
    if special {
        let hard =
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -70000.0, 65504.0, 1e-41, -0.0, 0.0, 3e-8];
        for _ in 0..n / 150 + 1 {
            x[random.below(n)] = random.pick(&hard);
        }
        // Runs of one value, of zeros of both signs, and of subnormals.
        for _ in 0..n / 2000 + 1 {
            let (first, kind) = (random.below(n), random.below(3));
            for v in &mut x[first..(first + 300).min(n)] {
                *v = match kind {
                    0 => 1.2345,
                    1 => {
                        if *v > 0.0 {
                            0.0
                        } else {
                            -0.0
                        }
                    }
                    _ => v.signum() * 1e-40,
                };
            }
        }
    }
    x
}

fn words(pairs: &Pairs) -> Vec<u32> {
    let Pairs::F16(p) = pairs else { unreachable!() };
    p.iter().map(|p| p.to_bits()).collect()
}

/// Codes and pairs in fragment order, by the functions that define it.
fn fragments(f: &Affine, operand: Operand, shape: &Shape, codes: &[u8], pairs: &[u32]) -> (Vec<u8>, Vec<u8>) {
    let ([tokens, heads, dim], batch) = (shape.dims, shape.batch_tokens);
    let format = Format::from(*f);
    let page = PageLayout::new(&format, &format, dim, dim);
    let at = if operand == Operand::Key { page.key } else { page.value };
    let each = batch.div_ceil(TILE);
    let tiles = tokens / batch * each;
    let (mut out, mut out_pairs) =
        (vec![0u8; heads * tiles * at.code_bytes], vec![0u8; heads * tiles * at.pair_bytes]);
    let groups = batch.div_ceil(f.group);
    for token in 0..tokens {
        let (b, t) = (token / batch, token % batch);
        for head in 0..heads {
            let tile = head * tiles + b * each + t / TILE;
            for c in 0..dim {
                let code = codes[(token * heads + head) * dim + c];
                for bit in 0..f.bits.get() {
                    let (byte, i) = code_bit(&format, operand, &at, Order::Fragment, t % TILE, c, bit);
                    out[tile * at.code_bytes + byte] |= (code >> bit & 1) << i;
                }
                if pairs.is_empty() {
                    continue;
                }
                let pair = match f.axis {
                    Axis::PerToken => pairs[(token * heads + head) * dim.div_ceil(f.group) + c / f.group],
                    Axis::PerChannel => {
                        pairs[(head * tokens / batch * groups + b * groups + t / f.group) * dim + c]
                    }
                };
                let places = pair_bytes(&format, operand, &at, Order::Fragment, t % TILE, c).unwrap();
                for (place, half) in places.into_iter().zip([pair as u16, (pair >> 16) as u16]) {
                    out_pairs[tile * at.pair_bytes + place..][..2].copy_from_slice(&half.to_le_bytes());
                }
            }
        }
    }
    (out, out_pairs)
}

struct Case {
    shape: Shape,
    host: Host,
    memory: Memory,
}

impl Case {
    fn new(gpu: &Gpu, random: &mut Random, dims: [usize; 3], special: bool) -> Self {
        let (shape, n) = layout(random, dims);
        let dtype = random.pick(&DTYPES);
        let host = Host::new(dtype, &values(random, n, special));
        let memory = host.up(gpu);
        Self { shape, host, memory }
    }

    fn view(&self) -> DeviceTensor<'_> {
        self.memory.view(self.shape)
    }

    fn cpu(&self) -> TensorRef<'_> {
        TensorRef::new(self.host.data(), self.shape).unwrap()
    }

    /// Runs the kernel and compares.
    fn check(&self, gpu: &Gpu, f: &Affine, order: CodeOrder) -> Quantized {
        let want = quant::quantize(&self.cpu(), f).unwrap();
        let lengths = code_lengths(self.shape.dims, self.shape.batch_tokens, f, order).unwrap();
        let mut codes: CudaSlice<u8> = gpu.up(&vec![0xa5u8; lengths.codes]);
        let mut pairs: CudaSlice<u32> = gpu.up(&vec![0xa5a5_a5a5u32; lengths.pairs]);
        let mut clamped: CudaSlice<u64> = gpu.up(&[7u64]);
        let name = format!("{f:?} {order:?} {:?}", self.shape);
        let (c, p, n) = ((&mut codes).into(), (&mut pairs).into(), Some((&mut clamped).into()));
        quantize(&gpu.device, gpu.raw(), &self.view(), f, order, c, p, n).unwrap();
        let (codes, pairs) = (gpu.down(&codes), gpu.down(&pairs));
        match order {
            CodeOrder::Rows => {
                let wanted = words(want.pairs());
                if let Some(i) = (0..pairs.len()).find(|i| pairs[*i] != wanted[*i]) {
                    panic!("{name}: pair {i}: {:08x}, CPU {:08x}", pairs[i], wanted[i]);
                }
                if let Some(i) = (0..codes.len()).find(|i| codes[*i] != want.packed()[*i]) {
                    panic!("{name}: byte {i}: {:02x}, CPU {:02x}", codes[i], want.packed()[i]);
                }
            }
            CodeOrder::Fragments(operand) => {
                let (c, p) = fragments(f, operand, &self.shape, &want.codes(), &words(want.pairs()));
                let got: Vec<u8> = pairs.iter().flat_map(|w| w.to_le_bytes()).collect();
                assert!(got == p, "{name}: pairs");
                assert!(codes == c, "{name}: codes");
            }
        }
        assert_eq!(gpu.down(&clamped), [7 + want.clamped() as u64], "{name}");
        want
    }
}

fn dims(random: &mut Random, dim: usize) -> [usize; 3] {
    let heads = random.pick(&[1, 1, 2, 8]);
    let tokens = random.pick(&[1, 1, 3, 32, 63, 64, 65, 96, 130, 200]);
    [if heads * dim > 600 { tokens.min(65) } else { tokens }, heads, dim]
}

#[test]
fn row_order_has_the_bits_of_the_cpu() {
    let gpu = Gpu::new();
    let mut random = Random::new(2);
    for case in 0..150 {
        let axis = if case % 2 == 0 { Axis::PerToken } else { Axis::PerChannel };
        let dim = if case % 5 == 4 { 2 + random.below(200) } else { random.pick(&DIMS) };
        let f = format(&mut random, dim, axis, FITS[case / 2 % 3], false);
        let dims = dims(&mut random, dim);
        Case::new(&gpu, &mut random, dims, case % 3 == 1).check(&gpu, &f, CodeOrder::Rows);
    }
}

#[test]
fn fragment_order_has_the_bits_of_the_cpu() {
    let gpu = Gpu::new();
    let mut random = Random::new(3);
    for case in 0..90 {
        let axis = if case % 2 == 0 { Axis::PerToken } else { Axis::PerChannel };
        let dim = random.pick(&DIMS);
        let operand = random.pick(&[Operand::Key, Operand::Value]);
        let f = format(&mut random, dim, axis, FITS[case / 2 % 3], true);
        let dims = dims(&mut random, dim);
        Case::new(&gpu, &mut random, dims, case % 3 == 1).check(&gpu, &f, CodeOrder::Fragments(operand));
    }
}

#[test]
fn hard_values_have_the_bits_of_the_cpu() {
    let gpu = Gpu::new();
    let mut random = Random::new(4);
    let (mut clamped, mut broken) = (0, 0);
    for bits in Bits::ALL {
        for fit in FITS {
            for f in [Affine::per_token(bits, 32), Affine::per_channel(bits, 64)] {
                let case = Case::new(&gpu, &mut random, [70, 1, 64], true);
                let q = case.check(&gpu, &f.with_fit(fit), CodeOrder::Rows);
                clamped += q.clamped();
                broken += words(q.pairs()).iter().filter(|p| **p == 0x7e00_7e00).count();
            }
        }
    }
    assert!(clamped > 50 && broken > 100, "{clamped} {broken}");
}

#[test]
fn given_pairs_have_the_codes_of_the_cpu() {
    let gpu = Gpu::new();
    let mut random = Random::new(5);
    for case in 0..60 {
        let axis = if case % 2 == 0 { Axis::PerToken } else { Axis::PerChannel };
        let dim = random.pick(&DIMS);
        let page = case % 3 == 0;
        let mut f = format(&mut random, dim, axis, Fit::MinMax, page);
        f.rotate = None;
        let dims = dims(&mut random, dim);
        let case = Case::new(&gpu, &mut random, dims, true);
        let mut pairs = quant::quantize(&case.cpu(), &f).unwrap().pairs().to_f32();
        for (step, min) in &mut pairs {
            match random.below(12) {
                0 => *step = 0.0,
                1 => *min = f32::NAN,
                2 => *step = -*step,
                _ => *step *= 0.3 + random.unit(),
            }
        }
        let want = quant::quantize_with(&case.cpu(), f.bits, f.group, axis, &pairs).unwrap();
        let flat: Vec<f32> = pairs.iter().flat_map(|p| [p.0, p.1]).collect();
        let given = gpu.up(&flat);
        let order = if page {
            CodeOrder::Fragments(random.pick(&[Operand::Key, Operand::Value]))
        } else {
            CodeOrder::Rows
        };
        let lengths = code_lengths(dims, case.shape.batch_tokens, &f, order).unwrap();
        let mut codes = gpu.up(&vec![0xa5u8; lengths.codes]);
        let (p, c) = ((&given).into(), (&mut codes).into());
        quantize_with(&gpu.device, gpu.raw(), &case.view(), f.bits, f.group, axis, p, order, c).unwrap();
        let wanted = match order {
            CodeOrder::Rows => want.packed().to_vec(),
            CodeOrder::Fragments(o) => fragments(&f, o, &case.shape, &want.codes(), &[]).0,
        };
        assert!(gpu.down(&codes) == wanted, "{f:?} {order:?} {:?}", case.shape);
    }
}

/// What a launch moved, against the least that it can.
fn count(gpu: &Gpu, f: &Affine, order: CodeOrder, dtype: Dtype, dims: [usize; 3]) {
    let Some(simulator) = gpu.simulator else { return };
    let mut random = Random::new(6);
    let [t, h, d] = dims;
    let x = Host::new(dtype, &random.normals(t * h * d));
    let x = x.up(gpu);
    let shape = Shape { dims, batch_tokens: t, strides: [t * h * d, h * d, d, 1] };
    let lengths = code_lengths(dims, t, f, order).unwrap();
    let (mut codes, mut pairs) = (gpu.zeros::<u8>(lengths.codes), gpu.zeros::<u32>(lengths.pairs));
    simulator.take_stats();
    let (c, p) = ((&mut codes).into(), (&mut pairs).into());
    quantize(&gpu.device, gpu.raw(), &x.view(shape), f, order, c, p, None).unwrap();
    gpu.stream.synchronize().unwrap();
    let stats = simulator.take_stats();
    assert_eq!(stats.len(), 1);
    let total = &stats[0].total;
    let least = (t * h * d * dtype.bytes() + lengths.codes + 4 * lengths.pairs) as f64;
    let name = format!("{f:?} {order:?} {dtype:?} {dims:?}: {total:?}");
    assert!(total.global_bytes as f64 <= 1.02 * least, "{name}");
    // Fragment order takes pairs of 80 channels apart in pieces of 40 bytes.
    let full = if d == 80 && f.axis == Axis::PerChannel { 0.9 } else { 0.95 };
    assert!(total.global_bytes as f64 >= full * 32.0 * total.global_sectors as f64, "{name}");
    let lines: Vec<_> = stats[0].lines.iter().filter(|l| l.counts.shared_conflicts > 0).collect();
    assert!(total.shared_conflicts == 0, "{name} {lines:?}");
}

#[test]
fn no_byte_is_moved_twice_and_no_bank_is_met_twice() {
    let gpu = Gpu::new();
    for (i, bits) in Bits::ALL.into_iter().enumerate() {
        for dim in [64, 80, 128, 256] {
            let dtype = DTYPES[(i + dim / 64) % 3];
            let heads = if dim == 80 { 4 } else { 2 };
            for group in [32, 64, 128] {
                let token = Affine::per_token(bits, group.min(dim)).with_fit(Fit::MinMax);
                // Rows of 80 codes of 1 or 3 bits are no whole words.
                if dim != 80 || ![Bits::B1, Bits::B3].contains(&bits) {
                    count(&gpu, &token, CodeOrder::Rows, dtype, [64, heads, dim]);
                }
                if group <= 64 || dim >= 128 {
                    count(&gpu, &token, CodeOrder::Fragments(Operand::Key), dtype, [64, heads, dim]);
                    count(&gpu, &token, CodeOrder::Fragments(Operand::Value), dtype, [64, heads, dim]);
                }
                if group <= 64 {
                    let channel = Affine::per_channel(bits, group).with_fit(Fit::MinMax);
                    count(&gpu, &channel, CodeOrder::Fragments(Operand::Key), dtype, [64, heads, dim]);
                    count(&gpu, &channel, CodeOrder::Fragments(Operand::Value), dtype, [64, heads, dim]);
                    if dim != 80 {
                        let heads = 8 * 64 / dim;
                        count(&gpu, &channel, CodeOrder::Rows, dtype, [64, heads.max(2), dim]);
                    }
                }
            }
        }
    }
}

#[test]
fn rotation_and_fits_meet_no_bank_twice() {
    let gpu = Gpu::new();
    for fit in FITS {
        let token = Affine::per_token(Bits::B4, 64).with_fit(fit).with_rotation(128);
        count(&gpu, &token, CodeOrder::Fragments(Operand::Value), Dtype::F16, [64, 1, 128]);
        count(&gpu, &token, CodeOrder::Rows, Dtype::Bf16, [64, 1, 128]);
        let channel = Affine::per_channel(Bits::B2, 32).with_fit(fit).with_rotation(64);
        count(&gpu, &channel, CodeOrder::Fragments(Operand::Key), Dtype::F32, [64, 1, 128]);
    }
}

/// Shuffles that a warp of the one launch since the last look executed.
pub(crate) fn shuffles(simulator: ptxsim::testing::Simulator, what: &str) -> f64 {
    let stats = simulator.take_stats();
    assert_eq!(stats.len(), 1, "{what}");
    let s = &stats[0];
    let warps = s.grid.iter().chain(&s.block).map(|n| u64::from(*n)).product::<u64>() / 32;
    s.classes.get(&ptxsim::stats::Class::Shuffle).map_or(0, |c| c[0]) as f64 / warps as f64
}

/// Packing 4-bit codes takes at most 12 shuffles a warp: codes for given pairs need no other, so every one is of the pack.
/// A block has one unit here. (`pages_pack_with_few_shuffles` counts those of the pairs.)
#[test]
fn the_4_bit_pack_takes_few_shuffles() {
    let gpu = Gpu::new();
    let Some(simulator) = gpu.simulator else { return };
    let mut random = Random::new(12);
    let orders = [CodeOrder::Rows, CodeOrder::Fragments(Operand::Key), CodeOrder::Fragments(Operand::Value)];
    for dim in [64, 80, 128, 256] {
        for (axis, group) in
            [(Axis::PerToken, 32), (Axis::PerToken, 64), (Axis::PerChannel, 32), (Axis::PerChannel, 64)]
        {
            for order in orders {
                let dims = [64, 2, dim];
                let x = Host::new(Dtype::F16, &random.normals(dims.iter().product())).up(&gpu);
                let f = match axis {
                    Axis::PerToken => Affine::per_token(Bits::B4, group),
                    Axis::PerChannel => Affine::per_channel(Bits::B4, group),
                };
                let count = code_lengths(dims, 64, &f, CodeOrder::Rows).unwrap().pairs;
                let pairs = gpu.up(&vec![0.25f32; 2 * count]);
                let mut codes = gpu.zeros::<u8>(code_lengths(dims, 64, &f, order).unwrap().codes);
                let view = x.view(crate::gpu::contiguous(dims));
                simulator.take_stats();
                let (p, c) = ((&pairs).into(), (&mut codes).into());
                quantize_with(&gpu.device, gpu.raw(), &view, f.bits, group, axis, p, order, c).unwrap();
                gpu.stream.synchronize().unwrap();
                let what = format!("{axis:?} {group} {order:?} {dim}");
                let n = shuffles(simulator, &what);
                assert!(n <= 12.0, "{what}: {n} shuffles a warp");
                // A fit does shuffle, so they are counted.
                let mut pairs = gpu.zeros::<u32>(code_lengths(dims, 64, &f, order).unwrap().pairs);
                let (c, p) = ((&mut codes).into(), (&mut pairs).into());
                quantize(&gpu.device, gpu.raw(), &view, &f, order, c, p, None).unwrap();
                gpu.stream.synchronize().unwrap();
                let all = shuffles(simulator, &what);
                println!("{what}: {n} shuffles a warp, {all} with the fit");
                assert!(all > n, "{what}: {all} shuffles a warp with the fit");
            }
        }
    }
}

#[test]
fn wrong_arguments_start_nothing() {
    let gpu = Gpu::new();
    let x = gpu.up(&[1f32; 64 * 64]);
    let (codes, mut pairs) = (gpu.up(&[9u8; 4096]), gpu.up(&[9u32; 1024]));
    let mut counter = gpu.up(&[9u64; 2]);
    type Changes = (usize, usize, usize, u64);
    let mut run = |dims: [usize; 3], f: Affine, order: CodeOrder, (c, p, n, off): Changes| {
        let view =
            DeviceTensor::new(&x, Shape { dims, batch_tokens: dims[0], strides: [0, 64, 64, 1] }).unwrap();
        let at = |s: DeviceSlice<'_, u8>| s.address() + off;
        let address = at((&codes).into());
        // SAFETY: inside the allocation, or refused before anything is started.
        let codes = unsafe { qkv::cuda::DeviceSliceMut::from_raw(address, c) };
        let whole: qkv::cuda::DeviceSliceMut<'_, u32> = (&mut pairs).into();
        // SAFETY: as above.
        let pairs = unsafe { qkv::cuda::DeviceSliceMut::from_raw(whole.address(), p) };
        let whole: qkv::cuda::DeviceSliceMut<'_, u64> = (&mut counter).into();
        // SAFETY: as above.
        let counter = unsafe { qkv::cuda::DeviceSliceMut::from_raw(whole.address(), n) };
        quantize(&gpu.device, gpu.raw(), &view, &f, order, codes, pairs, Some(counter))
    };
    let (rows, tiles) = (CodeOrder::Rows, CodeOrder::Fragments(Operand::Key));
    let f = Affine::per_token(Bits::B8, 32);
    let dims = [16, 1, 64];
    assert!(matches!(
        run(dims, f, rows, (1023, 32, 1, 0)),
        Err(Error::Length { what: "codes", expected: 1024, got: 1023 })
    ));
    assert!(matches!(
        run(dims, f, rows, (1024, 31, 1, 0)),
        Err(Error::Length { what: "pairs", expected: 32, got: 31 })
    ));
    assert!(matches!(run(dims, f, rows, (1024, 32, 2, 0)), Err(Error::Length { what: "clamped", .. })));
    assert!(matches!(
        run(dims, f, tiles, (1024, 128, 1, 0)),
        Err(Error::Length { what: "codes", expected: 4096, .. })
    ));
    assert!(matches!(
        run(dims, f, tiles, (4096, 128, 1, 8)),
        Err(Error::Address { what: "codes", align: 16, .. })
    ));
    let no = |f: Affine, order| (f, order);
    for (f, order) in [
        no(Affine::per_token(Bits::B8, 1), rows),
        no(Affine::per_token(Bits::B8, 257), rows),
        no(Affine::per_token(Bits::B8, 65), rows),
        no(Affine::per_token(Bits::B8, 48), tiles),
        no(Affine::per_channel(Bits::B8, 128), tiles),
        no(f.with_rotation(128), rows),
        no(f.with_rotation(16), rows),
        no(f.with_center(), rows),
        no(f.with_fit(Fit::Hqq { p: 1.5, beta: 10.0, iterations: 20 }), rows),
        no(f.with_fit(Fit::Hqq { p: 0.7, beta: 10.0, iterations: 1000 }), rows),
    ] {
        let got = run(dims, f, order, (1024, 32, 1, 0));
        assert!(matches!(got, Err(Error::Unsupported { .. })), "{f:?} {got:?}");
    }
    assert!(run([0, 1, 64], f, rows, (0, 0, 1, 0)).is_ok());
    // Nothing was written.
    assert_eq!(gpu.down(&codes), [9u8; 4096]);
    assert_eq!(gpu.down(&pairs), [9u32; 1024]);
    assert_eq!(gpu.down(&counter), [9u64; 2]);
}

#[test]
fn unaligned_codes_are_written_in_row_order() {
    let gpu = Gpu::new();
    let mut random = Random::new(8);
    for bits in Bits::ALL {
        for f in [Affine::per_token(bits, 32), Affine::per_channel(bits, 64)] {
            let f = f.with_fit(Fit::MinMax);
            let x = random.normals(70 * 2 * 96);
            let (host, dims) = (Host::new(Dtype::F16, &x), [70, 2, 96]);
            let want = quant::quantize(&TensorRef::thd(host_f16(&host), dims).unwrap(), &f).unwrap();
            let lengths = code_lengths(dims, 70, &f, CodeOrder::Rows).unwrap();
            let mut memory = gpu.up(&vec![3u8; lengths.codes + 2]);
            let mut pairs = gpu.zeros::<u32>(lengths.pairs);
            let mut view = memory.slice_mut(1..1 + lengths.codes);
            let shape = Shape { dims, batch_tokens: 70, strides: [0, 192, 96, 1] };
            let (c, p) = ((&mut view).into(), (&mut pairs).into());
            quantize(&gpu.device, gpu.raw(), &host.up(&gpu).view(shape), &f, CodeOrder::Rows, c, p, None)
                .unwrap();
            let got = gpu.down(&memory);
            assert!(got[1..=lengths.codes] == *want.packed(), "{f:?}");
            assert_eq!((got[0], got[lengths.codes + 1]), (3, 3));
        }
    }
}

fn host_f16(host: &Host) -> &[f16] {
    let Host::F16(x) = host else { unreachable!() };
    x
}

/// Two rows more than 2^31 elements apart: offsets are 64 bits wide.
#[test]
fn rows_may_be_far_apart() {
    let gpu = Gpu::new();
    let mut random = Random::new(9);
    let (x, y) = (Host::new(Dtype::F16, &random.normals(128)), Host::new(Dtype::F16, &random.normals(128)));
    let first = gpu.up(host_f16(&x));
    let address = |s: &CudaSlice<f16>| DeviceSlice::<f16>::from(s).address();
    // Memory that is freed at once moves the next allocation on, where the driver does not reuse addresses.
    let mut second = gpu.up(host_f16(&y));
    for _ in 0..5 {
        if address(&second) > address(&first) + (9 << 29) {
            break;
        }
        // SAFETY: never read.
        drop(unsafe { gpu.stream.alloc::<u8>(1 << 30) }.unwrap());
        gpu.stream.synchronize().unwrap();
        second = gpu.up(host_f16(&y));
    }
    let far = (address(&second).wrapping_sub(address(&first)) / 2) as usize;
    if !(1 << 31..1 << 40).contains(&far) {
        eprintln!("this driver keeps allocations together; nothing is tested");
        return;
    }
    for (f, dims, batch_tokens, strides) in [
        (Affine::per_token(Bits::B4, 32), [2, 1, 128], 2, [0, far, 0, 1]),
        (Affine::per_channel(Bits::B4, 32), [2, 1, 128], 2, [0, far, 0, 1]),
        (Affine::per_channel(Bits::B4, 32), [1, 2, 128], 1, [0, 0, far, 1]),
        (Affine::per_token(Bits::B4, 32), [2, 1, 128], 1, [far, 0, 0, 1]),
    ] {
        let both = [host_f16(&x), host_f16(&y)].concat();
        let near = strides.map(|s| if s == far { 128 } else { s });
        let want = TensorRef::new(&both, Shape { dims, batch_tokens, strides: near }).unwrap();
        let want = quant::quantize(&want, &f).unwrap();
        // SAFETY: both rows are allocated; nothing between them is touched.
        let memory = unsafe { DeviceSlice::<f16>::from_raw(address(&first), far + 128) };
        let view = DeviceTensor::new(memory, Shape { dims, batch_tokens, strides }).unwrap();
        let lengths = code_lengths(dims, batch_tokens, &f, CodeOrder::Rows).unwrap();
        let (mut codes, mut pairs) = (gpu.zeros::<u8>(lengths.codes), gpu.zeros::<u32>(lengths.pairs));
        let (c, p) = ((&mut codes).into(), (&mut pairs).into());
        quantize(&gpu.device, gpu.raw(), &view, &f, CodeOrder::Rows, c, p, None).unwrap();
        assert_eq!(gpu.down(&codes), want.packed(), "{f:?} {strides:?}");
        assert_eq!(gpu.down(&pairs), words(want.pairs()), "{f:?} {strides:?}");
    }
}

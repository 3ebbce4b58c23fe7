//! The launch functions with plain tensors, each result compared with the CPU function's.

use crate::functions::{Functions, RoundTrip, format};
use crate::golden::{Elements, Tensor, filled, thd};
use crate::gpu::{Gpu, Host, Memory};
use crate::report::Report;
use crate::views::View;
use cudarc::driver::CudaSlice;
use half::{bf16, f16};
use qkv::cuda::DeviceSlice;
use qkv::cuda::launch::{
    CodeOrder, DevicePairs, code_lengths, dequantize, fp8_absmax, fp8_absmax_workspace, fp8_decode,
    fp8_encode, quantize, quantize_with,
};
use qkv::quant::fp8::{self, Fp8Tensor};
use qkv::quant::{self, Pairs, Quantized, unpack};
use qkv::{Axis, Bits, Dtype, Error, Fit, Fp8, Granularity};
use std::cell::{Cell, RefCell};

/// Channels of a head that the kernels take.
const MAX_DIM: usize = 512;

/// The device, and what was seen on it.
pub(crate) struct Launches {
    gpu: Gpu,
    failures: RefCell<Vec<String>>,
    results: Cell<usize>,
}

/// Columns of a view that one launch takes: whole groups, at most [`MAX_DIM`] channels.
struct Part {
    view: View,
    /// First channel, and channels of the whole.
    from: usize,
    dim: usize,
    /// First pair of a row of pairs, pairs there, pairs of the whole row.
    pair_from: usize,
    pair_count: usize,
    pair_row: usize,
}

fn parts(view: &View) -> Vec<Part> {
    let [tokens, heads, dim] = view.dims;
    assert_eq!(heads, 1, "the peers' axes are views of one head");
    let per_token = view.axis == Axis::PerToken;
    let most = if per_token { MAX_DIM / view.group * view.group } else { MAX_DIM };
    let pairs_of = |channels: usize| if per_token { channels.div_ceil(view.group) } else { channels };
    (0..dim)
        .step_by(most)
        .map(|from| {
            let width = most.min(dim - from);
            let group = if per_token { view.group.min(width) } else { view.group };
            Part {
                view: View { dims: [tokens, 1, width], axis: view.axis, group },
                from,
                dim,
                pair_from: pairs_of(from),
                pair_count: pairs_of(width),
                pair_row: pairs_of(dim),
            }
        })
        .collect()
}

/// Columns `from..from + width` of rows of `row` elements.
fn take<T: Copy>(x: &[T], row: usize, from: usize, width: usize) -> Vec<T> {
    x.chunks_exact(row).flat_map(|r| r[from..from + width].iter().copied()).collect()
}

/// The same, written.
fn put<T: Copy>(x: &mut [T], row: usize, from: usize, part: &[T]) {
    let width = part.len() / (x.len() / row);
    for (r, p) in x.chunks_exact_mut(row).zip(part.chunks_exact(width)) {
        r[from..from + width].copy_from_slice(p);
    }
}

impl Part {
    fn tensor(&self, x: &Tensor) -> Tensor {
        let (row, from, width) = (self.dim, self.from, self.view.dims[2]);
        let elements = match &x.elements {
            Elements::F16(x) => Elements::F16(take(x, row, from, width)),
            Elements::Bf16(x) => Elements::Bf16(take(x, row, from, width)),
            Elements::F32(x) => Elements::F32(take(x, row, from, width)),
            _ => unreachable!("inputs are of the library's dtypes"),
        };
        Tensor { shape: self.view.dims.to_vec(), elements }
    }

    fn codes(&self, codes: &[u8]) -> Vec<u8> {
        take(codes, self.dim, self.from, self.view.dims[2])
    }

    fn pairs(&self, pairs: &[(f32, f32)]) -> Vec<(f32, f32)> {
        take(pairs, self.pair_row, self.pair_from, self.pair_count)
    }

    fn put_tensor(&self, all: &mut Tensor, part: &Tensor) {
        match (&mut all.elements, &part.elements) {
            (Elements::F16(x), Elements::F16(p)) => put(x, self.dim, self.from, p),
            (Elements::Bf16(x), Elements::Bf16(p)) => put(x, self.dim, self.from, p),
            (Elements::F32(x), Elements::F32(p)) => put(x, self.dim, self.from, p),
            _ => unreachable!("parts have the dtype of the whole"),
        }
    }
}

fn blank(dtype: Dtype, dims: [usize; 3]) -> Tensor {
    filled(dtype, dims, |_| ())
}

fn host(x: &Tensor) -> Host {
    match &x.elements {
        Elements::F16(x) => Host::F16(x.clone()),
        Elements::Bf16(x) => Host::Bf16(x.clone()),
        Elements::F32(x) => Host::F32(x.clone()),
        _ => unreachable!("tensors on the device are of the library's dtypes"),
    }
}

fn tensor(x: Host, dims: [usize; 3]) -> Tensor {
    let elements = match x {
        Host::F16(x) => Elements::F16(x),
        Host::Bf16(x) => Elements::Bf16(x),
        Host::F32(x) => Elements::F32(x),
    };
    Tensor { shape: dims.to_vec(), elements }
}

/// Bits of values, every NaN alike.
fn bits_of(x: &Tensor) -> Vec<u32> {
    let one = |bits: u32, nan: bool| if nan { u32::MAX } else { bits };
    match &x.elements {
        Elements::F16(x) => x.iter().map(|x| one(x.to_bits().into(), f16::is_nan(*x))).collect(),
        Elements::Bf16(x) => x.iter().map(|x| one(x.to_bits().into(), bf16::is_nan(*x))).collect(),
        Elements::F32(x) => x.iter().map(|x| one(x.to_bits(), x.is_nan())).collect(),
        _ => unreachable!("outputs are of the library's dtypes"),
    }
}

fn flat(pairs: &[(f32, f32)]) -> Vec<f32> {
    pairs.iter().flat_map(|p| [p.0, p.1]).collect()
}

/// One scale a tensor: any shape will do, so one that a cache has.
fn fp8_dims(dims: [usize; 3], format: Fp8) -> [usize; 3] {
    let n: usize = dims.iter().product();
    let usual = format.granularity == Granularity::Tensor && n.is_multiple_of(128);
    if usual { [n / 128, 1, 128] } else { dims }
}

impl Launches {
    pub(crate) fn new() -> Self {
        Self { gpu: Gpu::new(), failures: RefCell::default(), results: Cell::new(0) }
    }

    /// Hands over what differed from the CPU.
    pub(crate) fn finish(self, report: &mut Report) {
        let failures = self.failures.into_inner();
        report.note(format!("{} results compared with the CPU's bits", self.results.get()));
        failures.into_iter().for_each(|f| report.fail(f));
    }

    /// Equal elements, or a failure that names the first that is not.
    fn same<T: PartialEq + std::fmt::Debug>(&self, got: &[T], cpu: &[T], what: impl FnOnce() -> String) {
        self.results.set(self.results.get() + 1);
        if got == cpu {
            return;
        }
        let at = got.iter().zip(cpu).position(|(a, b)| a != b);
        let show = at.map_or(format!("{} elements, not {}", got.len(), cpu.len()), |i| {
            let count = got.iter().zip(cpu).filter(|(a, b)| a != b).count();
            format!("element {i} is {:x?}, not {:x?}; {count} of {} differ", got[i], cpu[i], got.len())
        });
        self.failures.borrow_mut().push(format!("not the CPU's bits: {}: {show}", what()));
    }

    /// Decodes codes and pairs that lie on the device.
    fn decoded(
        &self,
        view: &View,
        bits: Bits,
        codes: &CudaSlice<u8>,
        pairs: DevicePairs<'_>,
        dtype: Dtype,
    ) -> Tensor {
        let format = format(view, bits, Fit::MinMax);
        let mut out = host(&blank(dtype, view.dims)).up(&self.gpu);
        let mut to = out.view_mut(thd(view.dims));
        let (device, stream) = (&self.gpu.device, self.gpu.raw());
        dequantize(device, stream, codes.into(), pairs, &format, CodeOrder::Rows, &mut to).unwrap();
        tensor(out.down(&self.gpu), view.dims)
    }

    fn up(&self, x: &Tensor) -> Memory {
        host(x).up(&self.gpu)
    }
}

fn decoded_on_cpu(q: &Quantized, dtype: Dtype) -> Tensor {
    filled(dtype, q.dims(), |out| quant::dequantize(q, out).unwrap())
}

/// Codes one a byte, from rows that end on whole bytes.
fn unpacked(packed: &[u8], bits: Bits, dims: [usize; 3]) -> Vec<u8> {
    let row = packed.len() / (dims[0] * dims[1]);
    packed.chunks_exact(row).flat_map(|r| unpack(r, bits, dims[2]).unwrap()).collect()
}

impl Functions for Launches {
    fn quantize_with(&self, x: &Tensor, view: &View, bits: Bits, pairs: &[(f32, f32)]) -> Vec<u8> {
        let mut all = vec![0u8; view.dims.iter().product()];
        for part in parts(view) {
            let View { dims, axis, group } = part.view;
            let (x, pairs) = (part.tensor(x), part.pairs(pairs));
            let lengths =
                code_lengths(dims, dims[0], &format(&part.view, bits, Fit::MinMax), CodeOrder::Rows).unwrap();
            let (memory, given) = (self.up(&x), self.gpu.up(&flat(&pairs)));
            let mut codes = self.gpu.up(&vec![0xa5u8; lengths.codes]);
            let (device, stream, from) = (&self.gpu.device, self.gpu.raw(), memory.view(thd(dims)));
            let (p, c) = ((&given).into(), (&mut codes).into());
            quantize_with(device, stream, &from, bits, group, axis, p, CodeOrder::Rows, c).unwrap();
            let got = self.gpu.down(&codes);
            let cpu = quant::quantize_with(&x.thd(dims), bits, group, axis, &pairs).unwrap();
            self.same(&got, cpu.packed(), || {
                format!("codes for given pairs, {:?}, {bits:?}, {:?}", part.view, x.dtype())
            });
            put(&mut all, part.dim, part.from, &unpacked(&got, bits, dims));
        }
        all
    }

    fn dequantize(
        &self,
        view: &View,
        bits: Bits,
        codes: &[u8],
        pairs: &[(f32, f32)],
        dtype: Dtype,
    ) -> Tensor {
        let mut all = blank(dtype, view.dims);
        for part in parts(view) {
            let View { dims, axis, group } = part.view;
            let (codes, pairs) = (part.codes(codes), part.pairs(pairs));
            let cpu = Quantized::from_codes(dims, bits, group, axis, &codes, &pairs).unwrap();
            let (codes, given) = (self.gpu.up(cpu.packed()), self.gpu.up(&flat(&pairs)));
            let got = self.decoded(&part.view, bits, &codes, DevicePairs::F32((&given).into()), dtype);
            self.same(&bits_of(&got), &bits_of(&decoded_on_cpu(&cpu, dtype)), || {
                format!("decoded codes, {:?}, {bits:?}, {dtype:?}", part.view)
            });
            part.put_tensor(&mut all, &got);
        }
        all
    }

    fn round_trip(
        &self,
        x: &Tensor,
        view: &View,
        bits: Bits,
        fit: Fit,
        dtype: Dtype,
    ) -> Result<RoundTrip, Error> {
        let mut decoded = blank(dtype, view.dims);
        let mut all = vec![(0f32, 0f32); view.pair_count()];
        for part in parts(view) {
            let (dims, x) = (part.view.dims, part.tensor(x));
            let f = format(&part.view, bits, fit);
            let lengths = code_lengths(dims, dims[0], &f, CodeOrder::Rows)?;
            let memory = self.up(&x);
            let mut codes = self.gpu.up(&vec![0xa5u8; lengths.codes]);
            let mut pairs = self.gpu.up(&vec![0xa5a5_a5a5u32; lengths.pairs]);
            let mut clamped = self.gpu.zeros::<u64>(1);
            let (device, stream, from) = (&self.gpu.device, self.gpu.raw(), memory.view(thd(dims)));
            let (c, p, n) = ((&mut codes).into(), (&mut pairs).into(), Some((&mut clamped).into()));
            quantize(device, stream, &from, &f, CodeOrder::Rows, c, p, n)?;
            let got = self.decoded(&part.view, bits, &codes, DevicePairs::F16((&pairs).into()), dtype);

            let cpu = quant::quantize(&x.thd(dims), &f)?;
            let what = || format!("{:?}, {bits:?}, {fit:?}, {:?}", part.view, x.dtype());
            let Pairs::F16(wanted) = cpu.pairs() else { unreachable!("our own pairs are f16") };
            let wanted: Vec<u32> = wanted.iter().map(|p| p.to_bits()).collect();
            let words = self.gpu.down(&pairs);
            self.same(&words, &wanted, || format!("our pairs, {}", what()));
            self.same(&self.gpu.down(&codes), cpu.packed(), || format!("our codes, {}", what()));
            self.same(&self.gpu.down(&clamped), &[cpu.clamped() as u64], || format!("clamped, {}", what()));
            self.same(&bits_of(&got), &bits_of(&decoded_on_cpu(&cpu, dtype)), || {
                format!("our values as {dtype:?}, {}", what())
            });
            part.put_tensor(&mut decoded, &got);
            let half = |bits: u32| f16::from_bits(bits as u16).to_f32();
            let words: Vec<(f32, f32)> = words.iter().map(|w| (half(*w), half(w >> 16))).collect();
            put(&mut all, part.pair_row, part.pair_from, &words);
        }
        Ok(RoundTrip { pairs: all, decoded })
    }

    fn encode(&self, x: &Tensor, dims: [usize; 3], format: Fp8, scales: Option<&[f32]>) -> Fp8Tensor {
        let shape = fp8_dims(dims, format);
        let (memory, device) = (self.up(x), &self.gpu.device);
        let from = memory.view(thd(shape));
        let scales = match scales {
            Some(s) => self.gpu.up(s),
            None => {
                let cpu = fp8::scales(&x.thd(dims), format).unwrap();
                let mut scales = self.gpu.zeros::<f32>(cpu.len());
                let mut work = self.gpu.zeros::<u32>(fp8_absmax_workspace(shape, format.granularity).max(1));
                let (s, w) = ((&mut scales).into(), (&mut work).into());
                fp8_absmax(device, self.gpu.raw(), &from, format, s, w).unwrap();
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                self.same(&bits(&self.gpu.down(&scales)), &bits(&cpu), || format!("scales, {dims:?}"));
                scales
            }
        };
        let (mut bytes, mut lost) =
            (self.gpu.up(&vec![0xa5u8; dims.iter().product()]), self.gpu.zeros::<u64>(1));
        let (b, l) = ((&mut bytes).into(), (&mut lost).into());
        let given = DeviceSlice::from(&scales);
        fp8_encode(device, self.gpu.raw(), &from, format, given, b, Some(l)).unwrap();
        let (bytes, scales) = (self.gpu.down(&bytes), self.gpu.down(&scales));
        let cpu = fp8::encode(&x.thd(dims), format, Some(&scales)).unwrap();
        self.same(&bytes, cpu.bytes(), || format!("bytes, {dims:?}, {format:?}, {:?}", x.dtype()));
        self.same(&self.gpu.down(&lost), &[cpu.saturated() as u64], || {
            format!("saturated, {dims:?}, {format:?}")
        });
        Fp8Tensor::from_bytes(dims, format, bytes, scales).unwrap()
    }

    fn decode(&self, x: &Fp8Tensor, dtype: Dtype) -> Tensor {
        let (dims, shape) = (x.dims(), fp8_dims(x.dims(), x.format()));
        let (bytes, scales) = (self.gpu.up(x.bytes()), self.gpu.up(x.scales()));
        let mut out = self.up(&blank(dtype, dims));
        let mut to = out.view_mut(thd(shape));
        let (b, s) = ((&bytes).into(), (&scales).into());
        fp8_decode(&self.gpu.device, self.gpu.raw(), b, x.format(), s, &mut to).unwrap();
        let got = tensor(out.down(&self.gpu), dims);
        let cpu = filled(dtype, dims, |out| fp8::decode(x, out).unwrap());
        self.same(&bits_of(&got), &bits_of(&cpu), || {
            format!("FP8 decoded, {dims:?}, {:?}, {dtype:?}", x.format())
        });
        got
    }
}

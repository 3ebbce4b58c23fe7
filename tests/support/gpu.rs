//! A device for tests: a real one where there is one, else the simulated one, which checks every access.

pub(crate) use crate::host::Host;
use crate::host::each;
use cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use half::{bf16, f16};
use ptxsim::testing::{Simulator, ensure_driver};
use qkv::Shape;
use qkv::cuda::{Device, DeviceTensor, DeviceTensorMut, RawStream};
use std::sync::Arc;

/// A device and a stream of its own.
pub(crate) struct Gpu {
    pub(crate) device: Device,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) simulator: Option<Simulator>,
}

impl Gpu {
    pub(crate) fn new() -> Self {
        let simulator = ensure_driver().simulator();
        let device = Device::new(0).expect("a device");
        // SAFETY: each test orders its work by one stream. cudarc's events would invalidate captures, as in an engine.
        unsafe { device.context().disable_event_tracking() };
        let stream = device.context().new_stream().expect("a stream");
        if let Some(s) = simulator {
            s.take_stats();
        }
        Self { device, stream, simulator }
    }

    pub(crate) fn raw(&self) -> RawStream<'_> {
        (&*self.stream).into()
    }

    pub(crate) fn up<T: DeviceRepr>(&self, x: &[T]) -> CudaSlice<T> {
        self.stream.clone_htod(x).expect("a copy to the device")
    }

    pub(crate) fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, n: usize) -> CudaSlice<T> {
        self.stream.alloc_zeros(n).expect("device memory")
    }

    /// Waits for the stream and copies back: a fault of a kernel shows here.
    pub(crate) fn down<T: DeviceRepr + Clone + Default>(&self, x: &CudaSlice<T>) -> Vec<T> {
        self.stream.clone_dtoh(x).expect("a copy from the device")
    }
}

/// Elements of one of the three dtypes on the device.
pub(crate) enum Memory {
    F16(CudaSlice<f16>),
    Bf16(CudaSlice<bf16>),
    F32(CudaSlice<f32>),
}

impl Host {
    pub(crate) fn up(&self, gpu: &Gpu) -> Memory {
        match self {
            Host::F16(x) => Memory::F16(gpu.up(x)),
            Host::Bf16(x) => Memory::Bf16(gpu.up(x)),
            Host::F32(x) => Memory::F32(gpu.up(x)),
        }
    }
}

impl Memory {
    pub(crate) fn view(&self, shape: Shape) -> DeviceTensor<'_> {
        each!(self, Memory, x => DeviceTensor::new(x, shape).expect("a view"))
    }

    pub(crate) fn view_mut(&mut self, shape: Shape) -> DeviceTensorMut<'_> {
        each!(self, Memory, x => DeviceTensorMut::new(x, shape).expect("a view"))
    }

    pub(crate) fn down(&self, gpu: &Gpu) -> Host {
        match self {
            Memory::F16(x) => Host::F16(gpu.down(x)),
            Memory::Bf16(x) => Host::Bf16(gpu.down(x)),
            Memory::F32(x) => Host::F32(gpu.down(x)),
        }
    }
}

/// Deterministic numbers.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        // Steele, Lea & Flood 2014: SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    pub(crate) fn normal(&mut self) -> f32 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f32::consts::TAU * self.unit()).cos()
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// `[tokens, heads, dim]` one after the other.
pub(crate) fn contiguous(dims: [usize; 3]) -> Shape {
    let [t, h, d] = dims;
    Shape { dims, batch_tokens: t.max(1), strides: [t * h * d, h * d, d, 1] }
}

/// Offset of the first channel of (token, head).
pub(crate) fn row(shape: &Shape, token: usize, head: usize) -> usize {
    let [b, t, h, _] = shape.strides;
    token / shape.batch_tokens * b + token % shape.batch_tokens * t + head * h
}

/// One of the usual layouts of `[tokens, heads, dim]`: contiguous, batch first, or with gaps everywhere. Returns the shape and
/// the elements of memory that it needs.
pub(crate) fn layout(random: &mut Random, dims: [usize; 3]) -> (Shape, usize) {
    let [t, h, d] = dims;
    match random.below(4) {
        0 => (contiguous(dims), t * h * d),
        // [batch, heads, tokens, dim]
        1 => {
            let b = (1..=t.max(1)).rev().find(|b| *b <= 3 && t % b == 0).unwrap_or(1);
            let n = t / b;
            (Shape { dims, batch_tokens: n.max(1), strides: [h * n * d, d, n * d, 1] }, t * h * d)
        }
        // A part of a fused projection: rows longer than the heads.
        2 => {
            let row = 3 * h * d + 8;
            (Shape { dims, batch_tokens: t.max(1), strides: [t * row, row, d, 1] }, t * row)
        }
        // Channels outermost.
        _ => (Shape { dims, batch_tokens: t.max(1), strides: [t * h * d, 1, t, t * h] }, t * h * d),
    }
}

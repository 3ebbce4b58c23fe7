//! A cache on somebody else's memory and stream: addresses and a handle are all that it is given.
//! `cargo run --release --features cuda --example raw_stream`

use half::f16;
use qkv::cuda::launch::DeviceAttendParams;
use qkv::cuda::{CacheStream, Cuda, Device, DeviceSlice, DeviceSliceMut, DeviceTensor, DeviceTensorMut};
use qkv::{Bits, CacheConfig, KvCache};

const LAYERS: usize = 2;
const KV_HEADS: usize = 2;
const HEADS: usize = 8;
const DIM: usize = 64;
const TOKENS: usize = 100;

/// The engine: it has a stream and memory, by whatever means (here the plain functions of the driver).
mod engine {
    use qkv::cuda::cudarc::driver::result;
    use std::ffi::c_void;

    pub(crate) struct Engine {
        stream: *mut c_void,
        memory: Vec<u64>,
    }

    impl Engine {
        /// The device's context is current.
        pub(crate) fn new() -> Result<Self, Box<dyn std::error::Error>> {
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
            Ok(Self { stream: stream.cast(), memory: Vec::new() })
        }

        pub(crate) fn stream(&self) -> *mut c_void {
            self.stream
        }

        pub(crate) fn allocate(&mut self, bytes: usize) -> Result<u64, Box<dyn std::error::Error>> {
            // SAFETY: the context is current; it is freed below.
            let address = unsafe { result::malloc_sync(bytes) }?;
            self.memory.push(address);
            Ok(address)
        }

        pub(crate) fn write<T>(&self, address: u64, data: &[T]) -> Result<(), Box<dyn std::error::Error>> {
            // SAFETY: callers write what fits their allocation; the stream is waited for before `data` ends.
            unsafe { result::memcpy_htod_async(address, data, self.stream.cast()) }?;
            self.wait()
        }

        pub(crate) fn read<T>(&self, address: u64, data: &mut [T]) -> Result<(), Box<dyn std::error::Error>> {
            // SAFETY: as above.
            unsafe { result::memcpy_dtoh_async(data, address, self.stream.cast()) }?;
            self.wait()
        }

        pub(crate) fn wait(&self) -> Result<(), Box<dyn std::error::Error>> {
            // SAFETY: the stream lives as long as this.
            Ok(unsafe { result::stream::synchronize(self.stream.cast()) }?)
        }
    }

    impl Drop for Engine {
        fn drop(&mut self) {
            for address in self.memory.drain(..) {
                // SAFETY: allocated above; nothing is under way. There is nobody to tell of an error.
                let _ = unsafe { result::free_sync(address) };
            }
            // SAFETY: made above; destroyed once.
            let _ = unsafe { result::stream::destroy(self.stream.cast()) };
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if !qkv::cuda::is_available() {
        println!("no CUDA driver with a device");
        return Ok(());
    }
    let device = Device::new(0)?;
    device.context().bind_to_thread()?;
    let mut engine = engine::Engine::new()?;
    let [q, k, v, out] = [HEADS, KV_HEADS, KV_HEADS, HEADS].map(|heads| engine.allocate(heads * DIM * 2));
    let (q, k, v, out) = (q?, k?, v?, out?);

    let config = CacheConfig::new(LAYERS, KV_HEADS, DIM).with_bits(Bits::B4).with_capacity(1, 1024);
    // SAFETY: the engine's stream outlives the cache: it is dropped at the end of this block.
    let stream = unsafe { CacheStream::from_raw(engine.stream()) };
    {
        let mut cache = KvCache::<Cuda>::on_device(&device, stream, config)?;
        for token in 0..TOKENS {
            for (address, heads) in [(q, HEADS), (k, KV_HEADS), (v, KV_HEADS)] {
                let x = |i: usize| f16::from_f32(((i * 7 + token * 13 + heads) as f32 * 0.37).sin());
                engine.write(address, &(0..heads * DIM).map(x).collect::<Vec<_>>())?;
            }
            let lent = |address, heads: usize| {
                // SAFETY: an allocation of that many f16, which lives until the engine is dropped.
                unsafe { DeviceSlice::<f16>::from_raw(address, heads * DIM) }
            };
            // SAFETY: as above; nothing else writes it meanwhile.
            let out = unsafe { DeviceSliceMut::<f16>::from_raw(out, HEADS * DIM) };
            let q = DeviceTensor::thd(lent(q, HEADS), [1, HEADS, DIM])?;
            let k = DeviceTensor::thd(lent(k, KV_HEADS), [1, KV_HEADS, DIM])?;
            let v = DeviceTensor::thd(lent(v, KV_HEADS), [1, KV_HEADS, DIM])?;
            let mut out = DeviceTensorMut::thd(out, [1, HEADS, DIM])?;
            for layer in 0..LAYERS {
                cache.append(layer, &k, &v)?;
                cache.attend(layer, &q, &DeviceAttendParams::new(), &mut out, None)?;
            }
        }
        let mut last = vec![f16::ZERO; HEADS * DIM];
        engine.read(out, &mut last)?;
        println!(
            "{} tokens in {} bytes, last output {:.4}",
            cache.len(0),
            cache.bytes_used(),
            last[last.len() - 1].to_f32()
        );
    }
    Ok(())
}

//! A prompt and a few tokens through a 4-bit cache: `cargo run --release --example quickstart`, on a GPU with
//! `cargo run --release --features cuda --example quickstart` where there is a driver with a device.

use half::f16;
use qkv::{AttendParams, Bits, CacheConfig, KvCache, TensorMut, TensorRef};

const LAYERS: usize = 2;
const KV_HEADS: usize = 2;
const HEADS: usize = 8;
const DIM: usize = 64;
/// A prompt, then one token a step.
const STEPS: [usize; 4] = [300, 1, 1, 1];

fn config() -> CacheConfig {
    CacheConfig::new(LAYERS, KV_HEADS, DIM).with_bits(Bits::B4).with_capacity(1, 4096)
}

/// What a model's projections would give: `[rows, heads, DIM]` of layer, step and operand.
fn projected(seed: usize, rows: usize, heads: usize) -> Vec<f16> {
    (0..rows * heads * DIM).map(|i| f16::from_f32(((i * 7 + seed * 13) as f32 * 0.37).sin())).collect()
}

fn on_cpu() -> qkv::Result<f32> {
    let mut cache = KvCache::new(config())?;
    let mut last = 0.0;
    for (step, rows) in STEPS.into_iter().enumerate() {
        for layer in 0..LAYERS {
            let seed = 10 * step + layer;
            let (q, k, v) = (
                projected(seed, rows, HEADS),
                projected(seed + 3, rows, KV_HEADS),
                projected(seed + 5, rows, KV_HEADS),
            );
            let (q, k, v) = (
                TensorRef::thd(&q, [rows, HEADS, DIM])?,
                TensorRef::thd(&k, [rows, KV_HEADS, DIM])?,
                TensorRef::thd(&v, [rows, KV_HEADS, DIM])?,
            );
            let mut out = vec![0f32; rows * HEADS * DIM];
            let mut o = TensorMut::thd(&mut out, [rows, HEADS, DIM])?;
            if rows > 64 {
                // Exact attention over the prompt, which is stored afterwards.
                cache.prefill(layer, &q, &k, &v, &AttendParams::new(), &mut o, None)?;
            } else {
                cache.append(layer, &k, &v)?;
                cache.attend(layer, &q, &AttendParams::new(), &mut o, None)?;
            }
            last = out[out.len() - 1];
        }
    }
    println!("CPU: {} tokens in {} bytes, last output {last:.4}", cache.len(0), cache.bytes_used());
    Ok(last)
}

#[cfg(feature = "cuda")]
fn on_gpu() -> Result<f32, Box<dyn std::error::Error>> {
    use qkv::cuda::launch::DeviceAttendParams;
    use qkv::cuda::{Cuda, Device, DeviceTensor, DeviceTensorMut};

    // The engine's stream; its memory is given as slices here, addresses do as well.
    let device = Device::new(0)?;
    let stream = device.context().new_stream()?;
    let mut cache = KvCache::<Cuda>::on_device(&device, stream.clone(), config())?;
    let mut last = 0.0;
    for (step, rows) in STEPS.into_iter().enumerate() {
        for layer in 0..LAYERS {
            let seed = 10 * step + layer;
            let q = stream.clone_htod(&projected(seed, rows, HEADS))?;
            let k = stream.clone_htod(&projected(seed + 3, rows, KV_HEADS))?;
            let v = stream.clone_htod(&projected(seed + 5, rows, KV_HEADS))?;
            let (q, k, v) = (
                DeviceTensor::thd(&q, [rows, HEADS, DIM])?,
                DeviceTensor::thd(&k, [rows, KV_HEADS, DIM])?,
                DeviceTensor::thd(&v, [rows, KV_HEADS, DIM])?,
            );
            let mut out = stream.alloc_zeros::<f32>(rows * HEADS * DIM)?;
            let mut o = DeviceTensorMut::thd(&mut out, [rows, HEADS, DIM])?;
            let params = DeviceAttendParams::new();
            if rows > 64 {
                cache.prefill(layer, &q, &k, &v, &params, &mut o, None)?;
            } else {
                cache.append(layer, &k, &v)?;
                cache.attend(layer, &q, &params, &mut o, None)?;
            }
            last = *stream.clone_dtoh(&out)?.last().unwrap_or(&0.0);
        }
    }
    println!("GPU: {} tokens in {} bytes, last output {last:.4}", cache.len(0), cache.bytes_used());
    Ok(last)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cpu = on_cpu()?;
    #[cfg(feature = "cuda")]
    if qkv::cuda::is_available() {
        let gpu = on_gpu()?;
        println!("they differ by {:.1e}", (cpu - gpu).abs());
    } else {
        println!("no CUDA driver with a device: only the CPU was used");
    }
    let _ = cpu;
    Ok(())
}

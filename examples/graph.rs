//! A decode step captured in a CUDA graph once and replayed while the sequences grow.
//! `cargo run --release --features cuda --example graph`

use half::f16;
use qkv::cuda::cudarc::driver::{CudaSlice, sys};
use qkv::cuda::launch::DeviceAttendParams;
use qkv::cuda::{Cuda, Device, DeviceTensor, DeviceTensorMut};
use qkv::{Batch, Bits, CacheConfig, PagePool, PagedKvCache};

const LAYERS: usize = 2;
const KV_HEADS: usize = 2;
const HEADS: usize = 8;
const DIM: usize = 64;
/// Enough for tiles to close while the graph is replayed.
const REPLAYS: usize = 200;

/// What a model's projections would give for one token of two sequences: `[2, heads, DIM]`.
fn projected(step: usize, operand: usize, heads: usize) -> Vec<f16> {
    (0..2 * heads * DIM).map(|i| f16::from_f32(((i * 7 + step * 13 + operand) as f32 * 0.37).sin())).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if !qkv::cuda::is_available() {
        println!("no CUDA driver with a device");
        return Ok(());
    }
    let device = Device::new(0)?;
    let stream = device.context().new_stream()?;
    let config = CacheConfig::new(LAYERS, KV_HEADS, DIM).with_bits(Bits::B4).with_capacity(2, 512);
    let pool = PagePool::on_device(&device, &config, 16)?;
    let mut cache = PagedKvCache::<Cuda>::on_device(&device, stream.clone(), config, pool)?;
    let seats = [cache.open()?, cache.open()?];

    // Memory that the graph reads and writes in every replay.
    let mut inputs: [CudaSlice<f16>; 3] = [
        stream.alloc_zeros(2 * HEADS * DIM)?,
        stream.alloc_zeros(2 * KV_HEADS * DIM)?,
        stream.alloc_zeros(2 * KV_HEADS * DIM)?,
    ];
    let mut out = stream.alloc_zeros::<f16>(2 * HEADS * DIM)?;

    let step = cache.prepare_capture(&Batch::new(&seats, &[0, 1, 2]))?;
    let graph = {
        // Views first: making one asks cudarc for its events, which a capture does not allow.
        let q = DeviceTensor::thd(&inputs[0], [2, HEADS, DIM])?;
        let k = DeviceTensor::thd(&inputs[1], [2, KV_HEADS, DIM])?;
        let v = DeviceTensor::thd(&inputs[2], [2, KV_HEADS, DIM])?;
        let mut o = DeviceTensorMut::thd(&mut out, [2, HEADS, DIM])?;
        stream.begin_capture(sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        cache.capture_step(&step)?;
        for layer in 0..LAYERS {
            cache.append(layer, &k, &v)?;
            cache.attend(layer, &q, &DeviceAttendParams::new(), &mut o, None)?;
        }
        let flags = sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        stream.end_capture(flags)?.ok_or("nothing was captured")?
    };

    for i in 0..REPLAYS {
        for (operand, input) in inputs.iter_mut().enumerate() {
            let heads = if operand == 0 { HEADS } else { KV_HEADS };
            stream.memcpy_htod(&projected(i, operand, heads), input)?;
        }
        // The host follows: lengths, and block ids for the tiles that close. It waits for nothing.
        cache.advance(&step)?;
        graph.launch()?;
    }
    let last = stream.clone_dtoh(&out)?;
    for seat in seats {
        println!("{} tokens, of them {} in closed tiles", cache.len(seat)?, cache.packed_len(seat)?);
    }
    println!("last output {:.4}, {:?}", last[last.len() - 1].to_f32(), cache.device_status()?);
    Ok(())
}

//! A model's loop on both backends: a prompt in chunks, then decoding; equal outputs, on contiguous and shared caches.

use crate::gpu::{Gpu, Random};
use cudarc::driver::CudaSlice;
use half::f16;
use qkv::cuda::launch::DeviceAttendParams;
use qkv::cuda::{Cuda, DeviceTensor, DeviceTensorMut};
use qkv::{
    Affine, AttendParams, Batch, Bits, CacheConfig, Fp8, Granularity, KvCache, PagePool, PagedKvCache,
    TensorMut, TensorRef,
};

const LAYERS: usize = 2;
const GROUP: usize = 4;

/// Queries, keys and values of `rows` rows, on both sides.
struct Inputs {
    host: [Vec<f16>; 3],
    device: [CudaSlice<f16>; 3],
    dims: [[usize; 3]; 3],
}

impl Inputs {
    fn new(gpu: &Gpu, random: &mut Random, c: &CacheConfig, rows: usize) -> Self {
        let heads = [GROUP * c.kv_heads, c.kv_heads, c.kv_heads];
        let dims = [0, 1, 2].map(|i| [rows, heads[i], if i == 2 { c.value_dim } else { c.key_dim }]);
        let host = dims.map(|d| {
            random.normals(d.iter().product()).iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>()
        });
        let device = [0, 1, 2].map(|i| gpu.up(&host[i]));
        Self { host, device, dims }
    }

    fn host(&self, i: usize) -> TensorRef<'_> {
        TensorRef::thd(&self.host[i], self.dims[i]).unwrap()
    }

    fn device(&self, i: usize) -> DeviceTensor<'_> {
        DeviceTensor::thd(&self.device[i], self.dims[i]).unwrap()
    }
}

/// Outputs of both sides.
struct Outputs {
    host: Vec<f32>,
    device: CudaSlice<f32>,
    host_lse: Vec<f32>,
    device_lse: CudaSlice<f32>,
    dims: [usize; 3],
}

impl Outputs {
    fn new(gpu: &Gpu, c: &CacheConfig, rows: usize) -> Self {
        let dims = [rows, GROUP * c.kv_heads, c.value_dim];
        let n = dims.iter().product();
        Self {
            host: vec![0.0; n],
            device: gpu.zeros(n),
            host_lse: vec![0.0; rows * dims[1]],
            device_lse: gpu.zeros(rows * dims[1]),
            dims,
        }
    }

    fn compare(&self, gpu: &Gpu, what: &str) {
        let (got, lse) = (gpu.down(&self.device), gpu.down(&self.device_lse));
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
        let error = norm(&mut got.iter().zip(&self.host).map(|(a, b)| a - b));
        let size = norm(&mut self.host.iter().copied());
        assert!(size > 0.0 && error <= 1e-3 * size, "{what}: {} from the CPU", error / size);
        let near = lse.iter().zip(&self.host_lse).all(|(a, b)| (a - b).abs() <= 2e-3);
        assert!(near, "{what}: LSE {lse:?}, the CPU has {:?}", self.host_lse);
    }
}

fn configs() -> Vec<CacheConfig> {
    let base = |d| CacheConfig::new(LAYERS, 2, d).with_capacity(2, 512);
    vec![
        base(64).with_bits(Bits::B4),
        base(64).with_bits(Bits::B2).with_residual(Some(32)),
        base(128).with_bits(Bits::B8),
        base(64)
            .with_key(Fp8::e4m3(Granularity::TokenHead))
            .with_value(Fp8::e4m3(Granularity::TokenHead))
            .direct(),
        base(128).with_key(Affine::per_token(Bits::B4, 128)).with_value(Affine::per_token(Bits::B8, 32)),
        base(64).with_bits(Bits::B3).with_sliding_window(Some(100)),
    ]
}

#[test]
fn a_prompt_and_decoding_give_what_the_cpu_gives() {
    let gpu = Gpu::new();
    for (i, c) in configs().into_iter().enumerate() {
        let mut random = Random::new(i as u64);
        let mut cpu = KvCache::new(c.clone()).unwrap();
        let mut device = KvCache::<Cuda>::on_device(&gpu.device, gpu.stream.clone(), c.clone()).unwrap();
        // Both sequences together: two chunks of a prompt, then single tokens and a few at once.
        for (step, n) in [150usize, 40, 1, 1, 3, 1].into_iter().enumerate() {
            for layer in 0..LAYERS {
                let x = Inputs::new(&gpu, &mut random, &c, 2 * n);
                let mut y = Outputs::new(&gpu, &c, 2 * n);
                let mut host = TensorMut::thd(&mut y.host, y.dims).unwrap();
                let mut out = DeviceTensorMut::thd(&mut y.device, y.dims).unwrap();
                let (params, device_params) = (AttendParams::new(), DeviceAttendParams::new());
                let lse = Some((&mut y.device_lse).into());
                if n > 3 {
                    let (q, k, v) = (x.host(0), x.host(1), x.host(2));
                    cpu.prefill(layer, &q, &k, &v, &params, &mut host, Some(&mut y.host_lse)).unwrap();
                    let (q, k, v) = (x.device(0), x.device(1), x.device(2));
                    device.prefill(layer, &q, &k, &v, &device_params, &mut out, lse).unwrap();
                } else {
                    cpu.append(layer, &x.host(1), &x.host(2)).unwrap();
                    cpu.attend(layer, &x.host(0), &params, &mut host, Some(&mut y.host_lse)).unwrap();
                    device.append(layer, &x.device(1), &x.device(2)).unwrap();
                    device.attend(layer, &x.device(0), &device_params, &mut out, lse).unwrap();
                }
                y.compare(&gpu, &format!("configuration {i}, step {step}, layer {layer}"));
            }
        }
        assert_eq!(cpu.len(1), device.len(1));
        assert_eq!(device.paged().device_status().unwrap(), Default::default());
    }
}

#[test]
fn a_shared_prefix_is_attended_by_both() {
    let gpu = Gpu::new();
    let c = CacheConfig::new(LAYERS, 2, 64).with_bits(Bits::B4).with_capacity(3, 512);
    let mut random = Random::new(77);
    let mut cpu = PagedKvCache::new(c.clone(), PagePool::new(&c, 20).unwrap()).unwrap();
    let pool = PagePool::on_device(&gpu.device, &c, 20).unwrap();
    let mut device =
        PagedKvCache::<Cuda>::on_device(&gpu.device, gpu.stream.clone(), c.clone(), pool).unwrap();
    let mut seats = vec![cpu.open().unwrap()];
    assert_eq!(device.open().unwrap(), seats[0]);
    for counts in [vec![200usize], vec![1, 7], vec![1, 1]] {
        if counts.len() > seats.len() {
            // The second sequence starts from the first one's closed tiles.
            let a = cpu.prefix(seats[0], 128).unwrap();
            let b = device.prefix(seats[0], 128).unwrap();
            seats.push(cpu.open_with(&a).unwrap());
            assert_eq!(device.open_with(&b).unwrap(), seats[1]);
        }
        let starts: Vec<i32> = std::iter::once(0)
            .chain(counts.iter().scan(0, |s, n| {
                *s += *n as i32;
                Some(*s)
            }))
            .collect();
        let rows = *starts.last().unwrap() as usize;
        for (seat, n) in seats.iter().zip(&counts) {
            cpu.reserve(*seat, *n).unwrap();
            device.reserve(*seat, *n).unwrap();
        }
        cpu.begin_step(&Batch::new(&seats, &starts)).unwrap();
        device.begin_step(&Batch::new(&seats, &starts)).unwrap();
        for layer in 0..LAYERS {
            let x = Inputs::new(&gpu, &mut random, &c, rows);
            let mut y = Outputs::new(&gpu, &c, rows);
            let mut host = TensorMut::thd(&mut y.host, y.dims).unwrap();
            let mut out = DeviceTensorMut::thd(&mut y.device, y.dims).unwrap();
            let lse = Some((&mut y.device_lse).into());
            if rows > 64 {
                let (q, k, v) = (x.host(0), x.host(1), x.host(2));
                cpu.prefill(layer, &q, &k, &v, &AttendParams::new(), &mut host, Some(&mut y.host_lse))
                    .unwrap();
                let (q, k, v) = (x.device(0), x.device(1), x.device(2));
                device.prefill(layer, &q, &k, &v, &DeviceAttendParams::new(), &mut out, lse).unwrap();
            } else {
                cpu.append(layer, &x.host(1), &x.host(2)).unwrap();
                cpu.attend(layer, &x.host(0), &AttendParams::new(), &mut host, Some(&mut y.host_lse))
                    .unwrap();
                device.append(layer, &x.device(1), &x.device(2)).unwrap();
                device.attend(layer, &x.device(0), &DeviceAttendParams::new(), &mut out, lse).unwrap();
            }
            y.compare(&gpu, &format!("{counts:?}, layer {layer}"));
        }
    }
}

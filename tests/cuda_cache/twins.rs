//! Two caches that are told the same, one on the CPU and one on the device: every format, every call.

use crate::caches::any_config;
use crate::device::OnGpu;
use crate::gpu::{Gpu, Random};
use crate::machine::{self, Machine, OnCpu, held};
use qkv::cache::SlotBatch;
use qkv::cuda::{CacheStatus, Cuda, DeviceTensorMut};
use qkv::{Affine, Batch, Bits, CacheConfig, Dtype, Error, PagedKvCache, Prefix, Seat, TensorMut};

struct Twins<'m> {
    gpu: &'m OnGpu,
    cpu: PagedKvCache,
    cuda: PagedKvCache<Cuda>,
    seats: Vec<Seat>,
}

impl<'m> Twins<'m> {
    fn new(gpu: &'m OnGpu, config: &CacheConfig, blocks: usize) -> Self {
        Self {
            gpu,
            cpu: OnCpu.paged(config.clone(), blocks).unwrap(),
            cuda: gpu.paged(config.clone(), blocks).unwrap(),
            seats: vec![],
        }
    }

    fn both<T: PartialEq + std::fmt::Debug>(
        &mut self,
        cpu: impl FnOnce(&mut PagedKvCache) -> Result<T, Error>,
        cuda: impl FnOnce(&mut PagedKvCache<Cuda>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (a, b) = (cpu(&mut self.cpu), cuda(&mut self.cuda));
        assert_eq!(a, b);
        a
    }

    /// Some sequences grow; now and then with padding, now and then cancelled after one layer.
    fn step(&mut self, random: &mut Random) {
        let chosen: Vec<Seat> = self.seats.iter().copied().filter(|_| random.below(3) > 0).collect();
        let c = self.cpu.config().clone();
        let (mut starts, mut slots) = (vec![0i32], vec![]);
        let pad = random.below(4) == 0;
        let most = random.pick(&[2, 40, 150, 200]);
        for seat in &chosen {
            let room = c.max_tokens - self.cpu.len(*seat).unwrap();
            let n = random.below(most).min(room);
            let ends = if pad { [random.below(3), random.below(3)] } else { [0, 0] };
            slots.extend(std::iter::repeat_n(-1i64, ends[0]));
            slots.extend(std::iter::repeat_n(0i64, n));
            slots.extend(std::iter::repeat_n(-1i64, ends[1]));
            starts.push(slots.len() as i32);
            let reserved = self.both(|c| c.reserve(*seat, n), |c| c.reserve(*seat, n));
            if reserved.is_err() {
                return;
            }
        }
        if chosen.is_empty() {
            return;
        }
        let batch = Batch::new(&chosen, &starts);
        let batch = if pad { batch.with_slot_mapping(&slots) } else { batch };
        self.both(|c| c.begin_step(&batch), |c| c.begin_step(&batch)).unwrap();
        let order = random.pick(&[[0, 1], [1, 0]]);
        let cancelled = random.below(6) == 0;
        for layer in &order[..if cancelled { 1 } else { 2 }] {
            self.append(random, *layer, slots.len());
        }
        if cancelled {
            self.both(|c| c.cancel_step(), |c| c.cancel_step()).unwrap();
        }
    }

    fn append(&mut self, random: &mut Random, layer: usize, rows: usize) {
        let c = self.cpu.config().clone();
        let wild = random.below(4) == 0;
        let x = [c.key_dim, c.value_dim].map(|d| {
            let one = |random: &mut Random| match random.below(600) {
                0 if wild => random.pick(&[f32::NAN, f32::INFINITY, 1e30, -7e4, 0.0, -0.0, 1e-7]),
                _ => random.normal(),
            };
            (0..rows * c.kv_heads * d).map(|_| one(random)).collect::<Vec<_>>()
        });
        let gpu = self.gpu;
        self.both(
            |c| machine::append(&OnCpu, c, layer, &x[0], &x[1]),
            |c| machine::append(gpu, c, layer, &x[0], &x[1]),
        )
        .unwrap();
    }

    fn act(&mut self, random: &mut Random, prefixes: &mut Vec<(Prefix, Prefix<Cuda>)>) {
        let pick = |seats: &[Seat], random: &mut Random| seats[random.below(seats.len())];
        let full = self.seats.len() == self.cpu.config().max_sequences;
        match random.below(12) {
            0 if !full => {
                let seat = self.both(|c| c.open(), |c| c.open()).unwrap();
                self.seats.push(seat);
            }
            _ if self.seats.is_empty() => {}
            1 | 2 => {
                let seat = pick(&self.seats, random);
                let n = random.below(self.cpu.len(seat).unwrap() + 1);
                let _ = self.both(|c| c.truncate(seat, n), |c| c.truncate(seat, n));
            }
            3 if !full => {
                let seat = pick(&self.seats, random);
                if let Ok(new) = self.both(|c| c.fork(seat), |c| c.fork(seat)) {
                    self.seats.push(new);
                }
            }
            4 => {
                let parents: Vec<usize> = self.seats.iter().map(|_| random.below(self.seats.len())).collect();
                let (mut a, mut b) = (self.seats.clone(), self.seats.clone());
                let _ = self.both(|c| c.reorder(&mut a, &parents), |c| c.reorder(&mut b, &parents));
                assert_eq!(a, b);
                self.seats = a;
            }
            5 => {
                let seat = pick(&self.seats, random);
                let n = self.cpu.len(seat).unwrap();
                match (self.cpu.prefix(seat, n), self.cuda.prefix(seat, n)) {
                    (Ok(a), Ok(b)) => prefixes.push((a, b)),
                    (a, b) => assert_eq!(a.err(), b.err()),
                }
            }
            6 if !full && !prefixes.is_empty() => {
                let (a, b) = &prefixes[random.below(prefixes.len())];
                let seat = self.both(|c| c.open_with(a), |c| c.open_with(b)).unwrap();
                self.seats.push(seat);
            }
            7 if random.below(3) == 0 => {
                let seat = self.seats.swap_remove(random.below(self.seats.len()));
                self.both(|c| c.close(seat), |c| c.close(seat)).unwrap();
                prefixes.clear();
            }
            8 if random.below(3) == 0 => {
                let seat = pick(&self.seats, random);
                self.both(|c| c.clear(seat), |c| c.clear(seat)).unwrap();
            }
            9 => {
                let seat = pick(&self.seats, random);
                let token = random.below(self.cpu.len(seat).unwrap() + 1);
                let _ = self.both(|c| c.release_before(seat, token), |c| c.release_before(seat, token));
            }
            _ => self.step(random),
        }
    }

    fn compare(&self, what: &str) {
        let c = self.cpu.config();
        for seat in &self.seats {
            assert_eq!(self.cpu.export_sinks(*seat), self.cuda.export_sinks(*seat), "{what}");
            let tiles = self.cpu.packed_len(*seat).unwrap() / 64;
            assert_eq!(self.cpu.block_table(*seat), self.cuda.block_table(*seat), "{what}");
            let gone = self.cpu.block_table(*seat).unwrap()[..tiles].iter().filter(|b| **b < 0).count();
            for layer in 0..2 {
                for (head, tile) in (0..c.kv_heads).flat_map(|h| (gone..tiles).map(move |t| (h, t))) {
                    let page = |r: Result<Vec<u8>, Error>| r.unwrap();
                    let (a, b) = (
                        page(self.cpu.export_page(*seat, layer, head, tile)),
                        page(self.cuda.export_page(*seat, layer, head, tile)),
                    );
                    // Behind the header, which has a checksum.
                    let (a, b) = (&a[64..], &b[64..]);
                    let at = a.iter().zip(b).position(|(a, b)| a != b);
                    let bytes = at.map(|at| (&a[at / 2 * 2..][..4], &b[at / 2 * 2..][..4]));
                    assert_eq!(
                        at, None,
                        "{what}: page of layer {layer} head {head} tile {tile} of {seat:?}: {bytes:x?}"
                    );
                }
                if gone > 0 {
                    continue; // it cannot be decoded as a whole
                }
                let (a, b) =
                    (held(&OnCpu, &self.cpu, layer, *seat), held(self.gpu, &self.cuda, layer, *seat));
                for (op, (a, b)) in a.iter().zip(&b).enumerate() {
                    let same = |a: &f32, b: &f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                    let bad = a.iter().zip(b).position(|(a, b)| !same(a, b));
                    assert_eq!(bad, None, "{what}: decoded, layer {layer}, operand {op}, {seat:?}");
                }
            }
        }
        assert_eq!(self.cpu.stats(), self.cuda.stats(), "{what}");
        let mut want = CacheStatus::default();
        want.clamped_values = self.cpu.stats().clamped_values;
        assert_eq!(self.cuda.device_status().unwrap(), want, "{what}");
        assert_eq!(self.cpu.bytes_used(), self.cuda.bytes_used(), "{what}");
    }
}

#[test]
fn twins_hold_the_same() {
    let gpu = OnGpu::new();
    let (mut tiles, mut again) = (0, 0);
    for case in 0..40 {
        let mut random = Random::new(1000 + case);
        let config = any_config(&mut random);
        let mut twins = Twins::new(&gpu, &config, 20);
        let mut prefixes = vec![];
        twins.seats = vec![twins.both(|c| c.open(), |c| c.open()).unwrap()];
        for act in 0..40 {
            twins.act(&mut random, &mut prefixes);
            if act % 8 == 7 {
                twins.compare(&format!("case {case}, act {act}, {config:?}"));
            }
        }
        tiles += twins.cpu.stats().closed_tiles;
        again += twins.cpu.stats().requantized_tokens;
    }
    println!("{tiles} tiles closed, {again} tokens quantized again");
    assert!(tiles > 200 && again > 200, "{tiles} tiles closed, {again} tokens quantized again");
}

#[test]
fn pages_move_between_backends() {
    let gpu = OnGpu::new();
    for case in 0..6 {
        let mut random = Random::new(77 + case);
        let config = any_config(&mut random);
        let mut twins = Twins::new(&gpu, &config, 20);
        let seat = twins.both(|c| c.open(), |c| c.open()).unwrap();
        twins.both(|c| c.reserve(seat, 300), |c| c.reserve(seat, 300)).unwrap();
        let (seats, starts) = ([seat], [0, 300]);
        let batch = Batch::new(&seats, &starts);
        twins.both(|c| c.begin_step(&batch), |c| c.begin_step(&batch)).unwrap();
        (0..2).for_each(|layer| twins.append(&mut random, layer, 300));
        // The device's pages into the host's cache, and the other way round.
        let new = twins.both(|c| c.open(), |c| c.open()).unwrap();
        let sinks = (twins.cpu.export_sinks(seat).unwrap(), twins.cuda.export_sinks(seat).unwrap());
        twins.both(|c| c.import_sinks(new, &sinks.1), |c| c.import_sinks(new, &sinks.0)).unwrap();
        for tile in 0..2 {
            for (layer, head) in (0..2).flat_map(|l| (0..config.kv_heads).map(move |h| (l, h))) {
                let pages = (
                    twins.cpu.export_page(seat, layer, head, tile).unwrap(),
                    twins.cuda.export_page(seat, layer, head, tile).unwrap(),
                );
                twins.both(|c| c.import_page(new, &pages.1), |c| c.import_page(new, &pages.0)).unwrap();
            }
        }
        assert_eq!(twins.cuda.len(new).unwrap(), 128);
        twins.seats = vec![seat, new];
        twins.compare(&format!("case {case}, {config:?}"));
        // And it grows on.
        twins.both(|c| c.reserve(new, 100), |c| c.reserve(new, 100)).unwrap();
        let (seats, starts) = ([new], [0, 100]);
        let batch = Batch::new(&seats, &starts);
        twins.both(|c| c.begin_step(&batch), |c| c.begin_step(&batch)).unwrap();
        (0..2).for_each(|layer| twins.append(&mut random, layer, 100));
        twins.compare(&format!("case {case}, grown, {config:?}"));
    }
}

#[test]
fn slots_without_seats() {
    let gpu = OnGpu::new();
    let eight = Affine::per_token(Bits::B8, 32);
    let config = CacheConfig::new(2, 2, 32).with_key(eight).with_value(eight).with_capacity(3, 256).direct();
    let mut twins = Twins::new(&gpu, &config, 6);
    let mut random = Random::new(5);
    let blocks: Vec<i32> =
        (0..4).map(|_| twins.both(|c| c.allocate_block(), |c| c.allocate_block()).unwrap()).collect();
    let (tables, starts) = ([blocks[0], blocks[1], blocks[2], blocks[3]], [0, 72, 76]);
    // 70 tokens of one sequence with padding on both sides, three of another.
    let slot = |table: &[i32], t: usize| table[t / 64] as i64 * 64 + (t % 64) as i64;
    let mut slots = vec![-1];
    slots.extend((0..70).map(|t| slot(&tables[..2], t)));
    slots.push(-1);
    slots.extend((0..3).map(|t| slot(&tables[2..], t)));
    slots.push(-1);
    let batch = SlotBatch::new(&starts, &[70, 3], &tables, &slots);
    twins.both(|c| c.begin_slots(&batch), |c| c.begin_slots(&batch)).unwrap();
    (0..2).for_each(|layer| twins.append(&mut random, layer, 76));
    // Seen through a seat that owns the blocks.
    let seat = twins.both(|c| c.open(), |c| c.open()).unwrap();
    for (tile, block) in blocks[..1].iter().enumerate() {
        twins.both(|c| c.set_block(seat, tile, *block), |c| c.set_block(seat, tile, *block)).unwrap();
    }
    twins.seats = vec![seat];
    twins.compare("slots");
    assert_eq!(twins.cuda.stats(), twins.cpu.stats());
}

/// Outputs of any dtype and layout.
#[test]
fn decoded_into_any_tensor() {
    let gpu = OnGpu::new();
    let config = CacheConfig::new(2, 2, 64).with_bits(Bits::B4).with_capacity(1, 320);
    let mut random = Random::new(9);
    let mut twins = Twins::new(&gpu, &config, 5);
    twins.seats = vec![twins.both(|c| c.open(), |c| c.open()).unwrap()];
    let seat = twins.seats[0];
    twins.both(|c| c.reserve(seat, 200), |c| c.reserve(seat, 200)).unwrap();
    let (seats, starts) = ([seat], [0, 200]);
    let batch = Batch::new(&seats, &starts);
    twins.both(|c| c.begin_step(&batch), |c| c.begin_step(&batch)).unwrap();
    (0..2).for_each(|layer| twins.append(&mut random, layer, 200));
    let inner: &Gpu = &gpu.0;
    for _ in 0..6 {
        let (shape, n) = crate::gpu::layout(&mut random, [200, 2, 64]);
        let dtype = random.pick(&[Dtype::F16, Dtype::Bf16, Dtype::F32]);
        let fresh = || crate::gpu::Host::new(dtype, &vec![3.0; n]);
        let (mut host, mut memory) = ([fresh(), fresh()], [fresh().up(inner), fresh().up(inner)]);
        let [k, v] = &mut memory;
        let (mut k, mut v): (DeviceTensorMut<'_>, DeviceTensorMut<'_>) =
            (k.view_mut(shape), v.view_mut(shape));
        twins.cuda.dequantize(1, seat, &mut k, &mut v).unwrap();
        let [k, v] = &mut host;
        let view = |x| TensorMut::new(x, shape).unwrap();
        twins.cpu.dequantize(1, seat, &mut view(k.data_mut()), &mut view(v.data_mut())).unwrap();
        for (m, h) in memory.iter().zip(&host) {
            assert!(m.down(inner).bits() == h.bits(), "{dtype:?} {shape:?}");
        }
    }
}

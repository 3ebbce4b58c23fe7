//! A cache with fixed splits: what a sequence gets has the same bits alone and among others.

use crate::device::OnGpu;
use crate::gpu::Random;
use crate::machine::{Machine, Params};
use qkv::cuda::{Cuda, CudaOptions};
use qkv::{Batch, Bits, CacheConfig, Dtype, Error, PagePool, PagedKvCache, Result, Seat};

const DIM: usize = 64;
const KV_HEADS: usize = 2;
/// Tokens before the last step.
const LENS: [usize; 3] = [500, 1100, 30];

struct Run<'a> {
    gpu: &'a OnGpu,
    cache: PagedKvCache<Cuda>,
    members: Vec<usize>,
    seats: Vec<Seat>,
    heads: usize,
}

impl<'a> Run<'a> {
    fn new(gpu: &'a OnGpu, members: &[usize], heads: usize, pages: usize) -> Result<Self> {
        let config = CacheConfig::new(1, KV_HEADS, DIM).with_bits(Bits::B4).with_capacity(3, 1280);
        let pool = PagePool::on_device(&gpu.0.device, &config, 60)?;
        let options = CudaOptions::new(&gpu.0.device, gpu.0.stream.clone()).with_fixed_split(pages, heads, 1);
        let mut cache: PagedKvCache<Cuda> = PagedKvCache::on_backend(options, config, pool)?;
        let seats = members.iter().map(|_| cache.open()).collect::<Result<Vec<_>>>()?;
        Ok(Self { gpu, cache, members: members.to_vec(), seats, heads })
    }

    /// Numbers that follow the sequence, and where in it they are.
    fn numbers(&self, counts: &[usize], seed: usize, row: usize) -> Vec<f32> {
        let of =
            |(i, n): (usize, &usize)| Random::new((1000 * seed + self.members[i]) as u64).normals(n * row);
        counts.iter().enumerate().flat_map(of).collect()
    }

    /// A step of so many tokens each; the results of each sequence where they are `wanted`.
    fn step(&mut self, counts: &[usize], seed: usize, wanted: bool) -> Result<Vec<Vec<u32>>> {
        let mut starts = vec![0];
        for (seat, n) in self.seats.iter().zip(counts) {
            self.cache.reserve(*seat, *n)?;
            starts.push(starts.last().unwrap() + *n as i32);
        }
        let rows: usize = counts.iter().sum();
        let input = |d, what| self.gpu.input(Dtype::F16, &self.numbers(counts, 10 * seed + what, d));
        let (k, v, q) = (input(KV_HEADS * DIM, 0), input(KV_HEADS * DIM, 1), input(self.heads * DIM, 2));
        let view = |x, heads| OnGpu::view(x, [rows, heads, DIM]);
        self.cache.begin_step(&Batch::new(&self.seats, &starts))?;
        self.cache.append(0, &view(&k, KV_HEADS), &view(&v, KV_HEADS))?;
        if !wanted {
            return Ok(vec![]);
        }
        let mut out = self.gpu.output(Dtype::F32, rows * self.heads * DIM);
        let held = self.gpu.hold(&Params::default());
        let mut to = OnGpu::view_mut(&mut out, [rows, self.heads, DIM]);
        self.cache.attend(0, &view(&q, self.heads), &OnGpu::params(&held), &mut to, None)?;
        let out: Vec<u32> = self.gpu.read(out).iter().map(|x| x.to_bits()).collect();
        let row = self.heads * DIM;
        Ok(starts.windows(2).map(|w| out[w[0] as usize * row..w[1] as usize * row].to_vec()).collect())
    }
}

#[test]
fn a_sequence_gets_the_same_bits_alone_and_among_others() {
    let gpu = OnGpu::new();
    // The last has no sequence of more than a split.
    for (heads, pages) in [(4, 4), (16, 4), (4, 15), (4, 64)] {
        let run = |members: &[usize]| {
            let mut run = Run::new(&gpu, members, heads, pages).unwrap();
            let counts: Vec<usize> = members.iter().map(|m| LENS[*m]).collect();
            run.step(&counts, 0, false).unwrap();
            (1..4).map(|i| run.step(&vec![1; members.len()], i, true).unwrap()).collect::<Vec<_>>()
        };
        let (all, other, alone) = (run(&[0, 1, 2]), run(&[2, 1]), run(&[1]));
        for (i, step) in all.iter().enumerate() {
            // Memory of results is NaN before.
            assert!(step.concat().iter().all(|x| f32::from_bits(*x).is_finite()));
            let what = format!("{heads} heads, {pages} pages, step {i}");
            assert_eq!(step[1], alone[i][0], "{what}");
            assert_eq!([&step[2], &step[1]], [&other[i][0], &other[i][1]], "{what}");
        }
    }
}

/// More tokens than there is memory for; the step goes on.
#[test]
fn more_rows_than_were_asked_for_are_refused() {
    let gpu = OnGpu::new();
    let mut run = Run::new(&gpu, &[0, 1, 2], 16, 4).unwrap();
    run.step(&LENS, 0, false).unwrap();
    let e = run.step(&[1, 2, 1], 1, true).unwrap_err();
    assert!(matches!(&e, Error::Capacity { needed: 2, available: 1, .. }), "{e}");
    // The layer has appended: the step is over.
    assert_eq!(run.cache.len(run.seats[1]).unwrap(), LENS[1] + 2);
    run.step(&[1, 1, 1], 2, true).unwrap();
    assert!(matches!(Run::new(&gpu, &[0], 15, 4), Err(Error::Unsupported { what: "query heads", .. })));
}

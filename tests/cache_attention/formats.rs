//! Every pair of formats, both modes, random shapes.

use crate::host::Host;
use crate::machine::{self, Answer, Machine, Params, Query, held};
use crate::reference::{Problem, worst};
use qkv::cache::{Batch, SlotBatch};
use qkv::*;

/// Every test of this suite that any machine runs.
macro_rules! every_test {
    ($machine:expr, $suite:ident) => {
        $crate::machine::on!(
            $machine,
            $suite: centred_keys,
            slots_equal_seats
        );
    };
}
pub(crate) use every_test;

pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n.max(1)
    }
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
    /// Roughly normal.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..6).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5).sum::<f32>() * 1.4
    }
    pub(crate) fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// All formats for a head dim; `direct` leaves out those that direct mode refuses.
pub(crate) fn formats(dim: usize, direct: bool) -> Vec<Format> {
    let mut all: Vec<Format> = vec![Format::F16, Format::Bf16];
    for kind in [Fp8::e4m3, Fp8::e5m2] {
        for g in [Granularity::Tensor, Granularity::Head, Granularity::TokenHead] {
            all.push(kind(g).into());
        }
    }
    for bits in Bits::ALL {
        let groups = [32, 64, 128, dim];
        for (i, group) in groups.into_iter().enumerate() {
            if group <= dim && !groups[..i].contains(&group) {
                all.push(Affine::per_token(bits, group).into());
            }
        }
        if dim.is_multiple_of(32) {
            all.push(Affine::per_token(bits, 32).with_rotation(32).into());
        }
        if !direct {
            for group in [32, 64] {
                all.push(Affine::per_channel(bits, group).into());
            }
            if dim.is_multiple_of(32) {
                all.push(Affine::per_channel(bits, 32).with_rotation(32).into());
            }
        }
    }
    all
}

/// What rounding to a dtype may do to a number, relative.
fn step(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 0.0,
        Dtype::F16 => 1.0 / 2048.0,
        Dtype::Bf16 => 1.0 / 256.0,
    }
}

fn tolerance(dtype: Dtype, want: &[f64]) -> f64 {
    let size = want.iter().fold(0f64, |a, b| a.max(b.abs()));
    1e-5 + size
        * match dtype {
            Dtype::F32 => 1e-5,
            Dtype::F16 => 1.0 / 1024.0,
            Dtype::Bf16 => 1.0 / 128.0,
        }
}

/// Distance in the 2-norm, relative.
pub(crate) fn distance(got: &[f32], want: &[f64]) -> f64 {
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let difference = squares(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - w));
    (difference / squares(&mut want.iter().copied()).max(1e-300)).sqrt()
}

/// Queries as the machine reads them.
fn rounded(dtype: Dtype, x: Vec<f32>) -> Vec<f32> {
    Host::new(dtype, &x).f32()
}

fn params(rng: &mut Rng, heads: usize) -> Params {
    Params {
        scale: (rng.below(3) == 0).then_some(0.21),
        softcap: (rng.below(4) == 0).then_some(5.0),
        sink_logits: (rng.below(4) == 0).then(|| rng.numbers(heads)),
        ..Params::default()
    }
}

/// Compares the rows of one sequence with f64 attention over `k`, `v`.
fn compare<M: Machine>(
    config: &CacheConfig,
    query: &Query<'_>,
    rows: std::ops::Range<usize>,
    kv: [&[f32]; 2],
    answer: &Answer,
    what: &str,
) {
    let (c, heads) = (config, query.heads);
    let wide = |x: &[f32]| x.iter().map(|x| *x as f64).collect::<Vec<f64>>();
    let part = |dim: usize| rows.start * heads * dim..rows.end * heads * dim;
    let (q, [k, v]) = (wide(&query.q[part(c.key_dim)]), kv.map(wide));
    let p = &query.params;
    let sinks = p.sink_logits.as_deref().map(wide);
    let problem = Problem {
        scale: p.scale.map_or(1.0 / (c.key_dim as f64).sqrt(), |s| s as f64),
        softcap: p.softcap.map(|s| s as f64),
        sliding_window: c.layers[0].sliding_window,
        sink_logits: sinks.as_deref(),
        ..Problem::causal(&q, &k, &v, [heads, c.kv_heads], [c.key_dim, c.value_dim])
    };
    let (want, want_lse) = problem.solve();
    let (got, lse) = (&answer.out[part(c.value_dim)], &answer.lse[part(1)]);
    // Each element where arithmetic is f32, their 2-norm everywhere.
    if M::ERROR <= 1e-5 {
        let error = worst(got, &want).unwrap_or(f64::INFINITY);
        assert!(error <= tolerance(query.out, &want), "{what}: error {error:e}, {c:?}");
    }
    let far = distance(got, &want);
    assert!(far <= M::ERROR + step(query.out), "{what}: {far:e} from f64, {c:?}, {p:?}");
    let error = worst(lse, &want_lse).unwrap_or(f64::INFINITY);
    let size = want_lse.iter().filter(|x| x.is_finite()).fold(1f64, |a, b| a.max(b.abs()));
    assert!(error <= 2.0 * M::ERROR * size, "{what}: LSE error {error:e}, {c:?}, {p:?}");
}

/// A pair of formats: a prompt in two chunks, then steps of a few tokens; batch rows of different lengths.
pub(crate) fn run<M: Machine>(
    m: &M,
    key: Format,
    value: Format,
    seed: u64,
    (key_dim, value_dim): (usize, usize),
    direct: bool,
) {
    let mut rng = Rng::new(seed);
    let kv_heads = rng.pick(&[1, 2]);
    let heads = kv_heads * rng.pick(&[1, 2, 3, 4]);
    let per_tensor =
        [key, value].iter().any(|f| matches!(f, Format::Fp8(p) if p.granularity == Granularity::Tensor));
    let scales = |s: f32| vec![s; if per_tensor { 1 } else { kv_heads }];
    let config = CacheConfig::new(1, kv_heads, key_dim)
        .with_dims(key_dim, value_dim)
        .with_key(key)
        .with_value(value)
        .with_residual(if direct { None } else { Some(rng.pick(&[0, 32, 64, 128])) })
        .with_sinks(if direct { 0 } else { rng.pick(&[0, 1, 4, 16]) })
        .with_window_dtype(rng.pick(M::WINDOWS))
        .with_sliding_window(if rng.below(4) == 0 { Some(rng.pick(&[1, 50, 64, 130])) } else { None })
        .with_capacity(2, 512)
        .with_scales(Scales::new(1, scales(0.013), scales(0.009)).unwrap());
    // f32 where there is, more often than the others.
    let dtype = if rng.below(2) == 0 { M::QUERIES[0] } else { rng.pick(M::QUERIES) };
    let out = if M::QUERIES.contains(&Dtype::F32) { dtype } else { rng.pick(&[Dtype::F32, dtype]) };
    let mut cache = m.paged(config.clone(), 20).unwrap();
    let seats = [cache.open().unwrap(), cache.open().unwrap()];
    for step in 0..5 {
        let prefill = step < 2 || !M::attends((key_dim, value_dim));
        let n = [rng.below(if prefill { 110 } else { 9 }) + prefill as usize, 1 + rng.below(3)];
        let starts = [0, n[0] as i32, (n[0] + n[1]) as i32];
        let rows = n[0] + n[1];
        let (mut k, mut v) =
            (rng.numbers(rows * kv_heads * key_dim), rng.numbers(rows * kv_heads * value_dim));
        if prefill {
            (k, v) = (rounded(dtype, k), rounded(dtype, v));
        }
        let before = seats.map(|s| held(m, &cache, 0, s));
        for i in 0..2 {
            cache.reserve(seats[i], n[i]).unwrap();
        }
        cache.begin_step(&Batch::new(&seats, &starts)).unwrap();
        let q = rounded(dtype, rng.numbers(rows * heads * key_dim));
        let query = Query { q: &q, heads, dtype, out, params: params(&mut rng, heads) };
        let answer = if prefill {
            query.prefill(m, &mut cache, 0, &k, &v).unwrap()
        } else {
            machine::append(m, &mut cache, 0, &k, &v).unwrap();
            query.attend(m, &mut cache, 0).unwrap()
        };
        for i in 0..2 {
            let part = starts[i] as usize..starts[i + 1] as usize;
            let [mut hk, mut hv] = if prefill { before[i].clone() } else { held(m, &cache, 0, seats[i]) };
            if prefill {
                hk.extend(&k[part.start * kv_heads * key_dim..part.end * kv_heads * key_dim]);
                hv.extend(&v[part.start * kv_heads * value_dim..part.end * kv_heads * value_dim]);
            }
            let what = format!("seed {seed}, step {step}, sequence {i}");
            compare::<M>(&config, &query, part, [&hk, &hv], &answer, &what);
        }
    }
}

/// Other head dims with `count` random pairs of formats each, in both modes.
pub(crate) fn other_head_dims<M: Machine>(m: &M, count: usize) {
    let dims = [(80, 80), (96, 96), (112, 112), (128, 128), (256, 256), (192, 128), (16, 48)];
    for (i, dims) in dims.into_iter().enumerate() {
        let mut rng = Rng::new(77 + i as u64);
        for direct in [false, true] {
            let (ks, vs) = (formats(dims.0, direct), formats(dims.1, direct));
            for j in 0..count {
                let seed = (1000 * i + 2 * j + direct as usize) as u64;
                run(m, rng.pick(&ks), rng.pick(&vs), seed, dims, direct);
            }
        }
    }
}

pub(crate) fn centred_keys<M: Machine>(m: &M) {
    for seed in 0..12 {
        let bits = Bits::ALL[seed % 5];
        let key = Affine::per_token(bits, 32).with_center();
        let key = if seed % 2 == 0 { key.with_rotation(32) } else { key };
        run(m, key.into(), Affine::per_token(bits, 64).into(), 5000 + seed as u64, (64, 64), false);
    }
}

/// Steps of slots see what the same tokens through seats see: two sequences, by prefill where chunks are long.
pub(crate) fn slots_equal_seats<M: Machine>(m: &M) {
    let config = CacheConfig::new(1, 2, 64)
        .with_key(Fp8::e4m3(Granularity::TokenHead))
        .with_value(Affine::per_token(Bits::B8, 64))
        .direct()
        .with_capacity(2, 256);
    let (mut seated, mut placed) = (m.paged(config.clone(), 8).unwrap(), m.paged(config.clone(), 8).unwrap());
    let seats = [seated.open().unwrap(), seated.open().unwrap()];
    let mut rng = Rng::new(3);
    // Blocks in an order that is no order.
    let blocks: Vec<i32> = (0..8).map(|_| placed.allocate_block().unwrap()).collect();
    let tables: Vec<i32> = (0..8).map(|i| blocks[(5 * i + 2) % 8]).collect();
    let mut lens = [0usize; 2];
    for n in [[100usize, 30], [1, 1], [27, 70], [3, 2], [1, 0], [0, 25]] {
        let rows = n[0] + n[1];
        let (k, v, q) = (rng.numbers(rows * 128), rng.numbers(rows * 128), rng.numbers(rows * 256));
        // In the placed batch a row of padding stands before each sequence and one behind it.
        let pad = |x: &[f32], w: usize| {
            let (a, b) = x.split_at(n[0] * w);
            [vec![9e9; w], a.to_vec(), vec![-9e9; 2 * w], b.to_vec(), vec![7e9; w]].concat()
        };
        let (kp, vp, qp) = (pad(&k, 128), pad(&v, 128), pad(&q, 256));
        let mut slots = vec![];
        for i in 0..2 {
            slots.push(-1);
            let at =
                (lens[i]..lens[i] + n[i]).map(|t| (tables[4 * i + t / 64] as usize * 64 + t % 64) as i64);
            slots.extend(at);
            slots.push(-1);
            lens[i] += n[i];
            seated.reserve(seats[i], n[i]).unwrap();
        }
        seated.begin_step(&Batch::new(&seats, &[0, n[0] as i32, rows as i32])).unwrap();
        let starts = [0, n[0] as i32 + 2, rows as i32 + 4];
        let after = lens.map(|l| l as i32);
        placed.begin_slots(&SlotBatch::new(&starts, &after, &tables, &slots)).unwrap();
        let mut answers = vec![];
        for (cache, k, v, q) in [(&mut seated, &k, &v, &q), (&mut placed, &kp, &vp, &qp)] {
            let query = Query::new::<M>(q, 4);
            answers.push(if rows > 20 {
                query.prefill(m, cache, 0, k, v).unwrap()
            } else {
                machine::append(m, cache, 0, k, v).unwrap();
                query.attend(m, cache, 0).unwrap()
            });
        }
        let (want, got) = (&answers[0], &answers[1]);
        assert!(want.out.chunks(256).all(|row| row.iter().any(|x| *x != 0.0)), "a row of zeros");
        let real: Vec<usize> = (0..rows).map(|r| if r < n[0] { r + 1 } else { r + 3 }).collect();
        for (r, at) in real.iter().enumerate() {
            assert_eq!(got.out[256 * at..][..256], want.out[256 * r..][..256], "{n:?}, row {r}");
            assert_eq!(got.lse[4 * at..][..4], want.lse[4 * r..][..4], "{n:?}, row {r}");
        }
        for r in (0..rows + 4).filter(|r| !real.contains(r)) {
            let (out, lse) = (&got.out[256 * r..][..256], &got.lse[4 * r..][..4]);
            assert!(out.iter().chain(lse).all(|x| x.is_nan()), "row {r} of padding was written");
        }
    }
}

//! Every pair of formats, both modes, random shapes.

use super::reference::{Problem, worst};
use half::{bf16, f16};
use qkv::cache::{Batch, PagePool, PagedKvCache, Seat, SlotBatch};
use qkv::*;
use rayon::prelude::*;

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

struct Case {
    config: CacheConfig,
    group: usize,
    rng: Rng,
    dtype: Dtype,
}

impl Case {
    fn kv(&mut self, rows: usize) -> (Vec<f32>, Vec<f32>) {
        let c = &self.config;
        let (k, v) = (rows * c.kv_heads * c.key_dim, rows * c.kv_heads * c.value_dim);
        (self.rng.numbers(k), self.rng.numbers(v))
    }
}

/// Runs `attend` or `prefill` with q and the output in `dtype`; returns what it was given and gave, as f32.
pub(crate) fn in_dtype(
    dtype: Dtype,
    q: &mut [f32],
    dims: [usize; 3],
    out_dims: [usize; 3],
    run: impl FnOnce(&TensorRef<'_>, &mut TensorMut<'_>),
) -> Vec<f32> {
    let n = out_dims.iter().product::<usize>();
    match dtype {
        Dtype::F32 => {
            let mut out = vec![f32::NAN; n];
            run(&TensorRef::thd(&*q, dims).unwrap(), &mut TensorMut::thd(&mut out, out_dims).unwrap());
            out
        }
        Dtype::F16 => {
            let half: Vec<f16> = q.iter().map(|x| f16::from_f32(*x)).collect();
            q.iter_mut().zip(&half).for_each(|(a, b)| *a = b.to_f32());
            let mut out = vec![f16::NAN; n];
            run(&TensorRef::thd(&half, dims).unwrap(), &mut TensorMut::thd(&mut out, out_dims).unwrap());
            out.iter().map(|x| x.to_f32()).collect()
        }
        Dtype::Bf16 => {
            let half: Vec<bf16> = q.iter().map(|x| bf16::from_f32(*x)).collect();
            q.iter_mut().zip(&half).for_each(|(a, b)| *a = b.to_f32());
            let mut out = vec![bf16::NAN; n];
            run(&TensorRef::thd(&half, dims).unwrap(), &mut TensorMut::thd(&mut out, out_dims).unwrap());
            out.iter().map(|x| x.to_f32()).collect()
        }
    }
}

/// What the cache holds of a sequence.
pub(crate) fn held(cache: &PagedKvCache, seat: Seat) -> (Vec<f32>, Vec<f32>) {
    let (c, n) = (cache.config(), cache.len(seat).unwrap());
    let (mut k, mut v) = (vec![0f32; n * c.kv_heads * c.key_dim], vec![0f32; n * c.kv_heads * c.value_dim]);
    let mut kt = TensorMut::thd(&mut k, [n, c.kv_heads, c.key_dim]).unwrap();
    let mut vt = TensorMut::thd(&mut v, [n, c.kv_heads, c.value_dim]).unwrap();
    cache.dequantize(0, seat, &mut kt, &mut vt).unwrap();
    (k, v)
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

struct Query {
    q: Vec<f32>,
    scale: Option<f32>,
    softcap: Option<f32>,
    sinks: Option<Vec<f32>>,
}

impl Query {
    fn random(rng: &mut Rng, rows: usize, heads: usize, dim: usize) -> Self {
        Self {
            q: rng.numbers(rows * heads * dim),
            scale: (rng.below(3) == 0).then_some(0.21),
            softcap: (rng.below(4) == 0).then_some(5.0),
            sinks: (rng.below(4) == 0).then(|| rng.numbers(heads)),
        }
    }
    fn params(&self) -> AttendParams<'_> {
        let mut p = AttendParams::new();
        (p.scale, p.softcap, p.sink_logits) = (self.scale, self.softcap, self.sinks.as_deref());
        p
    }
}

/// Compares the rows of one sequence with f64 attention over `k`, `v`.
fn compare(
    case: &Case,
    query: &Query,
    rows: std::ops::Range<usize>,
    kv: (&[f32], &[f32]),
    out: &[f32],
    lse: &[f32],
    what: &str,
) {
    let c = &case.config;
    let heads = c.kv_heads * case.group;
    let wide = |x: &[f32]| x.iter().map(|x| *x as f64).collect::<Vec<f64>>();
    let (q, k, v) = (
        wide(&query.q[rows.start * heads * c.key_dim..rows.end * heads * c.key_dim]),
        wide(kv.0),
        wide(kv.1),
    );
    let sinks = query.sinks.as_deref().map(wide);
    let problem = Problem {
        q: &q,
        k: &k,
        v: &v,
        query_heads: heads,
        kv_heads: c.kv_heads,
        key_dim: c.key_dim,
        value_dim: c.value_dim,
        scale: query.scale.map_or(1.0 / (c.key_dim as f64).sqrt(), |s| s as f64),
        softcap: query.softcap.map(|s| s as f64),
        sliding_window: c.layers[0].sliding_window,
        sink_logits: sinks.as_deref(),
        bidirectional: &[],
        causal: true,
    };
    let (want, want_lse) = problem.solve();
    let got = &out[rows.start * heads * c.value_dim..rows.end * heads * c.value_dim];
    let error = worst(got, &want).unwrap_or(f64::INFINITY);
    assert!(error <= tolerance(case.dtype, &want), "{what}: error {error:e}, {c:?}");
    let error = worst(&lse[rows.start * heads..rows.end * heads], &want_lse).unwrap_or(f64::INFINITY);
    let size = want_lse.iter().filter(|x| x.is_finite()).fold(1f64, |a, b| a.max(b.abs()));
    assert!(error <= 2e-5 * size, "{what}: LSE error {error:e}, {c:?}");
}

fn run(key: Format, value: Format, seed: u64, key_dim: usize, value_dim: usize, direct: bool) {
    let mut rng = Rng::new(seed);
    let kv_heads = rng.pick(&[1, 2]);
    let group = rng.pick(&[1, 2, 3, 4]);
    let config = CacheConfig::new(1, kv_heads, key_dim)
        .with_dims(key_dim, value_dim)
        .with_key(key)
        .with_value(value)
        .with_residual(if direct { None } else { Some(rng.pick(&[0, 32, 64, 128])) })
        .with_sinks(if direct { 0 } else { rng.pick(&[0, 1, 4, 16]) })
        .with_window_dtype(rng.pick(&[Dtype::F16, Dtype::Bf16, Dtype::F32]))
        .with_sliding_window(if rng.below(4) == 0 { Some(rng.pick(&[1, 50, 64, 130])) } else { None })
        .with_capacity(2, 512)
        .with_scales(Scales::new(1, vec![0.013; kv_heads], vec![0.009; kv_heads]).unwrap());
    let per_tensor =
        [key, value].iter().any(|f| matches!(f, Format::Fp8(p) if p.granularity == Granularity::Tensor));
    let config = if per_tensor {
        config.with_scales(Scales::new(1, vec![0.013], vec![0.009]).unwrap())
    } else {
        config
    };
    let dtype = rng.pick(&[Dtype::F32, Dtype::F32, Dtype::F16, Dtype::Bf16]);
    let pool = PagePool::new(&config, 20).unwrap();
    let mut cache: PagedKvCache = PagedKvCache::new(config.clone(), pool).unwrap();
    let mut case = Case { config, group, rng, dtype };
    let seats = [cache.open().unwrap(), cache.open().unwrap()];
    let heads = kv_heads * group;
    // A prompt through prefill (in two chunks), then steps of a few tokens; batch rows of different lengths.
    for step in 0..5 {
        let prefill = step < 2;
        let n = [case.rng.below(if prefill { 110 } else { 9 }) + prefill as usize, 1 + case.rng.below(3)];
        let starts = [0, n[0] as i32, (n[0] + n[1]) as i32];
        let rows = n[0] + n[1];
        let (k, v) = case.kv(rows);
        let before: Vec<(Vec<f32>, Vec<f32>)> = seats.iter().map(|s| held(&cache, *s)).collect();
        for i in 0..2 {
            cache.reserve(seats[i], n[i]).unwrap();
        }
        cache.begin_step(&Batch::new(&seats, &starts)).unwrap();
        let kt = TensorRef::thd(&k, [rows, kv_heads, key_dim]).unwrap();
        let vt = TensorRef::thd(&v, [rows, kv_heads, value_dim]).unwrap();
        let mut query = Query::random(&mut case.rng, rows, heads, key_dim);
        let mut q = query.q.clone();
        let mut lse = vec![f32::NAN; rows * heads];
        let (dims, out_dims) = ([rows, heads, key_dim], [rows, heads, value_dim]);
        let out = in_dtype(dtype, &mut q, dims, out_dims, |qt, out| {
            if prefill {
                cache.prefill(0, qt, &kt, &vt, &query.params(), out, Some(&mut lse)).unwrap();
            } else {
                cache.append(0, &kt, &vt).unwrap();
                cache.attend(0, qt, &query.params(), out, Some(&mut lse)).unwrap();
            }
        });
        query.q = q;
        for i in 0..2 {
            let part = starts[i] as usize..starts[i + 1] as usize;
            let (hk, hv) = if prefill {
                let (mut hk, mut hv) = before[i].clone();
                hk.extend(&k[part.start * kv_heads * key_dim..part.end * kv_heads * key_dim]);
                hv.extend(&v[part.start * kv_heads * value_dim..part.end * kv_heads * value_dim]);
                (hk, hv)
            } else {
                held(&cache, seats[i])
            };
            let what = format!("seed {seed}, step {step}, sequence {i}");
            compare(&case, &query, part, (&hk, &hv), &out, &lse, &what);
        }
    }
}

#[test]
fn every_pair_of_formats() {
    for direct in [false, true] {
        let all = formats(64, direct);
        (0..all.len() * all.len()).into_par_iter().for_each(|i| {
            let (key, value) = (all[i / all.len()], all[i % all.len()]);
            run(key, value, direct as u64 * 100_000 + i as u64, 64, 64, direct);
        });
    }
}

#[test]
fn other_head_dims() {
    for (i, (kd, vd)) in
        [(80, 80), (96, 96), (112, 112), (128, 128), (256, 256), (192, 128), (16, 48)].into_iter().enumerate()
    {
        let mut rng = Rng::new(77 + i as u64);
        for direct in [false, true] {
            let (ks, vs) = (formats(kd, direct), formats(vd, direct));
            for j in 0..12 {
                run(
                    rng.pick(&ks),
                    rng.pick(&vs),
                    (1000 * i + 2 * j + direct as usize) as u64,
                    kd,
                    vd,
                    direct,
                );
            }
        }
    }
}

#[test]
fn centred_keys() {
    for seed in 0..12 {
        let bits = Bits::ALL[seed % 5];
        let key = Affine::per_token(bits, 32).with_center();
        let key = if seed % 2 == 0 { key.with_rotation(32) } else { key };
        run(key.into(), Affine::per_token(bits, 64).into(), 5000 + seed as u64, 64, 64, false);
    }
}

/// Steps of slots see what the same tokens through seats see.
#[test]
fn slots_equal_seats() {
    let config = CacheConfig::new(1, 2, 64)
        .with_key(Fp8::e4m3(Granularity::TokenHead))
        .with_value(Affine::per_token(Bits::B8, 64))
        .direct()
        .with_capacity(2, 256);
    let new = || PagedKvCache::<Cpu>::new(config.clone(), PagePool::new(&config, 8).unwrap()).unwrap();
    let (mut seated, mut placed) = (new(), new());
    let seat = seated.open().unwrap();
    let mut rng = Rng::new(3);
    let table = [5, 2, 7, 0];
    let mut len = 0usize;
    for n in [100usize, 1, 27, 3, 1] {
        let (k, v, q) = (rng.numbers(n * 128), rng.numbers(n * 128), rng.numbers(n * 4 * 64));
        // The placed batch carries a row of padding in front and one behind.
        let pad = |x: &[f32], w: usize| [vec![9e9; w], x.to_vec(), vec![-9e9; w]].concat();
        let (kp, vp, qp) = (pad(&k, 128), pad(&v, 128), pad(&q, 256));
        let slots: Vec<i64> = (0..n + 2)
            .map(|r| {
                if r == 0 || r == n + 1 {
                    -1
                } else {
                    let t = len + r - 1;
                    table[t / 64] as i64 * 64 + (t % 64) as i64
                }
            })
            .collect();
        seated.reserve(seat, n).unwrap();
        seated.begin_step(&Batch::new(&[seat], &[0, n as i32])).unwrap();
        let lens = [(len + n) as i32];
        placed.begin_slots(&SlotBatch::new(&[0, n as i32 + 2], &lens, &table, &slots)).unwrap();
        len += n;
        let mut outs = vec![];
        for (cache, k, v, q, rows) in [(&mut seated, &k, &v, &q, n), (&mut placed, &kp, &vp, &qp, n + 2)] {
            let kt = TensorRef::thd(k, [rows, 2, 64]).unwrap();
            let vt = TensorRef::thd(v, [rows, 2, 64]).unwrap();
            cache.append(0, &kt, &vt).unwrap();
            let (mut out, mut lse) = (vec![f32::NAN; rows * 256], vec![f32::NAN; rows * 4]);
            let mut view = TensorMut::thd(&mut out, [rows, 4, 64]).unwrap();
            let qt = TensorRef::thd(q, [rows, 4, 64]).unwrap();
            cache.attend(0, &qt, &AttendParams::new(), &mut view, Some(&mut lse)).unwrap();
            outs.push((out, lse));
        }
        let (out, lse) = (&outs[1].0, &outs[1].1);
        assert_eq!(&out[256..256 * (n + 1)], &outs[0].0[..]);
        assert_eq!(&lse[4..4 * (n + 1)], &outs[0].1[..]);
        let padding = out[..256].iter().chain(&out[256 * (n + 1)..]);
        assert!(padding.into_iter().all(|x| *x == 0.0), "padded rows are 0");
        assert!(lse[..4].iter().chain(&lse[4 * (n + 1)..]).all(|x| *x == f32::NEG_INFINITY));
    }
}

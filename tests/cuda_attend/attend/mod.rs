//! Attention over a cache on the device: against f64 over the decoded values, and against the CPU's cache.

mod edges;
mod fixed_split;
mod integer;
mod integer_model;
mod plan;
mod refused;
mod rounding;
mod schedule;

use crate::caches::any_format;
use crate::gpu::{self, Gpu, Host, Random, layout};
use crate::layer::Twins;
use cudarc::driver::CudaSlice;
use qkv::cuda::launch::{DeviceAttendParams, attend, attend_workspace, attend_workspace_fixed};
use qkv::{AttendParams, CacheConfig, Dtype, Format, Granularity, Scales, Seat, TensorMut};
use std::collections::BTreeMap;
use std::fmt::Write;

/// What one comparison is about.
struct Case {
    config: CacheConfig,
    group: usize,
    softcap: Option<f32>,
    scale: Option<f32>,
    sink_logits: bool,
    /// Pages of a split, where splits are fixed.
    split: Option<usize>,
    /// Queries are multiplied with this: how peaked the attention is.
    sharpness: f32,
    /// Sizes of keys and values.
    magnitude: [f32; 2],
    /// Values are of one size.
    signs: bool,
    /// What the first channel of values is.
    outlier: Option<f32>,
    /// How far channel 5 of the keys is below 0 on some pages, which queries hardly attend to.
    huge: Option<f32>,
    /// Channel of the values that is no number, in a row of each step before or in all.
    hole: Option<(Option<usize>, usize)>,
    /// Tokens of each sequence before the step, and new ones.
    before: Vec<usize>,
    new: Vec<usize>,
    pad: bool,
    /// Whether some queries are no numbers.
    broken: bool,
}

impl Case {
    fn new(config: CacheConfig, group: usize, before: &[usize], new: &[usize]) -> Self {
        Self {
            config,
            group,
            softcap: None,
            scale: None,
            sink_logits: false,
            split: None,
            sharpness: 1.0,
            magnitude: [1.0; 2],
            signs: false,
            outlier: None,
            huge: None,
            hole: None,
            before: before.to_vec(),
            new: new.to_vec(),
            pad: false,
            broken: false,
        }
    }
}

/// Relative distance of two results in the 2-norm.
fn distance(x: &[f64], y: &[f64]) -> f64 {
    let norm = |it: &mut dyn Iterator<Item = f64>| it.map(|d| d * d).sum::<f64>().sqrt();
    let d = norm(&mut x.iter().zip(y).map(|(a, b)| a - b));
    d / norm(&mut y.iter().copied()).max(1e-300)
}

fn half(x: f64) -> f64 {
    half::f16::from_f64(x).to_f64()
}

/// One row of attention in f64 over given keys and values `[tokens][dim]`, and its LSE. `rounded`: keys, values and weights are
/// rounded to f16 first, as a kernel does that decodes each element.
#[allow(clippy::too_many_arguments)]
fn row(
    q: &[f64],
    k: &[f32],
    v: &[f32],
    (dk, dv): (usize, usize),
    stride: usize,
    tokens: std::ops::Range<usize>,
    case: &Case,
    sink: Option<f32>,
    rounded: bool,
) -> (Vec<f64>, f64) {
    let round = |x: f32| if rounded { half(x.into()) } else { f64::from(x) };
    let scale = case.scale.map_or(1.0 / (dk as f64).sqrt(), f64::from);
    let logits: Vec<f64> = tokens
        .clone()
        .map(|t| {
            let k = &k[t * stride * dk..][..dk];
            let s = scale * q.iter().zip(k).map(|(a, b)| a * round(*b)).sum::<f64>();
            case.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh())
        })
        .collect();
    let most = logits.iter().copied().chain(sink.map(f64::from)).fold(f64::NEG_INFINITY, f64::max);
    if most == f64::NEG_INFINITY {
        return (vec![0.0; dv], f64::NEG_INFINITY);
    }
    let mut sum = sink.map_or(0.0, |s| (f64::from(s) - most).exp());
    let mut out = vec![0.0; dv];
    for (t, s) in tokens.zip(logits) {
        let p = (s - most).exp();
        sum += p;
        let p = if rounded { half(p) } else { p };
        for (o, x) in out.iter_mut().zip(&v[t * stride * dv..][..dv]) {
            *o += p * round(*x);
        }
    }
    out.iter_mut().for_each(|o| *o /= sum);
    (out, most + sum.ln())
}

/// Errors of one step.
struct Errors {
    /// Against f64, of the device and of f16 arithmetic; of the LSE, too.
    device: f64,
    half: f64,
    lse: f64,
    half_lse: f64,
    /// Against the CPU's cache.
    cpu: f64,
}

/// A step of attention: what it was made of, and what came out on both sides.
struct Ran {
    twins: Twins,
    seats: Vec<Seat>,
    query_heads: usize,
    sink_logits: Vec<f32>,
    q: (Host, qkv::Shape),
    out: (Host, qkv::Shape),
    lse: Vec<f32>,
    cpu_out: Vec<f32>,
    cpu_lse: Vec<f32>,
}

/// Channels of a row.
fn channels((host, shape): &(Host, qkv::Shape), t: usize, head: usize) -> Vec<f32> {
    let at = (0..shape.dims[2]).map(|d| gpu::row(shape, t, head) + d * shape.strides[3]);
    match host {
        Host::F16(x) => at.map(|i| x[i].to_f32()).collect(),
        Host::Bf16(x) => at.map(|i| x[i].to_f32()).collect(),
        Host::F32(x) => at.map(|i| x[i]).collect(),
    }
}

fn run(gpu: &Gpu, case: &Case, random: &mut Random) -> Ran {
    let c = &case.config;
    let query_heads = c.kv_heads * case.group;
    let mut twins = Twins::new(gpu, c.clone(), 1 + c.max_sequences * c.blocks_per_sequence());
    twins.wild = false;
    twins.magnitude = case.magnitude;
    (twins.signs, twins.outlier, twins.huge, twins.hole) = (case.signs, case.outlier, case.huge, case.hole);
    let seats: Vec<Seat> = case.before.iter().map(|_| twins.cpu.open().unwrap()).collect();
    // In pieces, so that a step is not longer than tensors like it.
    let most = case.before.iter().copied().max().unwrap_or(0);
    for at in (0..most).step_by(512) {
        let counts: Vec<usize> = case.before.iter().map(|n| n.saturating_sub(at).min(512)).collect();
        twins.step(gpu, random, &seats, &counts, false);
    }
    (twins.hole, twins.huge) = (None, None);
    let query_dtype = random.pick(&[Dtype::F16, Dtype::Bf16]);
    let sinks: Vec<f32> = (0..query_heads).map(|_| random.normal()).collect();
    let mut inner = Random::new(random.bits());
    let mut state = None;
    twins.step_with(gpu, random, &seats, &case.new, case.pad, |a| {
        let (shape, n) = layout(&mut inner, [a.rows, query_heads, c.key_dim]);
        let mut values: Vec<f32> = inner.normals(n).iter().map(|x| x * case.sharpness).collect();
        if case.huge.is_some() {
            for row in 0..a.rows * query_heads {
                let at = gpu::row(&shape, row / query_heads, row % query_heads) + 5 * shape.strides[3];
                values[at] = 1.0 + values[at].abs();
            }
        }
        if case.broken {
            for row in (0..a.rows * query_heads).step_by(3) {
                let at = gpu::row(&shape, row / query_heads, row % query_heads);
                values[at + inner.below(c.key_dim) * shape.strides[3]] =
                    inner.pick(&[f32::NAN, f32::INFINITY]);
            }
        }
        let q = Host::new(query_dtype, &values);
        let (out_shape, out_n) = layout(&mut inner, [a.rows, query_heads, c.value_dim]);
        // What is there already must stay where no row is.
        let mut out = Host::new(Dtype::F32, &vec![7f32; out_n]).up(gpu);
        let mut lse: CudaSlice<f32> = gpu.up(&vec![7f32; a.rows * query_heads]);
        let most = case.new.iter().copied().max().unwrap();
        // What a workspace holds does not matter.
        let elements = case.split.map_or_else(
            || attend_workspace(&gpu.device, c),
            |pages| attend_workspace_fixed(c, pages, query_heads, case.new.len(), most),
        );
        let mut workspace = gpu.up(&vec![f32::NAN; elements.unwrap().max(1)]);
        let memory = q.up(gpu);
        let device_sinks = gpu.up(&sinks);
        let mut params = DeviceAttendParams::new();
        params.scale = case.scale;
        params.softcap = case.softcap;
        params.fixed_split = case.split;
        if case.sink_logits {
            params = params.with_sink_logits((&device_sinks).into());
        }
        attend(
            &gpu.device,
            gpu.raw(),
            c,
            0,
            &memory.view(shape),
            &params,
            most,
            a.batch,
            a.layer,
            a.step,
            &mut out.view_mut(out_shape),
            Some((&mut lse).into()),
            (&mut workspace).into(),
        )
        .unwrap();
        let got = out.down(gpu);
        let got_lse = gpu.down(&lse);

        let mut host_params = AttendParams::new();
        host_params.scale = case.scale;
        host_params.softcap = case.softcap;
        if case.sink_logits {
            host_params = host_params.with_sink_logits(&sinks);
        }
        let mut cpu_out = vec![0f32; a.rows * query_heads * c.value_dim];
        let mut cpu_lse = vec![0f32; a.rows * query_heads];
        let view = qkv::TensorRef::new(q.data(), shape).unwrap();
        let mut o = TensorMut::thd(&mut cpu_out, [a.rows, query_heads, c.value_dim]).unwrap();
        a.cpu.attend(0, &view, &host_params, &mut o, Some(&mut cpu_lse)).unwrap();
        state = Some(((q, shape), (got, out_shape), got_lse, cpu_out, cpu_lse));
    });
    let (q, out, lse, cpu_out, cpu_lse) = state.unwrap();
    let ran = Ran { twins, seats, query_heads, sink_logits: sinks, q, out, lse, cpu_out, cpu_lse };
    let starts = &ran.twins.last_rows;
    let real = |t: usize| starts.iter().zip(&case.new).any(|(s, n)| (*s..s + n).contains(&t));
    for row in (0..ran.lse.len()).filter(|row| !real(row / query_heads)) {
        let out = channels(&ran.out, row / query_heads, row % query_heads);
        let left = ran.lse[row] == 7.0 && out.iter().all(|x| *x == 7.0);
        assert!(left, "row {row} belongs to no sequence: {}", describe(case));
    }
    ran
}

/// Errors of a step. Rows whose queries are no numbers must be none, and do not count.
fn errors(case: &Case, ran: &Ran) -> Errors {
    let c = &case.config;
    let (mut exact, mut rounded, mut device, mut cpu) = (vec![], vec![], vec![], vec![]);
    let (mut lse_error, mut half_lse) = (0f64, 0f64);
    for (i, seat) in ran.seats.iter().enumerate() {
        let len = ran.twins.cpu.len(*seat).unwrap();
        if len == 0 {
            continue;
        }
        let mut k = vec![0f32; len * c.kv_heads * c.key_dim];
        let mut v = vec![0f32; len * c.kv_heads * c.value_dim];
        let mut tk = TensorMut::thd(&mut k, [len, c.kv_heads, c.key_dim]).unwrap();
        let mut tv = TensorMut::thd(&mut v, [len, c.kv_heads, c.value_dim]).unwrap();
        ran.twins.cpu.dequantize(0, *seat, &mut tk, &mut tv).unwrap();
        for n in 0..case.new[i] {
            let at = ran.twins.last_rows[i] + n;
            let end = len - case.new[i] + n + 1;
            let begin = c.layers[0].sliding_window.map_or(0, |w| end.saturating_sub(w));
            for (head, sink) in ran.sink_logits.iter().enumerate() {
                let kv = head / case.group;
                let (q, got) = (channels(&ran.q, at, head), channels(&ran.out, at, head));
                let index = at * ran.query_heads + head;
                if q.iter().any(|x| !x.is_finite()) {
                    let nan = got.iter().all(|x| x.is_nan()) && ran.lse[index].is_nan();
                    assert!(nan, "row {at} head {head}: {got:?} of {}", describe(case));
                    continue;
                }
                let q: Vec<f64> = q.into_iter().map(f64::from).collect();
                let sink = case.sink_logits.then_some(*sink);
                let dims = (c.key_dim, c.value_dim);
                let (k, v) = (&k[kv * c.key_dim..], &v[kv * c.value_dim..]);
                let (o, lse) = row(&q, k, v, dims, c.kv_heads, begin..end, case, sink, false);
                let (r, rounded_lse) = row(&q, k, v, dims, c.kv_heads, begin..end, case, sink, true);
                exact.extend(o);
                rounded.extend(r);
                device.extend(got.into_iter().map(f64::from));
                cpu.extend(ran.cpu_out[index * c.value_dim..][..c.value_dim].iter().map(|x| f64::from(*x)));
                lse_error = lse_error.max((f64::from(ran.lse[index]) - lse).abs());
                half_lse = half_lse.max((rounded_lse - lse).abs());
                assert!(
                    (f64::from(ran.cpu_lse[index]) - lse).abs() < 1e-3,
                    "the CPU's LSE {} {lse} {}",
                    ran.cpu_lse[index],
                    describe(case)
                );
            }
        }
    }
    Errors {
        device: distance(&device, &exact),
        half: distance(&rounded, &exact),
        lse: lse_error,
        half_lse,
        cpu: distance(&device, &cpu),
    }
}

fn describe(case: &Case) -> String {
    let (c, l) = (&case.config, case.config.layers[0]);
    let mut s = String::new();
    write!(
        s,
        "{:?} {:?} dims {} {} heads {}x{} R {:?} sinks {} window {:?} {:?} cap {:?} scale {:?} {:?}+{:?}",
        l.key,
        l.value,
        c.key_dim,
        c.value_dim,
        c.kv_heads,
        case.group,
        c.residual,
        c.sinks,
        l.sliding_window,
        c.window_dtype,
        case.softcap,
        case.scale,
        case.before,
        case.new
    )
    .unwrap();
    s
}

/// Everything that was not as it should be, and the errors of each format so far.
#[derive(Default)]
struct Findings {
    texts: Vec<String>,
    /// Squared errors of the device and of f16 arithmetic, and the number of cases.
    sums: BTreeMap<String, (f64, f64, usize)>,
}

impl Findings {
    /// The device is near the CPU; and over all cases, and over the cases of a format where there are some, at most twice as far from
    /// f64 as f16 arithmetic on decoded elements. One case of a few rows may be a little further.
    fn check(&mut self, gpu: &Gpu, case: &Case, random: &mut Random) -> Errors {
        let e = errors(case, &run(gpu, case, random));
        // Where logits are large, so are their errors.
        let lse = e.lse <= f64::max(2e-3, 3.0 * e.half_lse);
        let good = e.device <= 3.0 * e.half + 1e-6 && e.cpu <= 1e-3 && lse;
        if !good {
            self.texts.push(format!(
                "{}: {:.2e} from f64 (f16 {:.2e}), {:.2e} from the CPU, LSE {:.2e} (f16 {:.2e})",
                describe(case),
                e.device,
                e.half,
                e.cpu,
                e.lse,
                e.half_lse
            ));
        }
        let l = case.config.layers[0];
        let columns = case.group * if case.split.is_some() { 1 } else { *case.new.iter().max().unwrap() };
        let path = if columns <= 4 { "up to 4 columns" } else { "more" };
        let mut add = |key: String, unit: f64| {
            let sum = self.sums.entry(key).or_default();
            sum.0 += (e.device / unit).powi(2);
            sum.1 += (e.half / unit).powi(2);
            sum.2 += 1;
        };
        add(format!("{:?} {:?} {path}", l.key, l.value), 1.0);
        // Cases of all formats weigh alike.
        add(format!("all of {path}"), e.half.max(1e-6));
        e
    }
}

impl Drop for Findings {
    fn drop(&mut self) {
        for (format, (device, half, cases)) in &self.sums {
            let (device, half) = (device.sqrt(), half.sqrt());
            if *cases >= 3 && device > 2.0 * half + 1e-6 {
                self.texts.push(format!("{format}: {device:.2e} from f64, f16 {half:.2e}"));
            }
        }
        if !std::thread::panicking() {
            assert!(self.texts.is_empty(), "{}", self.texts.join("\n"));
        }
    }
}

fn config(key: Format, value: Format, heads: usize, d: usize) -> CacheConfig {
    let scales = |s: f32| vec![s; heads];
    CacheConfig::new(1, heads, d)
        .with_key(key)
        .with_value(value)
        .with_scales(Scales::new(1, scales(0.02), scales(0.03)).unwrap_or_else(|_| unreachable!()))
        .with_capacity(3, 1024)
}

/// One format of each kind.
fn kinds(d: usize) -> Vec<Format> {
    use qkv::{Affine, Bits, Fp8};
    let mut all: Vec<Format> = vec![
        Format::F16,
        Format::Bf16,
        Fp8::e4m3(Granularity::Head).into(),
        Fp8::e4m3(Granularity::TokenHead).into(),
        Fp8::e5m2(Granularity::TokenHead).into(),
    ];
    for bits in Bits::ALL {
        all.push(Affine::per_token(bits, 32).into());
        all.push(Affine::per_token(bits, d).into());
        all.push(Affine::per_channel(bits, 32).into());
        all.push(Affine::per_channel(bits, 64).into());
    }
    all
}

#[test]
fn every_kind_of_keys_and_values() {
    let (gpu, mut findings) = (Gpu::new(), Findings::default());
    for (i, f) in kinds(64).into_iter().enumerate() {
        let mut random = Random::new(i as u64);
        let other = random.pick(&kinds(64));
        for (key, value) in [(f, other), (other, f)] {
            let case = Case::new(config(key, value, 1, 64), 4, &[150], &[1]);
            findings.check(&gpu, &case, &mut random);
        }
    }
}

/// Up to 16 columns have one pass over the pages, more a pass for each 16.
#[test]
fn many_columns() {
    let (gpu, mut findings) = (Gpu::new(), Findings::default());
    for (i, d) in [64, 80, 96, 112, 128].into_iter().enumerate() {
        for (j, group) in [9, 16, 20].into_iter().enumerate() {
            let mut random = Random::new(900 + (3 * i + j) as u64);
            let (key, value) = (random.pick(&kinds(d)), random.pick(&kinds(d)));
            let c = config(key, value, 1, d);
            if c.validate().is_ok() {
                findings.check(&gpu, &Case::new(c, group, &[150, 30], &[1, 1]), &mut random);
            }
        }
        // A group of queries and heads, which end in different columns.
        let mut random = Random::new(950 + i as u64);
        let f = random.pick(&kinds(d));
        findings.check(&gpu, &Case::new(config(f, f, 1, d), 3, &[150, 30], &[5, 2]), &mut random);
    }
}

/// Formats that have kernels of their own.
fn own(d: usize) -> Vec<(Format, Format)> {
    use qkv::{Affine, Bits, Fp8};
    let token = |bits, group| Format::from(Affine::per_token(bits, group));
    let mut all: Vec<(Format, Format)> = vec![
        (Format::F16, Format::F16),
        (Fp8::e4m3(Granularity::Head).into(), Fp8::e4m3(Granularity::Head).into()),
        (Fp8::e4m3(Granularity::TokenHead).into(), Fp8::e4m3(Granularity::TokenHead).into()),
        (token(Bits::B8, d), token(Bits::B8, d)),
        CacheConfig::default_formats(Bits::B4, d),
        (Affine::per_channel(Bits::B4, 64).into(), token(Bits::B4, 64)),
        CacheConfig::default_formats(Bits::B2, d),
        (Affine::per_channel(Bits::B2, 32).into(), token(Bits::B2, 32)),
    ];
    if d == 128 {
        all.push((token(Bits::B8, 32), token(Bits::B8, 32)));
        all.extend([Bits::B4, Bits::B2, Bits::B1].map(|b| (token(b, d), token(b, d))));
    }
    all
}

#[test]
fn formats_with_kernels_of_their_own() {
    let (gpu, mut findings) = (Gpu::new(), Findings::default());
    for d in [64, 128] {
        for (i, (key, value)) in own(d).into_iter().enumerate() {
            // The integer path, then the f16 path with up to 8 and with up to 16 columns.
            for group in [4, 7, 13] {
                let mut random = Random::new((20 * i + group) as u64);
                let case = Case::new(config(key, value, 2, d), group, &[300, 0, 90], &[1, 1, 1]);
                findings.check(&gpu, &case, &mut random);
            }
        }
    }
}

#[test]
fn lengths_around_every_boundary() {
    let (gpu, mut findings) = (Gpu::new(), Findings::default());
    let lengths = [0, 1, 2, 3, 4, 15, 16, 31, 63, 64, 65, 79, 127, 128, 129, 191, 192, 255, 256, 320];
    for (i, (key, value)) in own(64).into_iter().enumerate() {
        for direct in [false, true] {
            for group in if (i + usize::from(direct)) % 2 == 0 { [1] } else { [8] } {
                let mut c = config(key, value, 1, 64);
                if direct {
                    c = c.direct();
                    if c.validate().is_err() {
                        continue;
                    }
                }
                let mut random = Random::new(i as u64);
                for three in lengths.chunks(3) {
                    let case = Case::new(c.clone(), group, three, &vec![1; three.len()]);
                    findings.check(&gpu, &case, &mut random);
                }
            }
        }
    }
}

/// A sequence without new tokens among others: its rows are none, theirs are not moved.
#[test]
fn sequences_without_new_tokens() {
    let (gpu, mut findings) = (Gpu::new(), Findings::default());
    for (i, (key, value)) in own(64).into_iter().enumerate() {
        for new in [[0, 1, 2], [1, 0, 0], [3, 0, 1]] {
            let mut random = Random::new(70 + i as u64);
            let mut case =
                Case::new(config(key, value, 1, 64), random.pick(&[1, 2, 8]), &[200, 70, 140], &new);
            case.pad = i % 2 == 0;
            findings.check(&gpu, &case, &mut random);
        }
    }
}

#[test]
fn random_cases() {
    let (gpu, mut findings) = (Gpu::new(), Findings::default());
    for seed in 0..40 {
        let mut random = Random::new(500 + seed);
        let d = random.pick(&[64, 128]);
        let residual = random.pick(&[None, Some(0), Some(32), Some(64), Some(128)]);
        let heads = 1 + random.below(2);
        let (key, value) = if random.below(3) == 0 {
            random.pick(&own(d))
        } else {
            let direct = residual.is_none();
            (any_format(&mut random, d, direct, true), any_format(&mut random, d, direct, false))
        };
        let mut c = config(key, value, heads, d).with_window_dtype(random.pick(&[Dtype::F16, Dtype::Bf16]));
        c = match residual {
            None => c.direct(),
            r => c.with_residual(r).with_sinks(random.pick(&[0, 4, 16])),
        };
        if c.validate().is_err() {
            continue;
        }
        if random.below(3) == 0 {
            c = c.with_sliding_window(Some(random.pick(&[1, 20, 64, 100, 300])));
        }
        let group = random.pick(&[1, 2, 3, 4, 5, 8, 16]);
        let n = random.pick(&[1, 1, 1, 2, 3, 8]);
        let before: Vec<usize> = (0..3).map(|_| random.pick(&[0, 3, 40, 64, 130, 200, 333])).collect();
        let new: Vec<usize> = (0..3).map(|i| if i == 0 { n } else { 1 + random.below(n) }).collect();
        let mut case = Case::new(c, group, &before, &new);
        case.pad = random.below(2) == 0;
        case.softcap = random.pick(&[None, None, Some(30.0), Some(2.0)]);
        case.scale = random.pick(&[None, None, Some(0.3), Some(-0.2), Some(0.0)]);
        case.sink_logits = random.below(3) == 0;
        case.split = random.pick(&[None, None, Some(1), Some(3), Some(64), Some(usize::MAX)]);
        case.sharpness = random.pick(&[1.0, 1.0, 0.05, 4.0]);
        case.magnitude = random.pick(&[[1.0, 1.0], [1.0, 1.0], [1e-3, 1e4], [1e3, 1e-6], [1.0, 300.0]]);
        if case.magnitude[0] > 100.0 {
            case.sharpness *= 1e-3;
        }
        findings.check(&gpu, &case, &mut random);
    }
}

//! Class f through a cache: attention cases over pages, windows and new tokens, on any backend.
//!
//! A cache of f16 holds a case's tensors as they are, so what it gives is held against the reference data. Then every case
//! runs with K and V repeated to 640 tokens in quantized formats, against f64 attention over what the cache decodes.

use crate::golden::{Case, Golden, Tensor};
use crate::machine::{Answer, Machine, Params, Query, append, held};
use crate::reference::{Problem, worst};
use crate::report::Report;
use half::f16;
use qkv::{Batch, Bits, CacheConfig, Dtype, Format, Fp8, Granularity, PagedKvCache, Seat};

const TOKENS: usize = 640;

/// Largest difference of an output element, and of an LSE (relative where it is above 1).
pub(crate) const LIMIT: f64 = 1e-5;

/// The same for LSEs where queries are multiplied with steps in f16: an error that all tokens of a group share.
const LSE_LIMIT: f64 = 1e-3;

/// How a step is attended.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Attend,
    Prefill,
}

/// What of a run is in f16 on a device. The CPU computes in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
enum InHalf {
    /// Nothing: window and sinks are multiplied in two parts.
    Nothing,
    /// Weights; elements are f16 numbers.
    Weights,
    /// Weights, and what keys are multiplied with: queries times steps.
    Products,
}

/// Differences of one kind of run.
#[derive(Debug)]
struct Errors {
    name: String,
    in_half: InHalf,
    runs: usize,
    /// The largest ones, of an output and of an LSE; of a run's outputs in the 2-norm, relative, and what it may be.
    largest: [f64; 2],
    relative: f64,
    limit: f64,
    /// Sums of squares of outputs' errors, here and of f16 arithmetic.
    own: f64,
    half: f64,
}

pub(crate) fn run<M: Machine>(m: &M, golden: &Golden, report: &mut Report) {
    let cases = || golden.cases.iter().filter(|c| c.is_attention());
    let mut unseen = 0;
    let ways = [
        ("f16 in a window", InHalf::Nothing, Way::Attend, 192),
        ("f16 in pages", InHalf::Weights, Way::Attend, 0),
        ("f16, prefill", InHalf::Weights, Way::Prefill, 64),
    ];
    for (name, in_half, way, residual) in ways {
        let mut errors = Errors::new::<M>(name.into(), in_half);
        for case in cases() {
            report.count('f', case);
            unseen += plain(m, golden, case, way, residual, &mut errors, report);
        }
        errors.finish(report);
    }
    report.note(format!(
        "f: {} queries stand before the first token, which no cache has: not applicable",
        unseen / ways.len()
    ));
    // Per head dim, since defaults depend on it.
    let mut all: Vec<Errors> = Bits::ALL
        .iter()
        .map(|b| format!("the default of {} bits", b.get()))
        .chain(["E4M3".into(), "f16 and bf16".into()])
        .map(|name| Errors::new::<M>(format!("{name}, {TOKENS} tokens"), InHalf::Products))
        .collect();
    for case in cases() {
        let dim = golden.tensor(case, "k").shape[3];
        let fp8: Format = Fp8::e4m3(Granularity::TokenHead).into();
        let defaults = Bits::ALL.iter().map(|b| CacheConfig::default_formats(*b, dim));
        let pairs = defaults.chain([(fp8, fp8), (Format::F16, Format::Bf16)]);
        for ((key, value), errors) in pairs.zip(&mut all) {
            repeated(m, golden, case, key, value, errors, report);
        }
    }
    all.into_iter().for_each(|errors| errors.finish(report));
}

impl Errors {
    fn new<M: Machine>(name: String, in_half: InHalf) -> Self {
        let in_half = if M::ERROR <= LIMIT { InHalf::Nothing } else { in_half };
        Self {
            name,
            in_half,
            runs: 0,
            largest: [0.0; 2],
            relative: 0.0,
            limit: M::ERROR,
            own: 0.0,
            half: 0.0,
        }
    }

    /// Holds an answer against f64. Where something is in f16, outputs may be as far as the machine's limit in the 2-norm,
    /// relative, and all runs together twice as far as f16 arithmetic that decodes each element.
    fn check(
        &mut self,
        answer: &Answer,
        problem: &Problem<'_>,
        (want, want_lse): (&[f64], &[f64]),
        case: &Case,
        report: &mut Report,
    ) {
        self.runs += 1;
        let largest = |errors: &mut dyn Iterator<Item = f64>| {
            errors.fold(0f64, |a, x| if x.is_nan() { f64::INFINITY } else { a.max(x) })
        };
        let relative = |(got, want): (&f32, &f64)| {
            if f64::from(*got) == *want { 0.0 } else { (f64::from(*got) - want).abs() / want.abs().max(1.0) }
        };
        let lse = largest(&mut answer.lse.iter().zip(want_lse).map(relative));
        let out = worst(&answer.out, want).unwrap_or(f64::INFINITY);
        self.largest = [self.largest[0].max(out), self.largest[1].max(lse)];
        let limit = if self.in_half == InHalf::Products { LSE_LIMIT } else { LIMIT };
        report.check(lse <= limit, case, || format!("{}: an LSE is {lse:e} from f64", self.name));
        if self.in_half == InHalf::Nothing {
            report.check(out <= LIMIT, case, || format!("{}: an output is {out:e} from f64", self.name));
            return;
        }
        let round = |x: f64| f16::from_f64(x).to_f64();
        let [k, v] = [problem.k, problem.v].map(|x| x.iter().map(|x| round(*x)).collect::<Vec<_>>());
        let (rounded, _) = Problem { k: &k, v: &v, ..problem.clone() }.solve_rounded(round);
        let squares =
            |x: &mut dyn Iterator<Item = f64>| x.zip(want).map(|(x, want)| (x - want).powi(2)).sum::<f64>();
        let own = squares(&mut answer.out.iter().map(|x| f64::from(*x)));
        let half = squares(&mut rounded.into_iter());
        (self.own, self.half) = (self.own + own, self.half + half);
        let (own, half) = (own.sqrt(), half.sqrt());
        let far = own / want.iter().map(|x| x * x).sum::<f64>().sqrt();
        self.relative = self.relative.max(far);
        report.check(far <= self.limit, case, || {
            format!(
                "{}: outputs {far:e} from f64, relative; {:.2} times as far as f16",
                self.name,
                own / half
            )
        });
    }

    fn finish(self, report: &mut Report) {
        let Self { name, runs, largest: [out, lse], relative, in_half, own, half, .. } = self;
        let mut text = format!("f: {name}: {runs} runs, outputs at most {out:.2e} from f64, LSEs {lse:.2e}");
        if in_half != InHalf::Nothing {
            let times = (own / half).sqrt();
            text += &format!("; 2-norm {relative:.1e}, {times:.2} times as far as f16 arithmetic");
            if times.is_nan() || times > 2.0 {
                report.fail(text.clone());
            }
        }
        report.note(text);
    }
}

/// `[tokens][heads][dim]` of one batch row, its tokens repeated up to `tokens`.
fn rows(x: &Tensor, batch: usize, tokens: usize) -> Vec<f32> {
    let [_, heads, t, dim] = x.shape[..] else { panic!("a tensor of four dims") };
    let all = x.f32();
    let at = |i: usize, h: usize| ((batch * heads + h) * t + i % t) * dim;
    (0..tokens).flat_map(|i| (0..heads).flat_map(move |h| at(i, h)..at(i, h) + dim)).map(|i| all[i]).collect()
}

/// A case's tensors and parameters.
struct Given<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    dim: usize,
    scale: f64,
    softcap: Option<f64>,
    window: Option<usize>,
}

impl<'a> Given<'a> {
    fn new(golden: &'a Golden, case: &Case) -> Self {
        let get = |name: &str| golden.tensor(case, name);
        let (q, k, v) = (get("q"), get("k"), get("v"));
        let [batch, heads, queries, dim] = q.shape[..] else { panic!("q of four dims") };
        let float = |name: &str| case.fields.get(name).and_then(|x| x.as_f64());
        let (scale, softcap) = (float("scale").unwrap(), float("softcap"));
        let window = case.int("window").map(|w| w as usize);
        Self { q, k, v, batch, heads, kv_heads: k.shape[1], queries, dim, scale, softcap, window }
    }

    /// Attends the last `queries` of `tokens` tokens of a batch row.
    fn answer<M: Machine>(
        &self,
        m: &M,
        config: CacheConfig,
        batch: usize,
        tokens: usize,
        queries: usize,
        way: Way,
    ) -> (Answer, PagedKvCache<M::B>, Seat) {
        let mut cache = m.paged(config, tokens.div_ceil(64)).unwrap();
        let seat = cache.open().unwrap();
        let (k, v) = (rows(self.k, batch, tokens), rows(self.v, batch, tokens));
        let q = &rows(self.q, batch, self.queries)[(self.queries - queries) * self.heads * self.dim..];
        let mut query = Query { dtype: Dtype::F16, ..Query::new::<M>(q, self.heads) };
        query.params = Params {
            scale: Some(self.scale as f32),
            softcap: self.softcap.map(|c| c as f32),
            ..Params::default()
        };
        let (row, old) = (self.kv_heads * self.dim, tokens - queries);
        if old > 0 {
            begin(&mut cache, seat, old);
            append(m, &mut cache, 0, &k[..old * row], &v[..old * row]).unwrap();
        }
        begin(&mut cache, seat, queries);
        let (k, v) = (&k[old * row..], &v[old * row..]);
        let answer = match way {
            Way::Prefill => query.prefill(m, &mut cache, 0, k, v),
            Way::Attend => {
                append(m, &mut cache, 0, k, v).unwrap();
                query.attend(m, &mut cache, 0)
            }
        };
        (answer.unwrap(), cache, seat)
    }

    fn problem<'b>(&self, q: &'b [f64], k: &'b [f64], v: &'b [f64]) -> Problem<'b> {
        Problem {
            scale: self.scale,
            softcap: self.softcap,
            sliding_window: self.window,
            ..Problem::causal(q, k, v, [self.heads, self.kv_heads], [self.dim, self.dim])
        }
    }
}

fn begin<B: qkv::backend::Backend>(cache: &mut PagedKvCache<B>, seat: Seat, n: usize) {
    cache.reserve(seat, n).unwrap();
    cache.begin_step(&Batch::new(&[seat], &[0, n as i32])).unwrap();
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// A case's own tensors as f16. Returns queries that no cache can ask.
fn plain<M: Machine>(
    m: &M,
    golden: &Golden,
    case: &Case,
    way: Way,
    residual: usize,
    errors: &mut Errors,
    report: &mut Report,
) -> usize {
    let g = Given::new(golden, case);
    let tokens = g.k.shape[2];
    let asked = g.queries.min(tokens);
    let get = |name: &str| golden.tensor(case, name).f64();
    let (out, lse) = (get("out"), get("lse"));
    for b in 0..g.batch {
        let config = CacheConfig::new(1, g.kv_heads, g.dim)
            .with_key(Format::F16)
            .with_value(Format::F16)
            .with_residual(Some(residual))
            .with_sliding_window(g.window)
            .with_capacity(1, tokens);
        let (answer, ..) = g.answer(m, config, b, tokens, asked, way);
        // The reference is `[heads][queries]`.
        let (mut want, mut want_lse) = (vec![], vec![]);
        for (i, h) in (g.queries - asked..g.queries).flat_map(|i| (0..g.heads).map(move |h| (i, h))) {
            let at = (b * g.heads + h) * g.queries + i;
            want.extend_from_slice(&out[at * g.dim..][..g.dim]);
            want_lse.push(lse[at]);
        }
        let q = &wide(&rows(g.q, b, g.queries))[(g.queries - asked) * g.heads * g.dim..];
        let (k, v) = (wide(&rows(g.k, b, tokens)), wide(&rows(g.v, b, tokens)));
        errors.check(&answer, &g.problem(q, &k, &v), (&want, &want_lse), case, report);
    }
    g.batch * (g.queries - asked)
}

/// A case in other formats, its tokens repeated.
fn repeated<M: Machine>(
    m: &M,
    golden: &Golden,
    case: &Case,
    key: Format,
    value: Format,
    errors: &mut Errors,
    report: &mut Report,
) {
    let g = Given::new(golden, case);
    for b in 0..g.batch {
        let config = CacheConfig::new(1, g.kv_heads, g.dim)
            .with_key(key)
            .with_value(value)
            .with_sliding_window(g.window)
            .with_capacity(1, TOKENS);
        let (answer, cache, seat) = g.answer(m, config, b, TOKENS, g.queries, Way::Attend);
        let [k, v] = held(m, &cache, 0, seat);
        let (q, k, v) = (wide(&rows(g.q, b, g.queries)), wide(&k), wide(&v));
        let problem = g.problem(&q, &k, &v);
        let (want, want_lse) = problem.solve();
        errors.check(&answer, &problem, (&want, &want_lse), case, report);
    }
}

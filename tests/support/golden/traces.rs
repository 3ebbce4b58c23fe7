//! Class g: the peers' caches, replayed from their published rules with this library's functions.

use crate::affine::{share, tolerance};
use crate::functions::Functions;
use crate::golden::{Case, Golden, Tensor, round_to};
use crate::hqq::solve;
use crate::report::Report;
use crate::views::View;
use qkv::quant::fp8::Fp8Tensor;
use qkv::{Bits, Dtype, Fp8, Granularity};

pub(crate) fn run(on: &dyn Functions, golden: &Golden, report: &mut Report) {
    let (mut largest, mut replayed, mut windows) = (0f64, 0, 0);
    for case in golden.cases.iter().filter(|c| c.is_trace()) {
        report.count('g', case);
        if case.has("residual_length") {
            sliding_window(case, report);
            windows += 1;
        } else {
            largest = largest.max(replay(on, golden, case, report));
            replayed += 1;
        }
    }
    report.note(format!(
        "g: {replayed} caches replayed; {windows} cases are a window's lengths alone, which call no function of the library"
    ));
    report.note(format!("g: elements one step away, largest share of a kept step: {:.4} %", largest * 100.0));
}

/// Affine codes, one a byte, and their pairs in the order of the view.
struct Codes {
    view: View,
    bits: Bits,
    codes: Vec<u8>,
    pairs: Vec<(f32, f32)>,
}

impl Codes {
    fn decoded(&self, on: &dyn Functions, dtype: Dtype) -> Vec<f32> {
        on.dequantize(&self.view, self.bits, &self.codes, &self.pairs, dtype).f32()
    }
}

/// What the blob of old tokens is stored as.
enum Blob {
    Affine(Codes),
    /// HQQ decodes `(code - zero) * step`: the difference by the library, for the pair (1, -zero), then a product.
    Hqq(Codes, Vec<f32>),
    Fp8(Fp8Tensor),
}

/// One of K and V: `[heads][tokens][dim]`, as the peer's tensor lies in memory.
struct Side {
    dtype: Dtype,
    heads: usize,
    dim: usize,
    /// Tokens in the window, `[heads][window][dim]`.
    window: Vec<f32>,
    blob: Option<Blob>,
    blob_tokens: usize,
    /// Frozen FP8 scale.
    scale: Option<f32>,
}

/// How a side is quantized.
#[derive(Clone, Copy)]
struct Rule<'a> {
    backend: &'a str,
    bits: i64,
    group: usize,
    axis: i64,
}

/// Joins blocks `[heads][tokens][dim]` along tokens.
fn cat(heads: usize, parts: &[&[f32]]) -> Vec<f32> {
    let mut out = Vec::new();
    for h in 0..heads {
        for p in parts {
            let n = p.len() / heads;
            out.extend_from_slice(&p[h * n..(h + 1) * n]);
        }
    }
    out
}

impl Side {
    /// The old tokens decoded, and for every element how far the peer's may lie: a tolerance and a step.
    fn decoded(&self, on: &dyn Functions) -> (Vec<f32>, Vec<(f64, f64)>) {
        match &self.blob {
            None => (Vec::new(), Vec::new()),
            Some(Blob::Fp8(b)) => {
                let x = on.decode(b, self.dtype).f32();
                let n = x.len();
                (x, vec![(0.0, 0.0); n])
            }
            Some(Blob::Hqq(q, step)) => {
                let difference = q.decoded(on, self.dtype);
                (0..difference.len())
                    .map(|i| {
                        let g = q.view.pair_of(i);
                        let pair = (step[g], step[g] * q.pairs[g].1);
                        let slack = (tolerance(self.dtype, q.codes[i], pair), step[g] as f64);
                        (round_to(self.dtype, difference[i] * step[g]), slack)
                    })
                    .unzip()
            }
            Some(Blob::Affine(q)) => {
                let x = q.decoded(on, self.dtype);
                let slack = (0..x.len())
                    .map(|i| {
                        let pair = q.pairs[q.view.pair_of(i)];
                        (tolerance(self.dtype, q.codes[i], pair), pair.0 as f64)
                    })
                    .collect();
                (x, slack)
            }
        }
    }

    /// Quantizes everything anew.
    fn quantize(&mut self, on: &dyn Functions, x: &[f32], rule: Rule<'_>) {
        self.blob_tokens = x.len() / self.heads / self.dim;
        let shape = [1, self.heads, self.blob_tokens, self.dim];
        let tensor = Tensor::from_f32(self.dtype, &shape, x);
        if rule.backend == "fp8" {
            let format = Fp8::e4m3(Granularity::Tensor);
            let dims = [1, 1, x.len()];
            let scale = *self.scale.get_or_insert_with(|| {
                let amax = x.iter().fold(0f32, |m, x| m.max(x.abs()));
                (amax / 448.0).max(f32::MIN_POSITIVE)
            });
            self.blob = Some(Blob::Fp8(on.encode(&tensor, dims, format, Some(&[scale]))));
            return;
        }
        let view = View::peer(rule.backend, rule.axis, &shape, rule.group);
        let bits = Bits::new(rule.bits as usize).unwrap();
        let to = |x: f32| round_to(self.dtype, x);
        if rule.backend == "hqq" {
            // Codes come from the pair before its cast to the dtype of the cache.
            let own = solve(x, &view, bits, true);
            let codes = own.codes(on, x, &view, bits);
            let pairs: Vec<(f32, f32)> = own.zero.iter().map(|z| (1.0, -to(*z))).collect();
            let step = own.step.iter().map(|s| to(*s)).collect();
            self.blob = Some(Blob::Hqq(Codes { view, bits, codes, pairs }, step));
            return;
        }
        let max = bits.max_code() as f32;
        let range =
            |g: &Vec<usize>| g.iter().fold((f32::MAX, f32::MIN), |(l, h), i| (l.min(x[*i]), h.max(x[*i])));
        let pairs: Vec<(f32, f32)> =
            view.groups().iter().map(range).map(|(lo, hi)| (to(to(hi - lo) / max), lo)).collect();
        let codes = on.quantize_with(&tensor, &view, bits, &pairs);
        self.blob = Some(Blob::Affine(Codes { view, bits, codes, pairs }));
    }

    /// One update; returns what the cache hands back, with the slack of every element, and whether it flushed.
    fn update(
        &mut self,
        on: &dyn Functions,
        new: &[f32],
        rule: Rule<'_>,
        residual: usize,
    ) -> (Vec<f32>, Vec<(f64, f64)>, bool) {
        let exact = |x: &[f32]| vec![(0.0, 0.0); x.len()];
        if self.blob.is_none() {
            self.quantize(on, new, rule);
            return (new.to_vec(), exact(new), rule.backend != "fp8");
        }
        let (old, slack) = self.decoded(on);
        if rule.backend == "fp8" {
            // No window: new tokens are decoded in the same call.
            let mut next = Side { window: Vec::new(), blob: None, blob_tokens: 0, ..*self };
            next.quantize(on, new, rule);
            let (bytes, scale) = match (self.blob.take(), next.blob.take()) {
                (Some(Blob::Fp8(a)), Some(Blob::Fp8(b))) => {
                    let wide = |x: &Fp8Tensor| x.bytes().iter().map(|b| *b as f32).collect::<Vec<_>>();
                    let all = cat(self.heads, &[&wide(&a), &wide(&b)]);
                    (all.iter().map(|b| *b as u8).collect::<Vec<u8>>(), a.scales().to_vec())
                }
                _ => unreachable!("an FP8 cache holds FP8 bytes"),
            };
            let format = Fp8::e4m3(Granularity::Tensor);
            self.blob_tokens = bytes.len() / self.heads / self.dim;
            self.blob =
                Some(Blob::Fp8(Fp8Tensor::from_bytes([1, 1, bytes.len()], format, bytes, scale).unwrap()));
            let (all, slack) = self.decoded(on);
            return (all, slack, false);
        }
        let ret = cat(self.heads, &[&old, &self.window, new]);
        let (tol, step): (Vec<f32>, Vec<f32>) = slack.iter().map(|s| (s.0 as f32, s.1 as f32)).unzip();
        let zeros = vec![0f32; self.window.len()];
        let none = vec![0f32; new.len()];
        let tol = cat(self.heads, &[&tol, &zeros, &none]);
        let step = cat(self.heads, &[&step, &zeros, &none]);
        let slack = tol.iter().zip(&step).map(|(t, s)| (*t as f64 * 1.000001, *s as f64)).collect();
        let tokens = |x: &[f32]| x.len() / self.heads / self.dim;
        let flush = tokens(&self.window) + tokens(new) >= residual;
        if flush {
            self.quantize(on, &ret, rule);
            self.window.clear();
        } else {
            self.window = cat(self.heads, &[&self.window, new]);
        }
        (ret, slack, flush)
    }

    fn window_tokens(&self) -> usize {
        self.window.len() / self.heads / self.dim
    }
}

/// Tokens `from..to` of `[1, heads, tokens, dim]`.
fn tokens(x: &Tensor, from: usize, to: usize) -> Vec<f32> {
    let (h, t, d) = (x.shape[1], x.shape[2], x.shape[3]);
    let all = x.f32();
    (0..h).flat_map(|h| all[(h * t + from) * d..(h * t + to) * d].to_vec()).collect()
}

/// Replays one trace; returns the largest share of elements that lie one step away.
fn replay(on: &dyn Functions, golden: &Golden, case: &Case, report: &mut Report) -> f64 {
    let args = &case.fields["args"];
    let arg = |name: &str| args.get(name).and_then(|x| x.as_i64());
    let (backend, dtype) = (case.str("backend").unwrap(), case.dtype("dtype"));
    let (heads, dim) = (case.int("Hkv").unwrap() as usize, case.int("head_dim").unwrap() as usize);
    let residual = arg("residual_length").unwrap_or(0) as usize;
    let steps: Vec<usize> =
        std::iter::once(case.int("prefill").unwrap() as usize).chain(case.counts("steps")).collect();
    let (log, kept) = (case.lists("log"), case.usizes("kept_steps"));
    report.check(log.len() == steps.len(), case, || format!("{} entries of {}", log.len(), steps.len()));
    let mut largest = 0f64;
    for (name, axis) in [("k", "axis_key"), ("v", "axis_value")] {
        let rule = Rule {
            backend,
            bits: arg("nbits").unwrap_or(8),
            group: arg("q_group_size").unwrap_or(0) as usize,
            axis: arg(axis).unwrap_or(0),
        };
        let input = golden.tensor(case, &format!("{name}_in"));
        let mut side =
            Side { dtype, heads, dim, window: Vec::new(), blob: None, blob_tokens: 0, scale: None };
        let mut at = 0;
        for (i, n) in steps.iter().enumerate() {
            let (got, slack, flushed) = side.update(on, &tokens(input, at, at + n), rule, residual);
            at += n;
            let state = vec![at, side.blob_tokens, side.window_tokens(), flushed as usize];
            report.check(state == log[i], case, || format!("{name} step {i}: {state:?}, not {:?}", log[i]));
            if !kept.contains(&i) {
                continue;
            }
            let want = golden.tensor(case, &format!("s{i}.{name}"));
            report
                .check(got.len() == want.len(), case, || format!("{name} step {i}: {} elements", got.len()));
            let (mut one, mut far, mut example) = (0usize, 0usize, String::new());
            for (j, (a, b)) in got.iter().zip(want.f64()).enumerate() {
                let d = (*a as f64 - b).abs();
                if d <= slack[j].0 {
                    continue;
                }
                if d <= slack[j].0 + slack[j].1 {
                    one += 1;
                } else {
                    far += 1;
                }
                example = format!("element {j}: {a} against {b}, slack {:?}", slack[j]);
            }
            let part = one as f64 / got.len() as f64;
            largest = largest.max(part);
            report.check(far == 0 && part <= share(dtype), case, || {
                format!("{name} step {i}: {one} elements one step away, {far} further; {example}")
            });
        }
    }
    largest
}

/// KIVI's window: keys leave in blocks of `residual_length`, values one token a step.
fn sliding_window(case: &Case, report: &mut Report) {
    let r = case.int("residual_length").unwrap() as usize;
    let prefill = case.int("prefill").unwrap() as usize;
    let (mut total, mut key, mut value) = (prefill, prefill % r, prefill.min(r));
    let log = case.lists("log");
    let state = |total: usize, key: usize, value: usize| vec![total, total - key, key, total - value, value];
    let mut seen = vec![state(total, key, value)];
    for n in case.counts("steps") {
        for _ in 0..n {
            total += 1;
            key = (key + 1) % r;
            value = (value + 1).min(r);
        }
        seen.push(state(total, key, value));
    }
    report.check(seen == log, case, || {
        let at = seen.iter().zip(&log).position(|(a, b)| a != b);
        format!("the window differs at step {at:?}")
    });
}

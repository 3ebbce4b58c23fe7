//! Class f again: every attention case through a cache, with K and V repeated to 640 tokens, against f64 attention
//! over what the cache decodes.

use crate::golden::{Case, Golden, Tensor};
use crate::reference::{Problem, worst};
use crate::report::Report;
use qkv::{AttendParams, Bits, CacheConfig, Format, Fp8, Granularity, KvCache, TensorMut, TensorRef};

const TOKENS: usize = 640;
const LIMIT: f64 = 1e-5;

pub(crate) fn run(golden: &Golden, report: &mut Report) {
    let mut largest = 0f64;
    for case in golden.cases.iter().filter(|c| c.is_attention()) {
        report.count('f', case);
        let dim = golden.tensor(case, "k").shape[3];
        let fp8: Format = Fp8::e4m3(Granularity::TokenHead).into();
        let mut pairs: Vec<(Format, Format)> =
            Bits::ALL.iter().map(|b| CacheConfig::default_formats(*b, dim)).collect();
        pairs.extend([(fp8, fp8), (Format::F16, Format::Bf16)]);
        for (key, value) in pairs {
            largest = largest.max(one(golden, case, key, value, report));
        }
    }
    report.note(format!("f: attention through a cache of {TOKENS} tokens, largest difference {largest:.2e}"));
}

/// `[tokens][heads][dim]` of one batch row, its tokens repeated up to `tokens`.
fn rows(x: &Tensor, batch: usize, tokens: usize) -> Vec<f32> {
    let [_, heads, t, dim] = x.shape[..] else { panic!("a tensor of four dims") };
    let all = x.f32();
    let at = |i: usize, h: usize| ((batch * heads + h) * t + i % t) * dim;
    (0..tokens).flat_map(|i| (0..heads).flat_map(move |h| at(i, h)..at(i, h) + dim)).map(|i| all[i]).collect()
}

fn one(golden: &Golden, case: &Case, key: Format, value: Format, report: &mut Report) -> f64 {
    let get = |name: &str| golden.tensor(case, name);
    let (q, k, v) = (get("q"), get("k"), get("v"));
    let [batch, heads, queries, dim] = q.shape[..] else { panic!("q of four dims") };
    let kv_heads = k.shape[1];
    let float = |name: &str| case.fields.get(name).and_then(|x| x.as_f64());
    let window = case.int("window").map(|w| w as usize);
    let mut params = AttendParams::new().with_scale(float("scale").unwrap() as f32);
    if let Some(cap) = float("softcap") {
        params = params.with_softcap(cap as f32);
    }
    let mut largest = 0f64;
    for b in 0..batch {
        let config = CacheConfig::new(1, kv_heads, dim)
            .with_key(key)
            .with_value(value)
            .with_sliding_window(window)
            .with_capacity(1, TOKENS);
        let mut cache = KvCache::new(config).unwrap();
        let (q, k, v) = (rows(q, b, queries), rows(k, b, TOKENS), rows(v, b, TOKENS));
        let width = kv_heads * dim;
        let view = |x: &[f32], from: usize, to: usize| x[from * width..to * width].to_vec();
        for (from, to) in [(0, TOKENS - queries), (TOKENS - queries, TOKENS)] {
            let (k, v) = (view(&k, from, to), view(&v, from, to));
            let dims = [to - from, kv_heads, dim];
            cache.append(0, &TensorRef::thd(&k, dims).unwrap(), &TensorRef::thd(&v, dims).unwrap()).unwrap();
        }
        let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; queries * heads]);
        let dims = [queries, heads, dim];
        let mut out_view = TensorMut::thd(&mut out, dims).unwrap();
        cache.attend(0, &TensorRef::thd(&q, dims).unwrap(), &params, &mut out_view, Some(&mut lse)).unwrap();

        let (mut dk, mut dv) = (vec![0f32; TOKENS * width], vec![0f32; TOKENS * width]);
        let dims = [TOKENS, kv_heads, dim];
        let (mut kt, mut vt) =
            (TensorMut::thd(&mut dk, dims).unwrap(), TensorMut::thd(&mut dv, dims).unwrap());
        cache.dequantize(0, 0, &mut kt, &mut vt).unwrap();
        let wide = |x: &[f32]| x.iter().map(|x| *x as f64).collect::<Vec<f64>>();
        let problem = Problem {
            q: &wide(&q),
            k: &wide(&dk),
            v: &wide(&dv),
            query_heads: heads,
            kv_heads,
            key_dim: dim,
            value_dim: dim,
            scale: float("scale").unwrap(),
            softcap: float("softcap"),
            sliding_window: window,
            sink_logits: None,
            bidirectional: &[],
            causal: true,
        };
        let (want, want_lse) = problem.solve();
        let error = worst(&out, &want).unwrap_or(f64::INFINITY);
        largest = largest.max(error);
        report.check(error <= LIMIT, case, || format!("through a cache of {key:?}, {value:?}: {error:e}"));
        for (got, want) in lse.iter().zip(&want_lse) {
            let error = (*got as f64 - want).abs() / want.abs().max(1.0);
            report
                .check(error <= LIMIT, case, || format!("through a cache of {key:?}: LSE {got}, not {want}"));
        }
    }
    largest
}

//! Class f: attention over plain tensors against f64.

use crate::golden::{Case, Golden, Tensor};
use crate::report::Report;
use crate::through_cache::LIMIT;
use qkv::{AttendParams, Shape, TensorMut, TensorRef, attention};

const CLASS: char = 'f';

pub(crate) fn run(golden: &Golden, report: &mut Report) {
    let mut largest = 0f64;
    for case in golden.cases.iter().filter(|c| c.is_attention()) {
        report.count(CLASS, case);
        largest = largest.max(plain(golden, case, report));
    }
    report.note(format!("f: attention over plain tensors, largest difference {largest:.2e}"));
}

/// One batch row of a `[batch, heads, tokens, dim]` tensor, as `[tokens, heads, dim]`.
fn row(x: &Tensor, batch: usize) -> TensorRef<'_> {
    let [_, h, t, d] = x.shape[..] else { panic!("a tensor of four dims") };
    let all = Shape { dims: [x.shape[0] * t, h, d], batch_tokens: t, strides: [h * t * d, d, t * d, 1] };
    let one = Shape { dims: [t, h, d], batch_tokens: t, strides: [0, d, t * d, 1] };
    match x.view(all).data() {
        qkv::Data::F16(x) => TensorRef::new(&x[batch * h * t * d..], one),
        qkv::Data::Bf16(x) => TensorRef::new(&x[batch * h * t * d..], one),
        qkv::Data::F32(x) => TensorRef::new(&x[batch * h * t * d..], one),
    }
    .unwrap()
}

/// The mask of a case: the function is always causal with the last query at the last key, which a single query
/// cannot tell from no mask.
fn checked_window(case: &Case, report: &mut Report) -> Option<usize> {
    let (tq, tk) = (case.int("Tq").unwrap(), case.int("Tk").unwrap());
    match case.int("causal_offset") {
        Some(offset) => report.check(offset == tk - tq, case, || format!("causal offset {offset}")),
        None => report.check(tq == 1, case, || "several queries without a causal mask".into()),
    }
    case.int("window").map(|w| w as usize)
}

fn plain(golden: &Golden, case: &Case, report: &mut Report) -> f64 {
    let window = checked_window(case, report);
    let get = |name: &str| golden.tensor(case, name);
    let (q, k, v) = (get("q"), get("k"), get("v"));
    let (want_out, want_lse) = (get("out").f64(), get("lse").f64());
    let [batch, heads, queries, _] = q.shape[..] else { panic!("q of four dims") };
    let dim = v.shape[3];
    let float = |name: &str| case.fields.get(name).and_then(|x| x.as_f64()).map(|x| x as f32);
    let mut params = AttendParams::new().with_scale(float("scale").unwrap());
    if let Some(cap) = float("softcap") {
        params = params.with_softcap(cap);
    }
    let mut largest = 0f64;
    for b in 0..batch {
        let mut out = vec![f32::NAN; queries * heads * dim];
        let mut lse = vec![f32::NAN; queries * heads];
        let mut view = TensorMut::thd(&mut out, [queries, heads, dim]).unwrap();
        attention(&row(q, b), &row(k, b), &row(v, b), &params, window, &mut view, Some(&mut lse)).unwrap();
        for i in 0..queries {
            for h in 0..heads {
                let at = (b * heads + h) * queries + i;
                let (got, want) = (lse[i * heads + h] as f64, want_lse[at]);
                let error = if want == f64::NEG_INFINITY {
                    if got == want { 0.0 } else { f64::INFINITY }
                } else {
                    (got - want).abs() / want.abs().max(1.0)
                };
                report
                    .check(error <= LIMIT, case, || format!("lse of query {i} head {h}: {got}, not {want}"));
                for c in 0..dim {
                    let (got, want) = (out[(i * heads + h) * dim + c] as f64, want_out[at * dim + c]);
                    let error = (got - want).abs();
                    largest = largest.max(error);
                    report.check(error <= LIMIT, case, || {
                        format!("query {i} head {h} channel {c}: {got}, not {want}")
                    });
                }
            }
        }
    }
    largest
}

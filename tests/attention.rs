//! `attention` and `merge_states` through the public interface, against f64.

#[path = "support/reference.rs"]
mod reference;

use half::{bf16, f16};
use proptest::prelude::*;
use qkv::{AttendParams, Error, Shape, TensorMut, TensorRef, attention, merge_states};
use reference::{Problem, worst};

/// Reproducible numbers in [-1, 1) that f16 and bf16 hold exactly.
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((x >> 40) % 256) as f32 / 128.0 - 1.0
        })
        .collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| *x as f64).collect()
}

/// Sizes and masks of one call.
#[derive(Debug, Clone)]
struct Case {
    queries: usize,
    tokens: usize,
    kv_heads: usize,
    group: usize,
    key_dim: usize,
    value_dim: usize,
    scale: Option<f32>,
    softcap: Option<f32>,
    sliding_window: Option<usize>,
    sinks: bool,
    bidirectional: Vec<(usize, usize)>,
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (1usize..40, 1usize..150, 1usize..4, 1usize..9, 1usize..10, 1usize..10);
    let masks = (
        prop::option::of(0.01f32..1.0),
        prop::option::of(1f32..60.0),
        prop::option::of(1usize..80),
        any::<bool>(),
        prop::collection::vec((0usize..150, 1usize..40), 0..3),
    );
    (sizes, masks).prop_map(
        |((queries, tokens, kv_heads, group, k, v), (scale, softcap, sliding_window, sinks, ranges))| {
            let bidirectional = ranges.into_iter().map(|(s, n)| (s, s + n)).collect();
            let (key_dim, value_dim) = (16 * k, 16 * v);
            Case {
                queries,
                tokens,
                kv_heads,
                group,
                key_dim,
                value_dim,
                scale,
                softcap,
                sliding_window,
                sinks,
                bidirectional,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_shape_and_mask_matches_f64(case in case()) {
        let c = &case;
        let heads = c.kv_heads * c.group;
        let q: Vec<f32> = numbers(1, c.queries * heads * c.key_dim).iter().map(|x| 3.0 * x).collect();
        let k = numbers(2, c.tokens * c.kv_heads * c.key_dim);
        let v = numbers(3, c.tokens * c.kv_heads * c.value_dim);
        let logits = numbers(4, heads);
        let (q64, k64, v64, l64) = (wide(&q), wide(&k), wide(&v), wide(&logits));
        let problem = Problem {
            scale: c.scale.map_or(1.0 / (c.key_dim as f64).sqrt(), f64::from),
            softcap: c.softcap.map(f64::from),
            sliding_window: c.sliding_window,
            sink_logits: c.sinks.then_some(&l64),
            bidirectional: &c.bidirectional,
            ..Problem::causal(&q64, &k64, &v64, [heads, c.kv_heads], [c.key_dim, c.value_dim])
        };
        let (want, want_lse) = problem.solve();
        let mut params = AttendParams::new().with_bidirectional(&c.bidirectional);
        params.scale = c.scale;
        params.softcap = c.softcap;
        params.sink_logits = c.sinks.then_some(&logits);
        let (mut out, mut lse) = (vec![9f32; c.queries * heads * c.value_dim], vec![9f32; c.queries * heads]);
        // Keys in f16, values in bf16, both exact.
        let k: Vec<f16> = k.iter().map(|x| f16::from_f32(*x)).collect();
        let v: Vec<bf16> = v.iter().map(|x| bf16::from_f32(*x)).collect();
        attention(
            &TensorRef::thd(&q, [c.queries, heads, c.key_dim]).unwrap(),
            &TensorRef::thd(&k, [c.tokens, c.kv_heads, c.key_dim]).unwrap(),
            &TensorRef::thd(&v, [c.tokens, c.kv_heads, c.value_dim]).unwrap(),
            &params,
            c.sliding_window,
            &mut TensorMut::thd(&mut out, [c.queries, heads, c.value_dim]).unwrap(),
            Some(&mut lse),
        ).unwrap();
        let (e, l) = (worst(&out, &want), worst(&lse, &want_lse));
        prop_assert!(e.is_some_and(|e| e < 1e-5), "out {e:?}");
        prop_assert!(l.is_some_and(|l| l < 2e-5), "lse {l:?}");
    }
}

/// Sizes small enough that every stride is tried by hand.
fn small(out: &mut TensorMut<'_>, q: &TensorRef<'_>, k: &TensorRef<'_>, v: &TensorRef<'_>) {
    attention(q, k, v, &AttendParams::new(), None, out, None).unwrap();
}

#[test]
fn strides_and_dtypes_of_every_tensor() {
    let (n, t, heads, d) = (3, 20, 2, 32);
    let (q, k, v) = (numbers(1, n * heads * d), numbers(2, t * heads * d), numbers(3, t * heads * d));
    let mut want = vec![0f32; n * heads * d];
    let (qt, kt, vt) = (
        TensorRef::thd(&q, [n, heads, d]).unwrap(),
        TensorRef::thd(&k, [t, heads, d]).unwrap(),
        TensorRef::thd(&v, [t, heads, d]).unwrap(),
    );
    small(&mut TensorMut::thd(&mut want, [n, heads, d]).unwrap(), &qt, &kt, &vt);

    // Heads before tokens, and channels two elements apart.
    let spread = |x: &[f32], tokens: usize| {
        let mut y = vec![f32::NAN; 2 * x.len()];
        for (i, x) in x.iter().enumerate() {
            let (token, head, c) = (i / (heads * d), i / d % heads, i % d);
            y[((head * tokens + token) * d + c) * 2] = *x;
        }
        y
    };
    let shape = |tokens: usize| Shape {
        dims: [tokens, heads, d],
        batch_tokens: tokens,
        strides: [0, 2 * d, 2 * d * tokens, 2],
    };
    let (q2, k2, v2) = (spread(&q, n), spread(&k, t), spread(&v, t));
    let mut got = vec![f32::NAN; 2 * want.len()];
    small(
        &mut TensorMut::new(&mut got, shape(n)).unwrap(),
        &TensorRef::new(&q2, shape(n)).unwrap(),
        &TensorRef::new(&k2, shape(t)).unwrap(),
        &TensorRef::new(&v2, shape(t)).unwrap(),
    );
    for (i, w) in want.iter().enumerate() {
        let (token, head, c) = (i / (heads * d), i / d % heads, i % d);
        assert_eq!(got[((head * n + token) * d + c) * 2], *w);
    }
    assert!(got.iter().skip(1).step_by(2).all(|x| x.is_nan()), "elements between the output's were written");

    let mut halves = vec![f16::ZERO; want.len()];
    small(&mut TensorMut::thd(&mut halves, [n, heads, d]).unwrap(), &qt, &kt, &vt);
    assert!(halves.iter().zip(&want).all(|(h, w)| *h == f16::from_f32(*w)));
    let mut brain = vec![bf16::ZERO; want.len()];
    small(&mut TensorMut::thd(&mut brain, [n, heads, d]).unwrap(), &qt, &kt, &vt);
    assert!(brain.iter().zip(&want).all(|(h, w)| *h == bf16::from_f32(*w)));
}

#[test]
fn nan_and_infinity_in_plain_tensors() {
    let (n, t, d) = (4usize, 9usize, 16usize);
    let q = vec![1f32; n * d];
    let (mut k, mut v) = (numbers(2, t * d), numbers(3, t * d));
    k[6 * d] = f32::NEG_INFINITY; // token 6: logit -inf, masked
    v[6 * d..7 * d].fill(f32::NAN); // so its values do not count
    k[8 * d + 3] = f32::NAN; // token 8: rows that see it are NaN
    v[7 * d + 5] = f32::NAN; // token 7: one channel
    let (mut out, mut lse) = (vec![0f32; n * d], vec![0f32; n]);
    attention(
        &TensorRef::thd(&q, [n, 1, d]).unwrap(),
        &TensorRef::thd(&k, [t, 1, d]).unwrap(),
        &TensorRef::thd(&v, [t, 1, d]).unwrap(),
        &AttendParams::new(),
        None,
        &mut TensorMut::thd(&mut out, [n, 1, d]).unwrap(),
        Some(&mut lse),
    )
    .unwrap();
    assert!(out[..2 * d].iter().all(|x| x.is_finite()) && lse[..2].iter().all(|x| x.is_finite()));
    assert!((0..d).all(|c| out[2 * d + c].is_nan() == (c == 5)) && lse[2].is_finite());
    assert!(out[3 * d..].iter().all(|x| x.is_nan()) && lse[3].is_nan());
}

#[test]
fn merging_halves_gives_the_whole() {
    let (t, heads, d) = (100, 3, 32);
    let (q, k, v) = (numbers(1, heads * d), numbers(2, t * heads * d), numbers(3, t * heads * d));
    let over = |from: usize, to: usize| {
        let (mut out, mut lse) = (vec![0f32; heads * d], vec![0f32; heads]);
        attention(
            &TensorRef::thd(&q, [1, heads, d]).unwrap(),
            &TensorRef::thd(&k[from * heads * d..to * heads * d], [to - from, heads, d]).unwrap(),
            &TensorRef::thd(&v[from * heads * d..to * heads * d], [to - from, heads, d]).unwrap(),
            &AttendParams::new(),
            None,
            &mut TensorMut::thd(&mut out, [1, heads, d]).unwrap(),
            Some(&mut lse),
        )
        .unwrap();
        (out, lse)
    };
    let merge = |a: &mut (Vec<f32>, Vec<f32>), b: &(Vec<f32>, Vec<f32>)| {
        let dims = [1, a.1.len(), a.0.len() / a.1.len()];
        let other = TensorRef::thd(&b.0, dims).unwrap();
        merge_states(&mut TensorMut::thd(&mut a.0, dims).unwrap(), &mut a.1, &other, &b.1).unwrap();
    };
    let whole = over(0, t);
    let mut merged = over(0, 37);
    merge(&mut merged, &over(37, t));
    assert!(worst(&merged.0, &wide(&whole.0)).unwrap() < 1e-6);
    assert!(worst(&merged.1, &wide(&whole.1)).unwrap() < 1e-6);

    let (inf, nan) = (f32::NEG_INFINITY, f32::NAN);
    let one = |x: f32, lse: f32| (vec![x], vec![lse]);
    let result = |mut a: (Vec<f32>, Vec<f32>), b: (Vec<f32>, Vec<f32>)| {
        merge(&mut a, &b);
        (a.0[0], a.1[0])
    };
    assert_eq!(result(one(2.0, 1.0), one(nan, inf)), (2.0, 1.0), "an empty state changes nothing");
    assert_eq!(result(one(nan, inf), one(2.0, 1.0)), (2.0, 1.0));
    assert_eq!(result(one(5.0, inf), one(7.0, inf)), (0.0, inf));
    assert_eq!(result(one(1.0, 3.0), one(3.0, 3.0)).0, 2.0);
    for (a, b) in [
        (one(1.0, nan), one(1.0, 0.0)),
        (one(1.0, 0.0), one(1.0, nan)),
        (one(1.0, nan), one(1.0, inf)),
        (one(1.0, inf), one(1.0, nan)),
    ] {
        let (x, lse) = result(a, b);
        assert!(x.is_nan() && lse.is_nan());
    }
    assert_eq!(result(one(1e30, 88.0), one(1.0, -88.0)).0, 1e30);
}

#[test]
fn bad_input_is_refused_and_changes_nothing() {
    let (x, mut out, mut lse) = (vec![0.5f32; 4096], vec![7f32; 4096], vec![7f32; 4096]);
    let mut call = |q: [usize; 3],
                    k: [usize; 3],
                    v: [usize; 3],
                    o: [usize; 3],
                    l: usize,
                    p: AttendParams<'_>,
                    w: Option<usize>| {
        let result = attention(
            &TensorRef::thd(&x, q).unwrap(),
            &TensorRef::thd(&x, k).unwrap(),
            &TensorRef::thd(&x, v).unwrap(),
            &p,
            w,
            &mut TensorMut::thd(&mut out, o).unwrap(),
            Some(&mut lse[..l]),
        );
        if result.is_err() {
            assert!(out.iter().chain(&lse).all(|x| *x == 7.0), "changed by a call that failed");
        }
        result.unwrap_err()
    };
    let p = AttendParams::new();
    let (q, kv) = ([2, 4, 16], [5, 2, 16]);
    assert!(matches!(call([0, 4, 16], kv, kv, [0, 4, 16], 0, p, None), Error::Shape { what: "q", .. }));
    assert!(matches!(call(q, [0, 2, 16], [0, 2, 16], q, 8, p, None), Error::Shape { what: "k", .. }));
    assert!(matches!(call(q, kv, [5, 2, 0], [2, 4, 0], 8, p, None), Error::Shape { what: "v", .. }));
    assert!(matches!(call(q, [4, 2, 16], kv, q, 8, p, None), Error::Shape { what: "k", .. }));
    assert!(matches!(call(q, [5, 1, 16], kv, q, 8, p, None), Error::Shape { what: "k", .. }));
    assert!(matches!(call(q, [5, 2, 32], kv, q, 8, p, None), Error::Shape { what: "k", .. }));
    assert!(matches!(call(q, kv, kv, [2, 4, 32], 8, p, None), Error::Shape { what: "out", .. }));
    assert!(matches!(
        call([2, 3, 16], kv, kv, [2, 3, 16], 6, p, None),
        Error::Unsupported { what: "query heads", .. }
    ));
    assert!(matches!(
        call([2, 4, 8], [5, 2, 8], kv, q, 8, p, None),
        Error::Unsupported { what: "key_dim", .. }
    ));
    assert!(matches!(
        call(q, kv, [5, 2, 17], [2, 4, 17], 8, p, None),
        Error::Unsupported { what: "value_dim", .. }
    ));
    assert!(matches!(call(q, kv, kv, q, 7, p, None), Error::Length { what: "lse", expected: 8, got: 7 }));
    assert!(matches!(call(q, kv, kv, q, 8, p, Some(0)), Error::Unsupported { what: "sliding_window", .. }));
    let p2 = p.with_scale(f32::NAN);
    assert!(matches!(call(q, kv, kv, q, 8, p2, None), Error::Unsupported { what: "scale", .. }));
    let p2 = p.with_softcap(0.0);
    assert!(matches!(call(q, kv, kv, q, 8, p2, None), Error::Unsupported { what: "softcap", .. }));
    let p2 = p.with_sink_logits(&[0.0; 3]);
    assert!(matches!(
        call(q, kv, kv, q, 8, p2, None),
        Error::Length { what: "sink_logits", expected: 4, got: 3 }
    ));

    let (mut a, mut la) = (vec![1f32; 8], vec![0f32; 2]);
    let mut merge = |o: [usize; 3], b: [usize; 3], n: usize, m: usize| {
        let other = TensorRef::thd(&x, b).unwrap();
        merge_states(&mut TensorMut::thd(&mut a, o).unwrap(), &mut la[..n], &other, &x[..m]).unwrap_err()
    };
    assert!(matches!(merge([1, 2, 4], [2, 1, 4], 2, 2), Error::Shape { what: "other_out", .. }));
    assert!(matches!(merge([1, 2, 4], [1, 2, 4], 1, 2), Error::Length { what: "lse", .. }));
    assert!(matches!(merge([1, 2, 4], [1, 2, 4], 2, 3), Error::Length { what: "other_lse", .. }));
}

//! NaN, infinity, huge, constant and all-zero values: defined results, never an error.

use crate::formats::{Rng, distance, formats};
use crate::host::Host;
use crate::machine::{self, Machine, Query};
use crate::reference::{Problem, worst};
use half::f16;
use qkv::cache::{Batch, Seat};
use qkv::*;

/// Every test of this suite that any machine runs.
macro_rules! every_test {
    ($machine:expr, $suite:ident) => {
        $crate::machine::on!(
            $machine,
            $suite: a_bad_value_spoils_its_group_only,
            a_nan_key_spoils_rows_that_see_it_and_a_nan_value_its_channels,
            a_sliding_window_hides_nan,
            zero_constant_and_huge_values,
            ranges_beyond_f16,
            the_largest_head_is_one_group_for_every_fit,
            huge_values_are_clamped_by_an_f16_window
        );
    };
}
pub(crate) use every_test;

const N: usize = 200;
const D: usize = 64;

fn cache<M: Machine>(m: &M, key: Format, value: Format) -> (PagedKvCache<M::B>, Seat) {
    let config = CacheConfig::new(1, 1, D).with_key(key).with_value(value).with_capacity(1, 512);
    let config = config.with_scales(Scales::new(1, vec![0.01], vec![0.01]).unwrap());
    // Nothing is clamped on the way where a window can be f32.
    let window = if M::WINDOWS.contains(&Dtype::F32) { Dtype::F32 } else { Dtype::F16 };
    let mut cache = m.paged(config.with_window_dtype(window), 8).unwrap();
    let seat = cache.open().unwrap();
    (cache, seat)
}

fn step<M: Machine>(m: &M, cache: &mut PagedKvCache<M::B>, seat: Seat, k: &[f32], v: &[f32]) {
    let n = k.len() / D;
    cache.reserve(seat, n).unwrap();
    cache.begin_step(&Batch::new(&[seat], &[0, n as i32])).unwrap();
    machine::append(m, cache, 0, k, v).unwrap();
}

/// One more token, and what its query heads get.
fn ask<M: Machine>(
    m: &M,
    cache: &mut PagedKvCache<M::B>,
    seat: Seat,
    (k, v): (&[f32], &[f32]),
    q: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    step(m, cache, seat, k, v);
    let answer = Query::new::<M>(q, q.len() / D).attend(m, cache, 0).unwrap();
    (answer.out, answer.lse)
}

fn held<M: Machine>(m: &M, cache: &PagedKvCache<M::B>, seat: Seat) -> (Vec<f32>, Vec<f32>) {
    let [k, v] = machine::held(m, cache, 0, seat);
    (k, v)
}

/// Values with one bad element in the page part: (channel, token).
fn with(at: (usize, usize), bad: f32, mut x: Vec<f32>) -> Vec<f32> {
    x[at.1 * D + at.0] = bad;
    x
}

pub(crate) fn a_bad_value_spoils_its_group_only<M: Machine>(m: &M) {
    let mut rng = Rng::new(5);
    let (k, v) = (rng.numbers(N * D), rng.numbers(N * D));
    let (token, channel) = (40, 37);
    for format in formats(D, false) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (mut c, seat) = cache(m, format, format);
            let (bk, bv) = (with((channel, token), bad, k.clone()), with((channel, token), bad, v.clone()));
            step(m, &mut c, seat, &bk, &bv);
            let (dk, dv) = held(m, &c, seat);
            let mut group = vec![];
            match &format {
                Format::Affine(a) => {
                    let rotated = |ch: usize| match a.rotate {
                        Some(b) => (ch / b * b, b),
                        None => (ch, 1),
                    };
                    for t in 0..N {
                        for ch in 0..D {
                            let (base, width) = rotated(channel);
                            let spoiled = match a.axis {
                                // All rotated channels of the block are bad, and so are their groups.
                                Axis::PerToken => {
                                    let (lo, hi) = (
                                        base / a.group * a.group,
                                        (base + width).div_ceil(a.group) * a.group,
                                    );
                                    let (lo, hi) =
                                        a.rotate.map_or((lo, hi), |b| (lo / b * b, hi.div_ceil(b) * b));
                                    t == token && (lo..hi).contains(&ch)
                                }
                                Axis::PerChannel => {
                                    t / a.group == token / a.group && (base..base + width).contains(&ch)
                                }
                            };
                            // Sinks of tile 0 are exact.
                            if spoiled && t >= 4 {
                                group.push(t * D + ch);
                            }
                        }
                    }
                }
                // Floating formats keep NaN as it is; FP8 and F16 saturate infinity.
                _ if bad.is_nan() => group.push(token * D + channel),
                _ => {}
            }
            for (name, x) in [("key", &dk), ("value", &dv)] {
                let nan: Vec<usize> = (0..N * D).filter(|i| x[*i].is_nan()).collect();
                assert_eq!(nan, group, "{name} {format:?} with {bad}");
            }
        }
    }
}

pub(crate) fn a_nan_key_spoils_rows_that_see_it_and_a_nan_value_its_channels<M: Machine>(m: &M) {
    let mut rng = Rng::new(6);
    let (k, v, q) = (rng.numbers(N * D), rng.numbers(N * D), rng.numbers(2 * D));
    let token = rng.numbers(D);
    for format in formats(D, false) {
        let keys = with((3, 20), f32::NAN, k.clone());
        let (mut c, seat) = cache(m, format, format);
        step(m, &mut c, seat, &keys, &v);
        let (out, lse) = ask(m, &mut c, seat, (&token, &token), &q);
        assert!(out.iter().all(|x| x.is_nan()) && lse.iter().all(|x| x.is_nan()), "key, {format:?}");

        let values = with((3, 20), f32::NAN, v.clone());
        let (mut c, seat) = cache(m, format, format);
        step(m, &mut c, seat, &k, &values);
        let (out, lse) = ask(m, &mut c, seat, (&token, &token), &q);
        let (_, held) = held(m, &c, seat);
        assert!(lse.iter().all(|x| x.is_finite()), "value, {format:?}");
        for (i, x) in out.iter().enumerate() {
            let spoiled = (0..N).any(|t| held[t * D + i % D].is_nan());
            assert_eq!(x.is_nan(), spoiled, "channel {} of {format:?}", i % D);
        }
    }
}

pub(crate) fn a_sliding_window_hides_nan<M: Machine>(m: &M) {
    let mut rng = Rng::new(7);
    for format in formats(D, false) {
        let config =
            CacheConfig::new(1, 1, D).with_key(format).with_value(format).with_sliding_window(Some(70));
        let config = config.with_scales(Scales::unit(1)).with_capacity(1, 512);
        let mut c = m.paged(config, 8).unwrap();
        let seat = c.open().unwrap();
        let k = with((3, 60), f32::NAN, rng.numbers(N * D));
        step(m, &mut c, seat, &k, &k);
        let token = rng.numbers(D);
        let (out, lse) = ask(m, &mut c, seat, (&token, &token), &token);
        // Token 60 and everything in its group of tokens lies below 200 + 1 - 70.
        assert!(out.iter().chain(&lse).all(|x| x.is_finite()), "{format:?}");
    }
}

pub(crate) fn zero_constant_and_huge_values<M: Machine>(m: &M) {
    for format in formats(D, false) {
        let (mut c, seat) = cache(m, format, format);
        step(m, &mut c, seat, &vec![0.0; N * D], &vec![0.0; N * D]);
        let (k, v) = held(m, &c, seat);
        assert!(k.iter().chain(&v).all(|x| *x == 0.0), "zero, {format:?}");
        let (out, _) = ask(m, &mut c, seat, (&[1.0; D], &[0.0; D]), &[1.0; D]);
        assert!(out.iter().all(|x| *x == 0.0), "{format:?}");

        if format.as_affine().is_some_and(|a| a.rotate.is_none()) {
            let (mut c, seat) = cache(m, format, format);
            step(m, &mut c, seat, &vec![0.3; N * D], &vec![-7.1; N * D]);
            let (k, v) = held(m, &c, seat);
            let in_pages = 4 * D..128 * D;
            let (a, b) = (half::f16::from_f32(0.3).to_f32(), half::f16::from_f32(-7.1).to_f32());
            assert!(k[in_pages.clone()].iter().all(|x| *x == a), "constant, {format:?}");
            assert!(v[in_pages].iter().all(|x| *x == b), "constant, {format:?}");
        }

        let (mut c, seat) = cache(m, format, format);
        let huge = with((5, 70), 1e30, vec![1.0; N * D]);
        step(m, &mut c, seat, &huge, &huge);
        let (k, v) = held(m, &c, seat);
        assert!(k.iter().chain(&v).all(|x| x.is_finite() || format == Format::Bf16), "huge, {format:?}");
        if format.as_affine().is_some_and(|a| a.rotate.is_none()) || format == Format::F16 {
            assert_eq!(c.stats().clamped_values, 2, "{format:?}");
        }
    }
}

/// Ranges whose step no f16 holds: pairs saturate, and attention sees what the cache says it holds.
pub(crate) fn ranges_beyond_f16<M: Machine>(m: &M) {
    let mut rng = Rng::new(9);
    for format in formats(D, false) {
        let (mut c, seat) = cache(m, format, format);
        let huge = |rng: &mut Rng| {
            (0..N * D)
                .map(|_| rng.pick(&[-65_000.0, 65_000.0, -60_000.0, 40_000.0, 3.0]))
                .collect::<Vec<f32>>()
        };
        let (k, v) = (huge(&mut rng), huge(&mut rng));
        step(m, &mut c, seat, &k, &v);
        // Small queries, so that not one token takes all.
        let q: Vec<f32> = rng.numbers(2 * D).iter().map(|x| f16::from_f32(x * 2e-5).to_f32()).collect();
        for prefill in [false, true] {
            let (mut tokens, (k, v)) = (held(m, &c, seat), (&k[..D], &v[..D]));
            let (out, lse) = if prefill {
                c.reserve(seat, 1).unwrap();
                c.begin_step(&Batch::new(&[seat], &[0, 1])).unwrap();
                let answer = Query::new::<M>(&q, 2).prefill(m, &mut c, 0, k, v).unwrap();
                let new = |x: &[f32]| Host::new(M::QUERIES[0], x).f32();
                tokens.0.extend(new(k));
                tokens.1.extend(new(v));
                (answer.out, answer.lse)
            } else {
                let answer = ask(m, &mut c, seat, (k, v), &q);
                tokens = held(m, &c, seat);
                answer
            };
            let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
            let (q, k, v) = (wide(&q), wide(&tokens.0), wide(&tokens.1));
            let problem = Problem::causal(&q, &k, &v, [2, 1], [D, D]);
            let (want, want_lse) = problem.solve();
            assert!(want.iter().chain(&want_lse).all(|x| x.is_finite()), "{format:?} holds no numbers");
            let far = distance(&out, &want);
            assert!(far <= M::ERROR, "{format:?}, prefill {prefill}: {far:e} from f64");
            let lse = worst(&lse, &want_lse).unwrap_or(f64::INFINITY);
            assert!(lse <= 2.0 * M::ERROR * want_lse[0].abs().max(1.0), "{format:?}: LSE {lse:e}");
        }
    }
}

/// The whole head is one group, up to the largest head and whatever the fit.
pub(crate) fn the_largest_head_is_one_group_for_every_fit<M: Machine>(m: &M) {
    for (dim, fit) in
        [(320, Fit::ErrorOptimal), (512, Fit::HQQ), (512, Fit::ErrorOptimal), (512, Fit::MinMax)]
    {
        let config = |format: Affine| {
            let c = CacheConfig::new(1, 1, format.group).with_key(format).with_value(format).with_sinks(0);
            c.with_residual(Some(0)).with_capacity(1, 64)
        };
        if dim > M::LARGEST_GROUP {
            let x = m.input(Dtype::F32, &Rng::new(7).numbers(64 * dim));
            let t = M::view(&x, [64, 1, dim]);
            let refused = m
                .contiguous(config(Affine::per_token(Bits::B4, dim).with_fit(fit)))
                .and_then(|mut c| c.append(0, &t, &t));
            assert!(matches!(refused, Err(Error::Unsupported { what: "key format", .. })), "{refused:?}");
        }
        let dim = dim.min(M::LARGEST_GROUP);
        for bits in Bits::ALL {
            let format = Affine::per_token(bits, dim).with_fit(fit);
            let mut c = m.contiguous(config(format)).unwrap();
            let x = Rng::new(7).numbers(64 * dim);
            let input = m.input(Dtype::F32, &x);
            let t = M::view(&input, [64, 1, dim]);
            c.append(0, &t, &t).unwrap();
            let [k, v] = machine::held(m, c.paged(), 0, Seat::new(0));
            let mean = x.iter().zip(&k).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / x.len() as f32;
            let power = x.iter().map(|a| a * a).sum::<f32>() / x.len() as f32;
            assert!(
                (mean < power || bits.get() < 3) && mean.is_finite() && k == v,
                "{dim} {bits:?} {fit:?}: {mean} of {power}"
            );
        }
    }
}

/// A window of f16 clamps what an f16 does not hold, where the value waits and where it goes straight into a page.
pub(crate) fn huge_values_are_clamped_by_an_f16_window<M: Machine>(m: &M) {
    for chunk in [N, 10] {
        let format = Affine::per_token(Bits::B8, D);
        let config = CacheConfig::new(1, 1, D).with_key(format).with_value(format).with_capacity(1, 512);
        let mut c = m.paged(config, 8).unwrap();
        let seat = c.open().unwrap();
        let mut x = vec![0.25; N * D];
        for (token, value) in [(1, 1e30), (70, -1e30), (N - 1, 1e6)] {
            x[token * D] = value; // a sink, a page, the window
        }
        for x in x.chunks(chunk * D) {
            step(m, &mut c, seat, x, x);
        }
        let (k, v) = held(m, &c, seat);
        assert!(k.iter().chain(&v).all(|x| x.is_finite()));
        assert_eq!((k[D], k[(N - 1) * D], v[D]), (65504.0, 65504.0, 65504.0));
        assert!((k[70 * D] + 65504.0).abs() < 64.0);
        assert_eq!(c.stats().clamped_values, 6, "chunks of {chunk}");
        // What is decoded into the window may be beyond the largest f16 too.
        c.truncate(seat, 100).unwrap();
        assert!(held(m, &c, seat).0.iter().all(|x| x.is_finite()));
    }
}

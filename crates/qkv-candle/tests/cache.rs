//! The cache behind candle tensors, against plain attention over the tensors themselves.

use candle_core::{DType, Device, Result, Tensor};
use qkv::{AttendParams, Bits, CacheConfig, Dtype, Format};
use qkv_candle::{Cache, LayerCache};

const KV: usize = 2;
const HEADS: usize = 6;
const DIM: usize = 32;

/// Half precision, f32 window: what is stored is what came, but for the rounding of closed tiles to f16.
fn config(layers: usize, batch: usize) -> CacheConfig {
    CacheConfig::new(layers, KV, DIM)
        .with_key(Format::F16)
        .with_value(Format::F16)
        .with_window_dtype(Dtype::F32)
        .with_capacity(batch, 512)
}

fn normal(b: usize, h: usize, t: usize) -> Tensor {
    Tensor::randn(0f32, 1.0, (b, h, t, DIM), &Device::Cpu).unwrap()
}

/// Causal attention in f32, written as plainly as candle allows.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let f32 = |x: &Tensor| x.to_dtype(DType::F32)?.contiguous();
    let (q, k, v) = (f32(q)?, f32(k)?, f32(v)?);
    let (b, h, n, d) = q.dims4()?;
    let (_, kv, t, _) = k.dims4()?;
    let repeat = |x: &Tensor| x.unsqueeze(2)?.broadcast_as((b, kv, h / kv, t, d))?.reshape((b, h, t, d));
    let scores = (q.matmul(&repeat(&k)?.transpose(2, 3)?)? / (d as f64).sqrt())?;
    let mask =
        (0..n).flat_map(|i| (0..t).map(move |j| if j <= t - n + i { 0f32 } else { f32::NEG_INFINITY }));
    let mask = Tensor::from_vec(mask.collect::<Vec<_>>(), (1, 1, n, t), &Device::Cpu)?;
    let scores = scores.broadcast_add(&mask)?;
    let e = scores.broadcast_sub(&scores.max_keepdim(3)?)?.exp()?;
    e.broadcast_div(&e.sum_keepdim(3)?)?.matmul(&repeat(&v)?)
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let f32 = |x: &Tensor| x.to_dtype(DType::F32).unwrap().contiguous().unwrap();
    (f32(a) - f32(b)).unwrap().abs().unwrap().max_all().unwrap().to_scalar().unwrap()
}

#[test]
fn prompt_and_single_tokens_of_several_layers_agree_with_plain_attention() {
    let (layers, batch) = (3, 2);
    let cache = Cache::new(config(layers, batch)).unwrap();
    let mut all: Vec<Option<(Tensor, Tensor)>> = vec![None; layers];
    // A prompt that goes through prefill, then steps that close tiles on the way.
    for n in [150, 1, 1, 40, 1, 64, 3] {
        for (i, layer) in cache.layers().iter().enumerate() {
            let (q, k, v) = (normal(batch, HEADS, n), normal(batch, KV, n), normal(batch, KV, n));
            let out = layer.attend(&q, &k, &v, &AttendParams::new()).unwrap();
            let (k, v) = match all[i].take() {
                Some((a, b)) => (Tensor::cat(&[&a, &k], 2).unwrap(), Tensor::cat(&[&b, &v], 2).unwrap()),
                None => (k, v),
            };
            assert!(largest_difference(&out, &reference(&q, &k, &v).unwrap()) < 2e-3);
            all[i] = Some((k, v));
        }
        assert_eq!(cache.current_seq_len().unwrap(), all[0].as_ref().unwrap().0.dim(2).unwrap());
    }
    assert!(cache.bytes_used().unwrap() <= cache.bytes_allocated().unwrap());
}

#[test]
fn views_give_the_same_bits_as_contiguous_tensors() {
    // [b, t, h, d] as models have it, a slice of a wider tensor, and a last dimension that is not contiguous.
    let views: [fn(&Tensor) -> Result<Tensor>; 4] = [
        |x| x.transpose(1, 2)?.contiguous()?.transpose(1, 2),
        |x| Tensor::cat(&[x, x, x], 2)?.narrow(2, x.dim(2)?, x.dim(2)?),
        |x| x.transpose(2, 3)?.contiguous()?.transpose(2, 3),
        |x| Tensor::cat(&[x, x], 3)?.narrow(3, DIM, DIM),
    ];
    for n in [5, 100] {
        let (q, k, v) = (normal(1, HEADS, n), normal(1, KV, n), normal(1, KV, n));
        let run = |view: fn(&Tensor) -> Result<Tensor>| {
            let layer = Cache::new(config(1, 1).with_bits(Bits::B4)).unwrap().layer(0).unwrap();
            let (q, k, v) = (view(&q).unwrap(), view(&k).unwrap(), view(&v).unwrap());
            layer.attend(&q, &k, &v, &AttendParams::new()).unwrap()
        };
        let plain = run(|x| Ok(x.clone()));
        for view in views {
            assert!(!view(&q).unwrap().is_contiguous());
            assert_eq!(largest_difference(&plain, &run(view)), 0.0);
        }
    }
}

#[test]
fn every_dtype_comes_back_as_it_went_in() {
    let (q, k, v) = (normal(1, HEADS, 7), normal(1, KV, 7), normal(1, KV, 7));
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 5e-3), (DType::BF16, 4e-2)] {
        let to = |x: &Tensor| x.to_dtype(dtype).unwrap();
        let layer = Cache::new(config(1, 1)).unwrap().layer(0).unwrap();
        let out = layer.attend(&to(&q), &to(&k), &to(&v), &AttendParams::new()).unwrap();
        assert_eq!(out.dtype(), dtype);
        let expected = reference(&to(&q), &to(&k), &to(&v)).unwrap();
        assert!(largest_difference(&out, &expected) < tolerance, "{dtype:?}");
        let dense =
            Cache::new(config(1, 1)).unwrap().layer(0).unwrap().append_dense(&to(&k), &to(&v)).unwrap();
        assert_eq!((dense.0.dtype(), dense.1.dtype()), (dtype, dtype));
        assert_eq!(largest_difference(&dense.0, &to(&k)), 0.0);
    }
}

#[test]
fn append_dense_is_a_drop_in_for_a_plain_cache() {
    let cache = Cache::new(config(2, 2)).unwrap();
    let mut all: Vec<Option<(Tensor, Tensor)>> = vec![None; 2];
    for n in [100, 1, 30, 1] {
        for (i, layer) in cache.layers().iter().enumerate() {
            let (k, v) = (normal(2, KV, n), normal(2, KV, n));
            let (dense_k, dense_v) = layer.append_dense(&k, &v).unwrap();
            let (k, v) = match all[i].take() {
                Some((a, b)) => (Tensor::cat(&[&a, &k], 2).unwrap(), Tensor::cat(&[&b, &v], 2).unwrap()),
                None => (k, v),
            };
            // Closed tiles are rounded to f16, nothing else is.
            assert!(largest_difference(&dense_k, &k) < 4e-3);
            assert!(largest_difference(&dense_v, &v) < 4e-3);
            let newest = |x: &Tensor| x.narrow(2, x.dim(2).unwrap() - n.min(64), n.min(64)).unwrap();
            assert_eq!(largest_difference(&newest(&dense_k), &newest(&k)), 0.0);
            all[i] = Some((k, v));
        }
    }
}

#[test]
fn reset_and_truncate_reach_all_layers() {
    let cache = Cache::new(config(2, 1)).unwrap();
    let layers = cache.layers();
    let step = |n| {
        let (q, k, v) = (normal(1, HEADS, n), normal(1, KV, n), normal(1, KV, n));
        layers.iter().for_each(|l| drop(l.attend(&q, &k, &v, &AttendParams::new()).unwrap()));
    };
    step(90);
    cache.truncate(50).unwrap();
    assert_eq!(layers[1].current_seq_len().unwrap(), 50);
    step(1);
    assert_eq!(cache.current_seq_len().unwrap(), 51);
    // A reset in the middle of a step takes the open step away too.
    let (k, v) = (normal(1, KV, 1), normal(1, KV, 1));
    layers[0].append(&k, &v).unwrap();
    layers[0].reset().unwrap();
    assert_eq!(cache.current_seq_len().unwrap(), 0);
    step(3);
    assert_eq!(cache.current_seq_len().unwrap(), 3);
}

/// Keys and values as they are stored.
fn stored(layer: &LayerCache) -> Vec<f32> {
    let cache = layer.cache().lock().unwrap();
    let len = cache.len(0);
    let (mut k, mut v) = (vec![0f32; len * KV * DIM], vec![0f32; len * KV * DIM]);
    let mut ko = qkv::TensorMut::thd(&mut k[..], [len, KV, DIM]).unwrap();
    let mut vo = qkv::TensorMut::thd(&mut v[..], [len, KV, DIM]).unwrap();
    cache.dequantize(layer.layer(), 0, &mut ko, &mut vo).unwrap();
    k.extend(v);
    k
}

#[test]
fn errors_say_what_is_wrong_and_change_nothing() {
    let cache = Cache::new(config(1, 1).with_bits(Bits::B4)).unwrap();
    let layer = cache.layer(0).unwrap();
    let (q, k, v) = (normal(1, HEADS, 100), normal(1, KV, 100), normal(1, KV, 100));
    layer.attend(&q, &k, &v, &AttendParams::new()).unwrap();
    let before = stored(&layer);

    let (q, k, v) = (normal(1, HEADS, 2), normal(1, KV, 2), normal(1, KV, 2));
    let three_heads = normal(1, 3, 2);
    let longer = normal(1, KV, 3);
    let integers = k.to_dtype(DType::U32).unwrap();
    let flat = q.flatten_from(2).unwrap();
    let plain = AttendParams::new();
    let sink = [0f32; HEADS - 1];
    let cases: [(&Tensor, &Tensor, &Tensor, AttendParams, &str); 11] = [
        (&q, &longer, &v, plain, "k: expected shape"),
        (&q, &k, &longer, plain, "v: expected shape"),
        (&q, &three_heads, &v, plain, "k: expected shape"),
        (&three_heads, &k, &v, plain, "q: expected shape"),
        (&flat, &k, &v, plain, "q: expected shape"),
        (&q, &integers, &v, plain, "k: expected dtype"),
        (&q.to_dtype(DType::F64).unwrap(), &k, &v, plain, "q: expected dtype"),
        (&q, &k, &v, plain.with_scale(f32::NAN), "scale"),
        (&q, &k, &v, plain.with_softcap(-1.0), "softcap"),
        (&q, &k, &v, plain.with_sink_logits(&sink), "sink_logits"),
        (&q, &k, &v, plain.with_bidirectional(&[(0, 2)]), "bidirectional"),
    ];
    for (q, k, v, params, part) in &cases {
        let e = layer.attend(q, k, v, params).unwrap_err().to_string();
        assert!(e.contains(part), "{part}: {e}");
        assert_eq!(stored(&layer), before, "{part}");
    }
    let much = normal(1, KV, 413);
    let e = layer.attend(&normal(1, HEADS, 413), &much, &much, &plain).unwrap_err().to_string();
    assert!(e.contains("413") || e.contains("needed"), "{e}");
    assert!(layer.append_dense(&longer, &v).is_err());
    assert_eq!(stored(&layer), before);
    assert!(cache.layer(1).is_err());
    // It still works.
    layer.attend(&q, &k, &v, &plain).unwrap();
    assert_eq!(cache.current_seq_len().unwrap(), 102);
}

#[test]
fn a_cache_that_a_panicking_thread_held_is_an_error_not_a_panic() {
    let cache = Cache::new(config(1, 1)).unwrap();
    let held = cache.clone();
    let thread = std::thread::spawn(move || {
        let _guard = held.lock().unwrap();
        panic!("on purpose");
    });
    assert!(thread.join().is_err());
    let e = cache.current_seq_len().unwrap_err().to_string();
    assert!(e.contains("panicked"), "{e}");
    let k = normal(1, KV, 1);
    assert!(cache.layer(0).unwrap().append(&k, &k).is_err());
    assert!(cache.reset().is_err());
}

#[test]
fn direct_mode_attends_too() {
    let f = qkv::Fp8::e4m3(qkv::Granularity::TokenHead);
    let c = config(1, 1).with_key(f).with_value(f).direct();
    let layer = Cache::new(c).unwrap().layer(0).unwrap();
    let (mut ks, mut vs) = (Vec::new(), Vec::new());
    for n in [70, 1, 1] {
        let (q, k, v) = (normal(1, HEADS, n), normal(1, KV, n), normal(1, KV, n));
        ks.push(k.clone());
        vs.push(v.clone());
        let out = layer.attend(&q, &k, &v, &AttendParams::new()).unwrap();
        let exact = reference(&q, &Tensor::cat(&ks, 2).unwrap(), &Tensor::cat(&vs, 2).unwrap()).unwrap();
        let difference = largest_difference(&out, &exact);
        assert!(difference < 0.2, "{difference}");
    }
}

//! Decode attention through a cache: one query, 32 query heads, 8 kv heads, 128 channels.

use criterion::{BenchmarkId, Criterion, Throughput};
use qkv::{Affine, AttendParams, Bits, CacheConfig, Format, Fp8, Granularity, KvCache, TensorMut, TensorRef};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;

fn formats() -> Vec<(&'static str, Format, Format)> {
    let same = |name, f: Format| (name, f, f);
    let pair = |name, (k, v): (Format, Format)| (name, k, v);
    vec![
        same("f16", Format::F16),
        same("e4m3", Fp8::e4m3(Granularity::TokenHead).into()),
        pair("int8", CacheConfig::default_formats(Bits::B8, DIM)),
        same("int8 g32", Affine::per_token(Bits::B8, 32).into()),
        pair("int4", CacheConfig::default_formats(Bits::B4, DIM)),
        same("int4 g32", Affine::per_token(Bits::B4, 32).into()),
        pair("int3", CacheConfig::default_formats(Bits::B3, DIM)),
        pair("int2", CacheConfig::default_formats(Bits::B2, DIM)),
        pair("int1", CacheConfig::default_formats(Bits::B1, DIM)),
    ]
}

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut s = seed;
    (0..n)
        .map(|_| {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (s >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// A cache with this many tokens; the last one came on its own, so that it can be attended again and again.
fn filled(key: Format, value: Format, tokens: usize) -> KvCache {
    let config = CacheConfig::new(1, KV_HEADS, DIM).with_key(key).with_value(value).with_capacity(1, tokens);
    let mut cache = KvCache::new(config).unwrap();
    let mut left = tokens;
    while left > 0 {
        let n = if left > 1 { (left - 1).min(512) } else { 1 };
        let x = numbers(n * KV_HEADS * DIM, left as u32);
        let t = TensorRef::thd(&x, [n, KV_HEADS, DIM]).unwrap();
        cache.append(0, &t, &t).unwrap();
        left -= n;
    }
    cache
}

/// Milliseconds of one call; the throughput is that of the bytes in use.
pub(crate) fn decode(c: &mut Criterion) {
    let q = numbers(HEADS * DIM, 1);
    let mut out = vec![0f32; HEADS * DIM];
    for tokens in [4096, 16384] {
        let mut group = c.benchmark_group(format!("decode attention, {tokens} tokens"));
        for (name, key, value) in formats() {
            let mut cache = filled(key, value, tokens);
            group.throughput(Throughput::Bytes(cache.bytes_used() as u64));
            group.bench_function(BenchmarkId::from_parameter(name), |b| {
                b.iter(|| {
                    let q = TensorRef::thd(&q, [1, HEADS, DIM]).unwrap();
                    let mut out = TensorMut::thd(&mut out, [1, HEADS, DIM]).unwrap();
                    cache.attend(0, &q, &AttendParams::new(), &mut out, None).unwrap();
                });
            });
        }
        group.finish();
    }
}

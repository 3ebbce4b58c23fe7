//! What is measured: formats by name, and caches of them.

use crate::gpu::Gpu;
use crate::still::Still;
use qkv::layout::PageLayout;
use qkv::{Affine, Bits, CacheConfig, Format, Fp8, Granularity, Scales};

/// Keys' and values' formats under a name.
pub(crate) type Named = (String, Format, Format);

/// Every format that decode attention takes: plain, FP8, and both ways of every width, for heads of `d` channels.
pub(crate) fn formats(d: usize) -> Vec<Named> {
    let same = |name: &str, f: Format| (name.to_string(), f, f);
    let mut all = vec![
        same("f16", Format::F16),
        same("bf16", Format::Bf16),
        same("e4m3, scale a head", Fp8::e4m3(Granularity::Head).into()),
        same("e4m3, scale a token and head", Fp8::e4m3(Granularity::TokenHead).into()),
        same("e5m2, scale a token and head", Fp8::e5m2(Granularity::TokenHead).into()),
    ];
    for bits in Bits::ALL.into_iter().rev() {
        let (key, value) = CacheConfig::default_formats(bits, d);
        let one_pair = Format::from(Affine::per_token(bits, d));
        if (key, value) != (one_pair, one_pair) {
            all.push((format!("int{} default", bits.get()), key, value));
        }
        all.push(same(&format!("int{} one pair", bits.get()), one_pair));
        if bits == Bits::B8 {
            all.push(same("int8 groups of 32", Affine::per_token(bits, 32).into()));
        }
    }
    all
}

/// A cache of one layer, in windowed mode with the default window and sinks.
pub(crate) fn config(key: Format, value: Format, heads: usize, d: usize) -> CacheConfig {
    let scales = Scales::new(1, vec![0.02; heads], vec![0.03; heads]).expect("a scale a head");
    CacheConfig::new(1, heads, d).with_key(key).with_value(value).with_scales(scales)
}

/// The fewest bytes that attention of the open step can move: packed tiles and exact rows that are seen, queries, outputs in f16,
/// and LSE where it is written. Lengths are those that the device has.
pub(crate) fn least_bytes(gpu: &Gpu, still: &Still, group: usize, lse: bool) -> usize {
    let c = &still.config;
    let lengths = gpu.down(&still.lengths);
    let at = PageLayout::new(&c.layers[0].key, &c.layers[0].value, c.key_dim, c.value_dim);
    let tile: usize = [at.key, at.value].iter().map(|o| o.code_bytes + o.pair_bytes).sum();
    let row = 2 * (c.key_dim + c.value_dim);
    let cached: usize = lengths
        .as_chunks::<2>()
        .0
        .iter()
        .map(|[len, packed]| {
            let (len, packed) = (*len as usize, *packed as usize);
            let sinks = c.sinks.min(len);
            packed / 64 * tile + (sinks + len - packed.max(sinks)) * row
        })
        .sum();
    let query_heads = lengths.len() / 2 * c.kv_heads * group;
    c.kv_heads * cached + query_heads * (row + if lse { 4 } else { 0 })
}

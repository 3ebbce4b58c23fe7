//! The same tokens in any chunks give the same pages, window and output.

use super::model::*;
use qkv::*;

fn run(
    config: &CacheConfig,
    tokens: &[Token],
    chunks: &[usize],
    rng_seed: u64,
) -> (Vec<Vec<u8>>, Vec<f32>, Vec<f32>) {
    let mut cache = KvCache::new(config.clone()).unwrap();
    let feed = |cache: &mut KvCache, part: &[Token]| {
        for layer in 0..LAYERS {
            let (k, v) = layer_rows(part, layer);
            let dims = [part.len(), HEADS, DIM];
            cache
                .append(layer, &TensorRef::thd(&k, dims).unwrap(), &TensorRef::thd(&v, dims).unwrap())
                .unwrap();
        }
    };
    let mut at = 0;
    for n in chunks {
        feed(&mut cache, &tokens[at..at + n]);
        at += n;
    }
    // One later query.
    let mut rng = Rng(rng_seed | 1);
    let last = Token::random(&mut rng);
    feed(&mut cache, &[last]);
    let mut q = vec![0f32; 3 * HEADS * DIM];
    q.iter_mut().for_each(|x| *x = rng.f32());
    let mut outputs = vec![];
    for layer in 0..LAYERS {
        let mut out = vec![0f32; q.len()];
        let dims = [1, 3 * HEADS, DIM];
        let mut view = TensorMut::thd(&mut out, dims).unwrap();
        cache
            .attend(layer, &TensorRef::thd(&q, dims).unwrap(), &AttendParams::new(), &mut view, None)
            .unwrap();
        outputs.extend(out);
    }
    let n = cache.len(0);
    let packed = cache.paged().packed_len(cache::Seat::new(0)).unwrap();
    let pages = (0..packed / TILE)
        .flat_map(|t| (0..LAYERS).flat_map(move |l| (0..HEADS).map(move |h| (t, l, h))))
        .map(|(t, l, h)| cache.export_page(0, l, h, t).unwrap())
        .collect();
    let mut window = vec![];
    for layer in 0..LAYERS {
        let (mut k, mut v) = (vec![0f32; n * HEADS * DIM], vec![0f32; n * HEADS * DIM]);
        let dims = [n, HEADS, DIM];
        cache
            .dequantize(
                layer,
                0,
                &mut TensorMut::thd(&mut k, dims).unwrap(),
                &mut TensorMut::thd(&mut v, dims).unwrap(),
            )
            .unwrap();
        window.extend(k);
        window.extend(v);
    }
    (pages, window, outputs)
}

#[test]
fn any_split_gives_the_same_bits() {
    for case in 0..60u64 {
        let mut rng = Rng(case * 7919 + 17);
        let residual = [None, Some(0), Some(32), Some(64), Some(128), Some(192)][rng.below(6)];
        let direct = residual.is_none();
        let bits = Bits::ALL[rng.below(5)];
        let mut key = Affine::per_token(bits, 32);
        let mut value = Affine::per_token(bits, 32);
        if !direct {
            match rng.below(3) {
                0 => key = Affine::per_channel(bits, 32),
                1 => (key, value) = (key.with_center().with_rotation(32), value.with_rotation(32)),
                _ => value = Affine::per_channel(bits, 64),
            }
        }
        let config = CacheConfig::new(LAYERS, HEADS, DIM)
            .with_key(key)
            .with_value(value)
            .with_residual(residual)
            .with_sinks(if direct { 0 } else { [0, 4, 16][rng.below(3)] })
            .with_window_dtype([Dtype::F16, Dtype::Bf16, Dtype::F32][rng.below(3)])
            .with_capacity(1, 640);
        let n = 1 + rng.below(600);
        // Full f32 values: entering the window rounds them, and so must going straight into a tile.
        let tokens: Vec<Token> = (0..n)
            .map(|_| {
                let mut x = || (0..LAYERS * HEADS * DIM).map(|_| rng.f32()).collect();
                Token { k: x(), v: x() }
            })
            .collect();
        let one_shot = run(&config, &tokens, &[n], case);
        for _ in 0..3 {
            let mut chunks = vec![];
            let mut left = n;
            let size = [1, 7, 64, 200][rng.below(4)];
            while left > 0 {
                let c = (1 + rng.below(size)).min(left);
                chunks.push(c);
                left -= c;
            }
            let split = run(&config, &tokens, &chunks, case);
            assert!(one_shot.0 == split.0, "pages differ: case {case}, chunks {chunks:?}, {config:?}");
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&one_shot.1), bits(&split.1), "window: case {case}, {config:?}");
            assert_eq!(bits(&one_shot.2), bits(&split.2), "output: case {case}, {config:?}");
            assert!(one_shot.2.iter().all(|x| x.is_finite()));
            assert!(one_shot.2.iter().any(|x| *x != 0.0), "the output is empty");
        }
    }
}

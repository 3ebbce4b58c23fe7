//! The same tokens in any chunks give the same pages, window and output.

use crate::machine::{Machine, Params, held};
use crate::model::*;
use qkv::*;

fn run<M: Machine>(
    m: &M,
    config: &CacheConfig,
    tokens: &[Token],
    chunks: &[usize],
    rng_seed: u64,
) -> (Vec<Vec<u8>>, Vec<f32>, Vec<f32>) {
    let mut cache = m.contiguous(config.clone()).unwrap();
    let feed = |cache: &mut KvCache<M::B>, part: &[Token]| {
        for layer in 0..LAYERS {
            let (k, v) = layer_rows(part, layer);
            let dims = [part.len(), HEADS, DIM];
            let (k, v) = (m.input(Dtype::F32, &k), m.input(Dtype::F32, &v));
            cache.append(layer, &M::view(&k, dims), &M::view(&v, dims)).unwrap();
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
        let (q, mut out) = (m.input(M::QUERIES[0], &q), m.output(Dtype::F32, q.len()));
        let (dims, held) = ([1, 3 * HEADS, DIM], m.hold(&Params::default()));
        let (view, mut to) = (M::view(&q, dims), M::view_mut(&mut out, dims));
        cache.attend(layer, &view, &M::params(&held), &mut to, None).unwrap();
        drop(to);
        outputs.extend(m.read(out));
    }
    let packed = cache.paged().packed_len(cache::Seat::new(0)).unwrap();
    let pages = (0..packed / TILE)
        .flat_map(|t| (0..LAYERS).flat_map(move |l| (0..HEADS).map(move |h| (t, l, h))))
        .map(|(t, l, h)| cache.export_page(0, l, h, t).unwrap())
        .collect();
    let window =
        (0..LAYERS).flat_map(|layer| held(m, cache.paged(), layer, cache::Seat::new(0)).concat()).collect();
    (pages, window, outputs)
}

/// The first so many cases.
pub(crate) fn any_split_gives_the_same_bits<M: Machine>(m: &M, cases: u64) {
    for case in 0..cases {
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
            .with_window_dtype(M::WINDOWS[rng.below(M::WINDOWS.len())])
            .with_capacity(1, 640);
        let n = 1 + rng.below(600);
        // Full f32 values: entering the window rounds them, and so must going straight into a tile.
        let tokens: Vec<Token> = (0..n)
            .map(|_| {
                let mut x = || (0..LAYERS * HEADS * DIM).map(|_| rng.f32()).collect();
                Token { k: x(), v: x() }
            })
            .collect();
        let one_shot = run(m, &config, &tokens, &[n], case);
        for _ in 0..3 {
            let mut chunks = vec![];
            let mut left = n;
            let size = [1, 7, 64, 200][rng.below(4)];
            while left > 0 {
                let c = (1 + rng.below(size)).min(left);
                chunks.push(c);
                left -= c;
            }
            let split = run(m, &config, &tokens, &chunks, case);
            assert!(one_shot.0 == split.0, "pages differ: case {case}, chunks {chunks:?}, {config:?}");
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&one_shot.1), bits(&split.1), "window: case {case}, {config:?}");
            assert_eq!(bits(&one_shot.2), bits(&split.2), "output: case {case}, {config:?}");
            assert!(one_shot.2.iter().all(|x| x.is_finite()));
            assert!(one_shot.2.iter().any(|x| *x != 0.0), "the output is empty");
        }
    }
}

//! Bad input: a typed error that says what was expected and what came, and a cache that is what it was.

use qkv::cache::{Batch, PagePool, Seat, SlotBatch, Stats};
use qkv::*;

const LAYERS: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 32;

fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

fn config() -> CacheConfig {
    CacheConfig::new(LAYERS, HEADS, DIM).with_capacity(3, 300)
}

/// Everything that can be seen of a cache.
#[derive(Debug, PartialEq)]
struct Seen {
    lens: Vec<Option<(usize, usize, Vec<i32>)>>,
    contents: Vec<Vec<u32>>,
    free: usize,
    used: usize,
    stats: Stats,
    open: bool,
    missing: Vec<usize>,
}

fn see(cache: &PagedKvCache) -> Seen {
    let seats: Vec<Seat> = (0..cache.config().max_sequences as u32).map(Seat::new).collect();
    let mut contents = vec![];
    for s in seats.iter().filter(|s| cache.len(**s).is_ok()) {
        let n = cache.len(*s).unwrap();
        for layer in 0..LAYERS {
            let (mut k, mut v) = (vec![0f32; n * HEADS * DIM], vec![0f32; n * HEADS * DIM]);
            let dims = [n, HEADS, DIM];
            let (mut ko, mut vo) =
                (TensorMut::thd(&mut k, dims).unwrap(), TensorMut::thd(&mut v, dims).unwrap());
            if cache.dequantize(layer, *s, &mut ko, &mut vo).is_ok() {
                contents.push(k.iter().chain(&v).map(|x| x.to_bits()).collect());
            }
        }
    }
    let seat = |s: &Seat| {
        Some((cache.len(*s).ok()?, cache.packed_len(*s).ok()?, cache.block_table(*s).ok()?.to_vec()))
    };
    Seen {
        lens: seats.iter().map(seat).collect(),
        contents,
        free: cache.pool().free_blocks(),
        used: cache.bytes_used(),
        stats: cache.stats(),
        open: cache.step().sequences().iter().any(|_| cache.step().missing().len() < LAYERS),
        missing: cache.step().missing(),
    }
}

fn kv(rows: usize, seed: u64) -> (Vec<f32>, Vec<f32>) {
    (numbers(rows * HEADS * DIM, seed), numbers(rows * HEADS * DIM, seed + 1))
}

fn filled() -> (PagedKvCache, Seat, Seat) {
    let pool = PagePool::new(&config(), 8).unwrap();
    let mut cache = PagedKvCache::new(config(), pool).unwrap();
    let (a, b) = (cache.open().unwrap(), cache.open().unwrap());
    step(&mut cache, &[a, b], &[0, 200, 290]);
    (cache, a, b)
}

fn step(cache: &mut PagedKvCache, seats: &[Seat], starts: &[i32]) {
    for (i, s) in seats.iter().enumerate() {
        cache.reserve(*s, (starts[i + 1] - starts[i]) as usize).unwrap();
    }
    cache.begin_step(&Batch::new(seats, starts)).unwrap();
    let rows = *starts.last().unwrap() as usize;
    for layer in 0..LAYERS {
        let (k, v) = kv(rows, 3 + layer as u64);
        let dims = [rows, HEADS, DIM];
        cache.append(layer, &TensorRef::thd(&k, dims).unwrap(), &TensorRef::thd(&v, dims).unwrap()).unwrap();
    }
}

/// Every refused call that needs no open step.
#[test]
fn refused_calls_change_nothing() {
    let (mut cache, a, b) = filled();
    let before = see(&cache);
    let gone = Seat::new(2);
    let far = Seat::new(99);
    let other_config = config().with_bits(Bits::B2);
    let mut other =
        PagedKvCache::new(other_config.clone(), PagePool::new(&other_config, 8).unwrap()).unwrap();
    let foreign = other.open().unwrap();
    step(&mut other, &[foreign], &[0, 200]);
    let foreign_prefix = other.prefix(foreign, 128).unwrap();
    let foreign_page = other.export_page(foreign, 0, 0, 0).unwrap();
    let page = cache.export_page(a, 1, 1, 0).unwrap();

    type Call<'a> = Box<dyn FnMut(&mut PagedKvCache) -> Result<()> + 'a>;
    let mut calls: Vec<(&str, Call<'_>)> = vec![
        ("close a seat never opened", Box::new(|c| c.close(gone))),
        ("close a seat out of range", Box::new(|c| c.close(far))),
        ("truncate beyond length", Box::new(|c| c.truncate(a, 201))),
        ("truncate unknown", Box::new(|c| c.truncate(gone, 0))),
        ("fork unknown", Box::new(|c| c.fork(gone).map(|_| ()))),
        ("prefix beyond length", Box::new(|c| c.prefix(a, 201).map(|_| ()))),
        ("prefix of another cache", Box::new(|c| c.open_with(&foreign_prefix).map(|_| ()))),
        (
            "append without a step",
            Box::new(|c| {
                let (k, v) = kv(1, 1);
                c.append(0, &TensorRef::thd(&k, [1, HEADS, DIM])?, &TensorRef::thd(&v, [1, HEADS, DIM])?)
            }),
        ),
        ("release what is seen", Box::new(|c| c.release_before(a, 64).map(|_| ()))),
        ("reserve beyond max_tokens", Box::new(|c| c.reserve(a, 101).map(|_| ()))),
        ("reserve usize::MAX", Box::new(|c| c.reserve(a, usize::MAX).map(|_| ()))),
        ("no seats", Box::new(|c| c.begin_step(&Batch::new(&[], &[0])))),
        ("seat twice", Box::new(|c| c.begin_step(&Batch::new(&[a, a], &[0, 1, 2])))),
        ("unknown seat", Box::new(|c| c.begin_step(&Batch::new(&[gone], &[0, 1])))),
        ("query_start too short", Box::new(|c| c.begin_step(&Batch::new(&[a, b], &[0, 1])))),
        ("query_start not from 0", Box::new(|c| c.begin_step(&Batch::new(&[a], &[1, 2])))),
        ("query_start descending", Box::new(|c| c.begin_step(&Batch::new(&[a, b], &[0, 3, 2])))),
        ("query_start negative", Box::new(|c| c.begin_step(&Batch::new(&[a], &[0, -1])))),
        ("too many tokens", Box::new(|c| c.begin_step(&Batch::new(&[a], &[0, 101])))),
        ("missing block", Box::new(|c| c.begin_step(&Batch::new(&[b], &[0, 64])))),
        (
            "slot mapping too short",
            Box::new(|c| c.begin_step(&Batch::new(&[a], &[0, 2]).with_slot_mapping(&[-1]))),
        ),
        (
            "slot mapping below -1",
            Box::new(|c| c.begin_step(&Batch::new(&[a], &[0, 1]).with_slot_mapping(&[-2]))),
        ),
        ("slots in windowed mode", Box::new(|c| c.begin_slots(&SlotBatch::new(&[0, 1], &[1], &[0], &[0])))),
        ("reorder with too few parents", Box::new(|c| c.reorder(&mut [a, b], &[0]))),
        ("reorder with a parent out of range", Box::new(|c| c.reorder(&mut [a, b], &[0, 2]))),
        ("reorder with a seat twice", Box::new(|c| c.reorder(&mut [a, a], &[0, 1]))),
        ("set a block nobody has", Box::new(|c| c.set_block(a, 4, 7))),
        ("set a block out of range", Box::new(|c| c.set_block(a, 4, 1000))),
        ("set a negative block", Box::new(|c| c.set_block(a, 4, -1))),
        ("set the block of a closed tile", Box::new(|c| c.set_block(a, 0, 0))),
        ("free a block that a seat owns", Box::new(|c| c.free_block(0))),
        ("free a block nobody has", Box::new(|c| c.free_block(7))),
        ("free a block out of range", Box::new(|c| c.free_block(i32::MAX))),
        ("export an open tile", Box::new(|c| c.export_page(a, 0, 0, 2).map(|_| ()))),
        ("export from a layer out of range", Box::new(|c| c.export_page(a, LAYERS, 0, 0).map(|_| ()))),
        ("export from a head out of range", Box::new(|c| c.export_page(a, 0, HEADS, 0).map(|_| ()))),
        ("export tile usize::MAX", Box::new(|c| c.export_page(a, 0, 0, usize::MAX).map(|_| ()))),
        ("import into a sequence with a window", Box::new(|c| c.import_page(a, &page).map(|_| ()))),
        ("import a page of another configuration", Box::new(|c| c.import_page(a, &foreign_page).map(|_| ()))),
        ("import nothing", Box::new(|c| c.import_page(a, &[]).map(|_| ()))),
        ("import sinks that are a page", Box::new(|c| c.import_sinks(a, &page))),
        ("cancel without a step", Box::new(|c| c.cancel_step())),
        (
            "dequantize a layer out of range",
            Box::new(|c| {
                let (mut k, mut v) = kv(200, 1);
                let dims = [200, HEADS, DIM];
                c.dequantize(
                    LAYERS,
                    a,
                    &mut TensorMut::thd(&mut k, dims)?,
                    &mut TensorMut::thd(&mut v, dims)?,
                )
            }),
        ),
        (
            "dequantize into the wrong shape",
            Box::new(|c| {
                let (mut k, mut v) = kv(200, 1);
                let dims = [199, HEADS, DIM];
                c.dequantize(0, a, &mut TensorMut::thd(&mut k, dims)?, &mut TensorMut::thd(&mut v, dims)?)
            }),
        ),
    ];
    for (what, call) in &mut calls {
        let error = call(&mut cache).expect_err(what);
        assert!(error.to_string().len() > 20, "{what}: {error}");
        assert_eq!(see(&cache), before, "{what} changed the cache ({error})");
    }
    drop(calls);
    cache.open().unwrap();
    let before = see(&cache);
    assert!(matches!(cache.open(), Err(Error::Capacity { .. })));
    assert!(matches!(cache.fork(a), Err(Error::Capacity { .. })));
    assert_eq!(see(&cache), before);
}

#[test]
fn calls_out_of_order_in_a_step_are_refused() {
    let (mut cache, a, b) = filled();
    let before = see(&cache);
    cache.begin_step(&Batch::new(&[a], &[0, 2])).unwrap();
    let (k, v) = kv(2, 9);
    let q = numbers(2 * 4 * DIM, 5);
    let mut out = vec![0f32; q.len()];
    let dims = [2, HEADS, DIM];
    let (kt, vt) = (TensorRef::thd(&k, dims).unwrap(), TensorRef::thd(&v, dims).unwrap());
    let qt = TensorRef::thd(&q, [2, 4, DIM]).unwrap();
    let params = AttendParams::new();
    // Attend before append; a layer that does not exist.
    let mut view = TensorMut::thd(&mut out, [2, 4, DIM]).unwrap();
    assert!(matches!(cache.attend(0, &qt, &params, &mut view, None), Err(Error::StepOrder { layer: 0, .. })));
    assert!(matches!(cache.append(LAYERS, &kt, &vt), Err(Error::OutOfRange { .. })));
    // Wrong shapes.
    for dims in [[1, HEADS, DIM], [2, 1, DIM], [2, HEADS, 16]] {
        let wrong = TensorRef::thd(&k, dims).unwrap();
        assert!(matches!(cache.append(0, &wrong, &vt), Err(Error::Shape { .. })));
        assert!(matches!(cache.append(0, &kt, &wrong), Err(Error::Shape { .. })));
    }
    cache.append(0, &kt, &vt).unwrap();
    assert!(matches!(cache.append(0, &kt, &vt), Err(Error::StepOrder { .. })));
    // Queries: GQA that does not divide, wrong dims, wrong output, wrong LSE, parameters.
    let odd = TensorRef::thd(&q, [2, 3, DIM]).unwrap();
    let r = cache.attend(0, &odd, &params, &mut view, None);
    assert!(matches!(r, Err(Error::Unsupported { what: "query heads", .. })), "{r:?}");
    let narrow = TensorRef::thd(&q, [2, 4, 16]).unwrap();
    assert!(matches!(cache.attend(0, &narrow, &params, &mut view, None), Err(Error::Shape { .. })));
    let mut lse = vec![0f32; 7];
    assert!(matches!(cache.attend(0, &qt, &params, &mut view, Some(&mut lse)), Err(Error::Length { .. })));
    let sinks = [0f32; 3];
    for bad in [
        params.with_scale(f32::NAN),
        params.with_softcap(0.0),
        params.with_softcap(f32::INFINITY),
        params.with_sink_logits(&sinks),
        params.with_bidirectional(&[(0, 4)]),
    ] {
        assert!(cache.attend(0, &qt, &bad, &mut view, None).is_err(), "{bad:?}");
    }
    // Calls that change lengths name the missing layer.
    let open = |r: Result<()>| assert_eq!(r, Err(Error::StepOpen { missing: vec![1] }));
    open(cache.truncate(b, 0));
    open(cache.close(b));
    open(cache.clear(b));
    open(cache.fork(b).map(|_| ()));
    open(cache.prefix(b, 64).map(|_| ()));
    open(cache.release_before(b, 0).map(|_| ()));
    open(cache.reorder(&mut [a, b], &[1, 0]));
    open(cache.begin_step(&Batch::new(&[b], &[0, 1])));
    open(cache.reserve(b, 1).map(|_| ()));
    open(cache.export_page(a, 0, 0, 0).map(|_| ()));
    cache.cancel_step().unwrap();
    let after = see(&cache);
    assert_eq!((after.lens, after.contents, after.free), (before.lens, before.contents, before.free));
}

#[test]
fn more_than_the_window_at_once_names_prefill() {
    let mut cache = KvCache::new(config()).unwrap();
    let (k, v) = kv(3 * 65, 1);
    let dims = [3 * 65, HEADS, DIM];
    let (kt, vt) = (TensorRef::thd(&k, dims).unwrap(), TensorRef::thd(&v, dims).unwrap());
    let mut out = vec![0f32; k.len()];
    let mut view = TensorMut::thd(&mut out, dims).unwrap();
    for layer in 0..LAYERS {
        cache.append(layer, &kt, &vt).unwrap();
        let error = cache.attend(layer, &kt, &AttendParams::new(), &mut view, None).unwrap_err();
        assert!(error.to_string().contains("prefill"), "{error}");
    }
    // Other layers of a step bring the same rows.
    let (k, v) = kv(3, 1);
    let one = [3, HEADS, DIM];
    let (kt, vt) = (TensorRef::thd(&k, one).unwrap(), TensorRef::thd(&v, one).unwrap());
    cache.append(0, &kt, &vt).unwrap();
    let (k6, v6) = kv(6, 1);
    let (kt6, vt6) =
        (TensorRef::thd(&k6, [6, HEADS, DIM]).unwrap(), TensorRef::thd(&v6, [6, HEADS, DIM]).unwrap());
    assert!(matches!(cache.append(1, &kt6, &vt6), Err(Error::Shape { .. })));
    assert!(matches!(cache.append_varlen(1, &[0, 1, 1, 3], &kt, &vt), Err(Error::Shape { .. })));
    cache.append(1, &kt, &vt).unwrap();
    assert_eq!(cache.len(0), 66);
    // A first call that is refused opens nothing.
    let short = TensorRef::thd(&k, [2, HEADS, DIM]).unwrap();
    assert!(cache.append(0, &short, &short).is_err(), "2 rows for 3 sequences");
    assert!(cache.append(0, &kt, &short).is_err());
    assert!(!cache.paged().step().missing().contains(&0), "the last step is still the last step");
    cache.truncate(0, 65).unwrap();
}

#[test]
fn damaged_pages_are_refused() {
    let (mut cache, a, _) = filled();
    let page = cache.export_page(a, 0, 1, 0).unwrap();
    let sinks = cache.export_sinks(a).unwrap();
    let to = cache.open().unwrap();
    let before = see(&cache);
    for (i, bytes) in [&page, &sinks].into_iter().enumerate() {
        let stride = (bytes.len() / 300).max(1);
        for at in (0..64).chain((64..bytes.len()).step_by(stride)) {
            for bit in [0, 5] {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                let r = if i == 0 {
                    cache.import_page(to, &bad).map(|_| ())
                } else {
                    cache.import_sinks(to, &bad)
                };
                assert!(matches!(r, Err(Error::Page { .. })), "byte {at}, bit {bit}: {r:?}");
            }
        }
        for n in [0, 1, 8, 63, 64, bytes.len() - 1] {
            let r = if i == 0 {
                cache.import_page(to, &bytes[..n]).map(|_| ())
            } else {
                cache.import_sinks(to, &bytes[..n])
            };
            assert!(matches!(r, Err(Error::Page { .. })), "{n} bytes: {r:?}");
        }
    }
    assert_eq!(see(&cache), before);
}

#[test]
fn a_sequence_moves_to_another_cache_page_by_page() {
    for center in [false, true] {
        let key = Affine::per_token(Bits::B4, 32);
        let config = config().with_key(if center { key.with_center() } else { key });
        let new = || PagedKvCache::<Cpu>::new(config.clone(), PagePool::new(&config, 8).unwrap()).unwrap();
        let (mut from, mut to) = (new(), new());
        let a = from.open().unwrap();
        step(&mut from, &[a], &[0, 192]);
        let b = to.open().unwrap();
        let tiles = from.packed_len(a).unwrap() / 64;
        assert_eq!(tiles, 2);
        let mut complete = 0;
        for tile in 0..tiles {
            for (layer, head) in [(1, 0), (0, 1), (0, 0), (1, 1)] {
                let page = from.export_page(a, layer, head, tile).unwrap();
                complete += to.import_page(b, &page).unwrap() as usize;
                if (layer, head) != (1, 1) {
                    assert!(to.begin_step(&Batch::new(&[b], &[0, 1])).is_err(), "part of a tile");
                    assert!(to.import_page(b, &page).is_err(), "the same page twice");
                }
            }
        }
        to.import_sinks(b, &from.export_sinks(a).unwrap()).unwrap();
        assert_eq!(complete, tiles);
        from.truncate(a, tiles * 64).unwrap();
        for layer in 0..LAYERS {
            let read = |c: &PagedKvCache, s: Seat| {
                let n = c.len(s).unwrap();
                let (mut k, mut v) = kv(n, 0);
                let dims = [n, HEADS, DIM];
                c.dequantize(
                    layer,
                    s,
                    &mut TensorMut::thd(&mut k, dims).unwrap(),
                    &mut TensorMut::thd(&mut v, dims).unwrap(),
                )
                .unwrap();
                (k, v)
            };
            assert_eq!(read(&from, a), read(&to, b));
        }
        if center {
            // Tile 1 of this sequence does not follow tile 0 of another.
            let mut third = new();
            let d = third.open().unwrap();
            let (k, v) = kv(128, 77);
            third.reserve(d, 128).unwrap();
            third.begin_step(&Batch::new(&[d], &[0, 128])).unwrap();
            let dims = [128, HEADS, DIM];
            for layer in 0..LAYERS {
                third
                    .append(layer, &TensorRef::thd(&k, dims).unwrap(), &TensorRef::thd(&v, dims).unwrap())
                    .unwrap();
            }
            third.truncate(d, 64).unwrap();
            let page = from.export_page(a, 0, 0, 1).unwrap();
            assert!(matches!(third.import_page(d, &page), Err(Error::Page { .. })));
        }
    }
}

#[test]
fn configurations_are_refused_with_the_reason() {
    let base = CacheConfig::new(2, 2, 64);
    let fp8 = |g| Fp8::e4m3(g);
    let bad = [
        CacheConfig::new(0, 2, 64),
        CacheConfig::new(2, 0, 64),
        CacheConfig::new(2, 2, 0),
        CacheConfig::new(2, 2, 72),
        CacheConfig::new(2, 2, 1024),
        base.clone().with_capacity(0, 10),
        base.clone().with_capacity(1, 0),
        base.clone().with_capacity(usize::MAX, 10),
        base.clone().with_residual(Some(33)),
        base.clone().with_residual(Some(224)),
        base.clone().with_sinks(17),
        base.clone().with_residual(None),
        base.clone().direct(),
        base.clone().with_key(Affine::per_token(Bits::B4, 128)),
        base.clone().with_key(Affine::per_token(Bits::B4, 16)),
        base.clone().with_key(Affine::per_token(Bits::B4, 0)),
        base.clone().with_key(Affine::per_channel(Bits::B4, 128)),
        base.clone().with_key(Affine::per_token(Bits::B4, 64).with_rotation(48)),
        base.clone().with_dims(80, 80).with_key(Affine::per_token(Bits::B4, 32).with_rotation(64)),
        base.clone().with_key(Affine::per_channel(Bits::B4, 64).with_center()),
        base.clone().with_value(Affine::per_token(Bits::B4, 64).with_center()),
        base.clone().with_key(Affine::per_token(Bits::B4, 64).with_fit(Fit::Hqq {
            p: 1.5,
            beta: 10.0,
            iterations: 20,
        })),
        base.clone().with_key(Affine::per_token(Bits::B4, 64).with_fit(Fit::Hqq {
            p: 0.7,
            beta: f32::NAN,
            iterations: 20,
        })),
        base.clone().with_key(fp8(Granularity::Tensor)),
        base.clone().with_value(fp8(Granularity::Head)),
        base.clone().with_value(fp8(Granularity::Head)).with_scales(Scales::unit(1)),
        base.clone()
            .with_value(fp8(Granularity::Tensor))
            .with_scales(Scales::new(2, vec![1.0; 4], vec![1.0; 4]).unwrap()),
        base.clone().with_sliding_window(Some(0)),
    ];
    for c in bad {
        let error = KvCache::new(c.clone()).expect_err(&format!("{c:?}"));
        assert!(error.to_string().len() > 30, "{error}");
    }
    assert!(matches!(base.clone().with_layer(2, Format::F16, Format::F16), Err(Error::OutOfRange { .. })));
    assert!(Scales::new(2, vec![1.0], vec![1.0]).is_err());
    assert!(Scales::new(1, vec![0.0], vec![1.0]).is_err());
    assert!(Scales::new(1, vec![1.0], vec![f32::NAN]).is_err());
    let pool = PagePool::new(&base.clone().with_bits(Bits::B2), 4).unwrap();
    assert!(matches!(PagedKvCache::<Cpu>::new(base, pool), Err(Error::Unsupported { .. })));
}

#[test]
fn slots_of_direct_mode_are_checked() {
    let config = CacheConfig::new(LAYERS, HEADS, DIM)
        .with_key(Affine::per_token(Bits::B8, 32))
        .with_value(Affine::per_token(Bits::B8, 32))
        .direct()
        .with_capacity(2, 128);
    let mut cache: PagedKvCache =
        PagedKvCache::new(config.clone(), PagePool::new(&config, 4).unwrap()).unwrap();
    let bad: [(&str, SlotBatch<'_>); 8] = [
        ("slot out of range", SlotBatch::new(&[0, 1], &[1], &[3], &[256])),
        ("slot below -1", SlotBatch::new(&[0, 1], &[1], &[3], &[-5])),
        ("slot elsewhere", SlotBatch::new(&[0, 1], &[1], &[3], &[0])),
        ("duplicate slots", SlotBatch::new(&[0, 1, 2], &[1, 1], &[3, 3], &[192, 192])),
        ("block out of range", SlotBatch::new(&[0, 1], &[1], &[4], &[256])),
        ("negative context", SlotBatch::new(&[0, 1], &[-1], &[3], &[192])),
        ("context shorter than the new tokens", SlotBatch::new(&[0, 2], &[1], &[3], &[192, 193])),
        ("context beyond the table", SlotBatch::new(&[0, 1], &[65], &[3], &[192])),
    ];
    for (what, batch) in bad {
        assert!(cache.begin_slots(&batch).is_err(), "{what}");
        assert!(cache.step().sequences().is_empty(), "{what} opened a step");
    }
    cache.begin_slots(&SlotBatch::new(&[0, 2, 3], &[1, 1], &[3, 1], &[-1, 192, 64])).unwrap();
}

/// More rows than `query_start` can count: a view with strides of 0 has them.
#[test]
fn rows_beyond_31_bits_open_no_step() {
    let mut cache = KvCache::new(CacheConfig::new(1, 1, 16).with_capacity(1, 300)).unwrap();
    let x = [0.5f32; 32];
    let rows = (1usize << 32) + 1;
    let shape = Shape { dims: [rows, 1, 16], batch_tokens: rows, strides: [0, 0, 0, 1] };
    let t = TensorRef::new(&x[..], shape).unwrap();
    assert!(matches!(cache.append(0, &t, &t), Err(Error::Shape { .. })));
    let t = TensorRef::thd(&x[..], [2, 1, 16]).unwrap();
    cache.append(0, &t, &t).unwrap();
    assert_eq!(cache.len(0), 2);
}

#[test]
fn a_page_is_converted_with_its_own_layout_only() {
    use qkv::layout::{Order, PageLayout, convert_page};
    let of = |group| Format::from(Affine::per_token(Bits::B4, group));
    let layout = PageLayout::new(&of(128), &of(128), 128, 128);
    let mut moved = layout;
    moved.key.codes = 1 << 40;
    let mut wide = layout;
    wide.key.row_bytes = 1 << 30;
    for (group, layout) in [(32, layout), (0, layout), (128, moved), (128, wide)] {
        let (page, mut out) = (vec![1u8; layout.page_bytes], vec![9u8; layout.page_bytes]);
        let r = convert_page(&of(group), &of(group), &layout, Order::Row, &page, Order::Fragment, &mut out);
        assert!(matches!(r, Err(Error::Unsupported { .. })), "{r:?}");
        assert!(out.iter().all(|x| *x == 9));
    }
}

#[test]
fn absurd_sizes_are_no_panic() {
    let c =
        CacheConfig::new(1, usize::MAX, usize::MAX).with_residual(Some(usize::MAX)).with_sinks(usize::MAX);
    assert_eq!((c.window_rows(), c.seat_bytes()), (usize::MAX, usize::MAX));
    for format in
        [Format::F16, Affine::per_channel(Bits::B3, 32).into(), Affine::per_token(Bits::B2, 1).into()]
    {
        let layout = layout::PageLayout::new(&format, &format, usize::MAX, usize::MAX);
        assert!(layout.page_bytes > usize::MAX / 16);
    }
    // Tables that would not fit the memory.
    for (table, tokens) in [(vec![i32::MAX], 1 << 40), (vec![0; 3], usize::MAX - 63), (vec![-1], 1 << 40)] {
        let got = cache::expand_block_table(&table, tokens);
        assert!(matches!(got, Err(Error::Unsupported { what: "block_tokens", .. })), "{got:?}");
    }
    assert_eq!(cache::expand_block_table(&[1, -1], 128).unwrap(), [2, 3, -1, -1]);
}

#[test]
fn empty_ranges_are_refused_without_a_cache() {
    let (x, mut out) = (vec![0.5f32; 3 * 16], vec![7f32; 3 * 16]);
    let t = TensorRef::thd(&x, [3, 1, 16]).unwrap();
    for range in [(3, 1), (2, 2), (usize::MAX, 0)] {
        let ranges = [(0, 2), range];
        let params = AttendParams::new().with_bidirectional(&ranges);
        let mut o = TensorMut::thd(&mut out, [3, 1, 16]).unwrap();
        let got = attention(&t, &t, &t, &params, None, &mut o, None);
        assert!(matches!(got, Err(Error::Unsupported { what: "bidirectional", .. })), "{got:?}");
    }
    assert!(out.iter().all(|x| *x == 7.0));
}

/// What a message says is what came.
#[test]
fn messages_name_what_came() {
    let (mut cache, seat, _) = filled();
    let text = |r: Result<()>| r.unwrap_err().to_string();
    assert!(text(cache.set_block(seat, 4, -1)).contains("block -1 is out of range"));
    let free = (0..).find(|b| !cache.block_table(seat).unwrap().contains(b)).unwrap();
    let got = text(cache.set_block(seat, 4, free));
    assert!(got.contains(&format!("block: {free}")) && got.contains("allocate_block"), "{got}");
    assert!(matches!(cache.free_block(free), Err(Error::Unsupported { what: "block", .. })));
    assert!(text(cache.set_block(seat, usize::MAX, free)).contains(&i64::MAX.to_string()));
    let got = cache.export_page(seat, 0, 0, 99).unwrap_err().to_string();
    assert!(got.contains("closed tile of the sequence 99 is out of range"), "{got}");
    let got = TensorRef::thd(&[0f32; 10][..], [1, 2, 64]).unwrap_err().to_string();
    assert!(got.contains("needs 128 elements") && got.contains("10"), "{got}");
}

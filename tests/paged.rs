//! What paged engines need beyond the histories: lent memory, larger blocks, sliding windows that give blocks back,
//! padding, prefixes that outlive their sequence.

use qkv::cache::{Batch, PagePool, Seat, SlotBatch, expand_block_table};
use qkv::*;

const HEADS: usize = 2;
const DIM: usize = 64;

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

fn append(cache: &mut PagedKvCache, seat: Seat, n: usize, seed: u64) {
    cache.reserve(seat, n).unwrap();
    cache.begin_step(&Batch::new(&[seat], &[0, n as i32])).unwrap();
    for layer in 0..cache.config().layers.len() {
        let x = numbers(n * HEADS * DIM, seed + layer as u64);
        let t = TensorRef::thd(&x, [n, HEADS, DIM]).unwrap();
        cache.append(layer, &t, &t).unwrap();
    }
}

fn attend(cache: &mut PagedKvCache, layer: usize, rows: usize, seed: u64) -> Vec<f32> {
    let q = numbers(rows * 4 * DIM, seed);
    let mut out = vec![0f32; q.len()];
    let dims = [rows, 4, DIM];
    let mut view = TensorMut::thd(&mut out, dims).unwrap();
    cache.attend(layer, &TensorRef::thd(&q, dims).unwrap(), &AttendParams::new(), &mut view, None).unwrap();
    out
}

#[test]
fn a_pool_can_be_lent() {
    let config = CacheConfig::new(2, HEADS, DIM).with_capacity(1, 400);
    let block = config.block_bytes().unwrap();
    let mut memory = vec![0u128; (5 * block + 100) / 16];
    let bytes = memory.len() * 16;
    // SAFETY: the memory is initialised, aligned to 16 bytes, outlives the cache and is touched by nothing else.
    let pool = unsafe { PagePool::from_raw(&config, memory.as_mut_ptr().cast(), bytes) }.unwrap();
    assert_eq!((pool.blocks(), pool.block_bytes()), (5, block));
    let mut lent: PagedKvCache = PagedKvCache::new(config.clone(), pool).unwrap();
    let mut own: PagedKvCache =
        PagedKvCache::new(config.clone(), PagePool::new(&config, 5).unwrap()).unwrap();
    for cache in [&mut lent, &mut own] {
        let seat = cache.open().unwrap();
        append(cache, seat, 350, 1);
        append(cache, seat, 1, 9);
    }
    assert_eq!(attend(&mut lent, 1, 1, 5), attend(&mut own, 1, 1, 5));
    // SAFETY: refused before it is touched.
    let r =
        unsafe { PagePool::from_raw(&config, memory.as_mut_ptr().cast::<u8>().wrapping_add(1), bytes - 16) };
    assert!(matches!(r, Err(Error::Strides { .. })));
    // SAFETY: as above.
    assert!(unsafe { PagePool::from_raw(&config, std::ptr::null_mut(), bytes) }.is_err());
}

#[test]
fn larger_blocks_are_expanded_and_smaller_ones_refused() {
    assert_eq!(expand_block_table(&[3, 0, -1], 64).unwrap(), [3, 0, -1]);
    assert_eq!(expand_block_table(&[3, -1], 128).unwrap(), [6, 7, -1, -1]);
    assert_eq!(expand_block_table(&[1], 256).unwrap(), [4, 5, 6, 7]);
    for tokens in [0, 8, 16, 32, 96] {
        let error = expand_block_table(&[0], tokens).unwrap_err().to_string();
        assert!(error.contains("64 tokens"), "{error}");
    }
    assert!(expand_block_table(&[i32::MAX], 128).is_err());
}

#[test]
fn blocks_below_every_sliding_window_are_given_back() {
    let new = || {
        let config = CacheConfig::new(2, HEADS, DIM).with_sliding_window(Some(100)).with_capacity(1, 2000);
        let mut cache: PagedKvCache =
            PagedKvCache::new(config.clone(), PagePool::new(&config, 10).unwrap()).unwrap();
        let seat = cache.open().unwrap();
        append(&mut cache, seat, 500, 1);
        (cache, seat)
    };
    let ((mut kept, a), (mut released, b)) = (new(), new());
    assert!(matches!(released.release_before(b, 402), Err(Error::Unsupported { .. })), "token 401 is seen");
    assert_eq!(released.release_before(b, 401).unwrap(), 6);
    assert_eq!(released.release_before(b, 401).unwrap(), 0);
    for i in 0..3 {
        append(&mut kept, a, 3, 20 + i);
        append(&mut released, b, 3, 20 + i);
        for layer in 0..2 {
            assert_eq!(attend(&mut kept, layer, 3, i), attend(&mut released, layer, 3, i));
        }
    }
    // With blocks given back, a sequence much longer than the pool fits.
    for i in 0..14 {
        append(&mut released, b, 100, 50 + i);
        let len = released.len(b).unwrap();
        released.release_before(b, len - 99).unwrap();
    }
    assert_eq!(released.len(b).unwrap(), 1909);
    assert!(matches!(released.truncate(b, 300), Err(Error::Released { .. })));
    assert!(matches!(released.prefix(b, 64), Err(Error::Released { .. })));
    released.truncate(b, 1900).unwrap();
    released.truncate(b, 0).unwrap();
    assert_eq!(released.pool().free_blocks(), 10);
}

#[test]
fn padding_is_skipped_in_windowed_mode() {
    let config = CacheConfig::new(1, HEADS, DIM).with_capacity(2, 300);
    let new = || {
        let mut c: PagedKvCache =
            PagedKvCache::new(config.clone(), PagePool::new(&config, 8).unwrap()).unwrap();
        let seats = [c.open().unwrap(), c.open().unwrap()];
        (c, seats)
    };
    let ((mut plain, ps), (mut padded, qs)) = (new(), new());
    let row = HEADS * DIM;
    for (round, n) in [[130usize, 3], [1, 0], [2, 40]].into_iter().enumerate() {
        let rows = n[0] + n[1];
        let x = numbers(rows * row, round as u64);
        // One padded row in front of the first sequence, two behind the second.
        let y = [vec![f32::NAN; row], x.clone(), vec![f32::NAN; 2 * row]].concat();
        let mut slots = vec![0i64; rows + 3];
        (slots[0], slots[rows + 1], slots[rows + 2]) = (-1, -1, -1);
        for i in 0..2 {
            plain.reserve(ps[i], n[i]).unwrap();
            padded.reserve(qs[i], n[i]).unwrap();
        }
        plain.begin_step(&Batch::new(&ps, &[0, n[0] as i32, rows as i32])).unwrap();
        let starts = [0, n[0] as i32 + 1, rows as i32 + 3];
        padded.begin_step(&Batch::new(&qs, &starts).with_slot_mapping(&slots)).unwrap();
        for (cache, x, rows) in [(&mut plain, &x, rows), (&mut padded, &y, rows + 3)] {
            let t = TensorRef::thd(x, [rows, HEADS, DIM]).unwrap();
            let mut out = vec![f32::NAN; x.len()];
            cache
                .prefill(
                    0,
                    &t,
                    &t,
                    &t,
                    &AttendParams::new(),
                    &mut TensorMut::thd(&mut out, [rows, HEADS, DIM]).unwrap(),
                    None,
                )
                .unwrap();
            let (first, last) = if rows == slots.len() { (row, out.len() - 2 * row) } else { (0, out.len()) };
            assert!(out[..first].iter().chain(&out[last..]).all(|x| *x == 0.0), "padding gives 0");
            assert!(out[first..last].iter().all(|x| x.is_finite()));
        }
        for i in 0..2 {
            assert_eq!(plain.len(ps[i]).unwrap(), padded.len(qs[i]).unwrap());
        }
    }
    let bad = [0i64, -1, 0];
    let r = padded.begin_step(&Batch::new(&qs[..1], &[0, 3]).with_slot_mapping(&bad));
    assert!(matches!(r, Err(Error::Unsupported { .. })), "padding between tokens");
}

#[test]
fn a_prefix_outlives_its_sequence() {
    let config = CacheConfig::new(2, HEADS, DIM).with_capacity(3, 400);
    let mut cache: PagedKvCache =
        PagedKvCache::new(config.clone(), PagePool::new(&config, 12).unwrap()).unwrap();
    let a = cache.open().unwrap();
    append(&mut cache, a, 300, 1);
    let prefix = cache.prefix(a, 250).unwrap();
    assert_eq!(prefix.tokens(), 192);
    cache.truncate(a, 192).unwrap();
    append(&mut cache, a, 1, 7);
    let want = attend(&mut cache, 0, 1, 3);
    cache.close(a).unwrap();
    assert_eq!(cache.pool().free_blocks(), 9, "the prefix holds three blocks");
    let twin = prefix.clone();
    let b = cache.open_with(&prefix).unwrap();
    append(&mut cache, b, 1, 7);
    assert_eq!(attend(&mut cache, 0, 1, 3), want);
    drop(prefix);
    cache.close(b).unwrap();
    assert_eq!(cache.pool().free_blocks(), 9);
    drop(twin);
    assert_eq!(cache.pool().free_blocks(), 12);
}

#[test]
fn ranges_that_see_each_other_are_for_prefill() {
    let config = CacheConfig::new(1, HEADS, DIM).with_capacity(1, 300);
    let mut cache = KvCache::new(config).unwrap();
    let x = numbers(40 * HEADS * DIM, 4);
    let dims = [40, HEADS, DIM];
    let t = TensorRef::thd(&x, dims).unwrap();
    let run = |cache: &mut KvCache, ranges: &[(usize, usize)]| {
        let mut out = vec![0f32; x.len()];
        let params = AttendParams::new().with_bidirectional(ranges);
        cache.prefill(0, &t, &t, &t, &params, &mut TensorMut::thd(&mut out, dims).unwrap(), None).unwrap();
        cache.clear().unwrap();
        out
    };
    let causal = run(&mut cache, &[]);
    let all = run(&mut cache, &[(0, 40)]);
    let row = HEADS * DIM;
    let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(near(&causal[39 * row..], &all[39 * row..]), "the last token sees everything either way");
    assert!(!near(&causal[..row], &all[..row]), "the first token sees more");
    // A single query behind all tokens sees what the first one of the range does.
    let mut plain = vec![0f32; row];
    let last = [1, HEADS, DIM];
    let q = TensorRef::thd(&x[..row], last).unwrap();
    attention(&q, &t, &t, &AttendParams::new(), None, &mut TensorMut::thd(&mut plain, last).unwrap(), None)
        .unwrap();
    assert!(near(&all[..row], &plain));
    let mut out = vec![0f32; x.len()];
    let params = AttendParams::new().with_bidirectional(&[(5, 5)]);
    let r = cache.prefill(0, &t, &t, &t, &params, &mut TensorMut::thd(&mut out, dims).unwrap(), None);
    assert!(matches!(r, Err(Error::Unsupported { .. })));
    assert_eq!(cache.len(0), 0);
}

/// What `release_before` frees may be written by others, so the last step's queries cannot be asked again.
#[test]
fn a_step_ends_when_its_blocks_are_released() {
    let config = CacheConfig::new(1, HEADS, DIM).with_bits(Bits::B8).direct();
    let config = config.with_sliding_window(Some(10)).with_capacity(3, 640);
    let mut cache: PagedKvCache =
        PagedKvCache::new(config.clone(), PagePool::new(&config, 4).unwrap()).unwrap();
    let (a, b) = (cache.open().unwrap(), cache.open().unwrap());
    append(&mut cache, b, 5, 1);
    append(&mut cache, a, 63, 2);
    append(&mut cache, a, 10, 3);
    assert_eq!(cache.release_before(a, 64).unwrap(), 1);
    cache.fork(b).unwrap(); // its copied tile takes the freed block
    let (q, mut out) = (numbers(10 * 4 * DIM, 4), vec![0f32; 10 * 4 * DIM]);
    let dims = [10, 4, DIM];
    let mut view = TensorMut::thd(&mut out, dims).unwrap();
    let q = TensorRef::thd(&q, dims).unwrap();
    let r = cache.attend(0, &q, &AttendParams::new(), &mut view, None);
    assert!(matches!(r, Err(Error::StepOrder { .. })), "{r:?}");
}

/// Only the caller's own blocks can be entered, freed or written by slots.
#[test]
fn blocks_of_seats_and_prefixes_are_not_the_callers() {
    let config = CacheConfig::new(1, HEADS, DIM).with_bits(Bits::B8).direct().with_capacity(3, 640);
    let mut cache: PagedKvCache =
        PagedKvCache::new(config.clone(), PagePool::new(&config, 4).unwrap()).unwrap();
    let seat = cache.open().unwrap();
    append(&mut cache, seat, 64, 1);
    let block = cache.block_table(seat).unwrap()[0];
    let slots = [block as i64 * 64];
    let over = |cache: &mut PagedKvCache| cache.begin_slots(&SlotBatch::new(&[0, 1], &[1], &[block], &slots));
    assert!(matches!(over(&mut cache), Err(Error::Duplicate { .. })));
    let prefix = cache.prefix(seat, 64).unwrap();
    cache.close(seat).unwrap();
    assert!(matches!(over(&mut cache), Err(Error::Duplicate { .. })));
    let seat = cache.open().unwrap();
    assert!(matches!(cache.set_block(seat, 0, block), Err(Error::OutOfRange { .. })));
    assert!(matches!(cache.free_block(block), Err(Error::OutOfRange { .. })));
    // Slots may read it and write behind it, into a block of the caller's.
    let own = cache.allocate_block().unwrap();
    let batch = ([block, own], [own as i64 * 64]);
    cache.begin_slots(&SlotBatch::new(&[0, 1], &[65], &batch.0, &batch.1)).unwrap();
    cache.cancel_step().unwrap();
    cache.free_block(own).unwrap();
    assert!(cache.free_block(own).is_err());
    drop(prefix);
    assert_eq!(cache.pool().free_blocks(), 4);
}

/// Imported pages take no blocks that the other sequences of a fixed batch count on.
#[test]
fn imports_leave_the_other_sequences_their_blocks() {
    let config = CacheConfig::new(1, HEADS, DIM).with_capacity(2, 128);
    let mut source = KvCache::new(config.clone().with_capacity(1, 400)).unwrap();
    let x = numbers(400 * HEADS * DIM, 1);
    let t = |n: usize| TensorRef::thd(&x[..n * HEADS * DIM], [n, HEADS, DIM]).unwrap();
    source.append(0, &t(400), &t(400)).unwrap();
    let mut cache = KvCache::new(config).unwrap();
    for head in 0..HEADS {
        cache.import_page(0, &source.export_page(0, 0, head, 0).unwrap()).unwrap();
    }
    let r = cache.import_page(0, &source.export_page(0, 0, 0, 1).unwrap());
    assert!(matches!(r, Err(Error::Capacity { .. })), "{r:?}");
    cache.append_varlen(0, &[0, 64, 192], &t(192), &t(192)).unwrap();
    assert_eq!((cache.len(0), cache.len(1)), (128, 128));
}

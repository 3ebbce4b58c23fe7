//! What paged engines need beyond the histories: sliding windows that give blocks back, padding, prefixes that outlive their
//! sequence, blocks that are not the caller's. On any backend.

use crate::machine::{self, Answer, Machine, Query};
use qkv::cache::{Batch, Seat, SlotBatch};
use qkv::*;

/// Every test of this suite that any machine runs.
macro_rules! every_test {
    ($machine:expr, $suite:ident) => {
        $crate::machine::on!(
            $machine,
            $suite: blocks_below_every_sliding_window_are_given_back,
            padding_is_skipped_in_windowed_mode,
            a_prefix_outlives_its_sequence,
            ranges_that_see_each_other_are_for_prefill,
            a_step_ends_when_its_blocks_are_released,
            blocks_of_seats_and_prefixes_are_not_the_callers,
            imports_leave_the_other_sequences_their_blocks
        );
    };
}
pub(crate) use every_test;

pub(crate) const HEADS: usize = 2;
pub(crate) const DIM: usize = 64;
/// Query heads.
const QUERIES: usize = 4;

/// Numbers that f16 holds.
pub(crate) fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            half::f16::from_f32((s >> 40) as f32 / (1u64 << 23) as f32 - 1.0).to_f32()
        })
        .collect()
}

pub(crate) fn append<M: Machine>(m: &M, cache: &mut PagedKvCache<M::B>, seat: Seat, n: usize, seed: u64) {
    cache.reserve(seat, n).unwrap();
    cache.begin_step(&Batch::new(&[seat], &[0, n as i32])).unwrap();
    for layer in 0..cache.config().layers.len() {
        let x = numbers(n * HEADS * DIM, seed + layer as u64);
        machine::append(m, cache, layer, &x, &x).unwrap();
    }
}

pub(crate) fn attend<M: Machine>(
    m: &M,
    cache: &mut PagedKvCache<M::B>,
    layer: usize,
    rows: usize,
    seed: u64,
) -> Answer {
    let q = numbers(rows * QUERIES * DIM, seed);
    let answer = Query::new::<M>(&q, QUERIES).attend(m, cache, layer).unwrap();
    assert!(answer.out.iter().any(|x| *x != 0.0), "nothing was attended");
    answer
}

/// Distance in the 2-norm, relative.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    (difference / squares(&mut b.iter().map(|b| f64::from(*b)))).sqrt()
}

pub(crate) fn blocks_below_every_sliding_window_are_given_back<M: Machine>(m: &M) {
    let new = || {
        let config = CacheConfig::new(2, HEADS, DIM).with_sliding_window(Some(100)).with_capacity(1, 2000);
        let mut cache = m.paged(config.clone(), 10).unwrap();
        let seat = cache.open().unwrap();
        append(m, &mut cache, seat, 500, 1);
        (cache, seat)
    };
    let ((mut kept, a), (mut released, b)) = (new(), new());
    assert!(matches!(released.release_before(b, 402), Err(Error::Unsupported { .. })), "token 401 is seen");
    assert_eq!(released.release_before(b, 401).unwrap(), 6);
    assert_eq!(released.release_before(b, 401).unwrap(), 0);
    for i in 0..3 {
        append(m, &mut kept, a, 3, 20 + i);
        append(m, &mut released, b, 3, 20 + i);
        for layer in 0..2 {
            assert_eq!(attend(m, &mut kept, layer, 3, i), attend(m, &mut released, layer, 3, i));
        }
    }
    // With blocks given back, a sequence much longer than the pool fits.
    for i in 0..14 {
        append(m, &mut released, b, 100, 50 + i);
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

pub(crate) fn padding_is_skipped_in_windowed_mode<M: Machine>(m: &M) {
    let config = CacheConfig::new(1, HEADS, DIM).with_capacity(2, 300);
    let new = || {
        let mut c = m.paged(config.clone(), 8).unwrap();
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
        let mut answers = vec![];
        for (cache, x, rows) in [(&mut plain, &x, rows), (&mut padded, &y, rows + 3)] {
            let Answer { out, lse } = Query::new::<M>(x, HEADS).prefill(m, cache, 0, x, x).unwrap();
            let (first, last) = if rows == slots.len() { (row, out.len() - 2 * row) } else { (0, out.len()) };
            let padding = out[..first].iter().chain(&out[last..]);
            let mut padding = padding.chain(&lse[..first / DIM]).chain(&lse[last / DIM..]);
            assert!(padding.all(|x| x.is_nan()), "padding was written");
            answers.push(out[first..last].to_vec());
            assert!(out[first..last].iter().all(|x| x.is_finite()));
        }
        assert_eq!(answers[0], answers[1]);
        for i in 0..2 {
            assert_eq!(plain.len(ps[i]).unwrap(), padded.len(qs[i]).unwrap());
        }
    }
    let bad = [0i64, -1, 0];
    let r = padded.begin_step(&Batch::new(&qs[..1], &[0, 3]).with_slot_mapping(&bad));
    assert!(matches!(r, Err(Error::Unsupported { .. })), "padding between tokens");
}

pub(crate) fn a_prefix_outlives_its_sequence<M: Machine>(m: &M) {
    let config = CacheConfig::new(2, HEADS, DIM).with_capacity(3, 400);
    let mut cache = m.paged(config.clone(), 12).unwrap();
    let a = cache.open().unwrap();
    append(m, &mut cache, a, 300, 1);
    let prefix = cache.prefix(a, 250).unwrap();
    assert_eq!(prefix.tokens(), 192);
    cache.truncate(a, 192).unwrap();
    append(m, &mut cache, a, 1, 7);
    let want = attend(m, &mut cache, 0, 1, 3);
    cache.close(a).unwrap();
    assert_eq!(cache.pool().free_blocks(), 9, "the prefix holds three blocks");
    let twin = prefix.clone();
    let b = cache.open_with(&prefix).unwrap();
    append(m, &mut cache, b, 1, 7);
    assert_eq!(attend(m, &mut cache, 0, 1, 3), want);
    drop(prefix);
    cache.close(b).unwrap();
    assert_eq!(cache.pool().free_blocks(), 9);
    drop(twin);
    assert_eq!(cache.pool().free_blocks(), 12);
}

pub(crate) fn ranges_that_see_each_other_are_for_prefill<M: Machine>(m: &M) {
    let config = CacheConfig::new(1, HEADS, DIM).with_capacity(1, 300);
    let mut cache = m.paged(config, 5).unwrap();
    let seat = cache.open().unwrap();
    let x = numbers(40 * HEADS * DIM, 4);
    let mut run = |ranges: &[(usize, usize)]| {
        cache.reserve(seat, 40).unwrap();
        cache.begin_step(&Batch::new(&[seat], &[0, 40])).unwrap();
        let mut query = Query::new::<M>(&x, HEADS);
        query.params.bidirectional = ranges.to_vec();
        let out = query.prefill(m, &mut cache, 0, &x, &x).unwrap().out;
        cache.truncate(seat, 0).unwrap();
        out
    };
    let (causal, all) = (run(&[]), run(&[(0, 40)]));
    let row = HEADS * DIM;
    let near = |a: &[f32], b: &[f32]| distance(a, b) <= M::ERROR;
    assert!(near(&causal[39 * row..], &all[39 * row..]), "the last token sees everything either way");
    assert!(!near(&causal[..row], &all[..row]), "the first token sees more");
    // A single query behind all tokens sees what the first one of the range does.
    let mut plain = vec![0f32; row];
    let (dims, last) = ([40, HEADS, DIM], [1, HEADS, DIM]);
    let (q, t) = (TensorRef::thd(&x[..row], last).unwrap(), TensorRef::thd(&x, dims).unwrap());
    attention(&q, &t, &t, &AttendParams::new(), None, &mut TensorMut::thd(&mut plain, last).unwrap(), None)
        .unwrap();
    assert!(near(&all[..row], &plain));
    // Attention over what is stored is causal.
    append(m, &mut cache, seat, 1, 3);
    let q = numbers(QUERIES * DIM, 5);
    let mut query = Query::new::<M>(&q, QUERIES);
    query.params.bidirectional = vec![(0, 40)];
    let r = query.attend(m, &mut cache, 0);
    assert!(matches!(r, Err(Error::Unsupported { what: "bidirectional", .. })), "{r:?}");
}

/// What `release_before` frees may be written by others, so the last step's queries cannot be asked again.
pub(crate) fn a_step_ends_when_its_blocks_are_released<M: Machine>(m: &M) {
    let config = CacheConfig::new(1, HEADS, DIM).with_bits(Bits::B8).direct();
    let config = config.with_sliding_window(Some(10)).with_capacity(3, 640);
    let mut cache = m.paged(config.clone(), 4).unwrap();
    let (a, b) = (cache.open().unwrap(), cache.open().unwrap());
    append(m, &mut cache, b, 5, 1);
    append(m, &mut cache, a, 63, 2);
    append(m, &mut cache, a, 10, 3);
    assert_eq!(cache.release_before(a, 64).unwrap(), 1);
    cache.fork(b).unwrap(); // its copied tile takes the freed block
    let q = numbers(10 * QUERIES * DIM, 4);
    let r = Query::new::<M>(&q, QUERIES).attend(m, &mut cache, 0);
    assert!(matches!(r, Err(Error::StepOrder { .. })), "{r:?}");
}

/// Only the caller's own blocks can be entered, freed or written by slots.
pub(crate) fn blocks_of_seats_and_prefixes_are_not_the_callers<M: Machine>(m: &M) {
    let config = CacheConfig::new(1, HEADS, DIM).with_bits(Bits::B8).direct().with_capacity(3, 640);
    let mut cache = m.paged(config.clone(), 4).unwrap();
    let seat = cache.open().unwrap();
    append(m, &mut cache, seat, 64, 1);
    let block = cache.block_table(seat).unwrap()[0];
    let slots = [block as i64 * 64];
    let over =
        |cache: &mut PagedKvCache<M::B>| cache.begin_slots(&SlotBatch::new(&[0, 1], &[1], &[block], &slots));
    assert!(matches!(over(&mut cache), Err(Error::Duplicate { .. })));
    let prefix = cache.prefix(seat, 64).unwrap();
    cache.close(seat).unwrap();
    assert!(matches!(over(&mut cache), Err(Error::Duplicate { .. })));
    let seat = cache.open().unwrap();
    assert!(matches!(cache.set_block(seat, 0, block), Err(Error::Unsupported { what: "block", .. })));
    assert!(matches!(cache.free_block(block), Err(Error::Unsupported { what: "block", .. })));
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
pub(crate) fn imports_leave_the_other_sequences_their_blocks<M: Machine>(m: &M) {
    let config = CacheConfig::new(1, HEADS, DIM).with_capacity(2, 128);
    let mut source = m.contiguous(config.clone().with_capacity(1, 400)).unwrap();
    let x = m.input(Dtype::F32, &numbers(400 * HEADS * DIM, 1));
    let t = M::view(&x, [400, HEADS, DIM]);
    source.append(0, &t, &t).unwrap();
    let mut cache = m.contiguous(config).unwrap();
    for head in 0..HEADS {
        cache.import_page(0, &source.export_page(0, 0, head, 0).unwrap()).unwrap();
    }
    let r = cache.import_page(0, &source.export_page(0, 0, 0, 1).unwrap());
    assert!(matches!(r, Err(Error::Capacity { .. })), "{r:?}");
    let x = m.input(Dtype::F32, &numbers(192 * HEADS * DIM, 2));
    let t = M::view(&x, [192, HEADS, DIM]);
    cache.append_varlen(0, &[0, 64, 192], &t, &t).unwrap();
    assert_eq!((cache.len(0), cache.len(1)), (128, 128));
}

//! The suite of paged engines on the CPU, and what is of no backend: lent memory, larger blocks.

#[path = "../support/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../support/machine.rs"]
#[allow(dead_code)]
mod machine;

mod suite;

use machine::{Machine, OnCpu, Query};
use qkv::cache::{PagePool, expand_block_table};
use qkv::*;
use suite::{DIM, HEADS, append, attend, numbers};

suite::every_test!(OnCpu, suite);

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
        append(&OnCpu, cache, seat, 350, 1);
        append(&OnCpu, cache, seat, 1, 9);
    }
    assert_eq!(attend(&OnCpu, &mut lent, 1, 1, 5), attend(&OnCpu, &mut own, 1, 1, 5));
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

/// The host reads its ranges. Those of a device are in its memory.
#[test]
fn ranges_without_a_token_are_refused() {
    let config = CacheConfig::new(1, HEADS, DIM).with_capacity(1, 300);
    let mut cache = OnCpu.paged(config, 5).unwrap();
    let seat = cache.open().unwrap();
    cache.reserve(seat, 4).unwrap();
    cache.begin_step(&Batch::new(&[seat], &[0, 4])).unwrap();
    let x = numbers(4 * HEADS * DIM, 1);
    let mut query = Query::new::<OnCpu>(&x, HEADS);
    query.params.bidirectional = vec![(5, 5)];
    let r = query.prefill(&OnCpu, &mut cache, 0, &x, &x);
    assert!(matches!(r, Err(Error::Unsupported { .. })));
    assert_eq!(cache.len(seat).unwrap(), 0);
}

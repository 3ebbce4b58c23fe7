//! Devices and contexts.

use crate::{code, cu, session};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use cudarc::driver::{CudaContext, result};
use ptxsim::testing::ensure_simulator;
use std::ptr::null_mut;

#[test]
fn the_card_says_what_it_is() {
    let (_exclusive, context) = session();
    assert_eq!(context.name().unwrap(), "ptxsim A100 (sm_80)");
    assert_eq!(context.compute_capability().unwrap(), (8, 0));
    assert_eq!(context.total_mem().unwrap(), 40 << 30);
    assert!(context.has_async_alloc());
    let attribute = |a| context.attribute(a).unwrap();
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), 108);
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK), 48 << 10);
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN), 163 << 10);
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE), 32);
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH), 0);
    assert_eq!(attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE), 40 << 20);
}

#[test]
fn cards_can_be_chosen() {
    let _exclusive = ensure_simulator().exclusive();
    let simulator = ensure_simulator();
    for (cc, major, minor) in [(80, 8, 0), (86, 8, 6), (89, 8, 9), (90, 9, 0), (120, 12, 0)] {
        simulator.card(cc).unwrap();
        let context = CudaContext::new(0).unwrap();
        assert_eq!(context.compute_capability().unwrap(), (major, minor));
        assert!(context.name().unwrap().contains("ptxsim"));
    }
    simulator.cards(&[90, 80]).unwrap();
    assert_eq!(CudaContext::device_count().unwrap(), 2);
    let (first, second) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
    assert_eq!(first.compute_capability().unwrap(), (9, 0));
    assert_eq!(second.compute_capability().unwrap(), (8, 0));
    assert_ne!(first.uuid().unwrap().bytes, second.uuid().unwrap().bytes);
    assert_eq!(code(CudaContext::new(2)), 101);
    assert!(simulator.card(70).is_err());
    // while contexts exist, the option is refused: `card` ends them first
    simulator.card(80).unwrap();
}

#[test]
fn the_primary_context_is_counted() {
    let _exclusive = ensure_simulator().exclusive();
    let active = || {
        let (mut flags, mut active) = (0, 7);
        assert_eq!(cu!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active)), 0);
        active
    };
    let (first, second) = (CudaContext::new(0).unwrap(), CudaContext::new(0).unwrap());
    assert_eq!(first.cu_ctx(), second.cu_ctx());
    assert_eq!(active(), 1);
    drop(first);
    assert_eq!(active(), 1);
    let kept = second.cu_ctx();
    drop(second);
    assert_eq!(active(), 0);
    assert_eq!(cu!(cuDevicePrimaryCtxRelease_v2(0)), 201);
    assert_eq!(cu!(cuCtxSetCurrent(kept)), 201);
    assert_eq!(cu!(cuCtxSynchronize()), 709, "the thread's context was destroyed");
}

#[test]
fn contexts_are_current_in_one_thread() {
    let (_exclusive, context) = session();
    let other = std::thread::spawn(|| {
        let mut current: sys::CUcontext = null_mut();
        assert_eq!(cu!(cuCtxGetCurrent(&mut current)), 0);
        assert!(current.is_null());
        let mut address = 0;
        cu!(cuMemAlloc_v2(&mut address, 4))
    });
    assert_eq!(other.join().unwrap(), 201);
    let own = CudaContext::new_non_primary(0, 0).unwrap();
    assert_ne!(own.cu_ctx(), context.cu_ctx());
    let stream = own.default_stream();
    let data = stream.clone_htod(&[1u32, 2, 3]).unwrap();
    assert_eq!(stream.clone_dtoh(&data).unwrap(), [1, 2, 3]);
}

#[test]
fn limits_and_flags_are_kept() {
    let (_exclusive, context) = session();
    let limit = sys::CUlimit::CU_LIMIT_STACK_SIZE;
    assert_eq!(context.get_limit(limit).unwrap(), 1024);
    context.set_limit(limit, 4096).unwrap();
    assert_eq!(context.get_limit(limit).unwrap(), 4096);
    context.set_blocking_synchronize().unwrap();
    assert_eq!(cu!(cuCtxSetFlags(0xffff_0000)), 1);
    let shared = sys::CUfunc_cache::CU_FUNC_CACHE_PREFER_SHARED;
    context.set_cache_config(shared).unwrap();
    assert_eq!(context.get_cache_config().unwrap(), shared);
    let (mut least, mut greatest) = (9, 9);
    assert_eq!(cu!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest)), 0);
    assert!(greatest < least);
}

#[test]
fn codes_have_names_and_texts() {
    let (_exclusive, _context) = session();
    let error = result::DriverError(sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_eq!(error.error_name().unwrap().to_str().unwrap(), "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(error.error_string().unwrap().to_str().unwrap(), "an illegal memory access was encountered");
}

#[test]
fn memory_pools_keep_their_attributes() {
    let (_exclusive, _context) = session();
    let mut pool: sys::CUmemoryPool = null_mut();
    assert_eq!(cu!(cuDeviceGetDefaultMemPool(&mut pool, 0)), 0);
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let mut value = u64::MAX;
    assert_eq!(cu!(cuMemPoolSetAttribute(pool, threshold, (&raw mut value).cast())), 0);
    value = 0;
    assert_eq!(cu!(cuMemPoolGetAttribute(pool, threshold, (&raw mut value).cast())), 0);
    assert_eq!(value, u64::MAX);
    assert_eq!(cu!(cuMemPoolTrimTo(pool, 0)), 0);
    assert_eq!(cu!(cuMemPoolDestroy(pool)), 1, "the default pool stays");
    let mut address = 0;
    assert_eq!(cu!(cuMemAllocFromPoolAsync(&mut address, 64, pool, null_mut())), 0);
    assert_eq!(cu!(cuMemFreeAsync(address, null_mut())), 0);
}

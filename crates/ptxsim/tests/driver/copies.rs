//! Memory: allocation, copies, fills, and their ranges.

use crate::{code, cu, session};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr::null_mut;

/// An allocation by the plain function.
fn alloc(bytes: usize) -> u64 {
    let mut address = 0;
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, bytes)), 0);
    address
}

fn upload(to: u64, data: &[u8]) -> u32 {
    cu!(cuMemcpyHtoD_v2(to, data.as_ptr().cast(), data.len()))
}

fn download(from: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    assert_eq!(cu!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), from, bytes)), 0);
    out
}

#[test]
fn data_comes_back() {
    let (_exclusive, context) = session();
    let stream = context.default_stream();
    let numbers: Vec<f32> = (0..1000).map(|i| i as f32 * 0.5).collect();
    let a = stream.clone_htod(&numbers).unwrap();
    let mut b = stream.alloc_zeros::<f32>(1000).unwrap();
    assert_eq!(stream.clone_dtoh(&b).unwrap(), vec![0.0; 1000]);
    stream.memcpy_dtod(&a, &mut b).unwrap();
    assert_eq!(stream.clone_dtoh(&b).unwrap(), numbers);
    let middle = a.slice(100..200);
    assert_eq!(stream.clone_dtoh(&middle).unwrap(), numbers[100..200]);
    let copy = a.try_clone().unwrap();
    drop(a);
    assert_eq!(stream.clone_dtoh(&copy).unwrap(), numbers);
    context.check_err().unwrap();
}

#[test]
fn free_memory_goes_down_and_up_again() {
    let (_exclusive, context) = session();
    let used = || {
        let (_, total) = context.mem_get_info().unwrap();
        assert_eq!(total, 40 << 30);
        let mut pool: sys::CUmemoryPool = null_mut();
        assert_eq!(cu!(cuDeviceGetDefaultMemPool(&mut pool, 0)), 0);
        let mut bytes = 0u64;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
        assert_eq!(cu!(cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast())), 0);
        bytes
    };
    let before = used();
    let stream = context.default_stream();
    let slice = stream.alloc_zeros::<u8>(12_345).unwrap();
    assert_eq!(used(), before + 12_345);
    drop(slice);
    assert_eq!(used(), before);
    // more than the card or the machine has
    let mut address = 0;
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, 1 << 45)), 2);
    let (free, _) = context.mem_get_info().unwrap();
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, free + (1 << 30))), 2);
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, 0)), 1);
}

#[test]
fn fills_of_each_width() {
    let (_exclusive, _context) = session();
    let p = alloc(64);
    assert_eq!(cu!(cuMemsetD8_v2(p, 0x11, 64)), 0);
    assert_eq!(cu!(cuMemsetD16_v2(p + 2, 0x2233, 2)), 0);
    assert_eq!(cu!(cuMemsetD32_v2(p + 8, 0x4455_6677, 2)), 0);
    let mut expected = vec![0x11; 64];
    expected[2..6].copy_from_slice(&[0x33, 0x22, 0x33, 0x22]);
    expected[8..16].copy_from_slice(&[0x77, 0x66, 0x55, 0x44, 0x77, 0x66, 0x55, 0x44]);
    assert_eq!(download(p, 64), expected);
    // two rows of three values, 32 bytes apart
    assert_eq!(cu!(cuMemsetD2D16_v2(p, 32, 0xabcd, 3, 2)), 0);
    for row in [0, 32] {
        expected[row..row + 6].copy_from_slice(&[0xcd, 0xab, 0xcd, 0xab, 0xcd, 0xab]);
    }
    assert_eq!(download(p, 64), expected);
    assert_eq!(cu!(cuMemsetD16_v2(p + 1, 0, 2)), 1, "misaligned");
    assert_eq!(cu!(cuMemsetD32_v2(p + 2, 0, 2)), 1, "misaligned");
    assert_eq!(cu!(cuMemsetD8_v2(p, 0, 65)), 1, "beyond the end");
    assert_eq!(cu!(cuMemsetD32_v2(p, 0, usize::MAX / 2)), 1, "more bytes than there are addresses");
    assert_eq!(cu!(cuMemsetD2D8_v2(p, 32, 0, 33, 2)), 1, "rows longer than their distance");
    assert_eq!(cu!(cuMemsetD2D8_v2(p, 32, 0, 32, 3)), 1, "one row too many");
    assert_eq!(cu!(cuMemsetD8_v2(p, 0, 0)), 0);
    assert_eq!(download(p, 64), expected);
    assert_eq!(cu!(cuMemFree_v2(p)), 0);
}

#[test]
fn ranges_are_checked() {
    let (_exclusive, context) = session();
    let (p, q) = (alloc(100), alloc(100));
    let data = [7; 100];
    assert_eq!(upload(p, &data), 0);
    assert_eq!(upload(p + 1, &data), 1, "one past the end");
    assert_eq!(upload(p - 1, &data[..1]), 1, "before the start");
    assert_eq!(upload(p + 100, &data[..1]), 1, "in the gap");
    assert_eq!(cu!(cuMemcpyDtoD_v2(q, p + 1, 100)), 1);
    assert_eq!(cu!(cuMemcpyDtoD_v2(q + 1, p, 100)), 1);
    assert_eq!(cu!(cuMemcpyDtoD_v2(q, p, 100)), 0);
    assert_eq!(download(q, 100), data);
    let mut out = [0u8; 101];
    assert_eq!(cu!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), p, 101)), 1);
    // host addresses are no device addresses, and the other way round
    assert_eq!(upload(out.as_ptr() as u64, &data), 1);
    assert_eq!(cu!(cuMemcpyHtoD_v2(p, q as *const c_void, 100)), 1);
    assert_eq!(cu!(cuMemcpyDtoH_v2(q as *mut c_void, p, 100)), 1);
    assert_eq!(cu!(cuMemcpyHtoD_v2(p, std::ptr::null(), 100)), 1);
    assert_eq!(cu!(cuMemcpyDtoH_v2(null_mut(), p, 100)), 1);
    assert_eq!(cu!(cuMemcpyHtoD_v2(p, 0x10 as *const c_void, 100)), 1, "not mapped");
    assert_eq!(cu!(cuMemcpyDtoH_v2(ranges_are_checked as *mut c_void, p, 1)), 1, "read-only");
    // none of these is a fault of the context
    context.synchronize().unwrap();
    assert_eq!(download(p, 100), data);
    assert_eq!(cu!(cuMemFree_v2(p + 4)), 1, "inside an allocation");
    assert_eq!(cu!(cuMemFree_v2(p)), 0);
    assert_eq!(cu!(cuMemFree_v2(p)), 1, "twice");
    assert_eq!(upload(p, &data), 1, "after the free");
    assert_eq!(cu!(cuMemFree_v2(0)), 0);
    assert_eq!(cu!(cuMemFreeAsync(q, null_mut())), 0);
    assert_eq!(cu!(cuMemFreeAsync(q, null_mut())), 1);
}

#[test]
fn page_locked_memory() {
    let (_exclusive, context) = session();
    let stream = context.default_stream();
    // SAFETY: it is written below before it is read.
    let mut pinned = unsafe { context.alloc_pinned::<u32>(256) }.unwrap();
    pinned.as_mut_slice().unwrap().copy_from_slice(&(0..256).collect::<Vec<_>>());
    let mut device = stream.alloc_zeros::<u32>(256).unwrap();
    stream.memcpy_htod(&pinned, &mut device).unwrap();
    assert_eq!(stream.clone_dtoh(&device).unwrap(), (0..256).collect::<Vec<_>>());
    let address = pinned.as_ptr().unwrap() as usize;
    let target = alloc(4096);
    assert_eq!(cu!(cuMemcpyHtoD_v2(target, address as *const c_void, 1025)), 1, "beyond the allocation");
    assert_eq!(cu!(cuMemFreeHost(8 as *mut c_void)), 1);
    assert_eq!(cu!(cuMemFreeHost((address + 4) as *mut c_void)), 1);
    drop(pinned);
    assert_eq!(cu!(cuMemFreeHost(address as *mut c_void)), 1, "twice");
    let mut own = vec![0u8; 64];
    assert_eq!(cu!(cuMemHostRegister_v2(own.as_mut_ptr().cast(), 64, 0)), 0);
    assert_eq!(cu!(cuMemHostRegister_v2(own.as_mut_ptr().cast(), 64, 0)), 712);
    assert_eq!(cu!(cuMemFreeHost(own.as_mut_ptr().cast())), 1, "registered, not allocated");
    assert_eq!(cu!(cuMemHostUnregister(own.as_mut_ptr().cast())), 0);
    assert_eq!(cu!(cuMemHostUnregister(own.as_mut_ptr().cast())), 713);
    context.check_err().unwrap();
}

#[test]
fn pointers_are_known() {
    let (_exclusive, context) = session();
    let p = alloc(1000);
    let mut kind = 0u32;
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    assert_eq!(cu!(cuPointerGetAttribute((&raw mut kind).cast(), attribute, p + 10)), 0);
    assert_eq!(kind, 2);
    let mut owner: sys::CUcontext = null_mut();
    let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
    assert_eq!(cu!(cuPointerGetAttribute((&raw mut owner).cast(), attribute, p)), 0);
    assert_eq!(owner, context.cu_ctx());
    let (mut base, mut bytes) = (0, 0);
    assert_eq!(cu!(cuMemGetAddressRange_v2(&mut base, &mut bytes, p + 999)), 0);
    assert_eq!((base, bytes), (p, 1000));
    assert_eq!(cu!(cuMemGetAddressRange_v2(&mut base, &mut bytes, p + 1000)), 500);
    let own = 5u32;
    assert_eq!(cu!(cuPointerGetAttribute((&raw mut kind).cast(), attribute, &raw const own as u64)), 1);
}

#[test]
fn a_slice_that_outlives_its_context_reports_it() {
    let (_exclusive, context) = session();
    let stream = context.default_stream();
    let slice = stream.alloc_zeros::<u8>(10).unwrap();
    ptxsim::testing::ensure_simulator().reset();
    assert_eq!(code(stream.clone_dtoh(&slice)), 709);
    drop(slice);
}

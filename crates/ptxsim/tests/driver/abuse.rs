//! Nonsense: null, foreign and stale handles and addresses, and threads that race.

use crate::{cu, session};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;

/// Addresses and numbers that are no handle of anything.
const NONSENSE: [usize; 6] = [0x3, 0x10, 0xdead_beef, usize::MAX, 0x5101_0000_0000_0010, 0x7fff_ffff_f000];

#[test]
fn foreign_handles_are_refused() {
    let (_exclusive, context) = session();
    let stack = 0u64;
    let event = context.new_event(None).unwrap();
    let stream = context.new_stream().unwrap();
    let mut handles = NONSENSE.to_vec();
    handles.push(&raw const stack as usize);
    for n in handles {
        // also a handle of another kind
        for n in [n, event.cu_event() as usize] {
            assert_eq!(cu!(cuStreamSynchronize(n as sys::CUstream)), 400, "{n:#x}");
            assert_eq!(cu!(cuStreamDestroy_v2(n as sys::CUstream)), 400);
            assert_eq!(cu!(cuMemsetD8Async(0, 0, 0, n as sys::CUstream)), 400);
            assert_eq!(cu!(cuModuleUnload(n as sys::CUmodule)), 400);
            assert_eq!(
                cu!(cuFuncGetAttribute(&mut 0, Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS, n as sys::CUfunction)),
                400
            );
            assert_eq!(cu!(cuGraphLaunch(n as sys::CUgraphExec, null_mut())), 1);
            assert_eq!(cu!(cuGraphDestroy(n as sys::CUgraph)), 1);
            assert_eq!(cu!(cuCtxSetCurrent(n as sys::CUcontext)), 201);
            assert_eq!(cu!(cuCtxDestroy_v2(n as sys::CUcontext)), 201);
            assert_eq!(cu!(cuMemPoolTrimTo(n as sys::CUmemoryPool, 0)), 1);
            assert_eq!(
                cu!(cuLaunchKernel(
                    n as sys::CUfunction,
                    1,
                    1,
                    1,
                    1,
                    1,
                    1,
                    0,
                    null_mut(),
                    null_mut(),
                    null_mut()
                )),
                400
            );
        }
        for n in [n, stream.cu_stream() as usize] {
            assert_eq!(cu!(cuEventRecord(n as sys::CUevent, null_mut())), 400);
            assert_eq!(cu!(cuEventSynchronize(n as sys::CUevent)), 400);
            assert_eq!(cu!(cuEventDestroy_v2(n as sys::CUevent)), 400);
            assert_eq!(cu!(cuStreamWaitEvent(null_mut(), n as sys::CUevent, 0)), 400);
        }
    }
    assert_eq!(cu!(cuEventDestroy_v2(null_mut())), 400);
    assert_eq!(cu!(cuModuleUnload(null_mut())), 400);
    assert_eq!(cu!(cuStreamDestroy_v2(null_mut())), 400, "the default stream");
}

#[test]
fn stale_handles_are_refused() {
    let (_exclusive, context) = session();
    let (mut stream, mut event): (sys::CUstream, sys::CUevent) = (null_mut(), null_mut());
    assert_eq!(cu!(cuStreamCreate(&mut stream, 1)), 0);
    assert_eq!(cu!(cuStreamDestroy_v2(stream)), 0);
    assert_eq!(cu!(cuStreamDestroy_v2(stream)), 400);
    assert_eq!(cu!(cuStreamQuery(stream)), 400);
    assert_eq!(cu!(cuEventCreate(&mut event, 0)), 0);
    assert_eq!(cu!(cuEventRecord(event, null_mut())), 0);
    assert_eq!(cu!(cuEventDestroy_v2(event)), 0);
    assert_eq!(cu!(cuEventQuery(event)), 400);
    context.synchronize().unwrap();
}

#[test]
fn null_results_are_refused() {
    let (_exclusive, _context) = session();
    assert_eq!(cu!(cuDeviceGetCount(null_mut())), 1);
    assert_eq!(cu!(cuDeviceGet(null_mut(), 0)), 1);
    assert_eq!(cu!(cuDeviceGetName(null_mut(), 10, 0)), 1);
    assert_eq!(cu!(cuDevicePrimaryCtxRetain(null_mut(), 0)), 1);
    assert_eq!(cu!(cuCtxGetCurrent(null_mut())), 1);
    assert_eq!(cu!(cuMemAlloc_v2(null_mut(), 4)), 1);
    assert_eq!(cu!(cuMemAllocAsync(null_mut(), 4, null_mut())), 1);
    assert_eq!(cu!(cuMemHostAlloc(null_mut(), 4, 0)), 1);
    assert_eq!(cu!(cuStreamCreate(null_mut(), 0)), 1);
    assert_eq!(cu!(cuEventCreate(null_mut(), 0)), 1);
    assert_eq!(cu!(cuModuleLoadData(null_mut(), c"x".as_ptr().cast())), 1);
    assert_eq!(cu!(cuModuleGetFunction(null_mut(), null_mut(), c"x".as_ptr())), 1);
    assert_eq!(cu!(cuGetErrorName(sys::CUresult::CUDA_SUCCESS, null_mut())), 1);
    assert_eq!(cu!(cuDriverGetVersion(null_mut())), 1);
    // not null, not writable either
    assert_eq!(cu!(cuDeviceGetCount(16 as *mut i32)), 1);
}

#[test]
fn numbers_out_of_range_are_refused() {
    let (_exclusive, _context) = session();
    assert_eq!(cu!(cuInit(1)), 1);
    assert_eq!(cu!(cuDeviceGet(&mut 0, -1)), 101);
    assert_eq!(cu!(cuDeviceGet(&mut 0, 1)), 101);
    assert_eq!(cu!(cuDeviceTotalMem_v2(&mut 0, 5)), 101);
    assert_eq!(cu!(cuStreamCreate(&mut null_mut(), 6)), 1);
    assert_eq!(cu!(cuEventCreate(&mut null_mut(), 0x80)), 1);
    assert_eq!(cu!(cuEventCreate(&mut null_mut(), 4)), 1, "interprocess events have no time");
    let mut name = [1i8; 8];
    assert_eq!(cu!(cuDeviceGetName(name.as_mut_ptr().cast(), 5, 0)), 0);
    assert_eq!(name, [b'p' as i8, b't' as i8, b'x' as i8, b's' as i8, 0, 1, 1, 1]);
    assert_eq!(cu!(cuDeviceGetName(name.as_mut_ptr().cast(), 0, 0)), 1);
}

#[test]
fn images_that_are_none() {
    let (_exclusive, _context) = session();
    let load = |bytes: &[u8]| {
        let padded = [bytes, &[0; 64]].concat();
        let mut module = null_mut();
        cu!(cuModuleLoadData(&mut module, padded.as_ptr().cast::<c_void>()))
    };
    assert_eq!(load(b""), 218);
    assert_eq!(load(b"hello"), 218);
    assert_eq!(load(b"\xff\xfe\xfd\xfc"), 200);
    assert_eq!(load(b"\x7fELF"), 209);
    assert_eq!(load(b".version 99.0\n.target sm_80\n.address_size 64\n"), 222);
    assert_eq!(load(b".version 8.0\n.target sm_90\n.address_size 64\n"), 209);
    assert_eq!(load(b".version 8.0\n.target sm_80\n.address_size 64\n"), 0);
    // a wrapper around nothing, and around itself
    let wrapper =
        |inner: u64| [&0x4662_43b1u32.to_le_bytes()[..], &[1, 0, 0, 0], &inner.to_le_bytes()].concat();
    assert_eq!(load(&wrapper(0)), 1);
    assert_eq!(load(&wrapper(16)), 1);
    let text = *b"text that is no fatbin ";
    assert_eq!(load(&wrapper(text.as_ptr() as u64)), 200);
    let mut module = null_mut();
    assert_eq!(cu!(cuModuleLoadData(&mut module, null())), 1);
    assert_eq!(cu!(cuModuleLoadData(&mut module, 0x1000 as *const c_void)), 1);
    assert_eq!(cu!(cuModuleLoad(&mut module, c"/nowhere/at.all".as_ptr())), 301);
}

#[test]
fn what_is_not_supported_says_so() {
    let (_exclusive, _context) = session();
    let attach = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
    assert_eq!(cu!(cuMemAllocManaged(&mut 0, 16, attach)), 801);
}

#[test]
fn threads_may_race() {
    let (_exclusive, context) = session();
    let worker = |seed: usize, context: Arc<CudaContext>| {
        context.bind_to_thread().unwrap();
        let stream = context.new_stream().unwrap();
        for round in 0..40 {
            let numbers: Vec<u32> = (0..64).map(|i| (seed * 1000 + round * 100 + i) as u32).collect();
            let a = stream.clone_htod(&numbers).unwrap();
            let b = stream.clone_dtod(&a).unwrap();
            let event = stream.record_event(None).unwrap();
            drop(a);
            context.default_stream().wait(&event).unwrap();
            assert_eq!(stream.clone_dtoh(&b).unwrap(), numbers);
            let mut text = null_mut();
            assert_eq!(cu!(cuModuleLoadData(&mut text, c".version 8.0\n.target sm_80\n".as_ptr().cast())), 0);
            assert_eq!(cu!(cuModuleUnload(text)), 0);
            if round % 10 == 0 {
                context.synchronize().unwrap();
            }
        }
    };
    let threads: Vec<_> = (0..8)
        .map(|seed| {
            let context = Arc::clone(&context);
            std::thread::spawn(move || worker(seed, context))
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    context.check_err().unwrap();
}

#[test]
fn threads_may_race_for_the_same_handles() {
    let (_exclusive, context) = session();
    for round in 0..30 {
        let (mut stream, mut event, mut p): (sys::CUstream, sys::CUevent, u64) = (null_mut(), null_mut(), 0);
        assert_eq!(cu!(cuStreamCreate(&mut stream, 1)), 0);
        assert_eq!(cu!(cuEventCreate(&mut event, 0)), 0);
        assert_eq!(cu!(cuMemAlloc_v2(&mut p, 1 << 12)), 0);
        let (stream, event) = (stream as usize, event as usize);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let context = Arc::clone(&context);
                std::thread::spawn(move || {
                    context.bind_to_thread().unwrap();
                    let (stream, event) = (stream as sys::CUstream, event as sys::CUevent);
                    let mut codes = vec![
                        cu!(cuMemsetD8Async(p, 1, 1 << 12, stream)),
                        cu!(cuEventRecord(event, stream)),
                        cu!(cuStreamWaitEvent(null_mut(), event, 0)),
                        cu!(cuEventSynchronize(event)),
                    ];
                    let ends = [
                        cu!(cuMemFree_v2(p)),
                        cu!(cuEventDestroy_v2(event)),
                        cu!(cuStreamDestroy_v2(stream)),
                    ];
                    codes.extend(ends);
                    assert!(codes.iter().all(|c| [0, 1, 400].contains(c)), "{codes:?}");
                    ends
                })
            })
            .collect();
        let ends: Vec<[u32; 3]> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        for i in 0..3 {
            assert_eq!(
                ends.iter().filter(|e| e[i] == 0).count(),
                1,
                "round {round}: each ends once: {ends:?}"
            );
        }
        context.synchronize().unwrap();
    }
}

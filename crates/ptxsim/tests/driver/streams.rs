//! Streams and events: order, time, and the mode that delays.

use crate::{code, cu, session};
use cudarc::driver::sys::{self, CUevent_flags as Flags};
use ptxsim::options::Options;
use ptxsim::testing::ensure_simulator;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

fn delayed(seed: Option<u64>) -> Options {
    Options { delay_streams: true, shuffle_seed: seed, ..Options::default() }
}

#[test]
fn events_have_monotone_times() {
    let (_exclusive, context) = session();
    let stream = context.default_stream();
    let events: Vec<_> =
        (0..20).map(|_| stream.record_event(Some(Flags::CU_EVENT_DEFAULT)).unwrap()).collect();
    for pair in events.windows(2) {
        assert!(pair[0].elapsed_ms(&pair[1]).unwrap() > 0.0);
        assert!(pair[1].elapsed_ms(&pair[0]).unwrap() < 0.0);
    }
    let untimed = stream.record_event(None).unwrap();
    assert_eq!(code(events[0].elapsed_ms(&untimed)), 400);
    let never = context.new_event(Some(Flags::CU_EVENT_DEFAULT)).unwrap();
    assert_eq!(code(events[0].elapsed_ms(&never)), 400);
    assert!(never.is_complete());
    never.synchronize().unwrap();
    stream.wait(&never).unwrap();
}

#[test]
fn calls_are_counted() {
    let (_exclusive, context) = session();
    let (simulator, stream) = (ensure_simulator(), context.new_stream().unwrap());
    simulator.take_calls();
    stream.synchronize().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(simulator.take_calls().get("cuStreamSynchronize"), Some(&2));
    assert!(simulator.take_calls().is_empty());
}

#[test]
fn delayed_work_runs_when_waited_for() {
    let (_exclusive, context) = session();
    let simulator = ensure_simulator();
    simulator.with_options(&delayed(None), || {
        let stream = context.new_stream().unwrap();
        let start = stream.record_event(Some(Flags::CU_EVENT_DEFAULT)).unwrap();
        let end = stream.record_event(Some(Flags::CU_EVENT_DEFAULT)).unwrap();
        let mut time = 0.0;
        assert_eq!(cu!(cuEventElapsedTime_v2(&mut time, start.cu_event(), end.cu_event())), 600);
        assert_eq!(cu!(cuStreamQuery(stream.cu_stream())), 600);
        let mut polls = 0;
        while !end.is_complete() {
            polls += 1;
            assert!(polls < 100, "polling makes progress");
        }
        assert!(start.elapsed_ms(&end).unwrap() > 0.0);
        assert_eq!(cu!(cuStreamQuery(stream.cu_stream())), 0);
    });
}

/// Writes 1 in one stream and copies to `out` in another; `wait`: with an event between.
fn two_streams(wait: bool, seed: Option<u64>) -> u32 {
    let (_exclusive, context) = session();
    // SAFETY: the streams below are ordered by hand, which is what is tested.
    unsafe { context.disable_event_tracking() };
    ensure_simulator().with_options(&delayed(seed), || {
        let (a, b) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let mut data = a.alloc_zeros::<u32>(1).unwrap();
        let mut out = b.alloc_zeros::<u32>(1).unwrap();
        context.synchronize().unwrap();
        a.memcpy_htod(&[1u32], &mut data).unwrap();
        if wait {
            b.join(&a).unwrap();
        }
        b.memcpy_dtod(&data, &mut out).unwrap();
        context.synchronize().unwrap();
        b.clone_dtoh(&out).unwrap()[0]
    })
}

#[test]
fn a_missing_wait_shows() {
    assert_eq!(two_streams(false, None), 0, "the copy overtakes");
    assert_eq!(two_streams(true, None), 1);
    let seen: Vec<u32> = (0..24).map(|seed| two_streams(false, Some(seed))).collect();
    assert!(seen.contains(&0) && seen.contains(&1), "seeds try both orders: {seen:?}");
    assert!((0..24).all(|seed| two_streams(true, Some(seed)) == 1));
}

#[test]
fn the_legacy_stream_orders_blocking_streams_only() {
    let (_exclusive, _context) = session();
    ensure_simulator().with_options(&delayed(None), || {
        for (flags, expected) in [(0, 2), (1, 9)] {
            let mut stream: sys::CUstream = null_mut();
            assert_eq!(cu!(cuStreamCreate(&mut stream, flags)), 0);
            let mut p = 0;
            assert_eq!(cu!(cuMemAlloc_v2(&mut p, 8)), 0);
            assert_eq!(cu!(cuMemsetD8_v2(p, 9, 8)), 0);
            assert_eq!(cu!(cuCtxSynchronize()), 0);
            // 2 into the second byte in the stream, then copied in the legacy stream
            assert_eq!(cu!(cuMemsetD8Async(p + 1, 2, 1, stream)), 0);
            assert_eq!(cu!(cuMemcpyDtoDAsync_v2(p, p + 1, 1, null_mut())), 0);
            let mut out = [0u8; 1];
            assert_eq!(cu!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), p, 1)), 0);
            assert_eq!(out[0], expected, "stream flags {flags}");
            assert_eq!(cu!(cuStreamDestroy_v2(stream)), 0);
            assert_eq!(cu!(cuMemFree_v2(p)), 0);
        }
    });
}

#[test]
fn pageable_sources_are_read_at_once_and_page_locked_ones_later() {
    let (_exclusive, context) = session();
    ensure_simulator().with_options(&delayed(None), || {
        let stream = context.new_stream().unwrap();
        let mut device = stream.alloc_zeros::<u8>(2).unwrap();
        stream.synchronize().unwrap();
        let mut pageable = [1u8];
        stream.memcpy_htod(&pageable, &mut device.slice_mut(0..1)).unwrap();
        pageable[0] = 2;
        assert_eq!(stream.clone_dtoh(&device.slice(0..1)).unwrap(), [1]);
        let mut host: *mut c_void = null_mut();
        assert_eq!(cu!(cuMemHostAlloc(&mut host, 1, 0)), 0);
        // SAFETY: one byte was allocated there.
        unsafe { host.cast::<u8>().write(3) };
        let mut p = 0;
        assert_eq!(cu!(cuMemAlloc_v2(&mut p, 1)), 0);
        assert_eq!(cu!(cuMemcpyHtoDAsync_v2(p, host, 1, stream.cu_stream())), 0);
        // SAFETY: as above; the copy has not been waited for, which is the mistake that shows.
        unsafe { host.cast::<u8>().write(4) };
        let mut out = [0u8];
        assert_eq!(cu!(cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), p, 1, stream.cu_stream())), 0);
        assert_eq!(out, [4]);
        assert_eq!(cu!(cuMemFreeHost(host)), 0);
        assert_eq!(pageable, [2]);
    });
}

extern "C" fn count(data: *mut c_void) {
    // SAFETY: the tests below pass a counter that outlives the stream's work.
    let counter = unsafe { &*data.cast::<AtomicU32>() };
    // The driver may not be called from here.
    let mut address = 0;
    if cu!(cuMemAlloc_v2(&mut address, 4)) == 800 {
        counter.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn host_functions_run_in_order_and_may_not_call_the_driver() {
    for options in [Options::default(), delayed(None)] {
        let (_exclusive, context) = session();
        ensure_simulator().with_options(&options, || {
            let stream = context.new_stream().unwrap();
            let counter = AtomicU32::new(0);
            for _ in 0..10 {
                let data = (&raw const counter).cast_mut().cast();
                assert_eq!(cu!(cuLaunchHostFunc(stream.cu_stream(), Some(count), data)), 0);
            }
            stream.synchronize().unwrap();
            assert_eq!(counter.load(Ordering::SeqCst), 10);
        });
    }
}

extern "C" fn wait_for_flag(data: *mut c_void) {
    // SAFETY: the test below passes a flag that outlives the stream's work.
    let flag = unsafe { &*data.cast::<AtomicBool>() };
    while !flag.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_host_function_may_hold_its_stream_up() {
    let (_exclusive, context) = session();
    let (held, free) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let flag = AtomicBool::new(false);
    let data = (&raw const flag).cast_mut().cast();
    assert_eq!(cu!(cuLaunchHostFunc(held.cu_stream(), Some(wait_for_flag), data)), 0);
    let after = held.record_event(Some(Flags::CU_EVENT_DEFAULT)).unwrap();
    assert!(!after.is_complete());
    // the other stream goes on
    let data = free.clone_htod(&[1u8, 2]).unwrap();
    assert_eq!(free.clone_dtoh(&data).unwrap(), [1, 2]);
    assert!(!after.is_complete());
    flag.store(true, Ordering::SeqCst);
    after.synchronize().unwrap();
    assert!(after.is_complete());
    held.synchronize().unwrap();
}

#[test]
fn priorities_are_clamped() {
    let (_exclusive, _context) = session();
    for (asked, got) in [(0, 0), (-3, -3), (-100, -5), (7, 0)] {
        let (mut stream, mut priority): (sys::CUstream, i32) = (null_mut(), 99);
        assert_eq!(cu!(cuStreamCreateWithPriority(&mut stream, 1, asked)), 0);
        assert_eq!(cu!(cuStreamGetPriority(stream, &mut priority)), 0);
        assert_eq!(priority, got);
        assert_eq!(cu!(cuStreamDestroy_v2(stream)), 0);
    }
}

#[test]
fn many_delayed_operations() {
    let (_exclusive, context) = session();
    ensure_simulator().with_options(&delayed(Some(3)), || {
        let stream = context.new_stream().unwrap();
        let mut data = stream.alloc_zeros::<u32>(1).unwrap();
        for i in 0..3000u32 {
            stream.memcpy_htod(&[i], &mut data).unwrap();
        }
        assert_eq!(stream.clone_dtoh(&data).unwrap(), [2999]);
    });
}

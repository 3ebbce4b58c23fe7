//! Capture and graphs: what is recorded, replayed, and refused.

use crate::{code, cu, session};
use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode, CUstreamCaptureStatus as Status};
use cudarc::driver::{CudaContext, CudaStream};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

const GLOBAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const THREAD: Mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: Mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
const INSTANTIATE: sys::CUgraphInstantiate_flags =
    sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

fn begin(context: &Arc<CudaContext>, mode: Mode) -> Arc<CudaStream> {
    // SAFETY: every test here orders its streams itself.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().unwrap();
    stream.begin_capture(mode).unwrap();
    stream
}

/// Ends a capture and gives the code and the graph.
fn end(stream: &CudaStream) -> (u32, sys::CUgraph) {
    let mut graph = 0x77 as sys::CUgraph;
    let code = cu!(cuStreamEndCapture(stream.cu_stream(), &mut graph));
    assert_eq!(graph.is_null(), code != 0);
    (code, graph)
}

fn status(stream: &CudaStream) -> Status {
    stream.capture_status().unwrap()
}

#[test]
fn a_graph_replays_what_was_recorded() {
    let (_exclusive, context) = session();
    // SAFETY: one stream.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().unwrap();
    let mut data = stream.clone_htod(&[0u32; 4]).unwrap();
    let mut other = stream.clone_htod(&[5u32; 4]).unwrap();
    stream.begin_capture(GLOBAL).unwrap();
    assert_eq!(status(&stream), Status::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    stream.memcpy_dtod(&data, &mut other).unwrap();
    stream.memset_zeros(&mut data).unwrap();
    let graph = stream.end_capture(INSTANTIATE).unwrap().expect("a graph");
    assert_eq!(status(&stream), Status::CU_STREAM_CAPTURE_STATUS_NONE);
    assert_eq!(stream.clone_dtoh(&other).unwrap(), [5; 4], "recorded, not run");
    graph.upload().unwrap();
    for round in 1..4 {
        stream.memcpy_htod(&[round; 4], &mut data).unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&other).unwrap(), [round; 4]);
        assert_eq!(stream.clone_dtoh(&data).unwrap(), [0; 4]);
    }
}

#[test]
fn a_graph_lives_without_what_made_it() {
    let (_exclusive, context) = session();
    let stream = begin(&context, GLOBAL);
    let (mut p, mut exec): (u64, sys::CUgraphExec) = (0, null_mut());
    assert_eq!(cu!(cuMemAllocAsync(&mut p, 16, stream.cu_stream())), 0, "an allocation node");
    assert_eq!(cu!(cuMemsetD32Async(p, 6, 4, stream.cu_stream())), 0);
    let (code, graph) = end(&stream);
    assert_eq!(code, 0);
    let mut nodes = 0;
    assert_eq!(cu!(cuGraphGetNodes(graph, null_mut(), &mut nodes)), 0);
    assert_eq!(nodes, 2);
    assert_eq!(cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)), 0);
    assert_eq!(cu!(cuGraphDestroy(graph)), 0);
    assert_eq!(cu!(cuGraphDestroy(graph)), 1);
    assert_eq!(cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)), 1);
    assert_eq!(cu!(cuGraphLaunch(exec, stream.cu_stream())), 0);
    let mut out = [0u32; 4];
    assert_eq!(cu!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), p, 16)), 0);
    assert_eq!(out, [6; 4]);
    assert_eq!(cu!(cuGraphExecDestroy(exec)), 0);
    assert_eq!(cu!(cuGraphExecDestroy(exec)), 1);
    assert_eq!(cu!(cuGraphLaunch(exec, stream.cu_stream())), 1);
}

#[test]
fn streams_fork_and_join_by_events() {
    let (_exclusive, context) = session();
    let side = context.new_stream().unwrap();
    let mut p = 0;
    assert_eq!(cu!(cuMemAlloc_v2(&mut p, 3)), 0);
    assert_eq!(cu!(cuMemsetD8_v2(p, 0, 3)), 0);
    let stream = begin(&context, GLOBAL);
    assert_eq!(cu!(cuMemsetD8Async(p, 1, 1, stream.cu_stream())), 0);
    let fork = stream.record_event(None).unwrap();
    side.wait(&fork).unwrap();
    assert_eq!(status(&side), Status::CU_STREAM_CAPTURE_STATUS_ACTIVE);
    assert_eq!(cu!(cuMemcpyDtoDAsync_v2(p + 1, p, 1, side.cu_stream())), 0);
    let join = side.record_event(None).unwrap();
    stream.wait(&join).unwrap();
    assert_eq!(cu!(cuMemcpyDtoDAsync_v2(p + 2, p + 1, 1, stream.cu_stream())), 0);
    let graph = stream.end_capture(INSTANTIATE).unwrap().expect("a graph");
    assert_eq!(status(&side), Status::CU_STREAM_CAPTURE_STATUS_NONE);
    // in the mode that reorders, so that a lost edge would show
    let options = ptxsim::options::Options { delay_streams: true, ..Default::default() };
    ptxsim::testing::ensure_simulator().with_options(&options, || {
        graph.launch().unwrap();
        stream.synchronize().unwrap();
    });
    let mut out = [0u8; 3];
    assert_eq!(cu!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), p, 3)), 0);
    assert_eq!(out, [1; 3]);
}

#[test]
fn an_unjoined_stream_is_an_error() {
    let (_exclusive, context) = session();
    let side = context.new_stream().unwrap();
    let mut p = 0;
    assert_eq!(cu!(cuMemAlloc_v2(&mut p, 3)), 0);
    let stream = begin(&context, GLOBAL);
    side.wait(&stream.record_event(None).unwrap()).unwrap();
    assert_eq!(cu!(cuMemsetD8Async(p, 1, 1, side.cu_stream())), 0);
    assert_eq!(end(&side).0, 903, "begun in the other stream");
    assert_eq!(end(&stream).0, 901, "which lost the capture");
    let stream = begin(&context, GLOBAL);
    side.wait(&stream.record_event(None).unwrap()).unwrap();
    assert_eq!(cu!(cuMemsetD8Async(p, 1, 1, side.cu_stream())), 0);
    assert_eq!(end(&stream).0, 904);
    assert_eq!(status(&side), Status::CU_STREAM_CAPTURE_STATUS_NONE);
    // a fork without work needs no join
    let stream = begin(&context, GLOBAL);
    side.wait(&stream.record_event(None).unwrap()).unwrap();
    assert_eq!(end(&stream).0, 0);
}

/// What may not be done while a stream captures, and that the capture is lost by it.
#[test]
fn forbidden_calls_lose_the_capture() {
    let (_exclusive, context) = session();
    let mut p = 0;
    assert_eq!(cu!(cuMemAlloc_v2(&mut p, 64)), 0);
    let outside = context.new_stream().unwrap().record_event(None).unwrap();
    type Case<'a> = (&'a str, u32, Box<dyn Fn(&CudaStream) -> u32>);
    let event = outside.cu_event();
    let cases: Vec<Case<'_>> = vec![
        ("synchronise", 900, Box::new(|s| cu!(cuStreamSynchronize(s.cu_stream())))),
        ("query", 900, Box::new(|s| cu!(cuStreamQuery(s.cu_stream())))),
        ("synchronise all", 900, Box::new(|_| cu!(cuCtxSynchronize()))),
        ("plain allocation", 900, Box::new(|_| cu!(cuMemAlloc_v2(&mut 0, 4)))),
        ("plain copy", 900, Box::new(move |_| cu!(cuMemcpyHtoD_v2(p, [0u8].as_ptr().cast(), 1)))),
        ("query of an event", 900, Box::new(move |_| cu!(cuEventQuery(event)))),
        ("foreign event", 905, Box::new(move |s| cu!(cuStreamWaitEvent(s.cu_stream(), event, 0)))),
        ("free from outside", 1, Box::new(move |s| cu!(cuMemFreeAsync(p, s.cu_stream())))),
        (
            "captured event",
            907,
            Box::new(|s| {
                let inside = s.record_event(None).unwrap();
                cu!(cuEventSynchronize(inside.cu_event()))
            }),
        ),
    ];
    for (what, expected, call) in cases {
        let stream = begin(&context, GLOBAL);
        assert_eq!(call(&stream), expected, "{what}");
        assert_eq!(status(&stream), Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED, "{what}");
        assert_eq!(cu!(cuMemsetD8Async(p, 0, 1, stream.cu_stream())), 901, "{what}");
        assert_eq!(end(&stream).0, 901, "{what}");
        assert_eq!(status(&stream), Status::CU_STREAM_CAPTURE_STATUS_NONE, "{what}");
        stream.synchronize().unwrap();
    }
}

#[test]
fn the_legacy_stream_stays_out() {
    let (_exclusive, context) = session();
    assert_eq!(code(context.default_stream().begin_capture(GLOBAL)), 900);
    // cudarc's streams are non-blocking: the legacy stream may go on beside their capture
    let mut p = 0;
    assert_eq!(cu!(cuMemAlloc_v2(&mut p, 64)), 0);
    let stream = begin(&context, RELAXED);
    assert_eq!(cu!(cuMemsetD8Async(p, 0, 1, null_mut())), 0);
    assert_eq!(end(&stream).0, 0);
    // a blocking one: it would have to wait
    let mut blocking: sys::CUstream = null_mut();
    assert_eq!(cu!(cuStreamCreate(&mut blocking, 0)), 0);
    assert_eq!(cu!(cuStreamBeginCapture_v2(blocking, RELAXED)), 0);
    assert_eq!(cu!(cuMemsetD8Async(p, 0, 1, null_mut())), 906);
    let mut graph: sys::CUgraph = null_mut();
    assert_eq!(cu!(cuStreamEndCapture(blocking, &mut graph)), 901);
}

#[test]
fn captures_do_not_mix() {
    let (_exclusive, context) = session();
    let (first, second) = (begin(&context, GLOBAL), begin(&context, GLOBAL));
    assert_eq!(code(first.begin_capture(GLOBAL)), 401, "twice");
    let event = first.record_event(None).unwrap();
    assert_eq!(code(second.wait(&event)), 902);
    assert_eq!(end(&first).0, 901);
    assert_eq!(end(&second).0, 901);
    assert_eq!(end(&first).0, 401, "no capture");
    // an event of a capture that has ended
    assert_eq!(code(second.wait(&event)), 907);
    assert_eq!(code(event.synchronize()), 907);
    assert_eq!(cu!(cuStreamBeginCapture_v2(0x123 as sys::CUstream, GLOBAL)), 400);
}

#[test]
fn modes_say_whom_a_capture_binds() {
    let (_exclusive, context) = session();
    let elsewhere = |context: &Arc<CudaContext>| {
        let context = Arc::clone(context);
        let thread = std::thread::spawn(move || {
            context.bind_to_thread().unwrap();
            let mut address = 0;
            cu!(cuMemAlloc_v2(&mut address, 4))
        });
        thread.join().unwrap()
    };
    for (mode, here, there, after) in [(GLOBAL, 900, 900, 901), (THREAD, 900, 0, 901), (RELAXED, 0, 0, 0)] {
        let stream = begin(&context, mode);
        assert_eq!(elsewhere(&context), there, "{mode:?}");
        assert_eq!(cu!(cuMemAlloc_v2(&mut 0, 4)), here, "{mode:?}");
        assert_eq!(end(&stream).0, after, "{mode:?}");
    }
    // another thread may end a relaxed capture only
    for (mode, expected) in [(THREAD, 908), (RELAXED, 0)] {
        let stream = begin(&context, mode);
        let same = Arc::clone(&stream);
        let ended = std::thread::spawn(move || {
            same.context().bind_to_thread().unwrap();
            end(&same).0
        });
        assert_eq!(ended.join().unwrap(), expected, "{mode:?}");
        if expected != 0 {
            assert_eq!(end(&stream).0, 901);
        }
    }
}

#[test]
fn an_executable_graph_keeps_its_order_with_itself() {
    let (_exclusive, context) = session();
    let mut p = 0;
    assert_eq!(cu!(cuMemAlloc_v2(&mut p, 3)), 0);
    assert_eq!(cu!(cuMemsetD8_v2(p, 7, 3)), 0);
    let stream = begin(&context, GLOBAL);
    assert_eq!(cu!(cuMemcpyDtoDAsync_v2(p + 2, p + 1, 1, stream.cu_stream())), 0);
    assert_eq!(cu!(cuMemcpyDtoDAsync_v2(p + 1, p, 1, stream.cu_stream())), 0);
    assert_eq!(cu!(cuMemsetD8Async(p, 1, 1, stream.cu_stream())), 0);
    let (_, graph) = end(&stream);
    let mut exec: sys::CUgraphExec = null_mut();
    assert_eq!(cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0)), 0);
    let options = ptxsim::options::Options { delay_streams: true, ..Default::default() };
    ptxsim::testing::ensure_simulator().with_options(&options, || {
        // launches in three streams of one executable graph run one after another
        for stream in
            [context.new_stream().unwrap(), context.new_stream().unwrap(), context.new_stream().unwrap()]
        {
            assert_eq!(cu!(cuGraphLaunch(exec, stream.cu_stream())), 0);
        }
        context.synchronize().unwrap();
    });
    let mut out = [0u8; 3];
    assert_eq!(cu!(cuMemcpyDtoH_v2(out.as_mut_ptr().cast::<c_void>(), p, 3)), 0);
    assert_eq!(out, [1, 1, 1]);
}

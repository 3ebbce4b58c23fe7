//! Modules and launches.

use crate::{code, cu, session};
use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::Ptx;
use ptxsim::fault::FaultKind;
use ptxsim::options::Options;
use ptxsim::testing::ensure_simulator;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

const PTX: &str = include_str!("kernels.ptx");
/// Where the fatbins of one kernel are, `scale(x, factor, n)`.
const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/");

fn load(context: &Arc<CudaContext>) -> Arc<CudaModule> {
    context.load_module(Ptx::from_src(PTX)).expect("the module loads")
}

fn shape(grid: u32, block: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (block, 1, 1), shared_mem_bytes: 0 }
}

/// Launches `fill` over 128 threads of each of `grid` blocks.
fn fill(
    stream: &Arc<CudaStream>,
    kernel: &CudaFunction,
    out: &mut CudaSlice<u32>,
    value: u32,
    n: u32,
) -> u32 {
    let mut launch = stream.launch_builder(kernel);
    launch.arg(out).arg(&value).arg(&n);
    // SAFETY: the simulator checks every access.
    code(unsafe { launch.launch(shape(n.div_ceil(128), 128)) })
}

/// Launches a kernel without parameters through the plain function.
fn bare(kernel: &CudaFunction, grid: [u32; 3], block: [u32; 3], shared: u32) -> u32 {
    let ([x, y, z], [bx, by, bz]) = (grid, block);
    let (stream, none) = (null_mut(), null_mut());
    cu!(cuLaunchKernel(function(kernel), x, y, z, bx, by, bz, shared, stream, none, none))
}

fn function(kernel: &CudaFunction) -> sys::CUfunction {
    kernel.cu_function()
}

#[test]
fn a_kernel_runs() {
    let (_exclusive, context) = session();
    let simulator = ensure_simulator();
    let stream = context.default_stream();
    let kernel = load(&context).load_function("fill").unwrap();
    let mut out = stream.alloc_zeros::<u32>(1000).unwrap();
    simulator.take_stats();
    assert_eq!(fill(&stream, &kernel, &mut out, 7, 999), 0);
    let mut expected = vec![7; 1000];
    expected[999] = 0;
    assert_eq!(stream.clone_dtoh(&out).unwrap(), expected);
    let stats = simulator.take_stats();
    assert_eq!(stats.len(), 1);
    assert_eq!((stats[0].kernel.as_str(), stats[0].grid, stats[0].block), ("fill", [8, 1, 1], [128, 1, 1]));
    assert_eq!(stats[0].total.global_bytes, 999 * 4);
    assert!(simulator.take_stats().is_empty(), "taken once");
}

#[test]
fn counters_belong_to_the_thread_that_launched() {
    let (_exclusive, context) = session();
    let simulator = ensure_simulator();
    let kernel = load(&context).load_function("nothing").unwrap();
    simulator.take_all_stats();
    let other = {
        let (context, kernel) = (Arc::clone(&context), kernel.clone());
        std::thread::spawn(move || {
            context.bind_to_thread().unwrap();
            assert_eq!(bare(&kernel, [1; 3], [32, 1, 1], 0), 0);
            ensure_simulator().take_stats().len()
        })
    };
    assert_eq!(bare(&kernel, [2, 1, 1], [32, 1, 1], 0), 0);
    assert_eq!(other.join().unwrap(), 1);
    let own = simulator.take_stats();
    assert_eq!(own.len(), 1);
    assert_eq!(own[0].grid, [2, 1, 1]);
}

/// A test that wants no bank conflicts must not pass because none were counted.
#[test]
fn stats_without_counters_are_no_measurement() {
    let (_exclusive, context) = session();
    let simulator = ensure_simulator();
    let kernel = load(&context).load_function("nothing").unwrap();
    simulator.take_stats();
    for counters in [true, false] {
        let options = Options { counters, ..Options::default() };
        simulator.with_options(&options, || assert_eq!(bare(&kernel, [1; 3], [32, 1, 1], 0), 0));
        context.default_stream().synchronize().unwrap();
        let taken = std::panic::catch_unwind(|| simulator.take_stats());
        assert_eq!(taken.map(|all| all[0].counters).ok(), counters.then_some(true));
    }
}

#[test]
fn arguments_have_their_declared_places() {
    let (_exclusive, context) = session();
    let stream = context.default_stream();
    let kernel = load(&context).load_function("odd").unwrap();
    let mut out = stream.alloc_zeros::<u32>(1).unwrap();
    let mut launch = stream.launch_builder(&kernel);
    launch.arg(&mut out).arg(&1000u32).arg(&7u8);
    // SAFETY: the simulator checks every access.
    unsafe { launch.launch(shape(1, 1)) }.unwrap();
    assert_eq!(stream.clone_dtoh(&out).unwrap(), [7000]);

    // the same from a buffer
    let mut address = 0;
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, 4)), 0);
    let mut buffer = [0u8; 16];
    buffer[..8].copy_from_slice(&address.to_le_bytes());
    buffer[8..12].copy_from_slice(&500u32.to_le_bytes());
    buffer[12] = 3;
    let launch = |buffer: *const u8, mut size: usize| {
        let mut extra: [*mut c_void; 5] = [
            // CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE are these numbers as pointers.
            std::ptr::without_provenance_mut(1),
            buffer.cast_mut().cast(),
            std::ptr::without_provenance_mut(2),
            (&raw mut size).cast(),
            null_mut(),
        ];
        let (handle, stream) = (function(&kernel), null_mut());
        cu!(cuLaunchKernel(handle, 1, 1, 1, 1, 1, 1, 0, stream, null_mut(), extra.as_mut_ptr()))
    };
    assert_eq!(launch(buffer.as_ptr(), 16), 0);
    let mut got = 0u32;
    assert_eq!(cu!(cuMemcpyDtoH_v2((&raw mut got).cast(), address, 4)), 0);
    assert_eq!(got, 1500);
    assert_eq!(launch(buffer.as_ptr(), 13), 0, "without padding");
    assert_eq!(launch(buffer.as_ptr(), 12), 1, "too short");
    assert_eq!(launch(buffer.as_ptr(), 32), 1, "too long");
    assert_eq!(launch(std::ptr::null(), 16), 1);
    // no arguments at all, null ones, and ones that point nowhere
    assert_eq!(bare(&kernel, [1; 3], [1; 3], 0), 1);
    for bad in [null_mut::<c_void>(), 16 as *mut c_void] {
        let mut list = [bad; 3];
        let (handle, stream) = (function(&kernel), null_mut());
        assert_eq!(
            cu!(cuLaunchKernel(handle, 1, 1, 1, 1, 1, 1, 0, stream, list.as_mut_ptr(), null_mut())),
            1
        );
    }
    context.synchronize().unwrap();
}

#[test]
fn launches_over_the_limits() {
    let (_exclusive, context) = session();
    let module = load(&context);
    let kernel = |name: &str| module.load_function(name).unwrap();
    let nothing = kernel("nothing");
    let good = [([1, 1, 1], [1024, 1, 1]), ([1, 65_535, 1], [1, 1, 1]), ([1, 1, 2], [1, 1, 64])];
    for (grid, block) in good {
        assert_eq!(bare(&nothing, grid, block, 0), 0, "{grid:?} {block:?}");
    }
    let bad = [
        ([0, 1, 1], [1, 1, 1]),
        ([1, 1, 1], [0, 1, 1]),
        ([1, 1, 0], [1, 1, 1]),
        ([1, 1, 1], [1025, 1, 1]),
        ([1, 1, 1], [32, 33, 1]),
        ([1, 1, 1], [1, 1, 65]),
        ([1, 1, 1], [u32::MAX, u32::MAX, u32::MAX]),
        ([1 << 31, 1, 1], [1, 1, 1]),
        ([1, 65_536, 1], [1, 1, 1]),
        ([1, 1, 65_536], [1, 1, 1]),
    ];
    for (grid, block) in bad {
        assert_eq!(bare(&nothing, grid, block, 0), 1, "{grid:?} {block:?}");
    }
    let small = kernel("small");
    assert_eq!(bare(&small, [1; 3], [64, 1, 1], 0), 0);
    assert_eq!(bare(&small, [1; 3], [8, 8, 1], 0), 0, "the product counts");
    assert_eq!(bare(&small, [1; 3], [65, 1, 1], 0), 1);
    assert_eq!(small.max_threads_per_block().unwrap(), 64);
    let exact = kernel("exact");
    assert_eq!(bare(&exact, [1; 3], [32, 2, 1], 0), 0);
    assert_eq!(bare(&exact, [1; 3], [64, 1, 1], 0), 1);
    // shared memory: 48 KiB, more after opting in, the card's limit
    let shared = kernel("shared_kib");
    assert_eq!(shared.shared_size_bytes().unwrap(), 1024);
    assert_eq!(bare(&shared, [1; 3], [1; 3], 47 << 10), 0);
    assert_eq!(bare(&shared, [1; 3], [1; 3], (47 << 10) + 1), 1);
    let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    assert_eq!(code(shared.set_attribute(most, (162 << 10) + 1)), 1);
    assert_eq!(code(shared.set_attribute(most, -1)), 1);
    shared.set_attribute(most, 162 << 10).unwrap();
    assert_eq!(shared.get_attribute(most).unwrap(), 162 << 10);
    assert_eq!(bare(&shared, [1; 3], [1; 3], 162 << 10), 0);
    assert_eq!(bare(&shared, [1; 3], [1; 3], (162 << 10) + 1), 1);
    assert_eq!(bare(&nothing, [1; 3], [1; 3], u32::MAX), 1);
    context.synchronize().unwrap();
}

#[test]
fn attributes_of_kernels() {
    let (_exclusive, context) = session();
    let kernel = load(&context).load_function("fill").unwrap();
    assert!((1..=32).contains(&kernel.num_regs().unwrap()));
    assert_eq!(kernel.local_size_bytes().unwrap(), 0);
    assert_eq!(kernel.const_size_bytes().unwrap(), 16);
    assert_eq!(kernel.ptx_version().unwrap(), 80);
    assert_eq!(kernel.binary_version().unwrap(), 80);
    assert_eq!(kernel.max_threads_per_block().unwrap(), 1024);
    assert_eq!(code(kernel.set_attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS, 3)), 1);
    kernel.set_function_cache_config(sys::CUfunc_cache::CU_FUNC_CACHE_PREFER_L1).unwrap();
    assert_eq!(kernel.occupancy_max_active_blocks_per_multiprocessor(256, 0, None).unwrap(), 8);
    assert_eq!(kernel.occupancy_max_active_blocks_per_multiprocessor(256, 40 << 10, None).unwrap(), 4);
    assert_eq!(kernel.occupancy_max_active_blocks_per_multiprocessor(256, 50 << 10, None).unwrap(), 0);
    let none: extern "C" fn(i32) -> usize = no_shared;
    let (grid, block) = kernel.occupancy_max_potential_block_size(none, 0, 0, None).unwrap();
    assert_eq!((grid, block), (216, 1024));
    assert_eq!(kernel.occupancy_available_dynamic_smem_per_block(2, 128).unwrap(), 81 << 10);
}

extern "C" fn no_shared(_: i32) -> usize {
    0
}

#[test]
fn variables_can_be_read_and_written() {
    let (_exclusive, context) = session();
    let stream = context.default_stream();
    let module = load(&context);
    let kernel = module.load_function("count").unwrap();
    assert_eq!(bare(&kernel, [2, 1, 1], [50, 1, 1], 0), 0);
    {
        let mut counter = module.get_global("counter", &stream).unwrap();
        assert_eq!(stream.clone_dtoh(&counter).unwrap(), 105u32.to_le_bytes());
        stream.memcpy_htod(&1000u32.to_le_bytes(), &mut counter).unwrap();
    }
    assert_eq!(bare(&kernel, [1, 1, 1], [1, 1, 1], 0), 0);
    let counter = module.get_global("counter", &stream).unwrap();
    assert_eq!(stream.clone_dtoh(&counter).unwrap(), 1001u32.to_le_bytes());
    let table = module.get_global("table", &stream).unwrap();
    assert_eq!(stream.clone_dtoh(&table).unwrap()[4..8], [2, 0, 0, 0]);
    assert_eq!(code(module.get_global("nowhere", &stream)), 500);
    assert_eq!(code(module.load_function("nowhere")), 500);
    // another load has variables of its own
    let again = load(&context);
    let fresh = again.get_global("counter", &stream).unwrap();
    assert_eq!(stream.clone_dtoh(&fresh).unwrap(), 5u32.to_le_bytes());
}

#[test]
fn unknown_instructions_are_named_when_the_kernel_is_asked_for() {
    let (_exclusive, context) = session();
    let module = load(&context);
    assert_eq!(code(module.load_function("unknown")), 218);
    module.load_function("nothing").unwrap();
}

#[test]
fn a_fault_is_sticky_until_the_context_is_gone() {
    let (_exclusive, context) = session();
    let simulator = ensure_simulator();
    {
        let stream = context.default_stream();
        let kernel = load(&context).load_function("fill").unwrap();
        let mut out = stream.alloc_zeros::<u32>(100).unwrap();
        assert_eq!(fill(&stream, &kernel, &mut out, 1, 101), 0, "the launch itself succeeds");
        assert_eq!(cu!(cuCtxSynchronize()), 700);
        assert_eq!(cu!(cuCtxSynchronize()), 700);
        assert_eq!(cu!(cuMemAlloc_v2(&mut 0, 4)), 700);
        assert_eq!(cu!(cuStreamSynchronize(null_mut())), 700);
        assert_eq!(bare(&kernel, [1; 3], [1; 3], 0), 700);
        assert_eq!(code(stream.clone_dtoh(&out)), 700);
        let faults = simulator.take_faults();
        assert_eq!(faults.len(), 1);
        assert_eq!(faults[0].kind, FaultKind::OutOfBounds);
        assert_eq!(faults[0].kernel, "fill");
        assert_eq!((faults[0].block, faults[0].thread), ([0, 0, 0], [100, 0, 0]));
        assert!(PTX.lines().nth(faults[0].ptx_line as usize - 1).unwrap().contains("st.global.u32 [%d3]"));
    }
    drop(context);
    let context = CudaContext::new(0).unwrap();
    let stream = context.default_stream();
    let kernel = load(&context).load_function("fill").unwrap();
    let mut out = stream.alloc_zeros::<u32>(100).unwrap();
    assert_eq!(fill(&stream, &kernel, &mut out, 1, 100), 0);
    assert_eq!(stream.clone_dtoh(&out).unwrap(), [1; 100]);
}

#[test]
fn a_kernel_that_uses_freed_memory_faults() {
    let (_exclusive, context) = session();
    let kernel = load(&context).load_function("fill").unwrap();
    let mut address = 0u64;
    assert_eq!(cu!(cuMemAlloc_v2(&mut address, 128)), 0);
    assert_eq!(cu!(cuMemFree_v2(address)), 0);
    let (mut value, mut n) = (1u32, 1u32);
    let mut list: [*mut c_void; 3] =
        [(&raw mut address).cast(), (&raw mut value).cast(), (&raw mut n).cast()];
    let (handle, stream) = (function(&kernel), null_mut());
    assert_eq!(cu!(cuLaunchKernel(handle, 1, 1, 1, 32, 1, 1, 0, stream, list.as_mut_ptr(), null_mut())), 0);
    assert_eq!(code(context.synchronize()), 700);
    let faults = ensure_simulator().take_faults();
    assert_eq!((faults[0].kind, faults[0].thread), (FaultKind::OutOfBounds, [0, 0, 0]));
}

#[test]
fn a_missing_wait_between_kernels_shows() {
    for (wait, expected) in [(false, 1), (true, 2)] {
        let (_exclusive, context) = session();
        // SAFETY: the streams are ordered by hand, which is what is tested.
        unsafe { context.disable_event_tracking() };
        let options = Options { delay_streams: true, ..Options::default() };
        ensure_simulator().with_options(&options, || {
            let (a, b) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let kernel = load(&context).load_function("fill").unwrap();
            let mut out = a.alloc_zeros::<u32>(64).unwrap();
            context.synchronize().unwrap();
            assert_eq!(fill(&a, &kernel, &mut out, 1, 64), 0);
            if wait {
                b.join(&a).unwrap();
            }
            assert_eq!(fill(&b, &kernel, &mut out, 2, 64), 0);
            context.synchronize().unwrap();
            assert_eq!(a.clone_dtoh(&out).unwrap(), [expected; 64]);
        });
    }
}

#[test]
fn captured_launches_keep_their_arguments() {
    let (_exclusive, context) = session();
    // SAFETY: one stream.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().unwrap();
    let kernel = load(&context).load_function("fill").unwrap();
    let mut out = stream.alloc_zeros::<u32>(64).unwrap();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    let mut value = 3u32;
    let n = 64u32;
    {
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(&mut out).arg(&value).arg(&n);
        // SAFETY: the simulator checks every access.
        unsafe { launch.launch(shape(1, 64)) }.unwrap();
    }
    value = 4;
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().unwrap();
    assert_eq!(stream.clone_dtoh(&out).unwrap(), [0; 64]);
    for _ in 0..2 {
        stream.memset_zeros(&mut out).unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&out).unwrap(), [3; 64]);
    }
    assert_eq!(value, 4);
    // a launch that the driver refuses is refused when captured, too
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    let mut launch = stream.launch_builder(&kernel);
    launch.arg(&mut out).arg(&value).arg(&n);
    // SAFETY: as above.
    assert_eq!(code(unsafe { launch.launch(shape(1, 2000)) }), 1);
    stream.end_capture(flags).unwrap();
}

#[test]
fn modules_can_be_unloaded_while_used() {
    let (_exclusive, context) = session();
    let options = Options { delay_streams: true, ..Options::default() };
    ensure_simulator().with_options(&options, || {
        let text = std::ffi::CString::new(PTX).unwrap();
        let (mut module, mut kernel): (sys::CUmodule, sys::CUfunction) = (null_mut(), null_mut());
        assert_eq!(cu!(cuModuleLoadData(&mut module, text.as_ptr().cast())), 0);
        assert_eq!(cu!(cuModuleGetFunction(&mut kernel, module, c"count".as_ptr())), 0);
        let mut again: sys::CUfunction = null_mut();
        assert_eq!(cu!(cuModuleGetFunction(&mut again, module, c"count".as_ptr())), 0);
        assert_eq!(kernel, again);
        let (stream, none) = (null_mut(), null_mut());
        assert_eq!(cu!(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, none, none)), 0);
        let (mut address, mut bytes) = (0, 0);
        assert_eq!(cu!(cuModuleGetGlobal_v2(&mut address, &mut bytes, module, c"counter".as_ptr())), 0);
        assert_eq!(bytes, 4);
        assert_eq!(cu!(cuModuleUnload(module)), 0);
        assert_eq!(cu!(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, none, none)), 400);
        assert_eq!(cu!(cuModuleGetFunction(&mut again, module, c"count".as_ptr())), 400);
        assert_eq!(cu!(cuModuleUnload(module)), 400);
        let mut out = 0u32;
        assert_eq!(cu!(cuMemcpyDtoH_v2((&raw mut out).cast(), address, 4)), 1, "its variable is gone");
        assert_eq!(code(context.synchronize()), 0, "the launch found it");
    });
}

#[test]
fn cooperative_launches_must_fit() {
    let (_exclusive, context) = session();
    let stream = context.default_stream();
    let kernel = load(&context).load_function("nothing").unwrap();
    let launch = |grid| {
        let mut launch = stream.launch_builder(&kernel);
        // SAFETY: the kernel does nothing.
        code(unsafe { launch.launch_cooperative(shape(grid, 1024)) })
    };
    // two blocks of 1024 threads on each of 108 multiprocessors
    assert_eq!(launch(216), 0);
    assert_eq!(launch(217), 720);
}

fn launch_ex(kernel: &CudaFunction, grid: u32, attributes: &mut [sys::CUlaunchAttribute]) -> u32 {
    let config = sys::CUlaunchConfig {
        gridDimX: grid,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 32,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        hStream: null_mut(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    };
    cu!(cuLaunchKernelEx(&config, function(kernel), null_mut(), null_mut()))
}

fn attribute(id: sys::CUlaunchAttributeID, words: [u32; 3]) -> sys::CUlaunchAttribute {
    // SAFETY: plain numbers.
    let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = id;
    let value = (&raw mut attribute.value).cast::<[u32; 3]>();
    // SAFETY: the value has 64 bytes.
    unsafe { value.write(words) };
    attribute
}

#[test]
fn launches_with_attributes() {
    use sys::CUlaunchAttributeID_enum as Id;
    let _exclusive = ensure_simulator().exclusive();
    let cluster = |x| attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, [x, 1, 1]);
    for cc in [80, 90] {
        ensure_simulator().card(cc).unwrap();
        let context = CudaContext::new(0).unwrap();
        let kernel = load(&context).load_function("nothing").unwrap();
        assert_eq!(launch_ex(&kernel, 8, &mut []), 0);
        assert_eq!(launch_ex(&kernel, 8, &mut [cluster(1)]), 0);
        let of_two = launch_ex(&kernel, 8, &mut [cluster(2)]);
        assert_eq!(of_two, if cc < 90 { 1 } else { 0 });
        if cc == 90 {
            assert_eq!(launch_ex(&kernel, 7, &mut [cluster(2)]), 1, "not a multiple");
            assert_eq!(launch_ex(&kernel, 16, &mut [cluster(16)]), 912);
            let large = Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
            kernel.set_attribute(large, 1).unwrap();
            assert_eq!(launch_ex(&kernel, 16, &mut [cluster(16)]), 0);
            assert_eq!(launch_ex(&kernel, 32, &mut [cluster(32)]), 912);
            assert_eq!(launch_ex(&kernel, 8, &mut [cluster(0)]), 912);
        }
        let cooperative = attribute(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, [1, 0, 0]);
        assert_eq!(launch_ex(&kernel, 1 << 20, &mut [cooperative]), 720);
        let overlap = attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0]);
        let priority = attribute(Id::CU_LAUNCH_ATTRIBUTE_PRIORITY, [0, 0, 0]);
        assert_eq!(launch_ex(&kernel, 8, &mut [overlap, priority]), 0);
        context.synchronize().unwrap();
    }
    assert_eq!(cu!(cuLaunchKernelEx(std::ptr::null(), null_mut(), null_mut(), null_mut())), 1);
}

#[test]
fn fatbins_load_however_they_are_packed() {
    let (_exclusive, context) = session();
    let stream = context.default_stream();
    for name in ["stored", "zstd", "lz4", "size"] {
        let bytes = std::fs::read(format!("{DATA}{name}.fatbin")).unwrap();
        for ptx in [Ptx::from_binary(bytes.clone()), Ptx::from_file(format!("{DATA}{name}.fatbin"))] {
            let kernel = context.load_module(ptx).unwrap().load_function("scale").unwrap();
            let mut x = stream.clone_htod(&[1.0f32, 2.0, 3.0]).unwrap();
            let mut launch = stream.launch_builder(&kernel);
            launch.arg(&mut x).arg(&0.5f32).arg(&2i32);
            // SAFETY: the simulator checks every access.
            unsafe { launch.launch(shape(1, 32)) }.unwrap();
            assert_eq!(stream.clone_dtoh(&x).unwrap(), [0.5, 1.0, 3.0], "{name}");
        }
        // as `__fatBinC_Wrapper_t` points to it
        let mut wrapper = [0u64; 3];
        wrapper[0] = 0x4662_43b1 | 1 << 32;
        wrapper[1] = bytes.as_ptr() as u64;
        let mut module: sys::CUmodule = null_mut();
        assert_eq!(cu!(cuModuleLoadData(&mut module, wrapper.as_ptr().cast())), 0, "{name}");
        assert_eq!(cu!(cuModuleUnload(module)), 0);
        // cut short: whatever comes, it is an error
        for len in [20, 100, bytes.len() / 2] {
            let cut = std::env::temp_dir().join(format!("ptxsim-{}-{name}-{len}", std::process::id()));
            std::fs::write(&cut, &bytes[..len]).unwrap();
            let result = context.load_module(Ptx::from_file(&cut));
            std::fs::remove_file(&cut).unwrap();
            assert_eq!(code(result), 200, "{name} cut to {len}");
        }
    }
    for name in ["cubin.fatbin", "new.fatbin", "scale.cubin"] {
        let bytes = std::fs::read(format!("{DATA}{name}")).unwrap();
        assert_eq!(code(context.load_module(Ptx::from_binary(bytes))), 209, "{name}");
    }
}

#[test]
fn registers_come_from_the_cubin_beside_the_ptx() {
    let (_exclusive, context) = session();
    let module = context.load_module(Ptx::from_file(format!("{DATA}stored.fatbin"))).unwrap();
    let registers = module.load_function("scale").unwrap().num_regs().unwrap();
    let elf = std::fs::read(format!("{DATA}scale.cubin")).unwrap();
    assert_eq!(registers as u32, ptxsim::fatbin::registers(&elf)["scale"]);
}

//! A GPU with its kernels loaded.

use super::abi;
use super::images::IMAGES;
use super::raw::RawStream;
use crate::error::{Error, Result, index};
use cudarc::driver::sys::{CUdevice_attribute_enum as Attribute, CUfunction, CUmodule};
use cudarc::driver::{CudaContext, DriverError, result};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Kernels and the images that hold them.
macro_rules! kernels {
    ($($(#[$doc:meta])* $name:ident = $image:literal :: $function:literal),* $(,)?) => {
        /// A kernel.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Kernel { $($(#[$doc])* $name),* }

        /// (image, function) in the order of [`Kernel`].
        const KERNELS: &[(&str, &str)] = &[$(($image, $function)),*];
    };
}

kernels! {
    /// Block Hadamard rotation.
    Hadamard = "hadamard"::"qkv_hadamard",
    /// Affine codes and pairs of a tensor.
    Quantize = "quantize"::"qkv_quantize",
    /// Affine codes decoded.
    Dequantize = "dequantize"::"qkv_dequantize",
    /// Blocks of a pool copied.
    CopyBlocks = "pages"::"qkv_copy_blocks",
    /// A sequence's pages decoded.
    Gather = "pages"::"qkv_gather",
    /// Pages from one order to the other.
    ConvertPages = "pages"::"qkv_convert_pages",
    /// A sequence's exact tokens.
    ExactRows = "exact_rows"::"qkv_exact_rows",
    /// Tests: places of bits.
    CheckLayout = "checks"::"qkv_check_layout",
    /// Tests: matrix products.
    CheckMma = "checks"::"qkv_check_mma",
    /// Benchmarks: memory read once.
    StreamRead = "baselines"::"qkv_stream_read",
    /// Benchmarks: memory copied.
    StreamCopy = "baselines"::"qkv_stream_copy",
    /// Benchmarks: rows to their slots.
    PlainAppend = "baselines"::"qkv_plain_append",
    /// FP8 bytes of a tensor.
    Fp8Encode = "fp8"::"qkv_fp8_encode",
    /// A tensor of FP8 bytes.
    Fp8Decode = "fp8"::"qkv_fp8_decode",
    /// FP8 scales of a tensor.
    Fp8Absmax = "fp8"::"qkv_fp8_absmax",
    /// Opens a step.
    BeginStep = "begin_step"::"qkv_begin_step",
    /// New keys and values into a layer.
    Append = "append"::"qkv_append",
    /// Attention: see `launch/instances.rs`.
    AttendAny64 = "attend_any_64"::"qkv_attend_any_64",
    /// Attention: see `launch/instances.rs`.
    AttendAnyWide64 = "attend_any_64"::"qkv_attend_any_wide_64",
    /// Attention: see `launch/instances.rs`.
    AttendAny80 = "attend_any_80"::"qkv_attend_any_80",
    /// Attention: see `launch/instances.rs`.
    AttendAnyWide80 = "attend_any_80"::"qkv_attend_any_wide_80",
    /// Attention: see `launch/instances.rs`.
    AttendAny96 = "attend_any_96"::"qkv_attend_any_96",
    /// Attention: see `launch/instances.rs`.
    AttendAnyWide96 = "attend_any_96"::"qkv_attend_any_wide_96",
    /// Attention: see `launch/instances.rs`.
    AttendAny112 = "attend_any_112"::"qkv_attend_any_112",
    /// Attention: see `launch/instances.rs`.
    AttendAny128 = "attend_any_128"::"qkv_attend_any_128",
    /// Attention: see `launch/instances.rs`.
    AttendAnyWide128 = "attend_any_128"::"qkv_attend_any_wide_128",
    /// Attention: see `launch/instances.rs`.
    AttendAny256 = "attend_any_256"::"qkv_attend_any_256",
    /// Attention: see `launch/instances.rs`.
    AttendAny192128 = "attend_any_192_128"::"qkv_attend_any_192_128",
    /// Attention: see `launch/instances.rs`.
    AttendF16Half64 = "attend_f16"::"qkv_attend_f16_half_64",
    /// Attention: see `launch/instances.rs`.
    AttendF16Wide64 = "attend_f16"::"qkv_attend_f16_wide_64",
    /// Attention: see `launch/instances.rs`.
    AttendF16Half128 = "attend_f16"::"qkv_attend_f16_half_128",
    /// Attention: see `launch/instances.rs`.
    AttendF16Wide128 = "attend_f16"::"qkv_attend_f16_wide_128",
    /// Attention: see `launch/instances.rs`.
    AttendE4m3Half64 = "attend_e4m3"::"qkv_attend_e4m3_half_64",
    /// Attention: see `launch/instances.rs`.
    AttendE4m3Wide64 = "attend_e4m3"::"qkv_attend_e4m3_wide_64",
    /// Attention: see `launch/instances.rs`.
    AttendE4m3Half128 = "attend_e4m3"::"qkv_attend_e4m3_half_128",
    /// Attention: see `launch/instances.rs`.
    AttendE4m3Wide128 = "attend_e4m3"::"qkv_attend_e4m3_wide_128",
    /// Attention: see `launch/instances.rs`.
    AttendInt8Integer64 = "attend_int8"::"qkv_attend_int8_integer_64",
    /// Attention: see `launch/instances.rs`.
    AttendInt8Integer128 = "attend_int8"::"qkv_attend_int8_integer_128",
    /// Attention: see `launch/instances.rs`.
    AttendInt8Half64 = "attend_int8"::"qkv_attend_int8_half_64",
    /// Attention: see `launch/instances.rs`.
    AttendInt8Wide64 = "attend_int8"::"qkv_attend_int8_wide_64",
    /// Attention: see `launch/instances.rs`.
    AttendInt8Half128 = "attend_int8"::"qkv_attend_int8_half_128",
    /// Attention: see `launch/instances.rs`.
    AttendInt8Wide128 = "attend_int8"::"qkv_attend_int8_wide_128",
    /// Attention: see `launch/instances.rs`.
    AttendDefault4Integer64 = "attend_default4"::"qkv_attend_default4_integer_64",
    /// Attention: see `launch/instances.rs`.
    AttendDefault4Integer128 = "attend_default4"::"qkv_attend_default4_integer_128",
    /// Attention: see `launch/instances.rs`.
    AttendDefault4Half64 = "attend_default4"::"qkv_attend_default4_half_64",
    /// Attention: see `launch/instances.rs`.
    AttendDefault4Wide64 = "attend_default4"::"qkv_attend_default4_wide_64",
    /// Attention: see `launch/instances.rs`.
    AttendDefault4Half128 = "attend_default4"::"qkv_attend_default4_half_128",
    /// Attention: see `launch/instances.rs`.
    AttendDefault4Wide128 = "attend_default4"::"qkv_attend_default4_wide_128",
    /// Attention: see `launch/instances.rs`.
    AttendDefault2Integer64 = "attend_default2"::"qkv_attend_default2_integer_64",
    /// Attention: see `launch/instances.rs`.
    AttendDefault2Integer128 = "attend_default2"::"qkv_attend_default2_integer_128",
    /// Attention: see `launch/instances.rs`.
    AttendDefault2Half64 = "attend_default2"::"qkv_attend_default2_half_64",
    /// Attention: see `launch/instances.rs`.
    AttendDefault2Wide64 = "attend_default2"::"qkv_attend_default2_wide_64",
    /// Attention: see `launch/instances.rs`.
    AttendDefault2Half128 = "attend_default2"::"qkv_attend_default2_half_128",
    /// Attention: see `launch/instances.rs`.
    AttendDefault2Wide128 = "attend_default2"::"qkv_attend_default2_wide_128",
    /// Attention: see `launch/instances.rs`.
    AttendGroup8Integer128 = "attend_group"::"qkv_attend_group8_integer_128",
    /// Attention: see `launch/instances.rs`.
    AttendGroup8Half128 = "attend_group"::"qkv_attend_group8_half_128",
    /// Attention: see `launch/instances.rs`.
    AttendToken4Integer128 = "attend_token"::"qkv_attend_token4_integer_128",
    /// Attention: see `launch/instances.rs`.
    AttendToken4Half128 = "attend_token"::"qkv_attend_token4_half_128",
    /// Attention: see `launch/instances.rs`.
    AttendToken4Wide128 = "attend_token"::"qkv_attend_token4_wide_128",
    /// Attention: see `launch/instances.rs`.
    AttendToken2Integer128 = "attend_token"::"qkv_attend_token2_integer_128",
    /// Attention: see `launch/instances.rs`.
    AttendToken2Half128 = "attend_token"::"qkv_attend_token2_half_128",
    /// Attention: see `launch/instances.rs`.
    AttendToken2Wide128 = "attend_token"::"qkv_attend_token2_wide_128",
    /// Attention: see `launch/instances.rs`.
    AttendToken1Integer128 = "attend_token"::"qkv_attend_token1_integer_128",
    /// Attention: see `launch/instances.rs`.
    AttendToken1Half128 = "attend_token"::"qkv_attend_token1_half_128",
    /// Attention: see `launch/instances.rs`.
    AttendToken1Wide128 = "attend_token"::"qkv_attend_token1_wide_128",
    /// Joins the partial results of an attention launch.
    Combine = "combine"::"qkv_combine",
    /// Two attention results made one.
    MergeStates = "merge"::"qkv_merge_states",
    /// Prefill attention, heads of up to 64 channels.
    Prefill64 = "prefill_64_64"::"qkv_prefill_64_64",
    /// Pages decoded for it.
    PrefillDecode64 = "prefill_64_64"::"qkv_prefill_decode_64_64",
    /// Prefill attention, heads of up to 96 channels.
    Prefill96 = "prefill_96_96"::"qkv_prefill_96_96",
    /// Pages decoded for it.
    PrefillDecode96 = "prefill_96_96"::"qkv_prefill_decode_96_96",
    /// Prefill attention, heads of up to 128 channels.
    Prefill128 = "prefill_128_128"::"qkv_prefill_128_128",
    /// Pages decoded for it.
    PrefillDecode128 = "prefill_128_128"::"qkv_prefill_decode_128_128",
    /// Prefill attention, heads of up to 192 channels of keys and 128 of values.
    Prefill192 = "prefill_192_128"::"qkv_prefill_192_128",
    /// Pages decoded for it.
    PrefillDecode192 = "prefill_192_128"::"qkv_prefill_decode_192_128",
    /// Prefill attention, heads of up to 256 channels.
    Prefill256 = "prefill_256_256"::"qkv_prefill_256_256",
    /// Pages decoded for it.
    PrefillDecode256 = "prefill_256_256"::"qkv_prefill_decode_256_256",
}

/// A parameter block that kernels take by value.
///
/// # Safety
/// `repr(C)`, made from `kernels/abi.h`, without padding that is not a field.
pub(crate) unsafe trait Parameters: Copy {}

macro_rules! parameters {
    ($($name:ident),* $(,)?) => {$(
        // SAFETY: made from `kernels/abi.h`, which writes its padding out.
        unsafe impl Parameters for abi::$name {}
    )*};
}
parameters!(
    QkvHadamard,
    QkvQuantize,
    QkvDequantize,
    QkvCopyBlocks,
    QkvGather,
    QkvExactRows,
    QkvConvertPages,
    QkvCheckLayout,
    QkvCheckMma,
    QkvStream,
    QkvPlainAppend,
    QkvFp8,
    QkvBeginStep,
    QkvAppend,
    QkvAttend,
    QkvMergeStates,
    QkvPrefill
);

/// How a kernel is started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    /// Blocks, 1 to 2^31 - 1; only the x dimension is used, the others end at 65,535.
    pub(crate) blocks: u32,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
}

/// Whether a CUDA driver can be loaded and has a device. Never panics, and needs no device memory.
///
/// It says nothing of whether this build has kernels for that device; [`Device::new`] does.
pub fn is_available() -> bool {
    let names: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
    let found = names.iter().any(|name| {
        // SAFETY: loading the driver runs its initialisers, as every CUDA program does; nothing is called.
        unsafe { libloading::Library::new(*name) }.map(std::mem::forget).is_ok()
    });
    // Without a driver cudarc panics, so it is asked only where there is one.
    found && result::init().is_ok() && result::device::get_count().is_ok_and(|n| n > 0)
}

/// One GPU: its primary context, the limits that launches ask for, and the kernels.
///
/// Cloning is cheap, and all handles of a GPU share the modules: each image is loaded once a process, when the first of its
/// kernels is started. Start every kernel that a graph will hold once before capturing, or call [`Device::load_all`]: loading
/// is not allowed during a capture.
#[derive(Debug, Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    context: Arc<CudaContext>,
    ordinal: usize,
    compute_capability: u32,
    multiprocessors: u32,
    shared_limit: u32,
    modules: Mutex<HashMap<&'static str, Module>>,
    functions: Vec<OnceLock<Function>>,
}

#[derive(Debug, Clone, Copy)]
struct Module(CUmodule);

#[derive(Debug, Clone, Copy)]
struct Function(CUfunction);

// SAFETY: module handles may be used from any thread that has their context current; they live as long as the process.
unsafe impl Send for Module {}
// SAFETY: as above, for functions.
unsafe impl Send for Function {}
// SAFETY: the driver takes function handles from several threads at once.
unsafe impl Sync for Function {}

/// The error of a failed driver call.
pub(crate) fn failed(what: &'static str) -> impl FnOnce(DriverError) -> Error {
    use cudarc::driver::sys::CUresult::*;
    move |e| {
        let help = match e.0 {
            CUDA_ERROR_INVALID_HANDLE | CUDA_ERROR_INVALID_CONTEXT | CUDA_ERROR_CONTEXT_IS_DESTROYED => {
                "; give a live stream of the device's primary context"
            }
            _ => "",
        };
        Error::Cuda { what, problem: format!("{e}{help}") }
    }
}

impl Device {
    /// The GPU with this number, as CUDA counts them.
    ///
    /// # Errors
    /// [`Error::Cuda`] if there is no driver, or a device below compute capability 8.0; [`Error::OutOfRange`] for a number that no
    /// device has.
    pub fn new(ordinal: usize) -> Result<Self> {
        static DEVICES: Mutex<Vec<(usize, Device)>> = Mutex::new(Vec::new());
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, device)) = devices.iter().find(|d| d.0 == ordinal) {
            return Ok(device.clone());
        }
        if !is_available() {
            return Err(Error::Cuda {
                what: "the driver",
                problem:
                    "no CUDA driver with a device was found; install NVIDIA's driver, or use the CPU backend"
                        .into(),
            });
        }
        let count = result::device::get_count().map_err(failed("counting devices"))? as usize;
        if ordinal >= count {
            return Err(Error::OutOfRange { what: "device", got: index(ordinal), limit: count });
        }
        let context = CudaContext::new(ordinal).map_err(failed("the context"))?;
        let ask = |a| context.attribute(a).map(|x| x as u32).map_err(failed("a device attribute"));
        let compute_capability = 10 * ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if compute_capability < 80 {
            return Err(Error::Cuda {
                what: "the device",
                problem: format!("compute capability {compute_capability}; the kernels need 80 or more"),
            });
        }
        let device = Self {
            inner: Arc::new(Inner {
                ordinal,
                compute_capability,
                multiprocessors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
                shared_limit: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
                modules: Mutex::default(),
                functions: (0..KERNELS.len()).map(|_| OnceLock::new()).collect(),
                context,
            }),
        };
        devices.push((ordinal, device.clone()));
        Ok(device)
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.inner.ordinal
    }

    /// Compute capability, 80 for 8.0.
    pub fn compute_capability(&self) -> u32 {
        self.inner.compute_capability
    }

    /// Streaming multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.inner.multiprocessors
    }

    /// Shared memory that a block can have at most, in bytes.
    pub(crate) fn shared_limit(&self) -> u32 {
        self.inner.shared_limit
    }

    /// cudarc's handle of the primary context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    /// Loads all kernels now.
    ///
    /// # Errors
    /// [`Error::Cuda`] if this build has no code for the device, or the driver refuses it.
    pub fn load_all(&self) -> Result<()> {
        (0..KERNELS.len()).try_for_each(|i| self.function(i).map(drop))
    }

    fn function(&self, index: usize) -> Result<Function> {
        let slot = &self.inner.functions[index];
        if let Some(f) = slot.get() {
            return Ok(*f);
        }
        self.inner.context.bind_to_thread().map_err(failed("the context"))?;
        let (image, name) = KERNELS[index];
        let mut modules = self.inner.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(image) {
            Some(m) => *m,
            None => {
                let m = self.load(image)?;
                modules.insert(image, m);
                m
            }
        };
        let c_name =
            CString::new(name).map_err(|_| Error::Cuda { what: "a kernel's name", problem: name.into() })?;
        // SAFETY: the module was loaded into this context, which is current, and is never unloaded.
        let f = unsafe { result::module::get_function(module.0, c_name) }
            .map_err(failed("looking up a kernel"))?;
        self.allow_shared(f)?;
        Ok(*slot.get_or_init(|| Function(f)))
    }

    /// Lets a kernel have all the dynamic shared memory that the device allows beside its static part.
    fn allow_shared(&self, f: CUfunction) -> Result<()> {
        use cudarc::driver::sys::CUfunction_attribute_enum as F;
        // SAFETY: the function is of a loaded module.
        let used =
            unsafe { result::function::get_function_attribute(f, F::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES) }
                .map_err(failed("a kernel's attribute"))?;
        let most = (self.inner.shared_limit as i32 - used).max(0);
        // SAFETY: as above; the value is within the device's limit.
        unsafe {
            result::function::set_function_attribute(
                f,
                F::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                most,
            )
        }
        .map_err(failed("a kernel's shared memory"))
    }

    fn load(&self, image: &str) -> Result<Module> {
        let found = IMAGES.iter().find(|i| i.name == image).ok_or_else(|| Error::Cuda {
            what: "the kernels",
            problem: format!("this build has no image {image}; it was made without nvcc (DOCS_RS is set)"),
        })?;
        // SAFETY: a fat binary made by nvcc, whole, alive for the life of the process; the context is current.
        let module = unsafe { result::module::load_data(found.bytes.as_ptr().cast()) };
        module.map(Module).map_err(|e| Error::Cuda {
            what: "loading kernels",
            problem: format!(
                "{e}; the device has compute capability {}: build with CUDA_COMPUTE_CAP={0}, or with a toolkit no \
                 newer than the driver",
                self.inner.compute_capability
            ),
        })
    }

    /// Starts a kernel on a stream.
    ///
    /// # Safety
    /// `parameters` is the struct that this kernel takes; all memory it names is valid on this device for what the kernel
    /// does, until the stream has done it; `grid` is within what the kernel was written for.
    pub(crate) unsafe fn start<P: Parameters>(
        &self,
        kernel: Kernel,
        grid: Grid,
        stream: RawStream<'_>,
        parameters: &P,
    ) -> Result<()> {
        let f = self.function(kernel as usize)?;
        self.inner.context.bind_to_thread().map_err(failed("the context"))?;
        let mut arguments = [std::ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
        // SAFETY: the function is loaded and takes one parameter block of this type; the caller promises the rest.
        unsafe {
            result::launch_kernel(
                f.0,
                (grid.blocks, 1, 1),
                (grid.threads, 1, 1),
                grid.shared,
                stream.as_raw().cast(),
                &mut arguments,
            )
        }
        .map_err(failed("a launch"))
    }
}

//! Compiles `kernels/*.cu` to one fat binary each, which the library embeds. Nothing is linked, so neither cudart nor a C++
//! runtime becomes a dependency of the program. Without the feature `cuda` this does nothing.
//!
//! | variable | meaning |
//! |---|---|
//! | `NVCC` | nvcc itself |
//! | `CUDA_HOME`, `CUDA_PATH`, `CUDA_ROOT`, `CUDA_TOOLKIT_ROOT_DIR` | a toolkit: nvcc is in its `bin` |
//! | `CUDA_COMPUTE_CAP` | one architecture, a list, or `all`: `90`, `80,90`, `sm_89` |
//! | `NVCC_CCBIN` | host compiler for nvcc |
//! | `NVCC_FLAGS` | more flags for nvcc |
//! | `QKV_KERNEL_CACHE` | a folder where images are kept, so that profiles and feature sets share them |
//! | `DOCS_RS` | set by docs.rs: no kernels, documentation only |

#[cfg(feature = "cuda")]
#[path = "build/find.rs"]
mod find;
#[cfg(feature = "cuda")]
#[path = "build/nvcc.rs"]
mod nvcc;

#[cfg(feature = "bindgen")]
#[path = "build/bindings.rs"]
mod bindings;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    if let Err(problem) = nvcc::run() {
        // One message, no backtrace: cargo shows what a failed build script wrote here.
        eprintln!("\nerror: the CUDA kernels of qkv were not built\n{problem}\n");
        std::process::exit(1);
    }
    #[cfg(feature = "bindgen")]
    if let Err(problem) = bindings::run() {
        eprintln!("\nerror: {problem}\n");
        std::process::exit(1);
    }
}

//! Names the shared library as the driver is named: a later `dlopen("libcuda.so")` in a process that has loaded it
//! then finds it, and no environment variable is needed.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}

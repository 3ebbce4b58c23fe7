//! `src/cuda/abi.rs` from `kernels/abi.h`, for maintainers.

use std::env;
use std::fs;

const HEADER: &str = "kernels/abi.h";
const BINDINGS: &str = "src/cuda/abi.rs";

/// Fails if the committed bindings are not those of the header; with `QKV_BLESS` set, writes them.
pub(crate) fn run() -> Result<(), String> {
    println!("cargo:rerun-if-changed={HEADER}");
    println!("cargo:rerun-if-changed={BINDINGS}");
    println!("cargo:rerun-if-env-changed=QKV_BLESS");
    let fresh = bindgen::Builder::default()
        .header(HEADER)
        .allowlist_item("Qkv.*|QKV_.*")
        .use_core()
        .derive_default(true)
        // constant assertions of every size, alignment and offset: each build checks them
        .layout_tests(true)
        .default_macro_constant_type(bindgen::MacroTypeVariation::Unsigned)
        .disable_header_comment()
        .raw_line("// Made from kernels/abi.h: QKV_BLESS=1 cargo build --features bindgen")
        .formatter(bindgen::Formatter::Rustfmt)
        .generate()
        .map_err(|e| format!("bindgen: {e}. It needs libclang; LIBCLANG_PATH names its folder."))?
        .to_string();
    if fs::read_to_string(BINDINGS).is_ok_and(|old| old == fresh) {
        return Ok(());
    }
    if env::var_os("QKV_BLESS").is_none() {
        return Err(format!(
            "{BINDINGS} is not what {HEADER} says; run QKV_BLESS=1 cargo build --features bindgen"
        ));
    }
    fs::write(BINDINGS, fresh).map_err(|e| format!("{BINDINGS}: {e}"))
}

//! What the compiler made of the kernels: no spills, no local memory, small images.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn kernels_keep_to_their_registers_and_images_are_small() {
    let folder = Path::new(env!("OUT_DIR"));
    let (mut bytes, mut small) = (0, 0);
    // Kernels of an architecture: of all, of decode and of prefill attention.
    let mut kernels = BTreeMap::<String, [usize; 3]>::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.extension().and_then(|e| e.to_str()) {
            Some("fatbin") => {
                let n = fs::metadata(&path).unwrap().len();
                bytes += n;
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                if !["attend", "prefill", "combine"].iter().any(|a| name.starts_with(a)) {
                    small += n;
                }
            }
            Some("ptxas") => {
                let text = fs::read_to_string(&path).unwrap();
                let mut name = "";
                for line in text.lines() {
                    if let Some((_, rest)) = line.split_once("Compiling entry function") {
                        name = rest;
                        let mut quoted = rest.split('\'').skip(1).step_by(2);
                        let (kernel, architecture) = (quoted.next().unwrap(), quoted.next().unwrap());
                        let counts = kernels.entry(architecture.into()).or_default();
                        counts[0] += 1;
                        counts[1] += usize::from(kernel.starts_with("qkv_attend_"));
                        counts[2] += usize::from(kernel.starts_with("qkv_prefill_"));
                    }
                    if line.contains("bytes stack frame") {
                        let clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
                        assert_eq!(line.trim(), clean, "{} {name}", path.display());
                    }
                }
            }
            _ => {}
        }
    }
    assert!(!kernels.is_empty(), "no report of ptxas in {}", folder.display());
    for (architecture, [all, decode, prefill]) in kernels {
        assert!(decode > 0 && prefill > 0 && all > decode + prefill, "{architecture}: {all} kernels");
        // Each takes time to build, and room.
        assert!(
            decode <= 48 && prefill <= 16,
            "{architecture}: {decode} decode and {prefill} prefill kernels"
        );
    }
    // As `cargo xtask kernels` has it for all architectures without line tables, which take as much room as code: two with them are
    // about as large.
    assert!(small <= 3 << 20, "{small} bytes of images beside attention's");
    assert!(bytes - small <= 12 << 20, "{} bytes of images of attention", bytes - small);
}

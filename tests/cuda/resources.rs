//! What the compiler made of the kernels: no spills, no local memory, small images.

use std::fs;
use std::path::Path;

#[test]
fn kernels_keep_to_their_registers_and_images_are_small() {
    let folder = Path::new(env!("OUT_DIR"));
    let (mut kernels, mut bytes, mut small) = (0, 0, 0);
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
                        kernels += 1;
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
    assert!(kernels > 0, "no report of ptxas in {}", folder.display());
    assert!(small <= 3 << 20, "{small} bytes of images beside attention's");
    assert!(bytes <= 12 << 20, "{bytes} bytes of images");
}

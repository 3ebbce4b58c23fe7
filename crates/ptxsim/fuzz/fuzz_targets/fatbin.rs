//! Fatbins and cubins: `cargo +nightly fuzz run fatbin corpus ../tests/data`
#![no_main]

use ptxsim::fatbin;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    fatbin::registers(bytes);
    if let Some(header) = bytes.first_chunk() {
        fatbin::total_len(header);
    }
    if let Some(header) = bytes.first_chunk() {
        fatbin::elf_len(header);
    }
    let Ok(entries) = fatbin::entries(bytes) else { return };
    for entry in &entries {
        let _ = entry.text();
    }
    let _ = fatbin::select_ptx(&entries, 90);
    fatbin::registers_for(&entries, 80);
});

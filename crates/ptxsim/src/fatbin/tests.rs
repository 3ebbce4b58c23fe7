//! Over fatbins that nvcc made (`tests/data/build.sh`), and damaged ones.

use super::*;

const STORED: &[u8] = include_bytes!("../../tests/data/stored.fatbin");
const ZSTD: &[u8] = include_bytes!("../../tests/data/zstd.fatbin");
const LZ4: &[u8] = include_bytes!("../../tests/data/lz4.fatbin");
const SIZE: &[u8] = include_bytes!("../../tests/data/size.fatbin");
const CUBIN: &[u8] = include_bytes!("../../tests/data/cubin.fatbin");
const NEW: &[u8] = include_bytes!("../../tests/data/new.fatbin");
const ELF: &[u8] = include_bytes!("../../tests/data/scale.cubin");

#[test]
fn what_nvcc_puts_in() {
    for (file, ptx, elf) in [
        (STORED, Compression::Stored, Compression::Stored),
        (ZSTD, Compression::Zstd, Compression::Stored),
        (LZ4, Compression::Lz4, Compression::Stored),
        (SIZE, Compression::Zstd, Compression::Zstd),
    ] {
        let entries = entries(file).unwrap();
        let shown: Vec<_> = entries.iter().map(|e| (e.kind, e.target.to_string(), e.compression)).collect();
        assert_eq!(
            shown,
            [
                (Kind::Elf, "80".to_string(), elf),
                (Kind::Ptx, "80".to_string(), ptx),
                (Kind::Elf, "90a".to_string(), elf),
                (Kind::Ptx, "90a".to_string(), ptx)
            ]
        );
        assert_eq!(entries[1].version, (9, 0));
        for entry in &entries {
            let contents = entry.contents().unwrap();
            match entry.kind {
                Kind::Elf => assert!(contents.starts_with(&ELF_MAGIC)),
                _ => assert!(entry.text().unwrap().contains(".entry scale")),
            }
        }
        assert_eq!(total_len(file[..16].try_into().unwrap()), Some(file.len()));
    }
}

#[test]
fn the_newest_ptx_that_the_card_runs() {
    for file in [STORED, ZSTD, LZ4, SIZE] {
        let entries = entries(file).unwrap();
        for (cc, target) in [(80, "sm_80"), (86, "sm_80"), (89, "sm_80"), (90, "sm_90a"), (120, "sm_80")] {
            let module = crate::ptx::parse(&select_ptx(&entries, cc).unwrap()).unwrap();
            assert_eq!(format!("sm_{}", module.target), target, "on {cc}");
            assert_eq!(module.functions[0].name, "scale");
        }
        assert_eq!(
            select_ptx(&entries, 75),
            Err(FatbinError::NoSuitable(75, vec![entries[1].target, entries[3].target]))
        );
    }
    let new = entries(NEW).unwrap();
    let error = select_ptx(&new, 90).unwrap_err().to_string();
    assert!(error.contains("9.0") && error.contains("compute_100f, compute_120"), "{error}");
    assert!(select_ptx(&new, 103).unwrap().contains("sm_100f"));
    assert!(select_ptx(&new, 120).unwrap().contains("sm_120"));
    let error = select_ptx(&entries(CUBIN).unwrap(), 80).unwrap_err().to_string();
    assert!(error.contains("machine code only (sm_80, sm_86)"), "{error}");
}

#[test]
fn registers_of_the_cubin() {
    // ptxas -v says the same of these files
    let expected = std::collections::HashMap::from([("scale".to_string(), 8)]);
    assert_eq!(registers(ELF), expected);
    assert_eq!(elf_len(ELF[..64].try_into().unwrap()), Some(ELF.len()));
    for file in [STORED, SIZE, CUBIN] {
        let entries = entries(file).unwrap();
        assert_eq!(registers_for(&entries, 80), expected);
        assert_eq!(registers_for(&entries, 89), expected);
        assert!(registers_for(&entries, 120).is_empty());
    }
    assert_eq!(registers_for(&entries(STORED).unwrap(), 90).len(), 1);
    assert!(registers_for(&entries(NEW).unwrap(), 120).is_empty());
}

#[test]
fn damage_is_an_error() {
    for file in [STORED, ZSTD, LZ4, SIZE, NEW] {
        for len in 0..file.len() {
            assert!(entries(&file[..len]).is_err(), "cut at {len}");
        }
    }
    let change = |file: &[u8], at: usize, with: &[u8]| {
        let mut file = file.to_vec();
        file[at..at + with.len()].copy_from_slice(with);
        entries(&file).and_then(|e| e.iter().map(|e| e.contents()).collect::<Result<Vec<_>, _>>()).map(|_| ())
    };
    let ptx = |file: &[u8]| {
        let e = entries(file).unwrap();
        e[1].payload.as_ptr() as usize - file.as_ptr() as usize - 80
    };
    assert_eq!(change(ZSTD, ptx(ZSTD), &[1]), Ok(()));
    for (file, at, with) in [
        (ZSTD, 0, &[0u8][..]),                                // magic
        (ZSTD, 4, &[2]),                                      // version
        (ZSTD, 6, &[15, 0]),                                  // header shorter than a header
        (ZSTD, 8, &[0xff; 8]),                                // length
        (ZSTD, 20, &[0; 4]),                                  // entry header of 0 bytes
        (ZSTD, 20, &[0xff; 4]),                               // and of 4 GiB
        (ZSTD, 24, &[0xff; 8]),                               // payload beyond the end
        (ZSTD, ptx(ZSTD) + 16, &[0xff; 4]),                   // compressed size
        (ZSTD, ptx(ZSTD) + 56, &[0xff; 8]),                   // uncompressed size: huge
        (ZSTD, ptx(ZSTD) + 56, &[1, 0, 0, 0, 0, 0, 0, 0]),    // too small
        (ZSTD, ptx(ZSTD) + 56, &[0, 0x10, 0, 0, 0, 0, 0, 0]), // too large
        (LZ4, ptx(LZ4) + 56, &[0xff; 8]),
        (LZ4, ptx(LZ4) + 56, &[0, 0, 0, 0x3f, 0, 0, 0, 0]),
        (LZ4, ptx(LZ4) + 56, &[1, 0, 0, 0, 0, 0, 0, 0]),
        (LZ4, ptx(LZ4) + 56, &[0, 0x10, 0, 0, 0, 0, 0, 0]),
        (ZSTD, ptx(ZSTD) + 40, &[0, 0xa0]), // both compressions
        (ZSTD, ptx(ZSTD) + 80, &[0; 8]),    // payload
    ] {
        assert!(matches!(change(file, at, with), Err(FatbinError::Malformed(_))), "{at}: {with:?}");
    }
    assert_eq!(select_ptx(&[], 80).unwrap_err().to_string(), "this fatbin is empty");
}

#[test]
fn damaged_cubins_never_crash() {
    assert!(registers(b"").is_empty() && registers(b"\x7fELF").is_empty());
    for len in 0..ELF.len() {
        registers(&ELF[..len]);
    }
    // every byte of headers, tables and `.nv.info` set to its extremes
    for at in 0..ELF.len() {
        for with in [0, 0x7f, 0xff] {
            let mut elf = ELF.to_vec();
            elf[at] = with;
            registers(&elf);
            elf_len(elf[..64].try_into().unwrap());
        }
    }
    assert_eq!(elf_len(&[0; 64]), None);
}

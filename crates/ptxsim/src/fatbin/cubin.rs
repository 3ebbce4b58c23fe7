//! What a cubin says of its functions.

use super::{ELF_MAGIC, MOST, take, u16_at, u32_at, u64_at};
use std::collections::HashMap;

/// Bytes of a section header and of a symbol of a 64-bit ELF file.
const SECTION: u64 = 64;
const SYMBOL: usize = 24;
/// `EIATTR_REGCOUNT`, with a value of several bytes.
const REGCOUNT: [u8; 2] = [0x04, 0x2f];

/// Bytes of a whole cubin by its first 64 bytes: nvcc puts the section and program headers last. `None` if it is no
/// cubin or cannot be that long.
pub fn elf_len(header: &[u8; 64]) -> Option<usize> {
    if !is_elf(header) {
        return None;
    }
    let end = |offset: usize, size: usize, count: usize| {
        let table = u64::from(u16_at(header, size)?) * u64::from(u16_at(header, count)?);
        u64_at(header, offset)?.checked_add(table)
    };
    let len = end(0x28, 0x3a, 0x3c)?.max(end(0x20, 0x36, 0x38)?);
    (64..=MOST).contains(&len).then_some(len as usize)
}

/// A 64-bit little-endian ELF file.
fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(&ELF_MAGIC) && bytes.get(4..6) == Some(&[2, 1])
}

struct Section<'a> {
    name: u32,
    link: u32,
    kind: u32,
    data: &'a [u8],
}

/// The sections whose contents are inside the file.
fn sections(elf: &[u8]) -> Option<Vec<Option<Section<'_>>>> {
    let table = u64_at(elf, 0x28)?;
    if u64::from(u16_at(elf, 0x3a)?) != SECTION {
        return None;
    }
    let section = |i: u16| {
        let at = usize::try_from(table.checked_add(u64::from(i) * SECTION)?).ok()?;
        let header: [u8; SECTION as usize] = take(elf, at)?;
        let start = usize::try_from(u64_at(&header, 24)?).ok()?;
        let end = start.checked_add(usize::try_from(u64_at(&header, 32)?).ok()?)?;
        let (name, kind, link) = (u32_at(&header, 0)?, u32_at(&header, 4)?, u32_at(&header, 40)?);
        Some(Section { name, link, kind, data: elf.get(start..end)? })
    };
    Some((0..u16_at(elf, 0x3c)?).map(section).collect())
}

/// The string at an offset of a string table.
fn string(table: &[u8], at: u32) -> Option<&str> {
    let text = table.get(at as usize..)?;
    std::str::from_utf8(&text[..text.iter().position(|&b| b == 0)?]).ok()
}

/// Registers of each function of a cubin, from `.nv.info`. Empty if it is damaged.
pub fn registers(elf: &[u8]) -> HashMap<String, u32> {
    find_registers(elf).unwrap_or_default()
}

fn find_registers(elf: &[u8]) -> Option<HashMap<String, u32>> {
    if !is_elf(elf) {
        return None;
    }
    let sections = sections(elf)?;
    let get = |i: usize| sections.get(i)?.as_ref();
    let names = get(u16_at(elf, 0x3e)?.into())?.data;
    let symbols = sections.iter().flatten().find(|s| s.kind == 2)?;
    let strings = get(symbols.link as usize)?.data;
    let info = sections.iter().flatten().find(|s| string(names, s.name) == Some(".nv.info"))?.data;
    let mut registers = HashMap::new();
    let mut at = 0;
    while let Some([format, attribute]) = take(info, at) {
        // format 4 has a size and a value, the others a value in these two bytes
        let size = if format == 4 { u16_at(info, at + 2)? as usize } else { 0 };
        if [format, attribute] == REGCOUNT && size == 8 {
            let symbol = (u32_at(info, at + 4)? as usize).checked_mul(SYMBOL)?;
            let count = u32_at(info, at + 8)?;
            let name = u32_at(symbols.data, symbol).and_then(|name| string(strings, name));
            if let Some(name) = name {
                registers.insert(name.to_string(), count);
            }
        }
        at += 4 + size;
    }
    Some(registers)
}

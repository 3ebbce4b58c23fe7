//! What a kernel's main loop costs.

use super::budget;
use super::cubins::Compiled;
use super::flow::{Flow, Loop};
use super::listing::{Function, Instruction};
use super::walk::{self, Way};
use anyhow::{Result, bail};
use std::collections::{BTreeMap, BTreeSet};

/// Tokens of a page.
const TILE: usize = 64;

/// The turns of a page loop.
#[derive(Debug, Clone)]
pub struct Decode {
    /// Pages that a turn reads.
    pub pages: usize,
    /// Elements of keys and values of these.
    pub elements: usize,
    /// The turn that pages in the middle of a sequence take.
    pub common: Way,
    /// The turn on which every vote moves something: the softmax reference, the scale of steps, the norm of queries.
    pub rescale: Way,
    /// Of 8-bit floats: instructions of the common turn where each token and head has a scale.
    pub scaled: Option<usize>,
    /// `LDL` and `STL` anywhere in the loop.
    pub local: usize,
    /// Loops that read pages; where there are several the cheapest is what pages in the middle take.
    pub loops: usize,
}

impl Decode {
    /// Lane-instructions per element.
    pub fn per_element(&self, way: &Way) -> f64 {
        self.per_element_of(way.code.len())
    }

    /// The same of so many instructions.
    pub fn per_element_of(&self, instructions: usize) -> f64 {
        32.0 * instructions as f64 / self.elements as f64
    }
}

/// Channels of keys and values by the name of a kernel: `qkv_attend_any_192_128`, `qkv_attend_f16_half_64`.
pub fn dims(kernel: &str) -> Option<(usize, usize)> {
    let numbers: Vec<usize> = kernel.rsplit('_').map_while(|n| n.parse().ok()).collect();
    match numbers[..] {
        [d] => Some((d, d)),
        [value, key] => Some((key, value)),
        _ => None,
    }
}

/// Measures the page loop of a decode kernel.
///
/// It is told from the loop over exact rows, which transposes values on their way out of shared memory (`LDSM`): codes of pages
/// lie as the tensor cores want them.
///
/// # Errors
/// If there is no such loop, or its products or weights are not those of whole pages.
pub fn decode(kernel: &Compiled) -> Result<Decode> {
    let (f, flow) = (&kernel.function, Flow::of(&kernel.function));
    let Some((key, value)) = dims(&f.name) else { bail!("{} does not name its channels", f.name) };
    let has = |l: &Loop, what: &dyn Fn(&Instruction) -> bool| flow.instructions(l).any(|i| what(&f.code[i]));
    let all = flow.loops();
    let with: Vec<&Loop> =
        all.iter().filter(|l| has(l, &Instruction::is_mma) && !has(l, &|i| i.base() == "LDSM")).collect();
    let outer = with.iter().filter(|l| !with.iter().any(|o| o.head != l.head && o.blocks.contains(&l.head)));
    let mut found: Option<Decode> = None;
    let mut loops = 0;
    for l in outer {
        let common = walk::way(f, &flow, l, false, |_| false)?;
        let pages = pages(f, &common, key, value)?;
        let measured = Decode {
            pages,
            elements: pages * TILE * (key + value),
            rescale: walk::way(f, &flow, l, true, |_| false)?,
            scaled: if f.name.contains("_e4m3_") { scaled(f, &flow, l, pages)? } else { None },
            local: flow.instructions(l).filter(|i| matches!(f.code[*i].base(), "LDL" | "STL")).count(),
            common,
            loops: 0,
        };
        loops += 1;
        if found.as_ref().is_none_or(|d| measured.per_element(&measured.common) < d.per_element(&d.common)) {
            found = Some(measured);
        }
    }
    match found {
        Some(d) => Ok(Decode { loops, ..d }),
        None => bail!("{}: no loop reads pages", f.name),
    }
}

/// Instructions of `pages` of 8-bit floats with a scale for each token and head. Scales of values are told by their loads; those of keys are
/// loaded under a condition, and all that is left out without them are the products with scores, one for each. `None` if these are not found.
fn scaled(f: &Function, flow: &Flow, page: &Loop, pages: usize) -> Result<Option<usize>> {
    let loads = |i: &Instruction| i.base() == "LDG" && i.has("CONSTANT") && !i.has("NA");
    let way = walk::way(f, flow, page, false, loads)?;
    let products = |b: &usize| {
        let code = &f.code[flow.blocks[*b].from..flow.blocks[*b].to];
        let lanes: Option<usize> = code
            .iter()
            .map(|i| match i.base() {
                "FMUL" => Some(1),
                "FMUL2" => Some(2),
                _ => None,
            })
            .sum();
        (lanes == Some(pages * weights(f))).then_some(code.len())
    };
    let mut skipped = page.blocks.iter().filter(|b| !way.blocks.contains(b)).filter_map(products);
    Ok(skipped.next().map(|n| way.code.len() + n))
}

/// Weights of a page that a lane has: 16 of 8 columns; kernels for 9 to 16 rows have twice as many.
fn weights(f: &Function) -> usize {
    if budget::is_wide(&f.name) { 32 } else { 16 }
}

/// Pages of a turn: by its products on the integer path, by its weights on the f16 path, where minimums and sums take products too.
fn pages(f: &Function, way: &Way, key: usize, value: usize) -> Result<usize> {
    let count = |base: &str, modifier: &str| {
        let is = |i: &&usize| f.code[**i].base() == base && f.code[**i].has(modifier);
        way.code.iter().filter(is).count()
    };
    // `most_step` takes one more exponential a page where it is not kept.
    let (what, found, one, extra) = match count("IMMA", "16832") {
        0 => ("weights", count("MUFU", "EX2"), weights(f), 1),
        // 16 tokens by 32 channels, and 16 channels by 32 tokens.
        n => ("products", n, TILE / 16 * key.div_ceil(32) + value.div_ceil(16) * TILE / 32, 0),
    };
    let pages = found / one;
    if pages == 0 || found % one > extra * pages {
        bail!("{}: {found} {what} in a turn, {one} are a page's: its loop is not understood", f.name);
    }
    Ok(pages)
}

/// The turns of prefill's main loop.
#[derive(Debug, Clone)]
pub struct Prefill {
    /// Products of a turn.
    pub products: usize,
    /// A turn over a tile of each kind of [`PREFILL_TILES`], loops that stage turning once, and its instructions where they turn
    /// as often as they do.
    pub turns: [(Way, usize); 2],
    /// `LDL` and `STL` anywhere in the loop.
    pub local: usize,
}

/// Warps of a block of prefill that has enough to do; smaller launches have half of them.
const PREFILL_WARPS: usize = 8;

/// Tiles that prefill's loop is measured with: exact rows of f16, and pages of 4-bit codes.
pub const PREFILL_TILES: [&str; 2] = ["f16 rows", "int4 pages"];

impl Prefill {
    /// Instructions for each product, for a tile of [`PREFILL_TILES`].
    pub fn per_product(&self, tile: usize) -> f64 {
        self.turns[tile].1 as f64 / self.products as f64
    }
}

/// Measures the main loop of a prefill kernel: the smallest one with the most products. A turn stages a tile of values, makes
/// scores and weights, stages the next tile of keys and weighs the values, which of pages lie transposed already and of rows do not.
///
/// Staging is done by loops whose turns the head's channels decide at run time. They turn as often as it takes the block's
/// threads to write a tile.
///
/// # Errors
/// If there is none, or it has other products than a tile's.
pub fn prefill(kernel: &Compiled) -> Result<Prefill> {
    let (f, flow) = (&kernel.function, Flow::of(&kernel.function));
    let Some((key, value)) = dims(&f.name) else { bail!("{} does not name its channels", f.name) };
    let count = |b: usize, what: &dyn Fn(&Instruction) -> bool| {
        f.code[flow.blocks[b].from..flow.blocks[b].to].iter().filter(|i| what(i)).count()
    };
    let products = |l: &Loop| l.blocks.iter().map(|b| count(*b, &Instruction::is_mma)).sum::<usize>();
    let loops = flow.loops();
    let main = loops.iter().max_by_key(|l| (products(l), std::cmp::Reverse(l.blocks.len())));
    let Some(main) = main.filter(|l| products(l) > 0) else { bail!("{}: no loop has products", f.name) };
    // Behind the weights, whose exponentials stand together.
    let mut behind: Vec<usize> = main
        .blocks
        .iter()
        .copied()
        .filter(|b| count(*b, &|i| i.base() == "MUFU" && i.has("EX2")) >= 8)
        .collect();
    let mut weighed = BTreeSet::new();
    while let Some(b) = behind.pop() {
        for next in flow.blocks[b].successors() {
            if next != main.head && main.blocks.contains(&next) && weighed.insert(next) {
                behind.push(next);
            }
        }
    }
    // Warps have 16 queries each, and half of the values' channels where these are many.
    let summed = if value > 128 { value / 2 } else { value };
    let expected = TILE / 8 * key.div_ceil(16) + summed / 8 * TILE / 16;
    let turn = |pages: bool| -> Result<(Way, usize)> {
        let mut l = main.clone();
        let transposes = |b: usize| count(b, &|i| i.base() == "LDSM" && i.opcode.contains("MT88")) > 0;
        l.blocks.retain(|b| {
            !weighed.contains(b) || count(*b, &Instruction::is_mma) == 0 || transposes(*b) != pages
        });
        // Copies of rows; masks of 4-bit codes. Each decoded word is stored by two instructions of 4 bytes.
        let stages = |i: &Instruction| match pages {
            true => i.base() == "LOP3" && i.operands.iter().any(|o| o == "0xf000f"),
            false => i.base() == "LDGSTS",
        };
        let bytes = if pages { 8 } else { 16 };
        let way = walk::way(f, &flow, &l, false, stages)?;
        let found = way.code.iter().filter(|i| f.code[**i].is_mma()).count();
        if found != expected {
            bail!(
                "{}: {found} products in a turn, {expected} are a tile's: its loop is not understood",
                f.name
            );
        }
        let staged = 32 * PREFILL_WARPS * bytes * way.code.iter().filter(|i| stages(&f.code[**i])).count();
        if staged == 0 {
            bail!("{}: nothing stages {}", f.name, PREFILL_TILES[usize::from(pages)]);
        }
        let turns = (2 * TILE * (key + value)).div_ceil(staged);
        let inner = loops.iter().filter(|i| i.head != main.head && main.blocks.contains(&i.head));
        let copying = |i: &&Loop| i.blocks.iter().any(|b| way.blocks.contains(b) && count(*b, &stages) > 0);
        let again: usize = inner
            .filter(copying)
            .flat_map(|i| way.blocks.iter().filter(|b| i.blocks.contains(b)))
            .map(|b| flow.blocks[*b].to - flow.blocks[*b].from)
            .sum();
        let executed = way.code.len() + (turns - 1) * again;
        Ok((way, executed))
    };
    Ok(Prefill {
        products: expected,
        turns: [turn(false)?, turn(true)?],
        local: flow.instructions(main).filter(|i| matches!(f.code[*i].base(), "LDL" | "STL")).count(),
    })
}

/// Classes of instructions, in the order of the table.
pub const CLASSES: [&str; 20] = [
    "IMMA", "HMMA", "LOP3", "LDG", "LDS", "f32", "f16x2", "MUFU", "I2F", "F2F", "PRMT", "MOVM", "MOV",
    "SHFL", "IMAD", "integer", "compare", "branch", "uniform", "filler",
];

/// The class of an instruction.
pub fn class(i: &Instruction) -> &'static str {
    let uniform = i.guard.as_ref().is_some_and(|g| g.name == "UPT" && g.negated);
    match i.base() {
        // How ptxas lets the tensor cores catch up.
        "NOP" => "filler",
        "UIADD3" if uniform => "filler",
        "IMMA" => "IMMA",
        "HMMA" | "QMMA" => "HMMA",
        "LOP3" | "PLOP3" | "LOP" => "LOP3",
        "LDG" | "LD" | "LDGSTS" | "LDGDEPBAR" | "DEPBAR" | "UBLKCP" => "LDG",
        "LDS" | "LDSM" | "STS" => "LDS",
        "FFMA" | "FMUL" | "FADD" | "FMNMX" | "FSEL" | "FFMA2" | "FMUL2" | "FADD2" | "FMNMX3" => "f32",
        "HADD2" | "HMUL2" | "HFMA2" | "HMNMX2" | "VHMNMX" => "f16x2",
        "MUFU" => "MUFU",
        "I2F" | "I2FP" => "I2F",
        "F2F" | "F2FP" | "F2I" => "F2F",
        "PRMT" => "PRMT",
        "MOVM" => "MOVM",
        "IMAD" if i.has("MOV") => "MOV",
        "MOV" | "CS2R" | "S2R" | "SEL" => "MOV",
        "SHFL" => "SHFL",
        "IMAD" => "IMAD",
        "ISETP" | "FSETP" | "HSETP2" => "compare",
        "BRA" | "VOTE" | "VOTEU" | "BSSY" | "BSYNC" | "BREAK" | "WARPSYNC" | "CALL" | "YIELD" | "BRX"
        | "EXIT" => "branch",
        "R2UR" | "LDC" | "LDCU" => "uniform",
        base if base.starts_with('U') => "uniform",
        _ => "integer",
    }
}

/// Instructions of a way by class.
pub fn classes(f: &Function, way: &Way) -> BTreeMap<&'static str, usize> {
    let mut all = BTreeMap::new();
    way.code.iter().for_each(|i| *all.entry(class(&f.code[*i])).or_default() += 1);
    all
}

/// f16 arithmetic on an element or more, in the way: `HFMA2` and `HMUL2`, unless ptxas uses one to make a constant.
pub fn half_arithmetic(f: &Function, way: &Way) -> usize {
    let is = |i: &Instruction| {
        let constant = i.operands.iter().skip(1).filter(|o| o.trim_start_matches('-') == "RZ").count() >= 2;
        matches!(i.base(), "HFMA2" | "HMUL2") && !constant
    };
    way.code.iter().filter(|i| is(&f.code[**i])).count()
}

#[cfg(test)]
mod tests {
    use super::super::listing::assemble;
    use super::*;

    #[test]
    fn names_tell_channels() {
        assert_eq!(dims("qkv_attend_any_192_128"), Some((192, 128)));
        assert_eq!(dims("qkv_attend_default4_half_64"), Some((64, 64)));
        assert_eq!(dims("qkv_attend"), None);
    }

    fn compiled(name: &str, code: &[&str]) -> Compiled {
        Compiled { architecture: 90, function: assemble(name, code), registers: 32, spills: 0 }
    }

    const PRODUCT: &str = "HMMA.16816.F32 R4, R8, R12, R4";

    /// Rows and pages in an outer loop, heads of 16 channels.
    fn kernel(kind: &str, weights: usize) -> Compiled {
        let mut code = vec![".L_0:", "NOP", ".L_1:", PRODUCT];
        code.extend(vec!["MUFU.EX2 R4, R5"; weights]);
        code.extend(["STL [R1], R4", "@P0 BRA `(.L_1)", ".L_2:"]);
        code.extend([PRODUCT; 12]);
        code.extend(["LDSM.16.MT88.4 R4, [R3]", "@P1 BRA `(.L_2)", "@P2 BRA `(.L_0)", "EXIT"]);
        compiled(&format!("qkv_attend_f16_{kind}_16"), &code)
    }

    #[test]
    fn the_page_loop_is_the_one_that_does_not_transpose() {
        let d = decode(&kernel("half", 16)).unwrap();
        assert_eq!((d.pages, d.elements, d.common.code.len(), d.local, d.loops), (1, 64 * 32, 19, 1, 1));
        assert_eq!(d.per_element(&d.common), 32.0 * 19.0 / 2048.0);
        assert_eq!(decode(&kernel("half", 32)).unwrap().pages, 2);
        assert_eq!(decode(&kernel("wide", 32)).unwrap().pages, 1);
        assert!(decode(&kernel("half", 6)).unwrap_err().to_string().contains("6 weights"));
        assert_eq!(decode(&kernel("half", 17)).unwrap().pages, 1);
        assert!(decode(&kernel("half", 18)).is_err());
        assert!(decode(&kernel("half", 0)).is_err());
    }

    /// A page of 8-bit floats, with so many products of scores and scales beside the common way.
    fn floats(products: usize) -> Compiled {
        let mut code = vec![".L_1:", "NOP", PRODUCT, "@P1 BRA `(.L_2)"];
        code.extend(vec!["FMUL R4, R4, R5"; products]);
        code.extend([".L_2:", "@P3 BRA `(.L_3)", "LDG.E.128.CONSTANT R8, [R2.64]", ".L_3:"]);
        code.extend(["MUFU.EX2 R4, R5"; 16]);
        code.extend(["@P0 BRA `(.L_1)", "EXIT"]);
        compiled("qkv_attend_e4m3_half_16", &code)
    }

    #[test]
    fn scales_of_tokens_are_counted_apart() {
        let d = decode(&floats(16)).unwrap();
        assert_eq!((d.common.code.len(), d.scaled), (21, Some(21 + 1 + 16)));
        assert_eq!(decode(&floats(15)).unwrap().scaled, None);
    }

    #[test]
    fn constants_are_no_arithmetic() {
        let code = ["HFMA2.MMA R2, -RZ, RZ, 0, 1", "HFMA2 R2, R3, R4, R5", "@!UPT UIADD3 URZ, URZ, URZ, URZ"];
        let f = assemble("a", &code);
        let way = Way { code: vec![0, 1, 2], ..Way::default() };
        assert_eq!(half_arithmetic(&f, &way), 1);
        assert_eq!(classes(&f, &way).into_iter().collect::<Vec<_>>(), [("f16x2", 2), ("filler", 1)]);
    }
}

//! The tables of `cargo xtask sass`, and what is over the budget.

use super::budget::{self, Row};
use super::cubins::Compiled;
use super::measure::{self, Decode};
use super::walk::Way;
use crate::model::root;
use crate::table::Table;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// How a decode kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks a multiprocessor.
    pub blocks: u32,
    /// Bytes of shared memory of a block.
    pub shared: u32,
    /// One block fewer from compute capability 10 on.
    pub fewer: bool,
}

/// The launches by kernel, from `QKV_ATTEND(name, blocks, bytes, ..)` in `kernels/attend_*.cu`, which asserts the bytes.
///
/// # Errors
/// If a file or a line is not understood.
pub fn launches() -> Result<BTreeMap<String, Launch>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(root().join("kernels"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("attend_") && name.ends_with(".cu") {
            all.extend(launches_in(&fs::read_to_string(&path)?).with_context(|| path.display().to_string())?);
        }
    }
    Ok(all)
}

fn launches_in(text: &str) -> Result<Vec<(String, Launch)>> {
    let calls = text.split("\nQKV_ATTEND(").skip(1);
    calls
        .map(|call| {
            let mut arguments = call.split(',').map(str::trim);
            let mut next = || arguments.next().context("QKV_ATTEND takes name, blocks and bytes");
            let (name, blocks, shared) = (next()?, next()?, next()?.parse()?);
            // Registers are looked at as well, so that one block fewer on Blackwell is seen there.
            let fewer = blocks.strip_prefix("QKV_FEWER(").and_then(|b| b.strip_suffix(')'));
            let launch = Launch { blocks: fewer.unwrap_or(blocks).parse()?, shared, fewer: fewer.is_some() };
            Ok((name.to_string(), launch))
        })
        .collect()
}

/// A decode kernel on an architecture.
#[derive(Debug)]
struct Measured<'a> {
    kernel: &'a Compiled,
    launch: Launch,
    /// `None` of kernels that take any format: which way they go, the format decides.
    page: Option<Decode>,
}

/// Everything that was measured.
#[derive(Debug)]
pub struct Report<'a> {
    decode: Vec<Measured<'a>>,
    prefill: Vec<(&'a Compiled, measure::Prefill)>,
    /// What is over the budget, a line each.
    pub over: Vec<String>,
}

/// The columns of one table of the instructions.
const PATHS: [(bool, &str); 2] = [(true, "integer"), (false, "f16")];

impl<'a> Report<'a> {
    /// Measures all kernels.
    ///
    /// # Errors
    /// If a kernel is not understood.
    pub fn new(compiled: &'a [Compiled], launches: &BTreeMap<String, Launch>) -> Result<Self> {
        let (mut decode, mut prefill) = (Vec::new(), Vec::new());
        for kernel in compiled {
            let name = &kernel.function.name;
            if name.starts_with("qkv_attend_") {
                let launch = *launches.get(name).with_context(|| format!("no QKV_ATTEND makes {name}"))?;
                let page = match name.contains("_any_") {
                    true => None,
                    false => Some(measure::decode(kernel)?),
                };
                decode.push(Measured { kernel, launch, page });
            } else if name.starts_with("qkv_prefill_") && !name.starts_with("qkv_prefill_decode_") {
                // Decoding pages ahead multiplies nothing.
                prefill.push((kernel, measure::prefill(kernel)?));
            }
        }
        let mut report = Self { decode, prefill, over: Vec::new() };
        report.over = report.judge();
        Ok(report)
    }

    fn architectures(&self) -> BTreeSet<u32> {
        self.decode.iter().map(|m| m.kernel.architecture).collect()
    }

    fn find(&self, name: &str, architecture: u32) -> Option<&Measured<'a>> {
        self.decode.iter().find(|m| m.kernel.function.name == name && m.kernel.architecture == architecture)
    }

    /// Warps resident on a multiprocessor of a compute capability; `None` if no machine code runs there.
    fn warps(&self, m: &Measured<'a>, capability: u32) -> Option<u32> {
        let fits = |a: &u32| *a <= capability && a / 10 == capability / 10;
        let runs = self.architectures().into_iter().filter(fits).max()?;
        let registers = self.find(&m.kernel.function.name, runs)?.kernel.registers;
        Some(4 * budget::blocks(capability, registers, m.launch.shared)?.min(m.launch.blocks))
    }

    /// What is over the budget.
    fn judge(&self) -> Vec<String> {
        let mut over = Vec::new();
        for a in self.architectures() {
            let count = |prefix: &str| {
                let names = self.decode.iter().map(|m| m.kernel).chain(self.prefill.iter().map(|p| p.0));
                names.filter(|k| k.architecture == a && k.function.name.starts_with(prefix)).count()
            };
            for (prefix, most) in
                [("qkv_attend_", budget::MOST_DECODE), ("qkv_prefill_", budget::MOST_PREFILL)]
            {
                if count(prefix) > most {
                    over.push(format!("sm_{a}: {} kernels {prefix}*, at most {most}", count(prefix)));
                }
            }
            let Some(slack) = budget::slack(a) else { continue };
            for row in budget::ROWS {
                for (integer, path) in PATHS {
                    let Some((goal, name)) = row.goal(integer, a).zip(row.kernel(integer)) else { continue };
                    let most = goal + slack;
                    match self.cost(&row, integer, a) {
                        None => over.push(format!("sm_{a}, {}, {path}: there is no {name}", row.title)),
                        Some((_, cost)) if cost > most => {
                            over.push(format!("sm_{a}, {}, {path}: {cost:.3}, at most {most:.2}", row.title));
                        }
                        Some(_) => {}
                    }
                }
            }
            let wide = |k: &Compiled| k.function.name == budget::PREFILL_KERNEL;
            for (kernel, p) in self.prefill.iter().filter(|p| p.0.architecture == a && wide(p.0)) {
                for (i, (goal, _)) in budget::PREFILL.into_iter().enumerate() {
                    let (name, title, cost) =
                        (&kernel.function.name, measure::PREFILL_TILES[i], p.per_product(i));
                    if cost > goal + slack {
                        over.push(format!(
                            "sm_{a}, {name}, {title}: {cost:.2} for an mma, at most {goal:.2}"
                        ));
                    }
                }
            }
        }
        for m in self.decode.iter().filter(|m| budget::slack(m.kernel.architecture).is_some()) {
            over.extend(self.judge_kernel(m));
        }
        for (kernel, p) in &self.prefill {
            if kernel.spills > 0 || p.local > 0 {
                over.push(format!("sm_{}, {}: spills", kernel.architecture, kernel.function.name));
            }
        }
        let mut warps = BTreeSet::new();
        for m in &self.decode {
            for c in budget::CAPABILITIES {
                if let Some(w) = self.warps(m, c).filter(|w| *w < budget::LEAST_WARPS) {
                    warps.insert(format!(
                        "{}: {w} warps resident on compute capability {}.{}",
                        m.kernel.function.name,
                        c / 10,
                        c % 10
                    ));
                }
            }
        }
        over.extend(warps);
        over
    }

    fn judge_kernel(&self, m: &Measured<'a>) -> Vec<String> {
        let (name, a) = (&m.kernel.function.name, m.kernel.architecture);
        let mut over = Vec::new();
        if m.kernel.spills > 0 || m.page.as_ref().is_some_and(|d| d.local > 0) {
            over.push(format!("sm_{a}, {name}: spills"));
        }
        let most = budget::registers(name);
        if m.kernel.registers > most {
            over.push(format!("sm_{a}, {name}: {} registers, at most {most}", m.kernel.registers));
        }
        if let Some(d) = m.page.as_ref().filter(|_| name.contains("_token") || name.contains("_int8_")) {
            let n = measure::half_arithmetic(&m.kernel.function, &d.common);
            if n > 0 {
                over.push(format!("sm_{a}, {name}: {n} HFMA2 or HMUL2 a page, where pairs belong to tokens"));
            }
        }
        over
    }

    /// What a row's kernel costs.
    fn cost(&self, row: &Row, integer: bool, architecture: u32) -> Option<(&Measured<'a>, f64)> {
        let m = self.find(&row.kernel(integer)?, architecture)?;
        let d = m.page.as_ref()?;
        Some((m, if row.scaled { d.per_element_of(d.scaled?) } else { d.per_element(&d.common) }))
    }

    /// All tables.
    pub fn markdown(&self) -> String {
        [
            "Lane-instructions per element of keys and values, heads of 128 channels: a page in the middle of a sequence (one on \
             which references move). Goals are asserted on sm_90, and on sm_80 with 0.04 more."
                .to_string(),
            self.costs().markdown(),
            self.prefills().markdown(),
            "The kernels: instructions of a turn of the page loop; warps resident on a multiprocessor.".to_string(),
            self.kernels().markdown(),
            "The same by class, on the common way.".to_string(),
            self.classes().markdown(),
            self.counts(),
        ]
        .join("\n\n")
    }

    fn costs(&self) -> Table {
        let mut table =
            Table::new(["formats", "arch", "≤ 4 rows, integer", "goal", "≤ 8 rows, f16", "goal", "peers"]);
        for row in budget::ROWS {
            for a in self.architectures().into_iter().rev() {
                let mut cells = vec![row.title.to_string(), format!("sm_{a}")];
                for (integer, _) in PATHS {
                    let goal = row.goal(integer, a);
                    let cell = match self.cost(&row, integer, a) {
                        Some((m, cost)) => {
                            let moved = m.page.as_ref().map_or(0.0, |d| d.per_element(&d.rescale));
                            let over = budget::slack(a).zip(goal).is_some_and(|(s, g)| cost > g + s);
                            let moved = if row.scaled { String::new() } else { format!(" ({moved:.3})") };
                            format!("{cost:.3}{moved}{}", if over { " over" } else { "" })
                        }
                        None if goal.is_some() => "no instance".into(),
                        None => "–".into(),
                    };
                    cells.push(cell);
                    cells.push(goal.map_or("–".into(), |g| format!("{g:.2}")));
                }
                cells.push(row.peers.into());
                table.row(cells);
            }
        }
        table
    }

    fn prefills(&self) -> Table {
        let mut head =
            vec!["prefill kernel".to_string(), "arch".into(), "registers".into(), "mma a turn".into()];
        for ((goal, peers), title) in budget::PREFILL.into_iter().zip(measure::PREFILL_TILES) {
            head.push(format!("instructions for an mma, {title} (≤ {goal}; {peers})"));
        }
        let mut table = Table::new(head);
        for (k, p) in &self.prefill {
            let mut cells = vec![
                k.function.name.clone(),
                format!("sm_{}", k.architecture),
                k.registers.to_string(),
                p.products.to_string(),
            ];
            cells.extend([0, 1].map(|i| format!("{:.2}", p.per_product(i))));
            table.row(cells);
        }
        table
    }

    fn kernels(&self) -> Table {
        let mut head: Vec<String> =
            ["kernel", "arch", "registers", "spills", "shared", "blocks"].map(Into::into).into();
        head.extend(budget::CAPABILITIES.map(|c| format!("warps {}.{}", c / 10, c % 10)));
        let counted =
            ["page", "per element", "moved", "per element", "IMMA", "HMMA", "HFMA2, HMUL2", "local"];
        head.extend(counted.map(Into::into));
        let mut table = Table::new(head);
        for m in &self.decode {
            let k = m.kernel;
            let numbers = [k.registers, k.spills, m.launch.shared, m.launch.blocks].map(|n| n.to_string());
            let mut cells = vec![k.function.name.clone(), format!("sm_{}", k.architecture)];
            cells.extend(numbers);
            cells
                .extend(budget::CAPABILITIES.map(|c| self.warps(m, c).map_or("–".into(), |w| w.to_string())));
            match &m.page {
                Some(d) => {
                    let of = measure::classes(&k.function, &d.common);
                    let count = |c| of.get(c).copied().unwrap_or(0).to_string();
                    for way in [&d.common, &d.rescale] {
                        let mark = if way.open.is_empty() { "" } else { "+" };
                        cells.push(format!("{}{mark}", way.code.len()));
                        cells.push(format!("{:.3}", d.per_element(way)));
                    }
                    cells.extend([count("IMMA"), count("HMMA")]);
                    cells.push(measure::half_arithmetic(&k.function, &d.common).to_string());
                    cells.push(d.local.to_string());
                }
                None => cells.extend(counted.map(|_| "–".to_string())),
            }
            table.row(cells);
        }
        table
    }

    fn classes(&self) -> Table {
        let mut table = Table::new(["kernel", "arch"].into_iter().chain(measure::CLASSES));
        for m in &self.decode {
            let Some(d) = &m.page else { continue };
            let of = measure::classes(&m.kernel.function, &d.common);
            let name = m.kernel.function.name.trim_start_matches("qkv_attend_").to_string();
            let cells = [name, format!("sm_{}", m.kernel.architecture)].into_iter();
            table.row(
                cells.chain(measure::CLASSES.map(|c| of.get(c).map_or(String::new(), usize::to_string))),
            );
        }
        table
    }

    fn counts(&self) -> String {
        let mut lines = Vec::new();
        for a in self.architectures() {
            let decode = self.decode.iter().filter(|m| m.kernel.architecture == a).count();
            let prefill = self.prefill.iter().filter(|p| p.0.architecture == a).count();
            lines.push(format!(
                "sm_{a}: {decode} decode kernels (≤ {}), {prefill} of prefill (≤ {})",
                budget::MOST_DECODE,
                budget::MOST_PREFILL
            ));
        }
        lines.join("\n")
    }

    /// The same as JSON.
    pub fn json(&self) -> Value {
        let way = |k: &Compiled, d: &Decode, w: &Way| {
            json!({
                "instructions": w.code.len(),
                "per_element": d.per_element(w),
                "classes": measure::classes(&k.function, w),
            })
        };
        let decode: Vec<Value> = self
            .decode
            .iter()
            .map(|m| {
                let warps: BTreeMap<String, Option<u32>> =
                    budget::CAPABILITIES.iter().map(|c| (c.to_string(), self.warps(m, *c))).collect();
                json!({
                    "kernel": m.kernel.function.name,
                    "architecture": m.kernel.architecture,
                    "registers": m.kernel.registers,
                    "spills": m.kernel.spills,
                    "shared": m.launch.shared,
                    "blocks": m.launch.blocks,
                    "warps": warps,
                    "page": m.page.as_ref().map(|d| way(m.kernel, d, &d.common)),
                    "moved": m.page.as_ref().map(|d| way(m.kernel, d, &d.rescale)),
                    "with_token_scales": m.page.as_ref().and_then(|d| d.scaled.map(|n| d.per_element_of(n))),
                })
            })
            .collect();
        let prefill: Vec<Value> = self
            .prefill
            .iter()
            .map(|(k, p)| {
                let costs: BTreeMap<&str, f64> =
                    measure::PREFILL_TILES.iter().enumerate().map(|(i, t)| (*t, p.per_product(i))).collect();
                json!({
                    "kernel": k.function.name,
                    "architecture": k.architecture,
                    "registers": k.registers,
                    "spills": k.spills,
                    "per_mma": costs,
                })
            })
            .collect();
        json!({ "decode": decode, "prefill": prefill, "over": self.over })
    }
}

/// Prints the instructions of a turn: the common one, or with `rare` the one on which references move. Of prefill that over
/// exact rows, or the one over int4 pages, staging loops once.
///
/// # Errors
/// If there is no such kernel.
pub fn print_path(compiled: &[Compiled], name: &str, rare: bool) -> Result<()> {
    let mut found = false;
    for kernel in compiled.iter().filter(|k| k.function.name == name) {
        found = true;
        let way = if name.starts_with("qkv_prefill_") {
            let [rows, pages] = measure::prefill(kernel)?.turns;
            if rare { pages.0 } else { rows.0 }
        } else {
            let d = measure::decode(kernel)?;
            if rare { d.rescale } else { d.common }
        };
        println!("{name} on sm_{}: {} instructions", kernel.architecture, way.code.len());
        let mut last = None;
        for &at in &way.code {
            if last.is_some_and(|l| l + 1 != at) {
                println!("  ..");
            }
            println!("  {:#06x}  {}", 16 * at, kernel.function.code[at].text());
            last = Some(at);
        }
    }
    if !found {
        bail!("no kernel is called {name}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_read() {
        let text = "// int8\n#include \"x\"\n\nQKV_ATTEND(qkv_attend_a_64, 3, 20832, qkv::Any<64, 64>)\n\
                    QKV_ATTEND(qkv_attend_b_64, QKV_FEWER(4), 20832, qkv::Any<64, 64>)\n";
        let found = launches_in(text).unwrap();
        let launch = |blocks, fewer| Launch { blocks, shared: 20_832, fewer };
        assert_eq!(
            found,
            [
                ("qkv_attend_a_64".to_string(), launch(3, false)),
                ("qkv_attend_b_64".to_string(), launch(4, true))
            ]
        );
        assert!(launches_in("\nQKV_ATTEND(a, b, c)").is_err());
        assert!(launches().unwrap().len() > 20);
    }

    /// The host's table has no compiler that compares it with `__launch_bounds__`.
    #[test]
    fn the_host_counts_the_same_blocks() {
        let host = fs::read_to_string(root().join("src/cuda/launch/instances.rs")).unwrap();
        let field = |line: &str, name: &str| {
            let rest = line.split_once(name).unwrap().1;
            rest[..rest.find([',', ' ']).unwrap()].replace('_', "")
        };
        let told: BTreeMap<String, (u32, u32)> = host
            .lines()
            .filter(|l| l.trim_start().starts_with("Instance { kernel:"))
            .map(|l| {
                let number = |name| field(l, name).parse().unwrap();
                let launch = (number("resident: "), number("shared: "));
                (field(l, "Kernel::").to_lowercase(), launch)
            })
            .collect();
        let plain = |name: &str| name.trim_start_matches("qkv_").replace('_', "");
        let launches = launches().unwrap();
        let made = launches.iter().map(|(name, l)| (plain(name), (l.blocks, l.shared))).collect();
        assert_eq!(told, made);

        // The names between the brackets of `FEWER_ON_BLACKWELL`, and those with QKV_FEWER.
        let list = host.split_once("FEWER_ON_BLACKWELL: [").unwrap().1.split_once("];").unwrap().0;
        let told: BTreeSet<String> = list
            .split("Kernel::")
            .skip(1)
            .map(|k| k.split([',', ']']).next().unwrap().to_lowercase())
            .collect();
        let made = launches.iter().filter(|l| l.1.fewer).map(|l| plain(l.0)).collect();
        assert_eq!(told, made);
    }

    #[test]
    fn what_is_over_is_listed() {
        use crate::sass::listing::Function;
        let kernel = |name: &str, architecture, registers| Compiled {
            architecture,
            function: Function { name: name.into(), code: vec![Default::default()] },
            registers,
            spills: 0,
        };
        let page = |instructions| {
            let way = Way { code: vec![0; instructions], ..Way::default() };
            let (common, rescale) = (way.clone(), way);
            Some(Decode { pages: 1, elements: 64 * 256, common, rescale, scaled: None, local: 0, loops: 1 })
        };
        let launch = Launch { blocks: 2, shared: 25_000, fewer: false };
        let name = "qkv_attend_int8_integer_128";
        // 0.65 is 332.8 instructions, 0.69 is 353.3.
        let kernels = [kernel(name, 80, 128), kernel(name, 90, 129)];
        let over = |on_80, on_90| {
            let decode = kernels
                .iter()
                .zip([on_80, on_90])
                .map(|(kernel, n)| Measured { kernel, launch, page: page(n) })
                .collect();
            let report = Report { decode, prefill: Vec::new(), over: Vec::new() };
            report
                .judge()
                .into_iter()
                .filter(|l| l.contains("int8, one pair a token, integer"))
                .collect::<Vec<_>>()
        };
        assert!(over(353, 332).is_empty());
        assert_eq!(over(354, 332), ["sm_80, int8, one pair a token, integer: 0.691, at most 0.69"]);
        assert_eq!(over(353, 333), ["sm_90, int8, one pair a token, integer: 0.650, at most 0.65"]);
        let decode = kernels.iter().map(|kernel| Measured { kernel, launch, page: page(300) }).collect();
        let report = Report { decode, prefill: Vec::new(), over: Vec::new() };
        let all = report.judge();
        assert!(all.contains(&format!("sm_90, {name}: 129 registers, at most 128")));
        assert!(all.iter().any(|l| l.ends_with("there is no qkv_attend_token4_half_128")));
        // 8 warps on each, none where no machine code runs.
        assert_eq!(report.warps(&report.decode[0], 86), Some(8));
        assert_eq!(report.warps(&report.decode[0], 120), None);
        assert!(report.markdown().contains("0.586 (0.586)"));
    }
}

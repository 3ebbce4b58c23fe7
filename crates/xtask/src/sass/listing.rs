//! What `nvdisasm -c` prints, as instructions.
//!
//! ```text
//! .text.qkv_attend_f16_half_128:
//!         /*0000*/                   LDC R1, c[0x0][0x28] ;
//! .L_x_8:
//!         /*00b0*/               @P0 BRA `(.L_x_1) ;
//! ```

use anyhow::{Result, bail};
use std::collections::HashMap;

/// A function of a cubin.
#[derive(Debug, Clone)]
pub struct Function {
    /// Its name: that of the kernel.
    pub name: String,
    /// Its instructions, each 16 bytes behind the one before. What it calls (`$__internal..`) is behind its own.
    pub code: Vec<Instruction>,
}

/// A predicate, `P3`, `UP0` or `PT`, perhaps negated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Predicate {
    /// Without the `!`.
    pub name: String,
    /// Written with `!`.
    pub negated: bool,
}

/// An instruction.
#[derive(Debug, Clone, Default)]
pub struct Instruction {
    /// `@P0`: it does nothing where this does not hold. It takes its turn all the same.
    pub guard: Option<Predicate>,
    /// Everything up to the operands: `IMAD.MOV.U32`.
    pub opcode: String,
    /// Operands, a jump's label aside.
    pub operands: Vec<String>,
    /// Where it jumps to, or may: indices into the function's code.
    pub targets: Vec<usize>,
}

impl Predicate {
    /// Reads `P0` or `!UP3`; `None` for what is no predicate.
    pub fn parse(text: &str) -> Option<Self> {
        let name = text.strip_prefix('!').unwrap_or(text);
        let number = name.strip_prefix('U').unwrap_or(name).strip_prefix('P')?;
        let valid = number == "T" || (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()));
        valid.then(|| Self { name: name.into(), negated: name.len() != text.len() })
    }

    /// Whether it is the constant `PT` or `UPT`.
    pub fn is_constant(&self) -> bool {
        self.name.ends_with('T')
    }
}

impl Instruction {
    /// The opcode without its modifiers: `IMAD` of `IMAD.MOV.U32`.
    pub fn base(&self) -> &str {
        self.opcode.split('.').next().unwrap_or_default()
    }

    /// Whether the opcode has this modifier.
    pub fn has(&self, modifier: &str) -> bool {
        self.opcode.split('.').skip(1).any(|m| m == modifier)
    }

    /// A product on the tensor cores. (`HFMA2.MMA` is none.)
    pub fn is_mma(&self) -> bool {
        matches!(self.base(), "HMMA" | "IMMA" | "QMMA" | "OMMA" | "BMMA" | "DMMA")
    }

    /// The instruction as it was printed.
    pub fn text(&self) -> String {
        let guard = self
            .guard
            .as_ref()
            .map_or(String::new(), |g| format!("@{}{} ", if g.negated { "!" } else { "" }, g.name));
        let targets = self.targets.iter().map(|t| format!("-> {:#06x}", 16 * t));
        let operands: Vec<String> = self.operands.iter().cloned().chain(targets).collect();
        format!("{guard}{} {}", self.opcode, operands.join(", "))
    }
}

/// The functions of a listing.
///
/// # Errors
/// If an instruction is not where its address says, or a jump within a function goes nowhere.
pub fn parse(text: &str) -> Result<Vec<Function>> {
    let mut functions = Vec::new();
    let mut current: Option<Draft> = None;
    for line in text.lines() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix(".text.").and_then(|l| l.strip_suffix(':')) {
            functions.extend(current.take().map(Draft::finish).transpose()?);
            current = Some(Draft { name: name.into(), ..Draft::default() });
        } else if line.starts_with("//---") {
            functions.extend(current.take().map(Draft::finish).transpose()?);
        } else if let Some(draft) = &mut current {
            draft.line(line)?;
        }
    }
    functions.extend(current.take().map(Draft::finish).transpose()?);
    Ok(functions)
}

/// A function whose jumps still name labels.
#[derive(Default)]
struct Draft {
    name: String,
    code: Vec<(Instruction, Vec<String>)>,
    labels: HashMap<String, usize>,
}

impl Draft {
    fn line(&mut self, line: &str) -> Result<()> {
        let Some((address, rest)) = line.strip_prefix("/*").and_then(|l| l.split_once("*/")) else {
            if let Some(label) = line.strip_suffix(':') {
                self.labels.insert(label.into(), self.code.len());
            }
            return Ok(());
        };
        if usize::from_str_radix(address, 16).ok() != Some(16 * self.code.len()) {
            bail!("{}: instruction {} has the address {address}", self.name, self.code.len());
        }
        self.code.push(instruction(rest.split(';').next().unwrap_or_default().trim()));
        Ok(())
    }

    fn finish(self) -> Result<Function> {
        let Self { name, code, labels } = self;
        let code = code
            .into_iter()
            .map(|(mut i, named)| {
                for label in named {
                    // What is called returns, so the way goes on behind it.
                    if label.starts_with('$') {
                        continue;
                    }
                    match labels.get(&label) {
                        Some(at) => i.targets.push(*at),
                        None if i.base() == "CALL" => {}
                        None => bail!("{name}: {} goes to {label}, which is nowhere", i.opcode),
                    }
                }
                Ok(i)
            })
            .collect::<Result<_>>()?;
        Ok(Function { name, code })
    }
}

/// An instruction and the labels it names.
fn instruction(text: &str) -> (Instruction, Vec<String>) {
    let (guard, text) = match text.strip_prefix('@').and_then(|t| t.split_once(' ')) {
        Some((guard, rest)) => (Predicate::parse(guard), rest.trim()),
        None => (None, text),
    };
    let (opcode, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    // An indirect jump tells its targets in a comment: (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)
    let (rest, comment) = rest.split_once("(*\"").unwrap_or((rest, ""));
    let mut labels: Vec<String> = comment
        .strip_prefix("BRANCH_TARGETS")
        .and_then(|c| c.split('"').next())
        .map(|c| c.split(',').map(|l| l.trim().to_string()).collect())
        .unwrap_or_default();
    let mut operands = Vec::new();
    for operand in rest.split(',').map(str::trim).filter(|o| !o.is_empty()) {
        match operand.split_once("`(").and_then(|(_, o)| o.strip_suffix(')')) {
            Some(label) => labels.push(label.into()),
            None => operands.push(operand.trim_end_matches(".reuse").to_string()),
        }
    }
    // Only these go to a label; others name it as an address, and a return the kernel.
    let base = opcode.split('.').next().unwrap_or_default();
    if !matches!(base, "BRA" | "BRX" | "JMP" | "JMX" | "CALL") {
        labels.clear();
    }
    (Instruction { guard, opcode: opcode.into(), operands, targets: Vec::new() }, labels)
}

/// A function of these instructions and labels (`.L_1:`), as if it had been listed.
#[cfg(test)]
pub(super) fn assemble(name: &str, code: &[&str]) -> Function {
    let mut text = format!(".text.{name}:\n");
    let mut at = 0;
    for line in code {
        if line.ends_with(':') {
            text += &format!("{line}\n");
        } else {
            text += &format!("/*{at:04x}*/ {line} ;\n");
            at += 16;
        }
    }
    parse(&text).unwrap().remove(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = r#"
//--------------------- .text.qkv_a --------------------------
        .section        .text.qkv_a,"ax",@progbits
        .type           qkv_a,@function
qkv_a:
.text.qkv_a:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   ISETP.GE.U32.AND P0, PT, R106.reuse, 0x20, PT ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
        /*0030*/                   BRA.U !UP1, `(.L_x_1) ;
        /*0040*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm70_warpsync) ;
        /*0050*/                   BRX R2 -0x60 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*) ;
.L_x_1:
        /*0060*/                   EXIT ;
$__internal_0_$__cuda_sm70_warpsync:
        /*0070*/                   RET.REL.NODEC R2 `(qkv_a) ;
//--------------------- .nv.shared.qkv_a --------------------------
"#;

    #[test]
    fn a_listing_is_read() {
        let functions = parse(LISTING).unwrap();
        assert_eq!(functions.len(), 1);
        let code = &functions[0].code;
        assert_eq!((functions[0].name.as_str(), code.len()), ("qkv_a", 8));
        assert_eq!(code[0].operands, ["R1", "c[0x0][0x28]"]);
        assert_eq!((code[1].base(), code[1].has("U32"), code[1].has("ISETP")), ("ISETP", true, false));
        assert_eq!(code[1].operands, ["P0", "PT", "R106", "0x20", "PT"]);
        assert_eq!(code[2].guard, Some(Predicate { name: "P0".into(), negated: true }));
        assert_eq!(code[2].targets, [1]);
        assert_eq!((&code[3].operands[..], &code[3].targets[..]), (&["!UP1".to_string()][..], &[6][..]));
        assert!(code[4].targets.is_empty());
        assert_eq!(code[5].targets, [1, 6]);
        assert!(code[7].targets.is_empty());
        assert_eq!(code[2].text(), "@!P0 BRA -> 0x0010");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let gap = ".text.a:\n/*0000*/ NOP;\n/*0020*/ NOP;\n";
        assert!(parse(gap).unwrap_err().to_string().contains("0020"));
        let nowhere = ".text.a:\n/*0000*/ BRA `(.L_x_7) ;\n";
        assert!(parse(nowhere).unwrap_err().to_string().contains(".L_x_7"));
    }

    #[test]
    fn predicates_are_told_from_registers() {
        assert!(Predicate::parse("!UPT").unwrap().is_constant());
        assert!(Predicate::parse("UP3").is_some());
        for other in ["R3", "PR", "UR4", "P", "!R2", "URZ"] {
            assert_eq!(Predicate::parse(other), None, "{other}");
        }
    }
}

//! Files to modules.

use ptxsim::card::{CARDS, Card};
use ptxsim::fatbin;
use ptxsim::ptx::ast::Module;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// A file that was read.
pub(crate) struct File {
    pub(crate) module: Arc<Module>,
    pub(crate) card: &'static Card,
    /// Registers of functions by the cubin for this card, if the file has one.
    pub(crate) registers: HashMap<String, u32>,
}

/// Reads a PTX or fatbin file for a card, or for the oldest card that runs it.
pub(crate) fn read(path: &Path, cc: Option<&str>) -> Result<File, String> {
    let shown = path.display();
    let bytes = ptxsim::files::read(path).map_err(|e| format!("{shown}: {e}"))?;
    let wanted = cc.map(Card::parse).transpose()?;
    let (text, fat_card, registers) = if bytes.starts_with(&fatbin::MAGIC) {
        let entries = fatbin::entries(&bytes).map_err(|e| format!("{shown}: {e}"))?;
        let select = |c: &'static Card| fatbin::select_ptx(&entries, c.cc).map(|text| (text, c));
        let first = || CARDS.iter().find_map(|c| select(c).ok()).map_or_else(|| select(&CARDS[0]), Ok);
        let (text, card) = wanted.map_or_else(first, select).map_err(|e| format!("{shown}: {e}"))?;
        (text, Some(card), fatbin::registers_for(&entries, card.cc))
    } else if bytes.starts_with(&fatbin::ELF_MAGIC) {
        return Err(format!(
            "{shown}: machine code or a host program; ptxsim runs PTX (`nvcc -ptx`) and fatbins with PTX (`nvcc -fatbin`)"
        ));
    } else {
        let text = String::from_utf8(bytes).map_err(|_| format!("{shown}: neither PTX text nor a fatbin"))?;
        (text.trim_end_matches('\0').to_string(), None, HashMap::new())
    };
    let module = ptxsim::ptx::parse(&text).map_err(|e| format!("{shown}:\n{e}"))?;
    let card = match wanted.or(fat_card) {
        Some(card) if module.target.runs_on(card.cc) => card,
        Some(card) => {
            let cc = card.cc;
            return Err(format!(
                "{shown}: a card of compute capability {cc} cannot run code for sm_{}: compile for compute_{cc} or an \
                 older architecture, or choose another --cc",
                module.target
            ));
        }
        None => CARDS.iter().find(|c| module.target.runs_on(c.cc)).ok_or_else(|| {
            format!("{shown}: no card that ptxsim knows runs code for sm_{}", module.target)
        })?,
    };
    Ok(File { module: Arc::new(module), card, registers })
}

//! `cargo xtask sass`: the machine instructions of the attention kernels, against their budget.
//!
//! * [`cubins`] gets listings, [`listing`] reads them, [`flow`] finds blocks and loops.
//! * [`walk`] finds what a turn of a loop executes, with [`facts`] about branches; [`measure`] picks the loops and counts.
//! * [`budget`] says what is allowed, [`report`] compares.

pub mod budget;
pub mod cubins;
pub mod facts;
pub mod flow;
pub mod listing;
pub mod measure;
pub mod report;
pub mod walk;

use crate::kernels;
use crate::toolkit::{self, Toolkit};
use anyhow::{Result, bail};
use clap::Args;
use std::path::PathBuf;

/// Options of `cargo xtask sass`.
#[derive(Debug, Clone, Default, Args)]
pub struct SassArgs {
    /// All architectures that the toolkit knows, instead of 8.0 and 9.0.
    #[arg(long)]
    all: bool,
    /// Reads the images of this folder instead of building any: `target/release/build/qkv-*/out`.
    #[arg(long, value_name = "FOLDER", conflicts_with = "all")]
    images: Option<PathBuf>,
    /// Prints what was measured as JSON.
    #[arg(long)]
    json: bool,
    /// Prints the instructions of a turn of this kernel's main loop, on every architecture.
    #[arg(long, value_name = "KERNEL")]
    path: Option<String>,
    /// With `--path`: the turn on which references move; of prefill the one over int4 pages.
    #[arg(long, requires = "path")]
    rare: bool,
}

impl SassArgs {
    /// What the checks ask: of images that are built.
    pub(crate) fn of(images: PathBuf) -> Self {
        Self { images: Some(images), ..Self::default() }
    }
}

/// Builds the kernels, measures them and prints how they stand against the budget.
///
/// # Errors
/// If something is over its budget: all such rows are listed.
pub fn run(args: &SassArgs) -> Result<()> {
    let nvdisasm = toolkit::nvdisasm()?;
    let folder = match &args.images {
        Some(folder) => folder.clone(),
        None => kernels::build(&Toolkit::obtain()?, if args.all { "all" } else { "80,90" }, false)?,
    };
    let compiled = cubins::read(&folder, &["attend_", "prefill_"], &nvdisasm)?;
    if let Some(name) = &args.path {
        return report::print_path(&compiled, name, args.rare);
    }
    let report = report::Report::new(&compiled, &report::launches()?)?;
    if args.json {
        println!("{}", report.json());
    } else {
        println!("{}", report.markdown());
    }
    let over = report.over;
    if !over.is_empty() {
        bail!("over the budget:\n  {}", over.join("\n  "));
    }
    Ok(())
}

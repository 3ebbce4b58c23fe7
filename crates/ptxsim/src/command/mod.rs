//! The command: what a PTX or fatbin file holds, and a run of one of its kernels.

mod argument;
mod image;
mod info;
mod names;
mod run;

use std::path::PathBuf;

/// Looks into PTX and fatbin files and runs their kernels on the CPU, with checks and counters.
#[derive(Debug, clap::Parser)]
#[command(version)]
pub(crate) enum Command {
    /// Lists kernels: parameters, shared and local memory, registers, instructions that are not known.
    Info {
        /// A PTX or fatbin file.
        file: PathBuf,
        /// Compute capability of the card: 80, 86, 89, 90 or 120; otherwise the oldest that runs the file.
        #[arg(long)]
        cc: Option<String>,
        /// One JSON object instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Runs a kernel.
    #[command(after_help = argument::HELP)]
    Run(run::Run),
}

impl Command {
    /// Does it; the error is a message for people.
    pub(crate) fn run(self) -> Result<(), String> {
        match self {
            Self::Info { file, cc, json } => info::info(&file, cc.as_deref(), json),
            Self::Run(run) => run.run(),
        }
    }
}

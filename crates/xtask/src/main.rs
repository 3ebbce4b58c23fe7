//! Project commands: `cargo xtask <command>`.

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use xtask::{bench_peers, bytes, checks, demo, gpu, kernels, sass};

/// Project commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs a real model on every width and shows what each costs and saves.
    Demo(demo::DemoArgs),
    /// Measures the quality of schemes, for choosing formats.
    Quality(demo::QualityArgs),
    /// Times optimum-quanto, HQQ and llama.cpp beside qkv (installs them under target/ first).
    BenchPeers(bench_peers::BenchArgs),
    /// Builds the CUDA kernels and shows registers, spills and sizes (installs nvcc under target/ where there is none).
    Kernels(kernels::KernelArgs),
    /// Counts the machine instructions of the attention kernels and holds them against their budget.
    Sass(sass::SassArgs),
    /// Counts the bytes that decode attention moves, on the simulated driver, and holds them against the fewest that would do.
    Bytes(bytes::BytesArgs),
    /// Makes a folder that tests and times the CUDA kernels on a machine with nothing but NVIDIA's driver.
    Gpu(gpu::GpuArgs),
    /// Runs every check there is.
    Test(checks::TestArgs),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Quality(args) => demo::run_quality(&args),
        Command::BenchPeers(args) => bench_peers::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Sass(args) => sass::run(&args),
        Command::Bytes(args) => bytes::run(&args),
        Command::Gpu(args) => gpu::run(&args),
        Command::Test(args) => checks::run(&args),
    };
    // The message says what to do; a backtrace would bury it.
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

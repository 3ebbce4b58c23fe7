//! `ptxsim info` and `ptxsim run`.

mod command;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    match command::Command::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("ptxsim: {message}");
            ExitCode::FAILURE
        }
    }
}

//! `cargo xtask bytes`: what decode attention moves, beside the fewest bytes that would do, its sectors and its bank conflicts.
//!
//! `benches/cuda` makes the launches, on the simulated driver, which counts.

use crate::kernels;
use crate::table::{Table, megabytes};
use crate::toolkit::Toolkit;
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

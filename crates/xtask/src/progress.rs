//! Progress on stderr: a bar on a terminal, a line for each finished part elsewhere.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Progress of one part of the work.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    name: String,
    start: Instant,
}

impl Progress {
    /// Starts a part of `steps` steps.
    pub fn new(name: impl Into<String>, steps: usize) -> Self {
        let name = name.into();
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{prefix:<28} [{bar:30}] {pos}/{len} {elapsed} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
        bar.set_prefix(name.clone());
        bar.enable_steady_tick(Duration::from_millis(250));
        Self { bar, name, start: Instant::now() }
    }

    /// Says what is being done now.
    pub fn say(&self, what: impl Into<String>) {
        let what = what.into();
        if !std::io::stderr().is_terminal() {
            eprintln!("{}: {what}", self.name);
        }
        self.bar.set_message(what);
    }

    /// One step is done.
    pub fn step(&self) {
        self.bar.inc(1);
    }

    /// `done` steps are done.
    pub fn set(&self, done: usize) {
        self.bar.set_position(done as u64);
    }

    /// Ends the part; the line that stays says how long it took.
    pub fn done(self, result: &str) {
        self.bar.finish_and_clear();
        let between = if result.is_empty() { "" } else { ": " };
        eprintln!("{:<28} {:6.1} s{between}{result}", self.name, self.start.elapsed().as_secs_f64());
    }
}

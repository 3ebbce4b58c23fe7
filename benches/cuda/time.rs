//! Times by the device's own clock. Each is a median, with a warm-up before it; memory that is read is larger than the second-level
//! cache, or several times as much of it is taken in turn.

mod append;
mod attend;
mod convert;
mod stream;

use crate::Options;
use crate::gpu::Gpu;
use ptxsim::testing::{Driver, ensure_driver};
use qkv::cuda::cudarc::driver::{CudaEvent, result, sys};
use qkv::cuda::is_available;
use serde_json::json;
use std::time::{Duration, Instant};

/// Longest that one measurement goes on once it has its fewest samples.
const PATIENCE: Duration = Duration::from_millis(300);

/// One measurement.
#[derive(Debug)]
pub(crate) struct Row {
    part: &'static str,
    name: String,
    ms: f64,
    /// Bytes that had to move.
    bytes: usize,
    /// What `goal` is about.
    ratio: Option<f64>,
    goal: Option<Goal>,
}

/// What a ratio should be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Goal {
    /// As a fraction of a stream's bandwidth.
    AtLeast(f64),
    /// As a multiple of another time, or in milliseconds.
    AtMost(f64),
}

impl Goal {
    fn holds(self, x: f64) -> bool {
        match self {
            Goal::AtLeast(least) => x >= least,
            Goal::AtMost(most) => x <= most,
        }
    }

    fn text(self) -> String {
        match self {
            Goal::AtLeast(x) => format!(">= {x}"),
            Goal::AtMost(x) => format!("<= {x}"),
        }
    }
}

/// A device, what was asked, and what was found so far.
pub(crate) struct Bench<'a> {
    gpu: &'a Gpu,
    smoke: bool,
    quick: bool,
    /// Bytes of the second-level cache.
    cache: usize,
    name: String,
    rows: Vec<Row>,
}

impl Bench<'_> {
    /// Median milliseconds of one of `turns` calls, which get their number; samples go over all of them.
    fn median(&self, turns: usize, mut call: impl FnMut(usize)) -> f64 {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = || -> CudaEvent { self.gpu.device.context().new_event(flags).expect("an event") };
        let (start, end) = (event(), event());
        let mut sample = || {
            start.record(&self.gpu.stream).expect("an event on the stream");
            (0..turns).for_each(&mut call);
            end.record(&self.gpu.stream).expect("an event on the stream");
            end.synchronize().expect("work without faults");
            f64::from(start.elapsed_ms(&end).expect("two events that are over")) / turns as f64
        };
        let (warm, least, most) =
            if self.smoke { (0, 1, 1) } else { (3, if self.quick { 7 } else { 15 }, 60) };
        (0..warm).for_each(|_| {
            sample();
        });
        let begun = Instant::now();
        let mut times = Vec::new();
        while times.len() < least || (times.len() < most && begun.elapsed() < PATIENCE) {
            times.push(sample());
        }
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }

    /// So many pieces of memory of this size are several times the second-level cache.
    fn turns(&self, bytes: usize) -> usize {
        if self.smoke { 2 } else { (4 * self.cache).div_ceil(bytes).max(1) }
    }

    /// Adds a row whose bandwidth is held against another.
    fn add(
        &mut self,
        part: &'static str,
        name: String,
        ms: f64,
        bytes: usize,
        of: Option<f64>,
        goal: Option<Goal>,
    ) {
        let ratio = of.map(|of| bytes as f64 / ms / of);
        self.rows.push(Row { part, name, ms, bytes, ratio, goal });
    }
}

/// Measures and prints.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let driver = ensure_driver();
    if !is_available() {
        return Err("the driver has no device".into());
    }
    let gpu = Gpu::new();
    let simulated = matches!(driver, Driver::Simulated(_));
    let about = about(&gpu, simulated)?;
    if options.device {
        println!("{about}");
        return Ok(());
    }
    if simulated && !options.smoke {
        return Err(
            "the driver is ptxsim, whose times mean nothing; there must be a GPU, or --smoke for a trial"
                .into(),
        );
    }
    let context = gpu.device.context();
    let cache = context
        .attribute(sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        .map_err(|e| format!("the size of the second-level cache: {e}"))?;
    let name = context.name().map_err(|e| format!("the device's name: {e}"))?;
    let mut bench = Bench {
        gpu: &gpu,
        smoke: options.smoke,
        quick: options.quick,
        cache: cache.max(1) as usize,
        name,
        rows: Vec::new(),
    };
    let (read, copy) = stream::run(&mut bench);
    attend::run(&mut bench, read);
    convert::run(&mut bench, copy);
    append::run(&mut bench);
    if options.json {
        println!("{}", json(&about, options.smoke, &bench.rows));
    } else {
        print(&about, options.smoke, &bench.rows);
    }
    Ok(())
}

/// Device and driver in one line.
fn about(gpu: &Gpu, simulated: bool) -> Result<String, String> {
    let name = gpu.device.context().name().map_err(|e| format!("the device's name: {e}"))?;
    let mut version = 0;
    // SAFETY: the driver is loaded, and writes one number.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(|e| format!("the driver's version: {e}"))?;
    let memory = result::mem_get_info().map_err(|e| format!("the device's memory: {e}"))?;
    Ok(format!(
        "{name}, compute capability {}.{}, {} multiprocessors, {:.1} GB; driver for CUDA {}.{}{}",
        gpu.device.compute_capability() / 10,
        gpu.device.compute_capability() % 10,
        gpu.device.multiprocessors(),
        memory.1 as f64 / 1e9,
        version / 1000,
        version % 1000 / 10,
        if simulated { " (ptxsim, a stand-in: no GPU)" } else { "" },
    ))
}

fn json(about: &str, smoke: bool, rows: &[Row]) -> serde_json::Value {
    let row = |r: &Row| {
        let ratio = r.ratio.filter(|_| !smoke);
        json!({
            "part": r.part, "name": r.name, "ms": r.ms, "bytes": r.bytes, "ratio": ratio,
            "goal": r.goal.map(Goal::text), "holds": r.goal.zip(ratio).map(|(g, x)| g.holds(x)),
        })
    };
    json!({ "device": about, "smoke": smoke, "rows": rows.iter().map(row).collect::<Vec<_>>() })
}

fn print(about: &str, smoke: bool, rows: &[Row]) {
    println!("{about}");
    if smoke {
        println!("A trial with tiny sizes: times and ratios mean nothing.");
    }
    println!(
        "{:<8} {:<44} {:>10} {:>9} {:>7} {:>8}  goal holds",
        "part", "what", "ms", "GB/s", "ratio", "goal"
    );
    for r in rows {
        let ratio = r.ratio.map_or("-".into(), |x| format!("{x:.3}"));
        let goal = r.goal.map_or("-".into(), Goal::text);
        let holds = match r.goal.zip(r.ratio) {
            _ if smoke => "-",
            None => "-",
            Some((g, x)) if g.holds(x) => "yes",
            Some(_) => "NO",
        };
        let speed = r.bytes as f64 / r.ms / 1e6;
        println!("{:<8} {:<44} {:>10.4} {speed:>9.1} {ratio:>7} {goal:>8}  {holds}", r.part, r.name, r.ms);
    }
}

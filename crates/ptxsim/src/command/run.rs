//! `ptxsim run`

use super::argument::{Argument, Buffer, Placed, parse};
use super::image::read;
use super::names::{find, signature};
use ptxsim::card::{Card, SHARED_PER_BLOCK, THREADS_PER_BLOCK};
use ptxsim::exec::launch::{Launch, launch};
use ptxsim::fault::Fault;
use ptxsim::memory::GlobalMemory;
use ptxsim::options::{Options, Uninitialized};
use ptxsim::program::{Image, Kernel, LoadError};
use ptxsim::ptx::ast::{Function, Type};
use ptxsim::stats::Stats;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

#[derive(Debug, clap::Args)]
pub(crate) struct Run {
    /// A PTX or fatbin file.
    file: PathBuf,
    /// The kernel: its name, mangled or not, or the beginning of it.
    #[arg(long, alias = "name")]
    kernel: String,
    /// Blocks: X, X,Y or X,Y,Z.
    #[arg(long, value_parser = extents)]
    grid: [u32; 3],
    /// Threads of a block.
    #[arg(long, value_parser = extents)]
    block: [u32; 3],
    /// Blocks of a cluster, if the kernel does not say.
    #[arg(long, value_parser = extents)]
    cluster: Option<[u32; 3]>,
    /// Dynamic shared memory in bytes.
    #[arg(long, default_value_t = 0)]
    shared: u32,
    /// All blocks are resident together and may wait for each other.
    #[arg(long)]
    cooperative: bool,
    /// Compute capability of the card: 80, 86, 89, 90 or 120; otherwise the oldest that runs the file.
    #[arg(long)]
    cc: Option<String>,
    /// An argument, see below.
    #[arg(long = "arg", value_name = "KIND:VALUE", allow_hyphen_values = true)]
    args: Vec<String>,
    /// Writes the memory behind argument INDEX (from 0) to a file afterwards.
    #[arg(long, value_name = "INDEX:FILE")]
    dump: Vec<String>,
    /// Prints the first COUNT numbers (else 16) behind argument INDEX (from 0) afterwards: 2:f32:8.
    #[arg(long, value_name = "INDEX:TYPE[:COUNT]")]
    print: Vec<String>,
    /// Prints counters.
    #[arg(long)]
    stats: bool,
    /// Prints one JSON object: kernel, seconds, counters, fault.
    #[arg(long)]
    json: bool,
    /// Without the checks of uninitialised reads, races, copies in flight, divergence and shuffles.
    #[arg(long)]
    unchecked: bool,
    /// Reports memory that was never written: off, when its value is used (use), when it is read (strict).
    #[arg(long, value_name = "WHEN", value_parser = uninitialized)]
    uninitialized: Option<Uninitialized>,
    /// Allows lanes of one warp to exchange data through shared memory without a warp-level barrier.
    #[arg(long)]
    allow_warp_races: bool,
    /// Shuffles the order of blocks and warps by this number.
    #[arg(long)]
    seed: Option<u64>,
    /// Instructions of all threads after which the kernel counts as a runaway loop; 0: no limit.
    #[arg(long)]
    limit: Option<u64>,
    /// Threads of this machine to use; 0: all cores.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Outcome<'a> {
    kernel: &'a str,
    card: &'static str,
    grid: [u32; 3],
    block: [u32; 3],
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    stats: Option<&'a Stats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<&'a Fault>,
    printed: Vec<Vec<f64>>,
}

fn extents(text: &str) -> Result<[u32; 3], String> {
    let mut extents = [1; 3];
    let parts: Vec<_> = text.split([',', 'x']).collect();
    if parts.len() > 3 {
        return Err("at most three extents".into());
    }
    for (extent, part) in extents.iter_mut().zip(parts) {
        *extent = part.trim().parse().ok().filter(|&e| e > 0).ok_or("extents are whole numbers from 1")?;
    }
    Ok(extents)
}

fn uninitialized(text: &str) -> Result<Uninitialized, String> {
    match text {
        "off" => Ok(Uninitialized::Off),
        "use" => Ok(Uninitialized::OnUse),
        "strict" => Ok(Uninitialized::Strict),
        _ => Err("off, use or strict".into()),
    }
}

impl Run {
    fn options(&self) -> Options {
        let mut options = if self.unchecked { Options::unchecked() } else { Options::default() };
        if let Some(when) = self.uninitialized {
            (options.uninitialized_global, options.uninitialized_shared) = (when, when);
        }
        options.counters |= self.stats || self.json;
        options.warp_races &= !self.allow_warp_races;
        options.shuffle_seed = self.seed;
        options.instruction_limit = self.limit.unwrap_or(options.instruction_limit);
        options.threads = self.threads;
        options
    }

    pub(crate) fn run(&self) -> Result<(), String> {
        let file = read(&self.file, self.cc.as_deref())?;
        let function = find(&file.module, &self.kernel)?;
        let arguments = self.arguments(function)?;
        let options = self.options();
        let memory = GlobalMemory::new(file.card.memory_bytes);
        let image = Image::load(Arc::clone(&file.module), &memory)?;
        let kernel = image.kernel(&function.name, file.card, &options).map_err(|e| match e {
            LoadError::NotFound(name) => format!("no kernel is called `{name}`"),
            LoadError::Unsupported(all) => format!("this kernel cannot run:\n  {}", all.join("\n  ")),
        })?;
        let cluster = self.check(function, &kernel, file.card)?;

        let mut params = vec![0; kernel.param_bytes as usize];
        let mut buffers = Vec::new();
        for (argument, &(offset, bytes)) in arguments.iter().zip(&kernel.params) {
            let Placed { value, buffer } = argument.place(&memory)?;
            let (start, end) = (offset as usize, (offset + bytes) as usize);
            match params.get_mut(start..end) {
                Some(place) if place.len() == value.len() => place.copy_from_slice(&value),
                _ => return Err("the kernel's parameters do not fit".into()),
            }
            buffers.push(buffer);
        }
        let dumps = self.dumps(&buffers)?;
        let prints = self.prints(&buffers)?;

        let registers = file.registers.get(&function.name).copied();
        let shape = Launch {
            grid: self.grid,
            block: self.block,
            cluster,
            dynamic_shared: self.shared,
            cooperative: self.cooperative,
            params,
            registers: registers.unwrap_or(kernel.estimated_registers),
        };
        let start = Instant::now();
        let result = launch(&kernel, &shape, &memory.view(), file.card, &options);
        let seconds = start.elapsed().as_secs_f64();

        for (buffer, path) in dumps {
            let contents = contents(&memory, buffer)?;
            std::fs::write(path, contents).map_err(|e| format!("{path}: {e}"))?;
        }
        let printed: Vec<Vec<f64>> = prints
            .into_iter()
            .map(|(buffer, ty, count)| Ok(numbers(&contents(&memory, buffer)?, ty, count)))
            .collect::<Result<_, String>>()?;
        if self.json {
            let outcome = Outcome {
                kernel: &function.name,
                card: file.card.name,
                grid: self.grid,
                block: self.block,
                seconds,
                stats: result.as_ref().ok(),
                fault: result.as_ref().err().map(|f| &**f),
                printed,
            };
            println!("{}", serde_json::to_string_pretty(&outcome).map_err(|e| e.to_string())?);
        } else {
            for numbers in printed {
                println!("{}", numbers.iter().map(f64::to_string).collect::<Vec<_>>().join(" "));
            }
            if let Ok(stats) = &result {
                println!(
                    "{}: {} thread instructions in {seconds:.3} s on {}",
                    function.name, stats.total.thread_instructions, file.card.name
                );
                if self.stats {
                    print!("{}", table(stats));
                }
            }
        }
        result.map(|_| ()).map_err(|fault| fault.to_string())
    }

    /// The arguments, one for each parameter.
    fn arguments(&self, function: &Function) -> Result<Vec<Argument>, String> {
        let arguments: Vec<_> = self.args.iter().map(|a| parse(a)).collect::<Result<_, _>>()?;
        if arguments.len() != function.params.len() {
            return Err(format!(
                "{} arguments were given and the kernel takes {}: {}",
                arguments.len(),
                function.params.len(),
                signature(function)
            ));
        }
        for (i, (argument, parameter)) in arguments.iter().zip(&function.params).enumerate() {
            if let Some(why) = argument.mismatch(parameter) {
                return Err(format!("argument {i}, `{}`, {why}: {}", self.args[i], signature(function)));
            }
        }
        Ok(arguments)
    }

    /// Checks the launch against the card and the kernel; returns the extents of a cluster.
    fn check(&self, function: &Function, kernel: &Kernel, card: &Card) -> Result<[u32; 3], String> {
        let threads = self.block.iter().map(|&e| u64::from(e)).product::<u64>();
        if threads > THREADS_PER_BLOCK.into() || self.block[2] > 64 {
            return Err(format!(
                "a block has at most {THREADS_PER_BLOCK} threads and 64 in z, not {:?}",
                self.block
            ));
        }
        if self.grid[0] > i32::MAX as u32 || self.grid[1] > 65535 || self.grid[2] > 65535 {
            return Err(format!("a grid has at most 2147483647 x 65535 x 65535 blocks, not {:?}", self.grid));
        }
        let limits = function.limits;
        if limits.required_threads.is_some_and(|r| r != self.block) {
            return Err(format!(
                "the kernel asks for blocks of {:?} threads",
                limits.required_threads.unwrap_or_default()
            ));
        }
        let most = limits.max_threads.map(|m| m.iter().map(|&e| u64::from(e)).product::<u64>());
        if let Some(most) = most.filter(|&most| threads > most) {
            return Err(format!("the kernel was compiled for blocks of at most {most} threads"));
        }
        let shared = u64::from(kernel.shared_bytes) + u64::from(self.shared);
        if kernel.shared_bytes > SHARED_PER_BLOCK || shared > card.shared_per_block_optin.into() {
            return Err(format!(
                "{} bytes of static and {} of dynamic shared memory are more than the card's {} (static {})",
                kernel.shared_bytes, self.shared, card.shared_per_block_optin, SHARED_PER_BLOCK
            ));
        }
        let cluster = match (self.cluster, limits.cluster) {
            (Some(given), Some(own)) if given != own => {
                return Err(format!("the kernel asks for clusters of {own:?} blocks"));
            }
            (given, own) => own.or(given),
        };
        if cluster.is_some() && card.cc < 90 {
            return Err(format!("{} has no clusters: choose --cc 90 or later", card.name));
        }
        let cluster = cluster.unwrap_or([1; 3]);
        let fits = cluster.iter().zip(self.grid).all(|(&c, g)| c > 0 && g.is_multiple_of(c));
        if !fits || cluster.iter().map(|&e| u64::from(e)).product::<u64>() > 16 {
            return Err(format!(
                "clusters of {cluster:?} blocks (at most 16) do not divide a grid of {:?}",
                self.grid
            ));
        }
        Ok(cluster)
    }

    fn dumps<'a>(&'a self, buffers: &'a [Option<Buffer>]) -> Result<Vec<(&'a Buffer, &'a str)>, String> {
        let one = |text: &'a String| {
            let (index, path) = text.split_once(':').ok_or_else(|| format!("`{text}` is not INDEX:FILE"))?;
            Ok((buffer(buffers, index)?, path))
        };
        self.dump.iter().map(one).collect()
    }

    fn prints<'a>(&self, buffers: &'a [Option<Buffer>]) -> Result<Vec<(&'a Buffer, Type, usize)>, String> {
        let one = |text: &String| {
            let parts: Vec<_> = text.split(':').collect();
            let (index, ty, count) = match parts[..] {
                [index, ty] => (index, ty, "16"),
                [index, ty, count] => (index, ty, count),
                _ => return Err(format!("`{text}` is not INDEX:TYPE or INDEX:TYPE:COUNT")),
            };
            // Rust's and CUDA's letter for signed numbers; PTX has s
            let ptx = ty.replacen('i', "s", 1);
            let ty = Type::parse(&ptx).filter(|t| number_of(*t, &[0; 8]).is_some());
            let ty = ty.ok_or_else(|| {
                format!("`{text}`: this is no type of numbers; the numbers that --arg takes can be printed")
            })?;
            let count = count.parse().map_err(|_| format!("`{text}`: `{count}` is not a count"))?;
            Ok((buffer(buffers, index)?, ty, count))
        };
        self.print.iter().map(one).collect()
    }
}

fn buffer<'a>(buffers: &'a [Option<Buffer>], index: &str) -> Result<&'a Buffer, String> {
    let number = index.parse::<usize>().map_err(|_| format!("`{index}` is not the index of an argument"))?;
    match buffers.get(number) {
        Some(Some(buffer)) => Ok(buffer),
        Some(None) => Err(format!("argument {number} is no memory, so it cannot be shown")),
        None => Err(format!("there is no argument {number}: the {} given count from 0", buffers.len())),
    }
}

fn contents(memory: &GlobalMemory, buffer: &Buffer) -> Result<Vec<u8>, String> {
    let mut contents = vec![0; buffer.bytes as usize];
    memory.read(buffer.address, &mut contents).map_err(|e| e.to_string())?;
    Ok(contents)
}

/// The number in the first bytes; `None` for types that are none.
fn number_of(ty: Type, bytes: &[u8]) -> Option<f64> {
    let mut word = [0; 8];
    let len = (ty.bytes() as usize).min(8);
    word[..len].copy_from_slice(bytes.get(..len)?);
    let bits = u64::from_le_bytes(word);
    let unused = 64 - 8 * len as u32;
    Some(match ty {
        Type::F64 => f64::from_bits(bits),
        Type::F32 => f32::from_bits(bits as u32).into(),
        Type::F16 => half::f16::from_bits(bits as u16).into(),
        Type::BF16 => half::bf16::from_bits(bits as u16).into(),
        Type::S8 | Type::S16 | Type::S32 | Type::S64 => ((bits << unused) as i64 >> unused) as f64,
        Type::U8 | Type::U16 | Type::U32 | Type::U64 => bits as f64,
        _ => return None,
    })
}

fn numbers(bytes: &[u8], ty: Type, count: usize) -> Vec<f64> {
    bytes.chunks_exact(ty.bytes() as usize).take(count).filter_map(|b| number_of(ty, b)).collect()
}

/// Counters for people.
fn table(stats: &Stats) -> String {
    use std::fmt::Write;
    let t = &stats.total;
    let mut out = String::new();
    // writing to a string does not fail
    let mut row = |name: &str, value: String| {
        let _ = writeln!(out, "  {name:<36}{value:>16}");
    };
    row("warp instructions", t.warp_instructions.to_string());
    row("thread instructions", t.thread_instructions.to_string());
    row("global bytes", t.global_bytes.to_string());
    row("global requests", t.global_requests.to_string());
    row("global 32-byte sectors", t.global_sectors.to_string());
    row("sectors per request", format!("{:.2}", t.sectors_per_request()));
    row("shared requests", t.shared_requests.to_string());
    row("shared wavefronts", t.shared_wavefronts.to_string());
    row("of these by bank conflicts", t.shared_conflicts.to_string());
    row("mma", t.mma.to_string());
    row("barriers", t.barriers.to_string());
    row("divergent branches", t.divergent_branches.to_string());
    let _ = writeln!(out, "  {:<36}{:>16}{:>20}", "class", "warp instructions", "thread instructions");
    for (class, [warp, thread]) in &stats.classes {
        let _ = writeln!(out, "  {:<36}{warp:>16}{thread:>20}", format!("{class:?}"));
    }
    if !stats.lines.is_empty() {
        let _ = writeln!(
            out,
            "  {:<36}{:>16}{:>10}{:>12}{:>10}",
            "line", "warp instr.", "sectors", "wavefronts", "conflicts"
        );
    }
    for line in &stats.lines {
        let c = &line.counts;
        let _ = writeln!(
            out,
            "  {:<36}{:>16}{:>10}{:>12}{:>10}",
            line.line, c.warp_instructions, c.global_sectors, c.shared_wavefronts, c.shared_conflicts
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes() {
        assert_eq!(extents("4"), Ok([4, 1, 1]));
        assert_eq!(extents("4,5,6"), Ok([4, 5, 6]));
        assert_eq!(extents("4x5"), Ok([4, 5, 1]));
        for wrong in ["", "0", "-1", "1,2,3,4", "1,,2", "a"] {
            assert!(extents(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_in_memory() {
        assert_eq!(numbers(&[0xff, 0xff, 1, 0, 9], Type::S16, 5), [-1.0, 1.0]);
        assert_eq!(numbers(&[0xff, 0xff, 1, 0], Type::U16, 1), [65535.0]);
        assert_eq!(numbers(&1.5f32.to_le_bytes(), Type::F32, 5), [1.5]);
        assert_eq!(numbers(&[0x00, 0x3c], Type::F16, 5), [1.0]);
        assert_eq!(numbers(&(-7i64).to_le_bytes(), Type::S64, 5), [-7.0]);
        assert_eq!(number_of(Type::Pred, &[0; 8]), None);
    }
}

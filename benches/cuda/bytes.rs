//! What decode attention moves and waits for, as the simulated driver counts it: a line of JSON a format, head dim and group, for
//! `cargo xtask bytes`.

use crate::Options;
use crate::cases::{config, formats, least_bytes};
use crate::gpu::{Gpu, Host, Random, contiguous};
use crate::still::Still;
use ptxsim::options::Options as Simulation;
use ptxsim::stats::Stats;
use ptxsim::testing::{Simulator, ensure_simulator};
use qkv::Dtype;
use qkv::cuda::DeviceTensorMut;
use serde_json::{Value, json};

/// Tokens of a sequence in pages at least.
const TOKENS: usize = 4096;
const SEQUENCES: usize = 2;
const HEADS: usize = 8;
const DIMS: [usize; 2] = [64, 128];
const GROUPS: [usize; 4] = [1, 4, 8, 16];
/// With `--quick`: one group of the integer path, one of the f16 path.
const QUICK: [usize; 2] = [4, 8];
/// Bytes of pages at least, by more tokens: a grid that fills the device should have more to do than to find its work.
const PAGES: usize = 32 << 20;
/// Bytes of a sector.
const SECTOR: u64 = 32;

/// Prints the lines.
pub(crate) fn run(options: &Options) {
    let simulator = ensure_simulator();
    let gpu = Gpu::new();
    let (dims, groups) = if options.quick { (&DIMS[1..], &QUICK[..]) } else { (&DIMS[..], &GROUPS[..]) };
    for d in dims {
        for (name, key, value) in formats(*d) {
            let c = config(key, value, HEADS, *d);
            let tile = SEQUENCES * c.block_bytes().expect("a valid configuration");
            let tokens = options.tokens.unwrap_or(TOKENS).max(64 * PAGES.div_ceil(tile));
            // The step's token closes the last tile and leaves a window of R.
            let len = tokens + c.residual.unwrap_or(0);
            let c = c.with_capacity(SEQUENCES, len + 64);
            let mut still = Still::new(&gpu, c, &[len - 1; SEQUENCES]).filled(&gpu);
            still.begin(&gpu);
            for group in groups {
                let mut line = measure(&gpu, simulator, &mut still, *group);
                line["format"] = name.clone().into();
                line["tokens"] = tokens.into();
                println!("{line}");
            }
        }
    }
}

/// One launch, and the small one behind it that joins what blocks shared.
fn measure(gpu: &Gpu, simulator: Simulator, still: &mut Still, group: usize) -> Value {
    let c = still.config.clone();
    let (heads, d) = (c.kv_heads * group, c.key_dim);
    let dims = [SEQUENCES, heads, d];
    let q = Host::new(Dtype::F16, &Random::new(1).normals(dims.iter().product())).up(gpu);
    let mut out = gpu.zeros::<half::f16>(dims.iter().product());
    let mut lse = gpu.zeros::<f32>(SEQUENCES * heads);
    let least = least_bytes(gpu, still, group, true);
    // Whether kernels are right is tested elsewhere; here it would only take time.
    let counting = Simulation { counters: true, first_level_cache: true, ..Simulation::unchecked() };
    simulator.take_stats();
    simulator.with_options(&counting, || {
        let mut to = DeviceTensorMut::thd(&mut out, dims).expect("a view");
        still.launch(gpu, &q.view(contiguous(dims)), &mut to, Some((&mut lse).into()));
        gpu.stream.synchronize().expect("a launch without faults");
    });
    let stats = simulator.take_stats();
    let [attend, combine] = &stats[..] else { panic!("two launches were expected, not {}", stats.len()) };
    // Partial results stay in the second-level cache: their number is bounded by the grid.
    let partial = sectors(attend, |line| line.contains("merge.cuh"));
    let joined = sectors(combine, |line| line.contains("combine.cu:"));
    let all = attend.total;
    // Lanes ask for some bytes together; more than the sectors have is no more than all of them.
    let asked: u64 =
        attend.lines.iter().map(|l| l.counts.global_bytes.min(SECTOR * l.counts.l2_sectors)).sum();
    // Queries are prepared once a unit of work; everything else is in the loop over pages and rows, or as rare.
    let in_loop = attend.lines.iter().filter(|l| !l.line.contains("query.cuh"));
    let in_loop: u64 = in_loop.map(|l| l.counts.shared_conflicts).sum();
    json!({
        "dim": d,
        "group": group,
        "kernel": attend.kernel,
        "blocks": attend.grid[0],
        "sequences": SEQUENCES,
        "heads": c.kv_heads,
        "least": least,
        "memory": SECTOR * (all.l2_sectors - partial + combine.total.l2_sectors - joined),
        "l2": SECTOR * all.l2_sectors,
        "asked": asked,
        "conflicts": all.shared_conflicts,
        "loop_conflicts": in_loop,
    })
}

/// Sectors behind the first-level cache of the lines that a test accepts.
fn sectors(stats: &Stats, of: impl Fn(&str) -> bool) -> u64 {
    stats.lines.iter().filter(|l| of(&l.line)).map(|l| l.counts.l2_sectors).sum()
}

//! What decode attention moves and waits for, as the simulated driver counts it: a line of JSON a format, head dim and group, for
//! `cargo xtask bytes`.

use crate::Options;
use crate::cases::{config, formats, least_bytes};
use crate::gpu::{Gpu, Host, Random, contiguous};
use crate::still::Still;
use ptxsim::stats::{Counts, Stats};
use ptxsim::testing::{Simulator, ensure_simulator};
use qkv::Dtype;
use qkv::cuda::DeviceTensorMut;
use serde_json::{Value, json};

/// Tokens of a sequence in pages.
const TOKENS: usize = 4096;
const SEQUENCES: usize = 8;
const HEADS: usize = 8;
const DIMS: [usize; 2] = [64, 128];
const GROUPS: [usize; 4] = [1, 4, 8, 16];
/// With `--quick`: one group of the integer path, one of the f16 path.
const QUICK: [usize; 2] = [4, 8];

/// Prints the lines.
pub(crate) fn run(options: &Options) {
    let simulator = ensure_simulator();
    let gpu = Gpu::new();
    let (dims, groups) = if options.quick { (&DIMS[1..], &QUICK[..]) } else { (&DIMS[..], &GROUPS[..]) };
    for d in dims {
        for (name, key, value) in formats(*d) {
            let tokens = options.tokens.unwrap_or(TOKENS);
            let c = config(key, value, HEADS, *d);
            // The step's token closes the last tile and leaves a window of R.
            let len = tokens + c.residual.unwrap_or(0);
            let c = c.with_capacity(SEQUENCES, len + 64);
            let mut still = Still::new(&gpu, c, &[len - 1; SEQUENCES]).filled(&gpu);
            still.begin(&gpu);
            for group in groups {
                let mut line = measure(&gpu, simulator, &mut still, *group);
                line["format"] = name.clone().into();
                println!("{line}");
            }
        }
    }
}

/// One launch, and the small one behind it that joins what blocks shared.
fn measure(gpu: &Gpu, simulator: Simulator, still: &mut Still, group: usize) -> Value {
    let c = still.config.clone();
    let (heads, d) = (c.kv_heads * group, c.key_dim);
    let q = Host::new(Dtype::F16, &Random::new(1).normals(SEQUENCES * heads * d)).up(gpu);
    let mut out = gpu.zeros::<half::f16>(SEQUENCES * heads * d);
    let mut lse = gpu.zeros::<f32>(SEQUENCES * heads);
    let least = least_bytes(gpu, still, group, true);
    simulator.take_stats();
    let mut to = DeviceTensorMut::thd(&mut out, [SEQUENCES, heads, d]).expect("a view");
    still.launch(gpu, &q.view(contiguous([SEQUENCES, heads, d])), &mut to, Some((&mut lse).into()));
    gpu.stream.synchronize().expect("a launch without faults");
    let stats = simulator.take_stats();
    let [attend, combine] = &stats[..] else { panic!("two launches were expected, not {}", stats.len()) };
    let partial = lines(attend, |l| l.contains("merge.cuh"));
    // Queries are prepared once a unit of work; everything else is in the loop over pages and rows, or as rare.
    let outside = lines(attend, |l| l.contains("query.cuh"));
    let all = attend.total;
    json!({
        "dim": d,
        "group": group,
        "kernel": attend.kernel,
        "blocks": attend.grid[0],
        "sequences": SEQUENCES,
        "heads": c.kv_heads,
        "least": least,
        "bytes": all.global_bytes,
        "sectors": all.global_sectors,
        "partial_bytes": partial.global_bytes,
        "partial_sectors": partial.global_sectors,
        "combine_bytes": combine.total.global_bytes,
        "combine_sectors": combine.total.global_sectors,
        "conflicts": all.shared_conflicts,
        "loop_conflicts": all.shared_conflicts - outside.shared_conflicts,
        "lines": attend.lines.iter().filter(|l| l.counts.global_sectors > 0 || l.counts.shared_conflicts > 0).map(|l| json!([l.line, l.counts.global_bytes, l.counts.global_sectors, l.counts.shared_conflicts])).collect::<Vec<_>>(),
    })
}

/// Counts of the lines whose place a test accepts.
fn lines(stats: &Stats, of: impl Fn(&str) -> bool) -> Counts {
    let mut sum = Counts::default();
    stats.lines.iter().filter(|l| of(&l.line)).for_each(|l| sum.add(&l.counts));
    sum
}

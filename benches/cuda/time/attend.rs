//! Decode attention, as a fraction of what reading the same bytes takes.

use super::{Bench, Goal, Row};
use crate::cases::{config, least_bytes};
use crate::gpu::{Gpu, Host, Random, contiguous};
use crate::still::{Still, small_bytes, tables};
use cudarc::driver::CudaSlice;
use half::f16;
use qkv::cuda::DeviceTensorMut;
use qkv::{Affine, Bits, CacheConfig, Dtype, Format, Fp8, Granularity};

const HEADS: usize = 8;
const DIM: usize = 128;
/// Sequences and tokens of each.
const SHAPES: [[usize; 2]; 2] = [[128, 2048], [8, 16_384]];
const SMOKE: [usize; 2] = [2, 192];

/// FP8 on an H200, 128 x 2048 tokens, 64 query heads: the best published time is 0.147 ms.
const H200_FP8_MS: f64 = 0.135;

struct Case {
    name: &'static str,
    key: Format,
    value: Format,
    /// Without window and sinks, as engines have these formats.
    direct: bool,
    /// 4 rows are the integer path's, where there is one.
    groups: &'static [usize],
    goal: f64,
}

fn cases() -> Vec<Case> {
    let same = |name, f: Format, groups, goal| Case { name, key: f, value: f, direct: true, groups, goal };
    let windowed = |name, (key, value), goal| Case { name, key, value, direct: false, groups: &[4, 8], goal };
    let token = |bits| Format::from(Affine::per_token(bits, DIM));
    vec![
        same("f16", Format::F16, &[8], 0.93),
        same("e4m3", Fp8::e4m3(Granularity::TokenHead).into(), &[8], 0.92),
        windowed("int8", CacheConfig::default_formats(Bits::B8, DIM), 0.92),
        windowed("int4 default", CacheConfig::default_formats(Bits::B4, DIM), 0.88),
        windowed("int4 one pair", (token(Bits::B4), token(Bits::B4)), 0.88),
        windowed("int2 default", CacheConfig::default_formats(Bits::B2, DIM), 0.75),
    ]
}

/// `read` are bytes a millisecond.
pub(crate) fn run(bench: &mut Bench<'_>, read: f64) {
    let shapes = if bench.smoke { &[SMOKE][..] } else { &SHAPES[..if bench.quick { 1 } else { 2 }] };
    for [sequences, tokens] in shapes {
        for case in cases() {
            one(bench, &case, *sequences, *tokens, read);
        }
    }
}

fn one(bench: &mut Bench<'_>, case: &Case, sequences: usize, tokens: usize, read: f64) {
    let gpu = bench.gpu;
    let mut c = config(case.key, case.value, HEADS, DIM).with_capacity(sequences, tokens);
    if case.direct {
        c = c.direct();
    }
    let needed = sequences * tokens.div_ceil(64);
    let turns = bench.turns(needed * c.block_bytes().expect("a valid configuration"));
    let blocks = turns * needed;
    let mut still = Still::with_blocks(gpu, c.clone(), &vec![tokens - 1; sequences], blocks);
    fill(gpu, &mut still.layer.pages);
    let mut others: Vec<CudaSlice<i32>> =
        (1..turns).map(|t| tables(gpu, &c, sequences, blocks, t * needed)).collect();
    still.begin(gpu);
    for group in case.groups {
        let heads = HEADS * group;
        let dims = [sequences, heads, DIM];
        let q = Host::new(Dtype::F16, &Random::new(1).normals(sequences * heads * DIM)).up(gpu);
        let q = q.view(contiguous(dims));
        let mut out = gpu.zeros::<f16>(sequences * heads * DIM);
        let mut to = DeviceTensorMut::thd(&mut out, dims).expect("a view");
        let bytes = least_bytes(gpu, &still, *group, false);
        // Each turn has other pages, so that none are left in the cache from the last time.
        let ms = bench.median(turns, |turn| {
            if let Some(table) = turn.checked_sub(1).and_then(|t| others.get_mut(t)) {
                std::mem::swap(&mut still.tables, table);
            }
            still.launch(gpu, &q, &mut to, None);
            if let Some(table) = turn.checked_sub(1).and_then(|t| others.get_mut(t)) {
                std::mem::swap(&mut still.tables, table);
            }
        });
        let name = format!("{} {sequences} x {tokens}, {heads}/{HEADS} heads", case.name);
        bench.add("attend", name.clone(), ms, bytes, Some(read), Some(Goal::AtLeast(case.goal)));
        if (case.name, sequences, tokens) == ("e4m3", 128, 2048) && bench.name.contains("H200") {
            let goal = Some(Goal::AtMost(H200_FP8_MS));
            bench.rows.push(Row {
                part: "attend",
                name: format!("{name}: ms"),
                ms,
                bytes,
                ratio: Some(ms),
                goal,
            });
        }
    }
}

/// Fills device memory with small numbers: made once, then copied on.
fn fill(gpu: &Gpu, pages: &mut CudaSlice<u8>) {
    let some = gpu.up(&small_bytes(pages.len().min(16 << 20)));
    let mut at = 0;
    while at < pages.len() {
        let n = some.len().min(pages.len() - at);
        gpu.stream
            .memcpy_dtod(&some.slice(..n), &mut pages.slice_mut(at..at + n))
            .expect("a copy on the device");
        at += n;
    }
}

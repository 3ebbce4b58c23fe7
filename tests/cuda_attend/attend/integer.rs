//! The integer path of decode attention against a scalar model of it, and against f64 over the decoded values.

use super::integer_model::{Memory, Model, Row, Stored};
use super::plan::{Item, Piece, Plan, Sequence};
use super::{Case, channels, config, describe, distance, errors, own, row, run};
use crate::gpu::{Gpu, Random};
use crate::layer::{Layer, Twins};
use crate::still::Still;
use half::{bf16, f16};
use ptxsim::options::Options;
use qkv::layout::{Operand, OperandLayout, Order, PageLayout, code_bit, pair_bytes};
use qkv::{Affine, Axis, CacheConfig, Dtype, Format};
use std::cell::OnceCell;

/// Largest distance of outputs from f64, and of a card's from the model's.
const FROM_F64: f64 = 5e-4;
const FROM_MODEL: f64 = 1e-5;

/// Formats whose decoding is on the integer path, without rotations.
fn pairs(d: usize) -> impl Iterator<Item = (Affine, Affine)> {
    let affine = |(k, v): (Format, Format)| Some((*k.as_affine()?, *v.as_affine()?));
    own(d).into_iter().filter_map(affine).filter(|(_, v)| v.rotate.is_none())
}

/// What lies in a layer's memory.
struct Contents<'a> {
    config: &'a CacheConfig,
    pages: Vec<u8>,
    /// Of each (block, head), decoded when asked for.
    decoded: Vec<OnceCell<[Stored; 2]>>,
    window: [Vec<u16>; 2],
    sinks: [Vec<u16>; 2],
    means: Vec<u16>,
}

impl<'a> Contents<'a> {
    fn new(gpu: &Gpu, config: &'a CacheConfig, layer: &Layer) -> Self {
        let pages = gpu.down(&layer.pages);
        Self {
            config,
            decoded: (0..pages.len() / Self::layout(config).page_bytes).map(|_| OnceCell::new()).collect(),
            pages,
            window: layer.window.each_ref().map(|x| gpu.down(x)),
            sinks: layer.sinks.each_ref().map(|x| gpu.down(x)),
            means: gpu.down(&layer.means),
        }
    }

    fn layout(c: &CacheConfig) -> PageLayout {
        PageLayout::new(&c.layers[0].key, &c.layers[0].value, c.key_dim, c.value_dim)
    }

    fn page(&self, block: usize, head: usize) -> &[Stored; 2] {
        let (layout, l) = (Self::layout(self.config), &self.config.layers[0]);
        let index = block * self.config.kv_heads + head;
        let page = &self.pages[index * layout.page_bytes..][..layout.page_bytes];
        self.decoded[index].get_or_init(|| {
            [
                stored(page, &l.key, Operand::Key, &layout.key),
                stored(page, &l.value, Operand::Value, &layout.value),
            ]
        })
    }

    /// What pieces of a unit read.
    fn memory(&self, seat: usize, head: usize, table: &[i32], pieces: &[Piece]) -> Memory<'_> {
        let c = self.config;
        let place = seat * c.kv_heads + head;
        let exact = |token: usize| {
            let (from, rows) =
                if token < c.sinks { (&self.sinks, c.sinks) } else { (&self.window, c.window_rows()) };
            [0, 1].map(|op| {
                let d = [c.key_dim, c.value_dim][op];
                let bits = &from[op][(place * rows + token % rows) * d..][..d];
                bits.iter()
                    .map(|b| match c.window_dtype {
                        Dtype::Bf16 => bf16::from_bits(*b).to_f32(),
                        _ => f16::from_bits(*b).to_f32(),
                    })
                    .collect()
            })
        };
        let mut memory = Memory::default();
        for item in pieces.iter().flat_map(|p| &p.items) {
            match item {
                Item::Page(tile) => {
                    memory.pages.insert(*tile, self.page(table[*tile] as usize, head));
                }
                Item::Exact(tokens) => memory.exact.extend(tokens.clone().map(|t| (t, exact(t)))),
            }
        }
        if c.layers[0].key.centered() {
            let mean = &self.means[place * c.key_dim..][..c.key_dim];
            memory.mean = Some(mean.iter().map(|b| f16::from_bits(*b).to_f32()).collect());
        }
        memory
    }
}

/// An operand of a page in fragment order.
fn stored(page: &[u8], format: &Format, operand: Operand, at: &OperandLayout) -> Stored {
    let mask = (1 << format.code_bits()) - 1;
    let (codes, pairs) = (&page[at.codes..], &page[at.pairs..]);
    let each = || (0..64).flat_map(|t| (0..at.dim).map(move |c| (t, c)));
    let code = |(t, c)| {
        // The bits of a code lie side by side, except at 3 bits.
        let (byte, bit) = code_bit(format, operand, at, Order::Fragment, t, c, 0);
        i32::from(codes[byte] >> bit) & mask
    };
    let pair = |(t, c)| {
        let places = pair_bytes(format, operand, at, Order::Fragment, t, c).unwrap();
        let [step, min] = places.map(|b| f16::from_le_bytes([pairs[b], pairs[b + 1]]).to_f32());
        (step, min)
    };
    Stored { dim: at.dim, codes: each().map(code).collect(), pairs: each().map(pair).collect() }
}

/// Blocks of the attention since the last call; it must have been on the integer path.
fn blocks(gpu: &Gpu) -> usize {
    let Some(simulator) = gpu.simulator else {
        // The order of sums matters little there.
        return 4 * gpu.device.multiprocessors() as usize;
    };
    let stats = simulator.take_stats();
    let launch = stats.iter().find(|s| s.kernel.contains("attend")).unwrap();
    assert!(launch.kernel.contains("integer"), "{}", launch.kernel);
    launch.grid[0] as usize
}

/// Runs something without the simulator's checks for races and memory that nobody wrote: other tests of the same kernels have them.
fn quickly<T>(gpu: &Gpu, run: impl FnOnce() -> T) -> T {
    match gpu.simulator {
        Some(simulator) => simulator.with_options(&Options { counters: true, ..Options::unchecked() }, run),
        None => run(),
    }
}

/// Holds rows and their LSE against the model's: to the bit on the simulator.
fn compare(gpu: &Gpu, what: &str, rows: &[(Vec<f32>, Option<f32>, Row)]) -> Result<(), String> {
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    if gpu.simulator.is_some() {
        for (i, (got, lse, want)) in rows.iter().enumerate() {
            if let Some(d) = (0..got.len()).find(|d| !same(got[*d], want.out[*d])) {
                let different = (0..got.len()).filter(|d| !same(got[*d], want.out[*d])).count();
                let (got, want) = (got[d], want.out[d]);
                return Err(format!(
                    "{what}: row {i} channel {d}, one of {different}: {got:e}, model {want:e}"
                ));
            }
            if !lse.is_none_or(|lse| want.has_lse(lse)) {
                return Err(format!("{what}: row {i}: LSE {lse:?}, model {}", want.lse()));
            }
        }
        return Ok(());
    }
    let finite = rows.iter().filter(|(_, _, want)| want.out[0].is_finite());
    let (mut got, mut want) = (vec![], vec![]);
    for (out, lse, row) in finite {
        got.extend(out.iter().map(|x| f64::from(*x)));
        want.extend(row.out.iter().map(|x| f64::from(*x)));
        if lse.is_some_and(|lse| (f64::from(lse) - row.lse()).abs() > FROM_MODEL * row.lse().abs().max(1.0)) {
            return Err(format!("{what}: LSE {lse:?}, model {}", row.lse()));
        }
    }
    let error = distance(&got, &want);
    if error <= FROM_MODEL { Ok(()) } else { Err(format!("{what}: {error:.2e} from the model")) }
}

/// One step, its rows beside the model's.
fn check(gpu: &Gpu, case: &Case, random: &mut Random) -> (super::Errors, Result<(), String>) {
    if let Some(simulator) = gpu.simulator {
        simulator.take_stats();
    }
    let ran = run(gpu, case, random);
    let (c, cpu) = (&case.config, &ran.twins.cpu);
    let sequences: Vec<Sequence> = (ran.seats.iter().zip(&case.new))
        .map(|(s, n)| {
            let len = cpu.len(*s).unwrap();
            Sequence { old_len: len - n, len, packed: cpu.packed_len(*s).unwrap() }
        })
        .collect();
    let contents = Contents::new(gpu, c, &ran.twins.layer);
    let scale = case.scale.unwrap_or(1.0 / (c.key_dim as f32).sqrt());
    let model = Model { config: c, group: case.group, scale, softcap: case.softcap };
    let units = Plan::new(c).units(&sequences, blocks(gpu));
    let mut rows = Vec::new();
    for (unit, pieces) in units.iter().enumerate() {
        let (i, head) = (unit / c.kv_heads, unit % c.kv_heads);
        // Row and query head of each column.
        let columns: Vec<(usize, usize)> = (0..case.new[i] * case.group)
            .map(|at| (ran.twins.last_rows[i] + at / case.group, head * case.group + at % case.group))
            .collect();
        let queries: Vec<_> = columns.iter().map(|(t, h)| channels(&ran.q, *t, *h)).collect();
        let sinks: Vec<f32> = columns.iter().map(|(_, h)| ran.sink_logits[*h]).collect();
        let sinks = case.sink_logits.then_some(&sinks[..]);
        let table = cpu.block_table(ran.seats[i]).unwrap();
        let memory = contents.memory(ran.seats[i].index(), head, table, pieces);
        let want = model.unit(&sequences[i], &memory, pieces, &queries, sinks);
        for ((t, h), want) in columns.into_iter().zip(want) {
            rows.push((channels(&ran.out, t, h), Some(ran.lse[t * ran.query_heads + h]), want));
        }
    }
    (errors(case, &ran), compare(gpu, &describe(case), &rows))
}

/// Lengths around the ends of tiles, with every option.
fn short_sequences(d: usize) {
    let (gpu, mut texts) = (Gpu::new(), Vec::new());
    let lengths = [0, 1, 63, 64, 65, 127, 128, 130, 300, 333, 400, 515];
    for (i, (key, value)) in pairs(d).enumerate() {
        let token = key.axis == Axis::PerToken;
        let mut worst = 0f64;
        for option in 0..8 {
            let mut random = Random::new((100 * d + 10 * i + option) as u64);
            let (mut k, mut v) = (key, value);
            match option {
                1 | 5 => v.rotate = Some(d),
                2 => (k.rotate, v.rotate) = (Some(32), Some(32)),
                3 if token => k.center = true,
                4 => k.rotate = Some(d),
                6 if token => (k.center, k.rotate, v.rotate) = (true, Some(64), Some(64)),
                _ => {}
            }
            let mut c = config(k.into(), v.into(), 1 + option % 2, d);
            c = match option {
                0 | 4 if token => c.direct(),
                0 | 7 => c.with_residual(Some(0)).with_sinks(0),
                1 => c.with_residual(Some(32)).with_sinks(16).with_window_dtype(Dtype::Bf16),
                5 => c.with_residual(Some(128)).with_window_dtype(Dtype::Bf16),
                _ => c,
            };
            c = c.with_sliding_window([None, None, None, Some(100), Some(70), None, Some(200), None][option]);
            let (group, n) = [(4, 1), (2, 2), (3, 1), (2, 1), (1, 3), (2, 2), (1, 1), (4, 1)][option];
            let before: Vec<usize> =
                (0..3).map(|s| lengths[(5 * i + 7 * option + 4 * s) % lengths.len()]).collect();
            let mut case = Case::new(c, group, &before, &[n, 1, n]);
            case.pad = option % 2 == 1;
            case.broken = option == 2 || option == 7;
            case.softcap = [None, None, None, Some(30.0), None, None, Some(2.0), None][option];
            case.scale = [None, None, Some(-0.2), None, Some(0.3), None, None, Some(0.0)][option];
            case.sink_logits = option % 4 == 1 || option == 6;
            case.sharpness = [1.0, 4.0, 1.0, 0.05, 1.0, 1e-3, 4.0, 1.0][option];
            case.magnitude = match option {
                3 => [1e-3, 1e4],
                5 => [1e3, 1e-6],
                _ => [1.0, 1.0],
            };
            let (e, model) = quickly(&gpu, || check(&gpu, &case, &mut random));
            texts.extend(model.err());
            worst = worst.max(e.device);
        }
        if worst > FROM_F64 {
            texts.push(format!("{key:?} {value:?}: {worst:.2e} from f64"));
        }
        println!("{key:?} {value:?}: {worst:.2e} from f64");
    }
    assert!(texts.is_empty(), "{}", texts.join("\n"));
}

#[test]
fn short_sequences_of_64_channels_are_the_model_s() {
    short_sequences(64);
}

#[test]
fn short_sequences_of_128_channels_are_the_model_s() {
    short_sequences(128);
}

/// Warps that have several pages each: references move, and queries of per-channel keys are folded with steps of many sizes.
#[test]
fn long_sequences_are_the_model_s() {
    let (gpu, mut texts) = (Gpu::new(), Vec::new());
    let (lens, heads, group, pool) = ([70_000, 45_011], 2, 4, 16);
    for d in [64, 128] {
        for (key, value) in pairs(d) {
            let what = format!("{key:?} {value:?}, {d} channels");
            let mut random = Random::new(d as u64);
            let c = config(key.into(), value.into(), heads, d).with_capacity(lens.len(), 64 * 1200);
            // Pages with keys and values of many sizes, which the sequences have in common.
            let mut twins = Twins::new(&gpu, c.clone(), pool);
            twins.wild = false;
            let seats = lens.map(|_| twins.cpu.open().unwrap());
            // A whole page of tokens so far away that their weights are 0, with steps as large as that.
            let huge = (key.axis == Axis::PerChannel).then_some(3000.0);
            for (magnitude, huge) in [([0.3, 1.0], huge), ([3.0, 0.1], None), ([1.0, 3.0], None)] {
                (twins.magnitude, twins.huge) = (magnitude, huge);
                quickly(&gpu, || twins.step(&gpu, &mut random, &seats, &[150; 2], false));
            }
            let mut still = Still::with_blocks(&gpu, c.clone(), &lens, pool);
            still.layer = twins.layer;
            let q = random.normals(lens.len() * heads * group * d);
            let one = |(i, x): (usize, f32)| if huge.is_some() && i % d == 5 { 1.0 + x.abs() } else { x };
            let q: Vec<f32> = q.into_iter().enumerate().map(|x| f16::from_f32(one(x)).to_f32()).collect();
            let out = quickly(&gpu, || still.attend(&gpu, group, &q));

            let sequences = lens.map(|l| Sequence { old_len: l, len: l + 1, packed: (l + 1 - 64) / 64 * 64 });
            let contents = Contents::new(&gpu, &c, &still.layer);
            let tables = gpu.down(&still.tables);
            let model = Model { config: &c, group, scale: 1.0 / (d as f32).sqrt(), softcap: None };
            let units = Plan::new(&c).units(&sequences, blocks(&gpu));
            let mut rows = Vec::new();
            for (unit, pieces) in units.iter().enumerate() {
                let i = unit / heads;
                let table = tables.chunks(tables.len() / lens.len()).nth(i).unwrap();
                let memory = contents.memory(i, unit % heads, table, pieces);
                let at = unit * group * d;
                let queries: Vec<Vec<f32>> = q[at..at + group * d].chunks(d).map(<[f32]>::to_vec).collect();
                let want = model.unit(&sequences[i], &memory, pieces, &queries, None);
                let got = out[at..at + group * d].chunks(d).map(<[f32]>::to_vec);
                rows.extend(got.zip(want).map(|(got, want)| (got, None, want)));

                // One row against f64: decoding takes longer than the model.
                if unit + 1 == units.len() {
                    let [k, v] = decoded(&memory, &sequences[i]);
                    let q: Vec<f64> = queries[0].iter().map(|x| f64::from(*x)).collect();
                    let case = Case::new(c.clone(), group, &[], &[]);
                    let exact = row(&q, &k, &v, (d, d), 1, 0..sequences[i].len, &case, None, false).0;
                    let device: Vec<f64> = out[at..at + d].iter().map(|x| f64::from(*x)).collect();
                    let error = distance(&device, &exact);
                    if error > FROM_F64 {
                        texts.push(format!("{what}: {error:.2e} from f64"));
                    }
                }
            }
            texts.extend(compare(&gpu, &what, &rows).err());
        }
    }
    assert!(texts.is_empty(), "{}", texts.join("\n"));
}

/// Keys and values of a head, `[token][dim]`, that no rotation and no mean changed.
fn decoded(memory: &Memory<'_>, s: &Sequence) -> [Vec<f32>; 2] {
    [0, 1].map(|op| {
        let token = |t: usize| match memory.exact.get(&t) {
            Some(rows) => rows[op].clone(),
            None => memory.pages[&(t / 64)][op].values(t % 64),
        };
        (0..s.len).flat_map(token).collect()
    })
}

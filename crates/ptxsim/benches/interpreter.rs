//! How fast kernels are interpreted: `cargo bench -p ptxsim`. Throughput is thread-instructions a second.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ptxsim::card::Card;
use ptxsim::exec::launch::{Launch, launch};
use ptxsim::memory::GlobalMemory;
use ptxsim::options::Options;
use ptxsim::program::{Image, Kernel};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Arithmetic, conversions, global and shared memory, a shuffle: 19 instructions a round.
const MIXED: &str = r#"
.version 7.8
.target sm_80
.address_size 64
.visible .entry mixed(.param .u64 p, .param .u32 rounds)
{
    .reg .b64 %rd<8>;
    .reg .b32 %r<20>;
    .reg .f32 %f<16>;
    .reg .pred %p<4>;
    .shared .align 16 .b8 tile[4096];
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [rounds];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r2, %tid.x;
    mov.u32 %r12, %ctaid.x;
    mov.u32 %r13, %ntid.x;
    mad.lo.s32 %r14, %r12, %r13, %r2;
    mul.wide.u32 %rd2, %r14, 16;
    add.s64 %rd3, %rd1, %rd2;
    shl.b32 %r3, %r2, 2;
    mov.u32 %r4, tile;
    add.s32 %r5, %r4, %r3;
    mov.f32 %f1, 0f00000000;
    st.shared.f32 [%r5], %f1;
    mov.u32 %r6, 0;
loop:
    ld.global.v4.f32 {%f2, %f3, %f4, %f5}, [%rd3];
    fma.rn.f32 %f1, %f2, %f3, %f1;
    fma.rn.f32 %f1, %f4, %f5, %f1;
    ld.global.u32 %r7, [%rd3];
    and.b32 %r8, %r7, 255;
    cvt.rn.f32.u32 %f6, %r8;
    shr.u32 %r9, %r7, 8;
    cvt.rn.f32.s32 %f7, %r9;
    fma.rn.f32 %f1, %f6, %f7, %f1;
    ld.shared.f32 %f8, [%r5];
    add.f32 %f1, %f1, %f8;
    st.shared.f32 [%r5], %f1;
    mov.b32 %r10, %f1;
    shfl.sync.bfly.b32 %r11|%p1, %r10, 16, 31, -1;
    mov.b32 %f9, %r11;
    add.f32 %f1, %f1, %f9;
    add.s32 %r6, %r6, 1;
    setp.lt.u32 %p2, %r6, %r1;
    @%p2 bra loop;
    st.global.f32 [%rd3], %f1;
    ret;
}
"#;

const MMA: &str = r#"
.version 7.8
.target sm_80
.address_size 64
.visible .entry products(.param .u64 p, .param .u32 rounds)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<16>;
    .reg .f32 %f<8>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [p];
    ld.param.u32 %r1, [rounds];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd2, %r2, 16;
    add.s64 %rd1, %rd1, %rd2;
    ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd1];
    mov.f32 %f1, 0f00000000;
    mov.f32 %f2, %f1;
    mov.f32 %f3, %f1;
    mov.f32 %f4, %f1;
    mov.u32 %r3, 0;
loop:
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r4, %r5, %r6, %r7}, {%r4, %r5}, {%f1, %f2, %f3, %f4};
    add.s32 %r3, %r3, 1;
    setp.lt.u32 %p1, %r3, %r1;
    @%p1 bra loop;
    st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};
    ret;
}
"#;

/// One instruction, in a loop, of those that attention kernels are made of. Integers `%r1` to `%r4` are sources,
/// `%r12` and up destinations.
const SINGLE: [(&str, &str); 18] = [
    ("add.f16x2", "add.f16x2 %r12, %r1, %r2;"),
    ("mul.f16x2", "mul.f16x2 %r12, %r1, %r2;"),
    ("fma.rn.f16x2", "fma.rn.f16x2 %r12, %r1, %r2, %r3;"),
    ("fma.rn.relu.f16x2", "fma.rn.relu.f16x2 %r12, %r1, %r2, %r3;"),
    ("fma.rn.bf16x2", "fma.rn.bf16x2 %r12, %r1, %r2, %r3;"),
    ("mul.bf16x2", "mul.bf16x2 %r12, %r1, %r2;"),
    ("max.f16x2", "max.f16x2 %r12, %r1, %r2;"),
    ("cvt.rn.f16x2.f32", "cvt.rn.f16x2.f32 %r12, %f1, %f2;"),
    ("cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32 %r12, %f1, %f2;"),
    ("cvt.f32.f16", "cvt.f32.f16 %f3, %h1;"),
    ("cvt.rn.f16x2.e4m3x2", "cvt.rn.f16x2.e4m3x2 %r12, %h1;"),
    ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e4m3x2.f32 %h2, %f1, %f2;"),
    ("ex2.approx.ftz.f32", "ex2.approx.ftz.f32 %f3, %f1;"),
    ("lop3.b32", "lop3.b32 %r12, %r1, %r2, %r3, 0xea;"),
    ("prmt.b32", "prmt.b32 %r12, %r1, %r2, 0x4140;"),
    (
        "mma.m16n8k16.bf16",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 \
         {%f4, %f5, %f6, %f7}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%f4, %f5, %f6, %f7};",
    ),
    (
        "mma.m16n8k32.e4m3.e5m2",
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 \
         {%f4, %f5, %f6, %f7}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%f4, %f5, %f6, %f7};",
    ),
    (
        "mma.m16n8k32.s8.u8",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 \
         {%r12, %r13, %r14, %r15}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r12, %r13, %r14, %r15};",
    ),
];

/// Copies of the instruction in a round of the loop.
const COPIES: usize = 16;

fn single(instruction: &str) -> String {
    let copies = vec![instruction; COPIES].join("\n    ");
    format!(
        r#"
.version 8.7
.target sm_90
.address_size 64
.visible .entry single(.param .u64 p, .param .u32 rounds)
{{
    .reg .b64 %rd<4>;
    .reg .b32 %r<20>;
    .reg .b16 %h<4>;
    .reg .f32 %f<8>;
    .reg .pred %p<2>;
    ld.param.u32 %r5, [rounds];
    mov.u32 %r6, %tid.x;
    mad.lo.s32 %r1, %r6, 0x01010101, 0x38003900;
    mad.lo.s32 %r2, %r6, 0x02010201, 0xb4001234;
    mad.lo.s32 %r3, %r6, 0x00110011, 0x3c003c01;
    mov.u32 %r4, 0x03ff2a2a;
    cvt.u16.u32 %h1, %r1;
    cvt.rn.f32.u32 %f1, %r6;
    mul.f32 %f2, %f1, 0f3e000000;
    mov.f32 %f4, 0f00000000;
    mov.f32 %f5, %f4;
    mov.f32 %f6, %f4;
    mov.f32 %f7, %f4;
    mov.u32 %r12, 0;
    mov.u32 %r13, 0;
    mov.u32 %r14, 0;
    mov.u32 %r15, 0;
    mov.u32 %r7, 0;
loop:
    {copies}
    add.s32 %r7, %r7, 1;
    setp.lt.u32 %p1, %r7, %r5;
    @%p1 bra loop;
    ret;
}}
"#
    )
}

struct Case {
    memory: GlobalMemory,
    kernel: Kernel,
    params: Vec<u8>,
    card: &'static Card,
}

impl Case {
    fn new(text: &str, name: &str, threads: u32, rounds: u32, options: &Options) -> Self {
        let card = Card::of(90).unwrap();
        let memory = GlobalMemory::new(1 << 30);
        let image = Image::load(Arc::new(ptxsim::ptx::parse(text).unwrap()), &memory).unwrap();
        let kernel = image.kernel(name, card, options).unwrap();
        let p = memory.alloc(16 * u64::from(threads)).unwrap();
        memory.fill(p, &[0], 16 * u64::from(threads)).unwrap();
        let params = [&p.to_le_bytes()[..], &rounds.to_le_bytes()].concat();
        Self { memory, kernel, params, card }
    }

    fn run(&self, grid: u32, block: u32, options: &Options) -> u64 {
        let shape = Launch {
            grid: [grid, 1, 1],
            block: [block, 1, 1],
            cluster: [1; 3],
            params: self.params.clone(),
            ..Launch::default()
        };
        let stats = launch(&self.kernel, &shape, &self.memory.view(), self.card, options).unwrap();
        stats.total.thread_instructions
    }
}

fn interpreter(c: &mut Criterion) {
    let mut group = c.benchmark_group("interpreter");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    let one = |options: Options| Options { threads: 1, ..options };
    for (name, options) in [("all checks", one(Options::default())), ("no checks", one(Options::unchecked()))]
    {
        let case = Case::new(MIXED, "mixed", 4 * 128, 500, &options);
        group.throughput(Throughput::Elements(case.run(4, 128, &options)));
        group.bench_function(BenchmarkId::new("mixed loop", name), |b| b.iter(|| case.run(4, 128, &options)));
        let case = Case::new(MMA, "products", 128, 500, &options);
        // A product takes 4 of the loop's instructions: products of a warp a second.
        group.throughput(Throughput::Elements(4 * 4 * 500));
        group.bench_function(BenchmarkId::new("mma.m16n8k16", name), |b| {
            b.iter(|| case.run(4, 128, &options))
        });
    }
    group.finish();
    shortest();
    threads();
}

/// The shortest of some runs, in seconds. Short runs: one of them is not disturbed by whatever else the machine does.
fn best(runs: usize, mut run: impl FnMut() -> u64) -> f64 {
    let one = |_| {
        let start = Instant::now();
        std::hint::black_box(run());
        start.elapsed().as_secs_f64()
    };
    (0..runs).map(one).fold(f64::INFINITY, f64::min)
}

fn shortest() {
    let one = Options { threads: 1, ..Options::default() };
    for (name, options) in
        [("all checks", one), ("no checks", Options { threads: 1, ..Options::unchecked() })]
    {
        let case = Case::new(MIXED, "mixed", 128, 100, &options);
        let instructions = case.run(1, 128, &options) as f64;
        let time = best(200, || case.run(1, 128, &options));
        println!("mixed loop, {name}: best {:.0} M thread-instructions/s", instructions / time / 1e6);
        let case = Case::new(MMA, "products", 128, 100, &options);
        let time = best(200, || case.run(1, 128, &options));
        println!("mma.m16n8k16, {name}: best {:.2} us", time / 400.0 * 1e6);
    }
    for (name, instruction) in SINGLE {
        let case = Case::new(&single(instruction), "single", 128, 20, &one);
        let time = best(200, || case.run(1, 128, &one));
        println!("{name}, all checks: best {:.3} us a warp", time / (4 * 20 * COPIES) as f64 * 1e6);
    }
}

/// Two threads against one, and beside it two launches of half the blocks that share nothing, one a thread: what the
/// machine itself gives. Alternating runs, the shortest of each: long ones, since a second thread needs a while to start.
fn threads() {
    let options = |threads| Options { threads, ..Options::default() };
    let [whole, half, other] =
        [64, 32, 32].map(|grid| Case::new(MIXED, "mixed", grid * 128, 100, &options(1)));
    let apart = || {
        std::thread::scope(|s| {
            let second = s.spawn(|| other.run(32, 128, &options(1)));
            half.run(32, 128, &options(1)) + second.join().unwrap()
        })
    };
    let mut shortest = [f64::INFINITY; 3];
    for _ in 0..30 {
        let times = [
            best(1, || whole.run(64, 128, &options(1))),
            best(1, || whole.run(64, 128, &options(2))),
            best(1, apart),
        ];
        shortest = std::array::from_fn(|i| times[i].min(shortest[i]));
    }
    let [one, two, apart] = shortest;
    println!("two threads: {:.2} x one (two launches that share nothing: {:.2} x)", one / two, one / apart);
}

criterion_group!(benches, interpreter);
criterion_main!(benches);

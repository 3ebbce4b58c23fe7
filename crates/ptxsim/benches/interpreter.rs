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
    mul.wide.u32 %rd2, %r2, 16;
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

struct Case {
    memory: GlobalMemory,
    kernel: Kernel,
    params: Vec<u8>,
    card: &'static Card,
}

impl Case {
    fn new(text: &str, name: &str, threads: u32, rounds: u32, options: &Options) -> Self {
        let card = Card::of(80).unwrap();
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
    for (name, options) in [("all checks", one(Options::default())), ("no checks", one(Options::unchecked()))] {
        let case = Case::new(MIXED, "mixed", 128, 500, &options);
        group.throughput(Throughput::Elements(case.run(4, 128, &options)));
        group.bench_function(BenchmarkId::new("mixed loop", name), |b| b.iter(|| case.run(4, 128, &options)));
        let case = Case::new(MMA, "products", 128, 500, &options);
        // A product takes 4 of the loop's instructions: products of a warp a second.
        group.throughput(Throughput::Elements(4 * 4 * 500));
        group.bench_function(BenchmarkId::new("mma.m16n8k16", name), |b| b.iter(|| case.run(4, 128, &options)));
    }
    group.finish();
    threads();
}

/// Two threads against one: best of nine runs each, alternating.
fn threads() {
    let options = |threads| Options { threads, ..Options::default() };
    let case = Case::new(MIXED, "mixed", 128, 300, &options(1));
    let mut best = [f64::INFINITY; 2];
    for _ in 0..9 {
        for (i, best) in best.iter_mut().enumerate() {
            let start = Instant::now();
            case.run(64, 128, &options(i + 1));
            *best = best.min(start.elapsed().as_secs_f64());
        }
    }
    println!("two threads: {:.2} x one", best[0] / best[1]);
}

criterion_group!(benches, interpreter);
criterion_main!(benches);

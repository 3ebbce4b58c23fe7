//! Timings of one decode step: 32 query heads, 128 channels.

use super::*;

/// Not a test: `cargo test --release --lib attend_speed -- --ignored --nocapture`.
#[test]
#[ignore = "prints timings"]
fn attend_speed() {
    use std::time::Instant;
    let a = |b, g, axis| affine(b, g, axis, None);
    let (pt, pc) = (Axis::PerToken, Axis::PerChannel);
    let all: Vec<(&str, Format, Format)> = vec![
        ("f16", Format::F16, Format::F16),
        ("bf16", Format::Bf16, Format::Bf16),
        ("int8", a(Bits::B8, 128, pt), a(Bits::B8, 128, pt)),
        ("int8 g32", a(Bits::B8, 32, pt), a(Bits::B8, 32, pt)),
        ("int4 g32", a(Bits::B4, 32, pt), a(Bits::B4, 32, pt)),
        ("int4", a(Bits::B4, 64, pc), a(Bits::B4, 64, pt)),
        ("int3", a(Bits::B3, 32, pc), a(Bits::B3, 32, pt)),
        ("int2", a(Bits::B2, 32, pc), a(Bits::B2, 32, pt)),
        ("int1", a(Bits::B1, 32, pc), a(Bits::B1, 32, pt)),
        ("e4m3", Fp8::e4m3(Granularity::TokenHead).into(), Fp8::e4m3(Granularity::TokenHead).into()),
        ("e5m2", Fp8::e5m2(Granularity::Tensor).into(), Fp8::e5m2(Granularity::Tensor).into()),
    ];
    let group: usize = std::env::var("GROUP").map_or(4, |g| g.parse().unwrap());
    let only = std::env::var("ONLY").ok();
    for (name, key, value) in all.into_iter().filter(|x| only.as_ref().is_none_or(|o| o == x.0)) {
        for len in std::env::var("LEN").map_or(vec![4096usize, 16384], |l| vec![l.parse().unwrap()]) {
            let case = Case { kv_heads: 32 / group, group, ..Case::plain(key, value, 128, len) };
            let stored = store(&case);
            let mut workspace = Workspace::default();
            let mut best = f64::MAX;
            for _ in 0..std::env::var("RUNS").map_or(12, |r| r.parse().unwrap()) {
                let t = Instant::now();
                run_timed(&case, &stored, &mut workspace);
                best = best.min(t.elapsed().as_secs_f64());
            }
            let bytes = (case.packed / TILE * case.kv_heads * stored.layout.page_bytes) as f64;
            println!("{name:9} {len:6} tokens: {:7.3} ms {:6.1} GB/s", best * 1e3, bytes / best / 1e9);
        }
    }
}

fn run_timed(case: &Case, s: &Stored, workspace: &mut Workspace) {
    let (kd, vd, h) = (case.key_dim, case.value_dim, case.kv_heads);
    let heads = h * case.group;
    let mut out = vec![0f32; heads * vd];
    let empty = Rows { data: Data::F32(&[]), capacity: 1 };
    let head_of = |_: usize, head: usize| Head {
        key: &case.key,
        value: &case.value,
        layout: &s.layout,
        pages: &s.pages,
        blocks: &s.blocks,
        kv_heads: h,
        head,
        len: case.packed,
        packed: case.packed,
        sinks: 0,
        sink_rows: (empty, empty),
        window: (empty, empty),
        mean: None,
        scales: s.scales,
        first: 0,
        fresh: None,
    };
    let q = TensorRef::thd(&s.q, [1, heads, kd]).unwrap();
    let batch = Batch { query_start: &[0, 1], queries: None };
    let mut o = TensorMut::thd(&mut out, [1, heads, vd]).unwrap();
    attend(Isa::detect(), &head_of, &batch, h, &q, &AttendParams::new(), None, &mut o, None, workspace);
    std::hint::black_box(&out);
}

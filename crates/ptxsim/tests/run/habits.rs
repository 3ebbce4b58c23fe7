//! Habits of kernels from other hands.

use super::support::{Arg, Sim, variants};
use half::f16;

/// Small and odd parameters, `_` in vectors, a `.reg` scope that hides an outer name, a signed byte.
const ODD: &str = r"
.version 6.0
.target sm_70
.address_size 64
.visible .entry odd(.param .u8 a, .param .u16 b, .param .align 1 .b8 c[3], .param .u64 out, .param .s8 d)
{
    .reg .b16 %h<4>; .reg .b32 %r<12>; .reg .b64 %o<2>;
    ld.param.u64 %o0, [out];
    cvta.to.global.u64 %o0, %o0;
    ld.param.u8 %h0, [a];
    cvt.u32.u16 %r0, %h0;
    ld.param.u16 %r1, [b];
    ld.param.u8 %r2, [c+2];
    ld.param.s8 %r3, [d];
    st.global.v4.u32 [%o0], {%r0, %r1, %r2, %r3};
    {
        .reg .b32 %r0;
        mov.u32 %r0, 77;
        st.global.u32 [%o0+16], %r0;
    }
    ld.global.v4.u32 {_, %r4, _, %r5}, [%o0];
    add.s32 %r4, %r4, %r5;
    st.global.u32 [%o0+20], %r4;
    st.global.u32 [%o0+24], %r0;
    exit;
}";

#[test]
fn parameters_at_odd_offsets_and_sinks() {
    let mut sim = Sim::of(ODD, 80);
    for options in variants() {
        sim.options = options;
        let out = sim.space(28);
        let args = [Arg::I32(200), Arg::I32(60000), Arg::I64(0x0003_0201), out, Arg::I32(-5)];
        sim.run("odd", 1, 1, &args).unwrap();
        assert_eq!(sim.get::<i32>(out, 7), [200, 60000, 3, -5, 77, 59995, 200]);
    }
}

/// Literal zeros as C, modifiers of `ldmatrix` in another order, lanes that hand each other data through shared memory
/// without a barrier.
const PRODUCT: &str = r"
.version 7.0
.target sm_80
.address_size 64
.visible .entry product(.param .u64 x, .param .u64 out)
{
    .reg .b32 %r<16>; .reg .b64 %d<4>; .reg .f32 %f<4>;
    .shared .align 16 .b8 tile[512];
    ld.param.u64 %d0, [x];
    ld.param.u64 %d1, [out];
    cvta.to.global.u64 %d0, %d0;
    cvta.to.global.u64 %d1, %d1;
    mov.u32 %r0, %laneid;
    mul.wide.u32 %d2, %r0, 16;
    add.s64 %d0, %d0, %d2;
    add.s64 %d1, %d1, %d2;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0];
    mov.u32 %r5, tile;
    mad.lo.s32 %r5, %r0, 16, %r5;
    st.shared.v4.b32 [%r5], {%r1, %r2, %r3, %r4};
    ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%r6, %r7, %r8, %r9}, [%r5];
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
        {%f0, %f1, %f2, %f3}, {%r6, %r7, %r8, %r9}, {%r6, %r8}, {0., 0., 0., 0.};
    st.global.v4.f32 [%d1], {%f0, %f1, %f2, %f3};
    ret;
}";

#[test]
fn literal_accumulators_and_lanes_without_barriers() {
    let mut sim = Sim::of(PRODUCT, 80);
    // Matrix i is rows of lanes 8 i to 8 i + 7. As A: 0 and 2 are the upper half, 1 and 3 the lower one.
    let x: Vec<f16> = (0..256).map(|i| f16::from_f32(((i * 37) % 23) as f32 / 8.0 - 1.0)).collect();
    let at = |matrix: usize, row: usize, column: usize| x[matrix * 64 + row * 8 + column].to_f64();
    let a = |m: usize, k: usize| at(m / 8 + 2 * (k / 8), m % 8, k % 8);
    // B holds its column n as row n of matrices 0 and 2.
    let b = |k: usize, n: usize| at(2 * (k / 8), n, k % 8);
    let bits: Vec<u16> = x.iter().map(|x| x.to_bits()).collect();
    for options in variants() {
        // Lanes read what others of their warp wrote: allowed by name.
        sim.options = ptxsim::options::Options { warp_races: false, ..options };
        let (dx, out) = (sim.put(&bits), sim.space(512));
        sim.run("product", 1, 32, &[dx, out]).unwrap();
        let got = sim.get::<f32>(out, 128);
        for l in 0..32 {
            for i in 0..4 {
                let (m, n) = (l / 4 + 8 * (i / 2), 2 * (l % 4) + i % 2);
                let want: f64 = (0..16).map(|k| a(m, k) * b(k, n)).sum();
                assert!((f64::from(got[4 * l + i]) - want).abs() < 1e-5, "{m} {n}");
            }
        }
    }
    sim.options = ptxsim::options::Options::default();
    let (dx, out) = (sim.put(&bits), sim.space(512));
    let f = sim.run("product", 1, 32, &[dx, out]).unwrap_err();
    assert_eq!(f.kind, ptxsim::fault::FaultKind::WarpRace, "{f}");
}

#[test]
fn unknown_instructions_are_named_all_at_once() {
    let text = r"
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k()
{
    .reg .b32 %r<4>;
    frobnicate.u32 %r0, %r1;
    add.s32 %r0, %r1, 1;
    add.purple.s32 %r0, %r1, 1;
    wgmma.fence.sync.aligned;
    ret;
}";
    let sim = Sim::of(text, 90);
    let card = ptxsim::card::Card::of(90).unwrap();
    let e = sim.image.kernel("k", card, &sim.options).unwrap_err().to_string();
    for (line, what) in [(8, "frobnicate.u32"), (10, "purple"), (11, "wgmma.fence")] {
        assert!(e.contains(what) && e.contains(&format!("line {line}")), "{what}: {e}");
    }
    assert_eq!(e.lines().count(), 3, "{e}");
}

/// A bit-field of one bit in a word of local memory that nobody wrote, as compilers put it there; and a sum into one.
const FIELD: &str = r"
.version 7.0
.target sm_80
.address_size 64
.visible .entry field(.param .u64 out, .param .u32 sum)
{
    .local .align 8 .b8 word[8];
    .reg .b32 %r<8>; .reg .b64 %d<4>; .reg .pred %p<4>;
    ld.param.u64 %d0, [out];
    ld.param.u32 %r0, [sum];
    setp.ne.u32 %p0, %r0, 0;
    ld.local.u32 %r1, [word];
    and.b32 %r2, %r1, -2;
    or.b32 %r3, %r2, 1;
    add.u32 %r4, %r1, 1;
    @!%p0 st.local.u32 [word], %r3;
    @%p0 st.local.u32 [word], %r4;
    ld.local.u32 %r5, [word];
    and.b32 %r6, %r5, 1;
    setp.ne.u32 %p1, %r6, 0;
    @!%p1 bra DONE;
    st.global.u32 [%d0], 7;
DONE:
    ret;
}";

#[test]
fn bit_fields_of_fresh_local_words() {
    let mut sim = Sim::of(FIELD, 80);
    for options in variants() {
        sim.options = options;
        let out = sim.put(&[0i32]);
        sim.run("field", 1, 1, &[out, Arg::I32(0)]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sim.get::<i32>(out, 1), [7]);
        if options.uninitialized_shared == ptxsim::options::Uninitialized::Off {
            continue;
        }
        let f = sim.run("field", 1, 1, &[out, Arg::I32(1)]).unwrap_err();
        assert_eq!(f.kind, ptxsim::fault::FaultKind::Uninitialized, "{f}");
    }
}

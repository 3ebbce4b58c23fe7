//! Clusters and bulk copies.

use super::support::{Arg, Random, Sim, kind, variants};
use ptxsim::driver::tensor_map::{DataType, Interleave, Swizzle, TensorMap};
use ptxsim::fault::FaultKind;

#[test]
fn blocks_of_a_cluster_share_memory() {
    let mut sim = Sim::new("cluster", 90);
    for options in variants() {
        sim.options = options;
        let x: Vec<i32> = (0..6 * 64).map(|i| i * 3 - 100).collect();
        let (dx, out) = (sim.put(&x), sim.space(4 * x.len()));
        sim.run("exchange", 6, 64, &[dx, out]).unwrap();
        let want: Vec<i32> = (0..x.len()).map(|i| x[((i / 64) ^ 1) * 64 + i % 64]).collect();
        assert_eq!(sim.get::<i32>(out, x.len()), want);

        let (dx, out) = (sim.put(&x[..256]), sim.space(8));
        sim.run("cluster_sum", 8, 32, &[dx, out]).unwrap();
        let want: Vec<i32> = x[..256].chunks(128).map(|c| c.iter().sum()).collect();
        assert_eq!(sim.get::<i32>(out, 2), want);
    }
}

#[test]
fn bulk_copies_tell_an_mbarrier() {
    let mut sim = Sim::new("bulk", 90);
    for options in variants() {
        sim.options = options;
        for tiles in [1, 2, 3, 7] {
            let x = Random(tiles).floats(256 * tiles as usize);
            let (dx, out) = (sim.put(&x), sim.space(4 * x.len()));
            sim.run("double_tiles", 1, 128, &[dx, out, Arg::I32(tiles as i32)]).unwrap();
            let want: Vec<f32> = x.iter().map(|x| 2.0 * x).collect();
            assert_eq!(sim.get::<f32>(out, x.len()), want);
        }
    }
}

#[test]
fn copies_are_ordered_by_what_they_tell() {
    let mut sim = Sim::new("bulk", 90);
    for options in variants() {
        sim.options = options;
        for tiles in [1, 3, 10] {
            let x: Vec<i32> = (0..96 * tiles).map(|i| i * i % 1009).collect();
            let (dx, out) = (sim.put(&x), sim.space(4 * 96));
            sim.run("good_ring", 1, 128, &[dx, out, Arg::I32(tiles)]).unwrap_or_else(|f| panic!("{f}"));
            let want: Vec<i32> = (0..96).map(|i| x.iter().skip(i).step_by(96).sum()).collect();
            assert_eq!(sim.get::<i32>(out, 96), want);
            if !sim.options.races {
                continue;
            }
            let f = kind(sim.run("bad_ring", 1, 128, &[dx, out, Arg::I32(tiles)]));
            // On its way, or not even issued.
            assert!(matches!(f, FaultKind::Race | FaultKind::InFlight | FaultKind::Uninitialized), "{f:?}");
        }
        let out = sim.space(4 * 640);
        sim.run("good_send", 1, 64, &[out, Arg::I32(10)]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sim.get::<i32>(out, 640), (0..640).collect::<Vec<i32>>());
        if !sim.options.races {
            continue;
        }
        let f = sim.run("bad_send", 1, 64, &[out, Arg::I32(10)]).unwrap_err();
        assert!(f.kind == FaultKind::Race && f.message.contains("bulk copy"), "{f}");
    }
}

/// A box of 16 x 8 f32 at (c0, c1) of a tensor, to `out` as it lies in shared memory, and back to a second tensor.
const TILE: &str = r"
.version 8.0
.target sm_90
.address_size 64
.visible .entry tile(.param .align 64 .b8 from[128], .param .align 64 .b8 to[128], .param .u64 out, .param .s32 c0,
                     .param .s32 c1)
{
    .reg .b32 %r<16>; .reg .b64 %d<12>; .reg .pred %p<4>;
    .shared .align 1024 .b8 box[512];
    .shared .align 8 .b64 full;
    mov.b64 %d0, from;
    cvta.param.u64 %d1, %d0;
    mov.b64 %d2, to;
    cvta.param.u64 %d3, %d2;
    ld.param.u64 %d4, [out];
    cvta.to.global.u64 %d4, %d4;
    ld.param.s32 %r0, [c0];
    ld.param.s32 %r1, [c1];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, full;
    mov.u32 %r4, box;
    setp.ne.u32 %p0, %r2, 0;
    @%p0 bra WAIT;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 512;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r4], [%d1, {%r0, %r1}], [%r3];
WAIT:
    bar.sync 0;
AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r3], 0;
    @!%p1 bra AGAIN;
    shl.b32 %r5, %r2, 2;
    add.s32 %r6, %r4, %r5;
    ld.shared.b32 %r7, [%r6];
    cvt.u64.u32 %d5, %r5;
    add.s64 %d6, %d4, %d5;
    st.global.b32 [%d6], %r7;
    bar.sync 0;
    @%p0 bra END;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d3, {%r0, %r1}], [%r4];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
END:
    ret;
}";

#[test]
fn boxes_of_a_tensor() {
    let mut sim = Sim::of(TILE, 90);
    let (rows, cols) = (20usize, 40usize);
    let x: Vec<f32> = (0..rows * cols).map(|i| i as f32 + 0.5).collect();
    for (options, swizzle, c) in variants().into_iter().flat_map(|o| {
        [(o, Swizzle::None, [4, 3]), (o, Swizzle::Bytes64, [32, 14]), (o, Swizzle::Bytes64, [-3, -2])]
    }) {
        sim.options = options;
        let (from, to, out) = (sim.put(&x), sim.put(&vec![0f32; rows * cols]), sim.space(512));
        let map = |at: Arg| {
            let Arg::Ptr(address) = at else { panic!() };
            let map = TensorMap {
                data_type: DataType::F32,
                rank: 2,
                address,
                sizes: [cols as u64, rows as u64, 1, 1, 1],
                strides: [4 * cols as u64, 0, 0, 0],
                tile: [16, 8, 1, 1, 1],
                element_strides: [1; 5],
                interleave: Interleave::None,
                swizzle,
                l2_promotion: 0,
                nan_fill: false,
            };
            map.check().unwrap();
            Arg::Bytes(map.encode())
        };
        let args = [map(from), map(to), out, Arg::I32(c[0]), Arg::I32(c[1])];
        sim.run("tile", 1, 128, &args).unwrap();
        let inside = |r: i32, k: i32| {
            ((0..rows as i32).contains(&r) && (0..cols as i32).contains(&k))
                .then(|| r as usize * cols + k as usize)
        };
        let mut want = vec![0f32; 128];
        let mut back = vec![0f32; rows * cols];
        for r in 0..8usize {
            for k in 0..16usize {
                // Rows of 64 bytes; 16-byte chunks are exchanged by bits 7 and 8 of the address.
                let byte = 64 * r + 4 * k;
                let byte = if swizzle == Swizzle::None { byte } else { byte ^ ((byte / 128 % 4) * 16) };
                if let Some(i) = inside(c[1] + r as i32, c[0] + k as i32) {
                    want[byte / 4] = x[i];
                    back[i] = x[i];
                }
            }
        }
        assert_eq!(sim.get::<f32>(out, 128), want, "{swizzle:?} {c:?}");
        assert_eq!(sim.get::<f32>(to, rows * cols), back);
    }
    let (zero, out) = (Arg::Bytes([0; 128]), sim.space(512));
    assert_eq!(kind(sim.run("tile", 1, 128, &[zero, zero, out, Arg::I32(0), Arg::I32(0)])), FaultKind::Trap);
}

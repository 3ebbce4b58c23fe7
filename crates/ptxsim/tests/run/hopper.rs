//! Clusters and bulk copies.

use super::support::{Arg, Random, Sim, variants};

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

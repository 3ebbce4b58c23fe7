//! Kernels of the kinds that every program has.

use super::support::{Arg, Random, Sim, variants};

/// Runs a test on both builds of `basic.cu` and in every variant.
fn each(test: impl Fn(&Sim)) {
    for (file, cc) in [("basic", 80), ("basic.sm_90a", 90)] {
        let mut sim = Sim::new(file, cc);
        for options in variants() {
            sim.options = options;
            test(&sim);
        }
    }
}

#[test]
fn vector_add_with_an_odd_tail() {
    each(|sim| {
        for n in [1, 31, 32, 33, 1000, 1003] {
            let mut r = Random(n as u64);
            let (a, b) = (r.floats(n), r.floats(n));
            let (da, db, out) = (sim.put(&a), sim.put(&b), sim.space(4 * n));
            sim.run("vector_add", (n as u32).div_ceil(96), 96, &[da, db, out, Arg::I32(n as i32)]).unwrap();
            let want: Vec<f32> = a.iter().zip(&b).map(|(x, y)| x + y).collect();
            assert_eq!(sim.get::<f32>(out, n), want);
            let out = sim.space(4 * n);
            sim.run("vector_add4", 1, 64, &[da, db, out, Arg::I32(n as i32)]).unwrap();
            assert_eq!(sim.get::<f32>(out, n), want);
        }
    });
}

#[test]
fn reduction_by_shuffles() {
    each(|sim| {
        let n = 1000;
        let mut r = Random(3);
        let x: Vec<i32> = (0..n).map(|_| r.next() as i32 % 1000).collect();
        let (dx, out) = (sim.put(&x), sim.space(16));
        sim.run("reduce_sum", 4, 256, &[dx, out, Arg::I32(n)]).unwrap();
        let want: Vec<i32> = x.chunks(256).map(|c| c.iter().sum()).collect();
        assert_eq!(sim.get::<i32>(out, 4), want);
    });
}

#[test]
fn prefix_sums() {
    each(|sim| {
        let x: Vec<i32> = (0..256).map(|i| (i * 7919) % 101 - 50).collect();
        let (dx, out) = (sim.put(&x), sim.space(1024));
        sim.run("scan", 1, 256, &[dx, out]).unwrap();
        let mut sum = 0;
        let want: Vec<i32> = x
            .iter()
            .map(|v| {
                sum += v;
                sum
            })
            .collect();
        assert_eq!(sim.get::<i32>(out, 256), want);
    });
}

#[test]
fn transpositions() {
    each(|sim| {
        let (rows, cols) = (64, 96);
        let x = Random(5).floats(rows * cols);
        let want: Vec<f32> = (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect();
        for kernel in ["transpose", "transpose_padded"] {
            let (dx, out) = (sim.put(&x), sim.space(4 * x.len()));
            let args = [dx, out, Arg::I32(rows as i32), Arg::I32(cols as i32)];
            sim.launch(kernel, [cols as u32 / 32, rows as u32 / 32, 1], [32, 8, 1], 0, &args).unwrap();
            assert_eq!(sim.get::<f32>(out, x.len()), want);
        }
    });
}

#[test]
fn atomics_in_shared_and_global_memory() {
    each(|sim| {
        let mut r = Random(9);
        let x: Vec<u8> = (0..5000).map(|_| r.next() as u8).collect();
        let (dx, counts) = (sim.put(&x), sim.put(&[0u32; 64]));
        sim.run("histogram", 7, 128, &[dx, counts, Arg::I32(5000)]).unwrap();
        let mut want = [0u32; 64];
        x.iter().for_each(|b| want[*b as usize % 64] += 1);
        assert_eq!(sim.get::<u32>(counts, 64), want);

        let words = sim.put(&[0u64; 5]);
        sim.run("atomics64", 5, 100, &[words]).unwrap();
        let got = sim.get::<u64>(words, 5);
        let xor = (0..500u64).fold(0, |x, g| x ^ g << 40);
        assert_eq!(got[..3], [499 * 500 / 2, 499 << 33, xor]);
        assert!(got[3] < 500 && got[4] < 500);
    });
}

#[test]
fn the_last_block_adds_up() {
    each(|sim| {
        let n = 3000;
        let x: Vec<f32> = (0..n).map(|i| (i % 17) as f32).collect();
        let (dx, partial) = (sim.put(&x), sim.space(4 * 9));
        let (ticket, out) = (sim.put(&[0u32]), sim.space(4));
        for _ in 0..2 {
            sim.run("last_block_sum", 9, 128, &[dx, partial, ticket, out, Arg::I32(n)]).unwrap();
            assert_eq!(sim.get::<f32>(out, 1)[0], x.iter().sum::<f32>());
            assert_eq!(sim.get::<u32>(ticket, 1)[0], 0);
        }
    });
}

#[test]
fn dynamic_shared_memory() {
    each(|sim| {
        let x: Vec<i32> = (0..200).collect();
        let (dx, out) = (sim.put(&x), sim.space(800));
        sim.launch("reverse", [1; 3], [200, 1, 1], 800, &[dx, out, Arg::I32(200)]).unwrap();
        assert_eq!(sim.get::<i32>(out, 200), x.into_iter().rev().collect::<Vec<_>>());
    });
}

#[test]
fn constants_and_variables_of_the_module() {
    each(|sim| {
        let x = Random(1).floats(50);
        let (dx, out) = (sim.put(&x), sim.space(200));
        sim.run("polynomial", 2, 32, &[dx, out, Arg::I32(50)]).unwrap();
        let c = [1.0f32, -0.5, 0.25, -0.125, 0.0625];
        let want: Vec<f32> = x
            .iter()
            .enumerate()
            .map(|(i, x)| {
                (0..4).rev().fold(c[4], |y, k| y.mul_add(*x, c[k])) + [10.0, 20.0, 30.0, 40.0][i % 4]
            })
            .collect();
        assert_eq!(sim.get::<f32>(out, 50), want);
    });
}

#[test]
fn calls_of_functions() {
    each(|sim| {
        let mut r = Random(11);
        let n = 70;
        let a: Vec<i32> = (0..n).map(|_| 1 + r.next() as i32 % 500).collect();
        let b: Vec<i32> = (0..n).map(|_| 1 + r.next() as i32 % 500).collect();
        let (da, db, out) = (sim.put(&a), sim.put(&b), sim.space(4 * n));
        sim.run("calls", 1, 96, &[da, db, out, Arg::I32(n as i32)]).unwrap();
        let gcd = |mut a: i32, mut b: i32| {
            while b != 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        let want: Vec<i32> = (0..n)
            .map(|i| {
                let factorial: i32 = (1..=(i as i32 % 8)).product();
                gcd(a[i], b[i]) + factorial + (a[i] + b[i]) + i32::from((a[i] - b[i]) as i16)
            })
            .collect();
        assert_eq!(sim.get::<i32>(out, n), want);
    });
}

#[test]
fn arrays_in_local_memory() {
    each(|sim| {
        let mut r = Random(12);
        let mut x: Vec<i32> = (0..16).map(|_| r.next() as i32 % 1000).collect();
        let (dx, out) = (sim.put(&x), sim.space(64));
        sim.run("local_sort", 1, 16, &[dx, out]).unwrap();
        x.sort_unstable();
        assert_eq!(sim.get::<i32>(out, 16), x);
    });
}

#[test]
fn branches_of_many_kinds() {
    each(|sim| {
        let n = 100i32;
        let mut r = Random(13);
        let x: Vec<i32> = (0..n).map(|_| (r.next() % 12) as i32).collect();
        let (dx, out) = (sim.put(&x), sim.space(400));
        sim.run("choose", 1, 128, &[dx, out, Arg::I32(n)]).unwrap();
        let want: Vec<i32> = (0..n)
            .zip(&x)
            .map(|(i, x)| match x {
                0 => i + 1,
                1 => i * 3,
                2 => i ^ 0x55,
                3 => -i,
                4 => i << 2,
                5 => i >> 1,
                6 => i * i,
                7 => !i,
                8 => i % 7,
                9 => i / 3,
                _ => 0,
            })
            .collect();
        assert_eq!(sim.get::<i32>(out, 100), want);

        let x: Vec<i32> = x.iter().map(|x| x % 3).collect();
        let (dx, out) = (sim.put(&x), sim.space(400));
        sim.run("branch_table", 1, 128, &[dx, out, Arg::I32(n)]).unwrap();
        let want: Vec<i32> = (0..n).zip(&x).map(|(i, x)| [i + 1, 3 * i, i ^ 0x55][*x as usize]).collect();
        assert_eq!(sim.get::<i32>(out, 100), want);
    });
}

#[test]
fn cooperative_grids_wait_for_each_other() {
    let mut sim = Sim::new("cooperative", 80);
    for options in variants() {
        sim.options = options;
        let (n, rounds) = (150usize, 5);
        let mut a = Random(4).floats(n);
        let (da, db) = (sim.put(&a), sim.put(&a));
        let arrived = sim.put(&[0u32]);
        let args = [da, db, arrived, Arg::I32(n as i32), Arg::I32(rounds)];
        sim.launch_as("jacobi", [4, 1, 1], [48, 1, 1], 0, &args, true).unwrap();
        for _ in 0..rounds {
            let old = a.clone();
            for i in 1..n - 1 {
                a[i] = 0.5 * (old[i - 1] + old[i + 1]);
            }
        }
        assert_eq!(sim.get::<f32>(db, n), a);

        let x: Vec<i32> = (0..200).collect();
        let (dx, sum, out) = (sim.put(&x), sim.put(&[0i32]), sim.space(800));
        sim.launch_as("grid_sum", [5, 1, 1], [40, 1, 1], 0, &[dx, sum, out], true).unwrap();
        assert_eq!(sim.get::<i32>(out, 200), [199 * 200 / 2; 200]);
    }
}

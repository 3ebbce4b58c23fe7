//! Tensor cores, softmax, 8- and 16-bit arithmetic.

use super::support::{Arg, Random, Sim, variants};
use half::{bf16, f16};

#[test]
fn a_pipelined_product_of_matrices() {
    for (file, cc) in [("gemm", 80), ("gemm.sm_90a", 90)] {
        let mut sim = Sim::new(file, cc);
        let (m, n, k) = (128, 64, 160);
        let mut r = Random(21);
        let a: Vec<f16> = (0..m * k).map(|_| f16::from_f32(r.float())).collect();
        let b: Vec<f16> = (0..k * n).map(|_| f16::from_f32(r.float())).collect();
        let want: Vec<f64> = (0..m * n)
            .map(|i| (0..k).map(|j| a[i / n * k + j].to_f64() * b[j * n + i % n].to_f64()).sum())
            .collect();
        for options in variants() {
            sim.options = options;
            let bits = |x: &[f16]| x.iter().map(|x| x.to_bits()).collect::<Vec<u16>>();
            let (da, db, c) = (sim.put(&bits(&a)), sim.put(&bits(&b)), sim.space(4 * m * n));
            let args = [da, db, c, Arg::I32(m as i32), Arg::I32(n as i32), Arg::I32(k as i32)];
            sim.launch("gemm", [n as u32 / 64, m as u32 / 64, 1], [128, 1, 1], 0, &args).unwrap();
            let got = sim.get::<f32>(c, m * n);
            let worst = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
            assert!(worst < 2e-5, "{worst:e}");
        }
    }
}

#[test]
fn softmax_of_rows() {
    for (file, cc) in [("softmax", 80), ("softmax.sm_120", 120)] {
        let mut sim = Sim::new(file, cc);
        for options in variants() {
            sim.options = options;
            for (rows, cols) in [(1, 1), (5, 33), (9, 100)] {
                let x: Vec<f32> = Random(rows as u64).floats(rows * cols).iter().map(|x| 20.0 * x).collect();
                let (dx, out) = (sim.put(&x), sim.space(4 * x.len()));
                let args = [dx, out, Arg::I32(rows as i32), Arg::I32(cols as i32)];
                sim.run("softmax", (rows as u32).div_ceil(4), 128, &args).unwrap();
                let got = sim.get::<f32>(out, x.len());
                for (row, got) in x.chunks(cols).zip(got.chunks(cols)) {
                    let max = row.iter().copied().fold(f32::MIN, f32::max);
                    let e: Vec<f64> = row.iter().map(|v| f64::from(v - max).exp()).collect();
                    let sum: f64 = e.iter().sum();
                    for (e, g) in e.iter().zip(got) {
                        assert!((e / sum - f64::from(*g)).abs() < 2e-6, "{} {g}", e / sum);
                    }
                }
            }
        }
    }
}

#[test]
fn half_precision() {
    for (file, cc) in [("half", 80), ("half.sm_90", 90)] {
        let mut sim = Sim::new(file, cc);
        for options in variants() {
            sim.options = options;
            let n = 77;
            let mut r = Random(31);
            let mut half = || (0..n).map(|_| f16::from_f32(8.0 * r.float())).collect::<Vec<_>>();
            let (a, b, c) = (half(), half(), half());
            let bits = |x: &[f16]| x.iter().map(|x| x.to_bits()).collect::<Vec<u16>>();
            let (da, db, dc) = (sim.put(&bits(&a)), sim.put(&bits(&b)), sim.put(&bits(&c)));
            let out = sim.space(4 * n);
            sim.run("half_arithmetic", 3, 32, &[da, db, dc, out, Arg::I32(n as i32)]).unwrap();
            let got = sim.get::<u16>(out, 2 * n);
            for i in 0..n {
                // Products of two f16 are exact in f64, and so is the sum here.
                let fma = f16::from_f64(a[i].to_f64() * b[i].to_f64() + c[i].to_f64());
                let sub = f16::from_f64(a[i].to_f64().max(b[i].to_f64()) - c[i].to_f64());
                assert_eq!((got[i], got[n + i]), (fma.to_bits(), sub.to_bits()), "{i}");
            }

            let mut r = Random(32);
            let mut brain = || (0..2 * n).map(|_| bf16::from_f32(8.0 * r.float())).collect::<Vec<_>>();
            let (a, b, c) = (brain(), brain(), brain());
            let bits = |x: &[bf16]| x.iter().map(|x| x.to_bits()).collect::<Vec<u16>>();
            let (da, db, dc) = (sim.put(&bits(&a)), sim.put(&bits(&b)), sim.put(&bits(&c)));
            let out = sim.space(8 * n);
            sim.run("bf16_pairs", 3, 32, &[da, db, dc, out, Arg::I32(n as i32)]).unwrap();
            let got = sim.get::<u16>(out, 4 * n);
            for i in 0..2 * n {
                let fma = bf16::from_f64(a[i].to_f64() * b[i].to_f64() + c[i].to_f64());
                let sub = bf16::from_f64(a[i].to_f64().max(b[i].to_f64()) - c[i].to_f64());
                assert_eq!((got[i], got[2 * n + i]), (fma.to_bits(), sub.to_bits()), "{i}");
            }

            let x = Random(33).floats(n + 1);
            let (dx, out) = (sim.put(&x), sim.space(4 * x.len()));
            sim.run("through_half", 2, 32, &[dx, out, Arg::I32(x.len() as i32)]).unwrap();
            let want: Vec<f32> = x.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
            assert_eq!(sim.get::<f32>(out, x.len()), want);

            let mut r = Random(34);
            let a: Vec<u32> = (0..n).map(|_| r.next() ^ r.next() << 7).collect();
            let b: Vec<u32> = (0..n).map(|_| r.next() ^ r.next() << 7).collect();
            let (da, db, out) = (sim.put(&a), sim.put(&b), sim.space(4 * n));
            sim.run("dot_bytes", 1, 96, &[da, db, out, Arg::I32(n as i32)]).unwrap();
            let dot = |a: u32, b: u32| -> i32 {
                a.to_le_bytes().iter().zip(b.to_le_bytes()).map(|(x, y)| i32::from(*x as i8) * i32::from(y as i8)).sum()
            };
            let want: Vec<i32> = (0..n).map(|i| dot(a[i], b[i]) + i as i32).collect();
            assert_eq!(sim.get::<i32>(out, n), want);
        }
    }
}

#[test]
fn fp8_conversions() {
    let mut sim = Sim::new("fp8", 89);
    for options in variants() {
        sim.options = options;
        let x: Vec<f32> = vec![0.0, -0.0, 1.0, 1.0625, 1.1875, 448.0, 464.0, 465.0, 1e9, -1e9, 0.001, -0.0009, 3.3, 57344.0];
        for (kernel, bits, max) in [("e4m3", 3, 448.0f64), ("e5m2", 2, 57344.0)] {
            let (dx, codes, back) = (sim.put(&x), sim.space(x.len()), sim.space(4 * x.len()));
            sim.run(kernel, 1, 32, &[dx, codes, back, Arg::I32(x.len() as i32 / 2)]).unwrap();
            let got = sim.get::<f32>(back, x.len());
            let least = if bits == 3 { -6 } else { -14 };
            for (x, g) in x.iter().zip(&got) {
                // To the nearest multiple of the last place, ties to even, then saturated.
                let v = f64::from(*x);
                let exponent = if v == 0.0 { least } else { (v.abs().log2().floor() as i32).max(least) };
                let place = 2f64.powi(exponent - bits);
                let want = ((v / place).round_ties_even() * place).clamp(-max, max);
                assert_eq!(f64::from(*g), want, "{kernel} {x}");
            }
        }
    }
}

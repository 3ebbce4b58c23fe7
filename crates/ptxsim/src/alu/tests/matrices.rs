//! `mma`: layouts as the manual lists them, against a plain product.

use super::model::{BF16, E4M3, E5M2, F16, F32, Fmt, Mode, TF32};
use super::*;
use crate::exec::regs::{Sync, Taint};

/// One kind of `mma`.
#[derive(Clone, Copy)]
struct Shape {
    m: usize,
    k: usize,
    /// Bits of an element of A and B.
    bits: usize,
}

/// Rows and columns of A's elements, from the manual's formulas for each shape: element `i` of a lane.
fn place_a(s: Shape, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    match (s.m, s.bits, s.k) {
        (8, 64, 4) => (group, thread),
        (8, 8, 16) => (group, thread * 4 + i),
        (8, 4, 32) => (group, thread * 8 + i),
        (16, 32 | 64, 4) => (if i == 0 { group } else { group + 8 }, thread),
        (16, 32 | 64, 8) => {
            (if i.is_multiple_of(2) { group } else { group + 8 }, if i < 2 { thread } else { thread + 4 })
        }
        (16, 64, 16) => (if i.is_multiple_of(2) { group } else { group + 8 }, thread + 4 * (i / 2)),
        (16, 16, 8) => (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1)),
        (16, 16, 16) => (
            if matches!(i, 0 | 1 | 4 | 5) { group } else { group + 8 },
            thread * 2 + (i & 1) + if i < 4 { 0 } else { 8 },
        ),
        (16, 8, 16) => (if i < 4 { group } else { group + 8 }, thread * 4 + (i & 3)),
        (16, 8, 32) => (
            if i < 4 || (8..12).contains(&i) { group } else { group + 8 },
            thread * 4 + (i & 3) + if i < 8 { 0 } else { 16 },
        ),
        (16, 4, 32) => (if i < 8 { group } else { group + 8 }, thread * 8 + (i & 7)),
        (16, 4, 64) => (
            if i < 8 || (16..24).contains(&i) { group } else { group + 8 },
            thread * 8 + (i & 7) + if i < 16 { 0 } else { 32 },
        ),
        _ => unreachable!(),
    }
}

/// Row (k) and column of B's elements.
fn place_b(s: Shape, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = match (s.bits, s.k) {
        (32 | 64, _) => thread + 4 * i,
        (16, _) => thread * 2 + (i & 1) + if i < 2 { 0 } else { 8 },
        (8, _) => thread * 4 + (i & 3) + if i < 4 { 0 } else { 16 },
        _ => thread * 8 + (i & 7) + if i < 8 { 0 } else { 32 },
    };
    (row, group)
}

fn place_c(lane: usize, i: usize) -> (usize, usize) {
    (if i < 2 { lane >> 2 } else { (lane >> 2) + 8 }, lane % 4 * 2 + (i & 1))
}

/// Matrices as bits of their elements, by row.
struct Matrices {
    a: Vec<Vec<u64>>,
    b: Vec<Vec<u64>>,
    c: Vec<Vec<u64>>,
}

impl Shape {
    fn zeros(self) -> Matrices {
        Matrices {
            a: vec![vec![0; self.k]; self.m],
            b: vec![vec![0; 8]; self.k],
            c: vec![vec![0; 8]; self.m],
        }
    }

    /// Bits of a register.
    fn register(self) -> usize {
        if self.bits == 64 { 64 } else { 32 }
    }

    fn text(self, name: &str, packed_c: bool) -> String {
        let l = if self.bits == 64 { "d" } else { "r" };
        let per_lane =
            |elements: usize, bits: usize| vec![l; elements * bits / 32 / self.register()].join(", ");
        let c = per_lane(self.m * 8, if packed_c { 16 } else { self.register() });
        let a = per_lane(self.m * self.k, self.bits);
        let b = per_lane(self.k * 8, self.bits);
        format!("mma.sync.aligned.m{}n8k{}.row.col{name} {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}}", self.m, self.k)
    }

    fn run(self, machine: &mut Machine, x: &Matrices, packed_c: bool) -> Vec<Vec<u64>> {
        let per = self.register() / self.bits;
        let na = self.m * self.k / 32 / per;
        let nb = self.k * 8 / 32 / per;
        for r in 0..na {
            machine.set(
                r,
                &std::array::from_fn(|lane| {
                    (0..per)
                        .map(|j| {
                            let (row, column) = place_a(self, lane, r * per + j);
                            x.a[row][column] << (j * self.bits % 64)
                        })
                        .sum()
                }),
            );
        }
        for r in 0..nb {
            machine.set(
                na + r,
                &std::array::from_fn(|lane| {
                    (0..per)
                        .map(|j| {
                            let (row, column) = place_b(self, lane, r * per + j);
                            x.b[row][column] << (j * self.bits % 64)
                        })
                        .sum()
                }),
            );
        }
        let per_c = if packed_c { 2 } else { 1 };
        let nc = self.m / 4 / per_c;
        for r in 0..nc {
            machine.set(
                na + nb + r,
                &std::array::from_fn(|lane| {
                    (0..per_c)
                        .map(|j| {
                            let (row, column) = place_c(lane, r * per_c + j);
                            x.c[row][column] << (16 * j)
                        })
                        .sum()
                }),
            );
        }
        machine.run(Mask::MAX).unwrap();
        let mut d = vec![vec![0; 8]; self.m];
        for r in 0..nc {
            let lanes = machine.get(r);
            for lane in 0..LANES {
                for j in 0..per_c {
                    let (row, column) = place_c(lane, r * per_c + j);
                    d[row][column] = if packed_c { lanes[lane] >> (16 * j) & 0xffff } else { lanes[lane] };
                }
            }
        }
        d
    }
}

struct Kind {
    name: &'static str,
    shape: Shape,
    a: Fmt,
    b: Fmt,
    packed: bool,
}

const fn kind(name: &'static str, k: usize, bits: usize, a: Fmt, b: Fmt, packed: bool) -> Kind {
    Kind { name, shape: Shape { m: 16, k, bits }, a, b, packed }
}

const FLOATS: [Kind; 16] = [
    kind(".f32.f16.f16.f32", 8, 16, F16, F16, false),
    kind(".f32.f16.f16.f32", 16, 16, F16, F16, false),
    kind(".f16.f16.f16.f16", 8, 16, F16, F16, true),
    kind(".f16.f16.f16.f16", 16, 16, F16, F16, true),
    kind(".f32.bf16.bf16.f32", 8, 16, BF16, BF16, false),
    kind(".f32.bf16.bf16.f32", 16, 16, BF16, BF16, false),
    kind(".f32.tf32.tf32.f32", 4, 32, TF32, TF32, false),
    kind(".f32.tf32.tf32.f32", 8, 32, TF32, TF32, false),
    kind(".f32.e4m3.e4m3.f32", 16, 8, E4M3, E4M3, false),
    kind(".f32.e5m2.e4m3.f32", 16, 8, E5M2, E4M3, false),
    kind(".f32.e4m3.e4m3.f32", 32, 8, E4M3, E4M3, false),
    kind(".f32.e4m3.e5m2.f32", 32, 8, E4M3, E5M2, false),
    kind(".f32.e5m2.e4m3.f32", 32, 8, E5M2, E4M3, false),
    kind(".f32.e5m2.e5m2.f32", 32, 8, E5M2, E5M2, false),
    kind(".f16.e4m3.e5m2.f16", 32, 8, E4M3, E5M2, true),
    kind(".f16.e5m2.e5m2.f16", 16, 8, E5M2, E5M2, true),
];

impl Kind {
    /// Bits of a number in a register: tf32 is at the top of its own.
    fn bits(f: Fmt, x: f64) -> u64 {
        let bits = f.of(x, Mode::Nearest);
        if f == TF32 { bits << 13 } else { bits }
    }
    fn result(&self) -> Fmt {
        if self.packed { F16 } else { F32 }
    }
}

/// Small integers: every sum is exact in every format, in any order. Both modes give it.
#[test]
fn products_of_small_numbers() {
    for kind in &FLOATS {
        let s = kind.shape;
        for mut options in isas() {
            for truncation in [false, true] {
                options.mma_truncation = truncation;
                let mut machine = Machine::new(&s.text(kind.name, kind.packed), &options);
                let mut r = Random(s.k as u64);
                for _ in 0..20 {
                    let mut small = || (r.next() % 5) as f64 - 2.0;
                    let a: Vec<Vec<f64>> = (0..16).map(|_| (0..s.k).map(|_| small()).collect()).collect();
                    let b: Vec<Vec<f64>> = (0..s.k).map(|_| (0..8).map(|_| small()).collect()).collect();
                    let c: Vec<Vec<f64>> = (0..16).map(|_| (0..8).map(|_| small()).collect()).collect();
                    let bits = |f: Fmt, m: &[Vec<f64>]| {
                        m.iter().map(|row| row.iter().map(|&x| Kind::bits(f, x)).collect()).collect()
                    };
                    let x = Matrices { a: bits(kind.a, &a), b: bits(kind.b, &b), c: bits(kind.result(), &c) };
                    let d = s.run(&mut machine, &x, kind.packed);
                    for i in 0..16 {
                        for n in 0..8 {
                            let want = c[i][n] + (0..s.k).map(|k| a[i][k] * b[k][n]).sum::<f64>();
                            assert_eq!(
                                kind.result().value(d[i][n]),
                                want,
                                "{} k{} ({i}, {n})",
                                kind.name,
                                s.k
                            );
                        }
                    }
                }
            }
        }
    }
}

/// A single one in A picks a row of B, and one in B a column of A.
#[test]
fn a_single_one_at_every_place() {
    for kind in &FLOATS {
        let s = kind.shape;
        let mut machine = Machine::new(&s.text(kind.name, kind.packed), &Options::default());
        // Numbers that every format has: 1 to 15 and a power of two, different for all neighbours.
        let number =
            |i: usize, n: usize| ((i % 5) + 1) as f64 * [1.0, 2.0, 4.0, 0.5][n % 4] * [1.0, -1.0][n / 4 % 2];
        for i in 0..16 {
            for k in 0..s.k {
                let mut x = s.zeros();
                x.a[i][k] = Kind::bits(kind.a, 1.0);
                x.b.iter_mut().enumerate().for_each(|(k, row)| {
                    row.iter_mut().enumerate().for_each(|(n, v)| *v = Kind::bits(kind.b, number(k, n)));
                });
                let d = s.run(&mut machine, &x, kind.packed);
                for (row, values) in d.iter().enumerate() {
                    for (n, &bits) in values.iter().enumerate() {
                        let want = if row == i { number(k, n) } else { 0.0 };
                        assert_eq!(kind.result().value(bits), want, "{} A({i}, {k})", kind.name);
                    }
                }
            }
        }
        for k in 0..s.k {
            for n in 0..8 {
                let mut x = s.zeros();
                x.b[k][n] = Kind::bits(kind.b, 1.0);
                x.a.iter_mut().enumerate().for_each(|(i, row)| {
                    row.iter_mut().enumerate().for_each(|(k, v)| *v = Kind::bits(kind.a, number(i, k)));
                });
                let d = s.run(&mut machine, &x, kind.packed);
                for (i, values) in d.iter().enumerate() {
                    for (column, &bits) in values.iter().enumerate() {
                        let want = if column == n { number(i, k) } else { 0.0 };
                        assert_eq!(kind.result().value(bits), want, "{} B({k}, {n})", kind.name);
                    }
                }
            }
        }
    }
}

/// The default mode: fused multiply-adds in order of k, in f32; here by the search of `model`.
#[test]
fn default_rounding() {
    for kind in &FLOATS {
        let s = kind.shape;
        for options in isas() {
            let mut machine = Machine::new(&s.text(kind.name, kind.packed), &options);
            let mut r = Random(77);
            for round in 0..3 {
                let mut any = |f: Fmt, specials: bool| loop {
                    let bits = r.next() & ((1 << f.width) - 1);
                    let x = f.value(bits);
                    if specials && x.is_finite() || x.abs() > 1e-4 && x.abs() < 1e4 {
                        return x;
                    }
                };
                let specials = round == 2;
                let mut matrix = |f: Fmt, rows: usize, columns: usize| -> Vec<Vec<f64>> {
                    (0..rows).map(|_| (0..columns).map(|_| any(f, specials)).collect()).collect()
                };
                let (a, b, c) =
                    (matrix(kind.a, 16, s.k), matrix(kind.b, s.k, 8), matrix(kind.result(), 16, 8));
                let bits = |f: Fmt, m: &[Vec<f64>]| {
                    m.iter().map(|row| row.iter().map(|&x| Kind::bits(f, x)).collect()).collect()
                };
                let x = Matrices { a: bits(kind.a, &a), b: bits(kind.b, &b), c: bits(kind.result(), &c) };
                let d = s.run(&mut machine, &x, kind.packed);
                for i in 0..16 {
                    for n in 0..8 {
                        let sum = (0..s.k).fold(c[i][n], |sum, k| {
                            F32.value(F32.sum(&[a[i][k] * b[k][n], sum], Mode::Nearest))
                        });
                        let want = if sum == 0.0 {
                            kind.result().special(sum)
                        } else {
                            kind.result().of(sum, Mode::Nearest)
                        };
                        assert_eq!(d[i][n], want, "{} k{} ({i}, {n}) {sum:e}", kind.name, s.k);
                    }
                }
            }
        }
    }
}

/// The sum of a block is cut, not rounded: on an A100, 24 bits below the largest exponent, eight products at a time.
#[test]
fn truncation() {
    let s = FLOATS[1].shape;
    let run = |cc: u32, terms: &[(f64, f64)], c: f64| {
        let options = Options { mma_truncation: true, ..Options::default() };
        let (i, f) = instruction(&s.text(FLOATS[1].name, false));
        let form = form(&i, &f, cc, &options).unwrap().unwrap();
        let mut machine = Machine::new(&s.text(FLOATS[1].name, false), &options);
        machine.op.imm = form.imm;
        let mut x = s.zeros();
        for (k, (a, b)) in terms.iter().enumerate() {
            x.a[3][k] = F16.of(*a, Mode::Nearest);
            x.b[k][5] = F16.of(*b, Mode::Nearest);
        }
        x.c[3][5] = F32.of(c, Mode::Nearest);
        F32.value(s.run(&mut machine, &x, false)[3][5])
    };
    let tiny = 2f64.powi(-12);
    // 1 + 3 * 2^-24: rounding gives 1 + 2^-22, cutting 1 + 2^-23.
    assert_eq!(run(80, &[(tiny, tiny), (tiny, 2.0 * tiny)], 1.0), 1.0 + 2f64.powi(-23));
    // 2^-25 is below the last bit kept: two of them vanish in one block on an A100, and do not on an H100.
    let half = 2f64.powi(-13);
    let two = [(half, tiny), (half, tiny), (tiny, tiny)];
    assert_eq!(run(80, &two, 1.0), 1.0);
    assert_eq!(run(90, &two, 1.0), 1.0 + 2f64.powi(-23));
    // Cut towards zero on both sides.
    assert_eq!(run(80, &[(-tiny, tiny)], 1.0), 1.0 - 2f64.powi(-24));
    assert_eq!(run(80, &[(-half, tiny)], 1.0), 1.0);
    // Infinities and NaN pass.
    assert_eq!(run(80, &[(f64::INFINITY, 1.0)], 1.0), f64::INFINITY);
    assert!(run(80, &[(f64::INFINITY, 0.0)], 1.0).is_nan());
    assert_eq!(run(80, &[(-65504.0, 1.0)], 65504.0), 0.0);
}

#[test]
fn specials() {
    let kind = &FLOATS[1];
    let mut machine = Machine::new(&kind.shape.text(kind.name, false), &Options::default());
    let mut x = kind.shape.zeros();
    (x.a[0][0], x.b[0][0]) = (0x7c00, 0x3c00); // infinity * 1
    x.b[0][1] = 0; // infinity * 0
    x.a[1][1] = 1; // the smallest subnormal, squared
    x.b[1][2] = 1;
    x.c[2][3] = 1; // a subnormal passes
    x.c[3][3] = 0xffff_ffff;
    let d = kind.shape.run(&mut machine, &x, false);
    assert_eq!((d[0][0], d[0][1]), (0x7f80_0000, 0x7fff_ffff));
    assert_eq!(F32.value(d[1][2]), 2f64.powi(-48));
    assert_eq!((d[2][3], d[3][3]), (1, 0x7fff_ffff));
    // The 13 low bits of a tf32 register do not count.
    let kind = &FLOATS[7];
    let mut machine = Machine::new(&kind.shape.text(kind.name, false), &Options::default());
    let mut x = kind.shape.zeros();
    (x.a[0][0], x.b[0][0]) = (0x3f80_1fff, 0x3f80_0000);
    assert_eq!(kind.shape.run(&mut machine, &x, false)[0][0], 0x3f80_0000);
}

#[test]
fn integers() {
    let shapes = [
        (Shape { m: 8, k: 16, bits: 8 }, ["u8", "s8"]),
        (Shape { m: 16, k: 16, bits: 8 }, ["u8", "s8"]),
        (Shape { m: 16, k: 32, bits: 8 }, ["u8", "s8"]),
        (Shape { m: 8, k: 32, bits: 4 }, ["u4", "s4"]),
        (Shape { m: 16, k: 32, bits: 4 }, ["u4", "s4"]),
        (Shape { m: 16, k: 64, bits: 4 }, ["u4", "s4"]),
    ];
    for (s, types) in shapes {
        for (sa, sb, sat) in (0..8).map(|i| (i & 1, i >> 1 & 1, i >> 2)) {
            let sat = if sat == 1 { ".satfinite" } else { "" };
            let text = s.text(&format!("{sat}.s32.{}.{}.s32", types[sa], types[sb]), false);
            let value = |bits: u64, signed: usize| {
                let x = bits as i64;
                if signed == 1 && x >> (s.bits - 1) != 0 { x - (1 << s.bits) } else { x }
            };
            for options in isas() {
                let mut machine = Machine::new(&text, &options);
                let mut r = Random(s.k as u64 + 1);
                for round in 0..12 {
                    let mut x = s.zeros();
                    let ones = (1 << s.bits) - 1;
                    // The largest products of both signs among them, and C at the ends of its range.
                    x.a.iter_mut()
                        .flatten()
                        .for_each(|v| *v = if round == 0 { ones >> 1 } else { r.next() & ones });
                    x.b.iter_mut().flatten().for_each(|v| {
                        *v = match round {
                            0 => ones >> 1,
                            1 => 1 << (s.bits - 1),
                            _ => r.next() & ones,
                        }
                    });
                    x.c.iter_mut().flatten().for_each(|v| {
                        let near = r.next() % 1000;
                        *v = match round % 3 {
                            0 => 0x7fff_ffff - near,
                            1 => 0x8000_0000 + near,
                            _ => r.next() & 0xffff_ffff,
                        };
                    });
                    let d = s.run(&mut machine, &x, false);
                    for i in 0..s.m {
                        for n in 0..8 {
                            let sum: i64 =
                                (0..s.k).map(|k| value(x.a[i][k], sa) * value(x.b[k][n], sb)).sum();
                            let sum = sum + i64::from(x.c[i][n] as u32 as i32);
                            let want = if sat.is_empty() {
                                sum
                            } else {
                                sum.clamp(i64::from(i32::MIN), i64::from(i32::MAX))
                            };
                            assert_eq!(d[i][n], want as u64 & 0xffff_ffff, "{text} ({i}, {n})");
                        }
                    }
                }
                // A single one at every place of A and of B.
                for (i, k) in (0..s.m).flat_map(|i| (0..s.k).map(move |k| (i, k))) {
                    let mut x = s.zeros();
                    x.a[i][k] = 1;
                    x.b.iter_mut().enumerate().for_each(|(k, row)| {
                        row.iter_mut().enumerate().for_each(|(n, v)| *v = (k + 3 * n) as u64 % 8)
                    });
                    let d = s.run(&mut machine, &x, false);
                    for row in 0..s.m {
                        let want: Vec<u64> =
                            (0..8).map(|n| if row == i { (k + 3 * n) as u64 % 8 } else { 0 }).collect();
                        assert_eq!(d[row].iter().map(|v| v & 7).collect::<Vec<_>>(), want, "{text}");
                    }
                }
                for (k, n) in (0..s.k).flat_map(|k| (0..8).map(move |n| (k, n))) {
                    let mut x = s.zeros();
                    x.b[k][n] = 1;
                    x.a.iter_mut().enumerate().for_each(|(i, row)| {
                        row.iter_mut().enumerate().for_each(|(k, v)| *v = (i + 3 * k) as u64 % 8)
                    });
                    let d = s.run(&mut machine, &x, false);
                    for (i, row) in d.iter().enumerate() {
                        for (column, v) in row.iter().enumerate() {
                            assert_eq!(v & 7, if column == n { (i + 3 * k) as u64 % 8 } else { 0 }, "{text}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn doubles() {
    for (m, k) in [(8, 4), (16, 4), (16, 8), (16, 16)] {
        let s = Shape { m, k, bits: 64 };
        for options in isas() {
            let mut machine = Machine::new(&s.text(".f64.f64.f64.f64", false), &options);
            let number = |i: usize, j: usize| (i as f64 + 1.0) * (j as f64 - 2.5);
            let mut x = s.zeros();
            x.a.iter_mut()
                .enumerate()
                .for_each(|(i, r)| r.iter_mut().enumerate().for_each(|(j, v)| *v = number(i, j).to_bits()));
            x.b.iter_mut().enumerate().for_each(|(i, r)| {
                r.iter_mut().enumerate().for_each(|(j, v)| *v = (number(j, i) + 7.0).to_bits())
            });
            x.c.iter_mut()
                .enumerate()
                .for_each(|(i, r)| r.iter_mut().enumerate().for_each(|(j, v)| *v = number(j, i).to_bits()));
            let d = s.run(&mut machine, &x, false);
            for i in 0..m {
                for n in 0..8 {
                    let want =
                        number(n, i) + (0..k).map(|k| number(i, k) * (number(n, k) + 7.0)).sum::<f64>();
                    assert_eq!(f64::from_bits(d[i][n]), want, "m{m} k{k} ({i}, {n})");
                }
            }
        }
    }
}

/// A destination may be any register of C.
#[test]
fn destinations_that_are_sources() {
    let s = Shape { m: 16, k: 32, bits: 8 };
    let mut machine = Machine::new(&s.text(".s32.s8.s8.s32", false), &Options::default());
    let rows: Vec<u16> = machine.op.many_sources().to_vec();
    let c = &rows[6..10];
    let turned = [c[3], c[0], c[1], c[2]];
    machine.op = Op::new(machine.op.run, &turned, &rows, machine.op.imm);
    for r in 0..4 {
        machine.set(6 + r, &[100 + r as u64; LANES]);
    }
    machine.run(Mask::MAX).unwrap();
    let got: Vec<_> = turned.iter().map(|&row| machine.regs.narrow[row as usize][7]).collect();
    assert_eq!(got, [100, 101, 102, 103]);
}

#[test]
fn forms() {
    let form = form_of(&FLOATS[1].shape.text(FLOATS[1].name, false), 80, &Options::default()).unwrap();
    assert_eq!((form.aligned, form.sync, form.taint), (true, Sync::Warp, Taint::Matrix));
    // Literals for C, as compilers write them.
    let zeros = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {r, r, r, r}, {r, r, r, r}, {r, r}, {0.0, 1.0, 0.0, 0.0}";
    let mut m = Machine::new(zeros, &Options::default());
    m.run(Mask::MAX).unwrap();
    assert_eq!((m.get(0)[9], m.get(1)[9]), (0, 0x3f80_0000));
    assert!(form_of(&FLOATS[10].shape.text(FLOATS[10].name, false), 80, &Options::default()).is_err());
    for wrong in [
        "mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32 {r, r, r, r}, {r, r, r, r}, {r, r}, {r, r, r, r}",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32 {r, r, r, r}, {r, r, r, r}, {r, r}, {r, r, r, r}",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {r, r, r}, {r, r, r, r}, {r, r}, {r, r, r, r}",
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {r, r, r, r}, {r, r, r, r}, {r, r}, {r, r, r, r}",
    ] {
        assert!(refused(wrong), "{wrong}");
    }
}

//! Integer arithmetic, logic, shifts and bit fields.

use super::*;

/// An integer type: width and sign.
#[derive(Clone, Copy)]
struct Int {
    name: &'static str,
    letter: char,
    width: u32,
    signed: bool,
}

const INTS: [Int; 6] = [
    Int { name: "u16", letter: 'h', width: 16, signed: false },
    Int { name: "s16", letter: 'h', width: 16, signed: true },
    Int { name: "u32", letter: 'r', width: 32, signed: false },
    Int { name: "s32", letter: 'r', width: 32, signed: true },
    Int { name: "u64", letter: 'd', width: 64, signed: false },
    Int { name: "s64", letter: 'd', width: 64, signed: true },
];

impl Int {
    fn value(self, bits: u64) -> i128 {
        let x = i128::from(bits) & ((1i128 << self.width) - 1);
        if self.signed && x >> (self.width - 1) & 1 != 0 { x - (1i128 << self.width) } else { x }
    }
    fn bits(self, x: i128) -> u64 {
        (x & ((1i128 << self.width) - 1)) as u64
    }
    fn min(self) -> i128 {
        if self.signed { -(1i128 << (self.width - 1)) } else { 0 }
    }
    fn max(self) -> i128 {
        self.min() + (1i128 << self.width) - 1
    }
    /// `add` with its type and operands: a destination and `n` sources.
    fn text(self, opcode: &str, n: usize) -> String {
        format!("{opcode}.{} {}", self.name, vec![self.letter.to_string(); n + 1].join(", "))
    }
    fn check(self, opcode: &str, n: usize, f: impl Fn(&[i128]) -> i128) {
        check(&self.text(opcode, n), &integer_tuples(n, self.width), |x| {
            let v: Vec<_> = x.iter().map(|&b| self.value(b)).collect();
            vec![self.bits(f(&v))]
        });
    }
}

#[test]
fn arithmetic() {
    for t in INTS {
        t.check("add", 2, |v| v[0] + v[1]);
        t.check("sub", 2, |v| v[0] - v[1]);
        // Products of 64-bit numbers fit i128 only modulo its range, which is enough for the low half.
        t.check("mul.lo", 2, |v| v[0].wrapping_mul(v[1]));
        t.check("mad.lo", 3, |v| v[0].wrapping_mul(v[1]).wrapping_add(v[2]));
        let high = |a: i128, b: i128| {
            if t.signed || t.width < 64 {
                (a * b) >> t.width
            } else {
                ((a as u128 * b as u128) >> 64) as i128
            }
        };
        t.check("mul.hi", 2, |v| high(v[0], v[1]));
        t.check("mad.hi", 3, |v| high(v[0], v[1]) + v[2]);
        t.check("sad", 3, |v| v[2] + (v[0] - v[1]).abs());
        t.check("min", 2, |v| v[0].min(v[1]));
        t.check("max", 2, |v| v[0].max(v[1]));
        t.check("div", 2, |v| if v[1] == 0 { -1 } else { v[0] / v[1] });
        t.check("rem", 2, |v| if v[1] == 0 { -1 } else { v[0] % v[1] });
        if t.signed {
            t.check("abs", 1, |v| v[0].abs());
            t.check("neg", 1, |v| -v[0]);
        }
        if t.width < 64 {
            let wide = Int { width: 2 * t.width, ..t };
            let to = if t.width == 16 { 'r' } else { 'd' };
            check(
                &format!("mul.wide.{} {to}, {l}, {l}", t.name, l = t.letter),
                &integer_tuples(2, t.width),
                |x| vec![wide.bits(t.value(x[0]) * t.value(x[1]))],
            );
            let mut inputs = integer_tuples(3, t.width);
            let mut r = Random(3);
            inputs
                .iter_mut()
                .for_each(|x| x[2] = r.next() & if wide.width == 64 { u64::MAX } else { 0xffff_ffff });
            check(&format!("mad.wide.{} {to}, {l}, {l}, {to}", t.name, l = t.letter), &inputs, |x| {
                vec![wide.bits(t.value(x[0]) * t.value(x[1]) + wide.value(x[2]))]
            });
        }
    }
}

#[test]
fn saturating() {
    let t = INTS[3];
    let clamp = |x: i128| x.clamp(t.min(), t.max());
    t.check("add.sat", 2, |v| clamp(v[0] + v[1]));
    t.check("sub.sat", 2, |v| clamp(v[0] - v[1]));
    t.check("mad.hi.sat", 3, |v| clamp(((v[0] * v[1]) >> 32) + v[2]));
    t.check("min.relu", 2, |v| v[0].min(v[1]).max(0));
    t.check("max.relu", 2, |v| v[0].max(v[1]).max(0));
    for wrong in
        ["add.sat.u32 r, r, r", "mad.lo.sat.s32 r, r, r, r", "min.relu.u32 r, r, r", "add.sat.s64 d, d, d"]
    {
        assert!(refused(wrong), "{wrong}");
    }
}

#[test]
fn products_of_24_bits() {
    for t in [INTS[2], INTS[3]] {
        let low24 = |x: i128| Int { width: 24, ..t }.value((x & 0xff_ffff) as u64);
        t.check("mul24.lo", 2, |v| low24(v[0]) * low24(v[1]));
        t.check("mul24.hi", 2, |v| (low24(v[0]) * low24(v[1])) >> 16);
        t.check("mad24.lo", 3, |v| low24(v[0]) * low24(v[1]) + v[2]);
        t.check("mad24.hi", 3, |v| ((low24(v[0]) * low24(v[1])) >> 16) + v[2]);
    }
}

/// Runs `first` and then `second` on the same registers and compares the double-width result.
fn carry_chain(first: &str, second: &str, width: u32, f: impl Fn(&[u64]) -> (u64, u64)) {
    let n = if first.starts_with("mad") { 3 } else { 2 };
    for options in isas() {
        let mut low = Machine::new(first, &options);
        let mut high = Machine::new(second, &options);
        for chunk in integer_tuples(2 * n, width).chunks(LANES) {
            let at = |lane: usize| &chunk[lane % chunk.len()];
            for i in 0..n {
                low.set(i, &std::array::from_fn(|lane| at(lane)[i]));
                high.set(i, &std::array::from_fn(|lane| at(lane)[n + i]));
            }
            low.regs.carry = 0x5555_5555;
            low.run(Mask::MAX).unwrap();
            high.regs.carry = low.regs.carry;
            high.run(Mask::MAX).unwrap();
            for lane in 0..LANES {
                assert_eq!(
                    (low.get(0)[lane], high.get(0)[lane]),
                    f(at(lane)),
                    "{first}; {second} of {:x?}",
                    at(lane)
                );
            }
        }
    }
}

#[test]
fn carries() {
    carry_chain("add.cc.u32 r, r, r", "addc.u32 r, r, r", 32, |x| {
        let s = (u128::from(x[2]) << 32 | u128::from(x[0])) + (u128::from(x[3]) << 32 | u128::from(x[1]));
        (s as u64 & 0xffff_ffff, (s >> 32) as u64 & 0xffff_ffff)
    });
    carry_chain("sub.cc.s64 d, d, d", "subc.s64 d, d, d", 64, |x| {
        let wide = |h: u64, l: u64| u128::from(h) << 64 | u128::from(l);
        let s = wide(x[2], x[0]).wrapping_sub(wide(x[3], x[1]));
        (s as u64, (s >> 64) as u64)
    });
    carry_chain("sub.cc.u32 r, r, r", "subc.cc.u32 r, r, r", 32, |x| {
        let wide = |h: u64, l: u64| h << 32 | l;
        let s = wide(x[2], x[0]).wrapping_sub(wide(x[3], x[1]));
        (s & 0xffff_ffff, s >> 32)
    });
    carry_chain("add.cc.u64 d, d, d", "addc.cc.u64 d, d, d", 64, |x| {
        let wide = |h: u64, l: u64| u128::from(h) << 64 | u128::from(l);
        let s = wide(x[2], x[0]).wrapping_add(wide(x[3], x[1]));
        (s as u64, (s >> 64) as u64)
    });
    carry_chain("mad.lo.cc.u32 r, r, r, r", "madc.hi.u32 r, r, r, r", 32, |x| {
        let low = ((x[0] * x[1]) & 0xffff_ffff) + x[2];
        (low & 0xffff_ffff, (((x[3] * x[4]) >> 32) + x[5] + (low >> 32)) & 0xffff_ffff)
    });
    carry_chain("mad.hi.cc.s32 r, r, r, r", "madc.lo.s32 r, r, r, r", 32, |x| {
        let signed = |v: u64| i64::from(v as u32 as i32);
        let low = ((signed(x[0]) * signed(x[1])) >> 32) as u64 & 0xffff_ffff;
        let low = low + x[2];
        (low & 0xffff_ffff, (x[3].wrapping_mul(x[4]) + x[5] + (low >> 32)) & 0xffff_ffff)
    });
    carry_chain("mad.lo.cc.s64 d, d, d, d", "madc.hi.cc.u64 d, d, d, d", 64, |x| {
        let low = u128::from(x[0].wrapping_mul(x[1])) + u128::from(x[2]);
        let high = ((u128::from(x[3]) * u128::from(x[4])) >> 64) as u64;
        (low as u64, high.wrapping_add(x[5]).wrapping_add((low >> 64) as u64))
    });
}

#[test]
fn a_carry_is_kept_where_a_lane_is_off_and_by_what_does_not_write_it() {
    let mut m = Machine::new("add.cc.u32 r, r, r", &Options::default());
    m.set(0, &[u64::from(u32::MAX); LANES]);
    m.set(1, &[1; LANES]);
    m.run(0xff).unwrap();
    assert_eq!(m.regs.carry, 0xff);
    m.set(1, &[0; LANES]);
    m.run(0xf).unwrap();
    assert_eq!(m.regs.carry, 0xf0);
    let mut m = Machine::new("addc.u32 r, r, r", &Options::default());
    m.regs.carry = 3;
    m.run(Mask::MAX).unwrap();
    assert_eq!((m.regs.carry, m.get(0)[1], m.get(0)[2]), (3, 1, 0));
}

#[test]
fn packed_halves() {
    let pair = |x: &[u64], signed: bool, f: fn(i64, i64) -> i64| {
        let part = |v: u64, i: u32| {
            let h = (v >> (16 * i)) as u16;
            if signed { i64::from(h as i16) } else { i64::from(h) }
        };
        let r = |i| f(part(x[0], i), part(x[1], i)) as u16;
        vec![u64::from(r(0)) | u64::from(r(1)) << 16]
    };
    for (t, signed) in [("u16x2", false), ("s16x2", true)] {
        let inputs = integer_tuples(2, 32);
        check(&format!("add.{t} r, r, r"), &inputs, |x| pair(x, signed, |a, b| a + b));
        check(&format!("min.{t} r, r, r"), &inputs, |x| pair(x, signed, i64::min));
        check(&format!("max.{t} r, r, r"), &inputs, |x| pair(x, signed, i64::max));
    }
    check("min.s16x2.relu r, r, r", &integer_tuples(2, 32), |x| pair(x, true, |a, b| a.min(b).max(0)));
    check("max.relu.s16x2 r, r, r", &integer_tuples(2, 32), |x| pair(x, true, |a, b| a.max(b).max(0)));
}

#[test]
fn dot_products() {
    let value = |x: u64, at: u32, bits: u32, signed: bool| {
        let v = (x >> at & ((1 << bits) - 1)) as i64;
        if signed && v >> (bits - 1) != 0 { v - (1 << bits) } else { v }
    };
    let name = |s| if s { "s32" } else { "u32" };
    for (sa, sb) in [(false, false), (false, true), (true, false), (true, true)] {
        let inputs = integer_tuples(3, 32);
        check(&format!("dp4a.{}.{} r, r, r, r", name(sa), name(sb)), &inputs, |x| {
            let sum: i64 = (0..4).map(|i| value(x[0], 8 * i, 8, sa) * value(x[1], 8 * i, 8, sb)).sum();
            vec![(sum + x[2] as i64) as u64 & 0xffff_ffff]
        });
        for (mode, at) in [("lo", 0), ("hi", 16)] {
            check(&format!("dp2a.{mode}.{}.{} r, r, r, r", name(sa), name(sb)), &inputs, |x| {
                let sum: i64 =
                    (0..2).map(|i| value(x[0], 16 * i, 16, sa) * value(x[1], at + 8 * i, 8, sb)).sum();
                vec![(sum + x[2] as i64) as u64 & 0xffff_ffff]
            });
        }
    }
}

#[test]
fn logic() {
    for (width, letter) in [(16, 'h'), (32, 'r'), (64, 'd')] {
        let ones = if width == 64 { u64::MAX } else { (1 << width) - 1 };
        let l = letter;
        let two = integer_tuples(2, width);
        check(&format!("and.b{width} {l}, {l}, {l}"), &two, |x| vec![x[0] & x[1]]);
        check(&format!("or.b{width} {l}, {l}, {l}"), &two, |x| vec![x[0] | x[1]]);
        check(&format!("xor.b{width} {l}, {l}, {l}"), &two, |x| vec![x[0] ^ x[1]]);
        let one = integer_tuples(1, width);
        check(&format!("not.b{width} {l}, {l}"), &one, |x| vec![ones - x[0]]);
        check(&format!("cnot.b{width} {l}, {l}"), &one, |x| vec![u64::from(x[0] == 0)]);
    }
    let bits: Vec<_> = (0..4).map(|i| vec![i & 1, i >> 1]).collect();
    check("and.pred p, p, p", &bits, |x| vec![x[0] & x[1]]);
    check("or.pred p, p, p", &bits, |x| vec![x[0] | x[1]]);
    check("xor.pred p, p, p", &bits, |x| vec![x[0] ^ x[1]]);
    check("and.pred p, !p, p", &bits, |x| vec![(1 - x[0]) & x[1]]);
    check("or.pred p, p, !p", &bits, |x| vec![x[0] | (1 - x[1])]);
    check("not.pred p, p", &[vec![0], vec![1]], |x| vec![1 - x[0]]);
}

#[test]
fn shifts() {
    for (width, letter) in [(16u32, 'h'), (32, 'r'), (64, 'd')] {
        let ones = if width == 64 { u64::MAX } else { (1 << width) - 1 };
        let mut inputs = integer_tuples(2, width);
        let amounts = [0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 0x8000_0000, 0xffff_ffff];
        inputs.iter_mut().enumerate().for_each(|(i, x)| {
            if i % 3 != 0 {
                x[1] = amounts[i % 16];
            }
            x[1] &= 0xffff_ffff;
        });
        let l = letter;
        check(&format!("shl.b{width} {l}, {l}, r"), &inputs, |x| {
            vec![if x[1] >= 64 { 0 } else { ((u128::from(x[0]) << x[1]) as u64) & ones }]
        });
        for t in ["b", "u"] {
            check(&format!("shr.{t}{width} {l}, {l}, r"), &inputs, |x| {
                vec![if x[1] >= 64 { 0 } else { x[0] >> x[1] }]
            });
        }
        check(&format!("shr.s{width} {l}, {l}, r"), &inputs, |x| {
            let t = Int { name: "", letter, width, signed: true };
            vec![t.bits(t.value(x[0]) >> x[1].min(100))]
        });
    }
    for (name, left, wrap) in
        [("l.wrap", true, true), ("l.clamp", true, false), ("r.wrap", false, true), ("r.clamp", false, false)]
    {
        check(&format!("shf.{name}.b32 r, r, r, r"), &integer_tuples(3, 32), |x| {
            let n = if wrap { x[2] & 31 } else { x[2].min(32) };
            let both = u128::from(x[1]) << 32 | u128::from(x[0]);
            vec![(if left { both << n >> 32 } else { both >> n }) as u64 & 0xffff_ffff]
        });
    }
}

#[test]
fn fields() {
    for (name, width, letter, signed) in
        [("u32", 32u64, 'r', false), ("s32", 32, 'r', true), ("u64", 64, 'd', false), ("s64", 64, 'd', true)]
    {
        let places = [0, 1, 5, 16, 30, 31, 32, 33, 62, 63, 64, 65, 128, 255, 256, 257, 0xffff_ffff];
        let mut inputs = tuples(3, &places, |r| r.next() & 0xff);
        let mut r = Random(1);
        for (i, x) in inputs.iter_mut().enumerate() {
            x[0] = if i % 5 == 0 { u64::MAX } else { r.next() } >> (64 - width);
        }
        check(&format!("bfe.{name} {letter}, {letter}, r, r"), &inputs, |x| {
            let (a, pos, len) = (x[0], x[1] & 0xff, x[2] & 0xff);
            let fill = if signed && len != 0 { a >> (pos + len - 1).min(width - 1) & 1 } else { 0 };
            let bit = |i| if i < len && pos + i < width { a >> (pos + i) & 1 } else { fill };
            vec![(0..width).map(|i| bit(i) << i).sum()]
        });
        let mut inputs: Vec<_> = inputs.iter().map(|x| vec![x[0], 0, x[1], x[2]]).collect();
        inputs.iter_mut().for_each(|x| x[1] = r.next() >> (64 - width));
        if !signed {
            check(&format!("bfi.b{width} {letter}, {letter}, {letter}, r, r"), &inputs, |x| {
                let (pos, len) = (x[2] & 0xff, x[3] & 0xff);
                let bit =
                    |i: u64| if i >= pos && i < pos + len { x[0] >> (i - pos) & 1 } else { x[1] >> i & 1 };
                vec![(0..width).map(|i| bit(i) << i).sum()]
            });
        }
    }
}

#[test]
fn counts() {
    for (width, letter) in [(32u32, 'r'), (64, 'd')] {
        let inputs = integer_tuples(1, width);
        let bit = |x: u64, i: u32| x >> i & 1;
        check(&format!("popc.b{width} r, {letter}"), &inputs, |x| {
            vec![(0..width).map(|i| bit(x[0], i)).sum()]
        });
        check(&format!("brev.b{width} {letter}, {letter}"), &inputs, |x| {
            vec![(0..width).map(|i| bit(x[0], i) << (width - 1 - i)).sum()]
        });
        let highest = |x: u64| (0..width).rev().find(|&i| bit(x, i) != 0);
        check(&format!("clz.b{width} r, {letter}"), &inputs, |x| {
            vec![highest(x[0]).map_or(width, |i| width - 1 - i).into()]
        });
        for signed in [false, true] {
            let t = if signed { "s" } else { "u" };
            let find = |x: u64| highest(if signed && bit(x, width - 1) != 0 { !x } else { x });
            check(&format!("bfind.{t}{width} r, {letter}"), &inputs, |x| {
                vec![find(x[0]).unwrap_or(u32::MAX).into()]
            });
            check(&format!("bfind.shiftamt.{t}{width} r, {letter}"), &inputs, |x| {
                vec![find(x[0]).map_or(u32::MAX, |i| width - 1 - i).into()]
            });
        }
    }
}

#[test]
fn permutations() {
    let bytes = |x: &[u64]| -> [u8; 8] {
        let (a, b) = ((x[0] as u32).to_le_bytes(), (x[1] as u32).to_le_bytes());
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
    };
    let mut inputs = integer_tuples(3, 32);
    // Every nibble in every place.
    inputs.extend((0..64).map(|i| vec![0x7f80_01fe, 0x8011_ff00, (i & 15) << (4 * (i >> 4))]));
    check("prmt.b32 r, r, r, r", &inputs, |x| {
        let s = bytes(x);
        let byte = |i: u32| {
            let n = x[2] >> (4 * i) & 15;
            let b = s[(n & 7) as usize];
            if n < 8 {
                b
            } else if b & 0x80 != 0 {
                0xff
            } else {
                0
            }
        };
        vec![u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]).into()]
    });
    // The manual's table: source bytes from the highest to the lowest, for controls 0 to 3.
    let table: [(&str, [[usize; 4]; 4]); 6] = [
        ("f4e", [[3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2], [6, 5, 4, 3]]),
        ("b4e", [[5, 6, 7, 0], [6, 7, 0, 1], [7, 0, 1, 2], [0, 1, 2, 3]]),
        ("rc8", [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]),
        ("ecl", [[3, 2, 1, 0], [3, 2, 1, 1], [3, 2, 2, 2], [3, 3, 3, 3]]),
        ("ecr", [[0, 0, 0, 0], [1, 1, 1, 0], [2, 2, 1, 0], [3, 2, 1, 0]]),
        ("rc16", [[1, 0, 1, 0], [3, 2, 3, 2], [1, 0, 1, 0], [3, 2, 3, 2]]),
    ];
    for (mode, rows) in table {
        check(&format!("prmt.b32.{mode} r, r, r, r"), &inputs, |x| {
            let (s, row) = (bytes(x), rows[(x[2] & 3) as usize]);
            vec![u32::from_be_bytes(row.map(|i| s[i])).into()]
        });
    }
}

#[test]
fn every_table_of_three_inputs() {
    let mut inputs = integer_tuples(3, 32);
    inputs.truncate(64);
    inputs.push(vec![0xf0f0_f0f0, 0xcccc_cccc, 0xaaaa_aaaa]);
    for table in 0..256u64 {
        let f = |x: &[u64]| {
            let bit = |i: u32| table >> ((x[0] >> i & 1) << 2 | (x[1] >> i & 1) << 1 | x[2] >> i & 1) & 1;
            (0..32).map(|i| bit(i) << i).sum::<u64>()
        };
        check(&format!("lop3.b32 r, r, r, r, {table}"), &inputs, |x| vec![f(x)]);
        if table % 17 == 0 {
            let mut with_q = inputs.clone();
            with_q.iter_mut().enumerate().for_each(|(i, x)| x.push(i as u64 % 2));
            check(&format!("lop3.or.b32 r|p, r, r, r, {table}, p"), &with_q, |x| {
                vec![f(x), u64::from(f(x) != 0) | x[3]]
            });
            check(&format!("lop3.and.b32 r|p, r, r, r, {table}, !p"), &with_q, |x| {
                vec![f(x), u64::from(f(x) != 0) & (1 - x[3])]
            });
        }
    }
    assert!(refused("lop3.b32 r, r, r, r, 256") && refused("lop3.b32 r, r, r, r, r"));
}

#[test]
fn rare_ones() {
    let mut inputs = integer_tuples(3, 32);
    for (i, x) in inputs.iter_mut().enumerate() {
        x[1] %= 40;
        x[2] = (x[2] % 9).wrapping_sub(4) & 0xffff_ffff;
        if i % 7 == 0 {
            x[0] = u64::from(u32::MAX);
        }
    }
    check("fns.b32 r, r, r, r", &inputs, |x| {
        let (mask, base, offset) = (x[0], x[1] as i64, x[2] as u32 as i32);
        if base > 31 {
            return vec![0xffff_ffff];
        }
        let set: Vec<i64> = match offset {
            0 => (base..=base).filter(|&i| mask >> i & 1 != 0).collect(),
            1.. => (base..32).filter(|&i| mask >> i & 1 != 0).collect(),
            _ => (0..=base).rev().filter(|&i| mask >> i & 1 != 0).collect(),
        };
        let n = (i64::from(offset).abs() - 1).max(0) as usize;
        vec![set.get(n).map_or(0xffff_ffff, |&i| i as u64)]
    });
    let mut two = integer_tuples(2, 32);
    two.iter_mut().enumerate().for_each(|(i, x)| {
        if i % 2 == 0 {
            x[1] %= 70;
        }
    });
    for (mode, clamp) in [("clamp", true), ("wrap", false)] {
        check(&format!("bmsk.{mode}.b32 r, r, r"), &two, |x| {
            let (a1, b1) = (x[0] & 31, x[1] & 31);
            if clamp && x[0] >= 32 {
                return vec![0];
            }
            let end = if clamp && x[1] >= 32 { 32 } else { (a1 + b1).min(32) };
            vec![(a1..end).map(|i| 1 << i).sum()]
        });
        for signed in [false, true] {
            let t = if signed { "s32" } else { "u32" };
            check(&format!("szext.{mode}.{t} r, r, r"), &two, |x| {
                let n = x[1] & 31;
                if clamp && x[1] >= 32 {
                    return vec![x[0]];
                }
                let low = x[0] & ((1 << n) - 1);
                let negative = signed && n > 0 && low >> (n - 1) != 0;
                vec![if negative { (low | u64::MAX << n) & 0xffff_ffff } else { low }]
            });
        }
    }
}

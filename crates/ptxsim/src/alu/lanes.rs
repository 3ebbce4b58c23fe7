//! From a function of one lane to an operation on a warp.
//!
//! An operation is written as a closure over lane values, for example `|a: i32, b: i32| a.wrapping_add(b)`. The types
//! of its arguments say which register file each operand lives in and how its bits are read; [`Isa::map2`] and its
//! sisters make a [`Form`] of it. The loop over lanes is compiled twice, for the base instruction set and for AVX2;
//! which one runs is chosen when the kernel is loaded.

use crate::exec::regs::{
    File, Form, LANES, Literal, Mask, Op, OpFn, Regs, Row, Source, Sync, Taint, Trouble, WideRow,
};
use crate::options::Options;
use crate::stats::Class;
use std::marker::PhantomData;

/// What an operation returns.
pub(crate) type Outcome = Result<(), Box<Trouble>>;

/// Instruction set of the operations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Isa {
    /// True only if the CPU was found to have what `vector` below is compiled for.
    vector: bool,
}

impl Isa {
    /// The best one that the CPU has and the options allow.
    pub(crate) fn new(options: &Options) -> Self {
        #[cfg(target_arch = "x86_64")]
        let vector = options.simd
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2");
        #[cfg(not(target_arch = "x86_64"))]
        let vector = {
            let _ = options;
            false
        };
        Self { vector }
    }

    /// The function of an operation.
    pub(crate) fn op<B: Body>(self, body: B) -> OpFn {
        let _ = body;
        #[cfg(target_arch = "x86_64")]
        if self.vector {
            return enter::<B>;
        }
        plain::<B>
    }
}

/// Compiles operations for the base instruction set only: for rare ones and for those that are scalar anyway. Half the
/// build time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Once;

impl Once {
    /// The function of an operation.
    pub(crate) fn op<B: Body>(self, body: B) -> OpFn {
        let _ = body;
        plain::<B>
    }
}

/// An operation on a warp. It has no state, so a plain function pointer stands for it: `Copy` and zero-sized, which
/// `again` relies on.
pub(crate) trait Body: Copy + 'static {
    /// Runs it. Must be `#[inline(always)]`, to be compiled for the instruction set of its caller.
    fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome;
}

/// Another value of a type that has no state.
#[inline(always)]
fn again<B: Body>() -> B {
    const { assert!(size_of::<B>() == 0, "an operation has no state") };
    // SAFETY: B is zero-sized, so any aligned pointer can be read; it is `Copy`, and one was there in `Isa::op` or `Once::op`, which
    // alone hand out the functions that call this.
    unsafe { std::ptr::NonNull::<B>::dangling().read() }
}

fn plain<B: Body>(regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
    again::<B>().run(regs, op, mask)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn vector<B: Body>(regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
    again::<B>().run(regs, op, mask)
}

#[cfg(target_arch = "x86_64")]
fn enter<B: Body>(regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
    // SAFETY: `Isa::op` hands this out only if `Isa::new` found the CPU to have these features.
    unsafe { vector::<B>(regs, op, mask) }
}

/// Bit of `Op::imm` from which on the negation of predicate sources is kept: `!p` as source i is bit `NEGATED + i`.
pub(crate) const NEGATED: u32 = 56;

/// The value of a predicate source, with its `!`.
#[inline(always)]
pub(crate) fn predicate(regs: &Regs, op: &Op, i: usize) -> Mask {
    let flip = if op.imm >> (NEGATED as usize + i) & 1 != 0 { Mask::MAX } else { 0 };
    regs.preds[op.s[i] as usize] ^ flip
}

/// Writes a predicate in the lanes of a mask.
#[inline(always)]
pub(crate) fn set_predicate(regs: &mut Regs, row: u16, value: Mask, mask: Mask) {
    let p = &mut regs.preds[row as usize];
    *p = *p & !mask | value & mask;
}

/// Writes a row in the lanes of a mask.
#[inline(always)]
pub(crate) fn set_row<T: Copy>(row: &mut [T; LANES], value: &[T; LANES], mask: Mask) {
    if mask == Mask::MAX {
        *row = *value;
    } else {
        blend(row, value, mask);
    }
}

/// One copy for all operations, for the sake of build time.
#[inline(never)]
fn blend<T: Copy>(row: &mut [T; LANES], value: &[T; LANES], mask: Mask) {
    for lane in 0..LANES {
        row[lane] = if mask & 1 << lane != 0 { value[lane] } else { row[lane] };
    }
}

/// All lanes, but the compiler sees only that they are 0 or 32: it makes one vector loop, without a rest, and does not
/// write the loop out 32 times, which over all operations is most of the build.
#[inline(always)]
pub(crate) fn lanes() -> usize {
    (std::hint::black_box(1) & 1) * LANES
}

/// 32 bytes that are 0 or 1, as a mask.
#[inline(always)]
pub(crate) fn gather_bits(bytes: &[u8; LANES]) -> Mask {
    let mut mask = 0;
    for (i, chunk) in bytes.chunks_exact(8).enumerate() {
        let word = u64::from_le_bytes([
            chunk[0], chunk[1], chunk[2], chunk[3], chunk[4], chunk[5], chunk[6], chunk[7],
        ]);
        // Bit 0 of byte i moves to bit 56 + i.
        mask |= ((word.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u32) << (8 * i);
    }
    mask
}

/// How the value of a lane is kept in registers.
pub(crate) trait Lane: Copy + 'static {
    /// Its register file.
    const FILE: File;
    /// What a literal operand means.
    const LITERAL: Literal;
    /// A source operand of a warp.
    type View<'a>: Copy;
    /// A lane's result as it is stored.
    type Cell: Copy + Default;
    /// Source operand `i`.
    fn view<'a>(regs: &'a Regs, op: &Op, i: usize) -> Self::View<'a>;
    /// One lane of a source operand.
    fn at(view: Self::View<'_>, lane: usize) -> Self;
    /// The bits to store.
    fn cell(self) -> Self::Cell;
    /// Writes destination operand `i`.
    fn store(regs: &mut Regs, op: &Op, i: usize, cells: &[Self::Cell; LANES], mask: Mask);
}

macro_rules! lane {
    ($($t:ty, $file:ident, $rows:ident, $row:ty, $cell:ty, $literal:ident, |$x:ident| $read:expr, |$v:ident| $write:expr;)*) => {$(
        impl Lane for $t {
            const FILE: File = File::$file;
            const LITERAL: Literal = Literal::$literal;
            type View<'a> = &'a $row;
            type Cell = $cell;
            #[inline(always)]
            fn view<'a>(regs: &'a Regs, op: &Op, i: usize) -> &'a $row {
                &regs.$rows[op.s[i] as usize]
            }
            #[inline(always)]
            fn at(view: &$row, lane: usize) -> Self {
                let $x = view[lane];
                $read
            }
            #[inline(always)]
            fn cell(self) -> $cell {
                let $v = self;
                $write
            }
            #[inline(always)]
            fn store(regs: &mut Regs, op: &Op, i: usize, cells: &[$cell; LANES], mask: Mask) {
                set_row(&mut regs.$rows[op.d[i] as usize], cells, mask);
            }
        }
    )*};
}

/// f16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct F16(pub(crate) u16);
/// bf16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BF16(pub(crate) u16);

lane! {
    u8, Narrow, narrow, Row, u32, Bits, |x| x as u8, |v| u32::from(v);
    i8, Narrow, narrow, Row, u32, Bits, |x| x as i8, |v| u32::from(v as u8);
    u16, Narrow, narrow, Row, u32, Bits, |x| x as u16, |v| u32::from(v);
    i16, Narrow, narrow, Row, u32, Bits, |x| x as i16, |v| u32::from(v as u16);
    u32, Narrow, narrow, Row, u32, Bits, |x| x, |v| v;
    i32, Narrow, narrow, Row, u32, Bits, |x| x as i32, |v| v as u32;
    u64, Wide, wide, WideRow, u64, Bits, |x| x, |v| v;
    i64, Wide, wide, WideRow, u64, Bits, |x| x as i64, |v| v as u64;
    f32, Narrow, narrow, Row, u32, F32, |x| f32::from_bits(x), |v| v.to_bits();
    f64, Wide, wide, WideRow, u64, F64, |x| f64::from_bits(x), |v| v.to_bits();
    F16, Narrow, narrow, Row, u32, F16, |x| F16(x as u16), |v| u32::from(v.0);
    BF16, Narrow, narrow, Row, u32, BF16, |x| BF16(x as u16), |v| u32::from(v.0);
}

impl Lane for bool {
    const FILE: File = File::Pred;
    const LITERAL: Literal = Literal::Bits;
    type View<'a> = Mask;
    type Cell = u8;
    #[inline(always)]
    fn view(regs: &Regs, op: &Op, i: usize) -> Mask {
        predicate(regs, op, i)
    }
    #[inline(always)]
    fn at(view: Mask, lane: usize) -> Self {
        view >> lane & 1 != 0
    }
    #[inline(always)]
    fn cell(self) -> u8 {
        u8::from(self)
    }
    #[inline(always)]
    fn store(regs: &mut Regs, op: &Op, i: usize, cells: &[u8; LANES], mask: Mask) {
        set_predicate(regs, op.d[i], gather_bits(cells), mask);
    }
}

/// What a lane function returns: a value, or two for two destinations.
pub(crate) trait Out: 'static {
    /// Results of all lanes.
    type Cells;
    /// Register files of the destinations.
    fn files() -> Vec<File>;
    /// No results yet.
    fn empty() -> Self::Cells;
    /// Sets a lane's result.
    fn put(cells: &mut Self::Cells, lane: usize, value: Self);
    /// Writes the destinations.
    fn store(regs: &mut Regs, op: &Op, cells: &Self::Cells, mask: Mask);
}

impl<T: Lane> Out for T {
    type Cells = [T::Cell; LANES];
    fn files() -> Vec<File> {
        vec![T::FILE]
    }
    #[inline(always)]
    fn empty() -> Self::Cells {
        [T::Cell::default(); LANES]
    }
    #[inline(always)]
    fn put(cells: &mut Self::Cells, lane: usize, value: Self) {
        cells[lane] = value.cell();
    }
    #[inline(always)]
    fn store(regs: &mut Regs, op: &Op, cells: &Self::Cells, mask: Mask) {
        T::store(regs, op, 0, cells, mask);
    }
}

impl<T: Lane, U: Lane> Out for (T, U) {
    type Cells = ([T::Cell; LANES], [U::Cell; LANES]);
    fn files() -> Vec<File> {
        vec![T::FILE, U::FILE]
    }
    #[inline(always)]
    fn empty() -> Self::Cells {
        ([T::Cell::default(); LANES], [U::Cell::default(); LANES])
    }
    #[inline(always)]
    fn put(cells: &mut Self::Cells, lane: usize, value: Self) {
        cells.0[lane] = value.0.cell();
        cells.1[lane] = value.1.cell();
    }
    #[inline(always)]
    fn store(regs: &mut Regs, op: &Op, cells: &Self::Cells, mask: Mask) {
        T::store(regs, op, 0, &cells.0, mask);
        U::store(regs, op, 1, &cells.1, mask);
    }
}

/// A source of a lane type.
pub(crate) fn source<T: Lane>() -> Source {
    Source { file: T::FILE, literal: T::LITERAL }
}

/// A form with nothing special about it; its class is the caller's to set.
pub(crate) fn simple(run: OpFn, destinations: Vec<File>, sources: Vec<Source>) -> Form {
    Form {
        run,
        destinations,
        sources,
        imm: 0,
        class: Class::Other,
        taint: Taint::Lanes,
        aligned: false,
        sync: Sync::None,
    }
}

macro_rules! arity {
    ($map:ident, $map_imm:ident, $Map:ident, $MapImm:ident, $n:tt, $($T:ident $v:ident $i:tt),*) => {
        struct $Map<O, $($T,)* F>(F, PhantomData<fn() -> (O, $($T),*)>);
        impl<O, $($T,)* F: Copy> Clone for $Map<O, $($T,)* F> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<O, $($T,)* F: Copy> Copy for $Map<O, $($T,)* F> {}
        impl<O: Out, $($T: Lane,)* F: Fn($($T),*) -> O + Copy + 'static> Body for $Map<O, $($T,)* F> {
            #[inline(always)]
            fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
                let mut cells = O::empty();
                $(let $v = $T::view(regs, op, $i);)*
                for lane in 0..lanes() {
                    O::put(&mut cells, lane, (self.0)($($T::at($v, lane)),*));
                }
                O::store(regs, op, &cells, mask);
                Ok(())
            }
        }
        struct $MapImm<O, $($T,)* F>(F, PhantomData<fn() -> (O, $($T),*)>);
        impl<O, $($T,)* F: Copy> Clone for $MapImm<O, $($T,)* F> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<O, $($T,)* F: Copy> Copy for $MapImm<O, $($T,)* F> {}
        impl<O: Out, $($T: Lane,)* F: Fn(u64, $($T),*) -> O + Copy + 'static> Body for $MapImm<O, $($T,)* F> {
            #[inline(always)]
            fn run(self, regs: &mut Regs, op: &Op, mask: Mask) -> Outcome {
                let mut cells = O::empty();
                let imm = op.imm;
                $(let $v = $T::view(regs, op, $i);)*
                for lane in 0..lanes() {
                    O::put(&mut cells, lane, (self.0)(imm, $($T::at($v, lane)),*));
                }
                O::store(regs, op, &cells, mask);
                Ok(())
            }
        }
        arity!(in Isa, $map, $map_imm, $Map, $MapImm, $n, $($T $v $i),*);
        arity!(in Once, $map, $map_imm, $Map, $MapImm, $n, $($T $v $i),*);
    };
    // No rare operation has four sources.
    (in Once, $map:ident, $map_imm:ident, $Map:ident, $MapImm:ident, "four", $($rest:tt)*) => {};
    (in $Isa:ident, $map:ident, $map_imm:ident, $Map:ident, $MapImm:ident, $n:tt, $($T:ident $v:ident $i:tt),*) => {
        impl $Isa {
            #[doc = concat!("A function of ", $n, " sources in every lane.")]
            pub(crate) fn $map<O: Out, $($T: Lane,)* F>(self, f: F) -> Form
            where
                F: Fn($($T),*) -> O + Copy + 'static,
            {
                simple(self.op($Map(f, PhantomData)), O::files(), vec![$(source::<$T>()),*])
            }
            #[doc = concat!("A function of a constant and ", $n, " sources in every lane.")]
            pub(crate) fn $map_imm<O: Out, $($T: Lane,)* F>(self, imm: u64, f: F) -> Form
            where
                F: Fn(u64, $($T),*) -> O + Copy + 'static,
            {
                let run = self.op($MapImm(f, PhantomData));
                Form { imm, ..simple(run, O::files(), vec![$(source::<$T>()),*]) }
            }
        }
    };
}

arity!(map1, map1_imm, Map1, Map1Imm, "one", A a 0);
arity!(map2, map2_imm, Map2, Map2Imm, "two", A a 0, B b 1);
arity!(map3, map3_imm, Map3, Map3Imm, "three", A a 0, B b 1, C c 2);
arity!(map4, map4_imm, Map4, Map4Imm, "four", A a 0, B b 1, C c 2, D d 3);

/// Chooses by an instruction's type: `$T` is the lane type of the matching row. `None` for another type.
macro_rules! by_type {
    ($ty:expr, [$($($v:ident)|+ : $t:ty),* $(,)?], $T:ident => $e:expr) => {
        match $ty {
            $($(crate::ptx::ast::Type::$v)|+ => {
                type $T = $t;
                Some($e)
            })*
            _ => None,
        }
    };
}
pub(crate) use by_type;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_becomes_its_bit() {
        for mask in [0u32, 1, 0x8000_0000, 0xdead_beef, u32::MAX, 0x0102_0408] {
            let bytes = std::array::from_fn(|i| (mask >> i & 1) as u8);
            assert_eq!(gather_bits(&bytes), mask);
        }
    }

    #[test]
    fn lanes_outside_the_mask_keep_their_value() {
        let mut row = [7u32; LANES];
        set_row(&mut row, &[9; LANES], 0x8000_0001);
        assert!(row.iter().enumerate().all(|(i, &x)| x == if i % 31 == 0 { 9 } else { 7 }));
    }
}

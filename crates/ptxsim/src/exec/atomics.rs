//! `atom` and `red`.

use super::access::{by_space, shared_place};
use super::gang::Context;
use super::global;
use super::order;
use super::regs::{LANES, Mask, WideRow};
use super::rows::{Done, addresses, check_address_taint, get, put, set_taint, taint_of, trouble};
use super::shared::{Shared, Who};
use super::warp::{Warp, try_each};
use crate::fault::FaultKind;
use crate::memory::Allocation;
use crate::program::{Atomic, AtomicKind, Strength, Where};
use crate::ptx::ast::Type;
use crate::stats::Counts;
use half::{bf16, f16};
use std::sync::atomic::Ordering::Relaxed;

/// What the memory holds afterwards.
pub(super) fn apply(kind: AtomicKind, ty: Type, old: u64, x: u64, y: u64) -> u64 {
    let pairs = |f: &dyn Fn(u16, u16) -> u16| {
        let (low, high) = (f(old as u16, x as u16), f((old >> 16) as u16, (x >> 16) as u16));
        u64::from(high) << 16 | u64::from(low)
    };
    let h = |f: &dyn Fn(f16, f16) -> f16, a: u16, b: u16| f(f16::from_bits(a), f16::from_bits(b)).to_bits();
    let b =
        |f: &dyn Fn(bf16, bf16) -> bf16, a: u16, b: u16| f(bf16::from_bits(a), bf16::from_bits(b)).to_bits();
    let (f_old, f_x) = (f32::from_bits(old as u32), f32::from_bits(x as u32));
    match (kind, ty) {
        (AtomicKind::Add, Type::F32) => (f_old + f_x).to_bits().into(),
        (AtomicKind::Add, Type::F64) => (f64::from_bits(old) + f64::from_bits(x)).to_bits(),
        (AtomicKind::Add, Type::F16) => h(&|a, b| a + b, old as u16, x as u16).into(),
        (AtomicKind::Add, Type::BF16) => b(&|a, b| a + b, old as u16, x as u16).into(),
        (AtomicKind::Add, Type::F16x2) => pairs(&|p, q| h(&|a, b| a + b, p, q)),
        (AtomicKind::Add, Type::BF16x2) => pairs(&|p, q| b(&|a, b| a + b, p, q)),
        (AtomicKind::Min, Type::F32) => f_old.min(f_x).to_bits().into(),
        (AtomicKind::Max, Type::F32) => f_old.max(f_x).to_bits().into(),
        (AtomicKind::Min, Type::F16) => h(&f16::min, old as u16, x as u16).into(),
        (AtomicKind::Max, Type::F16) => h(&f16::max, old as u16, x as u16).into(),
        (AtomicKind::Min, Type::BF16) => b(&bf16::min, old as u16, x as u16).into(),
        (AtomicKind::Max, Type::BF16) => b(&bf16::max, old as u16, x as u16).into(),
        (AtomicKind::Min, Type::F16x2) => pairs(&|p, q| h(&f16::min, p, q)),
        (AtomicKind::Max, Type::F16x2) => pairs(&|p, q| h(&f16::max, p, q)),
        (AtomicKind::Min, Type::BF16x2) => pairs(&|p, q| b(&bf16::min, p, q)),
        (AtomicKind::Max, Type::BF16x2) => pairs(&|p, q| b(&bf16::max, p, q)),
        (AtomicKind::Add, _) => old.wrapping_add(x),
        (AtomicKind::Min | AtomicKind::Max, _) => {
            let smaller = match ty {
                Type::S32 => (x as i32) < old as i32,
                Type::S64 => (x as i64) < old as i64,
                Type::U64 => x < old,
                _ => (x as u32) < old as u32,
            };
            if smaller == (kind == AtomicKind::Min) { x } else { old }
        }
        (AtomicKind::And, _) => old & x,
        (AtomicKind::Or, _) => old | x,
        (AtomicKind::Xor, _) => old ^ x,
        (AtomicKind::Exchange, _) => x,
        (AtomicKind::CompareSwap, _) => {
            let low = u64::MAX >> (64 - ty.bits());
            if old & low == x & low { y } else { old }
        }
        (AtomicKind::Increment, _) => {
            if old as u32 >= x as u32 {
                0
            } else {
                old + 1
            }
        }
        (AtomicKind::Decrement, _) => {
            if old as u32 == 0 || old as u32 > x as u32 {
                x
            } else {
                old - 1
            }
        }
    }
}

/// In global memory, where other blocks run at the same time. Returns what was there.
pub(super) fn update(m: &Allocation, offset: u64, ty: Type, f: impl Fn(u64) -> u64) -> u64 {
    match ty.bytes() {
        2 => {
            let f = |v: u16| Some(f(v.into()) as u16);
            m.half(offset).fetch_update(Relaxed, Relaxed, f).unwrap_or_default().into()
        }
        4 => {
            let f = |v: u32| Some(f(v.into()) as u32);
            m.word(offset).fetch_update(Relaxed, Relaxed, f).unwrap_or_default().into()
        }
        _ => m.double(offset).fetch_update(Relaxed, Relaxed, |v| Some(f(v))).unwrap_or_default(),
    }
}

/// `atom`, `red`: lanes one after the other.
pub(super) fn atomic(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &mut [Shared],
    counts: &mut Counts,
    mask: Mask,
    a: &Atomic,
) -> Done {
    check_address_taint(warp, a.address.row, mask)?;
    let at = addresses(warp, a.address);
    let n = a.elements as usize;
    let sources: Vec<WideRow> = a.sources.iter().map(|s| get(warp, *s)).collect();
    let tainted = a.sources.iter().fold(0, |t, s| t | taint_of(warp, *s)) & mask;
    if tainted != 0 {
        return trouble(
            FaultKind::Uninitialized,
            Warp::first(tainted),
            "the operand of an atomic depends on memory that was never written",
        );
    }
    let mut old = vec![[0u64; LANES]; n];
    let bytes = a.ty.bytes();
    let total = bytes * a.elements;
    let spaces = if a.space == Where::Generic {
        by_space(&at, mask)
    } else {
        [(a.space, mask), (Where::Global, 0), (Where::Global, 0), (Where::Global, 0)]
    };
    for (space, lanes) in spaces {
        if lanes == 0 {
            continue;
        }
        match space {
            Where::Global | Where::Generic => {
                global::check_alignment(&at, lanes, total)?;
                if cx.options.counters {
                    global::count(counts, &at, lanes, total);
                }
                try_each(lanes, |l| {
                    let m = match global::find(cx.view, &mut warp.last_allocation, at[l]) {
                        Some(m) if m.holds(at[l] - m.base(), total.into()) && !m.read_only() => m,
                        _ => return Err(global::outside(cx.view, at[l], total, l)),
                    };
                    let offset = at[l] - m.base();
                    if cx.options.uninitialized_global != crate::options::Uninitialized::Off
                        && a.kind != AtomicKind::Exchange
                        && !m.is_written(offset, total.into())
                    {
                        return trouble(
                            FaultKind::Uninitialized,
                            l,
                            format!("{total} bytes at {:#x} were never written", at[l]),
                        );
                    }
                    for (j, old) in old.iter_mut().enumerate() {
                        let (x, y) = (sources[j][l], sources.get(n + j).map_or(0, |s| s[l]));
                        let place = offset + j as u64 * u64::from(bytes);
                        old[l] = update(m, place, a.ty, |o| apply(a.kind, a.ty, o, x, y));
                    }
                    m.mark(offset, total.into());
                    Ok(())
                })?;
            }
            Where::Shared | Where::Cluster => {
                let (block, clocks) = (warp.block, &warp.clocks);
                try_each(lanes, |l| {
                    let (owner, offset) = shared_place(cx, shared, block, at[l], total, l)?;
                    let memory = &mut shared[owner];
                    let who = Who { id: warp.id, clocks, sync: warp.sync, lane: l, several: false };
                    if cx.shared_checks {
                        memory.check_write(
                            offset,
                            total as usize,
                            who,
                            cx.options,
                            false,
                            Strength::Strong,
                        )?;
                        if cx.options.uninitialized_shared != crate::options::Uninitialized::Off
                            && a.kind != AtomicKind::Exchange
                            && !memory.is_written(offset, total as usize)
                        {
                            return trouble(
                                FaultKind::Uninitialized,
                                l,
                                format!("{total} bytes at shared offset {offset} were never written"),
                            );
                        }
                        memory.mark(offset, total as usize);
                    }
                    for (j, old) in old.iter_mut().enumerate() {
                        let (x, y) = (sources[j][l], sources.get(n + j).map_or(0, |s| s[l]));
                        let place = offset + j * bytes as usize;
                        old[l] = memory.load(place, bytes);
                        memory.store(place, bytes, apply(a.kind, a.ty, old[l], x, y));
                    }
                    Ok(())
                })?;
                counts.shared_requests += 1;
                counts.shared_wavefronts += u64::from(lanes.count_ones());
            }
            _ => {
                return trouble(
                    FaultKind::OutOfBounds,
                    Warp::first(lanes),
                    "atomics need global or shared memory",
                );
            }
        }
    }
    order::seen(cx, warp, shared, mask, &at, a.space, a.acquire);
    order::shown(cx, warp, shared, mask, &at, a.space, a.release);
    if let Some(rows) = &a.old {
        for (row, old) in rows.iter().zip(&old) {
            put(warp, *row, old, mask);
            set_taint(warp, *row, 0, mask);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_follow_their_definitions() {
        use AtomicKind::*;
        let u = |k, old, x| apply(k, Type::U32, old, x, 0);
        assert_eq!(u(Increment, 3, 3), 0);
        assert_eq!(u(Increment, 2, 3), 3);
        assert_eq!(u(Decrement, 0, 7), 7);
        assert_eq!(u(Decrement, 9, 7), 7);
        assert_eq!(u(Decrement, 5, 7), 4);
        assert_eq!(apply(Min, Type::S32, 5, (-3i32) as u32 as u64, 0), (-3i32) as u32 as u64);
        assert_eq!(u(Max, 5, 0xffff_fffd), 0xffff_fffd);
        assert_eq!(apply(CompareSwap, Type::B32, 5, 5, 9), 9);
        assert_eq!(apply(CompareSwap, Type::B32, 5, 4, 9), 5);
        assert_eq!(
            apply(Add, Type::F32, 1f32.to_bits().into(), 2f32.to_bits().into(), 0),
            u64::from(3f32.to_bits())
        );
        let two = |a: f32, b: f32| {
            u64::from(f16::from_f32(b).to_bits()) << 16 | u64::from(f16::from_f32(a).to_bits())
        };
        assert_eq!(apply(Add, Type::F16x2, two(1.0, 2.0), two(0.5, -4.0), 0), two(1.5, -2.0));
    }
}

//! Loads and stores of all spaces.

use super::gang::Context;
use super::global;
use super::order;
use super::regs::{LANES, Mask, WideRow};
use super::rows::{Done, addresses, check_address_taint, get, little, put, set_taint, taint_of, trouble};
use super::shared::{Shared, Who, wavefronts};
use super::warp::{Warp, each, try_each};
use crate::fault::FaultKind;
use crate::memory::{LOCAL_BASE, PARAM_BASE, SHARED_BASE, SHARED_STRIDE, WINDOW};
use crate::options::Uninitialized;
use crate::program::{Access, Strength, Where};
use crate::stats::Counts;

/// Lanes by the space that their generic address lies in.
pub(super) fn by_space(addresses: &WideRow, mask: Mask) -> [(Where, Mask); 4] {
    let mut found = [(Where::Global, 0), (Where::Cluster, 0), (Where::Local, 0), (Where::Param, 0)];
    each(mask, |l| {
        let inside = |base: u64| addresses[l].wrapping_sub(base) < WINDOW;
        let i = if inside(SHARED_BASE) {
            1
        } else if inside(LOCAL_BASE) {
            2
        } else if inside(PARAM_BASE) {
            3
        } else {
            0
        };
        found[i].1 |= 1 << l;
    });
    found
}

/// The block of the gang and the offset that an address of shared memory means. Addresses of other blocks carry their rank
/// plus one above the offset.
pub(super) fn shared_place(
    cx: &Context<'_>,
    shared: &[Shared],
    block: usize,
    address: u64,
    bytes: u32,
    lane: usize,
) -> Done<(usize, usize)> {
    let at = if address >= SHARED_BASE { address - SHARED_BASE } else { address };
    let (tag, offset) = ((at / SHARED_STRIDE) as usize, (at % SHARED_STRIDE) as usize);
    let block = match tag {
        0 => block,
        _ if tag <= cx.cluster_size => block / cx.cluster_size * cx.cluster_size + tag - 1,
        _ => {
            return trouble(
                FaultKind::OutOfBounds,
                lane,
                format!("{address:#x} is in no block's shared memory"),
            );
        }
    };
    let size = shared.get(block).map_or(0, |_| cx.shared_bytes as usize);
    if offset + bytes as usize > size {
        return trouble(
            FaultKind::OutOfBounds,
            lane,
            format!("{bytes} bytes at shared offset {offset} are outside the block's {size} bytes"),
        );
    }
    if !offset.is_multiple_of(bytes as usize) {
        return trouble(
            FaultKind::Misaligned,
            lane,
            format!("the shared offset {offset} is no multiple of {bytes}"),
        );
    }
    Ok((block, offset))
}

/// Offset in all lanes' local memory.
fn local_place(cx: &Context<'_>, address: u64, bytes: u32, lane: usize) -> Done<usize> {
    let at = if address >= LOCAL_BASE { address - LOCAL_BASE } else { address };
    let size = u64::from(cx.kernel.local_bytes);
    if at >= size || at + u64::from(bytes) > size {
        return trouble(
            FaultKind::Local,
            lane,
            format!("{bytes} bytes at local offset {at} are outside the thread's {size} bytes"),
        );
    }
    if !at.is_multiple_of(u64::from(bytes)) {
        return trouble(
            FaultKind::Misaligned,
            lane,
            format!("the local offset {at} is no multiple of {bytes}"),
        );
    }
    Ok(lane * size as usize + at as usize)
}

/// Whether bytes of local memory were all written.
pub(super) fn local_written(warp: &Warp, at: usize, bytes: usize) -> bool {
    all_bits(&warp.local_written, at, bytes)
}

fn all_bits(bits: &[u64], at: usize, n: usize) -> bool {
    (at..at + n).all(|b| bits[b / 64] >> (b % 64) & 1 == 1)
}

fn set_bits(bits: &mut [u64], at: usize, n: usize) {
    (at..at + n).for_each(|b| bits[b / 64] |= 1 << (b % 64));
}

pub(super) fn mark_local(warp: &mut Warp, at: usize, bytes: usize) {
    set_bits(&mut warp.local_written, at, bytes);
}

/// Values of an access: by element and lane.
type Values<const N: usize> = [WideRow; N];

/// Extends what was loaded to what the register holds.
#[inline(always)]
fn extend(value: u64, a: &Access) -> u64 {
    if !a.signed {
        return value;
    }
    let shift = 64 - 8 * a.bytes;
    let v = ((value << shift) as i64 >> shift) as u64;
    match a.register_bits {
        64 => v,
        n => v & ((1 << n) - 1),
    }
}

/// `ld`
pub(super) fn load(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &mut [Shared],
    counts: &mut Counts,
    mask: Mask,
    a: &Access,
) -> Done {
    match a.rows.len() {
        1 => load_n::<1>(cx, warp, shared, counts, mask, a),
        2 => load_n::<2>(cx, warp, shared, counts, mask, a),
        4 => load_n::<4>(cx, warp, shared, counts, mask, a),
        _ => load_n::<8>(cx, warp, shared, counts, mask, a),
    }
}

fn load_n<const N: usize>(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &mut [Shared],
    counts: &mut Counts,
    mask: Mask,
    a: &Access,
) -> Done {
    check_address_taint(warp, a.address.row, mask)?;
    let at = addresses(warp, a.address);
    let mut values: Values<N> = [[0; LANES]; N];
    let mut tainted = 0;
    if a.space == Where::Generic {
        for (space, lanes) in by_space(&at, mask) {
            if lanes != 0 {
                tainted |= load_from(cx, warp, shared, counts, lanes, a, space, &at, &mut values)?;
            }
        }
    } else {
        tainted = load_from(cx, warp, shared, counts, mask, a, a.space, &at, &mut values)?;
    }
    if a.strength != Strength::Weak {
        order::seen(cx, warp, shared, mask, &at, a.space, a.acquire);
    }
    for (to, v) in a.rows.iter().zip(&mut values) {
        if a.signed {
            v.iter_mut().for_each(|v| *v = extend(*v, a));
        }
        put(warp, *to, v, mask);
        set_taint(warp, *to, tainted, mask);
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
fn load_from<const N: usize>(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &mut [Shared],
    counts: &mut Counts,
    mask: Mask,
    a: &Access,
    space: Where,
    at: &WideRow,
    values: &mut Values<N>,
) -> Done<Mask> {
    let total = a.bytes * N as u32;
    let mut tainted = 0;
    match space {
        Where::Global | Where::Generic => {
            return load_global(cx, warp, counts, mask, a, at, values);
        }
        Where::Shared | Where::Cluster => {
            if cx.options.counters {
                count_shared(counts, at, mask, total);
            }
            let (block, clocks) = (warp.block, &warp.clocks);
            let own = own_window(cx, at, mask, total);
            if own && !cx.shared_checks {
                let memory = &shared[block];
                for (j, v) in values.iter_mut().enumerate() {
                    each(mask, |l| v[l] = memory.load(at[l] as usize + j * a.bytes as usize, a.bytes));
                }
                return Ok(0);
            }
            try_each(mask, |l| {
                let (owner, offset) = if own {
                    (block, at[l] as usize)
                } else {
                    shared_place(cx, shared, block, at[l], total, l)?
                };
                let memory = &mut shared[owner];
                let who = Who { id: warp.id, clocks, sync: warp.sync, lane: l, several: false };
                if cx.shared_checks
                    && memory.check_read(offset, total as usize, who, cx.options, a.strength)?
                {
                    tainted |= 1 << l;
                }
                for (j, v) in values.iter_mut().enumerate() {
                    v[l] = memory.load(offset + j * a.bytes as usize, a.bytes);
                }
                Ok(())
            })?;
        }
        Where::Local => try_each(mask, |l| {
            let offset = local_place(cx, at[l], total, l)?;
            if cx.options.uninitialized_shared != Uninitialized::Off
                && !local_written(warp, offset, total as usize)
            {
                // Compilers copy padding through local memory: only a use is an error.
                tainted |= 1 << l;
                set_bits(&mut warp.local_peeked, offset, total as usize);
            }
            for (j, v) in values.iter_mut().enumerate() {
                let from = offset + j * a.bytes as usize;
                v[l] = little(&warp.local[from..from + a.bytes as usize]);
            }
            Ok(())
        })?,
        Where::Param => try_each(mask, |l| {
            let offset = if at[l] >= PARAM_BASE { at[l] - PARAM_BASE } else { at[l] } as usize;
            let Some(bytes) = cx.params.get(offset..offset.saturating_add(total as usize)) else {
                return trouble(
                    FaultKind::OutOfBounds,
                    l,
                    format!(
                        "{total} bytes at parameter offset {offset} are outside {} bytes",
                        cx.params.len()
                    ),
                );
            };
            for (v, b) in values.iter_mut().zip(bytes.chunks_exact(a.bytes as usize)) {
                v[l] = little(b);
            }
            Ok(())
        })?,
    }
    Ok(tainted)
}

/// Whether all lanes use plain, aligned offsets inside the block's own shared memory.
fn own_window(cx: &Context<'_>, at: &WideRow, mask: Mask, bytes: u32) -> bool {
    let (_, high) = extent(at, mask);
    let mut low = 0;
    if mask == Mask::MAX {
        at.iter().for_each(|a| low |= a);
    } else {
        each(mask, |l| low |= at[l]);
    }
    high.saturating_add(bytes.into()) <= cx.shared_bytes.into() && low & (u64::from(bytes) - 1) == 0
}

fn count_shared(counts: &mut Counts, at: &WideRow, mask: Mask, bytes: u32) {
    let offsets = at.map(|a| (a % SHARED_STRIDE) as u32);
    let (passes, least) = wavefronts(&offsets, mask, bytes);
    counts.shared_requests += 1;
    counts.shared_wavefronts += u64::from(passes);
    counts.shared_conflicts += u64::from(passes - least);
}

/// Lowest and highest address of some lanes.
#[inline(always)]
fn extent(at: &WideRow, mask: Mask) -> (u64, u64) {
    let (mut low, mut high) = (u64::MAX, 0);
    if mask == Mask::MAX {
        for a in at {
            low = low.min(*a);
            high = high.max(*a);
        }
    } else {
        each(mask, |l| {
            low = low.min(at[l]);
            high = high.max(at[l]);
        });
    }
    (low, high)
}

/// Whether all addresses ascend.
fn distinct(at: &WideRow) -> bool {
    at.windows(2).all(|w| w[0] < w[1])
}

#[allow(clippy::too_many_arguments)]
fn load_global<const N: usize>(
    cx: &Context<'_>,
    warp: &mut Warp,
    counts: &mut Counts,
    mask: Mask,
    a: &Access,
    at: &WideRow,
    values: &mut Values<N>,
) -> Done<Mask> {
    let total = a.bytes * N as u32;
    global::check_alignment(at, mask, total)?;
    if cx.options.counters {
        // What others may write meanwhile is read where they leave it.
        if cx.options.first_level_cache && a.strength == Strength::Weak {
            global::count_cached(counts, &mut warp.recent, at, mask, total);
        } else {
            global::count(counts, at, mask, total);
        }
    }
    let checked = cx.options.uninitialized_global != Uninitialized::Off;
    let (low, high) = extent(at, mask);
    let span = high - low + u64::from(total);
    if let Some(m) = global::find(cx.view, &mut warp.last_allocation, low)
        && m.holds(low - m.base(), span)
        && (!checked || m.is_written(low - m.base(), span))
    {
        let base = m.base();
        if mask == Mask::MAX {
            for (j, v) in values.iter_mut().enumerate() {
                let offset = j as u64 * u64::from(a.bytes);
                m.gather(&at.map(|a| a - base + offset), a.bytes, v);
            }
        } else {
            for (j, v) in values.iter_mut().enumerate() {
                let offset = j as u64 * u64::from(a.bytes);
                each(mask, |l| v[l] = m.load(at[l] - base + offset, a.bytes));
            }
        }
        return Ok(0);
    }
    let mut tainted = 0;
    try_each(mask, |l| {
        let m = match global::find(cx.view, &mut warp.last_allocation, at[l]) {
            Some(m) if m.holds(at[l] - m.base(), total.into()) => m,
            _ => return Err(global::outside(cx.view, at[l], total, l)),
        };
        let offset = at[l] - m.base();
        if checked && !m.is_written(offset, total.into()) {
            if cx.options.uninitialized_global == Uninitialized::Strict {
                let name = m.name().map(|n| format!(" of {n}")).unwrap_or_default();
                return trouble(
                    FaultKind::Uninitialized,
                    l,
                    format!("{total} bytes at {:#x}{name} were never written", at[l]),
                );
            }
            tainted |= 1 << l;
        }
        for (j, v) in values.iter_mut().enumerate() {
            v[l] = m.load(offset + j as u64 * u64::from(a.bytes), a.bytes);
        }
        Ok(())
    })?;
    Ok(tainted)
}

/// `st`
pub(super) fn store(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &mut [Shared],
    counts: &mut Counts,
    mask: Mask,
    a: &Access,
) -> Done {
    match a.rows.len() {
        1 => store_n::<1>(cx, warp, shared, counts, mask, a),
        2 => store_n::<2>(cx, warp, shared, counts, mask, a),
        4 => store_n::<4>(cx, warp, shared, counts, mask, a),
        _ => store_n::<8>(cx, warp, shared, counts, mask, a),
    }
}

fn store_n<const N: usize>(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &mut [Shared],
    counts: &mut Counts,
    mask: Mask,
    a: &Access,
) -> Done {
    check_address_taint(warp, a.address.row, mask)?;
    let at = addresses(warp, a.address);
    let mut values: Values<N> = [[0; LANES]; N];
    let mut tainted = 0;
    for (from, v) in a.rows.iter().zip(&mut values) {
        *v = get(warp, *from);
        tainted |= taint_of(warp, *from);
    }
    if a.space == Where::Generic {
        for (space, lanes) in by_space(&at, mask) {
            if lanes != 0 {
                store_to(cx, warp, shared, counts, lanes, a, space, &at, &values, tainted & lanes)?;
            }
        }
    } else {
        store_to(cx, warp, shared, counts, mask, a, a.space, &at, &values, tainted & mask)?;
    }
    if a.strength != Strength::Weak {
        order::shown(cx, warp, shared, mask, &at, a.space, a.release);
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
fn store_to<const N: usize>(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &mut [Shared],
    counts: &mut Counts,
    mask: Mask,
    a: &Access,
    space: Where,
    at: &WideRow,
    values: &Values<N>,
    tainted: Mask,
) -> Done {
    let total = a.bytes * N as u32;
    match space {
        Where::Global | Where::Generic => {
            if tainted != 0 {
                return trouble(
                    FaultKind::Uninitialized,
                    Warp::first(tainted),
                    "the stored value depends on memory that was never written",
                );
            }
            global::check_alignment(at, mask, total)?;
            if cx.options.counters {
                global::count(counts, at, mask, total);
            }
            let (low, high) = extent(at, mask);
            let span = high - low + u64::from(total);
            if let Some(m) = global::find(cx.view, &mut warp.last_allocation, low)
                && m.holds(low - m.base(), span)
                && !m.read_only()
            {
                for (j, v) in values.iter().enumerate() {
                    let offset = j as u64 * u64::from(a.bytes);
                    each(mask, |l| m.store(at[l] - m.base() + offset, a.bytes, v[l]));
                }
                if span == u64::from(total * mask.count_ones()) && mask == Mask::MAX && distinct(at) {
                    m.mark(low - m.base(), span);
                } else {
                    each(mask, |l| m.mark(at[l] - m.base(), total.into()));
                }
                return Ok(());
            }
            try_each(mask, |l| {
                let m = match global::find(cx.view, &mut warp.last_allocation, at[l]) {
                    Some(m) if m.holds(at[l] - m.base(), total.into()) => m,
                    _ => return Err(global::outside(cx.view, at[l], total, l)),
                };
                if m.read_only() {
                    let name = m.name().unwrap_or("constant memory");
                    return trouble(
                        FaultKind::OutOfBounds,
                        l,
                        format!("{name} is constant and cannot be stored to"),
                    );
                }
                let offset = at[l] - m.base();
                for (j, v) in values.iter().enumerate() {
                    m.store(offset + j as u64 * u64::from(a.bytes), a.bytes, v[l]);
                }
                m.mark(offset, total.into());
                Ok(())
            })
        }
        Where::Shared | Where::Cluster => {
            if cx.options.counters {
                count_shared(counts, at, mask, total);
            }
            let (block, clocks) = (warp.block, &warp.clocks);
            let own = own_window(cx, at, mask, total);
            try_each(mask, |l| {
                let (owner, offset) = if own {
                    (block, at[l] as usize)
                } else {
                    shared_place(cx, shared, block, at[l], total, l)?
                };
                let memory = &mut shared[owner];
                let who = Who { id: warp.id, clocks, sync: warp.sync, lane: l, several: false };
                if cx.shared_checks {
                    let same = || {
                        (0..N).all(|j| {
                            let low = u64::MAX >> (64 - 8 * a.bytes);
                            memory.load(offset + j * a.bytes as usize, a.bytes) == values[j][l] & low
                        })
                    };
                    let same = (cx.options.races || cx.options.warp_races) && same();
                    memory.check_write(offset, total as usize, who, cx.options, same, a.strength)?;
                    if tainted >> l & 1 == 0 {
                        memory.mark(offset, total as usize);
                    }
                }
                for (j, v) in values.iter().enumerate() {
                    memory.store(offset + j * a.bytes as usize, a.bytes, v[l]);
                }
                Ok(())
            })
        }
        Where::Local => try_each(mask, |l| {
            let offset = local_place(cx, at[l], total, l)?;
            for (j, v) in values.iter().enumerate() {
                let to = offset + j * a.bytes as usize;
                warp.local[to..to + a.bytes as usize]
                    .copy_from_slice(&v[l].to_le_bytes()[..a.bytes as usize]);
            }
            // The first bit-field of a word is put into what is there, which nobody wrote. Which bits are right is not
            // followed: from here on all count as written.
            let field = || a.inserts && all_bits(&warp.local_peeked, offset, total as usize);
            if tainted >> l & 1 == 0 || field() {
                mark_local(warp, offset, total as usize);
            }
            Ok(())
        }),
        Where::Param => {
            trouble(FaultKind::OutOfBounds, Warp::first(mask), "kernel parameters cannot be stored to")
        }
    }
}

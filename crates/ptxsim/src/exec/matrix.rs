//! `ldmatrix` and `stmatrix`: 8 by 8 matrices of 16-bit elements. PTX ISA, "Warp-level matrix load instruction".
//!
//! Lane `8 i + r` gives the address of row r of matrix i. Lane l holds, of each matrix, elements 2 (l mod 4) and the next
//! of row l / 4; transposed, of column l / 4.

use super::access::shared_place;
use super::gang::Context;
use super::regs::{File, LANES, Mask, Trouble};
use super::rows::{Done, addresses, check_address_taint, set_taint, taint_of, trouble};
use super::shared::{Shared, Who, wavefronts};
use super::warp::Warp;
use crate::fault::FaultKind;
use crate::memory::SHARED_STRIDE;
use crate::program::{Matrix, RowRef, Strength};
use crate::stats::Counts;

pub(super) fn matrix(
    cx: &Context<'_>,
    warp: &mut Warp,
    shared: &mut [Shared],
    counts: &mut Counts,
    mask: Mask,
    m: &Matrix,
) -> Done {
    if mask != Mask::MAX {
        return trouble(FaultKind::Divergence, Warp::first(mask), "all 32 lanes of the warp have to run it");
    }
    let n = m.rows.len();
    let at = addresses(warp, m.address);
    let used: Mask = if n == 4 { Mask::MAX } else { (1 << (8 * n)) - 1 };
    check_address_taint(warp, m.address.row, used)?;
    let mut offsets = [(0usize, 0usize); LANES];
    for l in 0..8 * n {
        offsets[l] = shared_place(cx, shared, warp.block, at[l], 16, l)?;
    }
    if cx.options.counters {
        let (passes, least) = wavefronts(&at.map(|a| (a % SHARED_STRIDE) as u32), used, 16);
        counts.shared_requests += 1;
        counts.shared_wavefronts += u64::from(passes);
        counts.shared_conflicts += u64::from(passes - least);
    }
    // Row and column of a lane's first and second element.
    let place = |l: usize, half: usize| {
        let (a, b) = (l / 4, 2 * (l % 4) + half);
        if m.transposed { (b, a) } else { (a, b) }
    };
    for (i, row) in m.rows.iter().enumerate() {
        let to = RowRef { file: File::Narrow, row: *row };
        let rows = &offsets[8 * i..8 * i + 8];
        if m.store {
            let source = warp.regs.narrow[*row as usize];
            let tainted = taint_of(warp, to);
            for (r, (owner, offset)) in rows.iter().enumerate() {
                let memory = &mut shared[*owner];
                if cx.shared_checks {
                    let who = Who { several: true, ..Who::of(warp, 8 * i + r) };
                    memory.check_write(*offset, 16, who, cx.options, false, Strength::Weak)?;
                }
            }
            for (l, source) in source.iter().enumerate() {
                for half in 0..2 {
                    let (r, c) = place(l, half);
                    let (owner, offset) = rows[r];
                    shared[owner].store(offset + 2 * c, 2, u64::from(source >> (16 * half)));
                    if tainted >> l & 1 == 0 {
                        shared[owner].mark(offset + 2 * c, 2);
                    }
                }
            }
            continue;
        }
        let mut tainted_rows = 0u8;
        for (r, (owner, offset)) in rows.iter().enumerate() {
            if cx.shared_checks {
                let who = Who { several: true, ..Who::of(warp, 8 * i + r) };
                let tainted =
                    shared[*owner].check_read(*offset, 16, who, cx.options, Strength::Weak).map_err(|t| {
                        Box::new(Trouble { message: format!("matrix {i}, row {r}: {}", t.message), ..*t })
                    })?;
                tainted_rows |= u8::from(tainted) << r;
            }
        }
        let mut out = [0u32; LANES];
        let mut tainted: Mask = 0;
        for (l, out) in out.iter_mut().enumerate() {
            for half in 0..2 {
                let (r, c) = place(l, half);
                let (owner, offset) = rows[r];
                *out |= (shared[owner].load(offset + 2 * c, 2) as u32) << (16 * half);
                tainted |= u32::from(tainted_rows >> r & 1) << l;
            }
        }
        warp.regs.narrow[*row as usize] = out;
        set_taint(warp, to, tainted, Mask::MAX);
    }
    Ok(())
}

//! Lanes of a row: read, written, as addresses, and whether they are tainted.

use super::regs::{File, LANES, Mask, Trouble, WideRow};
use super::warp::{Warp, each};
use crate::fault::FaultKind;
use crate::program::{AddressRow, RowRef};

/// What an operation returns.
pub(super) type Done<T = ()> = Result<T, Box<Trouble>>;

/// A failed operation.
pub(super) fn trouble<T>(kind: FaultKind, lane: usize, message: impl Into<String>) -> Done<T> {
    Err(Box::new(Trouble { kind, lane: lane as u32, message: message.into() }))
}

/// The addresses of all lanes.
#[inline(always)]
pub(super) fn addresses(warp: &Warp, a: AddressRow) -> WideRow {
    let mut out = [0; LANES];
    match a.row.file {
        File::Wide => {
            let row = &warp.regs.wide[a.row.row as usize];
            for l in 0..LANES {
                out[l] = row[l].wrapping_add_signed(a.offset);
            }
        }
        _ => {
            let row = &warp.regs.narrow[a.row.row as usize];
            for l in 0..LANES {
                out[l] = u64::from(row[l].wrapping_add(a.offset as u32));
            }
        }
    }
    out
}

/// Bytes as a number, the first one lowest.
pub(super) fn little(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b))
}

/// Puts lanes into a row.
#[inline(always)]
pub(super) fn put(warp: &mut Warp, to: RowRef, values: &WideRow, mask: Mask) {
    match to.file {
        File::Wide => {
            let row = &mut warp.regs.wide[to.row as usize];
            if mask == Mask::MAX {
                *row = *values;
            } else {
                each(mask, |l| row[l] = values[l]);
            }
        }
        File::Narrow => {
            let row = &mut warp.regs.narrow[to.row as usize];
            if mask == Mask::MAX {
                for l in 0..LANES {
                    row[l] = values[l] as u32;
                }
            } else {
                each(mask, |l| row[l] = values[l] as u32);
            }
        }
        File::Pred => {
            let mut bits = 0;
            each(mask, |l| bits |= u32::from(values[l] != 0) << l);
            let row = &mut warp.regs.preds[to.row as usize];
            *row = *row & !mask | bits;
        }
    }
}

/// The lanes of a row, zero-extended.
#[inline(always)]
pub(super) fn get(warp: &Warp, from: RowRef) -> WideRow {
    match from.file {
        File::Wide => warp.regs.wide[from.row as usize],
        File::Narrow => warp.regs.narrow[from.row as usize].map(u64::from),
        File::Pred => std::array::from_fn(|l| u64::from(warp.regs.preds[from.row as usize] >> l & 1)),
    }
}

/// Sets and clears taint of a row's lanes.
pub(super) fn set_taint(warp: &mut Warp, to: RowRef, tainted: Mask, mask: Mask) {
    if tainted & mask == 0 && !warp.regs.any_tainted {
        return;
    }
    warp.regs.any_tainted = true;
    let row = &mut warp.regs.tainted[to.file as usize][to.row as usize];
    *row = *row & !mask | tainted & mask;
}

/// The tainted lanes of a row.
pub(super) fn taint_of(warp: &Warp, row: RowRef) -> Mask {
    if warp.regs.any_tainted { warp.regs.tainted[row.file as usize][row.row as usize] } else { 0 }
}

/// Refuses an address that depends on memory that was never written.
pub(super) fn check_address_taint(warp: &Warp, row: RowRef, mask: Mask) -> Done {
    let tainted = taint_of(warp, row) & mask;
    if tainted != 0 {
        return trouble(
            FaultKind::Uninitialized,
            Warp::first(tainted),
            "the address depends on memory that was never written",
        );
    }
    Ok(())
}

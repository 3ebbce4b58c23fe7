//! `cp.async.bulk`: copies of whole ranges and of boxes of a tensor.

use super::access::shared_place;
use super::gang::{Context, Gang};
use super::regs::Mask;
use super::rows::{Done, addresses, little, trouble};
use super::shared::Who;
use super::tensor;
use super::warp::{Warp, try_each};
use crate::driver::tensor_map::TensorMap;
use crate::fault::FaultKind;
use crate::memory::Allocation;
use crate::program::{AddressRow, Bulk, Strength};
use std::sync::Arc;

/// A copy to shared memory that has not arrived.
#[derive(Debug, Clone)]
pub(super) struct Pending {
    /// Block of the gang.
    pub block: usize,
    /// Pieces: offset in shared memory and bytes.
    pub pieces: Vec<(usize, Vec<u8>)>,
    /// Block and offset of the mbarrier that is told.
    pub mbarrier: (usize, usize),
    /// Bytes it is told of.
    pub bytes: u32,
    /// When it was issued, in the time of bulk copies.
    pub tick: u32,
}

impl Gang {
    /// Issues a bulk copy for each lane of the mask (usually one).
    pub(super) fn bulk_copy(&mut self, cx: &Context<'_>, warp: &mut Warp, mask: Mask, b: &Bulk) -> Done {
        let (to, from) = (addresses(warp, b.to), addresses(warp, b.from));
        let mbarrier = b.mbarrier.map(|m| addresses(warp, m));
        try_each(mask, |l| {
            let targets = match b.multicast {
                None => 1 << (warp.block % cx.cluster_size),
                Some(row) => warp.regs.narrow[row as usize][l] & 0xffff,
            };
            if let Some((map, coordinates)) = &b.tensor {
                let map = self.tensor_map(cx, warp, *map, l)?;
                let at: Vec<i32> =
                    coordinates.iter().map(|c| warp.regs.narrow[*c as usize][l] as i32).collect();
                return self.tensor_copy(
                    cx,
                    warp,
                    l,
                    b,
                    &map,
                    &at,
                    [to[l], from[l]],
                    mbarrier.map(|m| m[l]),
                    targets,
                );
            }
            let bytes = warp.regs.narrow[b.bytes as usize][l];
            if !bytes.is_multiple_of(16) || !to[l].is_multiple_of(16) || !from[l].is_multiple_of(16) {
                return trouble(
                    FaultKind::Misaligned,
                    l,
                    "addresses and size of a bulk copy must be multiples of 16",
                );
            }
            if bytes == 0 {
                return Ok(());
            }
            if b.load {
                let data = read_global(cx, warp, from[l], bytes, l)?;
                return self.send(
                    cx,
                    warp,
                    l,
                    vec![(0, data)],
                    to[l],
                    bytes,
                    mbarrier.map(|m| m[l]),
                    targets,
                );
            }
            let grouped = b.to_space != crate::program::Where::Cluster;
            let data = self.read_shared(cx, warp, from[l], bytes, l, grouped)?;
            match b.to_space {
                crate::program::Where::Cluster => {
                    let (block, _) = shared_place(cx, &self.shared, warp.block, to[l], 16, l)?;
                    let first = block / cx.cluster_size * cx.cluster_size;
                    self.send(
                        cx,
                        warp,
                        l,
                        vec![(0, data)],
                        to[l],
                        bytes,
                        mbarrier.map(|m| m[l]),
                        1 << (block - first),
                    )
                }
                _ => write_global(cx, warp, to[l], &data, b.reduce, l),
            }
        })
    }

    /// Puts a copy to shared memory on its way. Pieces are relative to `to`.
    #[allow(clippy::too_many_arguments)]
    fn send(
        &mut self,
        cx: &Context<'_>,
        warp: &Warp,
        lane: usize,
        pieces: Vec<(usize, Vec<u8>)>,
        to: u64,
        bytes: u32,
        mbarrier: Option<u64>,
        targets: u32,
    ) -> Done {
        let Some(mbarrier) = mbarrier else {
            return trouble(FaultKind::Trap, lane, "a bulk copy to shared memory needs an mbarrier");
        };
        let (addressed, offset) = shared_place(cx, &self.shared, warp.block, to, 16, lane)?;
        let (own, barrier) = shared_place(cx, &self.shared, warp.block, mbarrier, 8, lane)?;
        let first = warp.block / cx.cluster_size * cx.cluster_size;
        self.ticks += 1;
        for rank in (0..cx.cluster_size).filter(|r| targets >> r & 1 == 1) {
            // Without multicast the address itself says which block.
            let alone = targets.count_ones() == 1 && rank == warp.block - first;
            let block = if alone { addressed } else { first + rank };
            let mut placed = Vec::new();
            for (at, data) in &pieces {
                let place = offset + at;
                if place + data.len() > cx.shared_bytes as usize {
                    return trouble(
                        FaultKind::OutOfBounds,
                        lane,
                        format!(
                            "{} bytes at shared offset {place} are outside the block's {} bytes",
                            data.len(),
                            cx.shared_bytes
                        ),
                    );
                }
                if cx.shared_checks {
                    let who = Who::of(warp, lane);
                    self.shared[block].check_write(
                        place,
                        data.len(),
                        who,
                        cx.options,
                        false,
                        Strength::Weak,
                    )?;
                    self.shared[block].flight(place, data.len(), true);
                    self.shared[block].written_by_copy(place, data.len(), self.ticks);
                }
                placed.push((place, data.clone()));
            }
            let told = if alone { own } else { first + rank };
            if !self.shared[told].mbarriers.contains_key(&(barrier as u32)) {
                return trouble(
                    FaultKind::Trap,
                    lane,
                    format!("there is no mbarrier at shared offset {barrier}"),
                );
            }
            self.bulk.push(Pending {
                block,
                pieces: placed,
                mbarrier: (told, barrier),
                bytes,
                tick: self.ticks,
            });
        }
        Ok(())
    }

    /// Lets copies arrive that belong to an mbarrier, or all. Returns whether any did. `out` is the warp that is taken out of
    /// the gang.
    pub(super) fn deliver(&mut self, mut out: Option<&mut Warp>, mbarrier: Option<(usize, usize)>) -> bool {
        let (ready, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.bulk)
            .into_iter()
            .partition(|p| mbarrier.is_none_or(|m| p.mbarrier == m));
        self.bulk = rest;
        let any = !ready.is_empty();
        for p in ready {
            for (at, data) in &p.pieces {
                let memory = &mut self.shared[p.block];
                memory.data[*at..at + data.len()].copy_from_slice(data);
                memory.mark(*at, data.len());
                memory.flight(*at, data.len(), false);
            }
            let (block, at) = p.mbarrier;
            if let Some(m) = self.shared[block].mbarriers.get_mut(&(at as u32)) {
                m.bytes -= i64::from(p.bytes);
                m.learn_of_copies(p.tick);
                m.advance();
            }
            self.wake_mbarrier(out.as_deref_mut(), block, at);
        }
        any
    }

    /// What a bulk copy reads. `grouped`: it reads until its group is waited for.
    fn read_shared(
        &mut self,
        cx: &Context<'_>,
        warp: &mut Warp,
        from: u64,
        bytes: u32,
        lane: usize,
        grouped: bool,
    ) -> Done<Vec<u8>> {
        let (block, at) = shared_place(cx, &self.shared, warp.block, from, 16, lane)?;
        if at + bytes as usize > cx.shared_bytes as usize {
            return trouble(
                FaultKind::OutOfBounds,
                lane,
                format!(
                    "{bytes} bytes at shared offset {at} are outside the block's {} bytes",
                    cx.shared_bytes
                ),
            );
        }
        let memory = &mut self.shared[block];
        if cx.shared_checks {
            let mut options = *cx.options;
            // One thread sends what many wrote: lanes of its own warp are ordered by the proxy fence.
            options.warp_races = false;
            memory.check_read(at, bytes as usize, Who::of(warp, lane), &options, Strength::Weak)?;
            if grouped {
                self.ticks += 1;
                memory.read_by_copy(at, bytes as usize, self.ticks);
                warp.sources.start(self.ticks);
            }
        }
        Ok(memory.data[at..at + bytes as usize].to_vec())
    }

    fn tensor_map(
        &mut self,
        cx: &Context<'_>,
        warp: &mut Warp,
        at: AddressRow,
        lane: usize,
    ) -> Done<TensorMap> {
        let address = addresses(warp, at)[lane];
        let offset = address.wrapping_sub(crate::memory::PARAM_BASE) as usize;
        let bytes = match cx.params.get(offset..offset.saturating_add(128)) {
            Some(b) => b.to_vec(),
            None => read_global(cx, warp, address, 128, lane)?,
        };
        let bytes: [u8; 128] = bytes.try_into().unwrap_or([0; 128]);
        TensorMap::decode(&bytes).or_else(|e| trouble(FaultKind::Trap, lane, e.to_string()))
    }

    #[allow(clippy::too_many_arguments)]
    fn tensor_copy(
        &mut self,
        cx: &Context<'_>,
        warp: &mut Warp,
        lane: usize,
        b: &Bulk,
        map: &TensorMap,
        at: &[i32],
        [to, from]: [u64; 2],
        mbarrier: Option<u64>,
        targets: u32,
    ) -> Done {
        let pieces = match tensor::elements(map, at) {
            Ok(p) => p,
            Err(e) => return trouble(FaultKind::Trap, lane, e),
        };
        let size = map.data_type.bytes() as usize;
        let total = (pieces.len() * size) as u32;
        let shared = if b.load { to } else { from };
        let (_, base) = shared_place(cx, &self.shared, warp.block, shared, 16, lane)?;
        let place = |i: usize| tensor::swizzled(map, base + i * size) - base;
        if b.load {
            let mut parts: Vec<(usize, Vec<u8>)> = Vec::with_capacity(pieces.len());
            for (i, source) in pieces.iter().enumerate() {
                let data = match source {
                    Some(address) => read_global(cx, warp, *address, size as u32, lane)?,
                    None => tensor::fill(map),
                };
                parts.push((place(i), data));
            }
            return self.send(cx, warp, lane, parts, to, total, mbarrier, targets);
        }
        let data = self.read_shared(cx, warp, from, total.next_multiple_of(16), lane, true)?;
        for (i, target) in pieces.iter().enumerate() {
            if let Some(address) = target {
                let p = place(i);
                write_global(cx, warp, *address, &data[p..p + size], None, lane)?;
            }
        }
        Ok(())
    }
}

fn range<'a>(
    cx: &'a Context<'_>,
    warp: &mut Warp,
    address: u64,
    bytes: u32,
    lane: usize,
) -> Done<&'a Arc<Allocation>> {
    match super::global::find(cx.view, &mut warp.last_allocation, address) {
        Some(m) if m.holds(address - m.base(), bytes.into()) => Ok(m),
        _ => Err(super::global::outside(cx.view, address, bytes, lane)),
    }
}

fn read_global(cx: &Context<'_>, warp: &mut Warp, address: u64, bytes: u32, lane: usize) -> Done<Vec<u8>> {
    let m = range(cx, warp, address, bytes, lane)?;
    let offset = address - m.base();
    if cx.options.uninitialized_global != crate::options::Uninitialized::Off
        && !m.is_written(offset, bytes.into())
    {
        return trouble(
            FaultKind::Uninitialized,
            lane,
            format!("{bytes} bytes at {address:#x} were not all written"),
        );
    }
    Ok((0..u64::from(bytes)).map(|i| m.load(offset + i, 1) as u8).collect())
}

fn write_global(
    cx: &Context<'_>,
    warp: &mut Warp,
    address: u64,
    data: &[u8],
    reduce: Option<(crate::program::AtomicKind, crate::ptx::ast::Type)>,
    lane: usize,
) -> Done {
    let m = range(cx, warp, address, data.len() as u32, lane)?;
    let offset = address - m.base();
    if m.read_only() {
        return trouble(FaultKind::OutOfBounds, lane, "constant memory cannot be stored to");
    }
    match reduce {
        None => (offset..).zip(data).for_each(|(at, b)| m.store(at, 1, (*b).into())),
        Some((kind, ty)) => {
            let size = ty.bytes() as usize;
            for (i, x) in data.chunks_exact(size).enumerate() {
                let x = little(x);
                let at = offset + (i * size) as u64;
                super::atomics::update(m, at, ty, |old| super::atomics::apply(kind, ty, old, x, 0));
            }
        }
    }
    m.mark(offset, data.len() as u64);
    Ok(())
}

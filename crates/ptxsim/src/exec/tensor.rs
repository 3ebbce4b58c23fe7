//! Boxes of a tensor: which elements a tensor copy moves, and where they lie in shared memory.
//!
//! Swizzle: 16-byte chunk c of a row of 128 bytes goes to chunk `c ^ (row mod 8)` (128 bytes; fewer bits for 64 and 32), as
//! address bits: bits 4 to 6 are xored with bits 7 to 9 (CUDA driver API, `CUtensorMapSwizzle`; CUTLASS
//! `Swizzle<3, 4, 3>`).

use crate::driver::tensor_map::{Interleave, Swizzle, TensorMap};

/// Where each element of a box comes from, in the order in which they lie in shared memory; `None` outside the tensor.
pub(super) fn elements(map: &TensorMap, at: &[i32]) -> Result<Vec<Option<u64>>, String> {
    let rank = map.rank as usize;
    if at.len() != rank {
        return Err(format!("{} coordinates for a tensor map of rank {rank}", at.len()));
    }
    if map.interleave != Interleave::None {
        return Err("interleaved tensor maps are not supported".into());
    }
    let taken: Vec<u64> =
        (0..rank).map(|d| u64::from(map.tile[d].div_ceil(map.element_strides[d].max(1)))).collect();
    let total: u64 = taken.iter().product();
    let mut out = Vec::with_capacity(total as usize);
    for n in 0..total {
        let (mut rest, mut address, mut inside) = (n, map.address, true);
        for d in 0..rank {
            let i = rest % taken[d] * u64::from(map.element_strides[d].max(1));
            rest /= taken[d];
            let x = i64::from(at[d]) + i as i64;
            if x < 0 || x as u64 >= map.sizes[d] {
                inside = false;
                continue;
            }
            let stride = if d == 0 { u64::from(map.data_type.bytes()) } else { map.strides[d - 1] };
            address = address.wrapping_add(x as u64 * stride);
        }
        out.push(inside.then_some(address));
    }
    Ok(out)
}

/// Where byte `at` of shared memory really lies.
pub(super) fn swizzled(map: &TensorMap, at: usize) -> usize {
    let bits = match map.swizzle {
        Swizzle::None => 0,
        Swizzle::Bytes32 => 1,
        Swizzle::Bytes64 => 3,
        Swizzle::Bytes128 => 7,
    };
    at ^ ((at >> 7 & bits) << 4)
}

/// One element from outside the tensor.
pub(super) fn fill(map: &TensorMap) -> Vec<u8> {
    let size = map.data_type.bytes() as usize;
    if map.nan_fill { vec![0xff; size] } else { vec![0; size] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::tensor_map::DataType;

    fn map() -> TensorMap {
        TensorMap {
            data_type: DataType::F16,
            rank: 2,
            address: 0x1000,
            sizes: [10, 3, 1, 1, 1],
            strides: [32, 0, 0, 0],
            tile: [8, 2, 1, 1, 1],
            element_strides: [1; 5],
            interleave: Interleave::None,
            swizzle: Swizzle::Bytes128,
            l2_promotion: 0,
            nan_fill: false,
        }
    }

    #[test]
    fn a_box_at_the_edge_is_cut() {
        let e = elements(&map(), &[4, 2]).unwrap();
        assert_eq!(e.len(), 16);
        assert_eq!(e[0], Some(0x1000 + 2 * 32 + 8));
        assert_eq!(e[5], Some(0x1000 + 2 * 32 + 18));
        assert!(e[6].is_none() && e[8].is_none(), "outside both ways");
        assert!(elements(&map(), &[-1, 0]).unwrap()[0].is_none());
        assert!(elements(&map(), &[0]).is_err());
    }

    #[test]
    fn swizzle_exchanges_chunks_by_row() {
        let m = map();
        assert_eq!(swizzled(&m, 0), 0);
        assert_eq!(swizzled(&m, 128), 128 + 16);
        assert_eq!(swizzled(&m, 7 * 128 + 16), 7 * 128 + (1 ^ 7) * 16);
        assert_eq!(swizzled(&m, 8 * 128 + 5), 8 * 128 + 5);
    }
}

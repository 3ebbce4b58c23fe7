//! Tensor maps: what `cuTensorMapEncodeTiled` puts into the 128 bytes that the caller hands to a kernel.
//!
//! NVIDIA's encoding is not documented, and a program may not look into it. Ours:
//!
//! | bytes | content |
//! |---|---|
//! | 0–3 | `tmap` |
//! | 4–9 | data type, rank, interleave, swizzle, L2 promotion, fill |
//! | 16–23 | global address |
//! | 24–43 | sizes less 1, five u32 |
//! | 48–79 | strides in bytes of dimensions 1 to 4, four u64 |
//! | 80–89 | box sizes, five u16 |
//! | 90–94 | element strides, five u8 |
//!
//! Everything is little-endian; unused dimensions and all other bytes are 0.

use super::error::{Code, Outcome, fail, invalid};
use super::host;
use super::state::driver;
use std::fmt;

/// Size of a `CUtensorMap`.
pub const BYTES: usize = 128;
/// Most dimensions.
pub const RANK: usize = 5;

const MAGIC: [u8; 4] = *b"tmap";

/// `CUtensorMapDataType`, without the packed 4- and 6-bit ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the API's")]
pub enum DataType {
    U8,
    U16,
    U32,
    S32,
    U64,
    S64,
    F16,
    F32,
    F64,
    BF16,
    F32Ftz,
    TF32,
    TF32Ftz,
}

const TYPES: [DataType; 13] = [
    DataType::U8,
    DataType::U16,
    DataType::U32,
    DataType::S32,
    DataType::U64,
    DataType::S64,
    DataType::F16,
    DataType::F32,
    DataType::F64,
    DataType::BF16,
    DataType::F32Ftz,
    DataType::TF32,
    DataType::TF32Ftz,
];

impl DataType {
    /// Bytes of an element.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::U8 => 1,
            Self::U16 | Self::F16 | Self::BF16 => 2,
            Self::U32 | Self::S32 | Self::F32 | Self::F32Ftz | Self::TF32 | Self::TF32Ftz => 4,
            Self::U64 | Self::S64 | Self::F64 => 8,
        }
    }

    /// Whether it is a floating type.
    pub const fn is_float(self) -> bool {
        !matches!(self, Self::U8 | Self::U16 | Self::U32 | Self::S32 | Self::U64 | Self::S64)
    }
}

/// `CUtensorMapInterleave`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interleave {
    /// None.
    None,
    /// Channels in groups of 16 bytes.
    Bytes16,
    /// Channels in groups of 32 bytes.
    Bytes32,
}

/// `CUtensorMapSwizzle`: 16-byte chunks are exchanged within spans of this many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    /// None.
    None,
    /// Within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

impl Swizzle {
    /// The span in bytes, 0 without.
    pub const fn span(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Bytes32 => 32,
            Self::Bytes64 => 64,
            Self::Bytes128 => 128,
        }
    }
}

/// A tiled tensor map. Dimension 0 is the innermost one; unused dimensions have size 1, stride 0, box 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    /// Type of the elements.
    pub data_type: DataType,
    /// Dimensions, 1 to 5.
    pub rank: u32,
    /// Where the tensor starts in global memory.
    pub address: u64,
    /// Elements in each dimension, at most 2³².
    pub sizes: [u64; RANK],
    /// Bytes between elements of dimensions 1 to 4; those of dimension 0 are adjacent.
    pub strides: [u64; RANK - 1],
    /// Elements of a box in each dimension, before element strides.
    pub tile: [u32; RANK],
    /// Every how many elements one is taken.
    pub element_strides: [u32; RANK],
    /// Layout of channels.
    pub interleave: Interleave,
    /// Pattern in shared memory.
    pub swizzle: Swizzle,
    /// `CUtensorMapL2promotion`: no effect here.
    pub l2_promotion: u8,
    /// What lies outside the tensor is read as NaN instead of 0.
    pub nan_fill: bool,
}

/// Why a tensor map is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

fn refuse(reason: impl Into<String>) -> Result<(), Refused> {
    Err(Refused(reason.into()))
}

impl TensorMap {
    /// Bytes that a box takes in shared memory.
    pub fn tile_bytes(&self) -> u64 {
        let taken = |d: usize| u64::from(self.tile[d].div_ceil(self.element_strides[d].max(1)));
        (0..self.rank as usize).map(taken).product::<u64>() * u64::from(self.data_type.bytes())
    }

    /// The requirements of the API's documentation.
    ///
    /// # Errors
    /// The first that is not met.
    pub fn check(&self) -> Result<(), Refused> {
        let rank = self.rank as usize;
        let wide = self.interleave == Interleave::Bytes32;
        if rank == 0 || rank > RANK || (self.interleave != Interleave::None && rank < 3) {
            return refuse(format!("rank {rank} with interleave {:?}", self.interleave));
        }
        let align = if wide { 32 } else { 16 };
        if !self.address.is_multiple_of(align) {
            return refuse(format!("global address {:#x} is not a multiple of {align}", self.address));
        }
        let used = 0..rank;
        if let Some(d) = used.clone().find(|d| self.sizes[*d] == 0 || self.sizes[*d] > 1 << 32) {
            return refuse(format!("size {} of dimension {d}; 1 to 2^32 is allowed", self.sizes[d]));
        }
        let mut least = self.sizes[0].saturating_mul(self.data_type.bytes().into());
        for d in 1..rank {
            let stride = self.strides[d - 1];
            if !stride.is_multiple_of(align) || stride >= 1 << 40 {
                return refuse(format!(
                    "stride {stride} of dimension {d}; multiples of {align} below 2^40 are allowed"
                ));
            }
            if self.interleave == Interleave::None && self.sizes[d] > 1 && stride < least {
                return refuse(format!(
                    "stride {stride} of dimension {d} is less than the {least} bytes of those within"
                ));
            }
            least = stride.saturating_mul(self.sizes[d]);
        }
        if let Some(d) = used.clone().find(|d| self.tile[*d] == 0 || self.tile[*d] > 256) {
            return refuse(format!("box size {} of dimension {d}; 1 to 256 is allowed", self.tile[d]));
        }
        let row = self.tile[0] * self.data_type.bytes();
        if self.interleave == Interleave::None {
            if !row.is_multiple_of(16) {
                return refuse(format!("rows of {row} bytes in a box; multiples of 16 are allowed"));
            }
            if self.swizzle != Swizzle::None && row > self.swizzle.span() {
                return refuse(format!("rows of {row} bytes in a box with swizzle {:?}", self.swizzle));
            }
        }
        if let Some(d) = used.clone().find(|d| self.element_strides[*d] == 0 || self.element_strides[*d] > 8)
        {
            return refuse(format!(
                "element stride {} of dimension {d}; 1 to 8 is allowed",
                self.element_strides[d]
            ));
        }
        if wide && self.swizzle != Swizzle::Bytes32 {
            return refuse("interleave of 32 bytes asks for a swizzle of 32 bytes");
        }
        if self.nan_fill && !self.data_type.is_float() {
            return refuse(format!("NaN fill of {:?}", self.data_type));
        }
        Ok(())
    }

    /// The 128 bytes of the table above. The map has been checked.
    pub fn encode(&self) -> [u8; BYTES] {
        let mut out = [0; BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4..10].copy_from_slice(&[
            self.data_type as u8,
            self.rank as u8,
            self.interleave as u8,
            self.swizzle as u8,
            self.l2_promotion,
            self.nan_fill.into(),
        ]);
        out[16..24].copy_from_slice(&self.address.to_le_bytes());
        for d in 0..RANK {
            let size = self.sizes[d].saturating_sub(1) as u32;
            out[24 + 4 * d..][..4].copy_from_slice(&size.to_le_bytes());
            out[80 + 2 * d..][..2].copy_from_slice(&(self.tile[d] as u16).to_le_bytes());
            out[90 + d] = self.element_strides[d] as u8;
        }
        for (d, stride) in self.strides.iter().enumerate() {
            out[48 + 8 * d..][..8].copy_from_slice(&stride.to_le_bytes());
        }
        out
    }

    /// Reads what [`TensorMap::encode`] wrote, with all checks.
    ///
    /// # Errors
    /// If these bytes are no tensor map.
    pub fn decode(bytes: &[u8; BYTES]) -> Result<Self, Refused> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let double = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let none =
            || Refused("these 128 bytes are no tensor map that cuTensorMapEncodeTiled made".to_string());
        if bytes[..4] != MAGIC {
            return Err(none());
        }
        let map = Self {
            data_type: *TYPES.get(usize::from(bytes[4])).ok_or_else(none)?,
            rank: bytes[5].into(),
            address: double(16),
            sizes: std::array::from_fn(|d| u64::from(word(24 + 4 * d)) + 1),
            strides: std::array::from_fn(|d| double(48 + 8 * d)),
            tile: std::array::from_fn(|d| u16::from_le_bytes([bytes[80 + 2 * d], bytes[81 + 2 * d]]).into()),
            element_strides: std::array::from_fn(|d| bytes[90 + d].into()),
            interleave: interleave(bytes[6].into()).ok_or_else(none)?,
            swizzle: swizzle(bytes[7].into()).ok_or_else(none)?,
            l2_promotion: bytes[8],
            nan_fill: bytes[9] != 0,
        };
        map.check()?;
        Ok(map)
    }
}

fn interleave(number: i32) -> Option<Interleave> {
    [Interleave::None, Interleave::Bytes16, Interleave::Bytes32].get(usize::try_from(number).ok()?).copied()
}

fn swizzle(number: i32) -> Option<Swizzle> {
    [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128]
        .get(usize::try_from(number).ok()?)
        .copied()
}

/// Reads the arrays of the call.
fn arrays(map: &mut TensorMap, sizes: usize, strides: usize, tile: usize, element_strides: usize) -> Outcome {
    let rank = map.rank as usize;
    for d in 0..rank {
        map.sizes[d] = host::get(sizes.wrapping_add(8 * d))?;
        map.tile[d] = host::get(tile.wrapping_add(4 * d))?;
        map.element_strides[d] = host::get(element_strides.wrapping_add(4 * d))?;
        if d > 0 {
            map.strides[d - 1] = host::get(strides.wrapping_add(8 * (d - 1)))?;
        }
    }
    if map.interleave == Interleave::None {
        // Ignored there, as the documentation says.
        map.element_strides[0] = 1;
    }
    Ok(())
}

api! {
    fn cuTensorMapEncodeTiled(
        out: usize,
        data_type: i32,
        rank: u32,
        address: u64,
        sizes: usize,
        strides: usize,
        tile: usize,
        element_strides: usize,
        interleaved: i32,
        swizzled: i32,
        l2_promotion: i32,
        fill: i32,
    ) {
        host::need(out)?;
        if !out.is_multiple_of(64) {
            return invalid(format!("a tensor map at {out:#x}; its alignment is 64"));
        }
        {
            let guard = driver().lock();
            guard.started()?;
            if guard.devices.iter().all(|d| d.card.cc < 90) {
                return fail(Code::NotSupported, "no card here has tensor maps; sm_90 and later have");
            }
        }
        if (13..16).contains(&data_type) || (4..7).contains(&swizzled) {
            return fail(Code::NotSupported, format!("data type {data_type} with swizzle {swizzled} of a tensor map"));
        }
        let (Some(ty), Some(interleave), Some(swizzle)) = (
            usize::try_from(data_type).ok().and_then(|i| TYPES.get(i)).copied(),
            interleave(interleaved),
            swizzle(swizzled),
        ) else {
            return invalid(format!("data type {data_type}, interleave {interleaved}, swizzle {swizzled}"));
        };
        if !(0..4).contains(&l2_promotion) || !(0..2).contains(&fill) || rank as usize > RANK {
            return invalid(format!("rank {rank}, L2 promotion {l2_promotion}, fill {fill}"));
        }
        let mut map = TensorMap {
            data_type: ty,
            rank,
            address,
            sizes: [1; RANK],
            strides: [0; RANK - 1],
            tile: [1; RANK],
            element_strides: [1; RANK],
            interleave,
            swizzle,
            l2_promotion: l2_promotion as u8,
            nan_fill: fill == 1,
        };
        arrays(&mut map, sizes, strides, tile, element_strides)?;
        if let Err(refused) = map.check() {
            return invalid(refused.to_string());
        }
        host::write(out, &map.encode())
    }
    fn cuTensorMapReplaceAddress(map: usize, address: u64) {
        driver().lock().started()?;
        let mut bytes = [0; BYTES];
        host::read(map, &mut bytes)?;
        match TensorMap::decode(&bytes) {
            Ok(old) => {
                let new = TensorMap { address, ..old };
                if let Err(refused) = new.check() {
                    return invalid(refused.to_string());
                }
                host::write(map, &new.encode())
            }
            Err(refused) => invalid(refused.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plane() -> TensorMap {
        TensorMap {
            data_type: DataType::F16,
            rank: 2,
            address: 0x0200_0000_1000,
            sizes: [1 << 32, 100, 1, 1, 1],
            strides: [1 << 33, 0, 0, 0],
            tile: [64, 256, 1, 1, 1],
            element_strides: [1; RANK],
            interleave: Interleave::None,
            swizzle: Swizzle::Bytes128,
            l2_promotion: 2,
            nan_fill: true,
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let map = plane();
        map.check().unwrap();
        assert_eq!(TensorMap::decode(&map.encode()), Ok(map));
        assert_eq!(map.tile_bytes(), 64 * 256 * 2);
        let five = TensorMap {
            rank: 5,
            data_type: DataType::U8,
            sizes: [17, 2, 3, 4, 5],
            strides: [32, 64, 192, 768],
            tile: [16, 1, 2, 3, 4],
            element_strides: [1, 2, 3, 4, 8],
            swizzle: Swizzle::None,
            nan_fill: false,
            ..map
        };
        assert_eq!(TensorMap::decode(&five.encode()), Ok(five));
        assert_eq!(five.tile_bytes(), 16);
    }

    #[test]
    fn each_requirement_is_checked() {
        let good = plane();
        let bad = [
            TensorMap { rank: 0, ..good },
            TensorMap { rank: 6, ..good },
            TensorMap { address: good.address + 8, ..good },
            TensorMap { sizes: [0, 100, 1, 1, 1], ..good },
            TensorMap { sizes: [(1 << 32) + 1, 100, 1, 1, 1], ..good },
            TensorMap { strides: [(1 << 33) + 8, 0, 0, 0], ..good },
            TensorMap { strides: [1 << 40, 0, 0, 0], ..good },
            TensorMap { strides: [1 << 32, 0, 0, 0], ..good },
            TensorMap { tile: [64, 257, 1, 1, 1], ..good },
            TensorMap { tile: [64, 0, 1, 1, 1], ..good },
            TensorMap { tile: [60, 1, 1, 1, 1], ..good },
            TensorMap { tile: [128, 1, 1, 1, 1], ..good },
            TensorMap { element_strides: [1, 9, 1, 1, 1], ..good },
            TensorMap { element_strides: [1, 0, 1, 1, 1], ..good },
            TensorMap { interleave: Interleave::Bytes16, ..good },
            TensorMap { data_type: DataType::U16, ..good },
        ];
        for map in bad {
            assert!(map.check().is_err(), "{map:?}");
        }
        assert!(TensorMap::decode(&[0; BYTES]).is_err());
    }
}

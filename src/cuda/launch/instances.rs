//! The attention kernels that exist, and which one a layer gets.

use crate::config::LayerConfig;
use crate::cuda::Device;
use crate::cuda::device::Kernel;
use crate::error::{Error, Result};
use crate::format::{Affine, Axis, Format, Fp8Kind};
use std::cmp::Reverse;

/// A kernel and what it was made for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Instance {
    pub(crate) kernel: Kernel,
    key_dim: usize,
    value_dim: usize,
    /// Columns (query, head of the group) that a unit of work has.
    pub(crate) columns: usize,
    /// Formats of keys and values; `None` = any.
    formats: Option<(Codes, Codes)>,
    /// Queries and weights in fixed point.
    integer: bool,
    /// Bytes of shared memory of a block; asserted where the kernel is made.
    pub(crate) shared: u32,
    /// Blocks that a multiprocessor holds; see [`FEWER_ON_BLACKWELL`].
    resident: u32,
}

/// A format as kernels tell them apart.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Codes {
    F16,
    E4m3,
    /// Bits and group, per token.
    Token(usize, usize),
    /// The same per channel.
    Channel(usize, usize),
}

impl Codes {
    fn is(self, f: &Format) -> bool {
        let affine =
            |a: &Affine, axis, bits, group| a.axis == axis && a.bits.get() == bits && a.group == group;
        match (self, f) {
            (Codes::F16, Format::F16) => true,
            (Codes::E4m3, Format::Fp8(f)) => f.kind == Fp8Kind::E4M3,
            (Codes::Token(bits, group), Format::Affine(a)) => affine(a, Axis::PerToken, bits, group),
            (Codes::Channel(bits, group), Format::Affine(a)) => affine(a, Axis::PerChannel, bits, group),
            _ => false,
        }
    }
}

#[rustfmt::skip]
pub(crate) const INSTANCES: &[Instance] = &[
    Instance { kernel: Kernel::AttendAny64, key_dim: 64, value_dim: 64, columns: 8, formats: None, integer: false, shared: 22_368, resident: 3 },
    Instance { kernel: Kernel::AttendAnyWide64, key_dim: 64, value_dim: 64, columns: 16, formats: None, integer: false, shared: 26_880, resident: 2 },
    Instance { kernel: Kernel::AttendAny80, key_dim: 80, value_dim: 80, columns: 8, formats: None, integer: false, shared: 24_032, resident: 3 },
    Instance { kernel: Kernel::AttendAnyWide80, key_dim: 80, value_dim: 80, columns: 16, formats: None, integer: false, shared: 30_208, resident: 2 },
    Instance { kernel: Kernel::AttendAny96, key_dim: 96, value_dim: 96, columns: 8, formats: None, integer: false, shared: 24_544, resident: 3 },
    Instance { kernel: Kernel::AttendAnyWide96, key_dim: 96, value_dim: 96, columns: 16, formats: None, integer: false, shared: 31_232, resident: 2 },
    Instance { kernel: Kernel::AttendAny112, key_dim: 112, value_dim: 112, columns: 8, formats: None, integer: false, shared: 30_304, resident: 3 },
    Instance { kernel: Kernel::AttendAny128, key_dim: 128, value_dim: 128, columns: 8, formats: None, integer: false, shared: 30_816, resident: 3 },
    Instance { kernel: Kernel::AttendAnyWide128, key_dim: 128, value_dim: 128, columns: 16, formats: None, integer: false, shared: 43_776, resident: 2 },
    Instance { kernel: Kernel::AttendAny256, key_dim: 256, value_dim: 256, columns: 8, formats: None, integer: false, shared: 47_712, resident: 3 },
    Instance { kernel: Kernel::AttendAny192128, key_dim: 192, value_dim: 128, columns: 8, formats: None, integer: false, shared: 35_168, resident: 3 },
    Instance { kernel: Kernel::AttendF16Half64, key_dim: 64, value_dim: 64, columns: 8, formats: Some((Codes::F16, Codes::F16)), integer: false, shared: 14_176, resident: 3 },
    Instance { kernel: Kernel::AttendF16Wide64, key_dim: 64, value_dim: 64, columns: 16, formats: Some((Codes::F16, Codes::F16)), integer: false, shared: 18_688, resident: 3 },
    Instance { kernel: Kernel::AttendF16Half128, key_dim: 128, value_dim: 128, columns: 8, formats: Some((Codes::F16, Codes::F16)), integer: false, shared: 26_720, resident: 3 },
    Instance { kernel: Kernel::AttendF16Wide128, key_dim: 128, value_dim: 128, columns: 16, formats: Some((Codes::F16, Codes::F16)), integer: false, shared: 35_584, resident: 2 },
    Instance { kernel: Kernel::AttendE4m3Half64, key_dim: 64, value_dim: 64, columns: 8, formats: Some((Codes::E4m3, Codes::E4m3)), integer: false, shared: 14_176, resident: 3 },
    Instance { kernel: Kernel::AttendE4m3Wide64, key_dim: 64, value_dim: 64, columns: 16, formats: Some((Codes::E4m3, Codes::E4m3)), integer: false, shared: 18_688, resident: 3 },
    Instance { kernel: Kernel::AttendE4m3Half128, key_dim: 128, value_dim: 128, columns: 8, formats: Some((Codes::E4m3, Codes::E4m3)), integer: false, shared: 26_720, resident: 3 },
    Instance { kernel: Kernel::AttendE4m3Wide128, key_dim: 128, value_dim: 128, columns: 16, formats: Some((Codes::E4m3, Codes::E4m3)), integer: false, shared: 35_584, resident: 2 },
    Instance { kernel: Kernel::AttendInt8Integer64, key_dim: 64, value_dim: 64, columns: 4, formats: Some((Codes::Token(8, 64), Codes::Token(8, 64))), integer: true, shared: 11_632, resident: 4 },
    Instance { kernel: Kernel::AttendInt8Integer128, key_dim: 128, value_dim: 128, columns: 4, formats: Some((Codes::Token(8, 128), Codes::Token(8, 128))), integer: true, shared: 21_360, resident: 4 },
    Instance { kernel: Kernel::AttendInt8Half64, key_dim: 64, value_dim: 64, columns: 8, formats: Some((Codes::Token(8, 64), Codes::Token(8, 64))), integer: false, shared: 14_176, resident: 3 },
    Instance { kernel: Kernel::AttendInt8Wide64, key_dim: 64, value_dim: 64, columns: 16, formats: Some((Codes::Token(8, 64), Codes::Token(8, 64))), integer: false, shared: 18_688, resident: 3 },
    Instance { kernel: Kernel::AttendInt8Half128, key_dim: 128, value_dim: 128, columns: 8, formats: Some((Codes::Token(8, 128), Codes::Token(8, 128))), integer: false, shared: 26_720, resident: 3 },
    Instance { kernel: Kernel::AttendInt8Wide128, key_dim: 128, value_dim: 128, columns: 16, formats: Some((Codes::Token(8, 128), Codes::Token(8, 128))), integer: false, shared: 35_584, resident: 2 },
    Instance { kernel: Kernel::AttendDefault4Integer64, key_dim: 64, value_dim: 64, columns: 4, formats: Some((Codes::Channel(4, 64), Codes::Token(4, 64))), integer: true, shared: 15_728, resident: 4 },
    Instance { kernel: Kernel::AttendDefault4Integer128, key_dim: 128, value_dim: 128, columns: 4, formats: Some((Codes::Channel(4, 64), Codes::Token(4, 64))), integer: true, shared: 30_064, resident: 3 },
    Instance { kernel: Kernel::AttendDefault4Half64, key_dim: 64, value_dim: 64, columns: 8, formats: Some((Codes::Channel(4, 64), Codes::Token(4, 64))), integer: false, shared: 14_176, resident: 3 },
    Instance { kernel: Kernel::AttendDefault4Wide64, key_dim: 64, value_dim: 64, columns: 16, formats: Some((Codes::Channel(4, 64), Codes::Token(4, 64))), integer: false, shared: 18_688, resident: 3 },
    Instance { kernel: Kernel::AttendDefault4Half128, key_dim: 128, value_dim: 128, columns: 8, formats: Some((Codes::Channel(4, 64), Codes::Token(4, 64))), integer: false, shared: 26_720, resident: 3 },
    Instance { kernel: Kernel::AttendDefault4Wide128, key_dim: 128, value_dim: 128, columns: 16, formats: Some((Codes::Channel(4, 64), Codes::Token(4, 64))), integer: false, shared: 35_584, resident: 2 },
    Instance { kernel: Kernel::AttendDefault2Integer64, key_dim: 64, value_dim: 64, columns: 4, formats: Some((Codes::Channel(2, 32), Codes::Token(2, 32))), integer: true, shared: 15_728, resident: 4 },
    Instance { kernel: Kernel::AttendDefault2Integer128, key_dim: 128, value_dim: 128, columns: 4, formats: Some((Codes::Channel(2, 32), Codes::Token(2, 32))), integer: true, shared: 30_064, resident: 3 },
    Instance { kernel: Kernel::AttendDefault2Half64, key_dim: 64, value_dim: 64, columns: 8, formats: Some((Codes::Channel(2, 32), Codes::Token(2, 32))), integer: false, shared: 14_176, resident: 3 },
    Instance { kernel: Kernel::AttendDefault2Wide64, key_dim: 64, value_dim: 64, columns: 16, formats: Some((Codes::Channel(2, 32), Codes::Token(2, 32))), integer: false, shared: 18_688, resident: 2 },
    Instance { kernel: Kernel::AttendDefault2Half128, key_dim: 128, value_dim: 128, columns: 8, formats: Some((Codes::Channel(2, 32), Codes::Token(2, 32))), integer: false, shared: 26_720, resident: 3 },
    Instance { kernel: Kernel::AttendDefault2Wide128, key_dim: 128, value_dim: 128, columns: 16, formats: Some((Codes::Channel(2, 32), Codes::Token(2, 32))), integer: false, shared: 35_584, resident: 2 },
    Instance { kernel: Kernel::AttendGroup8Integer128, key_dim: 128, value_dim: 128, columns: 4, formats: Some((Codes::Token(8, 32), Codes::Token(8, 32))), integer: true, shared: 21_360, resident: 3 },
    Instance { kernel: Kernel::AttendGroup8Half128, key_dim: 128, value_dim: 128, columns: 8, formats: Some((Codes::Token(8, 32), Codes::Token(8, 32))), integer: false, shared: 26_720, resident: 3 },
    Instance { kernel: Kernel::AttendToken4Integer128, key_dim: 128, value_dim: 128, columns: 4, formats: Some((Codes::Token(4, 128), Codes::Token(4, 128))), integer: true, shared: 21_360, resident: 4 },
    Instance { kernel: Kernel::AttendToken4Half128, key_dim: 128, value_dim: 128, columns: 8, formats: Some((Codes::Token(4, 128), Codes::Token(4, 128))), integer: false, shared: 26_720, resident: 3 },
    Instance { kernel: Kernel::AttendToken4Wide128, key_dim: 128, value_dim: 128, columns: 16, formats: Some((Codes::Token(4, 128), Codes::Token(4, 128))), integer: false, shared: 35_584, resident: 2 },
    Instance { kernel: Kernel::AttendToken2Integer128, key_dim: 128, value_dim: 128, columns: 4, formats: Some((Codes::Token(2, 128), Codes::Token(2, 128))), integer: true, shared: 21_360, resident: 4 },
    Instance { kernel: Kernel::AttendToken2Half128, key_dim: 128, value_dim: 128, columns: 8, formats: Some((Codes::Token(2, 128), Codes::Token(2, 128))), integer: false, shared: 26_720, resident: 3 },
    Instance { kernel: Kernel::AttendToken2Wide128, key_dim: 128, value_dim: 128, columns: 16, formats: Some((Codes::Token(2, 128), Codes::Token(2, 128))), integer: false, shared: 35_584, resident: 2 },
    Instance { kernel: Kernel::AttendToken1Integer128, key_dim: 128, value_dim: 128, columns: 4, formats: Some((Codes::Token(1, 128), Codes::Token(1, 128))), integer: true, shared: 21_360, resident: 4 },
    Instance { kernel: Kernel::AttendToken1Half128, key_dim: 128, value_dim: 128, columns: 8, formats: Some((Codes::Token(1, 128), Codes::Token(1, 128))), integer: false, shared: 26_720, resident: 3 },
    Instance { kernel: Kernel::AttendToken1Wide128, key_dim: 128, value_dim: 128, columns: 16, formats: Some((Codes::Token(1, 128), Codes::Token(1, 128))), integer: false, shared: 35_584, resident: 2 },
];

/// Kernels whose code for compute capability 10 and later takes more registers: a multiprocessor holds one block fewer
/// (`QKV_FEWER` in their `.cu` files).
const FEWER_ON_BLACKWELL: [Kernel; 9] = [
    Kernel::AttendInt8Integer128,
    Kernel::AttendInt8Half128,
    Kernel::AttendInt8Wide64,
    Kernel::AttendGroup8Half128,
    Kernel::AttendDefault2Integer128,
    Kernel::AttendE4m3Half128,
    Kernel::AttendDefault2Half128,
    Kernel::AttendDefault4Half128,
    Kernel::AttendDefault4Wide64,
];

/// Shared memory that the driver takes for each block.
const RESERVED: u32 = 1024;

impl Instance {
    /// Blocks of its launch: as many as the device holds at a time. Some devices have less shared memory than registers.
    pub(crate) fn blocks(&self, device: &Device) -> u32 {
        let fewer = device.compute_capability() >= 100 && FEWER_ON_BLACKWELL.contains(&self.kernel);
        let of_shared = (device.shared_limit() + RESERVED) / (self.shared + RESERVED);
        device.multiprocessors() * (self.resident - u32::from(fewer)).min(of_shared).max(1)
    }

    fn fits(&self, (key_dim, value_dim): (usize, usize), l: &LayerConfig) -> bool {
        self.key_dim == key_dim
            && self.value_dim == value_dim
            && self.formats.is_none_or(|(k, v)| k.is(&l.key) && v.is(&l.value))
    }
}

/// The kernel for `columns` (queries times query heads of a kv head) over a layer: on the integer path where `integer` allows it and all
/// columns fit; else one that takes the fewest passes over the pages, of these one for the layer's formats where there is one, with
/// no more columns than that needs.
pub(crate) fn instance(
    dims: (usize, usize),
    layer: &LayerConfig,
    columns: usize,
    integer: bool,
) -> Result<&'static Instance> {
    let usable = |i: &&Instance| i.fits(dims, layer) && (!i.integer || (integer && columns <= i.columns));
    let rank = |i: &&Instance| {
        (i.integer, Reverse(columns.div_ceil(i.columns)), i.formats.is_some(), Reverse(i.columns))
    };
    INSTANCES.iter().filter(usable).max_by_key(rank).ok_or_else(|| Error::Unsupported {
        what: "head dims",
        got: format!("{} and {}", dims.0, dims.1),
        why: "attention on the GPU has kernels for heads of 64, 80, 96, 112, 128 and 256 channels, and for keys of 192 with values \
              of 128; pad the heads"
            .into(),
    })
}

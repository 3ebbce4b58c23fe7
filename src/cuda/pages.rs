//! The pages of one layer in device memory.

use super::abi::QkvPool;
use super::raw::{DeviceSlice, DeviceSliceMut};
use super::{check, parameters};
use crate::error::{Error, Result};
use crate::format::{Axis, Format};
use crate::layout::PageLayout;
use crate::quant::hadamard::check_block;
use crate::quant::page::MAX_DIM;

/// Formats and head dims of a layer's pages.
#[derive(Debug, Clone, Copy)]
pub struct PageFormat {
    key: Format,
    value: Format,
    layout: PageLayout,
}

fn check_format(what: &'static str, f: &Format, dim: usize) -> Result<()> {
    let no = |why: &str| Err(Error::Unsupported { what, got: f.to_string(), why: why.into() });
    if dim == 0 || !dim.is_multiple_of(16) || dim > MAX_DIM {
        return Err(Error::Unsupported {
            what,
            got: format!("{dim} channels"),
            why: "head dims are multiples of 16 up to 512; pad the heads".into(),
        });
    }
    let Format::Affine(a) = f else { return Ok(()) };
    match a.axis {
        Axis::PerToken if a.group > dim || ![32, 64, 128, dim].contains(&a.group) => {
            return no("per-token groups of a page are 32, 64, 128 or the whole head");
        }
        Axis::PerChannel if ![32, 64].contains(&a.group) => {
            return no("per-channel groups of a page are 32 or 64 tokens");
        }
        _ => {}
    }
    a.rotate.map_or(Ok(()), |block| check_block(block, dim))
}

impl PageFormat {
    /// Pages of these formats and head dims.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for what a cache refuses as well: head dims that are no multiples of 16 or above 512, per-token groups
    /// other than 32, 64, 128 or the head, per-channel groups other than 32 or 64, rotations that do not divide a head.
    pub fn new(key: Format, value: Format, key_dim: usize, value_dim: usize) -> Result<Self> {
        check_format("key format", &key, key_dim)?;
        check_format("value format", &value, value_dim)?;
        Ok(Self { key, value, layout: PageLayout::new(&key, &value, key_dim, value_dim) })
    }

    /// How keys are stored.
    pub fn key(&self) -> &Format {
        &self.key
    }

    /// How values are stored.
    pub fn value(&self) -> &Format {
        &self.value
    }

    /// Where things lie.
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// Bytes between rows of codes in shared memory, for the wider of the two operands.
    pub(crate) fn code_stride(&self) -> u32 {
        let bytes = |f: &Format, dim: usize| if f.code_bits() == 16 { 2 * dim } else { dim };
        let (k, v) = (bytes(&self.key, self.layout.key.dim), bytes(&self.value, self.layout.value.dim));
        parameters::code_stride(k.max(v)) as u32
    }

    /// Shared memory that holds one operand of a page: codes, then pairs.
    pub(crate) fn shared(&self) -> u32 {
        let pairs = self.layout.key.pair_bytes.max(self.layout.value.pair_bytes);
        crate::layout::TILE as u32 * self.code_stride() + pairs as u32
    }
}

macro_rules! pool {
    ($name:ident, $slice:ident, $doc:literal) => {
        #[doc = $doc]
        ///
        /// Page (block, head) begins at byte `(block * heads + head) * page_bytes` of the memory.
        #[derive(Debug)]
        pub struct $name<'a> {
            memory: $slice<'a, u8>,
            heads: usize,
            blocks: usize,
            format: PageFormat,
        }

        impl<'a> $name<'a> {
            /// The pages in `memory`, which is whole blocks and 16-byte aligned.
            ///
            /// # Errors
            /// [`Error::Length`] if it is not whole blocks, [`Error::Address`] if it is null or not aligned,
            /// [`Error::Unsupported`] for 0 heads or more than 2^31 - 1 heads or blocks.
            pub fn new(memory: impl Into<$slice<'a, u8>>, heads: usize, format: PageFormat) -> Result<Self> {
                let memory = memory.into();
                let blocks = blocks(memory.address(), memory.len(), heads, &format)?;
                Ok(Self { memory, heads, blocks, format })
            }

            /// kv heads.
            pub fn heads(&self) -> usize {
                self.heads
            }

            /// Blocks of 64 tokens of all heads.
            pub fn blocks(&self) -> usize {
                self.blocks
            }

            /// Formats and geometry.
            pub fn format(&self) -> &PageFormat {
                &self.format
            }

            /// The device that allocated them, where that is known.
            pub fn device(&self) -> Option<u32> {
                self.memory.device()
            }

            /// The memory.
            pub fn address(&self) -> u64 {
                self.memory.address()
            }

            /// What kernels take.
            pub(crate) fn parameters(&self) -> QkvPool {
                let f = &self.format;
                QkvPool {
                    base: self.memory.address(),
                    page_bytes: f.layout.page_bytes as u64,
                    blocks: self.blocks as u32,
                    heads: self.heads as u32,
                    key_format: parameters::format(&f.key),
                    value_format: parameters::format(&f.value),
                    key: parameters::operand(&f.layout.key, false),
                    value: parameters::operand(&f.layout.value, true),
                }
            }
        }
    };
}
pool!(Pages, DeviceSlice, "The pages of a layer, for reading.");
pool!(PagesMut, DeviceSliceMut, "The pages of a layer, for writing.");

impl PagesMut<'_> {
    /// The same pages for reading.
    pub fn as_ref(&self) -> Pages<'_> {
        Pages { memory: self.memory.as_ref(), heads: self.heads, blocks: self.blocks, format: self.format }
    }
}

fn blocks(address: u64, len: usize, heads: usize, format: &PageFormat) -> Result<usize> {
    let most = i32::MAX as usize;
    if heads == 0 || heads > most {
        return Err(Error::Unsupported {
            what: "heads",
            got: heads.to_string(),
            why: "a pool has 1 to 2^31 - 1 heads".into(),
        });
    }
    let block = format.layout.page_bytes.saturating_mul(heads);
    let blocks = len / block;
    check::len("pages", blocks.saturating_mul(block), len)?;
    if blocks > most {
        return Err(Error::Unsupported {
            what: "blocks",
            got: blocks.to_string(),
            why: "block numbers are i32".into(),
        });
    }
    if blocks > 0 {
        check::address("pages", address, 16)?;
    }
    Ok(blocks)
}

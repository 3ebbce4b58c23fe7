//! Host-side checks that launch functions share.

use super::Device;
use crate::config::CacheConfig;
use crate::error::{Error, Result};

/// Device memory is named and aligned to `align` bytes.
pub(crate) fn address(what: &'static str, address: u64, align: usize) -> Result<()> {
    if address == 0 || !address.is_multiple_of(align as u64) {
        return Err(Error::Address { what, got: address, align });
    }
    Ok(())
}

/// All memory is the device's, as far as that is known.
pub(crate) fn home<const N: usize>(device: &Device, memory: [(&'static str, Option<u32>); N]) -> Result<()> {
    let here = device.ordinal() as u32;
    match memory.into_iter().find_map(|(what, d)| d.filter(|d| *d != here).map(|d| (what, d))) {
        None => Ok(()),
        Some((what, other)) => Err(Error::Unsupported {
            what,
            got: format!("memory of device {other}"),
            why: format!(
                "the launch is on device {here}; use Device::new({other}) and a stream of that device"
            ),
        }),
    }
}

/// The same shape as another tensor.
pub(crate) fn same_dims(what: &'static str, expected: [usize; 3], got: [usize; 3]) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    Err(Error::Shape { what, expected: format!("{expected:?}"), got: format!("{got:?}") })
}

/// A slice has exactly this many elements.
pub(crate) fn len(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Length { what, expected, got }) }
}

/// A slice has this many elements or more.
pub(crate) fn at_least(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if got >= expected { Ok(()) } else { Err(Error::Length { what, expected, got }) }
}

/// A number that kernels hold in 31 bits.
pub(crate) fn count(what: &'static str, n: usize) -> Result<()> {
    if n <= i32::MAX as usize {
        return Ok(());
    }
    Err(Error::Capacity { what, needed: n, available: i32::MAX as usize, help: "it must fit in 31 bits" })
}

/// Heads and channels are numbers that a kernel holds in 32 bits, and rows in 64.
pub(crate) fn sizes(what: &'static str, dims: [usize; 3]) -> Result<()> {
    let most = i32::MAX as usize;
    let rows = dims[0].checked_mul(dims[1]).and_then(|r| r.checked_mul(dims[2]));
    if dims[1] > most || dims[2] > most || rows.is_none_or(|r| r > isize::MAX as usize) {
        return Err(Error::Shape {
            what,
            expected: format!("at most {most} heads and channels, and {} elements", isize::MAX),
            got: format!("{dims:?}"),
        });
    }
    Ok(())
}

/// Whether a block's shared memory fits the device.
pub(crate) fn shared(device: &Device, c: &CacheConfig, bytes: usize) -> Result<()> {
    let limit = device.shared_limit() as usize;
    if bytes <= limit {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: "head dim",
        got: format!("{} and {}", c.key_dim, c.value_dim),
        why: format!(
            "a block's tiles take {bytes} bytes of shared memory, the device has {limit}; use smaller heads"
        ),
    })
}

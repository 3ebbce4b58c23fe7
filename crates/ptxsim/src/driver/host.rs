//! The caller's memory.
//!
//! A wrong pointer must give an error, not end the process: the kernel copies, and says if an address is not mapped.
//! Where it may not (a sandbox without these system calls), memory is touched directly as a driver would.

use super::error::{Code, Failure, Outcome, fail, invalid};
use std::io;

#[repr(C)]
struct IoVec {
    base: *mut u8,
    len: usize,
}

unsafe extern "C" {
    fn process_vm_readv(
        pid: i32,
        local: *const IoVec,
        locals: usize,
        remote: *const IoVec,
        remotes: usize,
        flags: usize,
    ) -> isize;
    fn process_vm_writev(
        pid: i32,
        local: *const IoVec,
        locals: usize,
        remote: *const IoVec,
        remotes: usize,
        flags: usize,
    ) -> isize;
}

const EFAULT: i32 = 14;
const PAGE: usize = 4096;

/// How a copy by the kernel ended.
enum Copied {
    All,
    /// So many bytes, then an address that is not mapped (or not writable).
    Until(usize),
    /// The system does not offer it.
    Unavailable,
}

fn transfer(mut local: usize, mut remote: usize, len: usize, write: bool) -> Copied {
    let pid = std::process::id() as i32;
    let mut done = 0;
    while done < len {
        let ours = IoVec { base: local as *mut u8, len: len - done };
        let theirs = IoVec { base: remote as *mut u8, len: len - done };
        let n = if write {
            // SAFETY: the local vector is a live slice of the caller of this function; the kernel checks the remote.
            unsafe { process_vm_writev(pid, &ours, 1, &theirs, 1, 0) }
        } else {
            // SAFETY: as above, the local one is writable.
            unsafe { process_vm_readv(pid, &ours, 1, &theirs, 1, 0) }
        };
        match usize::try_from(n) {
            Ok(0) => return Copied::Until(done),
            Ok(n) => (done, local, remote) = (done + n, local + n, remote + n),
            Err(_) if io::Error::last_os_error().raw_os_error() == Some(EFAULT) => {
                return Copied::Until(done);
            }
            Err(_) => return Copied::Unavailable,
        }
    }
    Copied::All
}

fn bad<T>(address: usize, len: usize, at: usize) -> Outcome<T> {
    if address == 0 {
        return invalid("a null pointer");
    }
    let what = if super::looks_like_device(address as u64) { " (a device address)" } else { "" };
    invalid(format!("{len} bytes of the host at {address:#x}{what}: not accessible from byte {at}"))
}

/// Copies from the caller.
pub(crate) fn read(address: usize, out: &mut [u8]) -> Outcome {
    if out.is_empty() {
        return Ok(());
    }
    if address == 0 {
        return bad(0, out.len(), 0);
    }
    match transfer(out.as_mut_ptr() as usize, address, out.len(), false) {
        Copied::All => Ok(()),
        Copied::Until(at) => bad(address, out.len(), at),
        Copied::Unavailable => {
            // SAFETY: the API's contract: the caller gave a readable range of this length; `out` is ours.
            unsafe { std::ptr::copy_nonoverlapping(address as *const u8, out.as_mut_ptr(), out.len()) }
            Ok(())
        }
    }
}

/// Copies to the caller.
pub(crate) fn write(address: usize, data: &[u8]) -> Outcome {
    if data.is_empty() {
        return Ok(());
    }
    if address == 0 {
        return bad(0, data.len(), 0);
    }
    match transfer(data.as_ptr() as usize, address, data.len(), true) {
        Copied::All => Ok(()),
        Copied::Until(at) => bad(address, data.len(), at),
        Copied::Unavailable => {
            // SAFETY: the API's contract: the caller gave a writable range of this length; `data` is ours.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len()) }
            Ok(())
        }
    }
}

/// A whole range.
pub(crate) fn bytes(address: usize, len: usize) -> Outcome<Vec<u8>> {
    let mut out = Vec::new();
    out.try_reserve_exact(len)
        .map_err(|_| Failure { code: Code::OutOfMemory, reason: format!("{len} bytes of host memory") })?;
    out.resize(len, 0);
    read(address, &mut out)?;
    Ok(out)
}

/// Plain numbers that cross the border.
pub(crate) trait Plain: Copy {
    /// Their bytes.
    const LEN: usize;
    /// From little-endian bytes of that length.
    fn from_bytes(bytes: &[u8]) -> Self;
    /// To little-endian bytes at the start of a buffer.
    fn to_bytes(self, out: &mut [u8; 8]);
}

macro_rules! plain {
    ($($ty:ty),*) => { $(impl Plain for $ty {
        const LEN: usize = size_of::<Self>();
        fn from_bytes(bytes: &[u8]) -> Self {
            let mut own = [0; size_of::<Self>()];
            own.copy_from_slice(&bytes[..Self::LEN]);
            Self::from_le_bytes(own)
        }
        fn to_bytes(self, out: &mut [u8; 8]) {
            out[..Self::LEN].copy_from_slice(&self.to_le_bytes());
        }
    })* };
}
plain!(i32, u32, u64, usize, f32);

/// Writes an out-parameter.
pub(crate) fn put<T: Plain>(address: usize, value: T) -> Outcome {
    let mut buffer = [0; 8];
    value.to_bytes(&mut buffer);
    write(address, &buffer[..T::LEN])
}

/// Writes an out-parameter that may be null.
pub(crate) fn put_if<T: Plain>(address: usize, value: T) -> Outcome {
    if address == 0 { Ok(()) } else { put(address, value) }
}

/// Refuses a null out-parameter before anything is done.
pub(crate) fn need(address: usize) -> Outcome {
    if address == 0 { bad(0, 0, 0) } else { Ok(()) }
}

/// Reads a number.
pub(crate) fn get<T: Plain>(address: usize) -> Outcome<T> {
    let mut buffer = [0; 8];
    read(address, &mut buffer[..T::LEN])?;
    Ok(T::from_bytes(&buffer))
}

/// Reads a text up to its NUL, page by page so as not to reach beyond its mapping.
pub(crate) fn text(address: usize, limit: usize) -> Outcome<Vec<u8>> {
    let mut out = Vec::new();
    let mut at = address;
    while out.len() < limit {
        let n = PAGE - at % PAGE;
        let mut page = [0; PAGE];
        read(at, &mut page[..n])?;
        if let Some(end) = page[..n].iter().position(|b| *b == 0) {
            out.extend_from_slice(&page[..end]);
            return Ok(out);
        }
        out.extend_from_slice(&page[..n]);
        at += n;
    }
    invalid(format!("a text of more than {limit} bytes without a NUL"))
}

/// A name: short and UTF-8.
pub(crate) fn name(address: usize) -> Outcome<String> {
    match String::from_utf8(text(address, 1 << 16)?) {
        Ok(name) => Ok(name),
        Err(_) => fail(Code::InvalidValue, "a name that is not UTF-8"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_addresses_are_errors() {
        let mut buffer = [0; 16];
        assert_eq!(read(0, &mut buffer).unwrap_err().code, Code::InvalidValue);
        assert_eq!(read(0x10, &mut buffer).unwrap_err().code, Code::InvalidValue);
        assert_eq!(write(0xdead_0000_0000, &buffer).unwrap_err().code, Code::InvalidValue);
        // text of the program is not writable
        assert_eq!(
            write(wrong_addresses_are_errors as *const () as usize, &buffer).unwrap_err().code,
            Code::InvalidValue
        );
        assert!(put(0, 1u32).is_err());
    }

    #[test]
    fn texts_end_at_their_nul() {
        let long = [vec![b'x'; 10_000], vec![0, b'y']].concat();
        assert_eq!(text(long.as_ptr() as usize, 1 << 20).unwrap(), vec![b'x'; 10_000]);
        assert!(text(long.as_ptr() as usize, 5000).is_err());
        assert_eq!(name(c"abc".as_ptr() as usize).unwrap(), "abc");
        let mut out = 0u64;
        put(&raw mut out as usize, 0x0102_0304_0506_0708u64).unwrap();
        assert_eq!(out, 0x0102_0304_0506_0708);
        assert_eq!(get::<u32>(&raw const out as usize).unwrap(), 0x0506_0708);
    }
}

//! Device memory, page-locked host memory, copies and fills.

use super::error::{Code, Failure, Outcome, fail, invalid};
use super::host;
use super::state::{Allocated, Device, Guard, State, driver};
use super::work::{Action, Source, Value};
use crate::memory::MemoryError;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;

/// Allocations from this size on are compared with what the host has left.
const LARGE: u64 = 64 << 20;

/// Page-locked host memory: allocated here, or registered by the caller.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) context: u64,
    bytes: usize,
    flags: u32,
    own: Option<Pages>,
}

/// An allocation of host memory.
#[derive(Debug)]
struct Pages {
    address: usize,
    layout: Layout,
}

impl Pages {
    fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), 4096).ok()?;
        // SAFETY: the layout's size is not 0.
        let pointer = unsafe { alloc_zeroed(layout) };
        (!pointer.is_null()).then_some(Self { address: pointer as usize, layout })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and freed only here.
        unsafe { dealloc(self.address as *mut u8, self.layout) }
    }
}

/// Bytes that the host can give, if it says.
fn host_room() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    // The rest is for what keeps track of the memory, and for the process itself.
    Some(kib.saturating_mul(1024) / 8 * 7)
}

impl Device {
    /// Bytes that can be allocated.
    pub(crate) fn free(&self) -> u64 {
        let free = self.memory.capacity() - self.memory.used();
        host_room().map_or(free, |room| free.min(room))
    }

    /// Allocates, without asking more of the host than it has.
    pub(crate) fn alloc(&self, bytes: u64) -> Outcome<u64> {
        if bytes >= LARGE && bytes > self.free() {
            let free = self.free();
            return fail(
                Code::OutOfMemory,
                format!("{bytes} bytes asked for, {free} can be had (of the card and of this machine)"),
            );
        }
        self.memory.alloc(bytes).map_err(|error| match error {
            MemoryError::OutOfMemory { .. } => Failure { code: Code::OutOfMemory, reason: error.to_string() },
            MemoryError::Invalid(reason) => Failure { code: Code::InvalidValue, reason },
        })
    }
}

impl State {
    /// The device that an address belongs to: the context's own, unless the address is known to be another's.
    fn home(&self, context: u64, address: u64) -> Outcome<Arc<Device>> {
        let own = self.device_of(context)?;
        if own.memory.find(address).is_some() {
            return Ok(own);
        }
        let other = self.devices.iter().find(|d| d.memory.find(address).is_some());
        Ok(other.cloned().unwrap_or(own))
    }

    /// Refuses a range that is not inside one allocation, or inside one that is being freed.
    fn check_range(&self, device: &Device, address: u64, bytes: u64) -> Outcome {
        match device.memory.find(address) {
            _ if bytes == 0 => Ok(()),
            Some(a) if a.holds(address - a.base(), bytes) => {
                if self.allocations.get(&a.base()).is_some_and(|a| a.freeing) {
                    return invalid(format!("{address:#x} is in an allocation that is being freed"));
                }
                Ok(())
            }
            _ => invalid(device.memory.describe(address, bytes)),
        }
    }

    /// Whether a host range is page-locked; an error if only a part is.
    fn is_pinned(&self, address: usize, bytes: usize) -> Outcome<bool> {
        match self.pinned.range(..=address).next_back() {
            Some((base, p)) if address - base < p.bytes => {
                if bytes > p.bytes - (address - base) {
                    return invalid(format!(
                        "{bytes} bytes at {address:#x} reach beyond a page-locked allocation of {} bytes at {base:#x}",
                        p.bytes
                    ));
                }
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Notes an allocation.
    pub(crate) fn note(&mut self, address: u64, context: u64, graph: bool) {
        self.allocations.insert(address, Allocated { context, freeing: false, graph });
    }

    /// The allocation that is to be freed.
    fn to_free(&self, context: u64, address: u64) -> Outcome<Allocated> {
        match self.allocations.get(&address) {
            Some(a) if a.freeing => invalid(format!("{address:#x} is being freed already")),
            Some(a) => Ok(*a),
            None => invalid(format!(
                "{address:#x} is no allocation: {}",
                self.device_of(context)?.memory.describe(address, 1)
            )),
        }
    }
}

/// A stream-ordered allocation: the address is known at once.
pub(crate) fn alloc_async(out: usize, bytes: u64, handle: u64) -> Outcome {
    host::need(out)?;
    if bytes == 0 {
        return invalid("an allocation of 0 bytes");
    }
    let mut guard = driver().lock();
    let (stream, context) = guard.stream(handle)?;
    let captured = guard.captured(stream)?;
    let address = guard.device_of(context)?.alloc(bytes)?;
    host::put(out, address)?;
    guard.note(address, context, captured);
    if captured {
        guard.add_node(stream, Action::Nothing)?;
    }
    Ok(())
}

fn free_async(address: u64, handle: u64) -> Outcome {
    let mut guard = driver().lock();
    let (stream, context) = guard.stream(handle)?;
    let captured = guard.captured(stream)?;
    let allocated = guard.to_free(context, address)?;
    if captured && !allocated.graph {
        guard.invalidate(stream, "a free of memory from outside the graph");
        return invalid("a captured free must be of memory that the same graph allocates");
    }
    // A graph's memory has the same address each time it is launched: it stays until the context ends.
    let action = if allocated.graph {
        Action::Nothing
    } else {
        if let Some(a) = guard.allocations.get_mut(&address) {
            a.freeing = true;
        }
        Action::Free { device: guard.home(context, address)?, address }
    };
    if let Some(op) = guard.enqueue(stream, action)? {
        drop(driver().settle(guard, op));
    }
    Ok(())
}

/// How a copy or fill is called.
#[derive(Debug, Clone, Copy)]
enum How {
    /// In a stream.
    Stream(u64),
    /// In the legacy stream; the name is for messages.
    Plain(&'static str),
}

impl How {
    fn begin(self, guard: &mut Guard) -> Outcome<(u64, u64)> {
        match self {
            Self::Stream(handle) => guard.stream(handle),
            Self::Plain(name) => {
                let found = guard.stream(0)?;
                guard.captured(found.0)?;
                guard.refuse_unsafe(name)?;
                Ok(found)
            }
        }
    }

    /// Enqueues; then waits if `wait`, unless the operation was captured.
    fn end(self, mut guard: Guard, stream: u64, context: u64, action: Action, wait: bool) -> Outcome {
        let Some(op) = guard.enqueue(stream, action)? else { return Ok(()) };
        guard = driver().settle(guard, op);
        if wait {
            guard = driver().finish_all(guard, &[op]);
            return guard.check(context);
        }
        Ok(())
    }
}

fn to_device(to: u64, from: usize, bytes: usize, how: How) -> Outcome {
    let mut guard = driver().lock();
    let (stream, context) = how.begin(&mut guard)?;
    let device = guard.home(context, to)?;
    guard.check_range(&device, to, bytes as u64)?;
    if bytes == 0 {
        return Ok(());
    }
    let captured = guard.captured(stream)?;
    let source = if captured || guard.is_pinned(from, bytes)? {
        // Looked at now so that a wrong pointer is refused here, and read when the copy runs.
        host::read(from, &mut [0])?;
        Source::Host(from, bytes)
    } else {
        Source::Taken(host::bytes(from, bytes)?.into())
    };
    how.end(
        guard,
        stream,
        context,
        Action::ToDevice { device, to, from: source },
        matches!(how, How::Plain(_)),
    )
}

fn to_host(to: usize, from: u64, bytes: usize, how: How) -> Outcome {
    let mut guard = driver().lock();
    let (stream, context) = how.begin(&mut guard)?;
    let device = guard.home(context, from)?;
    guard.check_range(&device, from, bytes as u64)?;
    if bytes == 0 {
        return Ok(());
    }
    if to == 0 {
        return invalid("a null pointer");
    }
    // A copy to pageable memory is over when the call returns, in a stream too.
    let wait = matches!(how, How::Plain(_)) || !guard.is_pinned(to, bytes)?;
    if wait {
        check_writable(to, bytes)?;
    }
    how.end(guard, stream, context, Action::ToHost { device, to, from, bytes }, wait)
}

/// Refuses a host range whose ends cannot be written, leaving it as it is.
fn check_writable(address: usize, bytes: usize) -> Outcome {
    for at in [address, address.wrapping_add(bytes - 1)] {
        let mut byte = [0];
        host::read(at, &mut byte)?;
        host::write(at, &byte)?;
    }
    Ok(())
}

fn on_device(to: u64, from: u64, bytes: usize, how: How) -> Outcome {
    let mut guard = driver().lock();
    let (stream, context) = how.begin(&mut guard)?;
    let (there, here) = (guard.home(context, to)?, guard.home(context, from)?);
    guard.check_range(&there, to, bytes as u64)?;
    guard.check_range(&here, from, bytes as u64)?;
    if bytes == 0 {
        return Ok(());
    }
    let action = Action::OnDevice { to: (there, to), from: (here, from), bytes: bytes as u64 };
    // The host does not wait for copies inside the device.
    how.end(guard, stream, context, action, false)
}

/// Copies between addresses of any kind.
fn anywhere(to: u64, from: u64, bytes: usize, how: How) -> Outcome {
    match (super::looks_like_device(to), super::looks_like_device(from)) {
        (true, true) => on_device(to, from, bytes, how),
        (true, false) => to_device(to, from as usize, bytes, how),
        (false, true) => to_host(to as usize, from, bytes, how),
        (false, false) => {
            driver().lock().usable()?;
            host::write(to as usize, &host::bytes(from as usize, bytes)?)
        }
    }
}

/// A fill: `width` values in each of `height` rows that lie `pitch` bytes apart.
#[derive(Debug, Clone, Copy)]
struct Fill {
    to: u64,
    pitch: u64,
    width: u64,
    height: u64,
}

fn fill<const N: usize>(area: Fill, value: [u8; N], how: How) -> Outcome {
    let mut guard = driver().lock();
    let (stream, context) = how.begin(&mut guard)?;
    let size = N as u64;
    let Fill { to, pitch, width, height } = area;
    if !to.is_multiple_of(size) || (height > 1 && !pitch.is_multiple_of(size)) {
        return invalid(format!("{to:#x} (pitch {pitch}) is not a multiple of the value's {size} bytes"));
    }
    let row = width.checked_mul(size).filter(|row| height <= 1 || *row <= pitch);
    let Some(row) = row else {
        return invalid(format!(
            "rows of {width} values of {size} bytes do not fit a pitch of {pitch} bytes"
        ));
    };
    if width == 0 || height == 0 {
        return Ok(());
    }
    let Some(bytes) = pitch.checked_mul(height - 1).and_then(|b| b.checked_add(row)) else {
        return invalid("an area greater than memory");
    };
    let device = guard.home(context, to)?;
    guard.check_range(&device, to, bytes)?;
    let mut own = [0; 4];
    own[..N].copy_from_slice(&value);
    let value = Value { bytes: own, len: N };
    how.end(guard, stream, context, Action::Fill { device, to, value, width, height, pitch }, false)
}

/// A single row.
fn line(to: u64, width: u64) -> Fill {
    Fill { to, pitch: 0, width, height: 1 }
}

fn host_alloc(out: usize, bytes: usize, flags: u32, name: &str) -> Outcome {
    host::need(out)?;
    if flags & !7 != 0 {
        return invalid(format!("flags {flags:#x}"));
    }
    if bytes == 0 {
        return invalid("an allocation of 0 bytes");
    }
    let mut guard = driver().lock();
    let context = guard.usable()?;
    guard.refuse_unsafe(name)?;
    let room = host_room().unwrap_or(u64::MAX);
    let Some(pages) = Some(bytes).filter(|b| *b as u64 <= room).and_then(Pages::new) else {
        return fail(Code::OutOfMemory, format!("{bytes} bytes of host memory"));
    };
    let address = pages.address;
    host::put(out, address)?;
    guard.pinned.insert(address, Pinned { context, bytes, flags, own: Some(pages) });
    Ok(())
}

/// Ends page-locked memory: `own` tells allocated from registered.
fn unpin(address: usize, own: bool) -> Outcome {
    let mut guard = driver().lock();
    let context = guard.usable()?;
    match guard.pinned.get(&address) {
        Some(p) if p.own.is_some() == own => {}
        _ if own => return invalid(format!("{address:#x} was not allocated by cuMemHostAlloc")),
        _ => return fail(Code::HostMemoryNotRegistered, format!("{address:#x} was not registered")),
    }
    // Copies under way may still use it.
    let rest = guard.unfinished(context);
    guard = driver().finish_all(guard, &rest);
    guard.pinned.remove(&address);
    Ok(())
}

/// What the driver knows of a pointer.
fn pointer_attribute(out: usize, attribute: i32, pointer: u64) -> Outcome {
    host::need(out)?;
    let guard = driver().lock();
    let context = guard.usable()?;
    let device = guard.home(context, pointer)?;
    if let Some(a) = device.memory.find(pointer) {
        return match attribute {
            1 => host::put(out, guard.allocations.get(&a.base()).map_or(context, |a| a.context)),
            2 => host::put(out, 2u32),
            3 => host::put(out, pointer),
            6 | 8 => host::write(out, &[0]),
            7 => host::put(out, a.base() >> 8),
            9 => host::put(out, device.ordinal as i32),
            11 => host::put(out, a.base()),
            12 => host::put(out, a.bytes()),
            13 => host::write(out, &[1]),
            _ => invalid(format!("pointer attribute {attribute}")),
        };
    }
    match guard.pinned.range(..=pointer as usize).next_back() {
        Some((base, p)) if pointer as usize - base < p.bytes => match attribute {
            1 => host::put(out, p.context),
            2 => host::put(out, 1u32),
            4 => host::put(out, pointer),
            6 | 8 => host::write(out, &[0]),
            9 => host::put(out, device.ordinal as i32),
            11 => host::put(out, *base),
            12 => host::put(out, p.bytes),
            _ => invalid(format!("pointer attribute {attribute}")),
        },
        _ => invalid(format!("{pointer:#x} is no address that the driver gave")),
    }
}

api! {
    fn cuMemGetInfo_v2(free: usize, total: usize) {
        let guard = driver().lock();
        let context = guard.usable()?;
        let device = guard.device_of(context)?;
        host::put(free, device.free())?;
        host::put(total, device.memory.capacity())
    }
    fn cuMemAlloc_v2(out: usize, bytes: u64) {
        host::need(out)?;
        if bytes == 0 {
            return invalid("an allocation of 0 bytes");
        }
        let mut guard = driver().lock();
        let context = guard.usable()?;
        guard.refuse_unsafe("cuMemAlloc")?;
        let address = guard.device_of(context)?.alloc(bytes)?;
        host::put(out, address)?;
        guard.note(address, context, false);
        Ok(())
    }
    fn cuMemAllocPitch_v2(out: usize, pitch: usize, width: u64, height: u64, element: u32) {
        host::need(out)?;
        host::need(pitch)?;
        if ![4, 8, 16].contains(&element) {
            return invalid(format!("elements of {element} bytes; 4, 8 or 16 can be accessed"));
        }
        let row = width.checked_next_multiple_of(512).filter(|row| *row > 0);
        let Some((row, bytes)) = row.and_then(|r| Some((r, r.checked_mul(height)?))).filter(|(_, b)| *b > 0) else {
            return invalid(format!("{height} rows of {width} bytes"));
        };
        let mut guard = driver().lock();
        let context = guard.usable()?;
        guard.refuse_unsafe("cuMemAllocPitch")?;
        let address = guard.device_of(context)?.alloc(bytes)?;
        host::put(out, address)?;
        host::put(pitch, row)?;
        guard.note(address, context, false);
        Ok(())
    }
    fn cuMemFree_v2(address: u64) {
        let mut guard = driver().lock();
        let context = guard.usable()?;
        if address == 0 {
            return Ok(());
        }
        guard.refuse_unsafe("cuMemFree")?;
        let allocated = guard.to_free(context, address)?;
        if allocated.graph {
            return Ok(());
        }
        // From here on nobody else frees it or starts a copy.
        if let Some(a) = guard.allocations.get_mut(&address) {
            a.freeing = true;
        }
        let rest = guard.unfinished(allocated.context);
        guard = driver().finish_all(guard, &rest);
        guard.check(context)?;
        let device = guard.home(context, address)?;
        guard.allocations.remove(&address);
        device.memory.free(address).map_err(|e| Failure { code: Code::InvalidValue, reason: e.to_string() })
    }
    fn cuMemAllocAsync(out: usize, bytes: u64, stream: u64) {
        alloc_async(out, bytes, stream)
    }
    fn cuMemFreeAsync(address: u64, stream: u64) {
        free_async(address, stream)
    }
    fn cuMemGetAddressRange_v2(base: usize, bytes: usize, pointer: u64) {
        let guard = driver().lock();
        let context = guard.usable()?;
        let Some(a) = guard.home(context, pointer)?.memory.find(pointer) else {
            return fail(Code::NotFound, format!("{pointer:#x} is in no allocation"));
        };
        host::put_if(base, a.base())?;
        host::put_if(bytes, a.bytes())
    }
    fn cuMemHostAlloc(out: usize, bytes: usize, flags: u32) {
        host_alloc(out, bytes, flags, "cuMemHostAlloc")
    }
    fn cuMemAllocHost_v2(out: usize, bytes: usize) {
        host_alloc(out, bytes, 0, "cuMemAllocHost")
    }
    fn cuMemFreeHost(address: usize) {
        unpin(address, true)
    }
    fn cuMemHostRegister_v2(address: usize, bytes: usize, flags: u32) {
        if flags & !15 != 0 || bytes == 0 {
            return invalid(format!("{bytes} bytes with flags {flags:#x}"));
        }
        let mut guard = driver().lock();
        let context = guard.usable()?;
        host::read(address, &mut [0])?;
        let end = address.saturating_add(bytes);
        if guard.pinned.range(..end).next_back().is_some_and(|(base, p)| base + p.bytes > address) {
            return fail(Code::HostMemoryAlreadyRegistered, format!("{bytes} bytes at {address:#x}"));
        }
        guard.pinned.insert(address, Pinned { context, bytes, flags, own: None });
        Ok(())
    }
    fn cuMemHostUnregister(address: usize) {
        unpin(address, false)
    }
    fn cuMemHostGetFlags(out: usize, address: usize) {
        let guard = driver().lock();
        guard.usable()?;
        match guard.pinned.range(..=address).next_back() {
            Some((base, p)) if address - base < p.bytes => host::put(out, p.flags),
            _ => invalid(format!("{address:#x} is not page-locked")),
        }
    }
    fn cuPointerGetAttribute(out: usize, attribute: i32, pointer: u64) {
        pointer_attribute(out, attribute, pointer)
    }

    fn cuMemcpyHtoD_v2(to: u64, from: usize, bytes: usize) {
        to_device(to, from, bytes, How::Plain("cuMemcpyHtoD"))
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: usize, bytes: usize, stream: u64) {
        to_device(to, from, bytes, How::Stream(stream))
    }
    fn cuMemcpyDtoH_v2(to: usize, from: u64, bytes: usize) {
        to_host(to, from, bytes, How::Plain("cuMemcpyDtoH"))
    }
    fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, bytes: usize, stream: u64) {
        to_host(to, from, bytes, How::Stream(stream))
    }
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        on_device(to, from, bytes, How::Plain("cuMemcpyDtoD"))
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) {
        on_device(to, from, bytes, How::Stream(stream))
    }
    fn cuMemcpy(to: u64, from: u64, bytes: usize) {
        anywhere(to, from, bytes, How::Plain("cuMemcpy"))
    }
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64) {
        anywhere(to, from, bytes, How::Stream(stream))
    }
    fn cuMemcpyPeerAsync(to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize, stream: u64) {
        {
            let guard = driver().lock();
            guard.usable()?;
            for context in [to_context, from_context] {
                if !guard.contexts.contains_key(&context) {
                    return fail(Code::InvalidContext, format!("{context:#x} is no context"));
                }
            }
        }
        on_device(to, from, bytes, How::Stream(stream))
    }

    fn cuMemsetD8_v2(to: u64, value: u8, count: u64) {
        fill(line(to, count), [value], How::Plain("cuMemsetD8"))
    }
    fn cuMemsetD16_v2(to: u64, value: u16, count: u64) {
        fill(line(to, count), value.to_le_bytes(), How::Plain("cuMemsetD16"))
    }
    fn cuMemsetD32_v2(to: u64, value: u32, count: u64) {
        fill(line(to, count), value.to_le_bytes(), How::Plain("cuMemsetD32"))
    }
    fn cuMemsetD8Async(to: u64, value: u8, count: u64, stream: u64) {
        fill(line(to, count), [value], How::Stream(stream))
    }
    fn cuMemsetD16Async(to: u64, value: u16, count: u64, stream: u64) {
        fill(line(to, count), value.to_le_bytes(), How::Stream(stream))
    }
    fn cuMemsetD32Async(to: u64, value: u32, count: u64, stream: u64) {
        fill(line(to, count), value.to_le_bytes(), How::Stream(stream))
    }
    fn cuMemsetD2D8_v2(to: u64, pitch: u64, value: u8, width: u64, height: u64) {
        fill(Fill { to, pitch, width, height }, [value], How::Plain("cuMemsetD2D8"))
    }
    fn cuMemsetD2D16_v2(to: u64, pitch: u64, value: u16, width: u64, height: u64) {
        fill(Fill { to, pitch, width, height }, value.to_le_bytes(), How::Plain("cuMemsetD2D16"))
    }
    fn cuMemsetD2D32_v2(to: u64, pitch: u64, value: u32, width: u64, height: u64) {
        fill(Fill { to, pitch, width, height }, value.to_le_bytes(), How::Plain("cuMemsetD2D32"))
    }
    fn cuMemsetD2D8Async(to: u64, pitch: u64, value: u8, width: u64, height: u64, stream: u64) {
        fill(Fill { to, pitch, width, height }, [value], How::Stream(stream))
    }
    fn cuMemsetD2D16Async(to: u64, pitch: u64, value: u16, width: u64, height: u64, stream: u64) {
        fill(Fill { to, pitch, width, height }, value.to_le_bytes(), How::Stream(stream))
    }
    fn cuMemsetD2D32Async(to: u64, pitch: u64, value: u32, width: u64, height: u64, stream: u64) {
        fill(Fill { to, pitch, width, height }, value.to_le_bytes(), How::Stream(stream))
    }
}

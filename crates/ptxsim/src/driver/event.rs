//! Events.

use super::error::{Code, Outcome, fail, invalid};
use super::host;
use super::state::{Kind, State, driver};
use super::work::{Action, OpId, Stamp};
use std::sync::Arc;

/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`
const INTERPROCESS: u32 = 4;

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) context: u64,
    flags: u32,
    recorded: Option<Recorded>,
}

/// What an event was last recorded as.
#[derive(Debug, Clone)]
enum Recorded {
    Work(OpId, Arc<Stamp>),
    /// In a capture, after these nodes.
    Captured(u64, Vec<usize>),
}

impl State {
    fn event(&self, handle: u64) -> Outcome<&Event> {
        self.usable()?;
        match self.events.get(&handle) {
            Some(event) => Ok(event),
            None => fail(Code::InvalidHandle, format!("{handle:#x} is no event, or one that was destroyed")),
        }
    }

    /// Makes a stream wait for an event.
    pub(crate) fn wait_event(&mut self, stream: u64, handle: u64, flags: u32) -> Outcome<Option<OpId>> {
        let recorded = self.event(handle)?.recorded.clone();
        let capturing = self.captured(stream)?;
        match recorded {
            None => Ok(None),
            Some(Recorded::Captured(capture, nodes)) => {
                self.join_capture(stream, capture, &nodes)?;
                Ok(None)
            }
            Some(Recorded::Work(..)) if capturing && flags == 1 => {
                fail(Code::NotSupported, "external event wait nodes")
            }
            Some(Recorded::Work(..)) if capturing => {
                self.invalidate(stream, "a wait for an event that was recorded outside the capture");
                fail(
                    Code::CaptureIsolation,
                    "the capturing stream would wait for an event that was recorded outside the capture (with cudarc: \
                     disable event tracking before the capture)",
                )
            }
            Some(Recorded::Work(op, _)) => self.enqueue_after(stream, Action::Nothing, vec![op]).map(Some),
        }
    }
}

pub(crate) fn record(handle: u64, stream: u64, flags: u32) -> Outcome {
    if flags & !1 != 0 {
        return invalid(format!("flags {flags:#x}"));
    }
    let mut guard = driver().lock();
    let event_context = guard.event(handle)?.context;
    let (stream, context) = guard.stream(stream)?;
    if event_context != context {
        return fail(Code::InvalidHandle, "event and stream belong to different contexts");
    }
    if guard.captured(stream)? {
        if flags == 1 {
            return fail(Code::NotSupported, "external event record nodes");
        }
        let (capture, nodes) = guard.frontier(stream)?;
        if let Some(event) = guard.events.get_mut(&handle) {
            event.recorded = Some(Recorded::Captured(capture, nodes));
        }
        return Ok(());
    }
    let stamp = Arc::new(Stamp::default());
    let op = guard.enqueue_after(stream, Action::Record(Arc::clone(&stamp)), Vec::new())?;
    if let Some(event) = guard.events.get_mut(&handle) {
        event.recorded = Some(Recorded::Work(op, stamp));
    }
    drop(driver().settle(guard, op));
    Ok(())
}

/// Waits for an event, or asks whether it happened.
fn arrive(handle: u64, wait: bool) -> Outcome {
    let mut guard = driver().lock();
    let event = guard.event(handle)?;
    let context = event.context;
    let op = match event.recorded {
        None => return Ok(()),
        Some(Recorded::Captured(capture, _)) => {
            guard.invalidate_capture(capture, "a wait for or query of a captured event");
            return fail(Code::CapturedEvent, "the event was last recorded in a capture");
        }
        Some(Recorded::Work(op, _)) => op,
    };
    guard.refuse_unsafe(if wait { "cuEventSynchronize" } else { "cuEventQuery" })?;
    if guard.is_done(op) {
        return guard.check(context);
    }
    if wait {
        guard = driver().finish_all(guard, &[op]);
        return guard.check(context);
    }
    guard = driver().step(guard, &[op]);
    guard.check(context)?;
    Err(Code::NotReady.into())
}

fn elapsed(out: usize, start: u64, end: u64) -> Outcome {
    host::need(out)?;
    let guard = driver().lock();
    let mut times = [0; 2];
    for (time, handle) in times.iter_mut().zip([start, end]) {
        let event = guard.event(handle)?;
        if event.flags & DISABLE_TIMING != 0 {
            return fail(Code::InvalidHandle, "an event made with CU_EVENT_DISABLE_TIMING has no time");
        }
        *time = match &event.recorded {
            None => return fail(Code::InvalidHandle, "an event that was never recorded"),
            Some(Recorded::Captured(..)) => {
                return fail(Code::CapturedEvent, "the event was last recorded in a capture");
            }
            Some(Recorded::Work(op, stamp)) if guard.is_done(*op) => stamp.get(),
            Some(Recorded::Work(..)) => return Err(Code::NotReady.into()),
        };
    }
    let [start, end] = times;
    host::put(out, (end as f64 - start as f64) as f32 * 1e-6)
}

api! {
    fn cuEventCreate(out: usize, flags: u32) {
        host::need(out)?;
        if flags & !7 != 0 || flags & (INTERPROCESS | DISABLE_TIMING) == INTERPROCESS {
            return invalid(format!("event flags {flags:#x}"));
        }
        let mut guard = driver().lock();
        let context = guard.usable()?;
        let handle = guard.handle(Kind::Event);
        host::put(out, handle)?;
        guard.events.insert(handle, Event { context, flags, recorded: None });
        Ok(())
    }
    fn cuEventDestroy_v2(handle: u64) {
        let mut guard = driver().lock();
        guard.event(handle)?;
        guard.events.remove(&handle);
        Ok(())
    }
    fn cuEventRecord(handle: u64, stream: u64) {
        record(handle, stream, 0)
    }
    fn cuEventRecordWithFlags(handle: u64, stream: u64, flags: u32) {
        record(handle, stream, flags)
    }
    fn cuEventQuery(handle: u64) {
        arrive(handle, false)
    }
    fn cuEventSynchronize(handle: u64) {
        arrive(handle, true)
    }
    fn cuEventElapsedTime(out: usize, start: u64, end: u64) {
        elapsed(out, start, end)
    }
    fn cuEventElapsedTime_v2(out: usize, start: u64, end: u64) {
        elapsed(out, start, end)
    }
}

//! Streams.

use super::error::{Code, Outcome, fail, invalid};
use super::host;
use super::state::{Kind, State, driver};
use super::work::{Action, OpId};
use std::thread;

/// Numerically greater = later.
pub(crate) const LEAST_PRIORITY: i32 = 0;
/// Numerically smallest.
pub(crate) const GREATEST_PRIORITY: i32 = -5;

/// `CU_STREAM_LEGACY`
const LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`
const PER_THREAD: u64 = 2;
/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: u64,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    /// The legacy default stream of its context.
    pub(crate) legacy: bool,
    /// Its last operation.
    pub(crate) last: Option<OpId>,
    /// The capture it takes part in.
    pub(crate) capture: Option<u64>,
}

impl Stream {
    /// A context's legacy default stream.
    pub(crate) fn legacy(context: u64) -> Self {
        Self { context, flags: 0, priority: 0, legacy: true, last: None, capture: None }
    }

    /// Whether it and the legacy stream wait for each other.
    pub(crate) fn blocking(&self) -> bool {
        self.flags & NON_BLOCKING == 0
    }
}

impl State {
    /// The stream that a handle means, in the calling thread's context, which is returned too.
    pub(crate) fn stream(&mut self, handle: u64) -> Outcome<(u64, u64)> {
        let context = self.usable()?;
        let found = match handle {
            0 | LEGACY => self.contexts[&context].legacy,
            PER_THREAD => {
                let thread = thread::current().id();
                if let Some(stream) = self.contexts[&context].per_thread.get(&thread) {
                    *stream
                } else {
                    let new = self.handle(Kind::Stream);
                    self.streams.insert(new, Stream { legacy: false, ..Stream::legacy(context) });
                    if let Some(c) = self.contexts.get_mut(&context) {
                        c.per_thread.insert(thread, new);
                    }
                    new
                }
            }
            _ => handle,
        };
        match self.streams.get(&found) {
            None => fail(Code::InvalidHandle, format!("{handle:#x} is no stream, or one that was destroyed")),
            Some(stream) => {
                let owner = stream.context;
                match self.contexts.get(&owner).map(|c| c.sticky) {
                    None => fail(Code::ContextIsDestroyed, "the stream's context was destroyed"),
                    Some(Some(code)) => Err(code.into()),
                    Some(None) => Ok((found, owner)),
                }
            }
        }
    }

    /// What an operation on a stream comes after.
    pub(crate) fn predecessors(&self, stream: u64) -> Vec<OpId> {
        let Some(s) = self.streams.get(&stream) else { return Vec::new() };
        let others = self
            .streams
            .values()
            .filter(|o| o.context == s.context && ((s.legacy && o.blocking()) || (o.legacy && s.blocking())));
        others.filter_map(|o| o.last).chain(s.last).collect()
    }

    /// Puts an operation into a stream, or into the graph that it captures. The result is `None` in the latter case;
    /// otherwise the caller settles it.
    pub(crate) fn enqueue(&mut self, stream: u64, action: Action) -> Outcome<Option<OpId>> {
        if self.captured(stream)? {
            self.add_node(stream, action)?;
            return Ok(None);
        }
        self.enqueue_after(stream, action, Vec::new()).map(Some)
    }

    /// The same for a stream that does not capture, after further operations.
    pub(crate) fn enqueue_after(&mut self, stream: u64, action: Action, more: Vec<OpId>) -> Outcome<OpId> {
        let Some(context) = self.streams.get(&stream).map(|s| s.context) else {
            return fail(Code::InvalidHandle, "the stream was destroyed");
        };
        let mut after = self.predecessors(stream);
        after.extend(more);
        let op = self.submit(context, after, action);
        if let Some(s) = self.streams.get_mut(&stream) {
            s.last = Some(op);
        }
        Ok(op)
    }
}

/// Puts an operation into a stream by its handle, and runs it if streams are not delayed.
pub(crate) fn enqueue(handle: u64, action: impl FnOnce(&mut State, u64) -> Outcome<Action>) -> Outcome {
    let mut guard = driver().lock();
    let (stream, context) = guard.stream(handle)?;
    let action = action(&mut guard, context)?;
    if let Some(op) = guard.enqueue(stream, action)? {
        drop(driver().settle(guard, op));
    }
    Ok(())
}

fn create(out: usize, flags: u32, priority: i32) -> Outcome {
    host::need(out)?;
    if flags & !NON_BLOCKING != 0 {
        return invalid(format!("stream flags {flags:#x}"));
    }
    let mut guard = driver().lock();
    let context = guard.usable()?;
    let handle = guard.handle(Kind::Stream);
    host::put(out, handle)?;
    let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
    let stream = Stream { flags, priority, legacy: false, ..Stream::legacy(context) };
    guard.streams.insert(handle, stream);
    Ok(())
}

fn with_stream<T>(handle: u64, read: impl FnOnce(&Stream) -> T) -> Outcome<T> {
    let mut guard = driver().lock();
    let (stream, _) = guard.stream(handle)?;
    Ok(read(&guard.streams[&stream]))
}

api! {
    fn cuStreamCreate(out: usize, flags: u32) {
        create(out, flags, LEAST_PRIORITY)
    }
    fn cuStreamCreateWithPriority(out: usize, flags: u32, priority: i32) {
        create(out, flags, priority)
    }
    fn cuStreamDestroy_v2(handle: u64) {
        let mut guard = driver().lock();
        if handle <= PER_THREAD {
            guard.usable()?;
            return fail(Code::InvalidHandle, "a default stream cannot be destroyed");
        }
        let (stream, _) = guard.stream(handle)?;
        if guard.streams[&stream].legacy || guard.contexts.values().any(|c| c.per_thread.values().any(|s| *s == stream)) {
            return fail(Code::InvalidHandle, "a default stream cannot be destroyed");
        }
        guard.leave_capture(stream);
        // Work in it goes on; operations of other streams know it by its last operation.
        guard.streams.remove(&stream);
        Ok(())
    }
    fn cuStreamSynchronize(handle: u64) {
        let mut guard = driver().lock();
        let (stream, context) = guard.stream(handle)?;
        guard.refuse_captured(stream, "a capturing stream cannot be waited for")?;
        guard.refuse_legacy(stream)?;
        let targets = guard.predecessors_to_wait(stream);
        guard = driver().finish_all(guard, &targets);
        guard.check(context)
    }
    fn cuStreamQuery(handle: u64) {
        let mut guard = driver().lock();
        let (stream, context) = guard.stream(handle)?;
        guard.refuse_captured(stream, "a capturing stream cannot be queried")?;
        guard.refuse_legacy(stream)?;
        let targets = guard.predecessors_to_wait(stream);
        if targets.iter().all(|op| guard.is_done(*op)) {
            return Ok(());
        }
        guard = driver().step(guard, &targets);
        guard.check(context)?;
        Err(Code::NotReady.into())
    }
    fn cuStreamGetPriority(handle: u64, out: usize) {
        host::put(out, with_stream(handle, |s| s.priority)?)
    }
    fn cuStreamGetFlags(handle: u64, out: usize) {
        host::put(out, with_stream(handle, |s| s.flags)?)
    }
    fn cuStreamGetCtx(handle: u64, out: usize) {
        host::put(out, with_stream(handle, |s| s.context)?)
    }
    fn cuStreamGetId(handle: u64, out: usize) {
        let mut guard = driver().lock();
        let (stream, _) = guard.stream(handle)?;
        host::put(out, stream)
    }
    fn cuStreamWaitEvent(handle: u64, event: u64, flags: u32) {
        if flags & !1 != 0 {
            return invalid(format!("flags {flags:#x}"));
        }
        let mut guard = driver().lock();
        let (stream, _) = guard.stream(handle)?;
        if let Some(op) = guard.wait_event(stream, event, flags)? {
            drop(driver().settle(guard, op));
        }
        Ok(())
    }
    fn cuLaunchHostFunc(handle: u64, function: usize, data: usize) {
        if function == 0 {
            return invalid("a null function");
        }
        enqueue(handle, |_, _| Ok(Action::Host { function, data }))
    }
}

impl State {
    /// What waiting for a stream waits for.
    fn predecessors_to_wait(&self, stream: u64) -> Vec<OpId> {
        if self.streams[&stream].legacy {
            self.predecessors(stream)
        } else {
            self.streams[&stream].last.into_iter().collect()
        }
    }

    /// The fault of a context, after waiting.
    pub(crate) fn check(&self, context: u64) -> Outcome {
        match self.contexts.get(&context).map(|c| c.sticky) {
            None => fail(Code::ContextIsDestroyed, "the context was destroyed meanwhile"),
            Some(Some(code)) => Err(code.into()),
            Some(None) => Ok(()),
        }
    }
}

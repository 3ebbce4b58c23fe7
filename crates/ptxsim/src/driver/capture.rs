//! Capture of streams into graphs, and what may not be done meanwhile.

use super::error::{Code, Outcome, fail, invalid};
use super::graph::{Graph, Node};
use super::host;
use super::state::{Kind, State, driver};
use super::work::Action;
use std::cell::Cell;
use std::collections::HashMap;
use std::thread::{self, ThreadId};

/// `CUstreamCaptureMode`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

impl Mode {
    fn of(number: i32) -> Outcome<Self> {
        match number {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => invalid(format!("capture mode {number}")),
        }
    }
}

thread_local! {
    /// How this thread minds captures.
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// A capture under way.
#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) context: u64,
    origin: u64,
    mode: Mode,
    thread: ThreadId,
    nodes: Vec<Node>,
    /// For each stream that takes part: the nodes its next one comes after.
    streams: HashMap<u64, Vec<usize>>,
    /// Why it is lost.
    invalid: Option<String>,
    graph: u64,
}

impl State {
    /// Whether a stream captures; an error if the capture is lost, or if the stream is the legacy one and another
    /// captures.
    pub(crate) fn captured(&mut self, stream: u64) -> Outcome<bool> {
        let Some(id) = self.streams.get(&stream).and_then(|s| s.capture) else {
            self.refuse_legacy(stream)?;
            return Ok(false);
        };
        match self.captures.get(&id) {
            Some(Capture { invalid: Some(why), .. }) => {
                fail(Code::CaptureInvalidated, format!("the capture was invalidated by {why}"))
            }
            Some(_) => Ok(true),
            None => Ok(false),
        }
    }

    /// Adds a node to the capture of a stream.
    pub(crate) fn add_node(&mut self, stream: u64, action: Action) -> Outcome<usize> {
        let Some(capture) = self.capture_of(stream) else {
            return fail(Code::IllegalState, "the stream does not capture");
        };
        let node = capture.nodes.len();
        let after = capture.streams.insert(stream, vec![node]).unwrap_or_default();
        capture.nodes.push(Node { after, action });
        Ok(node)
    }

    /// Adds a whole graph's nodes.
    pub(crate) fn add_nodes(&mut self, stream: u64, nodes: &[Node]) -> Outcome {
        let Some(capture) = self.capture_of(stream) else {
            return fail(Code::IllegalState, "the stream does not capture");
        };
        let first = capture.nodes.len();
        let before = capture.streams.get(&stream).cloned().unwrap_or_default();
        for node in nodes {
            let after = if node.after.is_empty() {
                before.clone()
            } else {
                node.after.iter().map(|n| n + first).collect()
            };
            capture.nodes.push(Node { after, action: node.action.clone() });
        }
        if !nodes.is_empty() {
            let last = super::graph::leaves(nodes).into_iter().map(|n| n + first).collect();
            capture.streams.insert(stream, last);
        }
        Ok(())
    }

    fn capture_of(&mut self, stream: u64) -> Option<&mut Capture> {
        let id = self.streams.get(&stream)?.capture?;
        self.captures.get_mut(&id)
    }

    /// The capture of a stream and the nodes that its next one would come after.
    pub(crate) fn frontier(&mut self, stream: u64) -> Outcome<(u64, Vec<usize>)> {
        match self.streams.get(&stream).and_then(|s| s.capture) {
            Some(id) => Ok((
                id,
                self.captures.get(&id).and_then(|c| c.streams.get(&stream)).cloned().unwrap_or_default(),
            )),
            None => fail(Code::IllegalState, "the stream does not capture"),
        }
    }

    /// A stream waits for an event that was recorded in a capture: it joins.
    pub(crate) fn join_capture(&mut self, stream: u64, id: u64, nodes: &[usize]) -> Outcome {
        if !self.captures.contains_key(&id) {
            return fail(Code::CapturedEvent, "the event was last recorded in a capture that has ended");
        }
        let Some(s) = self.streams.get(&stream) else {
            return fail(Code::InvalidHandle, "the stream was destroyed");
        };
        if s.legacy {
            self.invalidate_capture(id, "a wait of the legacy stream for a captured event");
            return fail(Code::CaptureImplicit, "the legacy stream cannot join a capture");
        }
        match s.capture {
            Some(other) if other != id => {
                self.invalidate_capture(id, "a merge with another capture");
                self.invalidate_capture(other, "a merge with another capture");
                return fail(Code::CaptureMerge, "the event belongs to another capture");
            }
            _ => {}
        }
        if let Some(s) = self.streams.get_mut(&stream) {
            s.capture = Some(id);
        }
        if let Some(capture) = self.captures.get_mut(&id) {
            if let Some(why) = &capture.invalid {
                return fail(Code::CaptureInvalidated, format!("the capture was invalidated by {why}"));
            }
            let frontier = capture.streams.entry(stream).or_default();
            frontier.extend(nodes);
            frontier.sort_unstable();
            frontier.dedup();
        }
        Ok(())
    }

    /// Spoils a capture.
    pub(crate) fn invalidate_capture(&mut self, id: u64, why: &str) {
        if let Some(capture) = self.captures.get_mut(&id) {
            capture.invalid.get_or_insert_with(|| why.to_string());
        }
    }

    /// Spoils the capture of a stream.
    pub(crate) fn invalidate(&mut self, stream: u64, why: &str) {
        if let Some(id) = self.streams.get(&stream).and_then(|s| s.capture) {
            self.invalidate_capture(id, why);
        }
    }

    /// Refuses what cannot be captured.
    pub(crate) fn refuse_captured(&mut self, stream: u64, why: &str) -> Outcome {
        if self.streams.get(&stream).is_some_and(|s| s.capture.is_some()) {
            self.captured(stream)?;
            self.invalidate(stream, why);
            return fail(Code::CaptureUnsupported, why);
        }
        Ok(())
    }

    /// Refuses use of the legacy stream while a stream that it waits for captures.
    pub(crate) fn refuse_legacy(&mut self, stream: u64) -> Outcome {
        let Some(s) = self.streams.get(&stream).filter(|s| s.legacy) else { return Ok(()) };
        let context = s.context;
        let of_blocking = |o: &&super::stream::Stream| o.context == context && o.blocking();
        let Some(id) = self.streams.values().filter(of_blocking).find_map(|o| o.capture) else {
            return Ok(());
        };
        self.invalidate_capture(id, "use of the legacy stream");
        fail(Code::CaptureImplicit, "the legacy stream would wait for a blocking stream that captures")
    }

    /// Refuses to wait for a whole context while something in it captures.
    pub(crate) fn refuse_while_capturing(&mut self, context: u64) -> Outcome {
        let Some(id) = self.captures.iter().find(|(_, c)| c.context == context).map(|(id, _)| *id) else {
            return Ok(());
        };
        self.invalidate_capture(id, "a wait for the whole context");
        fail(Code::CaptureUnsupported, "a stream of the context captures")
    }

    /// Refuses calls that may wait or use the legacy stream unseen, as the capture modes demand.
    pub(crate) fn refuse_unsafe(&mut self, name: &str) -> Outcome {
        let mode = MODE.get();
        if mode == Mode::Relaxed {
            return Ok(());
        }
        let here = thread::current().id();
        let minded = |c: &Capture| {
            if c.thread == here {
                c.mode != Mode::Relaxed
            } else {
                mode == Mode::Global && c.mode == Mode::Global
            }
        };
        let ids: Vec<u64> = self.captures.iter().filter(|(_, c)| minded(c)).map(|(id, _)| *id).collect();
        if ids.is_empty() {
            return Ok(());
        }
        for id in ids {
            self.invalidate_capture(id, name);
        }
        fail(
            Code::CaptureUnsupported,
            format!("{name} may not be called while a stream captures (see the capture modes)"),
        )
    }

    /// A stream is destroyed.
    pub(crate) fn leave_capture(&mut self, stream: u64) {
        let Some(id) = self.streams.get(&stream).and_then(|s| s.capture) else { return };
        if self.captures.get(&id).is_some_and(|c| c.origin == stream) {
            self.end_capture(id);
        } else {
            self.invalidate_capture(id, "the end of a stream that took part");
        }
    }

    fn end_capture(&mut self, id: u64) -> Option<Capture> {
        for stream in self.streams.values_mut().filter(|s| s.capture == Some(id)) {
            stream.capture = None;
        }
        self.captures.remove(&id)
    }
}

/// Whether every node of `goals` is one of `from` or before one.
fn reaches(nodes: &[Node], from: &[usize], goals: &[usize]) -> bool {
    let mut seen = vec![false; nodes.len()];
    let mut rest = from.to_vec();
    while let Some(n) = rest.pop() {
        if !std::mem::replace(&mut seen[n], true) {
            rest.extend(&nodes[n].after);
        }
    }
    goals.iter().all(|n| seen[*n])
}

fn begin(handle: u64, mode: i32) -> Outcome {
    let mode = Mode::of(mode)?;
    let mut guard = driver().lock();
    let (stream, context) = guard.stream(handle)?;
    let s = &guard.streams[&stream];
    if s.legacy {
        return fail(Code::CaptureUnsupported, "the legacy default stream cannot capture");
    }
    if s.capture.is_some() {
        return fail(Code::IllegalState, "the stream captures already");
    }
    let id = guard.handle(Kind::Graph);
    let graph = guard.handle(Kind::Graph);
    let capture = Capture {
        context,
        origin: stream,
        mode,
        thread: thread::current().id(),
        nodes: Vec::new(),
        streams: HashMap::from([(stream, Vec::new())]),
        invalid: None,
        graph,
    };
    guard.captures.insert(id, capture);
    if let Some(s) = guard.streams.get_mut(&stream) {
        s.capture = Some(id);
    }
    Ok(())
}

fn end(handle: u64, out: usize) -> Outcome {
    host::put(out, 0u64)?;
    let mut guard = driver().lock();
    let (stream, _) = guard.stream(handle)?;
    let Some(id) = guard.streams[&stream].capture else {
        return fail(Code::IllegalState, "the stream does not capture");
    };
    let Some(capture) = guard.captures.get(&id) else {
        return fail(Code::IllegalState, "the stream does not capture");
    };
    if capture.mode != Mode::Relaxed && capture.thread != thread::current().id() {
        guard.invalidate_capture(id, "an end from another thread");
        return fail(Code::CaptureWrongThread, "the capture was begun by another thread");
    }
    if capture.origin != stream {
        guard.invalidate_capture(id, "an end in another stream");
        return fail(Code::CaptureUnmatched, "the capture was begun in another stream");
    }
    let Some(capture) = guard.end_capture(id) else {
        return fail(Code::IllegalState, "the stream does not capture");
    };
    if let Some(why) = capture.invalid {
        return fail(Code::CaptureInvalidated, format!("the capture was invalidated by {why}"));
    }
    let main = capture.streams.get(&stream).cloned().unwrap_or_default();
    if !capture.streams.values().all(|frontier| reaches(&capture.nodes, &main, frontier)) {
        return fail(
            Code::CaptureUnjoined,
            "a stream that took part has work that the first one does not wait for",
        );
    }
    guard.graphs.insert(capture.graph, Graph { context: capture.context, nodes: capture.nodes.into() });
    host::put(out, capture.graph)
}

/// `CUstreamCaptureStatus` of a stream, and the capture's number and graph.
fn status(handle: u64) -> Outcome<(i32, u64, u64)> {
    let mut guard = driver().lock();
    let (stream, _) = guard.stream(handle)?;
    if guard.streams[&stream].legacy {
        let context = guard.streams[&stream].context;
        if guard.streams.values().any(|o| o.context == context && o.blocking() && o.capture.is_some()) {
            return fail(Code::CaptureImplicit, "a blocking stream captures");
        }
    }
    let capture = guard.streams[&stream].capture.and_then(|id| guard.captures.get(&id).map(|c| (id, c)));
    Ok(match capture {
        None => (0, 0, 0),
        Some((id, c)) => (if c.invalid.is_some() { 2 } else { 1 }, id, c.graph),
    })
}

api! {
    fn cuStreamBeginCapture(handle: u64, mode: i32) {
        begin(handle, mode)
    }
    fn cuStreamBeginCapture_v2(handle: u64, mode: i32) {
        begin(handle, mode)
    }
    fn cuStreamEndCapture(handle: u64, out: usize) {
        end(handle, out)
    }
    fn cuStreamIsCapturing(handle: u64, out: usize) {
        host::need(out)?;
        host::put(out, status(handle)?.0)
    }
    fn cuStreamGetCaptureInfo_v2(handle: u64, out: usize, id: usize, graph: usize, nodes: usize, count: usize) {
        host::need(out)?;
        let (state, number, handle_of_graph) = status(handle)?;
        host::put(out, state)?;
        host::put_if(id, number)?;
        host::put_if(graph, handle_of_graph)?;
        host::put_if(nodes, 0usize)?;
        host::put_if(count, 0usize)
    }
    fn cuStreamGetCaptureInfo_v3(
        handle: u64,
        out: usize,
        id: usize,
        graph: usize,
        nodes: usize,
        edges: usize,
        count: usize,
    ) {
        host::need(out)?;
        let (state, number, handle_of_graph) = status(handle)?;
        host::put(out, state)?;
        host::put_if(id, number)?;
        host::put_if(graph, handle_of_graph)?;
        host::put_if(nodes, 0usize)?;
        host::put_if(edges, 0usize)?;
        host::put_if(count, 0usize)
    }
    fn cuThreadExchangeStreamCaptureMode(mode: usize) {
        let new = Mode::of(host::get(mode)?)?;
        host::put(mode, MODE.get() as i32)?;
        MODE.set(new);
        Ok(())
    }
}

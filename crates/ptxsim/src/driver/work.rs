//! Operations and their order.
//!
//! Each operation names those it comes after: its predecessor in the stream, what the stream was told to wait for, and
//! what the legacy default stream implies. By default it runs when it is submitted. With `delay_streams` it runs only
//! when something waits for it or for a successor, and among those that could run the one submitted last goes first
//! (with a seed: any). Whatever nothing orders is thus done in another order than it was written in.

use super::IN_HOST_FUNCTION;
use super::error::{Code, Failure, Outcome};
use super::host;
use super::state::{Device, Driver, Guard, State, driver};
use crate::exec::launch::Launch;
use crate::fault::Fault;
use crate::options::Options;
use crate::program::Kernel;
use crate::stats::Stats;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ThreadId};

/// Names an operation; later ones have greater numbers.
pub(crate) type OpId = u64;

/// Operations that may wait at a time; beyond it the oldest runs, as hardware queues are finite too.
const LONGEST_QUEUE: usize = 1024;

/// Where a copy to the device reads.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    /// Taken when the copy was submitted: pageable memory.
    Taken(Arc<[u8]>),
    /// Host memory when the copy runs.
    Host(usize, usize),
}

/// A kernel with everything it needs.
#[derive(Debug)]
pub(crate) struct KernelCall {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) launch: Launch,
    pub(crate) device: Arc<Device>,
    pub(crate) options: Options,
}

/// What an operation does.
#[derive(Debug, Clone)]
pub(crate) enum Action {
    /// Orders others.
    Nothing,
    Kernel(Arc<KernelCall>),
    ToDevice {
        device: Arc<Device>,
        to: u64,
        from: Source,
    },
    ToHost {
        device: Arc<Device>,
        to: usize,
        from: u64,
        bytes: usize,
    },
    OnDevice {
        to: (Arc<Device>, u64),
        from: (Arc<Device>, u64),
        bytes: u64,
    },
    Fill {
        device: Arc<Device>,
        to: u64,
        value: Value,
        width: u64,
        height: u64,
        pitch: u64,
    },
    Free {
        device: Arc<Device>,
        address: u64,
    },
    Host {
        function: usize,
        data: usize,
    },
    Record(Arc<Stamp>),
}

/// A value of 1, 2 or 4 bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Value {
    pub(crate) bytes: [u8; 4],
    pub(crate) len: usize,
}

/// When an event happened: nanoseconds, 0 before.
#[derive(Debug, Default)]
pub(crate) struct Stamp(AtomicU64);

impl Stamp {
    fn set(&self) {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let now = driver().now().max(1);
        let mut time = now;
        // Never the same time twice and never back, whatever the clock's resolution.
        let _ = LAST.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |last| {
            time = now.max(last + 1);
            Some(time)
        });
        self.0.store(time, Ordering::SeqCst);
    }

    /// The time.
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

/// A submitted operation.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) after: Vec<OpId>,
    pub(crate) context: u64,
    pub(crate) action: Action,
    /// To run as soon as it can.
    pub(crate) eager: bool,
    pub(crate) thread: ThreadId,
}

/// An operation that some thread runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running {
    context: u64,
    /// A host function.
    host: bool,
}

/// What came of an operation.
enum Ended {
    Well,
    Counted(Box<Stats>),
    Faulty(Box<Fault>),
    Failed(Failure),
}

impl State {
    /// Whether an operation has run (or was dropped with its context).
    pub(crate) fn is_done(&self, op: OpId) -> bool {
        !self.pending.contains_key(&op) && !self.running.contains_key(&op)
    }

    /// Adds an operation after others. The caller then calls [`Driver::settle`].
    pub(crate) fn submit(&mut self, context: u64, mut after: Vec<OpId>, action: Action) -> OpId {
        after.retain(|op| !self.is_done(*op));
        after.sort_unstable();
        after.dedup();
        let id = self.next_op;
        self.next_op += 1;
        let eager = !self.options().delay_streams;
        self.pending.insert(id, Op { after, context, action, eager, thread: thread::current().id() });
        id
    }

    /// All operations of a context that have not ended.
    pub(crate) fn unfinished(&self, context: u64) -> Vec<OpId> {
        let waiting = self.pending.iter().filter(|(_, op)| op.context == context).map(|(id, _)| *id);
        waiting.chain(self.running.iter().filter(|(_, r)| r.context == context).map(|(id, _)| *id)).collect()
    }

    fn is_ready(&self, id: OpId) -> bool {
        self.pending.get(&id).is_some_and(|op| op.after.iter().all(|before| self.is_done(*before)))
    }

    /// The operations of `targets` and before them that have not started.
    fn before(&self, targets: &[OpId]) -> BTreeSet<OpId> {
        let mut found = BTreeSet::new();
        let mut rest: Vec<OpId> = targets.to_vec();
        while let Some(id) = rest.pop() {
            if let Some(op) = self.pending.get(&id)
                && found.insert(id)
            {
                rest.extend(&op.after);
            }
        }
        found
    }

    /// Whether one of these, or of those they come after, runs and is no host function.
    fn wait_is_short(&self, targets: &[OpId], among: &BTreeSet<OpId>) -> bool {
        let before = among.iter().flat_map(|id| &self.pending[id].after);
        before.chain(targets).any(|id| self.running.get(id).is_some_and(|r| !r.host))
    }

    /// Which operation of a set to run next.
    fn choose(&mut self, among: &BTreeSet<OpId>, seed: Option<u64>) -> Option<OpId> {
        let ready: Vec<OpId> = among.iter().copied().filter(|id| self.is_ready(*id)).collect();
        if let Some(first) = ready.iter().find(|id| self.pending[id].eager) {
            return Some(*first);
        }
        match seed {
            None => ready.last().copied(),
            Some(_) if ready.is_empty() => None,
            Some(seed) => {
                // splitmix64
                self.shuffle = self.shuffle.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = self.shuffle ^ seed;
                z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
                Some(ready[((z ^ z >> 31) % ready.len() as u64) as usize])
            }
        }
    }

    /// Ends a context's work after a fault.
    fn poison(&mut self, context: u64, code: Code) {
        if let Some(c) = self.contexts.get_mut(&context) {
            c.sticky.get_or_insert(code);
        }
        self.pending.retain(|_, op| op.context != context);
    }

    fn finish(&mut self, id: OpId, op: &Op, ended: Ended) {
        self.running.remove(&id);
        match ended {
            Ended::Well => {}
            Ended::Counted(stats) => self.keep_stats(op.thread, *stats),
            Ended::Faulty(fault) => {
                let code = Code::of(fault.kind.code()).unwrap_or(Code::LaunchFailed);
                eprintln!("ptxsim: {fault}");
                self.keep_fault(op.thread, *fault);
                self.poison(op.context, code);
            }
            Ended::Failed(failure) => {
                eprintln!(
                    "ptxsim: an operation of a stream failed: {}: {}",
                    failure.code.name(),
                    failure.reason
                );
                self.poison(op.context, failure.code);
            }
        }
        if let Action::Free { address, .. } = op.action {
            self.allocations.remove(&address);
        }
    }
}

impl Driver {
    /// Runs what was just submitted, unless streams are delayed.
    pub(crate) fn settle(&'static self, mut guard: Guard, op: OpId) -> Guard {
        if guard.pending.get(&op).is_some_and(|op| op.eager) {
            return self.advance(guard, &[op], false);
        }
        while guard.pending.len() > LONGEST_QUEUE {
            let Some(oldest) = guard.pending.keys().next().copied() else { break };
            guard = self.advance(guard, &[oldest], true);
        }
        guard
    }

    /// Runs until these have ended.
    pub(crate) fn finish_all(&'static self, guard: Guard, targets: &[OpId]) -> Guard {
        self.advance(guard, targets, true)
    }

    /// One operation's progress towards a target, for those who ask again and again.
    pub(crate) fn step(&'static self, mut guard: Guard, targets: &[OpId]) -> Guard {
        let seed = guard.options().shuffle_seed;
        let among = guard.before(targets);
        match guard.choose(&among, seed) {
            Some(id) => self.run(guard, id),
            None => guard,
        }
    }

    fn advance(&'static self, mut guard: Guard, targets: &[OpId], to_the_end: bool) -> Guard {
        let seed = guard.options().shuffle_seed;
        loop {
            if targets.iter().all(|op| guard.is_done(*op)) {
                return guard;
            }
            let among = guard.before(targets);
            match guard.choose(&among, seed) {
                Some(id) => guard = self.run(guard, id),
                // Another thread runs what is missing. One that runs a host function goes on with what follows, so a
                // submission need not wait for it.
                None if to_the_end || guard.wait_is_short(targets, &among) => guard = self.wait(guard),
                None => return guard,
            }
        }
    }

    /// Runs a ready operation without the lock.
    fn run(&'static self, mut guard: Guard, id: OpId) -> Guard {
        let Some(op) = guard.pending.remove(&id) else { return guard };
        let host = matches!(op.action, Action::Host { .. });
        guard.running.insert(id, Running { context: op.context, host });
        drop(guard);
        if host {
            // A thread of its own: the function may wait for something that the submitting thread does next.
            let worker = move || {
                let ended = op.action.run();
                let mut guard = self.lock();
                guard.finish(id, &op, ended);
                self.notify();
                while let Some(next) = guard.eager_ready() {
                    guard = self.run(guard, next);
                }
            };
            if let Err(error) = thread::Builder::new().name("ptxsim host function".into()).spawn(worker) {
                eprintln!("ptxsim: no thread for a host function: {error}");
                let mut guard = self.lock();
                let context = guard.running.remove(&id).map_or(0, |r| r.context);
                guard.poison(context, Code::OperatingSystem);
                self.notify();
                return guard;
            }
            return self.lock();
        }
        let ended = catch_unwind(AssertUnwindSafe(|| op.action.run())).unwrap_or_else(|panic| {
            let reason = format!("internal error: {}", super::panic_text(panic.as_ref()));
            Ended::Failed(Failure { code: Code::Unknown, reason })
        });
        let mut guard = self.lock();
        guard.finish(id, &op, ended);
        self.notify();
        guard
    }
}

impl State {
    fn eager_ready(&self) -> Option<OpId> {
        self.pending.iter().find(|(id, op)| op.eager && self.is_ready(**id)).map(|(id, _)| *id)
    }
}

/// A range that was checked at submission and is gone when the operation runs.
fn gone<T>(outcome: Result<T, crate::memory::MemoryError>) -> Outcome<T> {
    outcome.map_err(|e| Failure { code: Code::IllegalAddress, reason: e.to_string() })
}

impl Action {
    fn run(&self) -> Ended {
        if let Self::Kernel(call) = self {
            let KernelCall { kernel, launch, device, options } = call.as_ref();
            return match crate::exec::launch::launch(
                kernel,
                launch,
                &device.memory.view(),
                device.card,
                options,
            ) {
                Ok(stats) => Ended::Counted(Box::new(stats)),
                Err(fault) => Ended::Faulty(fault),
            };
        }
        match self.transfer() {
            Ok(()) => Ended::Well,
            Err(failure) => Ended::Failed(failure),
        }
    }

    fn transfer(&self) -> Outcome {
        match self {
            Self::Nothing | Self::Kernel(_) => {}
            Self::ToDevice { device, to, from: Source::Taken(data) } => gone(device.memory.write(*to, data))?,
            Self::ToDevice { device, to, from: Source::Host(from, len) } => {
                let data = host::bytes(*from, *len)?;
                gone(device.memory.write(*to, &data))?;
            }
            Self::ToHost { device, to, from, bytes } => {
                let mut data = vec![0; *bytes];
                gone(device.memory.read(*from, &mut data))?;
                host::write(*to, &data)?;
            }
            Self::OnDevice { to: (there, to), from: (here, from), bytes } => {
                if Arc::ptr_eq(there, here) {
                    gone(there.memory.copy(*to, *from, *bytes))?;
                } else {
                    let mut data = vec![0; *bytes as usize];
                    gone(here.memory.read(*from, &mut data))?;
                    gone(there.memory.write(*to, &data))?;
                }
            }
            Self::Fill { device, to, value, width, height, pitch } => {
                for row in 0..*height {
                    gone(device.memory.fill(to + row * pitch, &value.bytes[..value.len], *width))?;
                }
            }
            Self::Free { device, address } => gone(device.memory.free(*address))?,
            Self::Host { function, data } => call_host(*function, *data),
            Self::Record(stamp) => stamp.set(),
        }
        Ok(())
    }
}

fn call_host(function: usize, data: usize) {
    if function == 0 {
        return;
    }
    // SAFETY: the API's contract: the caller of `cuLaunchHostFunc` gave a function of this type, and it is not null.
    let function: extern "C" fn(usize) = unsafe { std::mem::transmute(function) };
    IN_HOST_FUNCTION.set(true);
    function(data);
    IN_HOST_FUNCTION.set(false);
}

//! The driver's tables.

use super::IN_HOST_FUNCTION;
use super::capture::Capture;
use super::error::{Code, Failure, Outcome, fail};
use super::event::Event;
use super::function::Function;
use super::graph::{Exec, Graph};
use super::module::Module;
use super::pool::Pool;
use super::stream::Stream;
use super::work::{Op, OpId, Running};
use crate::card::Card;
use crate::fault::Fault;
use crate::memory::GlobalMemory;
use crate::options::Options;
use crate::stats::Stats;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ffi::CString;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::Instant;

/// Launches whose counters and faults are kept until somebody takes them.
const KEPT: usize = 1 << 11;

/// A simulated card.
#[derive(Debug)]
pub(crate) struct Device {
    /// Its place in the list.
    pub(crate) ordinal: usize,
    /// What it is.
    pub(crate) card: &'static Card,
    /// Its memory.
    pub(crate) memory: GlobalMemory,
}

impl Device {
    fn new(ordinal: usize, card: &'static Card) -> Arc<Self> {
        Arc::new(Self { ordinal, card, memory: GlobalMemory::new(card.memory_bytes) })
    }
}

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: Arc<Device>,
    pub(crate) primary: bool,
    pub(crate) flags: u32,
    /// Set by a fault; ends the use of the context.
    pub(crate) sticky: Option<Code>,
    /// The legacy default stream.
    pub(crate) legacy: u64,
    /// The per-thread default streams that were used.
    pub(crate) per_thread: HashMap<ThreadId, u64>,
    pub(crate) limits: HashMap<i32, usize>,
    pub(crate) cache_config: i32,
}

/// A primary context that is or was retained.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Primary {
    pub(crate) handle: Option<u64>,
    pub(crate) retained: u32,
    pub(crate) flags: u32,
}

/// What a handle is of; part of its value, so that one of another kind is never taken for it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Context = 1,
    Stream,
    Event,
    Module,
    Function,
    Graph,
    Exec,
    Pool,
}

/// Everything behind the lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) initialized: bool,
    /// What is wrong with the variables of the environment: nothing starts then.
    pub(crate) mistake: Option<String>,
    pub(crate) devices: Vec<Arc<Device>>,
    pub(crate) primaries: Vec<Primary>,
    next: u64,
    pub(crate) contexts: HashMap<u64, Context>,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) modules: HashMap<u64, Module>,
    pub(crate) functions: HashMap<u64, Function>,
    pub(crate) graphs: HashMap<u64, Graph>,
    pub(crate) execs: HashMap<u64, Exec>,
    pub(crate) pools: HashMap<u64, Pool>,
    pub(crate) captures: HashMap<u64, Capture>,
    /// Device allocations by address, with their context.
    pub(crate) allocations: BTreeMap<u64, Allocated>,
    /// Page-locked host memory by address.
    pub(crate) pinned: BTreeMap<usize, super::memory::Pinned>,
    /// Operations that wait.
    pub(crate) pending: BTreeMap<OpId, Op>,
    /// Operations that some thread runs.
    pub(crate) running: BTreeMap<OpId, Running>,
    pub(crate) next_op: OpId,
    pub(crate) shuffle: u64,
    pub(crate) options: Options,
    /// The options that the process started with.
    pub(crate) first_options: Options,
    pub(crate) stats: VecDeque<(ThreadId, Stats)>,
    pub(crate) faults: VecDeque<(ThreadId, Fault)>,
    /// Texts handed out by the extras, until they are given back.
    pub(crate) texts: HashMap<usize, CString>,
    pub(crate) profiling: BTreeSet<u64>,
}

/// A device allocation of the caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocated {
    pub(crate) context: u64,
    /// A free was asked for and has not been carried out.
    pub(crate) freeing: bool,
    /// Belongs to a graph's allocation node.
    pub(crate) graph: bool,
}

/// The driver of this process.
#[derive(Debug)]
pub(crate) struct Driver {
    state: Mutex<State>,
    /// Some operation ended.
    done: Condvar,
    start: Instant,
}

pub(crate) type Guard = MutexGuard<'static, State>;

/// The driver.
pub(crate) fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(|| Driver {
        state: Mutex::new(State::new()),
        done: Condvar::new(),
        start: Instant::now(),
    })
}

impl Driver {
    /// The tables. A panic elsewhere does not make them unusable: each change to them is one step.
    pub(crate) fn lock(&'static self) -> Guard {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until some operation ended.
    pub(crate) fn wait(&'static self, guard: Guard) -> Guard {
        self.done.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes those who wait.
    pub(crate) fn notify(&'static self) {
        self.done.notify_all();
    }

    /// Nanoseconds since the driver was first used.
    pub(crate) fn now(&'static self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

impl State {
    fn new() -> Self {
        let mut state = Self {
            initialized: false,
            mistake: None,
            devices: Vec::new(),
            primaries: Vec::new(),
            next: 1,
            contexts: HashMap::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            graphs: HashMap::new(),
            execs: HashMap::new(),
            pools: HashMap::new(),
            captures: HashMap::new(),
            allocations: BTreeMap::new(),
            pinned: BTreeMap::new(),
            pending: BTreeMap::new(),
            running: BTreeMap::new(),
            next_op: 1,
            shuffle: 0,
            options: Options::default(),
            first_options: Options::default(),
            stats: VecDeque::new(),
            faults: VecDeque::new(),
            texts: HashMap::new(),
            profiling: BTreeSet::new(),
        };
        match super::extras::from_environment() {
            Ok((cards, options)) => {
                state.set_cards(&cards);
                (state.options, state.first_options) = (options, options);
            }
            Err(mistake) => state.mistake = Some(mistake),
        }
        state
    }

    /// Replaces the devices. Contexts of the former ones must be gone.
    pub(crate) fn set_cards(&mut self, cards: &[&'static Card]) {
        self.devices = cards.iter().enumerate().map(|(i, card)| Device::new(i, card)).collect();
        self.primaries = vec![Primary::default(); cards.len()];
        self.pools.clear();
        for device in self.devices.clone() {
            let handle = self.handle(Kind::Pool);
            self.pools.insert(handle, Pool::default_of(device.ordinal));
        }
    }

    /// A value that no other handle of this process has had.
    pub(crate) fn handle(&mut self, kind: Kind) -> u64 {
        let n = self.next;
        self.next += 1;
        // Not canonical as an address, so that following it is a fault at once.
        (0x5100 + kind as u64) << 48 | n << 4
    }

    /// The device of an ordinal.
    pub(crate) fn device(&self, ordinal: i32) -> Outcome<Arc<Device>> {
        self.started()?;
        match usize::try_from(ordinal).ok().and_then(|i| self.devices.get(i)) {
            Some(device) => Ok(Arc::clone(device)),
            None => fail(
                Code::InvalidDevice,
                format!("device {ordinal}; there are {} simulated cards", self.devices.len()),
            ),
        }
    }

    /// Fails before `cuInit`, and inside host functions.
    pub(crate) fn started(&self) -> Outcome {
        if IN_HOST_FUNCTION.get() {
            return fail(Code::NotPermitted, "a host function of a stream may not call the driver");
        }
        if self.initialized { Ok(()) } else { fail(Code::NotInitialized, "cuInit was not called") }
    }

    /// The calling thread's context, faulty or not.
    pub(crate) fn bound(&self) -> Outcome<u64> {
        self.started()?;
        match current() {
            None => fail(Code::InvalidContext, "no context is current in this thread"),
            Some(context) if self.contexts.contains_key(&context) => Ok(context),
            Some(_) => fail(Code::ContextIsDestroyed, "the current context was destroyed"),
        }
    }

    /// The calling thread's context, for calls that use it.
    pub(crate) fn usable(&self) -> Outcome<u64> {
        let context = self.bound()?;
        match self.contexts[&context].sticky {
            // The fault itself was printed.
            Some(code) => Err(Failure::from(code)),
            None => Ok(context),
        }
    }

    /// The device of a context that is known to exist.
    pub(crate) fn device_of(&self, context: u64) -> Outcome<Arc<Device>> {
        match self.contexts.get(&context) {
            Some(c) => Ok(Arc::clone(&c.device)),
            None => fail(Code::ContextIsDestroyed, "the context was destroyed"),
        }
    }

    /// Keeps the counters of a launch.
    pub(crate) fn keep_stats(&mut self, thread: ThreadId, stats: Stats) {
        if self.stats.len() == KEPT {
            self.stats.pop_front();
        }
        self.stats.push_back((thread, stats));
    }

    /// Keeps the report of a fault.
    pub(crate) fn keep_fault(&mut self, thread: ThreadId, fault: Fault) {
        if self.faults.len() == KEPT {
            self.faults.pop_front();
        }
        self.faults.push_back((thread, fault));
    }

    /// Options for what the calling thread submits.
    pub(crate) fn options(&self) -> Options {
        THREAD_OPTIONS.get().unwrap_or(self.options)
    }
}

thread_local! {
    /// The contexts of this thread, the current one last.
    static CURRENT: RefCell<Vec<Option<u64>>> = const { RefCell::new(Vec::new()) };
    /// Options of this thread alone.
    pub(crate) static THREAD_OPTIONS: Cell<Option<Options>> = const { Cell::new(None) };
}

/// The calling thread's context.
pub(crate) fn current() -> Option<u64> {
    CURRENT.with_borrow(|stack| stack.last().copied().flatten())
}

/// Replaces it.
pub(crate) fn set_current(context: Option<u64>) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        stack.push(context);
    });
}

/// Pushes a context.
pub(crate) fn push_current(context: u64) {
    CURRENT.with_borrow_mut(|stack| stack.push(Some(context)));
}

/// Pops one.
pub(crate) fn pop_current() -> Option<u64> {
    CURRENT.with_borrow_mut(Vec::pop).flatten()
}

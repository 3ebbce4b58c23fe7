//! Decoded operations.

use crate::exec::regs::{File, Op, Sync, Taint};
use crate::ptx::ast::Special;
use crate::stats::Class;
use std::sync::Arc;

/// Index of an operation.
pub(crate) type Pc = u32;

/// A row of one of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowRef {
    /// Which file.
    pub file: File,
    /// Which row.
    pub row: u16,
}

/// One operation with its guard.
#[derive(Debug, Clone)]
pub(crate) struct Code {
    /// `@p`: a predicate row and whether it is negated.
    pub guard: Option<(u16, bool)>,
    /// What it does.
    pub what: What,
    /// For counters.
    pub class: Class,
    /// Whether control may come here from elsewhere than the operation before, or the operation before branches.
    pub leader: bool,
}

/// What an operation does.
#[derive(Debug, Clone)]
pub(crate) enum What {
    /// Registers only.
    Alu {
        /// The operation.
        op: Op,
        /// Who has to come together first.
        need: Need,
    },
    /// `bra`
    Branch(Pc),
    /// `brx.idx`
    BranchIndexed {
        /// Narrow row with the index.
        index: u16,
        /// Where it leads.
        targets: Arc<[Pc]>,
    },
    /// `call` of a function with a body.
    Call {
        /// Its first operation.
        target: Pc,
        /// Argument bytes: from, to (offsets in local memory), length.
        arguments: Arc<[Move]>,
        /// Return values, copied when the call returns.
        returns: Arc<[Move]>,
    },
    /// `call` through a register: entry addresses are the index of the function in the module.
    CallIndirect {
        /// Wide row with the address.
        function: u16,
        /// By function index: first operation, arguments, returns; `None`: cannot be called with this prototype.
        targets: Arc<[Option<CallTarget>]>,
    },
    /// `call` of a function that the system has.
    System {
        /// Which.
        function: System,
        /// Offsets of the arguments in local memory.
        arguments: Arc<[u32]>,
        /// Where the result goes in local memory.
        result: Option<u32>,
    },
    /// `ret`
    Return,
    /// `exit`
    Exit,
    /// `trap`
    Trap,
    /// Something that is not supported, in a function that is rarely called.
    Refused(Box<str>),
    /// Nothing that can be seen here (`nanosleep`, `prefetch`).
    Nothing,
    /// `fence`, `membar` between threads.
    Fence,
    /// `ld`
    Load(Box<Access>),
    /// `st`
    Store(Box<Access>),
    /// `atom`, `red`
    Atomic(Box<Atomic>),
    /// `bar`, `barrier`
    Barrier(Box<Barrier>),
    /// `barrier.cluster`
    ClusterBarrier {
        /// `arrive`, else `wait`
        arrive: bool,
        /// `.aligned`
        aligned: bool,
    },
    /// `bar.warp.sync`
    WarpSync {
        /// Narrow row with the members.
        members: u16,
    },
    /// `ldmatrix`, `stmatrix`
    Matrix(Box<Matrix>),
    /// `cp.async`
    Copy(Box<AsyncCopy>),
    /// `cp.async.commit_group`
    CopyCommit,
    /// `cp.async.wait_group n`, `wait_all`
    CopyWait {
        /// Groups that may stay open.
        leave: u32,
        /// `wait_all`: what is not committed counts too.
        all: bool,
    },
    /// `cp.async.mbarrier.arrive`
    CopyArrive {
        /// Its address.
        address: AddressRow,
        /// `.noinc`
        no_increment: bool,
    },
    /// `mbarrier.*`
    Mbarrier(Box<Mbarrier>),
    /// `cp.async.bulk`, also `.tensor`
    Bulk(Box<Bulk>),
    /// `cp.async.bulk.commit_group`
    BulkCommit,
    /// `cp.async.bulk.wait_group n`
    BulkWait {
        /// Groups that may stay open.
        leave: u32,
    },
    /// `cvta`, `isspacep`, `mapa`, `getctarank`
    Address(Box<AddressOp>),
    /// `clock`, `globaltimer`
    Clock(RowRef),
    /// `setmaxnreg`, `griddepcontrol`: checked only.
    Checked,
}

impl What {
    /// Who has to be together before it runs.
    #[inline(always)]
    pub(crate) fn need(&self) -> Need {
        match self {
            Self::Alu { need, .. } => *need,
            Self::Matrix(_) | Self::ClusterBarrier { aligned: true, .. } => Need::Warp,
            Self::Barrier(b) if b.aligned => Need::Warp,
            Self::WarpSync { members } => Need::Members(*members),
            _ => Need::Nothing,
        }
    }
}

/// Lanes that have to be together before an operation runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// None beyond those that are there.
    Nothing,
    /// The lanes in this narrow row.
    Members(u16),
    /// All that have not exited.
    Warp,
}

impl Need {
    /// Of an ALU form.
    pub(crate) fn of(sync: Sync, aligned: bool, sources: &[u16]) -> Self {
        match sync {
            Sync::Members(i) => Self::Members(sources.get(i as usize).copied().unwrap_or(0)),
            Sync::Warp => Self::Warp,
            Sync::None if aligned => Self::Warp,
            Sync::None => Self::Nothing,
        }
    }
}

/// Bytes that a call copies between variables in local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Move {
    /// Offset in local memory.
    pub from: u32,
    /// Offset in local memory.
    pub to: u32,
    /// Length.
    pub bytes: u32,
}

/// A function that an indirect call may reach.
#[derive(Debug, Clone)]
pub(crate) struct CallTarget {
    /// Its first operation.
    pub target: Pc,
    /// Arguments.
    pub arguments: Arc<[Move]>,
    /// Returns.
    pub returns: Arc<[Move]>,
}

/// Functions of the system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum System {
    /// `vprintf(format, arguments)`
    Printf,
    /// `__assertfail(message, file, line, function, char size)`
    AssertFail,
}

/// Where an access goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Where {
    /// `.global`, `.const`
    Global,
    /// `.shared`, `.shared::cta`
    Shared,
    /// `.shared::cluster`
    Cluster,
    /// `.local`, and `.param` of functions
    Local,
    /// `.param` of the kernel
    Param,
    /// By address.
    Generic,
}

/// A row plus an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AddressRow {
    /// Wide, or narrow for 32-bit addresses.
    pub row: RowRef,
    /// Added to it.
    pub offset: i64,
}

/// `ld`, `st`.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    /// Where.
    pub space: Where,
    /// Address.
    pub address: AddressRow,
    /// Bytes of an element in memory.
    pub bytes: u32,
    /// Elements: 1, 2, 4 or 8.
    pub rows: Box<[RowRef]>,
    /// Sign-extend (loads).
    pub signed: bool,
    /// Bits of the destination registers (loads).
    pub register_bits: u32,
    /// How it takes part in the memory model.
    pub strength: Strength,
    /// `.acquire`
    pub acquire: bool,
    /// `.release`
    pub release: bool,
    /// A store of what bitwise operations made: of a bit-field, maybe.
    pub inserts: bool,
}

/// How an access takes part in the memory model. PTX ISA 8.2.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Strength {
    /// Races with all others.
    #[default]
    Weak,
    /// `.volatile`: does not race with strong accesses of other warps. Lanes of one warp are another matter: code that
    /// relied on them advancing together used it too.
    Volatile,
    /// `.relaxed`, `.acquire`, `.release`, atomics.
    Strong,
}

/// Kinds of atomic operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicKind {
    /// `add`
    Add,
    /// `min`
    Min,
    /// `max`
    Max,
    /// `and`
    And,
    /// `or`
    Or,
    /// `xor`
    Xor,
    /// `exch`
    Exchange,
    /// `cas`
    CompareSwap,
    /// `inc`
    Increment,
    /// `dec`
    Decrement,
}

/// `atom`, `red`.
#[derive(Debug, Clone)]
pub(crate) struct Atomic {
    /// Where.
    pub space: Where,
    /// Address.
    pub address: AddressRow,
    /// What.
    pub kind: AtomicKind,
    /// Of this type.
    pub ty: crate::ptx::ast::Type,
    /// Old values; `None` for `red` and `_`. As many as elements.
    pub old: Option<Box<[RowRef]>>,
    /// Operands (`cas` has two, compared first); vectors have one an element.
    pub sources: Box<[RowRef]>,
    /// Elements: 1, or 2, 4, 8 of vector forms.
    pub elements: u32,
    /// `.acquire`, `.acq_rel`
    pub acquire: bool,
    /// `.release`, `.acq_rel`
    pub release: bool,
}

/// `bar`, `barrier`.
#[derive(Debug, Clone)]
pub(crate) struct Barrier {
    /// Narrow row with its number.
    pub id: u16,
    /// Narrow row with the number of threads.
    pub threads: Option<u16>,
    /// `arrive`: does not wait.
    pub arrive: bool,
    /// `.aligned` forms.
    pub aligned: bool,
    /// `red`: what, the destination and the predicate with its negation.
    pub reduce: Option<(Reduce, RowRef, u16, bool)>,
}

/// Reductions of `bar.red`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduce {
    /// `popc`
    Count,
    /// `and`
    All,
    /// `or`
    Any,
}

/// `ldmatrix`, `stmatrix`.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    /// Address.
    pub address: AddressRow,
    /// Registers: one a matrix.
    pub rows: Box<[u16]>,
    /// `.trans`
    pub transposed: bool,
    /// `stmatrix`
    pub store: bool,
}

/// `cp.async`.
#[derive(Debug, Clone)]
pub(crate) struct AsyncCopy {
    /// Destination in shared memory.
    pub to: AddressRow,
    /// Source in global memory.
    pub from: AddressRow,
    /// 4, 8 or 16.
    pub bytes: u32,
    /// Narrow row with the bytes to read; the rest is zero.
    pub source_bytes: Option<u16>,
    /// Predicate row `ignore-src` and whether it is negated.
    pub ignore: Option<(u16, bool)>,
}

/// `mbarrier.*`.
#[derive(Debug, Clone)]
pub(crate) enum Mbarrier {
    /// `init`
    Init {
        /// Address.
        address: AddressRow,
        /// Narrow row.
        count: u16,
    },
    /// `inval`
    Invalidate {
        /// Address.
        address: AddressRow,
    },
    /// `arrive`, `arrive_drop`, with `.expect_tx`
    Arrive {
        /// Address.
        address: AddressRow,
        /// Wide row for the state token.
        state: Option<u16>,
        /// Narrow row, 1 if absent.
        count: Option<u16>,
        /// Narrow row with bytes to expect.
        expect: Option<u16>,
        /// `arrive_drop`
        drop: bool,
    },
    /// `expect_tx`
    Expect {
        /// Address.
        address: AddressRow,
        /// Narrow row.
        bytes: u16,
    },
    /// `complete_tx`
    Complete {
        /// Address.
        address: AddressRow,
        /// Narrow row.
        bytes: u16,
    },
    /// `test_wait`, `try_wait`
    Wait {
        /// Address.
        address: AddressRow,
        /// Predicate row.
        done: u16,
        /// Wide row with a state token, or narrow row with a parity.
        phase: RowRef,
        /// `.parity`
        parity: bool,
        /// `try_wait`: may wait.
        blocks: bool,
    },
    /// `pending_count`
    Pending {
        /// Narrow row.
        count: u16,
        /// Wide row.
        state: u16,
    },
}

/// `cp.async.bulk`, also `.tensor`, and `cp.reduce.async.bulk`.
#[derive(Debug, Clone)]
pub(crate) struct Bulk {
    /// From global to shared, else from shared.
    pub load: bool,
    /// Destination (not of tensor stores).
    pub to: AddressRow,
    /// Space of the destination.
    pub to_space: Where,
    /// Source (not of tensor loads).
    pub from: AddressRow,
    /// Narrow row with the bytes (not of tensor copies).
    pub bytes: u16,
    /// Where arrival of the bytes is told.
    pub mbarrier: Option<AddressRow>,
    /// `.multicast::cluster`: narrow row with the blocks.
    pub multicast: Option<u16>,
    /// Tensor copies: the map and narrow rows of coordinates.
    pub tensor: Option<(AddressRow, Box<[u16]>)>,
    /// `cp.reduce`: what and of which type.
    pub reduce: Option<(AtomicKind, crate::ptx::ast::Type)>,
}

/// `cvta` and its kin.
#[derive(Debug, Clone)]
pub(crate) struct AddressOp {
    /// What.
    pub kind: AddressKind,
    /// Destination.
    pub to: RowRef,
    /// Source.
    pub from: RowRef,
    /// `mapa`: narrow row with the rank.
    pub rank: Option<u16>,
}

/// Kinds of [`AddressOp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddressKind {
    /// `cvta.space`: to generic.
    ToGeneric(Where),
    /// `cvta.to.space`
    FromGeneric(Where),
    /// `isspacep.space`
    IsSpace(Where),
    /// `mapa` of a generic address.
    MapGeneric,
    /// `mapa.shared::cluster`
    MapShared,
    /// `getctarank`, of a generic address or one of `shared::cluster`.
    Rank,
}

/// Rows and files an operation reads and writes, for taint.
#[derive(Debug, Clone, Default)]
pub(crate) struct Flow {
    /// Destinations.
    pub to: Box<[RowRef]>,
    /// Sources, data sources only.
    pub from: Box<[RowRef]>,
    /// How.
    pub taint: Option<Taint>,
}

/// Sizes of the files, and what their fixed rows hold.
#[derive(Debug, Clone, Default)]
pub(crate) struct Files {
    /// Narrow rows.
    pub narrow: usize,
    /// Wide rows.
    pub wide: usize,
    /// Predicate rows.
    pub preds: usize,
    /// Narrow constants: row and value.
    pub narrow_constants: Vec<(u16, u32)>,
    /// Wide constants.
    pub wide_constants: Vec<(u16, u64)>,
    /// Predicate constants.
    pub pred_constants: Vec<(u16, bool)>,
    /// Special registers that do not change while a warp runs.
    pub specials: Vec<(RowRef, Special)>,
}

use super::Grid;
use crate::config::CacheConfig;
use crate::cuda::abi::QkvBeginStep;
use crate::cuda::device::Kernel;
use crate::cuda::status::CacheStatus;
use crate::cuda::{Device, DeviceSlice, DeviceSliceMut, RawStream, check};
use crate::error::{Error, Result};

const THREADS: u32 = 128;

/// Words (i32) of a sequence in the step buffer.
pub const STEP_WORDS: usize = 8;

/// Words (u64) of the status.
pub const STATUS_WORDS: usize = 4;

/// The batch of a step, in device memory.
#[derive(Debug, Clone, Copy)]
pub struct DeviceBatch<'a> {
    lengths: Lengths<'a>,
    query_start: DeviceSlice<'a, i32>,
    slot_mapping: Option<DeviceSlice<'a, i64>>,
    block_tables: DeviceSlice<'a, i32>,
    rows: usize,
}

#[derive(Debug, Clone, Copy)]
enum Lengths<'a> {
    Seats(DeviceSlice<'a, i32>),
    Context(DeviceSlice<'a, i32>),
}

impl<'a> DeviceBatch<'a> {
    /// A batch of seats `i32[b]`, each once. Sequence `i` has rows `query_start[i]..query_start[i + 1]` of `rows` rows;
    /// `block_tables` is `i32[b, max_blocks]`, -1 = no block, with a block for every tile that closes.
    pub fn seats(
        seats: DeviceSlice<'a, i32>,
        query_start: DeviceSlice<'a, i32>,
        block_tables: DeviceSlice<'a, i32>,
        rows: usize,
    ) -> Self {
        Self { lengths: Lengths::Seats(seats), query_start, slot_mapping: None, block_tables, rows }
    }

    /// A batch without seats, for direct mode: `context_lens` `i32[b]` are tokens after the step, `slot_mapping` `i64[rows]`
    /// is `block * 64 + offset` of each row, -1 = skip.
    pub fn slots(
        context_lens: DeviceSlice<'a, i32>,
        query_start: DeviceSlice<'a, i32>,
        block_tables: DeviceSlice<'a, i32>,
        slot_mapping: DeviceSlice<'a, i64>,
    ) -> Self {
        let rows = slot_mapping.len();
        let lengths = Lengths::Context(context_lens);
        Self { lengths, query_start, slot_mapping: Some(slot_mapping), block_tables, rows }
    }

    /// The same with rows of a batch of seats marked as padding by -1, before or behind a sequence's tokens.
    #[must_use]
    pub fn with_padding(self, slot_mapping: DeviceSlice<'a, i64>) -> Self {
        Self { slot_mapping: Some(slot_mapping), ..self }
    }

    /// Sequences.
    pub fn sequences(&self) -> usize {
        match self.lengths {
            Lengths::Seats(s) | Lengths::Context(s) => s.len(),
        }
    }

    /// Rows of the input tensors, padding counted.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Block tables, `[sequences, max_blocks]`.
    pub fn block_tables(&self) -> DeviceSlice<'a, i32> {
        self.block_tables
    }

    /// All of it is the device's, as far as that is known.
    pub(super) fn home(&self, device: &Device) -> Result<()> {
        let (seats, context) = match self.lengths {
            Lengths::Seats(s) => (s.device(), None),
            Lengths::Context(c) => (None, c.device()),
        };
        let all = [
            ("seats", seats),
            ("context_lens", context),
            ("query_start", self.query_start.device()),
            ("slot_mapping", self.slot_mapping.and_then(|s| s.device())),
            ("block_tables", self.block_tables.device()),
        ];
        check::home(device, all)
    }

    /// Entries of a block table, if all have the same number.
    pub(super) fn table_width(&self) -> Result<usize> {
        let (n, len) = (self.sequences(), self.block_tables.len());
        if n == 0 || !len.is_multiple_of(n) {
            return Err(Error::Shape {
                what: "block_tables",
                expected: format!("[{n} sequences, blocks of each]"),
                got: format!("{len} entries"),
            });
        }
        Ok(len / n)
    }
}

/// Device memory that a step is kept in.
#[derive(Debug)]
pub struct StepMemory<'a> {
    /// `i32[max_sequences, 2]`: (len, packed_len) of each seat. Zeros for an empty one.
    pub lengths: DeviceSliceMut<'a, i32>,
    /// `i32[sequences, STEP_WORDS]` or more: the step buffer.
    pub step: DeviceSliceMut<'a, i32>,
    /// `i64[rows]` or more in direct mode, else empty: slot of each row.
    pub slots: DeviceSliceMut<'a, i64>,
    /// `u64[STATUS_WORDS]`, zeros at first: see [`CacheStatus`].
    pub status: DeviceSliceMut<'a, u64>,
}

impl StepMemory<'_> {
    /// All of it is the device's, as far as that is known.
    pub(super) fn home(&self, device: &Device) -> Result<()> {
        let all = [
            ("lengths", self.lengths.device()),
            ("step", self.step.device()),
            ("slots", self.slots.device()),
            ("status", self.status.device()),
        ];
        check::home(device, all)
    }

    pub(super) fn check(&self, config: &CacheConfig, sequences: usize, rows: usize) -> Result<()> {
        check::at_least("lengths", 2 * config.max_sequences, self.lengths.len())?;
        check::address("lengths", self.lengths.address(), 4)?;
        check::at_least("step", STEP_WORDS * sequences, self.step.len())?;
        check::address("step", self.step.address(), 16)?;
        check::len("status", STATUS_WORDS, self.status.len())?;
        check::address("status", self.status.address(), 8)?;
        if config.residual.is_none() {
            check::at_least("slots", rows, self.slots.len())?;
            if rows > 0 {
                check::address("slots", self.slots.address(), 8)?;
            }
        }
        Ok(())
    }
}

/// Opens a step: writes old and new lengths of every sequence to the step buffer, which [`append`](super::append) of every
/// layer reads, and makes the new ones the seats' own. One launch a step, not a layer.
///
/// A sequence that cannot be served keeps its lengths, has no tokens in this step, and is counted in the status: a tile that
/// closes has no block below `blocks`, there are more tokens than the configuration allows, the seat does not exist or has lengths
/// that no sequence can have, or its rows do not fit the tensors or come before those of an earlier sequence. Rows of no sequence
/// are left out. The device cannot see whether a seat comes twice; give each once.
///
/// # Errors
/// [`Error::Length`], [`Error::Shape`] or [`Error::Address`] for memory that does not fit, [`Error::Unsupported`] for memory of
/// another device and for a batch of slots in windowed mode, [`Error::Capacity`] for more sequences than the configuration has, [`Error::Cuda`] if the launch
/// fails.
pub fn begin_step(
    device: &Device,
    stream: RawStream<'_>,
    config: &CacheConfig,
    blocks: usize,
    batch: &DeviceBatch<'_>,
    memory: &mut StepMemory<'_>,
) -> Result<()> {
    config.validate()?;
    let n = batch.sequences();
    if n == 0 {
        return Ok(());
    }
    let (seats, context_lens) = match batch.lengths {
        Lengths::Seats(s) => (s.address(), 0),
        Lengths::Context(c) => (0, c.address()),
    };
    if let (Lengths::Context(_), Some(r)) = (batch.lengths, config.residual) {
        return Err(Error::Unsupported {
            what: "a step of slots",
            got: format!("R = {r}"),
            why: "slots without seats are for direct mode; build the configuration with CacheConfig::direct"
                .into(),
        });
    }
    if matches!(batch.lengths, Lengths::Seats(_)) && n > config.max_sequences {
        return Err(Error::Capacity {
            what: "sequences",
            needed: n,
            available: config.max_sequences,
            help: "build the cache with a larger max_sequences",
        });
    }
    check::count("rows", batch.rows)?;
    check::count("blocks", blocks)?;
    check::count("sequences", n)?;
    let width = batch.table_width()?;
    check::len("query_start", n + 1, batch.query_start.len())?;
    for (what, address) in [
        ("seats", seats.max(context_lens)),
        ("query_start", batch.query_start.address()),
        ("block_tables", batch.block_tables.address()),
    ] {
        check::address(what, address, 4)?;
    }
    if let Some(s) = batch.slot_mapping {
        check::len("slot_mapping", batch.rows, s.len())?;
        check::address("slot_mapping", s.address(), 8)?;
    }
    memory.check(config, n, batch.rows)?;
    batch.home(device)?;
    memory.home(device)?;
    let p = QkvBeginStep {
        seats,
        context_lens,
        query_start: batch.query_start.address(),
        slot_mapping: batch.slot_mapping.map_or(0, |s| s.address()),
        block_tables: batch.block_tables.address(),
        lengths: memory.lengths.address(),
        step: memory.step.address(),
        slots: memory.slots.address(),
        status: memory.status.address(),
        sequences: n as u32,
        rows: batch.rows as u32,
        table_width: width as u32,
        max_sequences: config.max_sequences as u32,
        max_tokens: config.max_tokens as u32,
        blocks: blocks as u32,
        residual: config.residual.map_or(-1, |r| r as i32),
        reserved: 0,
    };
    let grid = Grid { blocks: (n as u32).div_ceil(THREADS / 32), threads: THREADS, shared: 0 };
    // SAFETY: every array has the length that the kernel reads or writes, and its alignment (above); what the arrays hold is
    // checked by the kernel before it is used as an index.
    unsafe { device.start(Kernel::BeginStep, grid, stream, &p) }
}

/// What kernels counted, from the words of the status: copy them to the host when it suits.
pub fn read_status(words: [u64; STATUS_WORDS]) -> CacheStatus {
    let half = |w: u64, high: bool| if high { (w >> 32) as u32 } else { w as u32 };
    CacheStatus {
        clamped_values: words[0],
        missing_blocks: half(words[1], false),
        over_capacity: half(words[1], true),
        bad_seats: half(words[2], false),
        bad_rows: half(words[2], true),
        bad_slots: half(words[3], false),
    }
}

//! The batch of a step on its way to the device: seats, rows and block tables, in one copy from page-locked memory.

use super::memory::Pinned;
use super::options::columns;
use super::queue::{Event, Queue};
use super::{Cuda, STEP_WORDS};
use crate::cache::{Seat, SequenceStep, Step};
use crate::config::CacheConfig;
use crate::cuda::Device;
use crate::cuda::launch::{self, DeviceBatch};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Steps that the host can be ahead of the device before it waits.
pub const STAGES: usize = 8;

/// What the device holds of a step, in this order: slot mapping (i64 a row, optional), then i32: seats or context lengths,
/// first rows and the number of rows, block tables.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Current {
    pub(super) sequences: usize,
    pub(super) rows: usize,
    /// Columns of the block tables.
    pub(super) columns: usize,
    mapped: bool,
    /// A step of slots, without seats.
    slots: bool,
    /// New tokens of the longest sequence.
    pub(super) query_tokens: usize,
}

impl Current {
    pub(super) fn of(step: &Step, columns: usize) -> Self {
        let all = step.sequences();
        let slots = all.iter().any(|s| s.seat.is_none());
        // Without padding every row is some sequence's.
        let tokens: usize = all.iter().map(|s| s.tokens).sum();
        Self {
            sequences: all.len(),
            rows: step.input_rows,
            columns,
            mapped: slots || tokens != step.input_rows,
            slots,
            query_tokens: all.iter().map(|s| s.tokens).max().unwrap_or(0),
        }
    }

    fn words_at(&self) -> usize {
        if self.mapped { self.rows * 8 } else { 0 }
    }

    fn starts_at(&self) -> usize {
        self.words_at() + 4 * self.sequences
    }

    /// Where the table of sequence `i` begins.
    pub(super) fn table_at(&self, i: usize) -> usize {
        self.starts_at() + 4 * (self.sequences + 1 + i * self.columns)
    }

    fn bytes(&self) -> usize {
        self.table_at(self.sequences)
    }

    fn check(&self, config: &CacheConfig, most_rows: usize) -> Result<()> {
        if self.sequences > config.max_sequences {
            return Err(Error::Capacity {
                what: "sequences of a step",
                needed: self.sequences,
                available: config.max_sequences,
                help: "build the cache with a larger max_sequences",
            });
        }
        if (self.mapped || config.residual.is_none()) && self.rows > most_rows {
            return Err(Error::Capacity {
                what: "rows of a step in direct mode or with padding",
                needed: self.rows,
                available: most_rows,
                help: "give fewer rows at a time, or build the cache with CudaOptions::with_rows",
            });
        }
        Ok(())
    }

    /// Writes the batch.
    fn write(&self, step: &Step, to: &Pinned) {
        if self.mapped {
            (0..self.rows).for_each(|row| to.set_i64(row * 8, -1));
            for s in step.sequences() {
                for i in 0..s.tokens {
                    let slot = if self.slots { step.slots[s.first_slot + i] } else { 0 };
                    to.set_i64((s.first_row + i) * 8, slot);
                }
            }
        }
        let length = |s: &SequenceStep| s.seat.map_or(s.new_len, Seat::index) as i32;
        for (i, s) in step.sequences().iter().enumerate() {
            to.set_i32(self.words_at() + 4 * i, length(s));
        }
        for (i, start) in step.starts.iter().enumerate() {
            to.set_i32(self.starts_at() + 4 * i, *start);
        }
        for i in 0..self.sequences {
            self.write_table(i, step.table(i), to);
        }
    }

    /// Writes the block table of one sequence.
    pub(super) fn write_table(&self, i: usize, table: &[i32], to: &Pinned) {
        for (tile, block) in table[..self.columns].iter().enumerate() {
            to.set_i32(self.table_at(i) + 4 * tile, *block);
        }
    }

    /// The batch in device memory.
    pub(super) fn on_device<'a>(&self, cache: &'a Cuda) -> DeviceBatch<'a> {
        let at = |byte: usize| cache.at.batch + byte as u64;
        let lengths = cache.slice(at(self.words_at()), self.sequences);
        let starts = cache.slice(at(self.starts_at()), self.sequences + 1);
        let tables = cache.slice(at(self.table_at(0)), self.sequences * self.columns);
        let mapping = || cache.slice(at(0), self.rows);
        match (self.slots, self.mapped) {
            (true, _) => DeviceBatch::slots(lengths, starts, tables, mapping()),
            (false, true) => DeviceBatch::seats(lengths, starts, tables, self.rows).with_padding(mapping()),
            (false, false) => DeviceBatch::seats(lengths, starts, tables, self.rows),
        }
    }
}

/// Page-locked memory for the batches of the next steps.
#[derive(Debug)]
pub(super) struct Staging {
    stages: Vec<Stage>,
    next: usize,
    /// Where the step that is being captured takes its batch from.
    pub(super) capture: Option<Arc<Pinned>>,
    /// Memory that graphs read, for the life of the cache, and whether a graph does.
    pub(super) captured: Vec<(Arc<Pinned>, bool)>,
}

#[derive(Debug)]
struct Stage {
    memory: Pinned,
    /// Recorded behind the copy.
    copied: Event,
    used: bool,
}

impl Staging {
    pub(super) fn new(device: &Device, words: usize, mapping: usize) -> Result<Self> {
        let stage = |_| {
            let memory = Pinned::new(device, mapping + words)?;
            Ok(Stage { memory, copied: Event::new(device)?, used: false })
        };
        let stages = (0..STAGES).map(stage).collect::<Result<_>>()?;
        Ok(Self { stages, next: 0, capture: None, captured: Vec::new() })
    }

    /// Puts the copy of a batch on the stream.
    fn send(&mut self, queue: &Queue, to: u64, batch: &Current, step: &Step) -> Result<()> {
        if let Some(memory) = &self.capture {
            batch.write(step, memory);
            // SAFETY: stores to it while it is copied are atomic and, but for new block ids of tiles that are not closed yet,
            // wait for the stream (`advance`).
            let bytes = unsafe { memory.slice(batch.bytes()) };
            // SAFETY: the batch's part of the buffer is as large as this memory.
            return unsafe { queue.upload(to, bytes) };
        }
        let stage = &mut self.stages[self.next];
        if stage.used {
            stage.copied.wait()?;
        }
        batch.write(step, &stage.memory);
        // SAFETY: nothing is stored to it before the event behind the copy has come.
        let bytes = unsafe { stage.memory.slice(batch.bytes()) };
        // SAFETY: the batch's part of the buffer is as large as this memory.
        unsafe { queue.upload(to, bytes) }?;
        stage.used = true;
        queue.record(&stage.copied)?;
        self.next = (self.next + 1) % self.stages.len();
        Ok(())
    }
}

impl Cuda {
    /// Opens a step on the device.
    pub(super) fn begin_on_device(&mut self, step: &Step) -> Result<()> {
        let captured = self.staging.capture.is_some();
        let longest = step.sequences().iter().map(|s| s.new_len).max().unwrap_or(0);
        // A graph is replayed while sequences grow, so it takes whole tables.
        let columns = if captured { step.table_width } else { columns(longest).min(step.table_width) };
        let batch = Current::of(step, columns);
        batch.check(&self.config, self.options.rows)?;
        if captured != self.queue.is_capturing()? {
            return Err(Error::Unsupported {
                what: "a step",
                got: if captured { "a stream that captures nothing" } else { "a stream that captures" }
                    .into(),
                why: "a graph is made of a step that `capture_step` opens, on a stream that captures".into(),
            });
        }
        self.staging.send(&self.queue, self.at.batch, &batch, step)?;
        self.current = batch;
        let (device, stream) = (&self.queue.device, self.queue.raw());
        let (batch, mut memory) = (self.batch(), self.step_memory());
        launch::begin_step(device, stream, &self.config, self.pool.blocks(), &batch, &mut memory)
    }

    /// The step buffer and a batch of one sequence for work between steps: `sequence` is a `QkvSequence`, one row a token.
    pub(super) fn own_step(&self, sequence: [i32; STEP_WORDS]) -> Result<()> {
        // SAFETY: the buffer's own part for a step of one sequence.
        unsafe { self.queue.upload(self.at.own_step, &sequence) }
    }
}

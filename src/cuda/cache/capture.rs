//! Steps in CUDA graphs.

use super::Cuda;
use super::memory::Pinned;
use super::staging::Current;
use crate::cache::{Batch, KvCache, PagedKvCache, Seat};
use crate::error::{Error, Result};
use std::sync::Arc;

/// One step of a fixed batch that is captured in a graph once and replayed while its sequences grow.
///
/// ```no_run
/// # use qkv::cuda::{Cuda, Device, DeviceTensor, cudarc::driver::{CudaStream, sys}};
/// # use qkv::{Batch, PagedKvCache};
/// # fn step(
/// #     mut cache: PagedKvCache<Cuda>, stream: &std::sync::Arc<CudaStream>, seats: &[qkv::Seat],
/// #     k: DeviceTensor<'_>, v: DeviceTensor<'_>,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// // One new token for each of two sequences.
/// let step = cache.prepare_capture(&Batch::new(seats, &[0, 1, 2]))?;
/// stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
/// cache.capture_step(&step)?;
/// for layer in 0..cache.config().layers.len() {
///     cache.append(layer, &k, &v)?; // .. and attend
/// }
/// let graph = stream.end_capture(sys::CUgraphInstantiate_flags_enum::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
/// let graph = graph.ok_or("nothing was captured")?;
///
/// for _ in 0..100 {
///     // .. write the new tokens' keys and values to the memory that was captured ..
///     cache.advance(&step)?; // the host follows: lengths, and block ids for tiles that close
///     graph.launch()?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// The graph holds the copy of the batch from page-locked memory, `begin_step` and the launches of all layers. Lengths are read on
/// the device, so every replay goes on where the one before ended. Between replays sequences may be cut, cleared, closed
/// and opened as always, as long as the same seats are open when it is replayed; other steps may come between.
///
/// Launch the graph on the cache's stream. Drop it before the cache. Other threads may go on with the device while this one captures,
/// unless the mode is `GLOBAL`: then what they allocate meanwhile fails, and the capture with it.
#[derive(Debug)]
pub struct CapturedStep {
    memory: Arc<Pinned>,
    seats: Vec<Seat>,
    query_start: Vec<i32>,
}

impl CapturedStep {
    /// The sequences.
    pub fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// The rows of each sequence, as in [`Batch`].
    pub fn query_start(&self) -> &[i32] {
        &self.query_start
    }

    fn batch(&self) -> Batch<'_> {
        Batch::new(&self.seats, &self.query_start)
    }
}

impl PagedKvCache<Cuda> {
    /// Makes ready to capture a step of this batch: allocates page-locked memory, which the cache keeps for its life, and
    /// takes the blocks of the first replay from the pool. Padding is not possible.
    ///
    /// # Errors
    /// Those of [`begin_step`](Self::begin_step) and [`reserve`](Self::reserve); [`Error::Unsupported`] for a slot mapping;
    /// [`Error::Cuda`] without page-locked memory.
    pub fn prepare_capture(&mut self, batch: &Batch<'_>) -> Result<CapturedStep> {
        if batch.slot_mapping.is_some() {
            return Err(Error::Unsupported {
                what: "slot_mapping",
                got: "some".into(),
                why: "a captured step has the same rows in every replay; capture a step without padding"
                    .into(),
            });
        }
        self.state.no_open_step()?;
        let step = CapturedStep {
            memory: Arc::new(Pinned::new(&self.backend.queue.device, self.backend.batch_bytes())?),
            seats: batch.seats.to_vec(),
            query_start: batch.query_start.to_vec(),
        };
        // All checks of a step, without one.
        self.reserve_all(&step)?;
        self.state.begin_step(&step.batch())?;
        self.state.step.clear();
        self.backend.staging.captured.push((Arc::clone(&step.memory), false));
        Ok(step)
    }

    /// Opens the step on a stream that captures. Every layer appends and attends as in any other step; when the last has
    /// appended, lengths stay what they were: nothing has run.
    ///
    /// # Errors
    /// As [`begin_step`](Self::begin_step); [`Error::Unsupported`] if the stream captures nothing, or for a step of another
    /// cache; [`Error::Capacity`] if the pool lacks blocks for the first replay.
    pub fn capture_step(&mut self, step: &CapturedStep) -> Result<()> {
        let at = self.own(step)?;
        self.state.no_open_step()?;
        self.reserve_all(step)?;
        self.state.begin_step(&step.batch())?;
        self.state.step.captured = true;
        self.backend.staging.capture = Some(Arc::clone(&step.memory));
        let opened = self.begin_on_backend();
        self.backend.staging.capture = None;
        self.backend.staging.captured[at].1 |= opened.is_ok();
        opened
    }

    /// Makes the host follow one replay of a captured step: takes the blocks that it needs from the pool, enters them in the block
    /// tables that the graph copies, and counts the new tokens. Call it before each launch of the graph, and launch it before
    /// anything else on the cache.
    ///
    /// It neither launches nor waits, but for one case: where an entry of a block table that an earlier replay may still read has
    /// changed (after `truncate`, `clear` ..), it waits for the stream first.
    ///
    /// # Errors
    /// As [`begin_step`](Self::begin_step); [`Error::Capacity`] if the pool has too few blocks; [`Error::Unsupported`] for a step
    /// of another cache, or one that no stream has captured. The graph must not be launched then.
    pub fn advance(&mut self, step: &CapturedStep) -> Result<()> {
        let at = self.own(step)?;
        if !self.backend.staging.captured[at].1 {
            return Err(Error::Unsupported {
                what: "a captured step",
                got: "one that is only prepared".into(),
                why: "no graph has it; call capture_step on a stream that captures first".into(),
            });
        }
        self.state.no_open_step()?;
        self.reserve_all(step)?;
        self.state.begin_step(&step.batch())?;
        let batch = Current::of(&self.state.step, self.state.step.table_width);
        if let Err(e) = self.enter_tables(step, &batch) {
            self.state.step.clear();
            return Err(e);
        }
        (0..self.config().layers.len()).for_each(|layer| self.state.appended(layer));
        // Attention of this step is in the graph.
        self.state.step.valid = false;
        Ok(())
    }

    fn enter_tables(&self, step: &CapturedStep, batch: &Current) -> Result<()> {
        let tables = || (0..batch.sequences).map(|i| (i, self.state.step.table(i)));
        let held = |i: usize, tile: usize| step.memory.i32(batch.table_at(i) + 4 * tile);
        let replaced = |(i, table): (usize, &[i32])| {
            table.iter().enumerate().any(|(tile, block)| {
                let old = held(i, tile);
                old >= 0 && old != *block
            })
        };
        if tables().any(replaced) {
            self.backend.queue.wait()?;
        }
        tables().for_each(|(i, table)| batch.write_table(i, table, &step.memory));
        Ok(())
    }

    /// Which of the cache's captured steps it is.
    fn own(&self, step: &CapturedStep) -> Result<usize> {
        let at = self.backend.staging.captured.iter().position(|(m, _)| Arc::ptr_eq(m, &step.memory));
        at.ok_or_else(|| Error::Unsupported {
            what: "a captured step",
            got: "one of another cache".into(),
            why: "it is replayed with the cache that prepared it".into(),
        })
    }

    /// Takes the blocks of a step: for all sequences or none.
    fn reserve_all(&mut self, step: &CapturedStep) -> Result<()> {
        if step.query_start.len() != step.seats.len() + 1 {
            let expected = step.seats.len() + 1;
            return Err(Error::Length { what: "query_start", expected, got: step.query_start.len() });
        }
        let rows = |i: usize| (step.query_start[i + 1] as usize).saturating_sub(step.query_start[i] as usize);
        let mut needed = 0usize;
        for (i, seat) in step.seats.iter().enumerate() {
            needed = needed.saturating_add(self.blocks_needed(*seat, rows(i))?);
        }
        let available = self.state.blocks.lock().free();
        if needed > available {
            return Err(Error::Capacity {
                what: "blocks",
                needed,
                available,
                help: "close or truncate sequences, drop prefixes, or build the pool with more blocks",
            });
        }
        for (i, seat) in step.seats.iter().enumerate() {
            self.reserve(*seat, rows(i))?;
        }
        Ok(())
    }
}

impl KvCache<Cuda> {
    /// Makes ready to capture a step of `tokens` new tokens for every sequence; see [`PagedKvCache::prepare_capture`].
    ///
    /// # Errors
    /// As there.
    pub fn prepare_capture(&mut self, tokens: usize) -> Result<CapturedStep> {
        if tokens == 0 {
            let why = "a step has at least one new token".into();
            return Err(Error::Unsupported { what: "tokens", got: "0".into(), why });
        }
        let n = self.seats.len();
        let rows = tokens.checked_mul(n).filter(|r| *r <= i32::MAX as usize).ok_or(Error::Capacity {
            what: "rows of a step",
            needed: tokens.saturating_mul(n),
            available: i32::MAX as usize,
            help: "give fewer tokens at a time",
        })?;
        let starts: Vec<i32> = (0..=n).map(|i| (i * (rows / n)) as i32).collect();
        self.cache.prepare_capture(&Batch::new(&self.seats, &starts))
    }

    /// Opens the step on a stream that captures; see [`PagedKvCache::capture_step`]. Then every layer appends.
    ///
    /// # Errors
    /// As there.
    pub fn capture_step(&mut self, step: &CapturedStep) -> Result<()> {
        self.cache.capture_step(step)?;
        self.starts.clear();
        self.starts.extend_from_slice(&step.query_start);
        Ok(())
    }

    /// Makes the host follow one replay; see [`PagedKvCache::advance`].
    ///
    /// # Errors
    /// As there.
    pub fn advance(&mut self, step: &CapturedStep) -> Result<()> {
        self.cache.advance(step)
    }
}

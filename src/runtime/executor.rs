//! The executor: owns a sealed arena, its captured graphs and the step ring, and runs steps.

mod checks;
mod dummy;
mod observe;
mod ranks;
mod shadow;
mod timing;
mod walk;

pub use checks::Checks;
pub use shadow::NodeDifference;
pub use timing::{NodeSpan, ReplaySpan};
pub use walk::{Source, Walk};

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch::split;
use super::metrics::{BatchRows, Fallback, Metrics, SizeCount};
use super::ring::{RingLayout, StepRing, Ticket, TicketState};
use super::{BlockId, SequenceId, SequenceStep, Sequences};
use crate::arena::{Arena, Sealed};
use crate::capture::{GraphCost, GraphSet, Ladder, Modules, launch_all, lower};
use crate::chain::{Chain, GraphKey, StepChains};
use crate::error::{Error, ErrorKind, Result};
use crate::hal::{Device, Stream};
use crate::invariant::lints::grown_workspace;
use crate::invariant::{Lint, lint};
use crate::kernels::step::{ResultHeader, StepError, TOKEN_FROM_DEVICE};
use crate::peers::Group;
use ranks::ends_group;
pub(crate) use ranks::peer_error;

/// What [`Executor::capture`] tells while it works.
#[derive(Clone, Copy, Debug)]
pub struct CaptureProgress {
    /// Warm-ups and captures done so far.
    pub done: usize,
    /// Warm-ups and captures in all.
    pub total: usize,
    /// True while sizes are warmed up, false while they are captured.
    pub warming: bool,
    /// The size at hand, rows.
    pub rows: u32,
    /// Free device memory, bytes.
    pub free_bytes: u64,
}

/// What a capture took.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CaptureReport {
    /// Captured sizes, rows, ascending.
    pub sizes: Vec<u32>,
    /// Nodes of all graphs.
    pub nodes: usize,
    /// Wall time of the warm-ups, seconds.
    pub warm_up_seconds: f64,
    /// Wall time of the captures, seconds.
    pub capture_seconds: f64,
    /// Device memory that warm-ups and graphs took beyond the arena, bytes: free before minus free after.
    pub graph_bytes: u64,
    /// What the graphs were estimated to take before anything was captured, bytes.
    pub estimated_graph_bytes: u64,
    /// What each graph took, in the order of capture. Drivers take memory in pieces, so single figures are coarse.
    pub graphs: Vec<GraphMemory>,
    /// What the largest graph pays for and does not need, and device memory that no graph accounts for.
    pub lints: Vec<Lint>,
}

/// Device memory of one captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GraphMemory {
    /// Capture size, rows.
    pub rows: u32,
    /// Nodes.
    pub nodes: usize,
    /// Free memory before its capture minus free memory after, bytes.
    pub bytes: u64,
}

/// A finished step.
#[derive(Clone, Copy, Debug)]
pub struct StepResult<'a> {
    /// The ticket it answers.
    pub ticket: Ticket,
    /// Sampled tokens: of a decode step one a row, of a prefill one a sequence.
    pub tokens: &'a [i32],
}

/// State of a ticket that was polled.
#[derive(Clone, Copy, Debug)]
pub enum StepPoll<'a> {
    /// Still running.
    Pending,
    /// Finished.
    Ready(StepResult<'a>),
}

/// The decode executor of a server. One thread drives it; see `examples/embed.rs`.
pub struct Executor {
    chains: Arc<dyn StepChains>,
    arena: Arc<Arena<Sealed>>,
    modules: Arc<Modules>,
    stream: Arc<dyn Stream>,
    ladder: Ladder,
    graphs: GraphSet,
    ring: StepRing,
    sequences: Sequences,
    metrics: Metrics,
    checks: Checks,
    difference: Option<NodeDifference>,
    device_passed: bool,
    group: Option<Arc<dyn Group>>,
    poison: Option<Error>,
}

impl Executor {
    /// Plans nothing anew: allocates and seals the arena `chains` planned, loads its kernels and its weights.
    ///
    /// Errors: out of memory, a kernel the device has no code for, weights that cannot be read. Nothing leaks.
    pub fn new(device: &Arc<dyn Device>, chains: Arc<dyn StepChains>) -> Result<Executor> {
        Executor::build(device, chains, None)
    }

    fn build(device: &Arc<dyn Device>, chains: Arc<dyn StepChains>, group: Option<Arc<dyn Group>>) -> Result<Executor> {
        let limits = chains.limits();
        let ladder = Ladder::new(limits)?;
        let mut arena = Arena::allocate(device, chains.plan().clone())?.seal()?;
        Executor::connect(&mut arena, &*chains, group.as_ref())?;
        let arena = Arc::new(arena);
        let modules = Arc::new(Modules::load(&**device, &chains.kernels())?);
        let stream = device.create_stream()?;
        chains.initialise(&arena)?;
        let (step, layout) = (chains.step(), chains.step_layout());
        let ring = StepRing::new(
            RingLayout {
                slots: layout.ring_slots,
                sequence_capacity: layout.sequence_capacity,
                row_capacity: layout.row_capacity,
                update_capacity: layout.update_capacity,
            },
            arena.pinned(step.ring)?,
            arena.pinned(step.results)?,
        );
        let decode_rows = limits.max_num_seqs.saturating_mul(1 + limits.num_speculative_tokens);
        let alone = !Executor::warn_of_refused(&*chains).is_empty();
        let sequences = Sequences::new(layout.slots, layout.table_width, layout.block_size, layout.cache_blocks);
        Ok(Executor {
            chains,
            arena,
            modules,
            stream,
            ladder,
            graphs: GraphSet::default(),
            ring,
            sequences,
            metrics: Metrics { batch_rows: BatchRows::new(decode_rows), alone, ..Metrics::default() },
            checks: Checks::default(),
            difference: None,
            device_passed: false,
            group,
            poison: None,
        })
    }

    /// Warms every capture size up, then captures them all, largest first. Steps in flight are finished first; earlier graphs
    /// are replaced.
    ///
    /// Each size is captured twice, around dummy batches that write to table rows and cache blocks no open sequence holds (what
    /// a prefix cache keeps in such blocks does not survive), then audited. Errors: an invariant is broken, a device call
    /// failed; no graph is left then and steps run eagerly.
    pub fn capture(&mut self, mut progress: impl FnMut(CaptureProgress)) -> Result<CaptureReport> {
        let captured = self.capture_all(&mut progress);
        if captured.is_err() {
            self.graphs.clear();
        }
        captured
    }

    fn capture_all(&mut self, progress: &mut dyn FnMut(CaptureProgress)) -> Result<CaptureReport> {
        self.healthy()?;
        self.drain()?;
        self.graphs.clear();
        self.check_device()?;
        let keys: Vec<GraphKey> = self.ladder.sizes().iter().rev().map(|&rows| self.key(rows)).collect();
        self.agree_on_capture(&keys)?;
        let total = keys.len() * 2;
        let device = self.arena.device().clone();
        let free_before = device.memory()?.free_bytes;
        let mut tell = |done: usize, warming, rows| -> Result<()> {
            progress(CaptureProgress { done, total, warming, rows, free_bytes: device.memory()?.free_bytes });
            Ok(())
        };
        let started = Instant::now();
        // All sizes first: a workspace that grew for a later size would leave earlier graphs with dangling addresses.
        for (done, key) in keys.iter().enumerate() {
            tell(done, true, key.rows())?;
            self.warm_up(key)?;
        }
        let warmed = Instant::now();
        let free_warmed = self.arena.device().memory()?.free_bytes;
        let mut free_now = free_warmed;
        let mut graphs = Vec::with_capacity(keys.len());
        for (done, key) in keys.iter().enumerate() {
            tell(keys.len() + done, false, key.rows())?;
            let graph = self.capture_checked(key)?;
            let (rows, nodes) = (key.rows(), graph.launches().len());
            self.graphs.insert(graph);
            let free_bytes = self.arena.device().memory()?.free_bytes;
            graphs.push(GraphMemory { rows, nodes, bytes: free_now.saturating_sub(free_bytes) });
            free_now = free_bytes;
        }
        self.check_memory()?;
        self.metrics.replays = self.ladder.sizes().iter().map(|&rows| SizeCount { rows, replays: 0 }).collect();
        let lints = self.lints();
        let cost = GraphCost::of(self.arena.device().info().platform);
        let estimated_graph_bytes = graphs.iter().map(|graph| cost.estimate(1, graph.nodes as u64)).sum();
        let grown = grown_workspace(free_warmed, free_now, estimated_graph_bytes);
        for lint in grown.iter().chain(&lints) {
            match lint.kind.is_grave() {
                true => tracing::warn!(kind = ?lint.kind, "{lint}"),
                false => tracing::info!(kind = ?lint.kind, "{lint}"),
            }
        }
        let report = CaptureReport {
            lints: lints.into_iter().chain(grown).collect(),
            sizes: self.ladder.sizes().to_vec(),
            nodes: graphs.iter().map(|graph| graph.nodes).sum(),
            warm_up_seconds: (warmed - started).as_secs_f64(),
            capture_seconds: warmed.elapsed().as_secs_f64(),
            graph_bytes: free_before.saturating_sub(self.arena.device().memory()?.free_bytes),
            estimated_graph_bytes,
            graphs,
        };
        tracing::info!(sizes = report.sizes.len(), nodes = report.nodes, seconds = report.capture_seconds, "captured");
        Ok(report)
    }

    /// Opens a sequence: it takes a row of the block table.
    pub fn open_sequence(&mut self) -> Result<SequenceId> {
        self.sequences.open()
    }

    /// Gives cache blocks to a sequence; the next step carries them to the device.
    pub fn grant_blocks(&mut self, sequence: SequenceId, blocks: &[BlockId]) -> Result<()> {
        self.sequences.grant(sequence, blocks)
    }

    /// Closes a sequence and calls `freed` with each block it held.
    pub fn close_sequence(&mut self, sequence: SequenceId, freed: impl FnMut(BlockId)) -> Result<()> {
        self.sequences.close(sequence, freed)
    }

    /// Shortens a sequence, e.g. by rejected speculative tokens. Its blocks stay.
    pub fn truncate_sequence(&mut self, sequence: SequenceId, kv_len: u32) -> Result<()> {
        self.sequences.truncate(sequence, kv_len)
    }

    /// Queues one decode step: every sequence brings the same number of tokens. Pads to the smallest captured size and replays
    /// it with one launch; beyond the ladder it runs eagerly, counted in [`Metrics::fallbacks`].
    ///
    /// Errors of kind [`Batch`](ErrorKind::Batch) leave everything as it was. [`State`](ErrorKind::State): the ring is full,
    /// wait for the oldest ticket first.
    pub fn decode(&mut self, batch: &[SequenceStep<'_>]) -> Result<Ticket> {
        self.healthy()?;
        let query_len = batch.first().map_or(0, |step| step.tokens.len());
        if query_len == 0 || batch.iter().any(|step| step.tokens.len() != query_len) {
            return Err(Error::batch("a decode step needs at least one sequence, and one number of tokens for all")
                .help("use step() for mixed batches"));
        }
        let kv_len_max = self.check_batch(batch)?;
        self.make_room()?;
        let (query_len, sequences) = (query_len as u32, batch.len() as u32);
        let rows = query_len * sequences;
        self.check_parallel(rows)?;
        let Some(graph) = self.graphs.pick(query_len, sequences, kv_len_max) else {
            return self.decode_eagerly(batch, query_len);
        };
        graph.check_fingerprint()?;
        if self.shadow_is_due() {
            return self.decode_shadowed(batch, rows, kv_len_max);
        }
        if self.audit_is_due() {
            return self.decode_audited(batch, rows, kv_len_max);
        }
        let (ticket, updates) = fill(&mut self.ring, &self.sequences, batch)?;
        if let Err(error) = graph.replay(&*self.stream) {
            return Err(poisoned(&mut self.poison, error));
        }
        let capture_rows = graph.key().rows();
        self.commit(ticket, batch, updates, rows);
        self.metrics.replayed(capture_rows, rows);
        Ok(ticket)
    }

    /// Queues one prefill step of ragged rows, eagerly, over the same kernels and buffers.
    pub fn prefill(&mut self, batch: &[SequenceStep<'_>]) -> Result<Ticket> {
        self.healthy()?;
        let rows = self.check_prefill(batch)?;
        self.make_room()?;
        let chain = self.chains.prefill(batch.len() as u32, rows);
        let ticket = self.run_eagerly(&chain, batch, batch.len() as u32)?;
        self.metrics.prefill_steps += 1;
        Ok(ticket)
    }

    /// Queues a mixed batch, decodes first (msa-spec section 7): the leading sequences of one short query length as a decode
    /// step, the rest as a prefill step. Gives the tickets of the parts that exist, and how many sequences were decodes.
    ///
    /// Errors as of [`Executor::decode`] and [`Executor::prefill`]; a refused part leaves the other one unqueued.
    pub fn step(&mut self, batch: &[SequenceStep<'_>]) -> Result<(Option<Ticket>, Option<Ticket>, usize)> {
        let threshold = 1 + self.chains.limits().num_speculative_tokens as usize;
        let parts = split(batch, threshold);
        let (decodes, prefills) = batch.split_at(parts.decode);
        // What would refuse the second part is found before the first is queued: its ticket would be lost.
        if !decodes.is_empty() && !prefills.is_empty() {
            self.healthy()?;
            self.check_prefill(prefills)?;
            self.ring.room_for(2)?;
        }
        let decode = if decodes.is_empty() { None } else { Some(self.decode(decodes)?) };
        let prefill = if prefills.is_empty() { None } else { Some(self.prefill(prefills)?) };
        Ok((decode, prefill, parts.decode))
    }

    /// Looks whether a step has finished, without waiting.
    pub fn poll(&mut self, ticket: Ticket) -> Result<StepPoll<'_>> {
        match self.ring.state(ticket) {
            TicketState::InFlight => Ok(StepPoll::Pending),
            TicketState::Published => self.take(ticket).map(StepPoll::Ready),
            TicketState::Unknown => Err(unknown(ticket)),
        }
    }

    /// Waits for a step by polling its result slot.
    pub fn wait(&mut self, ticket: Ticket) -> Result<StepResult<'_>> {
        self.await_published(ticket)?;
        self.take(ticket)
    }

    /// Waits for everything queued and forgets results nobody took.
    pub fn drain(&mut self) -> Result<()> {
        while let Some(ticket) = self.ring.oldest() {
            if !self.arena.device().info().executes {
                self.ring.abandon(ticket);
                continue;
            }
            self.await_published(ticket)?;
            self.ring.take(ticket);
        }
        self.stream.synchronize()
    }

    /// Declares the first `kv_len` tokens of a sequence cached: another path wrote them (a transfer, a shared prefix). Its blocks
    /// must be granted.
    pub fn assume_cached(&mut self, sequence: SequenceId, kv_len: u32) -> Result<()> {
        self.sequences.assume_cached(sequence, kv_len)
    }

    /// The key of an eager decode step: exactly its rows, no padding.
    pub fn eager_key(&self, query_len: u32, sequences: u32) -> GraphKey {
        GraphKey { query_len, sequences, ..self.key(0) }
    }

    /// Counters.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The captured graphs.
    pub fn graphs(&self) -> &GraphSet {
        &self.graphs
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Arena<Sealed>> {
        &self.arena
    }

    /// The chains it runs.
    pub fn chains(&self) -> &Arc<dyn StepChains> {
        &self.chains
    }

    /// The capture sizes.
    pub fn ladder(&self) -> &Ladder {
        &self.ladder
    }

    /// The open sequences.
    pub fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    /// Steps that may be in flight at once.
    pub fn ring_slots(&self) -> u32 {
        self.ring.layout().slots
    }

    /// The error that ended this executor, if one did: a device call failed with steps in flight.
    pub fn poison(&self) -> Option<&Error> {
        self.poison.as_ref()
    }
}

impl Executor {
    fn key(&self, rows: u32) -> GraphKey {
        GraphKey::decode(self.chains.limits(), rows)
    }

    fn healthy(&self) -> Result<()> {
        match &self.poison {
            None => Ok(()),
            Some(error) => Err(Error::state(format!("this executor ended with: {}", error.message()))
                .help("drop it and build another; its device may need a reset")),
        }
    }

    /// What the largest graph pays for and does not need; the other sizes are the same chain.
    fn lints(&self) -> Vec<Lint> {
        self.graphs.iter().max_by_key(|graph| graph.key().rows()).map(lint).unwrap_or_default()
    }

    /// Runs a size once, eagerly, on pad rows only.
    fn warm_up(&mut self, key: &GraphKey) -> Result<()> {
        let _span = tracing::debug_span!("warm_up", %key).entered();
        let chain = self.chains.decode(key);
        self.meet("warm-up")?;
        let ticket = self.run_eagerly(&chain, &[], 0)?;
        self.discard(ticket)
    }

    /// Checks a prefill batch; gives its rows.
    fn check_prefill(&mut self, batch: &[SequenceStep<'_>]) -> Result<u32> {
        if batch.is_empty() || batch.iter().any(|step| step.tokens.is_empty()) {
            return Err(Error::batch("a prefill step needs at least one sequence, and tokens for each")
                .help("leave out sequences without new tokens"));
        }
        self.check_batch(batch)?;
        let rows: usize = batch.iter().map(|step| step.tokens.len()).sum();
        let limit = self.chains.limits().max_num_batched_tokens;
        if rows > limit as usize {
            return Err(Error::batch(format!("{rows} tokens in one prefill step, the limit is {limit}"))
                .help("split the prompts, or raise max_num_batched_tokens"));
        }
        Ok(rows as u32)
    }

    /// Checks every sequence of a batch against the contract; gives the largest KV length. Changes nothing that a
    /// later batch would see.
    fn check_batch(&mut self, batch: &[SequenceStep<'_>]) -> Result<u32> {
        let layout = self.chains.step_layout();
        let limits = self.chains.limits();
        if batch.len() > layout.sequence_capacity as usize {
            return Err(Error::batch(format!(
                "{} sequences in one step, the limit is {}",
                batch.len(),
                layout.sequence_capacity
            ))
            .help("raise max_num_seqs"));
        }
        let rows: usize = batch.iter().map(|step| step.tokens.len()).sum();
        if rows > layout.row_capacity as usize {
            return Err(Error::batch(format!("{rows} rows in one step, the buffers hold {}", layout.row_capacity))
                .help("raise max_num_batched_tokens or the capture sizes"));
        }
        let (mut kv_len_max, vocab) = (0, self.chains.vocab() as i32);
        self.sequences.begin_batch();
        for (at, step) in batch.iter().enumerate() {
            if step.kv_len > limits.max_model_len {
                return Err(Error::batch(format!(
                    "sequence {at}: {} tokens, max_model_len is {}",
                    step.kv_len, limits.max_model_len
                ))
                .help("end the sequence or raise max_model_len"));
            }
            self.sequences.check_step(step.sequence, step.kv_len, step.tokens.len() as u32)?;
            if let Some(&token) = step.tokens.iter().find(|&&token| token != TOKEN_FROM_DEVICE && !(0..vocab).contains(&token)) {
                return Err(Error::batch(format!("sequence {at}: token {token} is not in the vocabulary of {vocab}"))
                    .help("pass token ids of this model, or TOKEN_FROM_DEVICE"));
            }
            step.sampling.validate().map_err(|error| error.within(&format!("sequence {at}")))?;
            kv_len_max = kv_len_max.max(step.kv_len);
        }
        Ok(kv_len_max)
    }

    /// Uploads block-table changes ahead of a step that cannot carry them all.
    fn make_room(&mut self) -> Result<()> {
        let capacity = self.ring.layout().update_capacity as usize;
        while self.sequences.pending().len() > capacity {
            let chain = self.chains.flush();
            let ticket = self.run_eagerly(&chain, &[], 0)?;
            self.metrics.table_flushes += 1;
            self.discard(ticket)?;
        }
        Ok(())
    }

    #[cold]
    fn decode_eagerly(&mut self, batch: &[SequenceStep<'_>], query_len: u32) -> Result<Ticket> {
        let rows = query_len * batch.len() as u32;
        let why = match self.graphs.iter().next() {
            None => Fallback::NotCaptured,
            Some(_) if !self.graphs.iter().any(|graph| graph.key().query_len == query_len) => Fallback::QueryLength,
            Some(_) => Fallback::BeyondLadder,
        };
        let key = self.eager_key(query_len, batch.len() as u32);
        let chain = self.chains.decode(&key);
        let ticket = self.run_eagerly(&chain, batch, rows)?;
        tracing::debug!(rows, reason = why.reason(), "decode step ran eagerly");
        self.metrics.fell_back(why, rows);
        Ok(ticket)
    }

    /// Lowers and launches a chain op by op, as the next step of the ring.
    fn run_eagerly(&mut self, chain: &Chain, batch: &[SequenceStep<'_>], tokens: u32) -> Result<Ticket> {
        let launches = lower(chain, &self.arena, &self.modules)?;
        let (ticket, updates) = fill(&mut self.ring, &self.sequences, batch)?;
        if let Err(error) = launch_all(&*self.stream, chain, &launches) {
            return Err(poisoned(&mut self.poison, error));
        }
        self.commit(ticket, batch, updates, tokens);
        Ok(ticket)
    }

    fn commit(&mut self, ticket: Ticket, batch: &[SequenceStep<'_>], updates: usize, tokens: u32) {
        self.ring.commit(ticket, tokens);
        self.sequences.uploaded(updates);
        for step in batch {
            self.sequences.advance(step.sequence, step.kv_len);
        }
    }

    fn take(&mut self, ticket: Ticket) -> Result<StepResult<'_>> {
        let header = self.ring.header(ticket);
        if let Err(error) = step_error(&header) {
            self.ring.abandon(ticket);
            if ends_group(&error) {
                self.leave();
                self.poison = Some(error.clone());
            }
            return Err(error);
        }
        Ok(StepResult { ticket, tokens: self.ring.take(ticket) })
    }

    /// Waits for a step whose tokens nobody wants.
    fn discard(&mut self, ticket: Ticket) -> Result<()> {
        if !self.arena.device().info().executes {
            self.ring.abandon(ticket);
            return Ok(());
        }
        self.wait(ticket).map(drop)
    }

    /// Polls the result slot: first spinning, then giving the core away; every so often asks the stream whether it still works.
    fn await_published(&mut self, ticket: Ticket) -> Result<()> {
        for spins in 0u64.. {
            match self.ring.state(ticket) {
                TicketState::Published => return Ok(()),
                TicketState::Unknown => return Err(unknown(ticket)),
                TicketState::InFlight => {}
            }
            if spins % 4096 == 4095 {
                self.check_alive(ticket)?;
            }
            match spins {
                0..1000 => std::hint::spin_loop(),
                1000..100_000 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(20)),
            }
        }
        unreachable!("the loop counts further than any machine lives")
    }

    fn check_alive(&mut self, ticket: Ticket) -> Result<()> {
        let idle = match self.stream.query() {
            Ok(idle) => idle,
            Err(error) => return Err(poisoned(&mut self.poison, error)),
        };
        // Idle first, then the slot again: a result published in between is one.
        if !idle || self.ring.state(ticket) == TicketState::Published {
            return Ok(());
        }
        self.ring.abandon(ticket);
        if !self.arena.device().info().executes {
            return Err(Error::unavailable("this device records and runs nothing: no step has a result")
                .help("use --device cpu to run steps"));
        }
        let error = Error::device(format!("step {} ended without publishing a result", ticket.sequence()))
            .help("the graph's publish node did not run: check the device's log");
        Err(poisoned(&mut self.poison, error))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // Graphs, arena and modules may go only when nothing on the stream uses them. An error here was reported already by the
        // call that caused it.
        drop(self.stream.synchronize());
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor")
            .field("chains", &self.chains.name())
            .field("graphs", &self.graphs.len())
            .field("submitted", &self.ring.submitted())
            .finish_non_exhaustive()
    }
}

/// Fills the next ring slot with a batch and the table changes it carries (how many is returned).
fn fill(ring: &mut StepRing, sequences: &Sequences, batch: &[SequenceStep<'_>]) -> Result<(Ticket, usize)> {
    ring.room_for(1)?;
    let updates = sequences.pending().len().min(ring.layout().update_capacity as usize);
    let records = batch.iter().map(|step| {
        let slot = sequences.get(step.sequence).expect("invariant: check_batch found every sequence").slot;
        (step.sampling.record(slot, step.kv_len, step.tokens.len() as u32), step.tokens)
    });
    Ok((ring.fill(records, &sequences.pending()[..updates]), updates))
}

/// Remembers the error that left the device in an unknown state.
fn poisoned(poison: &mut Option<Error>, error: Error) -> Error {
    if matches!(error.kind(), ErrorKind::Device) {
        *poison = Some(error.clone());
    }
    error
}

fn unknown(ticket: Ticket) -> Error {
    Error::state(format!("step {} has no result: it was taken already", ticket.sequence())).help("wait for each ticket once")
}

/// What the device found wrong with a step, in words.
fn step_error(header: &ResultHeader) -> Result<()> {
    let [a, b, c] = header.error_detail;
    if let Some(error) = peer_error(header.error, header.error_detail) {
        return Err(error);
    }
    let error = match header.error {
        0 => return Ok(()),
        code if code == StepError::StaleSlot as u32 => {
            Error::invariant("ADDR-2", format!("the device waited for ring slot {a} and found {b}"))
                .help("pinned memory written before the launch was not visible to it: see docs/hip.md, hip#3902")
        }
        code if code == StepError::TooManyRows as u32 => {
            Error::invariant("KEY-1", format!("the slot holds {a} entries, the graph was captured for {b}"))
                .help("the chain's ingest op is shaped by other numbers than its key, or the slot was overwritten")
        }
        code if code == StepError::BlockRange as u32 => {
            Error::invariant("PAGE-1", format!("row {a}: block-table entry {b} is {c}, out of range"))
                .help("the ring slot was overwritten after the host filled it: find who writes to pinned memory")
        }
        code => Error::device(format!("the device reports error {code} ({a}, {b}, {c})"))
            .help("this version knows no such error: device code and host were built apart"),
    };
    Err(error)
}

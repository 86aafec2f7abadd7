//! The executor's checks beyond those of every step: the full audit, and decode steps that run under it.

use super::{Executor, fill, poisoned};
use crate::arena::{BufferId, Purpose};
use crate::capture::{CapturedGraph, launch_one};
use crate::error::Result;
use crate::hal::Platform;
use crate::invariant::ranges::NodeRange;
use crate::invariant::written;
use crate::invariant::{Finding, Report, audit, memory, self_test};
use crate::runtime::{SequenceStep, Ticket};

/// Byte that poisons cache blocks: NaN in every cache type.
const PAGE_POISON: u8 = 0xff;
/// Bytes of a cache read back at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Which checks run beyond the always-on ones (fingerprint and batch, every step).
///
/// An audited decode step waits for the device, runs [`Executor::audit`], poisons the outputs of the graph, replays, and looks
/// at every output element and every guard band. With the feature `strict` every step is audited by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    /// Runs [`self_test`] before the first capture, so that a device that replays wrong captures nothing. `None`: on HIP and CUDA,
    /// whose public reports it is made of (a fraction of a second), and not on the CPU.
    pub self_test: Option<bool>,
    /// Audits every n-th replayed decode step; `None` leaves it to [`Executor::audit`].
    pub audit_every: Option<u32>,
    /// In audited steps, fills cache blocks that no open sequence holds with NaN before the replay, so that a kernel that reads
    /// one shows, and looks afterwards whether one was written (PAD-2). Leave it off if you keep a prefix cache in blocks that no open sequence holds.
    pub poison_free_blocks: bool,
    /// Audited steps run the graph's launches one by one and look after each, so that a finding names the node; the graph
    /// itself is not replayed then.
    pub each_node: bool,
    /// Repeats every n-th replayed decode step eagerly from the same state, and compares all that both wrote; a difference is
    /// traced to its node ([`Executor::node_difference`]). `None`: never; and never on a device that runs nothing.
    pub shadow_every: Option<u32>,
}

impl Default for Checks {
    fn default() -> Checks {
        let audit_every = if cfg!(feature = "strict") { Some(1) } else { None };
        Checks { self_test: None, audit_every, poison_free_blocks: false, each_node: false, shadow_every: None }
    }
}

impl Executor {
    /// Sets which checks run beyond the always-on ones.
    pub fn set_checks(&mut self, checks: Checks) {
        self.checks = checks;
    }

    /// Which checks run beyond the always-on ones.
    pub fn checks(&self) -> Checks {
        self.checks
    }

    /// The full audit, now: waits for steps in flight, then checks every captured graph against its chain and the ledger, the
    /// ledger against the plan, guard bands, and block tables.
    ///
    /// Errors: an invariant is broken (the first of them gives the kind, the message lists all), or the device fails.
    pub fn audit(&self) -> Result<()> {
        self.audit_report()?.into_result()
    }

    /// The full audit as a report. Errors: the device fails before anything can be looked at.
    pub fn audit_report(&self) -> Result<Report> {
        self.stream.synchronize()?;
        let mut report = Report::new(format!("audit of {}", self.chains.name()));
        self.graphs.iter().for_each(|graph| report.absorb(audit(graph)));
        self.memory(&mut report);
        Ok(report)
    }

    /// The part of the audit that no graph is needed for.
    pub(super) fn check_memory(&self) -> Result<()> {
        self.stream.synchronize()?;
        let mut report = Report::new(format!("memory of {}", self.chains.name()));
        self.memory(&mut report);
        report.into_result()
    }

    fn memory(&self, report: &mut Report) {
        memory::ledger(&self.arena, report);
        memory::guards(&self.arena, report);
        self.block_tables(report);
    }

    /// The self-test, if it is asked for and was not passed yet.
    pub(super) fn check_device(&mut self) -> Result<()> {
        let device = self.arena.device();
        let wanted = self.checks.self_test.unwrap_or(matches!(device.info().platform, Platform::Hip | Platform::Cuda));
        if wanted && !self.device_passed {
            self_test(device)?.require()?;
            self.device_passed = true;
        }
        Ok(())
    }

    /// True if the next replay is one to audit.
    #[inline]
    pub(super) fn audit_is_due(&self) -> bool {
        self.checks.audit_every.is_some_and(|every| self.metrics.decode_steps.is_multiple_of(u64::from(every.max(1))))
    }

    /// A decode step by replay under the full audit; the batch was checked.
    #[cold]
    pub(super) fn decode_audited(&mut self, batch: &[SequenceStep<'_>], rows: u32, kv_len_max: u32) -> Result<Ticket> {
        self.audit()?;
        let sequences = batch.len() as u32;
        let graph = self.graphs.pick(rows / sequences, sequences, kv_len_max).expect("invariant: the caller picked it");
        let executes = self.arena.device().info().executes;
        let mut report = Report::new(format!("audited step of graph {}", graph.key()));
        if executes && self.checks.poison_free_blocks {
            self.free_blocks(|buffer, offset, bytes| self.arena.fill(buffer, offset, bytes, PAGE_POISON))?;
        }
        let outputs = if executes && !self.checks.each_node { written::outputs_of_replay(graph) } else { Vec::new() };
        written::poison(&self.arena, &outputs)?;
        let (ticket, updates) = fill(&mut self.ring, &self.sequences, batch)?;
        self.ring.poison_result(ticket, rows);
        let ran = match self.checks.each_node {
            true => self.run_each(graph, executes, &mut report),
            false => graph.replay(&*self.stream),
        };
        if let Err(error) = ran.and_then(|()| self.stream.synchronize()) {
            return Err(poisoned(&mut self.poison, error));
        }
        written::unwritten(graph, &outputs, &mut report);
        if let Some(row) = self.ring.unpublished(ticket, rows).filter(|_| executes) {
            let help = "the last op of the chain must publish one token a row of the capture size";
            let found = format!("none for row {row}");
            report.push(Finding::new("PAD-1", format!("{rows} published tokens"), found, help).buffer("step.results"));
        }
        memory::guards(&self.arena, &mut report);
        if executes && self.checks.poison_free_blocks {
            self.free_blocks(|buffer, offset, bytes| self.still_poisoned(buffer, offset, bytes, &mut report))?;
        }
        let capture_rows = graph.key().rows();
        self.commit(ticket, batch, updates, rows);
        self.metrics.replayed(capture_rows, rows);
        if !report.is_clean() {
            // The step ran, but nobody may use its result.
            self.ring.abandon(ticket);
        }
        report.into_result().map(|()| ticket)
    }

    /// Runs a graph's launches one by one; after each, its outputs and the guard bands are looked at.
    fn run_each(&self, graph: &CapturedGraph, executes: bool, report: &mut Report) -> Result<()> {
        let outputs = if executes { written::outputs(graph) } else { Vec::new() };
        let mut rest: &[NodeRange] = &outputs;
        for (at, (op, launch)) in graph.chain().ops.iter().zip(graph.launches()).enumerate() {
            let (own, behind) = rest.split_at(rest.partition_point(|output| output.op == at));
            rest = behind;
            written::poison(&self.arena, own)?;
            launch_one(&*self.stream, op, launch)?;
            self.stream.synchronize()?;
            written::unwritten(graph, own, report);
            let before = report.findings.len();
            memory::guards(&self.arena, report);
            if let Some(finding) = report.findings.get_mut(before) {
                // The band stays damaged: later nodes would be blamed for it, too.
                (finding.node, finding.op) = (Some(at as u32), op.label.clone());
                return Ok(());
            }
        }
        Ok(())
    }

    /// Calls `each` with every range of a cache that no open sequence holds.
    fn free_blocks(&self, mut each: impl FnMut(BufferId, u64, u64) -> Result<()>) -> Result<()> {
        let blocks = u64::from(self.chains.step_layout().cache_blocks);
        for (at, buffer) in self.arena.plan().buffers.iter().enumerate() {
            if !matches!(buffer.spec.purpose, Purpose::KvCache | Purpose::IndexCache) || !buffer.bytes.is_multiple_of(blocks) {
                continue;
            }
            let block_bytes = buffer.bytes / blocks;
            for (first, count) in self.sequences.free_blocks() {
                each(BufferId(at as u32), u64::from(first) * block_bytes, u64::from(count) * block_bytes)?;
            }
        }
        Ok(())
    }

    /// PAD-2: nothing wrote to a cache block that no sequence of any batch holds.
    fn still_poisoned(&self, buffer: BufferId, offset: u64, bytes: u64, report: &mut Report) -> Result<()> {
        let mut found = vec![0; bytes.min(PIECE_BYTES) as usize];
        for from in (offset..offset + bytes).step_by(PIECE_BYTES as usize) {
            let piece = &mut found[..(offset + bytes - from).min(PIECE_BYTES) as usize];
            self.arena.read(buffer, from, piece)?;
            if let Some(at) = piece.iter().position(|&byte| byte != PAGE_POISON) {
                let planned = self.arena.plan().buffer(buffer);
                let block = (from + at as u64) / (planned.bytes / u64::from(self.chains.step_layout().cache_blocks));
                let help = "a row without a sequence (row_len 0) must insert nothing into the caches";
                let expected = format!("block {block}, which no sequence holds, left alone");
                report.push(Finding::new("PAD-2", expected, "it was written", help).buffer(&*planned.spec.name));
                return Ok(());
            }
        }
        Ok(())
    }

    /// PAGE-1: one owner a block, and the device's table is the host's, but for changes not uploaded yet.
    fn block_tables(&self, report: &mut Report) {
        let help = "a kernel or a copy changed the block table behind the executor: audit more often to find the step";
        if let Err(error) = self.sequences.check_owners() {
            report.push(Finding::new("PAGE-1", "one owner a block", error.message(), help));
        }
        if !self.arena.device().info().executes {
            return;
        }
        let (table, width) = (self.chains.step().block_table, self.chains.step_layout().table_width);
        let mut row = Vec::new();
        for sequence in self.sequences.iter() {
            row.clear();
            row.resize(sequence.blocks().len(), 0u32);
            let offset = u64::from(sequence.slot) * u64::from(width) * 4;
            if let Err(error) = self.arena.read(table, offset, bytemuck::cast_slice_mut(&mut row)) {
                report.query_failed("PAGE-1", "reading the block table", &error);
                return;
            }
            for update in self.sequences.pending().iter().filter(|update| update.slot == sequence.slot) {
                row[update.index as usize] = update.block;
            }
            if let Some(at) = row.iter().zip(sequence.blocks()).position(|(device, host)| device != host) {
                let (expected, found) = (format!("block {}", sequence.blocks()[at]), format!("block {}", row[at]));
                let place = format!("step.block_table row {} entry {at}", sequence.slot);
                report.push(Finding::new("PAGE-1", expected, found, help).buffer(place));
            }
        }
    }
}

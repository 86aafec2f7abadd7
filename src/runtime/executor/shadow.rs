//! Shadow steps: a replay, and the same step again eagerly from the same state; both must leave the same bits (PAD-3).
//!
//! What the step writes is saved to the host first, so no second arena is needed. Of caches only the blocks of the batch's
//! sequences are looked at; what a step writes elsewhere is found by poisoned free blocks (PAD-2).

use super::{Executor, fill, poisoned};
use crate::arena::Purpose;
use crate::capture::{CapturedGraph, Launch, launch_all, launch_one, lower};
use crate::dump::tensors::Tensor;
use crate::error::{Error, Result};
use crate::invariant::compare::Difference;
use crate::invariant::ranges::{NodeRange, ranges};
use crate::invariant::{Finding, Report, memory, written};
use crate::kernels::Access;
use crate::runtime::{SequenceStep, Ticket};

/// A node that two runs disagree about, with what it read and what each run made of it.
#[derive(Clone, Debug)]
pub struct NodeDifference {
    /// The first differing element.
    pub difference: Difference,
    /// Named `input.FIELD`, `left.FIELD` and `right.FIELD`.
    pub tensors: Vec<Tensor>,
}

impl Executor {
    /// True if the next replay is one to repeat eagerly.
    #[inline]
    pub(super) fn shadow_is_due(&self) -> bool {
        self.checks.shadow_every.is_some_and(|every| {
            self.metrics.decode_steps.is_multiple_of(u64::from(every.max(1))) && self.arena.device().info().executes
        })
    }

    /// The node that the last shadow step found, until the next one.
    pub fn node_difference(&self) -> Option<&NodeDifference> {
        self.difference.as_ref()
    }

    /// What of `ranges` a step of this batch reads or writes: of caches the blocks of its sequences.
    pub fn live(&self, ranges: &[NodeRange], batch: &[SequenceStep<'_>]) -> Result<Vec<NodeRange>> {
        let cache_blocks = u64::from(self.chains.step_layout().cache_blocks);
        let mut blocks: Vec<u64> = Vec::new();
        for step in batch {
            blocks.extend(self.sequences.get(step.sequence)?.blocks().iter().map(|&block| u64::from(block)));
        }
        blocks.sort_unstable();
        let mut live = Vec::with_capacity(ranges.len());
        for range in ranges {
            let planned = self.arena.plan().buffer(range.buffer);
            let cache = matches!(planned.spec.purpose, Purpose::KvCache | Purpose::IndexCache);
            if !cache || !planned.bytes.is_multiple_of(cache_blocks) || range.bytes != planned.bytes {
                live.push(range.clone());
                continue;
            }
            let bytes = planned.bytes / cache_blocks;
            live.extend(blocks.iter().map(|block| NodeRange { offset: block * bytes, bytes, ..range.clone() }));
        }
        Ok(live)
    }

    /// Reads ranges back; the stream is idle.
    pub fn read_ranges(&self, ranges: &[NodeRange]) -> Result<Vec<Vec<u8>>> {
        let read = |range: &NodeRange| {
            let mut bytes = vec![0; range.bytes as usize];
            self.arena.read(range.buffer, range.offset, &mut bytes).map(|()| bytes)
        };
        ranges.iter().map(read).collect()
    }

    fn restore(&self, ranges: &[NodeRange], state: &[Vec<u8>]) -> Result<()> {
        ranges.iter().zip(state).try_for_each(|(range, bytes)| self.arena.write(range.buffer, range.offset, bytes))
    }

    /// A decode step by replay, and again eagerly; the batch was checked. If an audit is due as well, the replay is an audited
    /// one, without `each_node` and `poison_free_blocks`.
    #[cold]
    pub(super) fn decode_shadowed(&mut self, batch: &[SequenceStep<'_>], rows: u32, kv_len_max: u32) -> Result<Ticket> {
        if self.group.is_some() {
            return Err(Error::config("shadow_every: a rank cannot repeat a step that it exchanges with others")
                .help("leave shadow_every unset with context parallelism; verify --ranks compares ranks with one alone"));
        }
        let audited = self.audit_is_due();
        if audited {
            self.audit()?;
        }
        self.stream.synchronize()?;
        self.difference = None;
        let sequences = batch.len() as u32;
        let graph = self.graphs.pick(rows / sequences, sequences, kv_len_max).expect("invariant: the caller picked it");
        let (key, chain) = (*graph.key(), self.chains.decode(graph.key()));
        let launches = lower(&chain, &self.arena, &self.modules)?;
        let writes = self.live(&ranges(&chain, Access::writes), batch)?;
        // Each place once: layers share their buffers.
        let mut places = writes.clone();
        places.sort_by_key(|range| (range.buffer.0, range.offset, std::cmp::Reverse(range.bytes), range.op));
        places.dedup_by(|next, kept| {
            next.buffer == kept.buffer && next.offset + next.bytes <= kept.offset + kept.bytes && next.dtype == kept.dtype
        });
        let (ticket, updates) = fill(&mut self.ring, &self.sequences, batch)?;
        let before = self.read_ranges(&places)?;
        let mut report = Report::new(format!("shadow step of graph {key}"));
        let outputs = if audited { written::outputs_of_replay(graph) } else { Vec::new() };
        written::poison(&self.arena, &outputs)?;
        let ran = graph.replay(&*self.stream).and_then(|()| self.stream.synchronize());
        ran.map_err(|error| poisoned(&mut self.poison, error))?;
        written::unwritten(graph, &outputs, &mut report);
        memory::guards(&self.arena, &mut report);
        let replayed = self.read_ranges(&places)?;
        self.restore(&places, &before)?;
        let ran = launch_all(&*self.stream, &chain, &launches).and_then(|()| self.stream.synchronize());
        ran.map_err(|error| poisoned(&mut self.poison, error))?;
        let eager = self.read_ranges(&places)?;
        if replayed != eager {
            self.restore(&places, &before)?;
            let node = self.first_node(graph, &launches, &writes, batch)?;
            report.push(match &node {
                Some(node) => node.difference.finding("the replay", "the eager run"),
                None => self.no_node(&places, &replayed, &eager),
            });
            self.difference = node;
        }
        self.commit(ticket, batch, updates, rows);
        self.metrics.replayed(key.rows(), rows);
        self.metrics.shadowed += 1;
        if !report.is_clean() {
            // The step ran, but nobody may use its result.
            self.ring.abandon(ticket);
        }
        report.into_result().map(|()| ticket)
    }

    /// Runs each node twice from the same state: as the graph holds it, and as the chain is lowered now. The first that
    /// differs.
    fn first_node(
        &self,
        graph: &CapturedGraph,
        launches: &[Launch],
        writes: &[NodeRange],
        batch: &[SequenceStep<'_>],
    ) -> Result<Option<NodeDifference>> {
        let (chain, plan) = (graph.chain(), self.arena.plan());
        let reads = self.live(&ranges(chain, Access::reads), batch)?;
        for (at, (recorded, eager)) in graph.recorded()?.iter().zip(launches).enumerate() {
            let own: Vec<NodeRange> = writes.iter().filter(|range| range.op == at).cloned().collect();
            let read: Vec<NodeRange> = reads.iter().filter(|range| range.op == at).cloned().collect();
            let (inputs, before) = (self.read_ranges(&read)?, self.read_ranges(&own)?);
            let run = |launch: &Launch| {
                launch_one(&*self.stream, &chain.ops[at], launch)?;
                self.stream.synchronize()?;
                self.read_ranges(&own)
            };
            let left = run(recorded)?;
            self.restore(&own, &before)?;
            let right = run(eager)?;
            let differs = |((range, left), right): ((&NodeRange, &Vec<u8>), &Vec<u8>)| {
                Difference::between(chain, plan, range, left, right, 0.0)
            };
            if let Some(difference) = own.iter().zip(&left).zip(&right).find_map(differs) {
                let tensors = [("input", &read, &inputs), ("left", &own, &left), ("right", &own, &right)];
                let tensors = tensors.into_iter().flat_map(|(side, ranges, bytes)| Tensor::of_ranges(side, plan, ranges, bytes));
                return Ok(Some(NodeDifference { difference, tensors: tensors.collect() }));
            }
        }
        Ok(None)
    }

    /// The replay as a whole differed, and no node alone does.
    fn no_node(&self, places: &[NodeRange], replayed: &[Vec<u8>], eager: &[Vec<u8>]) -> Finding {
        let differs = |((range, _), _): &((&NodeRange, &Vec<u8>), &Vec<u8>)| range.op;
        let pairs = places.iter().zip(replayed).zip(eager).filter(|((_, replayed), eager)| replayed != eager);
        let ((range, _), _) = pairs.min_by_key(differs).expect("invariant: the caller found a difference");
        let help =
            "no node differs when it runs alone: an ordering or visibility fault of the replay, see capstan devices --self-test";
        let found = "other bits after the replay of the whole graph";
        Finding::new("PAD-3", "the bits of the eager run", found, help).buffer(&*self.arena.plan().buffer(range.buffer).spec.name)
    }
}

//! Two executors in lockstep, node by node: which node is the first to differ?

use crate::dump::tensors::{Tensor, save};
use std::path::Path;

use crate::engine::Steps;
use crate::error::{Error, Result};
use crate::invariant::compare::Difference;
use crate::invariant::ranges::{NodeRange, ranges};
use crate::kernels::Access;
use crate::runtime::{BlockId, Executor, NodeDifference, SequenceId, SequenceStep, Source, Walk};

/// Where two executors first differed.
#[derive(Clone, Debug)]
pub struct Found {
    /// Number of the step, from 1.
    pub step: u64,
    /// True in a prefill step.
    pub prefill: bool,
    /// Sequences in the step.
    pub sequences: usize,
    /// The node, its inputs (of the left executor) and both outputs.
    pub node: NodeDifference,
}

impl Found {
    /// What differs, a line each: step, node, kernel, field, buffer, the first differing element. `sides` say what the two
    /// executors are.
    pub fn told(&self, [left, right]: &[String; 2]) -> String {
        let difference = &self.node.difference;
        let kind = if self.prefill { "prefill" } else { "decode" };
        [
            format!("step {} ({kind}, sequences: {}), node {} {}", self.step, self.sequences, difference.node, difference.op),
            format!("kernel  {}", difference.kernel),
            format!("field   {}", difference.field),
            format!("buffer  {} ({})", difference.buffer, difference.dtype),
            format!("element {}: {} {left}, {} {right}", difference.element, difference.left, difference.right),
            format!("differ  {} of {} elements", difference.differing, difference.elements),
        ]
        .join("\n")
    }

    /// Writes the node's inputs and both outputs to a safetensors file, with what differs as its metadata.
    ///
    /// Errors: the file cannot be written.
    pub fn save(&self, file: &Path, [left, right]: &[String; 2]) -> Result<()> {
        let difference = &self.node.difference;
        let about = [
            ("node", difference.node.to_string()),
            ("op", difference.op.clone()),
            ("kernel", difference.kernel.clone()),
            ("field", difference.field.to_string()),
            ("buffer", difference.buffer.clone()),
            ("element", difference.element.to_string()),
            ("step", self.step.to_string()),
            ("left", left.clone()),
            ("right", right.clone()),
        ];
        save(file, &self.node.tensors, about.map(|(name, value)| (name.to_string(), value)).into())
    }
}

/// Two executors of the same chains that take every step together, op by op, and compare what each op wrote.
///
/// A decode step of the left one launches the nodes of its captured graph, one by one, with the arguments its driver has
/// recorded; the right one runs the same chain eagerly. Where the left one has no graph, and in prefill steps, both run eagerly.
/// Of caches the blocks of the step's sequences are compared.
#[derive(Debug)]
pub struct Pair {
    left: Executor,
    right: Executor,
    tolerance: f64,
    steps: u64,
    replayed: u64,
    nodes: u64,
    found: Option<Found>,
    tokens: Vec<i32>,
}

impl Pair {
    /// Two executors of the same chains, on one device or two, that have seen the same calls: captured as often, since every
    /// step leaves its number on the device. `tolerance` is [`Difference::between`]'s; above 0, the right
    /// executor goes on with the left one's outputs, so that small differences do not add up.
    pub fn new(left: Executor, right: Executor, tolerance: f64) -> Pair {
        Pair { left, right, tolerance, steps: 0, replayed: 0, nodes: 0, found: None, tokens: Vec::new() }
    }

    /// The first difference, if one was found; the step that found it was an error.
    pub fn found(&self) -> Option<&Found> {
        self.found.as_ref()
    }

    /// Steps taken, those of them from a captured graph, and nodes compared.
    pub fn counts(&self) -> (u64, u64, u64) {
        (self.steps, self.replayed, self.nodes)
    }

    /// Walks both to the end of the step. After a difference the rest runs without being compared.
    fn walk(&mut self, mut left: Walk, mut right: Walk, batch: &[SequenceStep<'_>], prefill: bool) -> Result<&[i32]> {
        self.steps += 1;
        let reads = self.left.live(&ranges(left.chain(), Access::reads), batch)?;
        let writes = self.left.live(&ranges(left.chain(), Access::writes), batch)?;
        let mut found = None;
        for at in 0..left.chain().ops.len() {
            let of_op = |ranges: &[NodeRange]| ranges.iter().filter(|range| range.op == at).cloned().collect::<Vec<_>>();
            let (read, written) = (of_op(&reads), of_op(&writes));
            let changed: Vec<NodeRange> = read.iter().filter(|range| range.access.writes()).cloned().collect();
            let before = self.left.read_ranges(&changed)?;
            self.left.walk_next(&mut left)?;
            self.right.walk_next(&mut right)?;
            self.nodes += 1;
            found = self.compare(&left, &written)?;
            if let Some(node) = &mut found {
                let plan = self.left.arena().plan();
                let kept: Vec<NodeRange> = read.into_iter().filter(|range| !range.access.writes()).collect();
                let mut inputs = Tensor::of_ranges("input", plan, &kept, &self.left.read_ranges(&kept)?);
                inputs.extend(Tensor::of_ranges("input", plan, &changed, &before));
                node.tensors.splice(0..0, inputs);
                break;
            }
        }
        let left = self.left.walk_end(left, batch);
        let right = self.right.walk_end(right, batch);
        if let Some(node) = found {
            let error = Error::invariant("PAD-3", node.difference.finding("the left run", "the right run").to_string())
                .help("`capstan bisect --out FILE` saves the node's inputs and both outputs");
            self.found = Some(Found { step: self.steps, prefill, sequences: batch.len(), node });
            return Err(error);
        }
        (self.tokens, _) = (left?, right?);
        Ok(&self.tokens)
    }

    /// Compares what an op wrote on both sides; of a difference that is tolerated, the right side takes the left one's bits.
    fn compare(&self, walk: &Walk, written: &[NodeRange]) -> Result<Option<NodeDifference>> {
        let (chain, plan) = (walk.chain(), self.left.arena().plan());
        let (left, right) = (self.left.read_ranges(written)?, self.right.read_ranges(written)?);
        for ((range, left), right) in written.iter().zip(&left).zip(&right).filter(|((_, left), right)| left != right) {
            let Some(difference) = Difference::between(chain, plan, range, left, right, self.tolerance) else {
                self.right.arena().write(range.buffer, range.offset, left)?;
                continue;
            };
            let all = |side, bytes| Tensor::of_ranges(side, plan, written, bytes);
            let (left, right) = (self.left.read_ranges(written)?, self.right.read_ranges(written)?);
            let tensors = all("left", &left).into_iter().chain(all("right", &right)).collect();
            return Ok(Some(NodeDifference { difference, tensors }));
        }
        Ok(None)
    }
}

impl Steps for Pair {
    fn open(&mut self) -> Result<SequenceId> {
        let id = self.left.open_sequence()?;
        assert_eq!(self.right.open_sequence()?, id, "invariant: both executors see the same calls");
        Ok(id)
    }

    fn grant(&mut self, sequence: SequenceId, blocks: &[BlockId]) -> Result<()> {
        self.left.grant_blocks(sequence, blocks)?;
        self.right.grant_blocks(sequence, blocks)
    }

    fn close(&mut self, sequence: SequenceId, freed: &mut dyn FnMut(BlockId)) -> Result<()> {
        self.right.close_sequence(sequence, |_| ())?;
        self.left.close_sequence(sequence, freed)
    }

    fn decode(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]> {
        let key = self.left.key_of(batch)?;
        let captured = self.left.graphs().iter().any(|graph| *graph.key() == key);
        let source = if captured { Source::Graph } else { Source::Chain };
        self.replayed += u64::from(captured);
        let left = self.left.walk_decode(batch, &key, source)?;
        let right = self.right.walk_decode(batch, &key, Source::Chain)?;
        self.walk(left, right, batch, false)
    }

    fn prefill(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]> {
        let left = self.left.walk_prefill(batch)?;
        let right = self.right.walk_prefill(batch)?;
        self.walk(left, right, batch, true)
    }
}

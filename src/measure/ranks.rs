//! Context parallelism against one rank alone: every rank also runs the unsharded chain, and compares bit for bit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::arena::{BufferId, Purpose};
use crate::chain::MsaChains;
use crate::config::{Limits, ModelShape};
use crate::error::{Error, Result};
use crate::hal::Device;
use crate::peers::Group;
use crate::random::Random;
use crate::runtime::{Executor, Sampling, SequenceStep};

/// What the ranks run; the same on all of them.
#[derive(Clone, Debug)]
pub struct RanksRun {
    /// The model.
    pub shape: ModelShape,
    /// Limits; rank and world come from the group.
    pub limits: Limits,
    /// Replayed decode steps.
    pub steps: u32,
    /// Every n-th step is compared with one rank alone.
    pub compare_every: u32,
    /// Seed of weights, caches and batches.
    pub seed: u64,
    /// Longest random delay of a rank before a step.
    pub skew: Duration,
}

/// What one rank found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RanksReport {
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub world: u32,
    /// Steps replayed.
    pub steps: u32,
    /// Rows compared with one rank alone.
    pub rows_compared: u64,
    /// Seconds of all steps, delays and comparisons included.
    pub seconds: f64,
}

/// A batch: KV length and tokens of each sequence.
struct Step {
    lens: Vec<u32>,
    tokens: Vec<Vec<i32>>,
}

/// An executor and the plan its results lie in.
struct Side {
    executor: Executor,
    chains: Arc<MsaChains>,
}

impl RanksRun {
    /// Runs as one rank of `group`.
    ///
    /// Errors: the ranks do not agree, one is missing, or a selection or an output differs from that of one rank alone: names the
    /// step, the row and both sides.
    pub fn run(&self, device: &Arc<dyn Device>, group: Arc<dyn Group>) -> Result<RanksReport> {
        let (rank, world) = (group.rank(), group.world());
        let limits = Limits { rank, world, ..self.limits.clone() };
        let chains = Arc::new(MsaChains::new(&self.shape, &limits, self.seed)?);
        let mut ours = Side { executor: Executor::join(device, chains.clone(), group.clone())?, chains };
        ours.executor.capture(|_| ())?;
        let alone = Limits { rank: 0, world: 1, ..limits.clone() };
        let chains = Arc::new(MsaChains::new(&self.shape, &alone, self.seed)?);
        let mut whole = Side { executor: Executor::new(device, chains.clone())?, chains };
        whole.executor.capture(|_| ())?;
        ours.fill_caches(&limits)?;
        whole.fill_caches(&limits)?;
        // One rank's comparisons would make it late for the others' devices.
        group.all_gather("filled", b"")?;
        let mut random = Random::new(self.seed);
        let mut delays = Random::new(self.seed ^ u64::from(rank + 1) << 32);
        let mut rows_compared = 0;
        tracing::info!(rank, world, "replaying");
        let start = Instant::now();
        for at in 0..self.steps {
            let step = self.step(&mut random, &limits, at);
            let most = self.skew.as_micros() as u32;
            if most > 0 {
                std::thread::sleep(Duration::from_micros(u64::from(delays.range(0, most))));
            }
            ours.decode(&step)?;
            // Both write what they cached into the same blocks: each step runs on both.
            whole.decode(&step)?;
            if at.is_multiple_of(self.compare_every.max(1)) {
                rows_compared += compare(&ours, &whole, &self.shape, rank, world, &step, at)?;
            }
        }
        group.all_gather("done", b"")?;
        Ok(RanksReport { rank, world, steps: self.steps, rows_compared, seconds: start.elapsed().as_secs_f64() })
    }

    /// Few sequences most of the time, all of them now and then: sizes shrink and regrow, rows sit idle.
    fn step(&self, random: &mut Random, limits: &Limits, at: u32) -> Step {
        let query_len = 1 + limits.num_speculative_tokens;
        let live = if at.is_multiple_of(7) { limits.max_num_seqs } else { random.range(1, limits.max_num_seqs.min(2)) };
        let lens: Vec<u32> = (0..live)
            .map(|_| match random.range(0, 3) {
                0 => random.range(query_len, 2 * query_len),
                1 => limits.max_model_len,
                _ => random.range(query_len, limits.max_model_len),
            })
            .collect();
        let tokens = lens.iter().map(|_| (0..query_len).map(|_| random.range(0, 31) as i32).collect()).collect();
        Step { lens, tokens }
    }
}

impl Side {
    /// Prefills every block the steps use; what the captures left there is gone.
    fn fill_caches(&mut self, limits: &Limits) -> Result<()> {
        let executor = &mut self.executor;
        let mut random = Random::new(5);
        for at in 0..executor.arena().plan().buffers.len() as u32 {
            let buffer = executor.arena().plan().buffer(BufferId(at));
            if matches!(buffer.spec.purpose, Purpose::KvCache | Purpose::IndexCache) {
                executor.arena().fill(BufferId(at), 0, buffer.bytes, 0)?;
            }
        }
        let blocks = limits.max_model_len.div_ceil(self.chains.msa_plan().layout.block_size);
        for first in (0..limits.max_num_seqs).map(|at| at * blocks) {
            let sequence = executor.open_sequence()?;
            executor.grant_blocks(sequence, &(first..first + blocks).collect::<Vec<_>>())?;
            let tokens: Vec<i32> = (0..limits.max_model_len).map(|_| random.range(0, 31) as i32).collect();
            let mut kv_len = 0;
            for tokens in tokens.chunks(limits.max_num_batched_tokens as usize) {
                kv_len += tokens.len() as u32;
                let ticket = executor.prefill(&[SequenceStep { sequence, tokens, kv_len, sampling: Sampling::GREEDY }])?;
                executor.wait(ticket)?;
            }
            executor.close_sequence(sequence, |_| ())?;
        }
        Ok(())
    }

    /// A step over sequences whose cache is what earlier steps left in their blocks.
    fn decode(&mut self, step: &Step) -> Result<()> {
        let blocks_a_sequence = self.chains.msa_plan().layout.table_width;
        let block_size = self.chains.msa_plan().layout.block_size;
        let mut batch = Vec::with_capacity(step.lens.len());
        for (first, (tokens, &kv_len)) in (0..).step_by(blocks_a_sequence as usize).zip(step.tokens.iter().zip(&step.lens)) {
            let sequence = self.executor.open_sequence()?;
            self.executor.grant_blocks(sequence, &(first..first + kv_len.div_ceil(block_size)).collect::<Vec<u32>>())?;
            self.executor.assume_cached(sequence, kv_len - tokens.len() as u32)?;
            batch.push(SequenceStep { sequence, tokens, kv_len, sampling: Sampling::GREEDY });
        }
        let ticket = self.executor.decode(&batch)?;
        self.executor.wait(ticket)?;
        batch.iter().try_for_each(|step| self.executor.close_sequence(step.sequence, |_| ()))
    }

    fn read<T: bytemuck::Pod>(&self, buffer: BufferId, first: u64, count: usize) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); count];
        self.executor.arena().read(buffer, first * size_of::<T>() as u64, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// [rows, topk] of one of this side's heads.
    fn selected(&self, head: u32, rows: u32) -> Result<Vec<i32>> {
        let plan = self.chains.msa_plan();
        let topk = plan.dims.topk;
        let first = u64::from(head) * u64::from(plan.layout.row_capacity) * u64::from(topk);
        self.read(plan.attention.topk_idx, first, (rows * topk) as usize)
    }
}

/// The last layer's selections and outputs of this rank's heads; gives the rows compared.
fn compare(ours: &Side, whole: &Side, shape: &ModelShape, rank: u32, world: u32, step: &Step, at: u32) -> Result<u64> {
    let differs = |what: &str, row: usize| {
        let message = format!("step {at}, rank {rank} of {world}, row {row}: {what} of one rank alone are others");
        Error::invariant("PAD-3", message).help("the ranks exchanged wrong candidates: audit, and keep the seed")
    };
    let rows = step.tokens.iter().map(Vec::len).sum::<usize>();
    let (dims, topk) = (ours.chains.msa_plan().dims, shape.topk_blocks as usize);
    for head in 0..dims.index_heads {
        let (a, b) = (ours.selected(head, rows as u32)?, whole.selected(dims.first_head + head, rows as u32)?);
        if let Some(row) = (0..rows).find(|row| a[row * topk..][..topk] != b[row * topk..][..topk]) {
            return Err(differs("the selected blocks", row));
        }
    }
    let own = (dims.q_heads * dims.head_dim) as usize;
    let width = (shape.q_heads * shape.head_dim) as usize;
    let a: Vec<u32> = ours.read(ours.chains.msa_plan().attention.out, 0, rows * own)?;
    let b: Vec<u32> = whole.read(whole.chains.msa_plan().attention.out, 0, rows * width)?;
    let same = |row: &usize| a[row * own..][..own] == b[row * width + rank as usize * own..][..own];
    match (0..rows).find(|row| !same(row)) {
        None => Ok(rows as u64),
        Some(row) => Err(differs("the outputs", row)),
    }
}

//! Ranks of a group as threads, each with an executor of its own, and what they leave behind.

use std::sync::Arc;
use std::time::Duration;

use capstan::arena::{BufferId, Purpose};
use capstan::chain::MsaChains;
use capstan::config::{Limits, ModelShape};
use capstan::error::Result;
use capstan::hal::Device;
use capstan::hal::cpu::CpuDevice;
use capstan::peers::ThreadGroup;
use capstan::random::Random;
use capstan::runtime::{Checks, Executor, Sampling, SequenceStep};

/// A decode step: KV length and tokens of each sequence.
#[derive(Clone, Debug)]
pub struct Step {
    pub lens: Vec<u32>,
    pub tokens: Vec<Vec<i32>>,
}

/// What a step left on one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Left {
    /// [index_heads, rows, topk] of the last layer.
    pub topk: Vec<i32>,
    /// [rows, q_heads, head_dim] of the last layer, as bits.
    pub out: Vec<u32>,
    pub rows: usize,
}

/// The nano shape with four index heads, each for one KV head.
pub fn shape() -> ModelShape {
    ModelShape { q_heads: 8, kv_heads: 4, index_heads: 4, ..ModelShape::nano() }
}

/// Captures on `world` ranks and replays the steps; gives what each left, by rank.
pub fn run_ranks(shape: &ModelShape, limits: &Limits, world: u32, steps: &[Step], seed: u64) -> Vec<Vec<Left>> {
    run_checked(shape, limits, world, steps, seed, Checks::default())
}

/// The same with its replays under `checks`.
pub fn run_checked(shape: &ModelShape, limits: &Limits, world: u32, steps: &[Step], seed: u64, checks: Checks) -> Vec<Vec<Left>> {
    let groups = ThreadGroup::all(world, Duration::from_secs(60));
    std::thread::scope(|scope| {
        let ranks = groups.into_iter().zip(0..).map(|(group, rank)| {
            let limits = Limits { rank, world, peer_timeout_ms: 30_000, ..limits.clone() };
            scope.spawn(move || {
                let chains = Arc::new(MsaChains::new(shape, &limits, seed).unwrap());
                let device: Arc<dyn Device> = CpuDevice::new(1).unwrap();
                let mut executor = match world {
                    1 => Executor::new(&device, chains.clone()).unwrap(),
                    _ => Executor::join(&device, chains.clone(), group).unwrap(),
                };
                executor.capture(|_| ()).unwrap();
                fill_caches(&mut executor, &limits);
                executor.set_checks(checks);
                steps.iter().map(|step| run(&mut executor, &chains, step)).collect()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Prefills every block the steps use; whatever the captures left there is gone.
fn fill_caches(executor: &mut Executor, limits: &Limits) {
    let mut random = Random::new(5);
    let layout = *executor.chains().step_layout();
    for at in 0..executor.arena().plan().buffers.len() as u32 {
        let buffer = executor.arena().plan().buffer(BufferId(at));
        if matches!(buffer.spec.purpose, Purpose::KvCache | Purpose::IndexCache) {
            executor.arena().fill(BufferId(at), 0, buffer.bytes, 0).unwrap();
        }
    }
    let blocks = limits.max_model_len.div_ceil(layout.block_size);
    for first in (0..limits.max_num_seqs).map(|at| at * blocks) {
        let sequence = executor.open_sequence().unwrap();
        executor.grant_blocks(sequence, &(first..first + blocks).collect::<Vec<_>>()).unwrap();
        let tokens: Vec<i32> = (0..limits.max_model_len).map(|_| random.range(0, 31) as i32).collect();
        let mut kv_len = 0;
        for tokens in tokens.chunks(limits.max_num_batched_tokens as usize) {
            kv_len += tokens.len() as u32;
            let step = SequenceStep { sequence, tokens, kv_len, sampling: Sampling::GREEDY };
            let ticket = executor.prefill(&[step]).unwrap();
            executor.wait(ticket).unwrap();
        }
        executor.close_sequence(sequence, |_| ()).unwrap();
    }
}

/// One step over sequences whose cache is what earlier steps left in their blocks; gives the executor's error.
pub fn decode(executor: &mut Executor, step: &Step) -> Result<()> {
    let block_size = executor.chains().step_layout().block_size;
    let mut ids = Vec::new();
    let mut block = 0;
    for (tokens, &len) in step.tokens.iter().zip(&step.lens) {
        let id = executor.open_sequence()?;
        let blocks: Vec<u32> = (0..len.div_ceil(block_size)).map(|at| block + at).collect();
        block += blocks.len() as u32;
        executor.grant_blocks(id, &blocks)?;
        executor.assume_cached(id, len - tokens.len() as u32)?;
        ids.push(id);
    }
    let batch = ids.iter().zip(&step.tokens).zip(&step.lens).map(|((&sequence, tokens), &kv_len)| SequenceStep {
        sequence,
        tokens,
        kv_len,
        sampling: Sampling::GREEDY,
    });
    let batch: Vec<SequenceStep<'_>> = batch.collect();
    let done = executor.decode(&batch).and_then(|ticket| executor.wait(ticket).map(drop));
    ids.into_iter().for_each(|id| executor.close_sequence(id, |_| ()).unwrap());
    done
}

/// A step, and what it left.
fn run(executor: &mut Executor, chains: &MsaChains, step: &Step) -> Left {
    decode(executor, step).unwrap();
    assert_eq!(executor.metrics().fallbacks, [0; 3], "every step is a replay");
    let plan = chains.msa_plan();
    let rows = step.tokens.iter().map(Vec::len).sum();
    Left {
        topk: planes(executor, plan.attention.topk_idx, plan.dims.index_heads, plan.layout.row_capacity, plan.dims.topk, rows),
        out: read(executor, plan.attention.out, 0, rows * (plan.dims.q_heads * plan.dims.head_dim) as usize),
        rows,
    }
}

fn planes(executor: &Executor, buffer: BufferId, heads: u32, plane_rows: u32, width: u32, rows: usize) -> Vec<i32> {
    let mut all = Vec::new();
    for head in 0..heads {
        let plane: Vec<i32> = read(executor, buffer, u64::from(head * plane_rows * width) * 4, rows * width as usize);
        all.extend(plane);
    }
    all
}

fn read<T: bytemuck::Pod>(executor: &Executor, buffer: BufferId, offset: u64, count: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); count];
    executor.arena().read(buffer, offset, bytemuck::cast_slice_mut(&mut values)).unwrap();
    values
}

/// Every rank's selection and output are those of one rank alone, for the heads it owns.
pub fn compare(shape: &ModelShape, alone: &[Left], ranks: &[Vec<Left>]) {
    let world = ranks.len();
    for (rank, steps) in ranks.iter().enumerate() {
        assert_eq!(steps.len(), alone.len());
        for (at, (left, whole)) in steps.iter().zip(alone).enumerate() {
            let rows = whole.rows;
            let plane = rows * shape.topk_blocks as usize;
            let owned = shape.index_heads as usize / world;
            let expected = &whole.topk[rank * owned * plane..(rank + 1) * owned * plane];
            assert_eq!(left.topk, expected, "rank {rank} of {world}, step {at}");
            let width = (shape.q_heads * shape.head_dim) as usize;
            let own = width / world;
            for row in 0..rows {
                let expected = &whole.out[row * width + rank * own..][..own];
                assert_eq!(&left.out[row * own..][..own], expected, "rank {rank} of {world}, step {at}, row {row}");
            }
        }
    }
}

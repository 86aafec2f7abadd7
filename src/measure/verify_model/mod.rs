//! A checkpoint against what was recorded of it: logits, greedy tokens and selected blocks of every prompt.
//!
//! Every prompt is prefilled in chunks and decoded by replay; a second executor runs the same steps eagerly, op by op, and reads
//! what each sparse layer selected. Both must sample the same tokens from the same logits, bit for bit.

mod caches;
mod reference;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

pub use self::caches::{CacheDeviation, LayerDeviation, cache_deviation};
use self::reference::{Blocks, Prompt, Reference};
use crate::chain::StepChains;
use crate::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::hal::Device;
use crate::model::{Checkpoint, M3Chains};
use crate::runtime::{Executor, Sampling, SequenceId, SequenceStep};

/// Largest deviation of a logit, as a share of the largest recorded one.
pub const LOGIT_BOUND: f64 = 2e-4;

/// One recorded tensor, compared.
#[derive(Clone, Debug, Serialize)]
pub struct Deviation {
    /// Its name in `reference.safetensors`.
    pub tensor: String,
    /// Rows compared: steps, or (step, head) pairs.
    pub rows: usize,
    /// Logits: largest deviation over the largest logit. Tokens and blocks: share of rows that differ.
    pub largest: f64,
    /// Largest that is allowed.
    pub bound: f64,
    /// The first row past the bound.
    pub first: Option<String>,
}

/// A checkpoint and how it went.
#[derive(Clone, Debug, Serialize)]
pub struct ModelVerified {
    /// The directory.
    pub dir: String,
    /// Every tensor of the reference but the prompts.
    pub deviations: Vec<Deviation>,
    /// Decode steps that replayed, all equal to the eager run bit for bit.
    pub replayed: u64,
}

impl ModelVerified {
    /// The first tensor past its bound.
    pub fn first_difference(&self) -> Option<String> {
        let first = self.deviations.iter().find_map(|found| Some((found, found.first.as_ref()?)));
        first.map(|(found, first)| format!("{}: {first}", found.tensor))
    }
}

/// Compares everything in `dir/reference.safetensors`, with caches of the given types (f32 to hold the bounds).
///
/// Errors: a checkpoint or reference that cannot be read (names file and tensor); replay and eager run differ (PAD-3).
pub fn verify_model(
    device: &Arc<dyn Device>,
    dir: &Path,
    (kv_dtype, index_dtype): (DType, DType),
    mut progress: impl FnMut(usize, usize),
) -> Result<ModelVerified> {
    let (checkpoint, reference) = read(device, dir)?;
    let limits = limits(&reference, checkpoint.shape(), (kv_dtype, index_dtype))?;
    let chains = Arc::new(M3Chains::new(checkpoint, &limits)?);
    let family: Arc<dyn StepChains> = chains.clone();
    let mut replayed = Executor::new(device, family.clone())?;
    replayed.capture(|_| ())?;
    let mut run = Run { eager: Executor::new(device, family)?, replayed, chains };
    let mut deviations = Vec::new();
    for (at, prompt) in reference.prompts.iter().enumerate() {
        progress(at, reference.prompts.len());
        run.prompt(prompt, &mut deviations)?;
    }
    let replays = run.replayed.metrics().replays.iter().map(|size| size.replays).sum();
    Ok(ModelVerified { dir: dir.display().to_string(), deviations, replayed: replays })
}

/// The checkpoint and what was recorded of it, on a device that can run it.
fn read(device: &Arc<dyn Device>, dir: &Path) -> Result<(Arc<Checkpoint>, Reference)> {
    if !device.info().executes {
        return Err(
            Error::unavailable("this device records and runs nothing: there is nothing to compare").help("use --device cpu")
        );
    }
    let checkpoint = Arc::new(Checkpoint::open(dir)?);
    let reference = Reference::read(dir, checkpoint.shape())?;
    Ok((checkpoint, reference))
}

/// Limits for one recorded prompt at a time.
fn limits(reference: &Reference, shape: &ModelShape, (kv_dtype, index_dtype): (DType, DType)) -> Result<Limits> {
    let longest = reference.prompts.iter().map(|prompt| prompt.input.len() + prompt.greedy.len()).max().unwrap_or(1) as u32;
    let limits = Limits {
        max_model_len: longest,
        max_num_seqs: 1,
        // Several chunks a prompt, none at a block's edge.
        max_num_batched_tokens: 509,
        capture: CaptureSizes::List(vec![1]),
        cache: CacheBudget::Blocks(longest.div_ceil(shape.block_size)),
        kv_dtype,
        index_dtype,
        ..Limits::default()
    };
    limits.validate_for(shape)?;
    Ok(limits)
}

/// Two executors of one model, and what is read from them.
struct Run {
    replayed: Executor,
    eager: Executor,
    chains: Arc<M3Chains>,
}

/// What a step gave: its token and logits, and by layer and head the blocks of its last row.
struct Step {
    token: i32,
    logits: Vec<f32>,
    blocks: BTreeMap<u32, Vec<BTreeSet<i32>>>,
}

impl Run {
    fn prompt(&mut self, prompt: &Prompt, deviations: &mut Vec<Deviation>) -> Result<()> {
        let longest = (prompt.input.len() + prompt.greedy.len()) as u32;
        let blocks: Vec<u32> = (0..longest.div_ceil(self.chains.step_layout().block_size)).collect();
        let id = self.replayed.open_sequence()?;
        let shadow = self.eager.open_sequence()?;
        self.replayed.grant_blocks(id, &blocks)?;
        self.eager.grant_blocks(shadow, &blocks)?;
        let mut steps = vec![self.prefill((id, shadow), &prompt.input)?];
        // The recorded tokens are fed, so that a token that differs does not end the comparison.
        for (at, token) in prompt.greedy.iter().enumerate().take(prompt.steps() - 1) {
            steps.push(self.decode((id, shadow), *token, (prompt.input.len() + at + 1) as u32)?);
        }
        self.replayed.close_sequence(id, |_| ())?;
        self.eager.close_sequence(shadow, |_| ())?;
        prompt.compare(&steps, deviations);
        Ok(())
    }

    fn prefill(&mut self, (id, shadow): (SequenceId, SequenceId), input: &[i32]) -> Result<Step> {
        let chunk = self.chains.limits().max_num_batched_tokens as usize;
        let mut last = None;
        for (at, tokens) in input.chunks(chunk).enumerate() {
            let kv_len = (at * chunk + tokens.len()) as u32;
            let step = |sequence| SequenceStep { sequence, tokens, kv_len, sampling: Sampling::GREEDY };
            let ticket = self.replayed.prefill(&[step(id)])?;
            let token = self.replayed.wait(ticket)?.tokens[0];
            let mut blocks = BTreeMap::new();
            let row = tokens.len() - 1;
            let found = self.eager.prefill_observed(&[step(shadow)], |executor, op| {
                note_blocks(&self.chains, executor, op.layer, &op.label, row, &mut blocks)
            })?;
            last = Some(self.step(token, found[0], blocks)?);
        }
        last.ok_or_else(|| Error::input("a recorded prompt is empty").help("record prompts of at least one token"))
    }

    fn decode(&mut self, (id, shadow): (SequenceId, SequenceId), token: i32, kv_len: u32) -> Result<Step> {
        let tokens = [token];
        let step = |sequence| SequenceStep { sequence, tokens: &tokens, kv_len, sampling: Sampling::GREEDY };
        let ticket = self.replayed.decode(&[step(id)])?;
        let token = self.replayed.wait(ticket)?.tokens[0];
        let mut blocks = BTreeMap::new();
        let found = self.eager.decode_observed(&[step(shadow)], |executor, op| {
            note_blocks(&self.chains, executor, op.layer, &op.label, 0, &mut blocks)
        })?;
        self.step(token, found[0], blocks)
    }

    /// Both runs' logits, which must be the same bits.
    fn step(&self, token: i32, eager_token: i32, blocks: BTreeMap<u32, Vec<BTreeSet<i32>>>) -> Result<Step> {
        let [logits, eager] = [&self.replayed, &self.eager].map(|executor| {
            let mut logits = vec![0f32; self.chains.vocab() as usize];
            let buffer = self.chains.m3_plan().activations.logits;
            executor.arena().read(buffer, 0, bytemuck::cast_slice_mut(&mut logits)).map(|()| logits)
        });
        let (logits, eager) = (logits?, eager?);
        let differs = logits.iter().zip(&eager).position(|(a, b)| a.to_bits() != b.to_bits());
        if token != eager_token || differs.is_some() {
            return Err(Error::invariant(
                "PAD-3",
                format!("replay sampled token {token}, the eager run {eager_token}; first logit that differs: {differs:?}"),
            )
            .help("run `capstan run` to see whether the sparse-attention chain alone differs, too"));
        }
        Ok(Step { token, logits, blocks })
    }
}

/// After a layer's selection, reads the blocks of `row`.
fn note_blocks(
    chains: &M3Chains,
    executor: &Executor,
    layer: Option<u32>,
    label: &str,
    row: usize,
    blocks: &mut BTreeMap<u32, Vec<BTreeSet<i32>>>,
) -> Result<()> {
    let (Some(layer), true) = (layer, label.ends_with(".topk_emit")) else { return Ok(()) };
    let plan = chains.m3_plan();
    let (topk, rows) = (plan.dims.topk as usize, plan.layout.row_capacity as usize);
    let mut heads = Vec::new();
    for head in 0..plan.dims.index_heads as usize {
        let mut ids = vec![0i32; topk];
        let first = (head * rows + row) * topk * size_of::<i32>();
        executor.arena().read(plan.attention.topk_idx, first as u64, bytemuck::cast_slice_mut(&mut ids))?;
        heads.push(ids.into_iter().filter(|&id| id >= 0).collect());
    }
    blocks.insert(layer, heads);
    Ok(())
}

impl Prompt {
    fn compare(&self, steps: &[Step], into: &mut Vec<Deviation>) {
        let vocab = self.logits.len() / self.greedy.len();
        let largest = self.logits.iter().fold(0f32, |most, logit| most.max(logit.abs()));
        let (mut worst, mut first) = (0f64, None);
        for (at, (step, expected)) in steps.iter().zip(self.logits.chunks(vocab)).enumerate() {
            for (token, (&found, &expected)) in step.logits.iter().zip(expected).enumerate() {
                let deviation = f64::from((found - expected).abs()) / f64::from(largest);
                worst = if deviation.is_nan() { f64::INFINITY } else { worst.max(deviation) };
                if (deviation.is_nan() || deviation > LOGIT_BOUND) && first.is_none() {
                    first = Some(format!("step {at}, token {token}: expected {expected}, found {found}"));
                }
            }
        }
        let rows = self.greedy.len();
        into.push(Deviation { tensor: format!("{}.logits", self.name), rows, largest: worst, bound: LOGIT_BOUND, first });
        let wrong = (0..rows).filter(|&at| steps[at].token != self.greedy[at]);
        into.push(Deviation {
            tensor: format!("{}.greedy_ids", self.name),
            rows,
            largest: wrong.clone().count() as f64 / rows as f64,
            bound: 0.0,
            first: wrong.map(|at| format!("step {at}: expected {}, found {}", self.greedy[at], steps[at].token)).next(),
        });
        for (kind, first, recorded) in
            [("prefill_last_blocks", 0, &self.prefill_blocks), ("decode_blocks", 1, &self.decode_blocks)]
        {
            for (&layer, blocks) in recorded {
                into.push(self.compare_blocks(kind, layer, blocks, &steps[first..]));
            }
        }
    }

    fn compare_blocks(&self, kind: &str, layer: u32, recorded: &Blocks, steps: &[Step]) -> Deviation {
        let (mut rows, mut wrong, mut first) = (0, 0, None);
        for (at, step) in steps.iter().enumerate().take(recorded.rows()) {
            for head in 0..recorded.heads {
                let expected = recorded.row(at, head);
                let found = step.blocks.get(&layer).and_then(|heads| heads.get(head)).cloned().unwrap_or_default();
                rows += 1;
                if found != expected {
                    wrong += 1;
                    first.get_or_insert_with(|| format!("row {at}, head {head}: expected {expected:?}, found {found:?}"));
                }
            }
        }
        let largest = f64::from(wrong) / f64::from(rows.max(1));
        Deviation { tensor: format!("{}.{kind}.layer{layer}", self.name), rows: rows as usize, largest, bound: 0.0, first }
    }
}

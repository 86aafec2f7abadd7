//! What narrow caches cost: the same steps over f32 caches and over bf16 or fp8 ones, compared layer by layer.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use super::{limits, note_blocks, read};
use crate::chain::StepChains;
use crate::dtype::DType;
use crate::error::Result;
use crate::hal::Device;
use crate::model::M3Chains;
use crate::runtime::{BlockId, Executor, Sampling, SequenceId, SequenceStep};

/// How a layer over narrow caches differs from the same layer over f32 caches, over all rows compared.
#[derive(Clone, Debug, Serialize)]
pub struct LayerDeviation {
    /// The layer.
    pub layer: u32,
    /// True for sparse attention.
    pub sparse: bool,
    /// Residual stream after the layer: largest deviation of a channel over the largest channel. Earlier layers' are in it.
    pub largest: f64,
    /// Root mean square of the deviations over that of the channels.
    pub rms: f64,
    /// Sparse layers: share of the blocks selected with f32 caches that are selected with narrow ones, too.
    pub selected_too: Option<f64>,
    /// Sparse layers: share of rows and heads with the very same blocks.
    pub same_selection: Option<f64>,
}

/// A checkpoint's recorded prompts over narrow caches.
#[derive(Clone, Debug, Serialize)]
pub struct CacheDeviation {
    /// The directory.
    pub dir: String,
    /// Element type of the narrow KV cache.
    pub kv_dtype: DType,
    /// Element type of the narrow index-key cache.
    pub index_dtype: DType,
    /// Rows compared: the last of each prompt, and each decode step.
    pub rows: usize,
    /// Layer by layer.
    pub layers: Vec<LayerDeviation>,
    /// Logits: largest deviation over the largest logit.
    pub logits: f64,
    /// Share of rows with the same largest logit.
    pub same_token: f64,
}

/// Runs the recorded prompts and tokens over f32 caches and over caches of the given types.
///
/// Errors: as [`verify_model`](super::verify_model).
pub fn cache_deviation(
    device: &Arc<dyn Device>,
    dir: &Path,
    dtypes: (DType, DType),
    mut progress: impl FnMut(usize, usize),
) -> Result<CacheDeviation> {
    let (checkpoint, reference) = read(device, dir)?;
    let shape = checkpoint.shape().clone();
    let side = |dtypes| Side::new(device, Arc::new(M3Chains::new(checkpoint.clone(), &limits(&reference, &shape, dtypes)?)?));
    let (mut wide, mut narrow) = (side((DType::F32, DType::F32))?, side(dtypes)?);
    let mut sums: Vec<Sums> = (0..=shape.layers()).map(|_| Sums::default()).collect();
    let (mut rows, mut same_token) = (0, 0);
    for (at, prompt) in reference.prompts.iter().enumerate() {
        progress(at, reference.prompts.len());
        let longest = (prompt.input.len() + prompt.greedy.len()) as u32;
        let ids = [wide.open(longest)?, narrow.open(longest)?];
        let chunk = wide.chains.limits().max_num_batched_tokens as usize;
        let mut kv_len = 0;
        for tokens in prompt.input.chunks(chunk).chain(prompt.greedy.chunks(1)) {
            kv_len += tokens.len();
            let (a, b) = (wide.step(ids[0], tokens, kv_len)?, narrow.step(ids[1], tokens, kv_len)?);
            // Rows inside a prompt are as good as its last, and many.
            if kv_len < prompt.input.len() {
                continue;
            }
            rows += 1;
            same_token += usize::from(a.token == b.token);
            sums.iter_mut().enumerate().for_each(|(layer, sums)| sums.add(&a.layers[layer], &b.layers[layer]));
        }
        wide.executor.close_sequence(ids[0], |_| ())?;
        narrow.executor.close_sequence(ids[1], |_| ())?;
    }
    let logits = sums.pop().map_or(0.0, |sums| sums.largest());
    let sparse = &shape.sparse_attention;
    let layers = sums.iter().zip(sparse).enumerate().map(|(layer, (sums, &sparse))| sums.deviation(layer as u32, sparse));
    Ok(CacheDeviation {
        dir: dir.display().to_string(),
        kv_dtype: dtypes.0,
        index_dtype: dtypes.1,
        rows,
        layers: layers.collect(),
        logits,
        same_token: same_token as f64 / rows as f64,
    })
}

/// What one layer gave for a row: the residual stream, and the selected blocks by head. The logits stand as one layer more.
#[derive(Clone, Default)]
struct Seen {
    values: Vec<f32>,
    blocks: Vec<BTreeSet<i32>>,
}

/// The last row of a step.
struct Row {
    token: i32,
    layers: Vec<Seen>,
}

/// A model over caches of one type, run eagerly.
struct Side {
    executor: Executor,
    chains: Arc<M3Chains>,
}

impl Side {
    fn new(device: &Arc<dyn Device>, chains: Arc<M3Chains>) -> Result<Side> {
        Ok(Side { executor: Executor::new(device, chains.clone())?, chains })
    }

    fn open(&mut self, longest: u32) -> Result<SequenceId> {
        let id = self.executor.open_sequence()?;
        let blocks: Vec<BlockId> = (0..longest.div_ceil(self.chains.step_layout().block_size)).collect();
        self.executor.grant_blocks(id, &blocks)?;
        Ok(id)
    }

    /// Runs a chunk of a prompt or a token; sees its last row.
    fn step(&mut self, sequence: SequenceId, tokens: &[i32], kv_len: usize) -> Result<Row> {
        let chains = self.chains.clone();
        let (residual, hidden) = (chains.m3_plan().activations.residual, chains.m3_plan().shape.hidden as usize);
        let mut layers = vec![Seen::default(); chains.m3_plan().shape.layers() as usize + 1];
        let mut blocks = BTreeMap::new();
        let row = tokens.len() - 1;
        let step = SequenceStep { sequence, tokens, kv_len: kv_len as u32, sampling: Sampling::GREEDY };
        let found = self.executor.prefill_observed(&[step], |executor, op| {
            note_blocks(&chains, executor, op.layer, &op.label, row, &mut blocks)?;
            let Some(layer) = op.layer else { return Ok(()) };
            // The last op of the layer leaves what counts.
            let values = &mut layers[layer as usize].values;
            values.resize(hidden, 0.0);
            executor.arena().read(residual, (row * hidden * 4) as u64, bytemuck::cast_slice_mut(values))
        })?;
        for (layer, heads) in blocks {
            layers[layer as usize].blocks = heads;
        }
        let mut logits = vec![0f32; chains.vocab() as usize];
        self.executor.arena().read(chains.m3_plan().activations.logits, 0, bytemuck::cast_slice_mut(&mut logits))?;
        layers.last_mut().expect("invariant: one more than there are layers").values = logits;
        Ok(Row { token: found[0], layers })
    }
}

/// Sums over rows.
#[derive(Default)]
struct Sums {
    deviation_max: f64,
    value_max: f64,
    deviation_squares: f64,
    value_squares: f64,
    selections: usize,
    same: usize,
    blocks: usize,
    blocks_too: usize,
}

impl Sums {
    fn add(&mut self, wide: &Seen, narrow: &Seen) {
        for (&a, &b) in wide.values.iter().zip(&narrow.values) {
            let (value, deviation) = (f64::from(a).abs(), (f64::from(a) - f64::from(b)).abs());
            self.value_max = self.value_max.max(value);
            self.deviation_max = if deviation.is_nan() { f64::INFINITY } else { self.deviation_max.max(deviation) };
            self.value_squares += value * value;
            self.deviation_squares += deviation * deviation;
        }
        for (a, b) in wide.blocks.iter().zip(&narrow.blocks) {
            self.selections += 1;
            self.same += usize::from(a == b);
            self.blocks += a.len();
            self.blocks_too += a.intersection(b).count();
        }
    }

    fn largest(&self) -> f64 {
        self.deviation_max / self.value_max
    }

    fn deviation(&self, layer: u32, sparse: bool) -> LayerDeviation {
        let share = |part: usize, all: usize| sparse.then(|| part as f64 / all as f64);
        LayerDeviation {
            layer,
            sparse,
            largest: self.largest(),
            rms: (self.deviation_squares / self.value_squares).sqrt(),
            selected_too: share(self.blocks_too, self.blocks),
            same_selection: share(self.same, self.selections),
        }
    }
}

//! The plan of the whole text decode step: weights and activations beside the buffers of attention and of the step.

use std::collections::BTreeMap;

use super::weights::{LayerWeight, Naming, Weight, weights};
use crate::arena::{ArenaPlan, BufferId, PlanBuilder, Purpose};
use crate::chain::{StepBuffers, StepLayout};
use crate::config::{Limits, ModelShape, max_capture_rows};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::m3::moe_tiles;
use crate::planning::{AttentionBuffers, AttentionDims, PeerBuffers, cache_blocks, device_buffer, step_layout};

/// Rows of a tile of a matrix product, experts' too.
pub(super) const TILE_ROWS: u32 = 64;

/// Every buffer of a MiniMax-M3 text model.
#[derive(Clone, Debug)]
pub struct M3Plan {
    /// The limits it was made from.
    pub limits: Limits,
    /// The shape it was made from.
    pub shape: ModelShape,
    /// Dimensions of attention.
    pub dims: AttentionDims,
    /// Capacities of the step buffers.
    pub layout: StepLayout,
    /// Step metadata.
    pub step: StepBuffers,
    /// Caches and what attention hands on.
    pub attention: AttentionBuffers,
    /// What the ranks exchange, under context parallelism.
    pub peers: Option<PeerBuffers>,
    /// What the rest of a layer hands on.
    pub activations: Activations,
    weights: BTreeMap<Weight, WeightBuffer>,
    /// All of it, laid out.
    pub arena: ArenaPlan,
}

/// A weight's buffer and element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightBuffer {
    /// The buffer.
    pub buffer: BufferId,
    /// f32 or bf16.
    pub dtype: DType,
}

/// Activations of one step; layers share them.
#[derive(Clone, Copy, Debug)]
pub struct Activations {
    /// [rows, hidden] residual stream.
    pub residual: BufferId,
    /// [rows, hidden] normed residual.
    pub normed: BufferId,
    /// [rows, 2 * ffn] gate and up of the dense MLP or the shared expert.
    pub gate_up: BufferId,
    /// [rows, ffn] gated.
    pub gated: BufferId,
    /// [rows, experts] router logits.
    pub router_logits: BufferId,
    /// [rows, experts_per_token] chosen experts.
    pub expert_ids: BufferId,
    /// [rows, experts_per_token] their weights.
    pub expert_weights: BufferId,
    /// [rows * experts_per_token] pairs by expert.
    pub expert_list: BufferId,
    /// [tiles, 4] tiles of that list.
    pub expert_tiles: BufferId,
    /// [rows * experts_per_token, 2 * expert_ffn] gate and up of the experts.
    pub expert_gate_up: BufferId,
    /// [rows * experts_per_token, expert_ffn] gated.
    pub expert_gated: BufferId,
    /// [rows * experts_per_token, hidden] outputs of the experts.
    pub expert_out: BufferId,
    /// \[sequence_capacity\] last row of each prefilled sequence.
    pub last_row: BufferId,
    /// [logits_rows, hidden] rows that go to `lm_head`.
    pub final_normed: BufferId,
    /// [logits_rows, vocab].
    pub logits: BufferId,
}

impl M3Plan {
    /// Plans a model; `dtype` says in which type each weight is stored.
    ///
    /// Errors: limits or a shape out of range, sizes that overflow, a budget that does not hold everything
    /// but the cache.
    pub fn new(shape: &ModelShape, limits: &Limits, dtype: impl Fn(Weight) -> DType) -> Result<M3Plan> {
        limits.validate()?;
        shape.validate()?;
        // Every rank holds the whole model: no head is divided.
        Limits { world: 1, rank: 0, ..limits.clone() }.validate_for(shape)?;
        let with_blocks = |limits: &Limits, blocks| Self::with_blocks(shape, limits, &dtype, blocks);
        let blocks = cache_blocks(limits, shape.block_size, |limits, blocks| Ok(with_blocks(limits, blocks)?.arena))?;
        with_blocks(limits, blocks)
    }

    /// Where a weight is. Panics if the model has none: chains ask for what the shape says is there.
    pub fn weight(&self, weight: Weight) -> WeightBuffer {
        *self.weights.get(&weight).unwrap_or_else(|| panic!("the model has no weight {weight}"))
    }

    /// Every weight with its buffer.
    pub fn weights(&self) -> impl Iterator<Item = (Weight, WeightBuffer)> {
        self.weights.iter().map(|(&weight, &buffer)| (weight, buffer))
    }

    fn with_blocks(shape: &ModelShape, limits: &Limits, dtype: &impl Fn(Weight) -> DType, cache_blocks: u32) -> Result<M3Plan> {
        let dims = AttentionDims::replicated(shape, limits);
        let layout = step_layout(shape, limits, cache_blocks)?;
        let mut plan = PlanBuilder::default();
        let step = StepBuffers::plan(&layout, &mut plan);
        let attention =
            AttentionBuffers::plan(&dims, limits, layout.row_capacity, cache_blocks, &shape.sparse_attention, &mut plan);
        let peers = PeerBuffers::plan(&dims, limits, &mut plan);
        let weights = plan_weights(shape, &attention, dtype, &mut plan)?;
        let activations = Activations::plan(shape, limits, &layout, &mut plan);
        let arena = plan.finish()?;
        let (limits, shape) = (limits.clone(), shape.clone());
        Ok(M3Plan { limits, shape, dims, layout, step, attention, peers, activations, weights, arena })
    }
}

/// A buffer for each weight; attention has already planned its norms.
fn plan_weights(
    shape: &ModelShape,
    attention: &AttentionBuffers,
    dtype: &impl Fn(Weight) -> DType,
    plan: &mut PlanBuilder,
) -> Result<BTreeMap<Weight, WeightBuffer>> {
    let mut buffers = BTreeMap::new();
    for spec in weights(shape, Naming::Resaved) {
        let weight = spec.weight;
        let dtype = if weight.is_f32() { DType::F32 } else { dtype(weight) };
        let buffer = match attention_norm(attention, weight) {
            Some(buffer) => buffer,
            None => {
                let mut dims = [0; 3];
                for (to, &dim) in dims.iter_mut().zip(&spec.shape) {
                    *to = u32::try_from(dim).map_err(|_| {
                        Error::config(format!("weight {weight}: {dim} rows overflow"))
                            .help("a dimension of config.json is too large")
                    })?;
                }
                let (formula, reason) = describe(weight);
                let dims = &dims[..spec.shape.len()];
                device_buffer(plan, format!("weights.{weight}"), dtype, dims, formula, Purpose::Weights, reason)
            }
        };
        buffers.insert(weight, WeightBuffer { buffer, dtype });
    }
    Ok(buffers)
}

fn attention_norm(attention: &AttentionBuffers, weight: Weight) -> Option<BufferId> {
    let Weight::Layer(layer, weight) = weight else { return None };
    let layer = &attention.layers[layer as usize];
    match weight {
        LayerWeight::QNorm => Some(layer.q_norm),
        LayerWeight::KNorm => Some(layer.k_norm),
        LayerWeight::IndexQNorm => layer.index_q_norm,
        LayerWeight::IndexKNorm => layer.index_k_norm,
        _ => None,
    }
}

/// A weight's formula and reason.
fn describe(weight: Weight) -> (&'static str, &'static str) {
    use LayerWeight::*;
    match weight {
        Weight::Embed => ("[vocab, hidden]", "token embeddings"),
        Weight::FinalNorm => ("[hidden]", "norm before lm_head"),
        Weight::LmHead => ("[vocab, hidden]", "logits of each token"),
        Weight::Layer(_, weight) => match weight {
            InputNorm => ("[hidden]", "norm before attention"),
            Qkv => ("[packed_width, hidden]", "projection of q, k, v, index_q and index_k, fused"),
            QNorm | KNorm => ("[head_dim]", "norm of each head"),
            IndexQNorm | IndexKNorm => ("[index_dim]", "norm of each index head"),
            Output => ("[hidden, q_heads * head_dim]", "output projection of attention"),
            PostNorm => ("[hidden]", "norm before the MLP"),
            GateUp => ("[2 * dense_ffn, hidden]", "gate and up projection, fused"),
            Down => ("[hidden, dense_ffn]", "down projection"),
            Router => ("[experts, hidden]", "router"),
            RouterBias => ("[experts]", "correction bias of the choice of experts"),
            ExpertsGateUp => ("[experts, 2 * expert_ffn, hidden]", "gate and up projection of each expert, fused"),
            ExpertsDown => ("[experts, hidden, expert_ffn]", "down projection of each expert"),
            SharedGateUp => ("[2 * shared_ffn, hidden]", "gate and up projection of the shared expert, fused"),
            SharedDown => ("[hidden, shared_ffn]", "down projection of the shared expert"),
        },
    }
}

impl Activations {
    fn plan(shape: &ModelShape, limits: &Limits, layout: &StepLayout, plan: &mut PlanBuilder) -> Activations {
        let rows = layout.row_capacity;
        let moe = shape.moe.contains(&true);
        let dense = if shape.moe.contains(&false) { shape.dense_ffn } else { 0 };
        let ffn = dense.max(if moe { shape.shared_ffn } else { 0 });
        let (moe_rows, pairs) = if moe { (rows, rows * shape.experts_per_token) } else { (0, 0) };
        let tiles = moe_tiles(pairs, shape.experts, TILE_ROWS);
        let logits_rows = layout.sequence_capacity.max(max_capture_rows(limits));
        let (f32, i32) = (DType::F32, DType::I32);
        let mut add = |name: &str, dtype, dims: [u32; 2], formula: &str, reason: &str| {
            device_buffer(plan, format!("model.{name}"), dtype, &dims, formula, Purpose::Activations, reason)
        };
        let pair_rows = "rows * experts_per_token";
        Activations {
            residual: add("residual", f32, [rows, shape.hidden], "[rows, hidden]", "residual stream"),
            normed: add("normed", f32, [rows, shape.hidden], "[rows, hidden]", "normed residual, input of the projections"),
            gate_up: add("gate_up", f32, [rows, 2 * ffn], "[rows, 2 * ffn]", "gate and up of a dense MLP or the shared expert"),
            gated: add("gated", f32, [rows, ffn], "[rows, ffn]", "gated activation of a dense MLP or the shared expert"),
            router_logits: add("router_logits", f32, [moe_rows, shape.experts], "[rows, experts]", "router logits"),
            expert_ids: add("expert_ids", i32, [pairs, 1], &format!("[{pair_rows}]"), "chosen experts of each row"),
            expert_weights: add("expert_weights", f32, [pairs, 1], &format!("[{pair_rows}]"), "weights of the chosen experts"),
            expert_list: add("expert_list", i32, [pairs, 1], &format!("[{pair_rows}]"), "(row, expert) pairs by expert"),
            expert_tiles: add("expert_tiles", i32, [tiles, 4], "[tiles, 4]", "runs of one expert's pairs"),
            expert_gate_up: add(
                "expert_gate_up",
                f32,
                [pairs, 2 * shape.expert_ffn],
                &format!("[{pair_rows}, 2 * expert_ffn]"),
                "gate and up of the experts",
            ),
            expert_gated: add(
                "expert_gated",
                f32,
                [pairs, shape.expert_ffn],
                &format!("[{pair_rows}, expert_ffn]"),
                "gated activation of the experts",
            ),
            expert_out: add(
                "expert_out",
                f32,
                [pairs, shape.hidden],
                &format!("[{pair_rows}, hidden]"),
                "outputs of the experts",
            ),
            last_row: add("last_row", i32, [layout.sequence_capacity, 1], "[sequences]", "last row of each prefilled sequence"),
            final_normed: add(
                "final_normed",
                f32,
                [logits_rows, shape.hidden],
                "[max(sequences, capture size), hidden]",
                "rows that go to lm_head",
            ),
            logits: add(
                "logits",
                f32,
                [logits_rows, shape.vocab],
                "[max(sequences, capture size), vocab]",
                "logits to sample from",
            ),
        }
    }
}

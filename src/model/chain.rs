//! The decode and prefill chains of the whole text model, from `ingest` of token ids to `publish` of sampled tokens.
//!
//! A layer is: norm, fused projection, attention (dense, or score, select and attend), output projection onto the residual,
//! norm, then a dense MLP or router, experts and shared expert onto the residual. Decode and prefill differ in the metadata of
//! the score pass and in which rows go to `lm_head`: all of them, or the last of each sequence.

use std::sync::Arc;

use super::checkpoint::Checkpoint;
use super::plan::{M3Plan, TILE_ROWS};
use super::weights::{LayerWeight, Weight};
use crate::arena::{Arena, ArenaPlan, BufferId, Sealed};
use crate::chain::attention::{AttentionChain, Metadata};
use crate::chain::{Chain, GraphKey, StepBuffers, StepChains, StepLayout, WORKGROUP, agree, pointer};
use crate::config::Limits;
use crate::dtype::DType;
use crate::error::Result;
use crate::gates::{Refusal, Sharing, parallel_refused};
use crate::hal::LaunchShape;
use crate::kernels::m3::{
    LinearArgs, MoeCombineArgs, MoeLinearArgs, MoeSortArgs, RmsNormArgs, RouteArgs, SelectLastArgs, SwigluArgs, moe_tiles,
};
use crate::kernels::step::{EmbedArgs, SampleArgs};
use crate::kernels::{KernelSpec, Ptr, registry};

/// Columns of a tile of a matrix product: whole groups of the CPU's register tiles, three matrix instructions wide elsewhere.
const TILE_COLS: u32 = 48;

/// The chain family `m3`: a whole MiniMax-M3 text model.
#[derive(Debug)]
pub struct M3Chains {
    plan: M3Plan,
    checkpoint: Option<Arc<Checkpoint>>,
}

impl M3Chains {
    /// Plans a checkpoint's model under `limits`; its weights are read when an arena is initialised.
    ///
    /// Errors: as [`M3Plan::new`].
    pub fn new(checkpoint: Arc<Checkpoint>, limits: &Limits) -> Result<M3Chains> {
        let dtypes: std::collections::BTreeMap<Weight, DType> =
            checkpoint.weights().iter().map(|packed| (packed.weight, packed.dtype)).collect();
        let plan = M3Plan::new(checkpoint.shape(), limits, |weight| dtypes.get(&weight).copied().unwrap_or(DType::Bf16))?;
        Ok(M3Chains { plan, checkpoint: Some(checkpoint) })
    }

    /// Plans a shape without weights (bf16): for plans, dumps and the null device. On a device that runs, weights stay zero.
    ///
    /// Errors: as [`M3Plan::new`].
    pub fn without_weights(shape: &crate::config::ModelShape, limits: &Limits) -> Result<M3Chains> {
        Ok(M3Chains { plan: M3Plan::new(shape, limits, |_| DType::Bf16)?, checkpoint: None })
    }

    /// The plan.
    pub fn m3_plan(&self) -> &M3Plan {
        &self.plan
    }

    fn attention(&self) -> AttentionChain<'_> {
        AttentionChain {
            dims: &self.plan.dims,
            shape: &self.plan.shape,
            limits: &self.plan.limits,
            layout: &self.plan.layout,
            step: &self.plan.step,
            buffers: &self.plan.attention,
            peers: self.plan.peers.as_ref(),
        }
    }
}

impl StepChains for M3Chains {
    fn name(&self) -> &str {
        "m3"
    }

    fn limits(&self) -> &Limits {
        &self.plan.limits
    }

    fn plan(&self) -> &ArenaPlan {
        &self.plan.arena
    }

    fn step(&self) -> &StepBuffers {
        &self.plan.step
    }

    fn step_layout(&self) -> &StepLayout {
        &self.plan.layout
    }

    fn vocab(&self) -> u32 {
        self.plan.shape.vocab
    }

    fn kernels(&self) -> Vec<&'static KernelSpec> {
        let peers = if self.plan.peers.is_some() { registry::peers() } else { &[] };
        [registry::all(), peers].concat()
    }

    fn peers(&self) -> Option<&crate::planning::PeerBuffers> {
        self.plan.peers.as_ref()
    }

    fn parallel_refused(&self) -> Vec<Refusal> {
        parallel_refused(&self.plan.shape, &self.plan.limits, Sharing::Replicated)
    }

    fn decode(&self, key: &GraphKey) -> Chain {
        let (sequences, rows) = (key.sequences, key.rows());
        let mut chain = Chain::new("m3.decode");
        self.plan.step.ingest(&self.plan.layout, &mut chain, sequences, rows, key.query_len);
        if let Some(peers) = &self.plan.peers {
            agree(&mut chain, peers, &self.plan.step, &self.plan.limits, key);
        }
        let metadata = Metadata::Decode { sequences, query_len: key.query_len, kv_len_max: key.kv_len_max };
        let mut step = Step { plan: &self.plan, attention: self.attention(), chain: &mut chain, metadata, rows };
        step.layers();
        step.head(sequences, rows, None);
        self.plan.step.publish(&self.plan.layout, &mut chain, rows);
        chain
    }

    fn prefill(&self, sequences: u32, rows: u32) -> Chain {
        let mut chain = Chain::new("m3.prefill");
        self.plan.step.ingest(&self.plan.layout, &mut chain, sequences, rows, 0);
        let metadata = Metadata::Prefill { rows };
        let mut step = Step { plan: &self.plan, attention: self.attention(), chain: &mut chain, metadata, rows };
        step.layers();
        step.select_last(sequences);
        step.head(sequences, sequences, Some(self.plan.activations.last_row));
        self.plan.step.publish(&self.plan.layout, &mut chain, sequences);
        chain
    }

    fn initialise(&self, arena: &Arena<Sealed>) -> Result<()> {
        if !arena.device().info().executes {
            return Ok(());
        }
        self.attention().write_cos_sin(arena)?;
        let Some(checkpoint) = &self.checkpoint else { return Ok(()) };
        for packed in checkpoint.weights() {
            let buffer = self.plan.weight(packed.weight).buffer;
            checkpoint.stream(packed, |offset, bytes| arena.write(buffer, offset, bytes))?;
        }
        Ok(())
    }
}

/// A chain being written.
struct Step<'a> {
    plan: &'a M3Plan,
    attention: AttentionChain<'a>,
    chain: &'a mut Chain,
    metadata: Metadata,
    rows: u32,
}

/// A matrix product to append.
struct Product {
    x: BufferId,
    weight: Weight,
    out: BufferId,
    n: u32,
    k: u32,
    accumulate: bool,
}

impl Step<'_> {
    fn layers(&mut self) {
        self.embed();
        for layer in 0..self.plan.shape.layers() {
            self.attention_half(layer);
            if self.plan.shape.moe[layer as usize] { self.experts(layer) } else { self.dense(layer) }
        }
    }

    fn embed(&mut self) {
        let table = self.plan.weight(Weight::Embed);
        let args = EmbedArgs {
            tokens: pointer(self.plan.step.tokens),
            row_len: pointer(self.plan.step.row_len),
            table: pointer(table.buffer),
            out: pointer(self.plan.activations.residual),
            rows: self.rows,
            width: self.plan.shape.hidden,
            vocab: self.plan.shape.vocab,
            table_dtype: table.dtype.code(),
        };
        self.chain.push("embed", None, &registry::EMBED, [self.rows, 1, 1], &args);
    }

    fn attention_half(&mut self, layer: u32) {
        let (shape, dims) = (&self.plan.shape, &self.plan.dims);
        let (hidden, heads) = (shape.hidden, dims.q_heads * dims.head_dim);
        let packed_width = dims.packed_width(shape.sparse_attention[layer as usize]);
        let (normed, packed, out) = (self.plan.activations.normed, self.plan.attention.packed, self.plan.attention.out);
        self.norm(layer, LayerWeight::InputNorm);
        self.linear(layer, LayerWeight::Qkv, normed, packed, packed_width, hidden, false);
        self.attention.push_layer(self.chain, layer, self.metadata);
        self.linear(layer, LayerWeight::Output, out, self.plan.activations.residual, hidden, heads, true);
        self.norm(layer, LayerWeight::PostNorm);
    }

    fn dense(&mut self, layer: u32) {
        self.mlp(layer, LayerWeight::GateUp, LayerWeight::Down, self.plan.shape.dense_ffn);
    }

    /// Gate, up, SwiGLU and down onto the residual.
    fn mlp(&mut self, layer: u32, gate_up: LayerWeight, down: LayerWeight, ffn: u32) {
        let hidden = self.plan.shape.hidden;
        let buffers = self.plan.activations;
        self.linear(layer, gate_up, buffers.normed, buffers.gate_up, 2 * ffn, hidden, false);
        let label = if down == LayerWeight::Down { "swiglu" } else { "shared_swiglu" };
        self.swiglu(layer, label, buffers.gate_up, buffers.gated, ffn, 1);
        self.linear(layer, down, buffers.gated, buffers.residual, hidden, ffn, true);
    }

    fn experts(&mut self, layer: u32) {
        let shape = &self.plan.shape;
        let (hidden, ffn, topk) = (shape.hidden, shape.expert_ffn, shape.experts_per_token);
        let buffers = self.plan.activations;
        self.linear(layer, LayerWeight::Router, buffers.normed, buffers.router_logits, shape.experts, hidden, false);
        self.route(layer);
        self.moe_sort(layer);
        let gate_up = LayerWeight::ExpertsGateUp;
        self.moe_linear(layer, gate_up, buffers.normed, buffers.expert_gate_up, 2 * ffn, hidden, topk);
        self.swiglu(layer, "experts_swiglu", buffers.expert_gate_up, buffers.expert_gated, ffn, topk);
        self.moe_linear(layer, LayerWeight::ExpertsDown, buffers.expert_gated, buffers.expert_out, hidden, ffn, 1);
        self.moe_combine(layer);
        if shape.shared_ffn > 0 {
            self.mlp(layer, LayerWeight::SharedGateUp, LayerWeight::SharedDown, shape.shared_ffn);
        }
    }

    /// Norms the residual.
    fn norm(&mut self, layer: u32, weight: LayerWeight) {
        let weight = Weight::Layer(layer, weight);
        let args = RmsNormArgs {
            x: pointer(self.plan.activations.residual),
            rows_index: Ptr::NULL,
            row_len: pointer(self.plan.step.row_len),
            weight: pointer(self.plan.weight(weight).buffer),
            out: pointer(self.plan.activations.normed),
            rows: self.rows,
            x_rows: self.rows,
            width: self.plan.shape.hidden,
            indexed: 0,
            eps: self.plan.shape.eps,
            reserved: 0,
        };
        let grid = [self.rows, 1, 1];
        self.chain.push(weight.to_string(), Some(layer), &registry::RMS_NORM, grid, &args);
    }

    #[expect(clippy::too_many_arguments, reason = "operands and dimensions of one product, each named where it is called")]
    fn linear(&mut self, layer: u32, weight: LayerWeight, x: BufferId, out: BufferId, n: u32, k: u32, accumulate: bool) {
        let product = Product { x, weight: Weight::Layer(layer, weight), out, n, k, accumulate };
        self.product(&product, Some(layer), self.rows, self.plan.step.row_len);
    }

    fn product(&mut self, product: &Product, layer: Option<u32>, rows: u32, row_len: BufferId) {
        let &Product { x, weight, out, n, k, accumulate } = product;
        let stored = self.plan.weight(if weight == Weight::LmHead { self.head_weight() } else { weight });
        let args = LinearArgs {
            x: pointer(x),
            weight: pointer(stored.buffer),
            row_len: pointer(row_len),
            out: pointer(out),
            rows,
            n,
            k,
            x_stride: k,
            out_stride: n,
            weight_dtype: stored.dtype.code(),
            accumulate: accumulate.into(),
            tile_cols: TILE_COLS,
            tile_rows: TILE_ROWS,
            reserved: 0,
        };
        let grid = [n.div_ceil(TILE_COLS), rows.div_ceil(TILE_ROWS), 1];
        self.chain.push(weight.to_string(), layer, &registry::LINEAR, grid, &args);
    }

    /// The weight of `lm_head`: its own, or the embeddings.
    fn head_weight(&self) -> Weight {
        if self.plan.shape.tie_word_embeddings { Weight::Embed } else { Weight::LmHead }
    }

    fn swiglu(&mut self, layer: u32, label: &str, x: BufferId, out: BufferId, width: u32, rows_a_len: u32) {
        let rows = self.rows * rows_a_len;
        let args = SwigluArgs {
            x: pointer(x),
            row_len: pointer(self.plan.step.row_len),
            out: pointer(out),
            rows,
            width,
            rows_a_len,
            alpha: self.plan.shape.swiglu_alpha,
            limit: self.plan.shape.swiglu_limit,
            reserved: 0,
        };
        let label = format!("layer{layer}.{label}");
        self.chain.push(label, Some(layer), &registry::SWIGLU, [rows, 1, 1], &args);
    }

    fn route(&mut self, layer: u32) {
        let shape = &self.plan.shape;
        let args = RouteArgs {
            logits: pointer(self.plan.activations.router_logits),
            bias: pointer(self.plan.weight(Weight::Layer(layer, LayerWeight::RouterBias)).buffer),
            row_len: pointer(self.plan.step.row_len),
            ids: pointer(self.plan.activations.expert_ids),
            weights: pointer(self.plan.activations.expert_weights),
            rows: self.rows,
            experts: shape.experts,
            topk: shape.experts_per_token,
            scale: shape.routed_scaling_factor,
        };
        let grid = [self.rows, 1, 1];
        self.chain.push(format!("layer{layer}.route"), Some(layer), &registry::ROUTE, grid, &args);
    }

    /// (row, expert) pairs of the step, and tiles they need at most.
    fn pairs(&self) -> (u32, u32) {
        let pairs = self.rows * self.plan.shape.experts_per_token;
        (pairs, moe_tiles(pairs, self.plan.shape.experts, TILE_ROWS))
    }

    fn moe_sort(&mut self, layer: u32) {
        let (pairs, tiles_max) = self.pairs();
        let experts = self.plan.shape.experts;
        let args = MoeSortArgs {
            ids: pointer(self.plan.activations.expert_ids),
            list: pointer(self.plan.activations.expert_list),
            tiles: pointer(self.plan.activations.expert_tiles),
            pairs,
            experts,
            tile_rows: TILE_ROWS,
            tiles_max,
        };
        let (label, lds_bytes) = (format!("layer{layer}.moe_sort"), 4 * (experts + 1));
        let shape = LaunchShape { grid: [1, 1, 1], workgroup: [WORKGROUP, 1, 1], lds_bytes };
        self.chain.push_shaped(label, Some(layer), &registry::MOE_SORT, shape, &args);
    }

    #[expect(clippy::too_many_arguments, reason = "operands and dimensions of one product, each named where it is called")]
    fn moe_linear(&mut self, layer: u32, weight: LayerWeight, x: BufferId, out: BufferId, n: u32, k: u32, pairs_a_row: u32) {
        let (pairs, tiles_max) = self.pairs();
        let weight = Weight::Layer(layer, weight);
        let stored = self.plan.weight(weight);
        let args = MoeLinearArgs {
            x: pointer(x),
            weight: pointer(stored.buffer),
            list: pointer(self.plan.activations.expert_list),
            tiles: pointer(self.plan.activations.expert_tiles),
            out: pointer(out),
            pairs,
            pairs_a_row,
            n,
            k,
            experts: self.plan.shape.experts,
            tiles_max,
            tile_cols: TILE_COLS,
            weight_dtype: stored.dtype.code(),
        };
        let grid = [n.div_ceil(TILE_COLS), tiles_max, 1];
        self.chain.push(weight.to_string(), Some(layer), &registry::MOE_LINEAR, grid, &args);
    }

    fn moe_combine(&mut self, layer: u32) {
        let args = MoeCombineArgs {
            experts: pointer(self.plan.activations.expert_out),
            weights: pointer(self.plan.activations.expert_weights),
            row_len: pointer(self.plan.step.row_len),
            residual: pointer(self.plan.activations.residual),
            rows: self.rows,
            topk: self.plan.shape.experts_per_token,
            width: self.plan.shape.hidden,
            reserved: 0,
        };
        let grid = [self.rows, 1, 1];
        let label = format!("layer{layer}.moe_combine");
        self.chain.push(label, Some(layer), &registry::MOE_COMBINE, grid, &args);
    }

    fn select_last(&mut self, sequences: u32) {
        let args = SelectLastArgs {
            cu_seqlens: pointer(self.plan.step.cu_seqlens),
            rows_index: pointer(self.plan.activations.last_row),
            sequences,
            reserved: 0,
        };
        self.chain.push("select_last", None, &registry::SELECT_LAST, [1, 1, 1], &args);
    }

    /// Final norm, `lm_head` and sampling of `logits_rows` rows: all of the step, or those of an index list (one a sequence).
    fn head(&mut self, sequences: u32, logits_rows: u32, index: Option<BufferId>) {
        let (shape, step, buffers) = (&self.plan.shape, &self.plan.step, self.plan.activations);
        let (rows_index, indexed) = (index.map_or(Ptr::NULL, pointer), u32::from(index.is_some()));
        let norm = RmsNormArgs {
            x: pointer(buffers.residual),
            rows_index,
            row_len: pointer(step.row_len),
            weight: pointer(self.plan.weight(Weight::FinalNorm).buffer),
            out: pointer(buffers.final_normed),
            rows: logits_rows,
            x_rows: self.rows,
            width: shape.hidden,
            indexed,
            eps: shape.eps,
            reserved: 0,
        };
        self.chain.push("final_norm", None, &registry::RMS_NORM, [logits_rows, 1, 1], &norm);
        let (n, k) = (shape.vocab, shape.hidden);
        let product = Product { x: buffers.final_normed, weight: Weight::LmHead, out: buffers.logits, n, k, accumulate: false };
        // A sequence's KV length is 0 just when it is a pad, as a row's causal length is.
        let row_len = if index.is_some() { step.seq_len } else { step.row_len };
        self.product(&product, None, logits_rows, row_len);
        let sample = SampleArgs {
            logits: pointer(buffers.logits),
            rows_index,
            row_seq: pointer(step.row_seq),
            row_slot: pointer(step.row_slot),
            row_len: pointer(step.row_len),
            records: pointer(step.records),
            out: pointer(step.sampled),
            last_token: pointer(step.last_token),
            rows: logits_rows,
            vocab: shape.vocab,
            step_rows: self.rows,
            sequences,
            slots: self.plan.layout.slots,
            indexed,
        };
        self.chain.push("sample", None, &registry::SAMPLE, [logits_rows, 1, 1], &sample);
    }
}

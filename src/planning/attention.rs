//! The buffers of attention: caches a layer, and what one layer hands the next, shared by all layers.

use serde::Serialize;

use super::device_buffer;
use crate::arena::{BufferId, PlanBuilder, Purpose};
use crate::config::{Limits, ModelShape};
use crate::dtype::DType;
use crate::gates::{Sharing, context_parallel};
use crate::kernels::msa::PAGE_TOKENS;

/// Dimensions of one rank's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AttentionDims {
    /// Query heads of this rank.
    pub q_heads: u32,
    /// KV heads of this rank: at least 1, replicated past the model's.
    pub kv_heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Index heads this rank selects for: as many as its KV heads share.
    pub index_heads: u32,
    /// Index heads this rank scores, and those of its rows: under context parallelism all of the model's, else `index_heads`.
    pub scored_heads: u32,
    /// The first of `index_heads` among `scored_heads`.
    pub first_head: u32,
    /// Ranks over which the blocks of a decode row are spread for scoring; 1: this rank scores alone.
    pub shards: u32,
    /// Channels of an index head.
    pub index_dim: u32,
    /// Rotating channels.
    pub rotary_dim: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Blocks selected.
    pub topk: u32,
    /// Columns of the score buffer.
    pub score_width: u32,
}

impl AttentionDims {
    /// One rank's share of `shape`: heads divide over `world` ranks (msa-spec section 2.1).
    pub fn new(shape: &ModelShape, limits: &Limits) -> AttentionDims {
        let kv_heads = (shape.kv_heads / limits.world).max(1);
        let index_heads = (shape.index_heads / limits.world).max(1);
        let parallel = context_parallel(shape, limits, Sharing::Heads).is_empty();
        AttentionDims {
            q_heads: (shape.q_heads / limits.world).max(1),
            kv_heads,
            head_dim: shape.head_dim,
            index_heads,
            scored_heads: if parallel { shape.index_heads } else { index_heads },
            first_head: if parallel { limits.rank * index_heads } else { 0 },
            shards: if parallel { limits.world } else { 1 },
            index_dim: shape.index_dim,
            rotary_dim: shape.rotary_dim,
            block_size: shape.block_size,
            topk: shape.topk_blocks,
            score_width: score_width(limits.max_model_len, shape.block_size),
        }
    }

    /// A whole model on every rank: all heads of everything, and only the scoring of decode rows spread over the ranks.
    pub fn replicated(shape: &ModelShape, limits: &Limits) -> AttentionDims {
        let parallel = context_parallel(shape, limits, Sharing::Replicated).is_empty();
        let alone = Limits { world: 1, rank: 0, ..limits.clone() };
        AttentionDims { shards: if parallel { limits.world } else { 1 }, ..AttentionDims::new(shape, &alone) }
    }

    /// True if decode rows are scored by several ranks, which exchange candidates.
    pub fn is_parallel(&self) -> bool {
        self.shards > 1
    }

    /// Columns of a decode row's scores: this rank's shard of the blocks, at the bound.
    pub fn shard_width(&self, max_model_len: u32) -> u32 {
        let blocks = max_model_len.max(1).div_ceil(self.block_size).div_ceil(self.shards);
        score_width(blocks * self.block_size, self.block_size)
    }

    /// Channels of a packed row [q | k | v | index_q | index_k]; a dense layer has no index part.
    pub fn packed_width(&self, sparse: bool) -> u32 {
        let index = if sparse { (self.scored_heads + 1) * self.index_dim } else { 0 };
        (self.q_heads + 2 * self.kv_heads) * self.head_dim + index
    }

    /// Page ids of one (row, KV head).
    pub fn table_pages(&self) -> u32 {
        self.topk * self.block_size / PAGE_TOKENS
    }
}

/// Columns of a score row: whole strips of 64 blocks, a power of two of them (msa-spec section 3.4).
pub fn score_width(max_model_len: u32, block_size: u32) -> u32 {
    max_model_len.max(1).div_ceil(block_size).div_ceil(64).next_power_of_two() * 64
}

/// What a layer owns.
#[derive(Clone, Copy, Debug)]
pub struct LayerBuffers {
    /// True for a sparse layer.
    pub sparse: bool,
    /// Paged KV cache.
    pub kv_cache: BufferId,
    /// Index-key cache of a sparse layer.
    pub index_cache: Option<BufferId>,
    /// \[head_dim\] norm of q.
    pub q_norm: BufferId,
    /// \[head_dim\] norm of k.
    pub k_norm: BufferId,
    /// \[index_dim\] norm of index_q, on a sparse layer.
    pub index_q_norm: Option<BufferId>,
    /// \[index_dim\] norm of index_k, on a sparse layer.
    pub index_k_norm: Option<BufferId>,
}

/// The buffers of attention, layers included.
#[derive(Clone, Debug)]
pub struct AttentionBuffers {
    /// [rows, packed_width] rows before norm and rotation.
    pub packed: BufferId,
    /// [rows, q_heads, head_dim].
    pub q: BufferId,
    /// [rows, scored_heads, index_dim].
    pub index_q: BufferId,
    /// [index_heads, rows, score_width], or [scored_heads, rows, width of a shard], whichever is larger.
    pub score: BufferId,
    /// [index_heads, rows, topk].
    pub topk_idx: BufferId,
    /// [rows * kv_heads, table_pages].
    pub page_table: BufferId,
    /// [rows * kv_heads].
    pub page_len: BufferId,
    /// [rows, q_heads, head_dim].
    pub out: BufferId,
    /// [max_model_len, rotary_dim] cos, then sin.
    pub cos_sin: BufferId,
    /// Per layer.
    pub layers: Vec<LayerBuffers>,
}

impl LayerBuffers {
    /// Its norm weights and their channels.
    pub fn norms(&self, dims: &AttentionDims) -> impl Iterator<Item = (BufferId, u32)> {
        let index = [self.index_q_norm, self.index_k_norm].into_iter().flatten();
        [(self.q_norm, dims.head_dim), (self.k_norm, dims.head_dim)].into_iter().chain(index.map(|norm| (norm, dims.index_dim)))
    }
}

impl AttentionBuffers {
    /// Plans them for `rows` rows and `cache_blocks` blocks; `layers` says which are sparse.
    pub fn plan(
        dims: &AttentionDims,
        limits: &Limits,
        rows: u32,
        cache_blocks: u32,
        layers: &[bool],
        plan: &mut PlanBuilder,
    ) -> AttentionBuffers {
        let AttentionDims { q_heads, kv_heads, head_dim, index_heads, scored_heads, index_dim, block_size, topk, .. } = *dims;
        let (f32, i32, kv, index) = (DType::F32, DType::I32, limits.kv_dtype, limits.index_dtype);
        let mut layer_buffers = Vec::with_capacity(layers.len());
        for (layer, &sparse) in layers.iter().enumerate() {
            let mut weight = |name: &str, dim, formula: &str| {
                device_buffer(
                    plan,
                    format!("layer{layer}.{name}"),
                    f32,
                    &[dim],
                    formula,
                    Purpose::Weights,
                    "per-head Gemma norm, used as 1 + w",
                )
            };
            let (q_norm, k_norm) = (weight("q_norm", head_dim, "[head_dim]"), weight("k_norm", head_dim, "[head_dim]"));
            let index_q_norm = sparse.then(|| weight("index_q_norm", index_dim, "[index_dim]"));
            let index_k_norm = sparse.then(|| weight("index_k_norm", index_dim, "[index_dim]"));
            let kv_cache = device_buffer(
                plan,
                format!("layer{layer}.kv_cache"),
                kv,
                &[cache_blocks, 2, block_size, kv_heads, head_dim],
                "[cache_blocks, K and V, block_size, kv_heads, head_dim]",
                Purpose::KvCache,
                "keys and values in pages of 16 tokens",
            );
            let index_cache = sparse.then(|| {
                device_buffer(
                    plan,
                    format!("layer{layer}.index_cache"),
                    index,
                    &[cache_blocks, block_size, index_dim],
                    "[cache_blocks, block_size, index_dim]",
                    Purpose::IndexCache,
                    "index keys the score pass reads",
                )
            });
            layer_buffers.push(LayerBuffers { sparse, kv_cache, index_cache, q_norm, k_norm, index_q_norm, index_k_norm });
        }
        let sparse = layers.contains(&true);
        let mut add = |name: &str, dtype, shape: &[u32], formula: &str, purpose, reason: &str| {
            device_buffer(plan, format!("attention.{name}"), dtype, shape, formula, purpose, reason)
        };
        let (activations, selection) = (Purpose::Activations, Purpose::Selection);
        let selected = if sparse { rows } else { 0 };
        // A prefill scores the heads this rank selects for over all blocks, a decode step all heads over its shard.
        let shard_width = dims.shard_width(limits.max_model_len);
        let (planes, width, score_formula) = match scored_heads * shard_width > index_heads * dims.score_width {
            true => (scored_heads, shard_width, "[index_heads of all ranks, rows, width(max_model_len / world)]"),
            false => (index_heads, dims.score_width, "[index_heads, rows, width(max_model_len)]"),
        };
        AttentionBuffers {
            packed: add(
                "packed",
                f32,
                &[rows, dims.packed_width(sparse)],
                "[rows, packed_width]",
                activations,
                "projected row before norm and rotation",
            ),
            q: add("q", f32, &[rows, q_heads, head_dim], "[rows, q_heads, head_dim]", activations, "queries"),
            index_q: add(
                "index_q",
                index,
                &[selected, scored_heads, index_dim],
                "[rows, index_heads, index_dim]",
                activations,
                "index queries",
            ),
            score: add(
                "score",
                f32,
                &[planes, selected, width],
                score_formula,
                selection,
                "best index score of each block; lower max_num_batched_tokens or max_model_len to shrink it",
            ),
            topk_idx: add(
                "topk_idx",
                i32,
                &[index_heads, selected, topk],
                "[index_heads, rows, topk]",
                selection,
                "selected blocks",
            ),
            page_table: add(
                "page_table",
                i32,
                &[selected, kv_heads, dims.table_pages()],
                "[rows, kv_heads, topk * block_size / 16]",
                selection,
                "pages the attend reads",
            ),
            page_len: add("page_len", i32, &[selected, kv_heads], "[rows, kv_heads]", selection, "tokens the attend reads"),
            out: add("out", f32, &[rows, q_heads, head_dim], "[rows, q_heads, head_dim]", activations, "attention output"),
            cos_sin: add(
                "cos_sin",
                f32,
                &[limits.max_model_len, dims.rotary_dim],
                "[max_model_len, rotary_dim]",
                Purpose::Weights,
                "rotary cos and sin of every position",
            ),
            layers: layer_buffers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn score_widths_of_the_specification() {
        for (len, width) in [(8192, 64), (131_072, 1024), (196_608, 2048), (1_048_576, 8192), (1, 64)] {
            assert_eq!(score_width(len, 128), width, "{len}");
        }
    }
}

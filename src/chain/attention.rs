//! The ops of one attention layer: norm, rotation and cache insert; then score, select and attend, or dense attention.

use super::{Chain, StepBuffers, StepLayout, exchange, pointer};
use crate::arena::{Arena, Sealed};
use crate::config::{Limits, ModelShape};
use crate::error::Result;
use crate::gates::{Indexer, indexer};
use crate::kernels::exchange::{TAG_BITS, TopkExchangeArgs};
use crate::kernels::msa::{
    AttendDenseArgs, AttendSparseArgs, NormRopeInsertArgs, ScoreDecodeArgs, ScorePrefillArgs, TopkEmitArgs,
};
use crate::kernels::{Ptr, registry};
use crate::planning::{AttentionBuffers, AttentionDims, LayerBuffers, PeerBuffers};

/// Workgroups a score launch aims at over all sequences: enough to fill a large device several times.
const SCORE_WORKGROUPS: u32 = 1024;
/// Blocks a score workgroup has at least, at the bound.
const SCORE_BLOCKS: u32 = 4;
/// Rows of a prefill score tile.
const SCORE_TILE_ROWS: u32 = 16;

/// How the rows of a step are described to the score pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metadata {
    /// Uniform decode rows.
    Decode {
        /// Sequences.
        sequences: u32,
        /// Rows a sequence.
        query_len: u32,
        /// Longest KV length the grid is made for.
        kv_len_max: u32,
    },
    /// Ragged rows.
    Prefill {
        /// Rows.
        rows: u32,
    },
}

impl Metadata {
    /// Rows of the step.
    pub fn rows(&self) -> u32 {
        match *self {
            Metadata::Decode { sequences, query_len, .. } => sequences * query_len,
            Metadata::Prefill { rows } => rows,
        }
    }
}

/// What the ops of attention are made from.
#[derive(Clone, Copy, Debug)]
pub struct AttentionChain<'a> {
    /// This rank's dimensions.
    pub dims: &'a AttentionDims,
    /// The model.
    pub shape: &'a ModelShape,
    /// The limits.
    pub limits: &'a Limits,
    /// Capacities of the step buffers.
    pub layout: &'a StepLayout,
    /// Step metadata.
    pub step: &'a StepBuffers,
    /// Attention's buffers.
    pub buffers: &'a AttentionBuffers,
    /// What the ranks exchange, under context parallelism.
    pub peers: Option<&'a PeerBuffers>,
}

impl AttentionChain<'_> {
    /// Appends a layer: from `packed` to `out`.
    pub fn push_layer(&self, chain: &mut Chain, layer: u32, metadata: Metadata) {
        self.norm_rope_insert(chain, layer, &self.buffers.layers[layer as usize], metadata.rows());
        if self.buffers.layers[layer as usize].sparse {
            self.score(chain, layer, metadata);
            self.select(chain, layer, metadata);
        }
        self.attend(chain, layer, metadata.rows());
    }

    /// Appends the score pass of a sparse layer.
    pub fn score(&self, chain: &mut Chain, layer: u32, metadata: Metadata) {
        let buffers = &self.buffers.layers[layer as usize];
        match metadata {
            Metadata::Decode { sequences, query_len, kv_len_max } => {
                self.score_decode(chain, layer, buffers, sequences, query_len, kv_len_max)
            }
            Metadata::Prefill { rows } => self.score_prefill(chain, layer, buffers, rows),
        }
    }

    /// Appends the selection of a sparse layer: decode rows under context parallelism exchange candidates.
    pub fn select(&self, chain: &mut Chain, layer: u32, metadata: Metadata) {
        match (self.peers, metadata) {
            (Some(peers), Metadata::Decode { .. }) => self.topk_exchange(chain, layer, metadata.rows(), peers),
            _ => self.topk_emit(chain, layer, metadata.rows()),
        }
    }

    /// Appends a layer's attention: over the emitted pages if it is sparse, else over all of the sequence.
    pub fn attend(&self, chain: &mut Chain, layer: u32, rows: u32) {
        let buffers = &self.buffers.layers[layer as usize];
        match buffers.sparse {
            true => self.attend_sparse(chain, layer, buffers, rows),
            false => self.attend_dense(chain, layer, buffers, rows),
        }
    }

    /// Fills the cos/sin table: angle(position, i) = position * theta^(-2i / rotary_dim), computed as the reference
    /// implementation does, in f32.
    pub fn write_cos_sin(&self, arena: &Arena<Sealed>) -> Result<()> {
        let half = self.dims.rotary_dim as usize / 2;
        let frequencies: Vec<f32> =
            (0..half).map(|i| 1.0 / (self.shape.rope_theta as f32).powf((2 * i) as f32 / self.dims.rotary_dim as f32)).collect();
        // Written in pieces: the table of a million positions is larger than what the host should hold at once.
        let (mut piece, width) = (Vec::new(), 2 * half);
        for from in (0..self.limits.max_model_len).step_by(4096) {
            piece.clear();
            for position in from..(from + 4096).min(self.limits.max_model_len) {
                let angles = frequencies.iter().map(|frequency| position as f32 * frequency);
                piece.extend(angles.clone().map(f32::cos));
                piece.extend(angles.map(f32::sin));
            }
            arena.write(self.buffers.cos_sin, u64::from(from) * width as u64 * 4, bytemuck::cast_slice(&piece))?;
        }
        Ok(())
    }

    fn norm_rope_insert(&self, chain: &mut Chain, layer: u32, buffers: &LayerBuffers, rows: u32) {
        let optional = |buffer| Option::map_or(buffer, Ptr::NULL, pointer);
        let args = NormRopeInsertArgs {
            packed: pointer(self.buffers.packed),
            q_norm: pointer(buffers.q_norm),
            k_norm: pointer(buffers.k_norm),
            index_q_norm: optional(buffers.index_q_norm),
            index_k_norm: optional(buffers.index_k_norm),
            cos_sin: pointer(self.buffers.cos_sin),
            row_slot: pointer(self.step.row_slot),
            row_len: pointer(self.step.row_len),
            block_table: pointer(self.step.block_table),
            q: pointer(self.buffers.q),
            index_q: if buffers.sparse { pointer(self.buffers.index_q) } else { Ptr::NULL },
            kv_cache: pointer(buffers.kv_cache),
            index_cache: optional(buffers.index_cache),
            rows,
            packed_width: self.dims.packed_width(buffers.sparse),
            q_heads: self.dims.q_heads,
            kv_heads: self.dims.kv_heads,
            head_dim: self.dims.head_dim,
            index_heads: if buffers.sparse { self.dims.scored_heads } else { 0 },
            index_dim: self.dims.index_dim,
            rotary_dim: self.dims.rotary_dim,
            positions: self.limits.max_model_len,
            slots: self.layout.slots,
            table_width: self.layout.table_width,
            block_size: self.dims.block_size,
            cache_blocks: self.layout.cache_blocks,
            kv_dtype: self.limits.kv_dtype.code(),
            index_dtype: self.limits.index_dtype.code(),
            eps: self.shape.eps,
        };
        chain.push(format!("layer{layer}.norm_rope_insert"), Some(layer), &registry::NORM_ROPE_INSERT, [rows, 1, 1], &args);
    }

    fn score_decode(
        &self,
        chain: &mut Chain,
        layer: u32,
        buffers: &LayerBuffers,
        sequences: u32,
        query_len: u32,
        kv_len_max: u32,
    ) {
        let blocks = kv_len_max.div_ceil(self.dims.block_size).div_ceil(self.dims.shards);
        let chunks = (SCORE_WORKGROUPS.div_ceil(sequences)).min(blocks.div_ceil(SCORE_BLOCKS)).max(1);
        let args = ScoreDecodeArgs {
            index_q: pointer(self.buffers.index_q),
            index_cache: Option::map_or(buffers.index_cache, Ptr::NULL, pointer),
            block_table: pointer(self.step.block_table),
            seq_slot: pointer(self.step.seq_slot),
            seq_len: pointer(self.step.seq_len),
            score: pointer(self.buffers.score),
            sequences,
            query_len,
            heads: self.dims.scored_heads,
            dim: self.dims.index_dim,
            block_size: self.dims.block_size,
            init_blocks: self.shape.init_blocks,
            local_blocks: self.shape.local_blocks,
            score_rows: self.layout.row_capacity,
            score_width: self.dims.shard_width(self.limits.max_model_len),
            slots: self.layout.slots,
            table_width: self.layout.table_width,
            cache_blocks: self.layout.cache_blocks,
            rank: if self.dims.is_parallel() { self.limits.rank } else { 0 },
            world: self.dims.shards,
            index_dtype: self.limits.index_dtype.code(),
            reserved: 0,
        };
        let kernel = match indexer(self.dims, self.limits, query_len) {
            Indexer::Contract => &registry::SCORE_DECODE_M3,
            Indexer::General(_) => &registry::SCORE_DECODE,
        };
        chain.push(format!("layer{layer}.score"), Some(layer), kernel, [chunks, sequences, 1], &args);
    }

    fn score_prefill(&self, chain: &mut Chain, layer: u32, buffers: &LayerBuffers, rows: u32) {
        let blocks = self.limits.max_model_len.div_ceil(self.dims.block_size);
        let tiles = rows.div_ceil(SCORE_TILE_ROWS);
        let chunks = (SCORE_WORKGROUPS.div_ceil(tiles)).min(blocks.div_ceil(SCORE_BLOCKS)).max(1);
        let args = ScorePrefillArgs {
            index_q: pointer(self.buffers.index_q),
            index_cache: Option::map_or(buffers.index_cache, Ptr::NULL, pointer),
            block_table: pointer(self.step.block_table),
            row_slot: pointer(self.step.row_slot),
            row_len: pointer(self.step.row_len),
            score: pointer(self.buffers.score),
            rows,
            tile_rows: SCORE_TILE_ROWS,
            heads: self.dims.index_heads,
            dim: self.dims.index_dim,
            block_size: self.dims.block_size,
            init_blocks: self.shape.init_blocks,
            local_blocks: self.shape.local_blocks,
            score_rows: self.layout.row_capacity,
            score_width: self.dims.score_width,
            slots: self.layout.slots,
            table_width: self.layout.table_width,
            cache_blocks: self.layout.cache_blocks,
            first_head: self.dims.first_head,
            q_heads_stride: self.dims.scored_heads,
            index_dtype: self.limits.index_dtype.code(),
            reserved: 0,
        };
        chain.push(format!("layer{layer}.score"), Some(layer), &registry::SCORE_PREFILL, [chunks, tiles, 1], &args);
    }

    /// Appends the selection of a sparse layer and the emission of its page table.
    pub fn topk_emit(&self, chain: &mut Chain, layer: u32, rows: u32) {
        let args = TopkEmitArgs {
            score: pointer(self.buffers.score),
            row_slot: pointer(self.step.row_slot),
            row_len: pointer(self.step.row_len),
            block_table: pointer(self.step.block_table),
            topk_idx: pointer(self.buffers.topk_idx),
            page_table: pointer(self.buffers.page_table),
            page_len: pointer(self.buffers.page_len),
            rows,
            heads: self.dims.index_heads,
            kv_heads: self.dims.kv_heads,
            topk: self.dims.topk,
            block_size: self.dims.block_size,
            score_rows: self.layout.row_capacity,
            score_width: self.dims.score_width,
            topk_rows: self.layout.row_capacity,
            slots: self.layout.slots,
            table_width: self.layout.table_width,
            cache_blocks: self.layout.cache_blocks,
            reserved: 0,
        };
        let grid = [rows, self.dims.index_heads, 1];
        chain.push(format!("layer{layer}.topk_emit"), Some(layer), &registry::TOPK_EMIT, grid, &args);
    }

    fn topk_exchange(&self, chain: &mut Chain, layer: u32, rows: u32, peers: &PeerBuffers) {
        let [peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7] = exchange::pointers(peers);
        let args = TopkExchangeArgs {
            score: pointer(self.buffers.score),
            row_slot: pointer(self.step.row_slot),
            row_len: pointer(self.step.row_len),
            block_table: pointer(self.step.block_table),
            topk_idx: pointer(self.buffers.topk_idx),
            page_table: pointer(self.buffers.page_table),
            page_len: pointer(self.buffers.page_len),
            generations: pointer(peers.generations),
            state: pointer(self.step.state),
            peer0,
            peer1,
            peer2,
            peer3,
            peer4,
            peer5,
            peer6,
            peer7,
            rows,
            heads: self.dims.scored_heads,
            owned: self.dims.index_heads,
            kv_heads: self.dims.kv_heads,
            topk: self.dims.topk,
            block_size: self.dims.block_size,
            score_rows: self.layout.row_capacity,
            score_width: self.dims.shard_width(self.limits.max_model_len),
            topk_rows: self.layout.row_capacity,
            slots: self.layout.slots,
            table_width: self.layout.table_width,
            cache_blocks: self.layout.cache_blocks,
            peer_rows: peers.rows,
            rank: peers.rank,
            world: peers.world,
            tag_bits: TAG_BITS,
            budget_us: exchange::budget_us(self.limits),
            reserved: 0,
        };
        let grid = [rows, self.dims.scored_heads, 1];
        chain.push(format!("layer{layer}.topk_exchange"), Some(layer), &registry::TOPK_EXCHANGE, grid, &args);
    }

    fn attend_sparse(&self, chain: &mut Chain, layer: u32, buffers: &LayerBuffers, rows: u32) {
        let args = AttendSparseArgs {
            q: pointer(self.buffers.q),
            kv_cache: pointer(buffers.kv_cache),
            page_table: pointer(self.buffers.page_table),
            page_len: pointer(self.buffers.page_len),
            out: pointer(self.buffers.out),
            rows,
            q_heads: self.dims.q_heads,
            kv_heads: self.dims.kv_heads,
            head_dim: self.dims.head_dim,
            table_pages: self.dims.table_pages(),
            block_size: self.dims.block_size,
            cache_blocks: self.layout.cache_blocks,
            kv_dtype: self.limits.kv_dtype.code(),
            scale: self.softmax_scale(),
            k_scale: 1.0,
            v_scale: 1.0,
            reserved: 0,
        };
        let grid = [rows, self.dims.kv_heads, 1];
        chain.push(format!("layer{layer}.attend"), Some(layer), &registry::ATTEND_SPARSE, grid, &args);
    }

    fn attend_dense(&self, chain: &mut Chain, layer: u32, buffers: &LayerBuffers, rows: u32) {
        let args = AttendDenseArgs {
            q: pointer(self.buffers.q),
            kv_cache: pointer(buffers.kv_cache),
            row_slot: pointer(self.step.row_slot),
            row_len: pointer(self.step.row_len),
            block_table: pointer(self.step.block_table),
            out: pointer(self.buffers.out),
            rows,
            q_heads: self.dims.q_heads,
            kv_heads: self.dims.kv_heads,
            head_dim: self.dims.head_dim,
            block_size: self.dims.block_size,
            cache_blocks: self.layout.cache_blocks,
            slots: self.layout.slots,
            table_width: self.layout.table_width,
            kv_dtype: self.limits.kv_dtype.code(),
            scale: self.softmax_scale(),
        };
        let grid = [rows, self.dims.kv_heads, 1];
        chain.push(format!("layer{layer}.attend"), Some(layer), &registry::ATTEND_DENSE, grid, &args);
    }

    fn softmax_scale(&self) -> f32 {
        (f64::from(self.dims.head_dim)).powf(-0.5) as f32
    }
}

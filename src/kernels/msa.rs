//! Argument structs of the MiniMax-M3 sparse-attention ("MSA") kernels; `msa-spec` section numbers name the source of each rule.
//!
//! Layouts: an index cache is [cache_blocks, block_size, index_dim], one vector a token. A KV cache block is [K side | V side],
//! each side `block_size / 16` pages of 16 tokens; with x = 16 bytes / element size, K of a page is [kv_heads, head_dim / x,
//! 16, x] and V is [kv_heads, 16 / x, head_dim, x] (section 2.4). With P = 2 * block_size / 16 page ids a block, block b owns
//! ids P*b.., K of page j is id P*b + j and V is the same id advanced by P/2 pages.

use super::args::product;
use crate::DType;
use crate::kernel_args;

/// Tokens of a page.
pub const PAGE_TOKENS: u32 = 16;
/// Score of a block forced by `init_blocks` (section 1).
pub const INIT_SENTINEL: f32 = 1e30;
/// Score of a block forced by `local_blocks`; wins over init where both apply (section 3.1).
pub const LOCAL_SENTINEL: f32 = 1e29;

kernel_args! {
    /// `norm_rope_insert`, grid \[rows\], workgroup \[256\]: per-head Gemma RMSNorm, partial NeoX RoPE, and cache insert of one
    /// packed row [q | k | v | index_q | index_k] (sections 2.1 to 2.5).
    ///
    /// y = x * rsqrt(mean(x^2) + eps) * (1 + w) per head of q, k, index_q, index_k in f32; the first `rotary_dim` channels
    /// rotate by position = row_len - 1. v is copied. The row's cache place is block_table[row_slot][position / block_size].
    /// index_q is cast from f32 saturating; index_k is rounded to bf16 first, then cast saturating (section 2.3; f32 index
    /// caches are not rounded). Rows with row_len 0 write zero queries and insert nothing. `index_heads` 0: dense layer.
    pub struct NormRopeInsertArgs |a| {
        pointers {
            /// [rows, packed_width] f32; packed_width = (q_heads + 2 kv_heads) head_dim + (index_heads + 1 if any) index_dim.
            packed: Read, F32, product([a.rows, a.packed_width]);
            /// \[head_dim\] Gemma weight of q.
            q_norm: Read, F32, u64::from(a.head_dim);
            /// \[head_dim\] Gemma weight of k.
            k_norm: Read, F32, u64::from(a.head_dim);
            /// \[index_dim\] Gemma weight of index_q.
            index_q_norm: Read, F32, if a.index_heads > 0 { u64::from(a.index_dim) } else { 0 };
            /// \[index_dim\] Gemma weight of index_k.
            index_k_norm: Read, F32, if a.index_heads > 0 { u64::from(a.index_dim) } else { 0 };
            /// [positions, rotary_dim] cos of the first half's angles, then sin.
            cos_sin: Read, F32, product([a.positions, a.rotary_dim]);
            /// \[rows\] block-table row.
            row_slot: Read, I32, u64::from(a.rows);
            /// \[rows\] causal length.
            row_len: Read, I32, u64::from(a.rows);
            /// [slots, table_width] attend group's block table.
            block_table: Read, I32, product([a.slots, a.table_width]);
            /// [rows, q_heads, head_dim].
            q: Write, F32, product([a.rows, a.q_heads, a.head_dim]);
            /// [rows, index_heads, index_dim] in `index_dtype`.
            index_q: Write, (DType::from_code(a.index_dtype)), product([a.rows, a.index_heads, a.index_dim]);
            /// Paged KV cache in `kv_dtype`.
            kv_cache: ReadWrite, (DType::from_code(a.kv_dtype)), product([a.cache_blocks, 2, a.block_size, a.kv_heads, a.head_dim]);
            /// [cache_blocks, block_size, index_dim] in `index_dtype`.
            index_cache: ReadWrite, (DType::from_code(a.index_dtype)), if a.index_heads > 0 { product([a.cache_blocks, a.block_size, a.index_dim]) } else { 0 };
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Channels of a packed row.
            packed_width: u32;
            /// Query heads.
            q_heads: u32;
            /// KV heads.
            kv_heads: u32;
            /// Channels of a head.
            head_dim: u32;
            /// Index heads; 0 on a dense layer.
            index_heads: u32;
            /// Channels of an index head.
            index_dim: u32;
            /// Rotating channels.
            rotary_dim: u32;
            /// Positions of the cos/sin table.
            positions: u32;
            /// Rows of the block table.
            slots: u32;
            /// Columns of the block table.
            table_width: u32;
            /// Tokens of a block.
            block_size: u32;
            /// Cache blocks there are.
            cache_blocks: u32;
            /// F32, Bf16 or F8E4M3.
            kv_dtype: u32;
            /// F32, Bf16 or F8E4M3.
            index_dtype: u32;
            /// Epsilon of the norms.
            eps: f32;
        }
    }
}

kernel_args! {
    /// `score_decode` (any shape) and `score_decode_m3` (fp8, index_dim 128, block_size 128, heads * query_len <= 16): the
    /// largest dot product of each visible block for uniform decode rows (section 3), grid [chunks, sequences], workgroup
    /// \[256\].
    ///
    /// Chunk c of a sequence takes local blocks [c * per, (c+1) * per), per = ceil(live local blocks / chunks). Local block
    /// `loc` is global block loc * world + rank. Blocks past the sequence's last visible one are left untouched.
    pub struct ScoreDecodeArgs |a| {
        pointers {
            /// [sequences * query_len, heads, dim] in `index_dtype`.
            index_q: Read, (DType::from_code(a.index_dtype)), product([a.sequences, a.query_len, a.heads, a.dim]);
            /// [cache_blocks, block_size, dim] in `index_dtype`.
            index_cache: Read, (DType::from_code(a.index_dtype)), product([a.cache_blocks, a.block_size, a.dim]);
            /// [slots, table_width] indexer group's block table.
            block_table: Read, I32, product([a.slots, a.table_width]);
            /// \[sequences\] block-table row.
            seq_slot: Read, I32, u64::from(a.sequences);
            /// \[sequences\] KV length, this step's tokens included; 0 for pads.
            seq_len: Read, I32, u64::from(a.sequences);
            /// [heads, score_rows, score_width] f32; rows n of this step at the front of each head's plane.
            score: ReadWrite, F32, product([a.heads, a.score_rows, a.score_width]);
        }
        scalars {
            /// Sequences.
            sequences: u32;
            /// Rows a sequence.
            query_len: u32;
            /// Index heads.
            heads: u32;
            /// Channels of an index head.
            dim: u32;
            /// Tokens of a block.
            block_size: u32;
            /// Blocks forced at the start.
            init_blocks: u32;
            /// Blocks forced at the end.
            local_blocks: u32;
            /// Rows of a head's plane of `score`.
            score_rows: u32;
            /// Columns of `score`.
            score_width: u32;
            /// Rows of the block table.
            slots: u32;
            /// Columns of the block table.
            table_width: u32;
            /// Cache blocks there are.
            cache_blocks: u32;
            /// This rank.
            rank: u32;
            /// World size of the indexer.
            world: u32;
            /// F32, Bf16 or F8E4M3.
            index_dtype: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

kernel_args! {
    /// `score_prefill`: the same function for ragged rows (section 3.3), grid [chunks, ceil(rows / tile_rows)], workgroup
    /// \[256\]. A tile may cross sequences. Within a tile, blocks visible to a longer row of the same sequence but not to this
    /// one get minus infinity; the rest is left untouched. World is always 1.
    pub struct ScorePrefillArgs |a| {
        pointers {
            /// [rows, q_heads_stride, dim] in `index_dtype`; heads `first_head`.. are read.
            index_q: Read, (DType::from_code(a.index_dtype)), product([a.rows, a.q_heads_stride, a.dim]);
            /// [cache_blocks, block_size, dim] in `index_dtype`.
            index_cache: Read, (DType::from_code(a.index_dtype)), product([a.cache_blocks, a.block_size, a.dim]);
            /// [slots, table_width] indexer group's block table.
            block_table: Read, I32, product([a.slots, a.table_width]);
            /// \[rows\] block-table row.
            row_slot: Read, I32, u64::from(a.rows);
            /// \[rows\] causal length; 0 for pads.
            row_len: Read, I32, u64::from(a.rows);
            /// [heads, score_rows, score_width] f32.
            score: ReadWrite, F32, product([a.heads, a.score_rows, a.score_width]);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Rows of a tile.
            tile_rows: u32;
            /// Index heads.
            heads: u32;
            /// Channels of an index head.
            dim: u32;
            /// Tokens of a block.
            block_size: u32;
            /// Blocks forced at the start.
            init_blocks: u32;
            /// Blocks forced at the end.
            local_blocks: u32;
            /// Rows of a head's plane of `score`.
            score_rows: u32;
            /// Columns of `score`.
            score_width: u32;
            /// Rows of the block table.
            slots: u32;
            /// Columns of the block table.
            table_width: u32;
            /// Cache blocks there are.
            cache_blocks: u32;
            /// First head of `index_q` to read (context parallel prefill scores the owned heads only).
            first_head: u32;
            /// Heads of a row of `index_q`.
            q_heads_stride: u32;
            /// F32, Bf16 or F8E4M3.
            index_dtype: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

kernel_args! {
    /// `topk_emit`: the `topk` best blocks of each (row, head) and the page table the attend reads (section 4), grid [rows,
    /// heads], workgroup \[256\]. One kernel for uniform and ragged rows: both come as causal lengths.
    ///
    /// Order: descending score, ties to the higher block id, NaN as minus infinity, +0 above -0. Slots past the candidates
    /// are -1. KV head k = h * g + i (g = kv_heads / heads) of row n emits table row n * kv_heads + k: full blocks first in
    /// score order, then the self block; ids base + j * kv_heads with base = page_ids_a_block * block * kv_heads + k; the
    /// rest 0. Rows with length 0 emit zeros and length 0 and read no table.
    pub struct TopkEmitArgs |a| {
        pointers {
            /// [heads, score_rows, score_width].
            score: Read, F32, product([a.heads, a.score_rows, a.score_width]);
            /// \[rows\] block-table row.
            row_slot: Read, I32, u64::from(a.rows);
            /// \[rows\] causal length.
            row_len: Read, I32, u64::from(a.rows);
            /// [slots, table_width] attend group's block table (cache block ids, not yet doubled).
            block_table: Read, I32, product([a.slots, a.table_width]);
            /// [heads, topk_rows, topk] selected block ids; the rows of this step at the front of each head's plane.
            topk_idx: ReadWrite, I32, product([a.heads, a.topk_rows, a.topk]);
            /// [rows * kv_heads, topk * block_size / 16] page ids.
            page_table: Write, I32, product([a.rows, a.kv_heads, a.topk, a.block_size / PAGE_TOKENS]);
            /// [rows * kv_heads] tokens the page table describes.
            page_len: Write, I32, product([a.rows, a.kv_heads]);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Index heads.
            heads: u32;
            /// KV heads, a multiple of `heads`.
            kv_heads: u32;
            /// Blocks to select.
            topk: u32;
            /// Tokens of a block.
            block_size: u32;
            /// Rows of a head's plane of `score`.
            score_rows: u32;
            /// Columns of `score`.
            score_width: u32;
            /// Rows of a head's plane of `topk_idx`.
            topk_rows: u32;
            /// Rows of the block table.
            slots: u32;
            /// Columns of the block table.
            table_width: u32;
            /// Cache blocks there are.
            cache_blocks: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

kernel_args! {
    /// `attend_sparse`: softmax attention of each (row, KV head) over its emitted page table (section 6), grid [rows,
    /// kv_heads], workgroup \[256\]. Query heads [k * g, (k+1) * g), g = q_heads / kv_heads, share KV head k. Length 0 gives
    /// zeros. Nothing past the length is read, so poison in unused pages cannot leak.
    pub struct AttendSparseArgs |a| {
        pointers {
            /// [rows, q_heads, head_dim].
            q: Read, F32, product([a.rows, a.q_heads, a.head_dim]);
            /// Paged KV cache in `kv_dtype`.
            kv_cache: Read, (DType::from_code(a.kv_dtype)), product([a.cache_blocks, 2, a.block_size, a.kv_heads, a.head_dim]);
            /// [rows * kv_heads, table_pages] page ids.
            page_table: Read, I32, product([a.rows, a.kv_heads, a.table_pages]);
            /// [rows * kv_heads] tokens to attend to.
            page_len: Read, I32, product([a.rows, a.kv_heads]);
            /// [rows, q_heads, head_dim].
            out: Write, F32, product([a.rows, a.q_heads, a.head_dim]);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Query heads.
            q_heads: u32;
            /// KV heads.
            kv_heads: u32;
            /// Channels of a head.
            head_dim: u32;
            /// Page ids of a row.
            table_pages: u32;
            /// Tokens of a block.
            block_size: u32;
            /// Cache blocks there are.
            cache_blocks: u32;
            /// F32, Bf16 or F8E4M3.
            kv_dtype: u32;
            /// Softmax scale, head_dim^-0.5.
            scale: f32;
            /// Scale of a stored K (1 unless the cache is scaled).
            k_scale: f32;
            /// Scale of a stored V.
            v_scale: f32;
            /// Zero.
            reserved: u32;
        }
    }
}

kernel_args! {
    /// `attend_dense`: causal softmax attention of each (row, KV head) over all `row_len` tokens of its sequence, through the
    /// block table, grid [rows, kv_heads], workgroup \[256\].
    pub struct AttendDenseArgs |a| {
        pointers {
            /// [rows, q_heads, head_dim].
            q: Read, F32, product([a.rows, a.q_heads, a.head_dim]);
            /// Paged KV cache in `kv_dtype`.
            kv_cache: Read, (DType::from_code(a.kv_dtype)), product([a.cache_blocks, 2, a.block_size, a.kv_heads, a.head_dim]);
            /// \[rows\] block-table row.
            row_slot: Read, I32, u64::from(a.rows);
            /// \[rows\] causal length; 0 gives zeros.
            row_len: Read, I32, u64::from(a.rows);
            /// [slots, table_width] attend group's block table.
            block_table: Read, I32, product([a.slots, a.table_width]);
            /// [rows, q_heads, head_dim].
            out: Write, F32, product([a.rows, a.q_heads, a.head_dim]);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Query heads.
            q_heads: u32;
            /// KV heads.
            kv_heads: u32;
            /// Channels of a head.
            head_dim: u32;
            /// Tokens of a block.
            block_size: u32;
            /// Cache blocks there are.
            cache_blocks: u32;
            /// Rows of the block table.
            slots: u32;
            /// Columns of the block table.
            table_width: u32;
            /// F32, Bf16 or F8E4M3.
            kv_dtype: u32;
            /// Softmax scale, head_dim^-0.5.
            scale: f32;
        }
    }
}

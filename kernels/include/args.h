// Argument structs of the kernels and codes of element types. Generated from src/kernels by
// `CAPSTAN_BLESS=1 cargo test --lib header`; do not edit.
#pragma once

#include "platform.h"

#define DTYPE_F32 0u
#define DTYPE_BF16 1u
#define DTYPE_FP8_E4M3 2u
#define DTYPE_I32 3u
#define DTYPE_U32 4u
#define DTYPE_U64 5u
#define DTYPE_U8 6u

struct IngestArgs {
    // [ring_slots, slot_bytes] pinned metadata ring.
    const unsigned char* ring;
    // [64 B] step state.
    unsigned char* state;
    // [sequences] block-table row of each sequence; 0 for pads.
    int* seq_slot;
    // [sequences] KV length, this step's tokens included; 0 for pads.
    int* seq_len;
    // [sequences + 1] prefix sums of query lengths; the tail repeats the total.
    int* cu_seqlens;
    // [sequences, 48 B] the sequence records as sent (sampling parameters); zero for pads.
    unsigned char* records;
    // [rows] sequence index of each row (row n of uniform decode: n / query_len); 0 for pads.
    int* row_seq;
    // [rows] block-table row; 0 for pads.
    int* row_slot;
    // [rows] causal length max(kv_len - query_len + t + 1, 0); 0 for pads. The row's position is this - 1.
    int* row_len;
    // [rows] token ids; 0 for pads.
    int* tokens;
    // [slots] last sampled token of each block-table row.
    const int* last_token;
    // [slots, table_width] cache block of each block of each sequence.
    int* block_table;
    // Sequences this launch is shaped for.
    unsigned int sequences;
    // Rows this launch is shaped for.
    unsigned int rows;
    // Rows a sequence in a uniform step; 0: ragged.
    unsigned int query_len;
    // Slots of the ring.
    unsigned int ring_slots;
    // Bytes of a slot.
    unsigned int slot_bytes;
    // Sequences a slot has room for.
    unsigned int sequence_capacity;
    // Rows a slot has room for.
    unsigned int row_capacity;
    // Updates a slot has room for.
    unsigned int update_capacity;
    // Rows of the block table.
    unsigned int slots;
    // Columns of the block table.
    unsigned int table_width;
    // Cache blocks there are.
    unsigned int cache_blocks;
    // Polls before `ingest` gives up on a slot.
    unsigned int poll_limit;
};
static_assert(sizeof(IngestArgs) == 144, "IngestArgs");
static_assert(OFFSET_OF(IngestArgs, ring) == 0, "IngestArgs.ring");
static_assert(OFFSET_OF(IngestArgs, state) == 8, "IngestArgs.state");
static_assert(OFFSET_OF(IngestArgs, seq_slot) == 16, "IngestArgs.seq_slot");
static_assert(OFFSET_OF(IngestArgs, seq_len) == 24, "IngestArgs.seq_len");
static_assert(OFFSET_OF(IngestArgs, cu_seqlens) == 32, "IngestArgs.cu_seqlens");
static_assert(OFFSET_OF(IngestArgs, records) == 40, "IngestArgs.records");
static_assert(OFFSET_OF(IngestArgs, row_seq) == 48, "IngestArgs.row_seq");
static_assert(OFFSET_OF(IngestArgs, row_slot) == 56, "IngestArgs.row_slot");
static_assert(OFFSET_OF(IngestArgs, row_len) == 64, "IngestArgs.row_len");
static_assert(OFFSET_OF(IngestArgs, tokens) == 72, "IngestArgs.tokens");
static_assert(OFFSET_OF(IngestArgs, last_token) == 80, "IngestArgs.last_token");
static_assert(OFFSET_OF(IngestArgs, block_table) == 88, "IngestArgs.block_table");
static_assert(OFFSET_OF(IngestArgs, sequences) == 96, "IngestArgs.sequences");
static_assert(OFFSET_OF(IngestArgs, rows) == 100, "IngestArgs.rows");
static_assert(OFFSET_OF(IngestArgs, query_len) == 104, "IngestArgs.query_len");
static_assert(OFFSET_OF(IngestArgs, ring_slots) == 108, "IngestArgs.ring_slots");
static_assert(OFFSET_OF(IngestArgs, slot_bytes) == 112, "IngestArgs.slot_bytes");
static_assert(OFFSET_OF(IngestArgs, sequence_capacity) == 116, "IngestArgs.sequence_capacity");
static_assert(OFFSET_OF(IngestArgs, row_capacity) == 120, "IngestArgs.row_capacity");
static_assert(OFFSET_OF(IngestArgs, update_capacity) == 124, "IngestArgs.update_capacity");
static_assert(OFFSET_OF(IngestArgs, slots) == 128, "IngestArgs.slots");
static_assert(OFFSET_OF(IngestArgs, table_width) == 132, "IngestArgs.table_width");
static_assert(OFFSET_OF(IngestArgs, cache_blocks) == 136, "IngestArgs.cache_blocks");
static_assert(OFFSET_OF(IngestArgs, poll_limit) == 140, "IngestArgs.poll_limit");

struct EmbedArgs {
    // [rows] token ids.
    const int* tokens;
    // [rows] causal lengths.
    const int* row_len;
    // [vocab, width] in `table_dtype`.
    const void* table;
    // [rows, width].
    float* out;
    // Rows.
    unsigned int rows;
    // Channels of a row.
    unsigned int width;
    // Rows of the table; a token past it gives zeros and is an error the host has already refused.
    unsigned int vocab;
    // [`DType`](crate::DType) code: F32 or Bf16.
    unsigned int table_dtype;
};
static_assert(sizeof(EmbedArgs) == 48, "EmbedArgs");
static_assert(OFFSET_OF(EmbedArgs, tokens) == 0, "EmbedArgs.tokens");
static_assert(OFFSET_OF(EmbedArgs, row_len) == 8, "EmbedArgs.row_len");
static_assert(OFFSET_OF(EmbedArgs, table) == 16, "EmbedArgs.table");
static_assert(OFFSET_OF(EmbedArgs, out) == 24, "EmbedArgs.out");
static_assert(OFFSET_OF(EmbedArgs, rows) == 32, "EmbedArgs.rows");
static_assert(OFFSET_OF(EmbedArgs, width) == 36, "EmbedArgs.width");
static_assert(OFFSET_OF(EmbedArgs, vocab) == 40, "EmbedArgs.vocab");
static_assert(OFFSET_OF(EmbedArgs, table_dtype) == 44, "EmbedArgs.table_dtype");

struct SampleArgs {
    // [rows, vocab] logits; row i belongs to step row `rows_index[i]`, or i where that pointer is null.
    const float* logits;
    // [rows] step row of each logits row, or null (extent 0) for the identity.
    const int* rows_index;
    // [step_rows] sequence of each step row.
    const int* row_seq;
    // [step_rows] block-table row of each step row.
    const int* row_slot;
    // [step_rows] causal lengths; 0 draws nothing and writes token 0.
    const int* row_len;
    // [sequences, 48 B] sequence records.
    const unsigned char* records;
    // [rows] sampled tokens.
    int* out;
    // [slots] last sampled token of each block-table row.
    int* last_token;
    // Logits rows.
    unsigned int rows;
    // Vocabulary.
    unsigned int vocab;
    // Rows of the step.
    unsigned int step_rows;
    // Sequences of the step.
    unsigned int sequences;
    // Rows of the block table.
    unsigned int slots;
    // 1 if `rows_index` is given.
    unsigned int indexed;
};
static_assert(sizeof(SampleArgs) == 88, "SampleArgs");
static_assert(OFFSET_OF(SampleArgs, logits) == 0, "SampleArgs.logits");
static_assert(OFFSET_OF(SampleArgs, rows_index) == 8, "SampleArgs.rows_index");
static_assert(OFFSET_OF(SampleArgs, row_seq) == 16, "SampleArgs.row_seq");
static_assert(OFFSET_OF(SampleArgs, row_slot) == 24, "SampleArgs.row_slot");
static_assert(OFFSET_OF(SampleArgs, row_len) == 32, "SampleArgs.row_len");
static_assert(OFFSET_OF(SampleArgs, records) == 40, "SampleArgs.records");
static_assert(OFFSET_OF(SampleArgs, out) == 48, "SampleArgs.out");
static_assert(OFFSET_OF(SampleArgs, last_token) == 56, "SampleArgs.last_token");
static_assert(OFFSET_OF(SampleArgs, rows) == 64, "SampleArgs.rows");
static_assert(OFFSET_OF(SampleArgs, vocab) == 68, "SampleArgs.vocab");
static_assert(OFFSET_OF(SampleArgs, step_rows) == 72, "SampleArgs.step_rows");
static_assert(OFFSET_OF(SampleArgs, sequences) == 76, "SampleArgs.sequences");
static_assert(OFFSET_OF(SampleArgs, slots) == 80, "SampleArgs.slots");
static_assert(OFFSET_OF(SampleArgs, indexed) == 84, "SampleArgs.indexed");

struct PublishArgs {
    // [64 B] step state.
    const unsigned char* state;
    // [rows] sampled tokens.
    const int* tokens;
    // [ring_slots, result_bytes] pinned result ring.
    unsigned char* results;
    // Rows of `tokens`.
    unsigned int rows;
    // Slots of the ring.
    unsigned int ring_slots;
    // Bytes of a result slot.
    unsigned int result_bytes;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(PublishArgs) == 40, "PublishArgs");
static_assert(OFFSET_OF(PublishArgs, state) == 0, "PublishArgs.state");
static_assert(OFFSET_OF(PublishArgs, tokens) == 8, "PublishArgs.tokens");
static_assert(OFFSET_OF(PublishArgs, results) == 16, "PublishArgs.results");
static_assert(OFFSET_OF(PublishArgs, rows) == 24, "PublishArgs.rows");
static_assert(OFFSET_OF(PublishArgs, ring_slots) == 28, "PublishArgs.ring_slots");
static_assert(OFFSET_OF(PublishArgs, result_bytes) == 32, "PublishArgs.result_bytes");
static_assert(OFFSET_OF(PublishArgs, reserved) == 36, "PublishArgs.reserved");

struct NormRopeInsertArgs {
    // [rows, packed_width] f32; packed_width = (q_heads + 2 kv_heads) head_dim + (index_heads + 1 if any) index_dim.
    const float* packed;
    // [head_dim] Gemma weight of q.
    const float* q_norm;
    // [head_dim] Gemma weight of k.
    const float* k_norm;
    // [index_dim] Gemma weight of index_q.
    const float* index_q_norm;
    // [index_dim] Gemma weight of index_k.
    const float* index_k_norm;
    // [positions, rotary_dim] cos of the first half's angles, then sin.
    const float* cos_sin;
    // [rows] block-table row.
    const int* row_slot;
    // [rows] causal length.
    const int* row_len;
    // [slots, table_width] attend group's block table.
    const int* block_table;
    // [rows, q_heads, head_dim].
    float* q;
    // [rows, index_heads, index_dim] in `index_dtype`.
    void* index_q;
    // Paged KV cache in `kv_dtype`.
    void* kv_cache;
    // [cache_blocks, block_size, index_dim] in `index_dtype`.
    void* index_cache;
    // Rows.
    unsigned int rows;
    // Channels of a packed row.
    unsigned int packed_width;
    // Query heads.
    unsigned int q_heads;
    // KV heads.
    unsigned int kv_heads;
    // Channels of a head.
    unsigned int head_dim;
    // Index heads; 0 on a dense layer.
    unsigned int index_heads;
    // Channels of an index head.
    unsigned int index_dim;
    // Rotating channels.
    unsigned int rotary_dim;
    // Positions of the cos/sin table.
    unsigned int positions;
    // Rows of the block table.
    unsigned int slots;
    // Columns of the block table.
    unsigned int table_width;
    // Tokens of a block.
    unsigned int block_size;
    // Cache blocks there are.
    unsigned int cache_blocks;
    // F32, Bf16 or F8E4M3.
    unsigned int kv_dtype;
    // F32, Bf16 or F8E4M3.
    unsigned int index_dtype;
    // Epsilon of the norms.
    float eps;
};
static_assert(sizeof(NormRopeInsertArgs) == 168, "NormRopeInsertArgs");
static_assert(OFFSET_OF(NormRopeInsertArgs, packed) == 0, "NormRopeInsertArgs.packed");
static_assert(OFFSET_OF(NormRopeInsertArgs, q_norm) == 8, "NormRopeInsertArgs.q_norm");
static_assert(OFFSET_OF(NormRopeInsertArgs, k_norm) == 16, "NormRopeInsertArgs.k_norm");
static_assert(OFFSET_OF(NormRopeInsertArgs, index_q_norm) == 24, "NormRopeInsertArgs.index_q_norm");
static_assert(OFFSET_OF(NormRopeInsertArgs, index_k_norm) == 32, "NormRopeInsertArgs.index_k_norm");
static_assert(OFFSET_OF(NormRopeInsertArgs, cos_sin) == 40, "NormRopeInsertArgs.cos_sin");
static_assert(OFFSET_OF(NormRopeInsertArgs, row_slot) == 48, "NormRopeInsertArgs.row_slot");
static_assert(OFFSET_OF(NormRopeInsertArgs, row_len) == 56, "NormRopeInsertArgs.row_len");
static_assert(OFFSET_OF(NormRopeInsertArgs, block_table) == 64, "NormRopeInsertArgs.block_table");
static_assert(OFFSET_OF(NormRopeInsertArgs, q) == 72, "NormRopeInsertArgs.q");
static_assert(OFFSET_OF(NormRopeInsertArgs, index_q) == 80, "NormRopeInsertArgs.index_q");
static_assert(OFFSET_OF(NormRopeInsertArgs, kv_cache) == 88, "NormRopeInsertArgs.kv_cache");
static_assert(OFFSET_OF(NormRopeInsertArgs, index_cache) == 96, "NormRopeInsertArgs.index_cache");
static_assert(OFFSET_OF(NormRopeInsertArgs, rows) == 104, "NormRopeInsertArgs.rows");
static_assert(OFFSET_OF(NormRopeInsertArgs, packed_width) == 108, "NormRopeInsertArgs.packed_width");
static_assert(OFFSET_OF(NormRopeInsertArgs, q_heads) == 112, "NormRopeInsertArgs.q_heads");
static_assert(OFFSET_OF(NormRopeInsertArgs, kv_heads) == 116, "NormRopeInsertArgs.kv_heads");
static_assert(OFFSET_OF(NormRopeInsertArgs, head_dim) == 120, "NormRopeInsertArgs.head_dim");
static_assert(OFFSET_OF(NormRopeInsertArgs, index_heads) == 124, "NormRopeInsertArgs.index_heads");
static_assert(OFFSET_OF(NormRopeInsertArgs, index_dim) == 128, "NormRopeInsertArgs.index_dim");
static_assert(OFFSET_OF(NormRopeInsertArgs, rotary_dim) == 132, "NormRopeInsertArgs.rotary_dim");
static_assert(OFFSET_OF(NormRopeInsertArgs, positions) == 136, "NormRopeInsertArgs.positions");
static_assert(OFFSET_OF(NormRopeInsertArgs, slots) == 140, "NormRopeInsertArgs.slots");
static_assert(OFFSET_OF(NormRopeInsertArgs, table_width) == 144, "NormRopeInsertArgs.table_width");
static_assert(OFFSET_OF(NormRopeInsertArgs, block_size) == 148, "NormRopeInsertArgs.block_size");
static_assert(OFFSET_OF(NormRopeInsertArgs, cache_blocks) == 152, "NormRopeInsertArgs.cache_blocks");
static_assert(OFFSET_OF(NormRopeInsertArgs, kv_dtype) == 156, "NormRopeInsertArgs.kv_dtype");
static_assert(OFFSET_OF(NormRopeInsertArgs, index_dtype) == 160, "NormRopeInsertArgs.index_dtype");
static_assert(OFFSET_OF(NormRopeInsertArgs, eps) == 164, "NormRopeInsertArgs.eps");

struct ScoreDecodeArgs {
    // [sequences * query_len, heads, dim] in `index_dtype`.
    const void* index_q;
    // [cache_blocks, block_size, dim] in `index_dtype`.
    const void* index_cache;
    // [slots, table_width] indexer group's block table.
    const int* block_table;
    // [sequences] block-table row.
    const int* seq_slot;
    // [sequences] KV length, this step's tokens included; 0 for pads.
    const int* seq_len;
    // [heads, score_rows, score_width] f32; rows n of this step at the front of each head's plane.
    float* score;
    // Sequences.
    unsigned int sequences;
    // Rows a sequence.
    unsigned int query_len;
    // Index heads.
    unsigned int heads;
    // Channels of an index head.
    unsigned int dim;
    // Tokens of a block.
    unsigned int block_size;
    // Blocks forced at the start.
    unsigned int init_blocks;
    // Blocks forced at the end.
    unsigned int local_blocks;
    // Rows of a head's plane of `score`.
    unsigned int score_rows;
    // Columns of `score`.
    unsigned int score_width;
    // Rows of the block table.
    unsigned int slots;
    // Columns of the block table.
    unsigned int table_width;
    // Cache blocks there are.
    unsigned int cache_blocks;
    // This rank.
    unsigned int rank;
    // World size of the indexer.
    unsigned int world;
    // F32, Bf16 or F8E4M3.
    unsigned int index_dtype;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(ScoreDecodeArgs) == 112, "ScoreDecodeArgs");
static_assert(OFFSET_OF(ScoreDecodeArgs, index_q) == 0, "ScoreDecodeArgs.index_q");
static_assert(OFFSET_OF(ScoreDecodeArgs, index_cache) == 8, "ScoreDecodeArgs.index_cache");
static_assert(OFFSET_OF(ScoreDecodeArgs, block_table) == 16, "ScoreDecodeArgs.block_table");
static_assert(OFFSET_OF(ScoreDecodeArgs, seq_slot) == 24, "ScoreDecodeArgs.seq_slot");
static_assert(OFFSET_OF(ScoreDecodeArgs, seq_len) == 32, "ScoreDecodeArgs.seq_len");
static_assert(OFFSET_OF(ScoreDecodeArgs, score) == 40, "ScoreDecodeArgs.score");
static_assert(OFFSET_OF(ScoreDecodeArgs, sequences) == 48, "ScoreDecodeArgs.sequences");
static_assert(OFFSET_OF(ScoreDecodeArgs, query_len) == 52, "ScoreDecodeArgs.query_len");
static_assert(OFFSET_OF(ScoreDecodeArgs, heads) == 56, "ScoreDecodeArgs.heads");
static_assert(OFFSET_OF(ScoreDecodeArgs, dim) == 60, "ScoreDecodeArgs.dim");
static_assert(OFFSET_OF(ScoreDecodeArgs, block_size) == 64, "ScoreDecodeArgs.block_size");
static_assert(OFFSET_OF(ScoreDecodeArgs, init_blocks) == 68, "ScoreDecodeArgs.init_blocks");
static_assert(OFFSET_OF(ScoreDecodeArgs, local_blocks) == 72, "ScoreDecodeArgs.local_blocks");
static_assert(OFFSET_OF(ScoreDecodeArgs, score_rows) == 76, "ScoreDecodeArgs.score_rows");
static_assert(OFFSET_OF(ScoreDecodeArgs, score_width) == 80, "ScoreDecodeArgs.score_width");
static_assert(OFFSET_OF(ScoreDecodeArgs, slots) == 84, "ScoreDecodeArgs.slots");
static_assert(OFFSET_OF(ScoreDecodeArgs, table_width) == 88, "ScoreDecodeArgs.table_width");
static_assert(OFFSET_OF(ScoreDecodeArgs, cache_blocks) == 92, "ScoreDecodeArgs.cache_blocks");
static_assert(OFFSET_OF(ScoreDecodeArgs, rank) == 96, "ScoreDecodeArgs.rank");
static_assert(OFFSET_OF(ScoreDecodeArgs, world) == 100, "ScoreDecodeArgs.world");
static_assert(OFFSET_OF(ScoreDecodeArgs, index_dtype) == 104, "ScoreDecodeArgs.index_dtype");
static_assert(OFFSET_OF(ScoreDecodeArgs, reserved) == 108, "ScoreDecodeArgs.reserved");

struct ScorePrefillArgs {
    // [rows, q_heads_stride, dim] in `index_dtype`; heads `first_head`.. are read.
    const void* index_q;
    // [cache_blocks, block_size, dim] in `index_dtype`.
    const void* index_cache;
    // [slots, table_width] indexer group's block table.
    const int* block_table;
    // [rows] block-table row.
    const int* row_slot;
    // [rows] causal length; 0 for pads.
    const int* row_len;
    // [heads, score_rows, score_width] f32.
    float* score;
    // Rows.
    unsigned int rows;
    // Rows of a tile.
    unsigned int tile_rows;
    // Index heads.
    unsigned int heads;
    // Channels of an index head.
    unsigned int dim;
    // Tokens of a block.
    unsigned int block_size;
    // Blocks forced at the start.
    unsigned int init_blocks;
    // Blocks forced at the end.
    unsigned int local_blocks;
    // Rows of a head's plane of `score`.
    unsigned int score_rows;
    // Columns of `score`.
    unsigned int score_width;
    // Rows of the block table.
    unsigned int slots;
    // Columns of the block table.
    unsigned int table_width;
    // Cache blocks there are.
    unsigned int cache_blocks;
    // First head of `index_q` to read (context parallel prefill scores the owned heads only).
    unsigned int first_head;
    // Heads of a row of `index_q`.
    unsigned int q_heads_stride;
    // F32, Bf16 or F8E4M3.
    unsigned int index_dtype;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(ScorePrefillArgs) == 112, "ScorePrefillArgs");
static_assert(OFFSET_OF(ScorePrefillArgs, index_q) == 0, "ScorePrefillArgs.index_q");
static_assert(OFFSET_OF(ScorePrefillArgs, index_cache) == 8, "ScorePrefillArgs.index_cache");
static_assert(OFFSET_OF(ScorePrefillArgs, block_table) == 16, "ScorePrefillArgs.block_table");
static_assert(OFFSET_OF(ScorePrefillArgs, row_slot) == 24, "ScorePrefillArgs.row_slot");
static_assert(OFFSET_OF(ScorePrefillArgs, row_len) == 32, "ScorePrefillArgs.row_len");
static_assert(OFFSET_OF(ScorePrefillArgs, score) == 40, "ScorePrefillArgs.score");
static_assert(OFFSET_OF(ScorePrefillArgs, rows) == 48, "ScorePrefillArgs.rows");
static_assert(OFFSET_OF(ScorePrefillArgs, tile_rows) == 52, "ScorePrefillArgs.tile_rows");
static_assert(OFFSET_OF(ScorePrefillArgs, heads) == 56, "ScorePrefillArgs.heads");
static_assert(OFFSET_OF(ScorePrefillArgs, dim) == 60, "ScorePrefillArgs.dim");
static_assert(OFFSET_OF(ScorePrefillArgs, block_size) == 64, "ScorePrefillArgs.block_size");
static_assert(OFFSET_OF(ScorePrefillArgs, init_blocks) == 68, "ScorePrefillArgs.init_blocks");
static_assert(OFFSET_OF(ScorePrefillArgs, local_blocks) == 72, "ScorePrefillArgs.local_blocks");
static_assert(OFFSET_OF(ScorePrefillArgs, score_rows) == 76, "ScorePrefillArgs.score_rows");
static_assert(OFFSET_OF(ScorePrefillArgs, score_width) == 80, "ScorePrefillArgs.score_width");
static_assert(OFFSET_OF(ScorePrefillArgs, slots) == 84, "ScorePrefillArgs.slots");
static_assert(OFFSET_OF(ScorePrefillArgs, table_width) == 88, "ScorePrefillArgs.table_width");
static_assert(OFFSET_OF(ScorePrefillArgs, cache_blocks) == 92, "ScorePrefillArgs.cache_blocks");
static_assert(OFFSET_OF(ScorePrefillArgs, first_head) == 96, "ScorePrefillArgs.first_head");
static_assert(OFFSET_OF(ScorePrefillArgs, q_heads_stride) == 100, "ScorePrefillArgs.q_heads_stride");
static_assert(OFFSET_OF(ScorePrefillArgs, index_dtype) == 104, "ScorePrefillArgs.index_dtype");
static_assert(OFFSET_OF(ScorePrefillArgs, reserved) == 108, "ScorePrefillArgs.reserved");

struct TopkEmitArgs {
    // [heads, score_rows, score_width].
    const float* score;
    // [rows] block-table row.
    const int* row_slot;
    // [rows] causal length.
    const int* row_len;
    // [slots, table_width] attend group's block table (cache block ids, not yet doubled).
    const int* block_table;
    // [heads, topk_rows, topk] selected block ids; the rows of this step at the front of each head's plane.
    int* topk_idx;
    // [rows * kv_heads, topk * block_size / 16] page ids.
    int* page_table;
    // [rows * kv_heads] tokens the page table describes.
    int* page_len;
    // Rows.
    unsigned int rows;
    // Index heads.
    unsigned int heads;
    // KV heads, a multiple of `heads`.
    unsigned int kv_heads;
    // Blocks to select.
    unsigned int topk;
    // Tokens of a block.
    unsigned int block_size;
    // Rows of a head's plane of `score`.
    unsigned int score_rows;
    // Columns of `score`.
    unsigned int score_width;
    // Rows of a head's plane of `topk_idx`.
    unsigned int topk_rows;
    // Rows of the block table.
    unsigned int slots;
    // Columns of the block table.
    unsigned int table_width;
    // Cache blocks there are.
    unsigned int cache_blocks;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(TopkEmitArgs) == 104, "TopkEmitArgs");
static_assert(OFFSET_OF(TopkEmitArgs, score) == 0, "TopkEmitArgs.score");
static_assert(OFFSET_OF(TopkEmitArgs, row_slot) == 8, "TopkEmitArgs.row_slot");
static_assert(OFFSET_OF(TopkEmitArgs, row_len) == 16, "TopkEmitArgs.row_len");
static_assert(OFFSET_OF(TopkEmitArgs, block_table) == 24, "TopkEmitArgs.block_table");
static_assert(OFFSET_OF(TopkEmitArgs, topk_idx) == 32, "TopkEmitArgs.topk_idx");
static_assert(OFFSET_OF(TopkEmitArgs, page_table) == 40, "TopkEmitArgs.page_table");
static_assert(OFFSET_OF(TopkEmitArgs, page_len) == 48, "TopkEmitArgs.page_len");
static_assert(OFFSET_OF(TopkEmitArgs, rows) == 56, "TopkEmitArgs.rows");
static_assert(OFFSET_OF(TopkEmitArgs, heads) == 60, "TopkEmitArgs.heads");
static_assert(OFFSET_OF(TopkEmitArgs, kv_heads) == 64, "TopkEmitArgs.kv_heads");
static_assert(OFFSET_OF(TopkEmitArgs, topk) == 68, "TopkEmitArgs.topk");
static_assert(OFFSET_OF(TopkEmitArgs, block_size) == 72, "TopkEmitArgs.block_size");
static_assert(OFFSET_OF(TopkEmitArgs, score_rows) == 76, "TopkEmitArgs.score_rows");
static_assert(OFFSET_OF(TopkEmitArgs, score_width) == 80, "TopkEmitArgs.score_width");
static_assert(OFFSET_OF(TopkEmitArgs, topk_rows) == 84, "TopkEmitArgs.topk_rows");
static_assert(OFFSET_OF(TopkEmitArgs, slots) == 88, "TopkEmitArgs.slots");
static_assert(OFFSET_OF(TopkEmitArgs, table_width) == 92, "TopkEmitArgs.table_width");
static_assert(OFFSET_OF(TopkEmitArgs, cache_blocks) == 96, "TopkEmitArgs.cache_blocks");
static_assert(OFFSET_OF(TopkEmitArgs, reserved) == 100, "TopkEmitArgs.reserved");

struct AttendSparseArgs {
    // [rows, q_heads, head_dim].
    const float* q;
    // Paged KV cache in `kv_dtype`.
    const void* kv_cache;
    // [rows * kv_heads, table_pages] page ids.
    const int* page_table;
    // [rows * kv_heads] tokens to attend to.
    const int* page_len;
    // [rows, q_heads, head_dim].
    float* out;
    // Rows.
    unsigned int rows;
    // Query heads.
    unsigned int q_heads;
    // KV heads.
    unsigned int kv_heads;
    // Channels of a head.
    unsigned int head_dim;
    // Page ids of a row.
    unsigned int table_pages;
    // Tokens of a block.
    unsigned int block_size;
    // Cache blocks there are.
    unsigned int cache_blocks;
    // F32, Bf16 or F8E4M3.
    unsigned int kv_dtype;
    // Softmax scale, head_dim^-0.5.
    float scale;
    // Scale of a stored K (1 unless the cache is scaled).
    float k_scale;
    // Scale of a stored V.
    float v_scale;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(AttendSparseArgs) == 88, "AttendSparseArgs");
static_assert(OFFSET_OF(AttendSparseArgs, q) == 0, "AttendSparseArgs.q");
static_assert(OFFSET_OF(AttendSparseArgs, kv_cache) == 8, "AttendSparseArgs.kv_cache");
static_assert(OFFSET_OF(AttendSparseArgs, page_table) == 16, "AttendSparseArgs.page_table");
static_assert(OFFSET_OF(AttendSparseArgs, page_len) == 24, "AttendSparseArgs.page_len");
static_assert(OFFSET_OF(AttendSparseArgs, out) == 32, "AttendSparseArgs.out");
static_assert(OFFSET_OF(AttendSparseArgs, rows) == 40, "AttendSparseArgs.rows");
static_assert(OFFSET_OF(AttendSparseArgs, q_heads) == 44, "AttendSparseArgs.q_heads");
static_assert(OFFSET_OF(AttendSparseArgs, kv_heads) == 48, "AttendSparseArgs.kv_heads");
static_assert(OFFSET_OF(AttendSparseArgs, head_dim) == 52, "AttendSparseArgs.head_dim");
static_assert(OFFSET_OF(AttendSparseArgs, table_pages) == 56, "AttendSparseArgs.table_pages");
static_assert(OFFSET_OF(AttendSparseArgs, block_size) == 60, "AttendSparseArgs.block_size");
static_assert(OFFSET_OF(AttendSparseArgs, cache_blocks) == 64, "AttendSparseArgs.cache_blocks");
static_assert(OFFSET_OF(AttendSparseArgs, kv_dtype) == 68, "AttendSparseArgs.kv_dtype");
static_assert(OFFSET_OF(AttendSparseArgs, scale) == 72, "AttendSparseArgs.scale");
static_assert(OFFSET_OF(AttendSparseArgs, k_scale) == 76, "AttendSparseArgs.k_scale");
static_assert(OFFSET_OF(AttendSparseArgs, v_scale) == 80, "AttendSparseArgs.v_scale");
static_assert(OFFSET_OF(AttendSparseArgs, reserved) == 84, "AttendSparseArgs.reserved");

struct AttendDenseArgs {
    // [rows, q_heads, head_dim].
    const float* q;
    // Paged KV cache in `kv_dtype`.
    const void* kv_cache;
    // [rows] block-table row.
    const int* row_slot;
    // [rows] causal length; 0 gives zeros.
    const int* row_len;
    // [slots, table_width] attend group's block table.
    const int* block_table;
    // [rows, q_heads, head_dim].
    float* out;
    // Rows.
    unsigned int rows;
    // Query heads.
    unsigned int q_heads;
    // KV heads.
    unsigned int kv_heads;
    // Channels of a head.
    unsigned int head_dim;
    // Tokens of a block.
    unsigned int block_size;
    // Cache blocks there are.
    unsigned int cache_blocks;
    // Rows of the block table.
    unsigned int slots;
    // Columns of the block table.
    unsigned int table_width;
    // F32, Bf16 or F8E4M3.
    unsigned int kv_dtype;
    // Softmax scale, head_dim^-0.5.
    float scale;
};
static_assert(sizeof(AttendDenseArgs) == 88, "AttendDenseArgs");
static_assert(OFFSET_OF(AttendDenseArgs, q) == 0, "AttendDenseArgs.q");
static_assert(OFFSET_OF(AttendDenseArgs, kv_cache) == 8, "AttendDenseArgs.kv_cache");
static_assert(OFFSET_OF(AttendDenseArgs, row_slot) == 16, "AttendDenseArgs.row_slot");
static_assert(OFFSET_OF(AttendDenseArgs, row_len) == 24, "AttendDenseArgs.row_len");
static_assert(OFFSET_OF(AttendDenseArgs, block_table) == 32, "AttendDenseArgs.block_table");
static_assert(OFFSET_OF(AttendDenseArgs, out) == 40, "AttendDenseArgs.out");
static_assert(OFFSET_OF(AttendDenseArgs, rows) == 48, "AttendDenseArgs.rows");
static_assert(OFFSET_OF(AttendDenseArgs, q_heads) == 52, "AttendDenseArgs.q_heads");
static_assert(OFFSET_OF(AttendDenseArgs, kv_heads) == 56, "AttendDenseArgs.kv_heads");
static_assert(OFFSET_OF(AttendDenseArgs, head_dim) == 60, "AttendDenseArgs.head_dim");
static_assert(OFFSET_OF(AttendDenseArgs, block_size) == 64, "AttendDenseArgs.block_size");
static_assert(OFFSET_OF(AttendDenseArgs, cache_blocks) == 68, "AttendDenseArgs.cache_blocks");
static_assert(OFFSET_OF(AttendDenseArgs, slots) == 72, "AttendDenseArgs.slots");
static_assert(OFFSET_OF(AttendDenseArgs, table_width) == 76, "AttendDenseArgs.table_width");
static_assert(OFFSET_OF(AttendDenseArgs, kv_dtype) == 80, "AttendDenseArgs.kv_dtype");
static_assert(OFFSET_OF(AttendDenseArgs, scale) == 84, "AttendDenseArgs.scale");

struct RmsNormArgs {
    // [x_rows, width].
    const float* x;
    // [rows] row of x, or null (extent 0) for the identity.
    const int* rows_index;
    // [x_rows] causal length of each row of x; 0 gives zeros.
    const int* row_len;
    // [width] Gemma weight.
    const float* weight;
    // [rows, width].
    float* out;
    // Rows of `out`.
    unsigned int rows;
    // Rows of `x`.
    unsigned int x_rows;
    // Channels.
    unsigned int width;
    // 1 if `rows_index` is given.
    unsigned int indexed;
    // Epsilon.
    float eps;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(RmsNormArgs) == 64, "RmsNormArgs");
static_assert(OFFSET_OF(RmsNormArgs, x) == 0, "RmsNormArgs.x");
static_assert(OFFSET_OF(RmsNormArgs, rows_index) == 8, "RmsNormArgs.rows_index");
static_assert(OFFSET_OF(RmsNormArgs, row_len) == 16, "RmsNormArgs.row_len");
static_assert(OFFSET_OF(RmsNormArgs, weight) == 24, "RmsNormArgs.weight");
static_assert(OFFSET_OF(RmsNormArgs, out) == 32, "RmsNormArgs.out");
static_assert(OFFSET_OF(RmsNormArgs, rows) == 40, "RmsNormArgs.rows");
static_assert(OFFSET_OF(RmsNormArgs, x_rows) == 44, "RmsNormArgs.x_rows");
static_assert(OFFSET_OF(RmsNormArgs, width) == 48, "RmsNormArgs.width");
static_assert(OFFSET_OF(RmsNormArgs, indexed) == 52, "RmsNormArgs.indexed");
static_assert(OFFSET_OF(RmsNormArgs, eps) == 56, "RmsNormArgs.eps");
static_assert(OFFSET_OF(RmsNormArgs, reserved) == 60, "RmsNormArgs.reserved");

struct SelectLastArgs {
    // [sequences + 1] prefix sums of query lengths.
    const int* cu_seqlens;
    // [sequences] step rows.
    int* rows_index;
    // Sequences.
    unsigned int sequences;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(SelectLastArgs) == 24, "SelectLastArgs");
static_assert(OFFSET_OF(SelectLastArgs, cu_seqlens) == 0, "SelectLastArgs.cu_seqlens");
static_assert(OFFSET_OF(SelectLastArgs, rows_index) == 8, "SelectLastArgs.rows_index");
static_assert(OFFSET_OF(SelectLastArgs, sequences) == 16, "SelectLastArgs.sequences");
static_assert(OFFSET_OF(SelectLastArgs, reserved) == 20, "SelectLastArgs.reserved");

struct LinearArgs {
    // [rows, k], rows `x_stride` apart.
    const float* x;
    // [n, k] in `weight_dtype`.
    const void* weight;
    // [rows] causal length; pads (0) give zeros, or keep `out` when accumulating.
    const int* row_len;
    // [rows, n], rows `out_stride` apart.
    float* out;
    // Rows.
    unsigned int rows;
    // Output columns.
    unsigned int n;
    // Inner dimension.
    unsigned int k;
    // Elements between rows of x.
    unsigned int x_stride;
    // Elements between rows of out.
    unsigned int out_stride;
    // F32 or Bf16.
    unsigned int weight_dtype;
    // 1 adds to `out` (a residual), 0 overwrites it.
    unsigned int accumulate;
    // Columns of a tile.
    unsigned int tile_cols;
    // Rows of a tile.
    unsigned int tile_rows;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(LinearArgs) == 72, "LinearArgs");
static_assert(OFFSET_OF(LinearArgs, x) == 0, "LinearArgs.x");
static_assert(OFFSET_OF(LinearArgs, weight) == 8, "LinearArgs.weight");
static_assert(OFFSET_OF(LinearArgs, row_len) == 16, "LinearArgs.row_len");
static_assert(OFFSET_OF(LinearArgs, out) == 24, "LinearArgs.out");
static_assert(OFFSET_OF(LinearArgs, rows) == 32, "LinearArgs.rows");
static_assert(OFFSET_OF(LinearArgs, n) == 36, "LinearArgs.n");
static_assert(OFFSET_OF(LinearArgs, k) == 40, "LinearArgs.k");
static_assert(OFFSET_OF(LinearArgs, x_stride) == 44, "LinearArgs.x_stride");
static_assert(OFFSET_OF(LinearArgs, out_stride) == 48, "LinearArgs.out_stride");
static_assert(OFFSET_OF(LinearArgs, weight_dtype) == 52, "LinearArgs.weight_dtype");
static_assert(OFFSET_OF(LinearArgs, accumulate) == 56, "LinearArgs.accumulate");
static_assert(OFFSET_OF(LinearArgs, tile_cols) == 60, "LinearArgs.tile_cols");
static_assert(OFFSET_OF(LinearArgs, tile_rows) == 64, "LinearArgs.tile_rows");
static_assert(OFFSET_OF(LinearArgs, reserved) == 68, "LinearArgs.reserved");

struct RouteArgs {
    // [rows, experts] router logits.
    const float* logits;
    // [experts] score correction bias; moves the choice, never the weight.
    const float* bias;
    // [rows] causal length.
    const int* row_len;
    // [rows, topk] chosen experts in order of choice.
    int* ids;
    // [rows, topk] their weights.
    float* weights;
    // Rows.
    unsigned int rows;
    // Experts.
    unsigned int experts;
    // Experts a row.
    unsigned int topk;
    // `routed_scaling_factor`.
    float scale;
};
static_assert(sizeof(RouteArgs) == 56, "RouteArgs");
static_assert(OFFSET_OF(RouteArgs, logits) == 0, "RouteArgs.logits");
static_assert(OFFSET_OF(RouteArgs, bias) == 8, "RouteArgs.bias");
static_assert(OFFSET_OF(RouteArgs, row_len) == 16, "RouteArgs.row_len");
static_assert(OFFSET_OF(RouteArgs, ids) == 24, "RouteArgs.ids");
static_assert(OFFSET_OF(RouteArgs, weights) == 32, "RouteArgs.weights");
static_assert(OFFSET_OF(RouteArgs, rows) == 40, "RouteArgs.rows");
static_assert(OFFSET_OF(RouteArgs, experts) == 44, "RouteArgs.experts");
static_assert(OFFSET_OF(RouteArgs, topk) == 48, "RouteArgs.topk");
static_assert(OFFSET_OF(RouteArgs, scale) == 52, "RouteArgs.scale");

struct MoeSortArgs {
    // [pairs] experts.
    const int* ids;
    // [pairs] pair numbers sorted by expert; -1 past the live ones.
    int* list;
    // [tiles, 4] expert, first and end in `list`, 0; expert -1 past the live ones.
    int* tiles;
    // Rows x topk.
    unsigned int pairs;
    // Experts.
    unsigned int experts;
    // Pairs of a tile.
    unsigned int tile_rows;
    // Tiles there is room for: [`moe_tiles`].
    unsigned int tiles_max;
};
static_assert(sizeof(MoeSortArgs) == 40, "MoeSortArgs");
static_assert(OFFSET_OF(MoeSortArgs, ids) == 0, "MoeSortArgs.ids");
static_assert(OFFSET_OF(MoeSortArgs, list) == 8, "MoeSortArgs.list");
static_assert(OFFSET_OF(MoeSortArgs, tiles) == 16, "MoeSortArgs.tiles");
static_assert(OFFSET_OF(MoeSortArgs, pairs) == 24, "MoeSortArgs.pairs");
static_assert(OFFSET_OF(MoeSortArgs, experts) == 28, "MoeSortArgs.experts");
static_assert(OFFSET_OF(MoeSortArgs, tile_rows) == 32, "MoeSortArgs.tile_rows");
static_assert(OFFSET_OF(MoeSortArgs, tiles_max) == 36, "MoeSortArgs.tiles_max");

struct MoeLinearArgs {
    // [pairs / pairs_a_row, k].
    const float* x;
    // [experts, n, k] in `weight_dtype`.
    const void* weight;
    // [pairs] pair numbers by expert.
    const int* list;
    // [tiles, 4] from `moe_sort`.
    const int* tiles;
    // [pairs, n].
    float* out;
    // Rows x topk.
    unsigned int pairs;
    // Pairs that share a row of x: topk into the experts, 1 inside them.
    unsigned int pairs_a_row;
    // Output columns.
    unsigned int n;
    // Inner dimension.
    unsigned int k;
    // Experts.
    unsigned int experts;
    // Tiles there is room for.
    unsigned int tiles_max;
    // Columns of a tile.
    unsigned int tile_cols;
    // F32 or Bf16.
    unsigned int weight_dtype;
};
static_assert(sizeof(MoeLinearArgs) == 72, "MoeLinearArgs");
static_assert(OFFSET_OF(MoeLinearArgs, x) == 0, "MoeLinearArgs.x");
static_assert(OFFSET_OF(MoeLinearArgs, weight) == 8, "MoeLinearArgs.weight");
static_assert(OFFSET_OF(MoeLinearArgs, list) == 16, "MoeLinearArgs.list");
static_assert(OFFSET_OF(MoeLinearArgs, tiles) == 24, "MoeLinearArgs.tiles");
static_assert(OFFSET_OF(MoeLinearArgs, out) == 32, "MoeLinearArgs.out");
static_assert(OFFSET_OF(MoeLinearArgs, pairs) == 40, "MoeLinearArgs.pairs");
static_assert(OFFSET_OF(MoeLinearArgs, pairs_a_row) == 44, "MoeLinearArgs.pairs_a_row");
static_assert(OFFSET_OF(MoeLinearArgs, n) == 48, "MoeLinearArgs.n");
static_assert(OFFSET_OF(MoeLinearArgs, k) == 52, "MoeLinearArgs.k");
static_assert(OFFSET_OF(MoeLinearArgs, experts) == 56, "MoeLinearArgs.experts");
static_assert(OFFSET_OF(MoeLinearArgs, tiles_max) == 60, "MoeLinearArgs.tiles_max");
static_assert(OFFSET_OF(MoeLinearArgs, tile_cols) == 64, "MoeLinearArgs.tile_cols");
static_assert(OFFSET_OF(MoeLinearArgs, weight_dtype) == 68, "MoeLinearArgs.weight_dtype");

struct MoeCombineArgs {
    // [rows, topk, width] outputs of the experts.
    const float* experts;
    // [rows, topk].
    const float* weights;
    // [rows] causal length; pads keep their residual.
    const int* row_len;
    // [rows, width].
    float* residual;
    // Rows.
    unsigned int rows;
    // Experts a row.
    unsigned int topk;
    // Channels.
    unsigned int width;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(MoeCombineArgs) == 48, "MoeCombineArgs");
static_assert(OFFSET_OF(MoeCombineArgs, experts) == 0, "MoeCombineArgs.experts");
static_assert(OFFSET_OF(MoeCombineArgs, weights) == 8, "MoeCombineArgs.weights");
static_assert(OFFSET_OF(MoeCombineArgs, row_len) == 16, "MoeCombineArgs.row_len");
static_assert(OFFSET_OF(MoeCombineArgs, residual) == 24, "MoeCombineArgs.residual");
static_assert(OFFSET_OF(MoeCombineArgs, rows) == 32, "MoeCombineArgs.rows");
static_assert(OFFSET_OF(MoeCombineArgs, topk) == 36, "MoeCombineArgs.topk");
static_assert(OFFSET_OF(MoeCombineArgs, width) == 40, "MoeCombineArgs.width");
static_assert(OFFSET_OF(MoeCombineArgs, reserved) == 44, "MoeCombineArgs.reserved");

struct SwigluArgs {
    // [rows, 2 * width], gate then up.
    const float* x;
    // [rows / rows_a_len] causal length of the step row behind `rows_a_len` rows.
    const int* row_len;
    // [rows, width].
    float* out;
    // Rows.
    unsigned int rows;
    // Channels of out.
    unsigned int width;
    // Rows that share a causal length: topk inside the experts, else 1.
    unsigned int rows_a_len;
    // Slope of the sigmoid, 1.702.
    float alpha;
    // Clamp, 7.
    float limit;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(SwigluArgs) == 48, "SwigluArgs");
static_assert(OFFSET_OF(SwigluArgs, x) == 0, "SwigluArgs.x");
static_assert(OFFSET_OF(SwigluArgs, row_len) == 8, "SwigluArgs.row_len");
static_assert(OFFSET_OF(SwigluArgs, out) == 16, "SwigluArgs.out");
static_assert(OFFSET_OF(SwigluArgs, rows) == 24, "SwigluArgs.rows");
static_assert(OFFSET_OF(SwigluArgs, width) == 28, "SwigluArgs.width");
static_assert(OFFSET_OF(SwigluArgs, rows_a_len) == 32, "SwigluArgs.rows_a_len");
static_assert(OFFSET_OF(SwigluArgs, alpha) == 36, "SwigluArgs.alpha");
static_assert(OFFSET_OF(SwigluArgs, limit) == 40, "SwigluArgs.limit");
static_assert(OFFSET_OF(SwigluArgs, reserved) == 44, "SwigluArgs.reserved");

struct AgreeArgs {
    // [sequences] KV length of each sequence, 0 for pads.
    const int* seq_len;
    // [1] agreements made so far, this rank's own.
    unsigned long long* agreements;
    // [64 B] step state; the first error of the step.
    unsigned char* state;
    // Head of the peer buffer of rank 0.
    unsigned long long* peer0;
    // Head of the peer buffer of rank 1.
    unsigned long long* peer1;
    // Head of the peer buffer of rank 2.
    unsigned long long* peer2;
    // Head of the peer buffer of rank 3.
    unsigned long long* peer3;
    // Head of the peer buffer of rank 4.
    unsigned long long* peer4;
    // Head of the peer buffer of rank 5.
    unsigned long long* peer5;
    // Head of the peer buffer of rank 6.
    unsigned long long* peer6;
    // Head of the peer buffer of rank 7.
    unsigned long long* peer7;
    // Sequences of the graph.
    unsigned int sequences;
    // Rows of the graph.
    unsigned int rows;
    // Rows a sequence.
    unsigned int query_len;
    // Longest KV length of the graph.
    unsigned int graph;
    // This rank.
    unsigned int rank;
    // Ranks.
    unsigned int world;
    // Longest wait for a peer, microseconds.
    unsigned int budget_us;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(AgreeArgs) == 120, "AgreeArgs");
static_assert(OFFSET_OF(AgreeArgs, seq_len) == 0, "AgreeArgs.seq_len");
static_assert(OFFSET_OF(AgreeArgs, agreements) == 8, "AgreeArgs.agreements");
static_assert(OFFSET_OF(AgreeArgs, state) == 16, "AgreeArgs.state");
static_assert(OFFSET_OF(AgreeArgs, peer0) == 24, "AgreeArgs.peer0");
static_assert(OFFSET_OF(AgreeArgs, peer1) == 32, "AgreeArgs.peer1");
static_assert(OFFSET_OF(AgreeArgs, peer2) == 40, "AgreeArgs.peer2");
static_assert(OFFSET_OF(AgreeArgs, peer3) == 48, "AgreeArgs.peer3");
static_assert(OFFSET_OF(AgreeArgs, peer4) == 56, "AgreeArgs.peer4");
static_assert(OFFSET_OF(AgreeArgs, peer5) == 64, "AgreeArgs.peer5");
static_assert(OFFSET_OF(AgreeArgs, peer6) == 72, "AgreeArgs.peer6");
static_assert(OFFSET_OF(AgreeArgs, peer7) == 80, "AgreeArgs.peer7");
static_assert(OFFSET_OF(AgreeArgs, sequences) == 88, "AgreeArgs.sequences");
static_assert(OFFSET_OF(AgreeArgs, rows) == 92, "AgreeArgs.rows");
static_assert(OFFSET_OF(AgreeArgs, query_len) == 96, "AgreeArgs.query_len");
static_assert(OFFSET_OF(AgreeArgs, graph) == 100, "AgreeArgs.graph");
static_assert(OFFSET_OF(AgreeArgs, rank) == 104, "AgreeArgs.rank");
static_assert(OFFSET_OF(AgreeArgs, world) == 108, "AgreeArgs.world");
static_assert(OFFSET_OF(AgreeArgs, budget_us) == 112, "AgreeArgs.budget_us");
static_assert(OFFSET_OF(AgreeArgs, reserved) == 116, "AgreeArgs.reserved");

struct TopkExchangeArgs {
    // [heads, score_rows, score_width] scores of this rank's shard: local block i is block i * world + rank.
    const float* score;
    // [rows] block-table row.
    const int* row_slot;
    // [rows] causal length.
    const int* row_len;
    // [slots, table_width] attend group's block table.
    const int* block_table;
    // [owned, topk_rows, topk] selected block ids.
    int* topk_idx;
    // [rows * owned kv heads, topk * block_size / 16] page ids.
    int* page_table;
    // [rows * owned kv heads] tokens the page table describes.
    int* page_len;
    // [heads, peer_rows] generation of each (row, head), this rank's own.
    unsigned int* generations;
    // [64 B] step state; the first error of the step.
    unsigned char* state;
    // Peer buffer of rank 0.
    unsigned long long* peer0;
    // Peer buffer of rank 1.
    unsigned long long* peer1;
    // Peer buffer of rank 2.
    unsigned long long* peer2;
    // Peer buffer of rank 3.
    unsigned long long* peer3;
    // Peer buffer of rank 4.
    unsigned long long* peer4;
    // Peer buffer of rank 5.
    unsigned long long* peer5;
    // Peer buffer of rank 6.
    unsigned long long* peer6;
    // Peer buffer of rank 7.
    unsigned long long* peer7;
    // Rows.
    unsigned int rows;
    // Index heads that are scored.
    unsigned int heads;
    // Heads this rank selects for: `heads / world`, or `heads`.
    unsigned int owned;
    // KV heads of this rank, a multiple of its index heads.
    unsigned int kv_heads;
    // Blocks to select.
    unsigned int topk;
    // Tokens of a block.
    unsigned int block_size;
    // Rows of a head's plane of `score`.
    unsigned int score_rows;
    // Columns of `score`.
    unsigned int score_width;
    // Rows of a head's plane of `topk_idx`.
    unsigned int topk_rows;
    // Rows of the block table.
    unsigned int slots;
    // Columns of the block table.
    unsigned int table_width;
    // Cache blocks there are.
    unsigned int cache_blocks;
    // Rows of a head in a peer buffer, at least `rows`; the same for every launch over it.
    unsigned int peer_rows;
    // This rank.
    unsigned int rank;
    // Ranks.
    unsigned int world;
    // Bits of the generation that candidates carry: [`TAG_BITS`], fewer in tests.
    unsigned int tag_bits;
    // Longest wait for a peer, microseconds.
    unsigned int budget_us;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(TopkExchangeArgs) == 208, "TopkExchangeArgs");
static_assert(OFFSET_OF(TopkExchangeArgs, score) == 0, "TopkExchangeArgs.score");
static_assert(OFFSET_OF(TopkExchangeArgs, row_slot) == 8, "TopkExchangeArgs.row_slot");
static_assert(OFFSET_OF(TopkExchangeArgs, row_len) == 16, "TopkExchangeArgs.row_len");
static_assert(OFFSET_OF(TopkExchangeArgs, block_table) == 24, "TopkExchangeArgs.block_table");
static_assert(OFFSET_OF(TopkExchangeArgs, topk_idx) == 32, "TopkExchangeArgs.topk_idx");
static_assert(OFFSET_OF(TopkExchangeArgs, page_table) == 40, "TopkExchangeArgs.page_table");
static_assert(OFFSET_OF(TopkExchangeArgs, page_len) == 48, "TopkExchangeArgs.page_len");
static_assert(OFFSET_OF(TopkExchangeArgs, generations) == 56, "TopkExchangeArgs.generations");
static_assert(OFFSET_OF(TopkExchangeArgs, state) == 64, "TopkExchangeArgs.state");
static_assert(OFFSET_OF(TopkExchangeArgs, peer0) == 72, "TopkExchangeArgs.peer0");
static_assert(OFFSET_OF(TopkExchangeArgs, peer1) == 80, "TopkExchangeArgs.peer1");
static_assert(OFFSET_OF(TopkExchangeArgs, peer2) == 88, "TopkExchangeArgs.peer2");
static_assert(OFFSET_OF(TopkExchangeArgs, peer3) == 96, "TopkExchangeArgs.peer3");
static_assert(OFFSET_OF(TopkExchangeArgs, peer4) == 104, "TopkExchangeArgs.peer4");
static_assert(OFFSET_OF(TopkExchangeArgs, peer5) == 112, "TopkExchangeArgs.peer5");
static_assert(OFFSET_OF(TopkExchangeArgs, peer6) == 120, "TopkExchangeArgs.peer6");
static_assert(OFFSET_OF(TopkExchangeArgs, peer7) == 128, "TopkExchangeArgs.peer7");
static_assert(OFFSET_OF(TopkExchangeArgs, rows) == 136, "TopkExchangeArgs.rows");
static_assert(OFFSET_OF(TopkExchangeArgs, heads) == 140, "TopkExchangeArgs.heads");
static_assert(OFFSET_OF(TopkExchangeArgs, owned) == 144, "TopkExchangeArgs.owned");
static_assert(OFFSET_OF(TopkExchangeArgs, kv_heads) == 148, "TopkExchangeArgs.kv_heads");
static_assert(OFFSET_OF(TopkExchangeArgs, topk) == 152, "TopkExchangeArgs.topk");
static_assert(OFFSET_OF(TopkExchangeArgs, block_size) == 156, "TopkExchangeArgs.block_size");
static_assert(OFFSET_OF(TopkExchangeArgs, score_rows) == 160, "TopkExchangeArgs.score_rows");
static_assert(OFFSET_OF(TopkExchangeArgs, score_width) == 164, "TopkExchangeArgs.score_width");
static_assert(OFFSET_OF(TopkExchangeArgs, topk_rows) == 168, "TopkExchangeArgs.topk_rows");
static_assert(OFFSET_OF(TopkExchangeArgs, slots) == 172, "TopkExchangeArgs.slots");
static_assert(OFFSET_OF(TopkExchangeArgs, table_width) == 176, "TopkExchangeArgs.table_width");
static_assert(OFFSET_OF(TopkExchangeArgs, cache_blocks) == 180, "TopkExchangeArgs.cache_blocks");
static_assert(OFFSET_OF(TopkExchangeArgs, peer_rows) == 184, "TopkExchangeArgs.peer_rows");
static_assert(OFFSET_OF(TopkExchangeArgs, rank) == 188, "TopkExchangeArgs.rank");
static_assert(OFFSET_OF(TopkExchangeArgs, world) == 192, "TopkExchangeArgs.world");
static_assert(OFFSET_OF(TopkExchangeArgs, tag_bits) == 196, "TopkExchangeArgs.tag_bits");
static_assert(OFFSET_OF(TopkExchangeArgs, budget_us) == 200, "TopkExchangeArgs.budget_us");
static_assert(OFFSET_OF(TopkExchangeArgs, reserved) == 204, "TopkExchangeArgs.reserved");

struct ProbeArgs {
    // [count], 32-bit patterns without a sign.
    unsigned int* dst;
    // [count].
    const unsigned int* src;
    // Elements.
    unsigned int count;
    // Factor.
    unsigned int mul;
    // Summand.
    unsigned int add;
    // Zero.
    unsigned int reserved;
};
static_assert(sizeof(ProbeArgs) == 32, "ProbeArgs");
static_assert(OFFSET_OF(ProbeArgs, dst) == 0, "ProbeArgs.dst");
static_assert(OFFSET_OF(ProbeArgs, src) == 8, "ProbeArgs.src");
static_assert(OFFSET_OF(ProbeArgs, count) == 16, "ProbeArgs.count");
static_assert(OFFSET_OF(ProbeArgs, mul) == 20, "ProbeArgs.mul");
static_assert(OFFSET_OF(ProbeArgs, add) == 24, "ProbeArgs.add");
static_assert(OFFSET_OF(ProbeArgs, reserved) == 28, "ProbeArgs.reserved");

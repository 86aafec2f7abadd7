//! Argument structs and memory formats of the kernels that frame every step: `ingest`, `embed`, `sample`, `publish`.
//!
//! One pinned ring carries every step, decode and prefill alike: the host fills the next slot and writes its sequence number
//! last; `ingest` takes the slot whose turn it is by a counter in device memory, so that a recorded graph needs no new
//! argument; `publish` answers in the same slot number of a second pinned ring, sequence number last.

use bytemuck::{Pod, Zeroable};

use super::args::product;
use crate::kernel_args;

/// A token that asks `ingest` for the sequence's last sampled token, on the device.
pub const TOKEN_FROM_DEVICE: i32 = -1;

/// Device-side state of the executor (one per arena), 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct StepState {
    /// Number of the step in flight, from 1; 0 before the first.
    pub sequence: u64,
    /// Sequences of this step.
    pub live_sequences: u32,
    /// Rows of this step.
    pub live_rows: u32,
    /// First error of this step ([`StepError`] code), 0 if none; cleared by `ingest`.
    pub error: u32,
    /// What the error is about: row, expected, found (by code).
    pub error_detail: [u32; 3],
    /// Largest KV length of this step.
    pub kv_len_max: u32,
    /// Zero.
    pub reserved: [u32; 7],
}

/// Codes of [`StepState::error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum StepError {
    /// The slot's sequence number was not the next one when `ingest` gave up waiting: expected, found (low words).
    StaleSlot = 1,
    /// The slot holds more sequences, rows or updates than this graph was captured for: found, limit.
    TooManyRows = 2,
    /// A block id or table index is out of range: row, index, value.
    BlockRange = 3,
    /// A peer's candidates did not come: peer in the low half and head in the high half of a word, row, generation.
    PeerTimeout = 4,
    /// Peers disagree about what they run: peer in the low half and what differs
    /// ([`Differs`](super::exchange::Differs)) in the high half of a word, ours, theirs.
    PeerMismatch = 5,
    /// The group was ended by a rank: that rank, row, head.
    PeerEnded = 6,
    /// A peer did not come to the agreement before the step: peer, agreements made so far, step.
    PeerAbsent = 7,
}

/// Head of a metadata slot, 64 bytes. Then [`SequenceRecord`] x sequence capacity, `i32` tokens x row capacity (rounded up to
/// 4), [`BlockUpdate`] x update capacity.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct SlotHeader {
    /// Number of the step, from 1; the host writes it last.
    pub sequence: u64,
    /// Sequences in this step.
    pub live_sequences: u32,
    /// Rows in this step: the sum of the query lengths.
    pub live_rows: u32,
    /// Block-table updates in this step.
    pub updates: u32,
    /// Largest KV length.
    pub kv_len_max: u32,
    /// Zero.
    pub reserved: [u32; 10],
}

/// One sequence of a step, 48 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct SequenceRecord {
    /// Its row of the block table.
    pub slot: u32,
    /// Tokens it holds, this step's included.
    pub kv_len: u32,
    /// Its tokens in this step.
    pub query_len: u32,
    /// 0 samples greedily; otherwise the softmax temperature.
    pub temperature: f32,
    /// Keep the `top_k` largest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this share of the largest probability; 0 keeps all.
    pub min_p: f32,
    /// Zero.
    pub reserved: u32,
    /// Seed of the sequence's random numbers; the position makes each draw its own.
    pub seed: u64,
    /// Zero.
    pub reserved2: u64,
}

/// One change of the block table, 16 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct BlockUpdate {
    /// Row of the table.
    pub slot: u32,
    /// Column: which block of the sequence.
    pub index: u32,
    /// The cache block.
    pub block: u32,
    /// Zero.
    pub reserved: u32,
}

/// Head of a result slot, 64 bytes. Then `i32` tokens x row capacity.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ResultHeader {
    /// Number of the step this answers; `publish` writes it last.
    pub sequence: u64,
    /// Copied from [`StepState`].
    pub live_sequences: u32,
    /// Copied from [`StepState`].
    pub live_rows: u32,
    /// Copied from [`StepState`].
    pub error: u32,
    /// Copied from [`StepState`].
    pub error_detail: [u32; 3],
    /// Zero.
    pub reserved: [u32; 8],
}

/// Bytes of a metadata slot, a multiple of 64.
pub const fn slot_bytes(sequence_capacity: u32, row_capacity: u32, update_capacity: u32) -> u64 {
    (slot_updates_offset(sequence_capacity, row_capacity) + update_capacity as u64 * size_of::<BlockUpdate>() as u64)
        .next_multiple_of(64)
}

/// Offset of the tokens in a metadata slot.
pub const fn slot_tokens_offset(sequence_capacity: u32) -> u64 {
    size_of::<SlotHeader>() as u64 + sequence_capacity as u64 * size_of::<SequenceRecord>() as u64
}

/// Offset of the block-table updates in a metadata slot.
pub const fn slot_updates_offset(sequence_capacity: u32, row_capacity: u32) -> u64 {
    slot_tokens_offset(sequence_capacity) + (row_capacity as u64).next_multiple_of(4) * 4
}

/// Bytes of a result slot, a multiple of 64.
pub const fn result_bytes(row_capacity: u32) -> u64 {
    (size_of::<ResultHeader>() as u64 + row_capacity as u64 * 4).next_multiple_of(64)
}

kernel_args! {
    /// `ingest`, grid \[1\], workgroup \[256\]: advances `state.sequence`, takes the ring slot of that number (bounded wait for
    /// its sequence number), spreads it over the persistent buffers, writes the pad rows (lengths 0, slot 0, token 0), and
    /// applies the block-table updates. With `query_len` = 0 rows are ragged: `row_*` follow each sequence's own query length.
    pub struct IngestArgs |a| {
        pointers {
            /// [ring_slots, slot_bytes] pinned metadata ring.
            ring: Read, U8, u64::from(a.ring_slots) * u64::from(a.slot_bytes);
            /// [64 B] step state.
            state: ReadWrite, U8, 64u64;
            /// \[sequences\] block-table row of each sequence; 0 for pads.
            seq_slot: Write, I32, u64::from(a.sequences);
            /// \[sequences\] KV length, this step's tokens included; 0 for pads.
            seq_len: Write, I32, u64::from(a.sequences);
            /// [sequences + 1] prefix sums of query lengths; the tail repeats the total.
            cu_seqlens: Write, I32, u64::from(a.sequences) + 1;
            /// [sequences, 48 B] the sequence records as sent (sampling parameters); zero for pads.
            records: Write, U8, product([a.sequences, 48]);
            /// \[rows\] sequence index of each row (row n of uniform decode: n / query_len); 0 for pads.
            row_seq: Write, I32, u64::from(a.rows);
            /// \[rows\] block-table row; 0 for pads.
            row_slot: Write, I32, u64::from(a.rows);
            /// \[rows\] causal length max(kv_len - query_len + t + 1, 0); 0 for pads. The row's position is this - 1.
            row_len: Write, I32, u64::from(a.rows);
            /// \[rows\] token ids; 0 for pads.
            tokens: Write, I32, u64::from(a.rows);
            /// \[slots\] last sampled token of each block-table row.
            last_token: Read, I32, u64::from(a.slots);
            /// [slots, table_width] cache block of each block of each sequence.
            block_table: ReadWrite, I32, product([a.slots, a.table_width]);
        }
        scalars {
            /// Sequences this launch is shaped for.
            sequences: u32;
            /// Rows this launch is shaped for.
            rows: u32;
            /// Rows a sequence in a uniform step; 0: ragged.
            query_len: u32;
            /// Slots of the ring.
            ring_slots: u32;
            /// Bytes of a slot.
            slot_bytes: u32;
            /// Sequences a slot has room for.
            sequence_capacity: u32;
            /// Rows a slot has room for.
            row_capacity: u32;
            /// Updates a slot has room for.
            update_capacity: u32;
            /// Rows of the block table.
            slots: u32;
            /// Columns of the block table.
            table_width: u32;
            /// Cache blocks there are.
            cache_blocks: u32;
            /// Polls before `ingest` gives up on a slot.
            poll_limit: u32;
        }
    }
}

kernel_args! {
    /// `embed`, grid \[rows\], workgroup \[256\]: out\[n\] = table[tokens\[n\]] as f32; zeros where `row_len` is 0.
    pub struct EmbedArgs |a| {
        pointers {
            /// \[rows\] token ids.
            tokens: Read, I32, u64::from(a.rows);
            /// \[rows\] causal lengths.
            row_len: Read, I32, u64::from(a.rows);
            /// [vocab, width] in `table_dtype`.
            table: Read, (crate::DType::from_code(a.table_dtype)), product([a.vocab, a.width]);
            /// [rows, width].
            out: Write, F32, product([a.rows, a.width]);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Channels of a row.
            width: u32;
            /// Rows of the table; a token past it gives zeros and is an error the host has already refused.
            vocab: u32;
            /// [`DType`](crate::DType) code: F32 or Bf16.
            table_dtype: u32;
        }
    }
}

kernel_args! {
    /// `sample`, grid \[rows\], workgroup \[256\]: draws a token of each row's logits by the parameters of its sequence, and
    /// keeps the last row's token of each sequence in `last_token`. Ties of the largest logit go to the lower id; NaN counts
    /// as minus infinity. Draws depend on (seed, position) alone.
    pub struct SampleArgs |a| {
        pointers {
            /// [rows, vocab] logits; row i belongs to step row `rows_index[i]`, or i where that pointer is null.
            logits: Read, F32, product([a.rows, a.vocab]);
            /// \[rows\] step row of each logits row, or null (extent 0) for the identity.
            rows_index: Read, I32, if a.indexed != 0 { u64::from(a.rows) } else { 0 };
            /// \[step_rows\] sequence of each step row.
            row_seq: Read, I32, u64::from(a.step_rows);
            /// \[step_rows\] block-table row of each step row.
            row_slot: Read, I32, u64::from(a.step_rows);
            /// \[step_rows\] causal lengths; 0 draws nothing and writes token 0.
            row_len: Read, I32, u64::from(a.step_rows);
            /// [sequences, 48 B] sequence records.
            records: Read, U8, product([a.sequences, 48]);
            /// \[rows\] sampled tokens.
            out: Write, I32, u64::from(a.rows);
            /// \[slots\] last sampled token of each block-table row.
            last_token: ReadWrite, I32, u64::from(a.slots);
        }
        scalars {
            /// Logits rows.
            rows: u32;
            /// Vocabulary.
            vocab: u32;
            /// Rows of the step.
            step_rows: u32;
            /// Sequences of the step.
            sequences: u32;
            /// Rows of the block table.
            slots: u32;
            /// 1 if `rows_index` is given.
            indexed: u32;
        }
    }
}

kernel_args! {
    /// `publish`, grid \[1\], workgroup \[256\]: copies the sampled tokens and the step's error into the result slot of
    /// `state.sequence`, then, after a system-wide fence, its sequence number.
    pub struct PublishArgs |a| {
        pointers {
            /// [64 B] step state.
            state: Read, U8, 64u64;
            /// \[rows\] sampled tokens.
            tokens: Read, I32, u64::from(a.rows);
            /// [ring_slots, result_bytes] pinned result ring.
            results: ReadWrite, U8, u64::from(a.ring_slots) * u64::from(a.result_bytes);
        }
        scalars {
            /// Rows of `tokens`.
            rows: u32;
            /// Slots of the ring.
            ring_slots: u32;
            /// Bytes of a result slot.
            result_bytes: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

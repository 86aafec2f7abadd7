//! The frame of every step: the buffers `ingest` fills and `publish` reads, and the two ops themselves.

use serde::Serialize;

use super::Chain;
use crate::arena::{BufferId, BufferSpec, PlanBuilder, Purpose};
use crate::dtype::DType;
use crate::hal::MemoryKind;
use crate::kernels::step::{IngestArgs, PublishArgs, result_bytes, slot_bytes};
use crate::kernels::{Ptr, registry};

/// Polls of a metadata slot before `ingest` reports it stale: about a second of device time.
const POLL_LIMIT: u32 = 1 << 22;

/// Capacities of the step buffers, from limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepLayout {
    /// Slots of the metadata and result rings: steps that may be in flight.
    pub ring_slots: u32,
    /// Sequences of one step.
    pub sequence_capacity: u32,
    /// Rows of one step, decode or prefill.
    pub row_capacity: u32,
    /// Block-table updates of one step.
    pub update_capacity: u32,
    /// Rows of the block table: open sequences.
    pub slots: u32,
    /// Columns of the block table: blocks of `max_model_len`.
    pub table_width: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Cache blocks there are.
    pub cache_blocks: u32,
}

/// The step metadata buffers, shared by every chain of an arena.
#[derive(Clone, Copy, Debug)]
pub struct StepBuffers {
    /// Pinned metadata ring.
    pub ring: BufferId,
    /// Pinned result ring.
    pub results: BufferId,
    /// Device state: [`StepState`](crate::kernels::step::StepState).
    pub state: BufferId,
    /// \[sequences\] block-table row of each sequence.
    pub seq_slot: BufferId,
    /// \[sequences\] KV lengths.
    pub seq_len: BufferId,
    /// [sequences + 1] prefix sums of query lengths.
    pub cu_seqlens: BufferId,
    /// [sequences, 48 B] sequence records.
    pub records: BufferId,
    /// \[rows\] sequence of each row.
    pub row_seq: BufferId,
    /// \[rows\] block-table row of each row.
    pub row_slot: BufferId,
    /// \[rows\] causal lengths.
    pub row_len: BufferId,
    /// \[rows\] token ids.
    pub tokens: BufferId,
    /// \[rows\] sampled tokens.
    pub sampled: BufferId,
    /// \[slots\] last sampled token.
    pub last_token: BufferId,
    /// [slots, table_width] block table.
    pub block_table: BufferId,
}

impl StepBuffers {
    /// Plans them.
    pub fn plan(layout: &StepLayout, plan: &mut PlanBuilder) -> StepBuffers {
        let StepLayout { ring_slots, sequence_capacity, row_capacity, update_capacity, slots, table_width, .. } = *layout;
        let slot = slot_bytes(sequence_capacity, row_capacity, update_capacity);
        let mut add = |name: &str, dtype, shape: &[u32], formula: &str, memory, purpose, reason: &str| {
            plan.add(BufferSpec {
                name: format!("step.{name}"),
                dtype,
                shape: shape.iter().map(|&dim| u64::from(dim)).collect(),
                formula: formula.into(),
                memory,
                purpose,
                reason: reason.into(),
            })
        };
        let (pinned, device) = (MemoryKind::Pinned, MemoryKind::Device);
        let (rings, metadata) = (Purpose::Rings, Purpose::Metadata);
        let (i32, u8) = (DType::I32, DType::U8);
        let (seqs, rows) = ("[sequence_capacity]", "[row_capacity]");
        StepBuffers {
            ring: add(
                "ring",
                u8,
                &[ring_slots, slot as u32],
                "[ring_slots, slot_bytes]",
                pinned,
                rings,
                "metadata of each step, host to device",
            ),
            results: add(
                "results",
                u8,
                &[ring_slots, result_bytes(row_capacity) as u32],
                "[ring_slots, result_bytes]",
                pinned,
                rings,
                "sampled tokens and sequence number of each step, device to host",
            ),
            state: add("state", u8, &[64], "[64]", device, metadata, "step counter and first error, advanced on the device"),
            seq_slot: add("seq_slot", i32, &[sequence_capacity], seqs, device, metadata, "block-table row of each sequence"),
            seq_len: add("seq_len", i32, &[sequence_capacity], seqs, device, metadata, "KV length of each sequence, 0 for pads"),
            cu_seqlens: add(
                "cu_seqlens",
                i32,
                &[sequence_capacity + 1],
                "[sequence_capacity + 1]",
                device,
                metadata,
                "prefix sums of query lengths",
            ),
            records: add(
                "records",
                u8,
                &[sequence_capacity, 48],
                "[sequence_capacity, 48]",
                device,
                metadata,
                "sampling parameters of each sequence",
            ),
            row_seq: add("row_seq", i32, &[row_capacity], rows, device, metadata, "sequence of each row"),
            row_slot: add("row_slot", i32, &[row_capacity], rows, device, metadata, "block-table row of each row"),
            row_len: add("row_len", i32, &[row_capacity], rows, device, metadata, "causal length of each row, 0 for pads"),
            tokens: add("tokens", i32, &[row_capacity], rows, device, metadata, "token of each row"),
            sampled: add("sampled", i32, &[row_capacity], rows, device, metadata, "sampled token of each row"),
            last_token: add(
                "last_token",
                i32,
                &[slots],
                "[max_num_seqs]",
                device,
                metadata,
                "last sampled token of each open sequence, fed to the next step",
            ),
            block_table: add(
                "block_table",
                i32,
                &[slots, table_width],
                "[max_num_seqs, ceil(max_model_len / block_size)]",
                device,
                metadata,
                "cache block of each block of each open sequence",
            ),
        }
    }

    /// Appends `ingest` for `sequences` sequences and `rows` rows; `query_len` 0 takes ragged rows.
    pub fn ingest(&self, layout: &StepLayout, chain: &mut Chain, sequences: u32, rows: u32, query_len: u32) {
        let args = IngestArgs {
            ring: pointer(self.ring),
            state: pointer(self.state),
            seq_slot: pointer(self.seq_slot),
            seq_len: pointer(self.seq_len),
            cu_seqlens: pointer(self.cu_seqlens),
            records: pointer(self.records),
            row_seq: pointer(self.row_seq),
            row_slot: pointer(self.row_slot),
            row_len: pointer(self.row_len),
            tokens: pointer(self.tokens),
            last_token: pointer(self.last_token),
            block_table: pointer(self.block_table),
            sequences,
            rows,
            query_len,
            ring_slots: layout.ring_slots,
            slot_bytes: slot_bytes(layout.sequence_capacity, layout.row_capacity, layout.update_capacity) as u32,
            sequence_capacity: layout.sequence_capacity,
            row_capacity: layout.row_capacity,
            update_capacity: layout.update_capacity,
            slots: layout.slots,
            table_width: layout.table_width,
            cache_blocks: layout.cache_blocks,
            poll_limit: POLL_LIMIT,
        };
        chain.push("ingest", None, &registry::INGEST, [1, 1, 1], &args);
    }

    /// Appends `publish` of the first `rows` sampled tokens.
    pub fn publish(&self, layout: &StepLayout, chain: &mut Chain, rows: u32) {
        let args = PublishArgs {
            state: pointer(self.state),
            tokens: pointer(self.sampled),
            results: pointer(self.results),
            rows,
            ring_slots: layout.ring_slots,
            result_bytes: result_bytes(layout.row_capacity) as u32,
            reserved: 0,
        };
        chain.push("publish", None, &registry::PUBLISH, [1, 1, 1], &args);
    }
}

/// A symbolic pointer to the start of a buffer.
pub fn pointer(buffer: BufferId) -> Ptr {
    Ptr::symbol(buffer.0, 0)
}

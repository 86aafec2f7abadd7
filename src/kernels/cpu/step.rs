//! `ingest`, `embed` and `publish`: what frames a step.

use half::bf16;

use super::view::{Bound, View, ViewMut};
use crate::DType;
use crate::hal::Workgroup;
use crate::kernels::step::{
    BlockUpdate, EmbedArgs, IngestArgs, PublishArgs, ResultHeader, SequenceRecord, SlotHeader, StepError, StepState,
    TOKEN_FROM_DEVICE, slot_tokens_offset, slot_updates_offset,
};

/// What is wrong with a slot, and the three numbers that say so.
type Fault = (StepError, [u32; 3]);

/// `ingest`. A slot that is stale, too large or points outside the tables gives an error and an empty step: all rows are pads.
pub fn ingest(args: &Bound<'_, IngestArgs>, _: &mut Workgroup<'_>) {
    let mut state_view = args.write::<u8>(|a| &a.state);
    let before: StepState = bytemuck::pod_read_unaligned(state_view.slice_mut(0, size_of::<StepState>()));
    let mut state = StepState { sequence: before.sequence + 1, ..StepState::default() };
    let slot = Slot { args, ring: args.read(|a| &a.ring), base: slot_base(state.sequence, args.ring_slots, args.slot_bytes) };
    let taken = slot.wait(state.sequence).and_then(|()| {
        let header: SlotHeader = slot.ring.read_pod(slot.base);
        slot.check_counts(&header)?;
        slot.apply_updates(&header)?;
        slot.check_sequences(&header)?;
        Ok(header)
    });
    let header = match taken {
        Ok(header) => header,
        Err((error, detail)) => {
            (state.error, state.error_detail) = (error as u32, detail);
            SlotHeader::default()
        }
    };
    state.live_sequences = header.live_sequences;
    state.live_rows = header.live_rows;
    state.kv_len_max = header.kv_len_max;
    slot.spread(&header);
    state_view.write_pod(0, &state);
}

/// Step n uses slot n mod `slots` of its ring.
fn slot_base(sequence: u64, slots: u32, bytes: u32) -> usize {
    (sequence % u64::from(slots)) as usize * bytes as usize
}

struct Slot<'a> {
    args: &'a Bound<'a, IngestArgs>,
    ring: View<'a, u8>,
    base: usize,
}

impl Slot<'_> {
    /// Polls for the slot's sequence number; gives up after `poll_limit`, or at once if the ring has gone past it.
    fn wait(&self, expected: u64) -> Result<(), Fault> {
        let mut found = self.ring.load_acquire(self.base);
        for _ in 0..self.args.poll_limit {
            if found >= expected {
                break;
            }
            std::hint::spin_loop();
            found = self.ring.load_acquire(self.base);
        }
        if found == expected { Ok(()) } else { Err((StepError::StaleSlot, [expected as u32, found as u32, 0])) }
    }

    fn check_counts(&self, header: &SlotHeader) -> Result<(), Fault> {
        let args = self.args;
        for (found, limit) in [
            (header.live_sequences, args.sequences.min(args.sequence_capacity)),
            (header.live_rows, args.rows.min(args.row_capacity)),
            (header.updates, args.update_capacity),
        ] {
            if found > limit {
                return Err((StepError::TooManyRows, [found, limit, 0]));
            }
        }
        Ok(())
    }

    fn apply_updates(&self, header: &SlotHeader) -> Result<(), Fault> {
        let args = self.args;
        let at = self.base + slot_updates_offset(args.sequence_capacity, args.row_capacity) as usize;
        let mut table = args.write::<i32>(|a| &a.block_table);
        for i in 0..header.updates as usize {
            let update: BlockUpdate = self.ring.read_pod(at + i * size_of::<BlockUpdate>());
            if update.slot >= args.slots || update.index >= args.table_width || update.block >= args.cache_blocks {
                return Err((StepError::BlockRange, [update.slot, update.index, update.block]));
            }
            table.set(update.slot as usize * args.table_width as usize + update.index as usize, update.block as i32);
        }
        Ok(())
    }

    /// Query lengths add up to the rows and fit the graph's shape; block-table rows exist.
    fn check_sequences(&self, header: &SlotHeader) -> Result<(), Fault> {
        let args = self.args;
        let mut rows = 0u64;
        for s in 0..header.live_sequences {
            let record = self.record(s as usize);
            if record.slot >= args.slots {
                return Err((StepError::BlockRange, [s, 0, record.slot]));
            }
            // A uniform graph finds sequence s at row s * query_len, so no length but its own will do.
            if args.query_len > 0 && record.query_len != args.query_len {
                return Err((StepError::TooManyRows, [record.query_len, args.query_len, s]));
            }
            rows += u64::from(record.query_len);
        }
        if rows != u64::from(header.live_rows) {
            return Err((StepError::TooManyRows, [rows.min(u64::from(u32::MAX)) as u32, header.live_rows, 0]));
        }
        Ok(())
    }

    fn record(&self, sequence: usize) -> SequenceRecord {
        self.ring.read_pod(self.base + size_of::<SlotHeader>() + sequence * size_of::<SequenceRecord>())
    }

    fn token(&self, row: usize, last_token: &View<'_, i32>, slot: usize) -> i32 {
        let at = self.base + slot_tokens_offset(self.args.sequence_capacity) as usize;
        match self.ring.read_pod::<i32>(at + row * 4) {
            TOKEN_FROM_DEVICE => last_token.get(slot),
            token => token,
        }
    }

    /// Writes every per-sequence and per-row buffer to its whole length.
    fn spread(&self, header: &SlotHeader) {
        let args = self.args;
        let (sequences, rows) = (args.sequences as usize, args.rows as usize);
        let mut seq_slot = args.write::<i32>(|a| &a.seq_slot);
        let mut seq_len = args.write::<i32>(|a| &a.seq_len);
        let mut cu_seqlens = args.write::<i32>(|a| &a.cu_seqlens);
        let mut records = args.write::<u8>(|a| &a.records);
        let last_token = args.read::<i32>(|a| &a.last_token);
        let mut out = Rows {
            seq: args.write(|a| &a.row_seq),
            slot: args.write(|a| &a.row_slot),
            len: args.write(|a| &a.row_len),
            token: args.write(|a| &a.tokens),
        };
        let mut row = 0;
        cu_seqlens.set(0, 0);
        for s in 0..sequences {
            let live = s < header.live_sequences as usize;
            let record = if live { self.record(s) } else { SequenceRecord::default() };
            seq_slot.set(s, record.slot as i32);
            seq_len.set(s, record.kv_len as i32);
            records.write_pod(s * size_of::<SequenceRecord>(), &record);
            for t in 0..record.query_len {
                let len = i64::from(record.kv_len) - i64::from(record.query_len) + i64::from(t) + 1;
                let token = self.token(row, &last_token, record.slot as usize);
                out.set(row, s as i32, record.slot as i32, len.max(0) as i32, token);
                row += 1;
            }
            cu_seqlens.set(s + 1, row as i32);
        }
        for pad in row..rows {
            out.set(pad, 0, 0, 0, 0);
        }
    }
}

struct Rows<'a> {
    seq: ViewMut<'a, i32>,
    slot: ViewMut<'a, i32>,
    len: ViewMut<'a, i32>,
    token: ViewMut<'a, i32>,
}

impl Rows<'_> {
    fn set(&mut self, row: usize, seq: i32, slot: i32, len: i32, token: i32) {
        self.seq.set(row, seq);
        self.slot.set(row, slot);
        self.len.set(row, len);
        self.token.set(row, token);
    }
}

/// `embed`.
pub fn embed(args: &Bound<'_, EmbedArgs>, workgroup: &mut Workgroup<'_>) {
    let (row, width) = (workgroup.id[0] as usize, args.width as usize);
    if workgroup.id[0] >= args.rows {
        return;
    }
    let token = args.read::<i32>(|a| &a.tokens).get(row);
    let live = args.read::<i32>(|a| &a.row_len).get(row) > 0;
    let mut out = args.write::<f32>(|a| &a.out);
    let out = out.slice_mut(row * width, width);
    if !live || token < 0 || token as u32 >= args.vocab {
        out.fill(0.0);
        return;
    }
    match DType::from_code(args.table_dtype) {
        DType::F32 => out.copy_from_slice(args.read::<f32>(|a| &a.table).slice(token as usize * width, width)),
        DType::Bf16 => {
            let from = args.read::<bf16>(|a| &a.table).slice(token as usize * width, width);
            out.iter_mut().zip(from).for_each(|(out, from)| *out = from.to_f32());
        }
        other => panic!("no embedding table holds {other}"),
    }
}

/// `publish`.
pub fn publish(args: &Bound<'_, PublishArgs>, _: &mut Workgroup<'_>) {
    let state: StepState = args.read::<u8>(|a| &a.state).read_pod(0);
    let tokens = args.read::<i32>(|a| &a.tokens);
    let mut results = args.write::<u8>(|a| &a.results);
    let base = slot_base(state.sequence, args.ring_slots, args.result_bytes);
    let head = size_of::<ResultHeader>();
    let capacity = (args.result_bytes as usize - head) / 4;
    let tokens = tokens.slice(0, (args.rows as usize).min(capacity));
    results.slice_mut(base + head, tokens.len() * 4).copy_from_slice(bytemuck::cast_slice(tokens));
    let header = ResultHeader {
        sequence: 0,
        live_sequences: state.live_sequences,
        live_rows: state.live_rows,
        error: state.error,
        error_detail: state.error_detail,
        reserved: [0; 8],
    };
    // All but the sequence number, which the host may be reading: it comes last, and tells that the rest is there.
    results.slice_mut(base + 8, head - 8).copy_from_slice(&bytemuck::bytes_of(&header)[8..]);
    results.store_release(base, state.sequence);
}

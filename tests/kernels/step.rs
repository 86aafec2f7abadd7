//! Cases of `ingest`, `embed`, `sample`, `publish`.

use bytemuck::{bytes_of, cast_slice};
use capstan::DType;
use capstan::kernels::registry::{EMBED, INGEST, PUBLISH, SAMPLE};
use capstan::kernels::step::{
    BlockUpdate, EmbedArgs, IngestArgs, PublishArgs, SampleArgs, SequenceRecord, SlotHeader, StepState, TOKEN_FROM_DEVICE,
    result_bytes, slot_bytes, slot_tokens_offset, slot_updates_offset,
};

use super::{Case, Compare, Draw};

pub fn cases(draw: &mut Draw) -> Vec<Case> {
    let mut all: Vec<Case> = (0..8).map(|fault| ingest(draw, fault)).collect();
    all.extend([embed(draw), publish(draw)]);
    all.extend((0..6).map(|_| sample(draw)));
    all
}

/// A record of a sequence.
fn record(draw: &mut Draw, slots: u32, query_len: u32) -> SequenceRecord {
    SequenceRecord {
        slot: draw.between(0, slots - 1),
        kv_len: draw.between(0, 400),
        query_len,
        temperature: draw.of(&[0.0, 0.7, 1.0]),
        top_k: draw.of(&[0, 1, 20]),
        top_p: draw.of(&[1.0, 0.9, 0.1]),
        min_p: draw.of(&[0.0, 0.05]),
        seed: draw.0.next_u64(),
        ..Default::default()
    }
}

/// A step, good (0 to 2) or with one of the faults.
fn ingest(draw: &mut Draw, fault: u32) -> Case {
    let uniform = draw.chance(2);
    let query_len = if uniform { draw.between(1, 4) } else { 0 };
    let (sequences, slots, table_width, cache_blocks) = (draw.between(1, 300), draw.between(1, 320), draw.between(1, 9), 50);
    let live = draw.between(0, sequences);
    let mut records: Vec<SequenceRecord> = (0..live)
        .map(|_| {
            let ragged = draw.of(&[0, 1, 1, 2, 9]);
            record(draw, slots, if uniform { query_len } else { ragged })
        })
        .collect();
    let live_rows: u32 = records.iter().map(|record| record.query_len).sum();
    let rows = if uniform { sequences * query_len } else { live_rows + draw.between(0, 300) };
    let rows = rows.max(1);
    let (sequence_capacity, row_capacity, update_capacity) = (sequences + 2, rows + draw.between(0, 5), 700);
    let ring_slots = draw.between(1, 4);
    let slot_size = slot_bytes(sequence_capacity, row_capacity, update_capacity);
    let before = draw.between(0, 20);
    let expected = u64::from(before) + 1;
    // Few cells, so that updates of one step hit the same cell.
    let mut updates: Vec<BlockUpdate> = (0..draw.of(&[0, 3, 600]))
        .map(|_| BlockUpdate {
            slot: draw.between(0, slots.min(3) - 1),
            index: draw.between(0, table_width - 1),
            block: draw.between(0, cache_blocks - 1),
            reserved: 0,
        })
        .collect();
    let mut header = SlotHeader {
        sequence: expected,
        live_sequences: live,
        live_rows,
        updates: updates.len() as u32,
        kv_len_max: 7,
        ..Default::default()
    };
    let at = |draw: &mut Draw, len: usize| draw.between(0, len.max(1) as u32 - 1) as usize;
    match fault {
        3 => header.sequence = expected - 1,
        4 => header.live_sequences = sequences + 1,
        5 if !updates.is_empty() => {
            let wrong = at(draw, updates.len());
            updates[wrong].block = cache_blocks;
        }
        6 if live > 0 => {
            let wrong = at(draw, records.len());
            records[wrong].slot = slots;
        }
        7 => header.live_rows = live_rows + 1,
        _ => {}
    }
    let mut slot = vec![0u8; slot_size as usize];
    slot[..64].copy_from_slice(bytes_of(&header));
    slot[64..64 + records.len() * 48].copy_from_slice(cast_slice(&records));
    let tokens: Vec<i32> = (0..live_rows.min(row_capacity))
        .map(|_| if draw.chance(3) { TOKEN_FROM_DEVICE } else { draw.between(0, 999) as i32 })
        .collect();
    let tokens_at = slot_tokens_offset(sequence_capacity) as usize;
    slot[tokens_at..tokens_at + tokens.len() * 4].copy_from_slice(cast_slice(&tokens));
    let updates_at = slot_updates_offset(sequence_capacity, row_capacity) as usize;
    slot[updates_at..updates_at + updates.len() * 16].copy_from_slice(cast_slice(&updates));
    let mut ring = vec![0u8; (u64::from(ring_slots) * slot_size) as usize];
    let base = (expected % u64::from(ring_slots) * slot_size) as usize;
    ring[base..base + slot.len()].copy_from_slice(&slot);
    let state = StepState { sequence: u64::from(before), error: 9, ..Default::default() };
    let last_token: Vec<i32> = (0..slots).map(|_| draw.between(0, 99) as i32).collect();
    let args = IngestArgs {
        sequences,
        rows,
        query_len,
        ring_slots,
        slot_bytes: slot_size as u32,
        sequence_capacity,
        row_capacity,
        update_capacity,
        slots,
        table_width,
        cache_blocks,
        poll_limit: 3,
        ..Default::default()
    };
    let mut case = Case::new(format!("fault {fault} {args:?}"), &INGEST, [1, 1, 1], &args)
        .with("ring", &ring)
        .with("state", bytes_of(&state))
        .with("last_token", &last_token)
        .with("block_table", &vec![-1i32; (slots * table_width) as usize]);
    for field in ["seq_slot", "seq_len", "cu_seqlens", "records", "row_seq", "row_slot", "row_len", "tokens"] {
        case = case.undefined(field, Compare::Exact);
    }
    case
}

fn embed(draw: &mut Draw) -> Case {
    let (rows, width, vocab) = (draw.between(1, 20), draw.between(1, 600), draw.between(1, 50));
    let dtype = draw.of(&[DType::F32, DType::Bf16]);
    let tokens: Vec<i32> = (0..rows).map(|_| draw.between(0, vocab + 1) as i32 - 1).collect();
    let args = EmbedArgs { rows, width, vocab, table_dtype: dtype.code(), ..Default::default() };
    Case::new(format!("{args:?}"), &EMBED, [rows, 1, 1], &args)
        .with("tokens", &tokens)
        .with("row_len", &draw.lens(rows, 9))
        .with("table", &draw.cells(dtype, vocab * width, 1.0))
        .undefined("out", Compare::Exact)
}

fn publish(draw: &mut Draw) -> Case {
    let (rows, ring_slots) = (draw.between(1, 600), draw.between(1, 4));
    let result_bytes = result_bytes(rows + draw.between(0, 3)) as u32;
    let state = StepState {
        sequence: u64::from(draw.between(1, 99)),
        live_sequences: 3,
        live_rows: rows,
        error: 2,
        error_detail: [4, 5, 6],
        kv_len_max: 8,
        ..Default::default()
    };
    let tokens: Vec<i32> = (0..rows).map(|_| draw.between(0, 99) as i32).collect();
    let args = PublishArgs { rows, ring_slots, result_bytes, ..Default::default() };
    Case::new(format!("{args:?}"), &PUBLISH, [1, 1, 1], &args)
        .with("state", bytes_of(&state))
        .with("tokens", &tokens)
        .undefined("results", Compare::Exact)
}

fn sample(draw: &mut Draw) -> Case {
    let (rows, vocab, step_rows, slots) = (draw.between(1, 8), draw.between(1, 3000), draw.between(1, 9), draw.between(9, 20));
    let sequences = step_rows;
    let indexed = u32::from(draw.chance(2));
    let (rows, step_rows) = if indexed == 1 { (rows, step_rows) } else { (step_rows, step_rows) };
    let mut logits: Vec<f32> = draw.floats(rows * vocab).into_iter().map(|x| x * 3.0).collect();
    if draw.chance(2) {
        logits.iter_mut().for_each(|x| *x = x.round());
    }
    for special in [f32::NAN, f32::NEG_INFINITY, -0.0] {
        let at = draw.between(0, rows * vocab - 1) as usize;
        logits[at] = special;
    }
    if draw.chance(4) {
        logits[..vocab as usize].fill(f32::NAN);
    }
    let records: Vec<SequenceRecord> = (0..sequences).map(|_| record(draw, slots, 1)).collect();
    // Each sequence has its own slot: two rows may not both be the last of one.
    let row_slot = draw.permutation(slots)[..step_rows as usize].to_vec();
    let row_len: Vec<i32> =
        records.iter().map(|record| if draw.chance(4) { 0 } else { record.kv_len as i32 - i32::from(draw.chance(3)) }).collect();
    // A step row is sampled once.
    let mut index = draw.permutation(step_rows);
    index.resize(rows.max(step_rows) as usize, -1);
    let args = SampleArgs { rows, vocab, step_rows, sequences, slots, indexed, ..Default::default() };
    let case = Case::new(format!("{args:?} {records:?}"), &SAMPLE, [rows, 1, 1], &args);
    let case = if indexed == 1 { case.with("rows_index", &index) } else { case };
    case.with("logits", &logits)
        .with("row_seq", &(0..step_rows as i32).collect::<Vec<_>>())
        .with("row_slot", &row_slot)
        .with("row_len", &row_len)
        .with("records", cast_slice::<_, u8>(&records))
        .undefined("out", Compare::Exact)
        .with("last_token", &vec![-5i32; slots as usize])
}

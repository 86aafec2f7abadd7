//! `ingest`, `embed` and `publish`.

use bytemuck::{bytes_of, cast_slice, pod_read_unaligned};
use half::bf16;

use super::super::ops;
use super::{ptr, run};
use crate::DType;
use crate::kernels::step::*;

const SEQUENCES: u32 = 3;
const ROWS: u32 = 6;

/// A ring of two slots and everything `ingest` writes; capacity 5 sequences, 7 rows, 4 updates.
struct Bench {
    ring: Vec<u64>,
    state: Vec<StepState>,
    seq_slot: Vec<i32>,
    seq_len: Vec<i32>,
    cu_seqlens: Vec<i32>,
    records: Vec<SequenceRecord>,
    rows: [Vec<i32>; 4],
    last_token: Vec<i32>,
    table: Vec<i32>,
    poll_limit: u32,
}

impl Bench {
    fn new() -> Bench {
        let rows = || vec![-9; ROWS as usize];
        Bench {
            ring: vec![u64::MAX - 8; 2 * slot_bytes(5, 7, 4) as usize / 8],
            state: vec![StepState { error: 99, ..StepState::default() }],
            seq_slot: vec![-9; SEQUENCES as usize],
            seq_len: vec![-9; SEQUENCES as usize],
            cu_seqlens: vec![-9; SEQUENCES as usize + 1],
            records: vec![SequenceRecord { slot: 9, ..SequenceRecord::default() }; SEQUENCES as usize],
            rows: [rows(), rows(), rows(), rows()],
            last_token: vec![100, 101, 102, 103],
            table: vec![-1; 4 * 3],
            poll_limit: 100,
        }
    }

    fn fill(&mut self, header: SlotHeader, records: &[SequenceRecord], tokens: &[i32], updates: &[BlockUpdate]) {
        let bytes = slot_bytes(5, 7, 4) as usize;
        let base = (header.sequence % 2) as usize * bytes;
        let ring: &mut [u8] = bytemuck::cast_slice_mut(&mut self.ring);
        let mut put = |at: usize, from: &[u8]| ring[base + at..base + at + from.len()].copy_from_slice(from);
        put(0, bytes_of(&header));
        put(64, cast_slice(records));
        put(slot_tokens_offset(5) as usize, cast_slice(tokens));
        put(slot_updates_offset(5, 7) as usize, cast_slice(updates));
    }

    fn ingest(&mut self, query_len: u32) -> StepState {
        let [row_seq, row_slot, row_len, tokens] = &mut self.rows;
        let args = IngestArgs {
            ring: ptr(&mut self.ring),
            state: ptr(&mut self.state),
            seq_slot: ptr(&mut self.seq_slot),
            seq_len: ptr(&mut self.seq_len),
            cu_seqlens: ptr(&mut self.cu_seqlens),
            records: ptr(&mut self.records),
            row_seq: ptr(row_seq),
            row_slot: ptr(row_slot),
            row_len: ptr(row_len),
            tokens: ptr(tokens),
            last_token: ptr(&mut self.last_token),
            block_table: ptr(&mut self.table),
            sequences: SEQUENCES,
            rows: ROWS,
            query_len,
            ring_slots: 2,
            slot_bytes: slot_bytes(5, 7, 4) as u32,
            sequence_capacity: 5,
            row_capacity: 7,
            update_capacity: 4,
            slots: 4,
            table_width: 3,
            cache_blocks: 50,
            poll_limit: self.poll_limit,
        };
        run(ops::ingest, [1, 1, 1], &args);
        self.state[0]
    }

    fn assert_empty(&self) {
        assert!(self.seq_slot.iter().chain(&self.seq_len).chain(&self.cu_seqlens).all(|&x| x == 0));
        assert!(self.rows.iter().flatten().all(|&x| x == 0));
        assert!(self.records.iter().all(|&record| record == SequenceRecord::default()));
    }
}

fn header(sequence: u64, live_sequences: u32, live_rows: u32, updates: u32) -> SlotHeader {
    SlotHeader { sequence, live_sequences, live_rows, updates, kv_len_max: 77, ..SlotHeader::default() }
}

fn record(slot: u32, kv_len: u32, query_len: u32) -> SequenceRecord {
    SequenceRecord { slot, kv_len, query_len, top_p: 0.5, seed: 42, ..SequenceRecord::default() }
}

#[test]
fn a_uniform_step_spreads_and_pads() {
    let mut bench = Bench::new();
    let update = |slot, index, block| BlockUpdate { slot, index, block, reserved: 0 };
    let records = [record(2, 10, 2), record(1, 1, 2)];
    bench.fill(header(1, 2, 4, 2), &records, &[11, 12, TOKEN_FROM_DEVICE, 14], &[update(2, 0, 49), update(3, 2, 7)]);
    let state = bench.ingest(2);
    assert_eq!((state.sequence, state.live_sequences, state.live_rows, state.error, state.kv_len_max), (1, 2, 4, 0, 77));
    assert_eq!(bench.seq_slot, [2, 1, 0]);
    assert_eq!(bench.seq_len, [10, 1, 0]);
    assert_eq!(bench.cu_seqlens, [0, 2, 4, 4]);
    assert_eq!(bench.records, [records[0], records[1], SequenceRecord::default()]);
    // kv_len 1 with two rows: the first row sees nothing.
    assert_eq!(
        bench.rows,
        [vec![0, 0, 1, 1, 0, 0], vec![2, 2, 1, 1, 0, 0], vec![9, 10, 0, 1, 0, 0], vec![11, 12, 101, 14, 0, 0]]
    );
    assert_eq!(bench.table, [-1, -1, -1, -1, -1, -1, 49, -1, -1, -1, -1, 7]);
}

#[test]
fn a_ragged_step_follows_each_query_length() {
    let mut bench = Bench::new();
    bench.fill(
        header(1, 3, 6, 0),
        &[record(0, 3, 3), record(1, 100, 1), record(3, 7, 2)],
        &[1, 2, 3, 4, 5, TOKEN_FROM_DEVICE],
        &[],
    );
    assert_eq!(bench.ingest(0).error, 0);
    assert_eq!(bench.cu_seqlens, [0, 3, 4, 6]);
    assert_eq!(bench.rows[2], [1, 2, 3, 100, 6, 7]);
    assert_eq!(bench.rows[3], [1, 2, 3, 4, 5, 103]);
    // The next step takes the other slot and leaves nothing of this one.
    bench.fill(header(2, 0, 0, 0), &[], &[], &[]);
    assert_eq!(bench.ingest(0).sequence, 2);
    bench.assert_empty();
}

#[test]
fn a_stale_slot_is_an_error_and_an_empty_step() {
    let mut bench = Bench::new();
    bench.fill(header(1, 1, 1, 0), &[record(0, 3, 1)], &[1], &[]);
    assert_eq!(bench.ingest(1).error, 0);
    bench.ring[0] = 0;
    let state = bench.ingest(1);
    assert_eq!((state.sequence, state.error, state.error_detail), (2, StepError::StaleSlot as u32, [2, 0, 0]));
    bench.assert_empty();
    // A slot of the round after is as wrong as one of the round before.
    bench.fill(header(5, 1, 1, 0), &[record(0, 3, 1)], &[1], &[]);
    assert_eq!(bench.ingest(1).error_detail, [3, 5, 0]);
    bench.assert_empty();
}

#[test]
fn oversized_and_foreign_slots_are_errors() {
    let good = [record(0, 3, 1), record(1, 3, 1), record(2, 3, 1)];
    let bad_update = [BlockUpdate { slot: 0, index: 3, block: 1, reserved: 0 }];
    let bad_block = [BlockUpdate { slot: 0, index: 0, block: 50, reserved: 0 }];
    type Case<'a> = (SlotHeader, &'a [SequenceRecord], &'a [BlockUpdate], StepError, [u32; 3]);
    let cases: [Case<'_>; 8] = [
        (header(1, 4, 4, 0), &good, &[], StepError::TooManyRows, [4, 3, 0]),
        (header(1, 3, 7, 0), &good, &[], StepError::TooManyRows, [7, 6, 0]),
        (header(1, 3, 3, 5), &good, &[], StepError::TooManyRows, [5, 4, 0]),
        (header(1, 3, 2, 0), &good, &[], StepError::TooManyRows, [3, 2, 0]),
        (header(1, 1, 2, 0), &[record(0, 3, 2)], &[], StepError::TooManyRows, [2, 1, 0]),
        (header(1, 1, 1, 0), &[record(4, 3, 1)], &[], StepError::BlockRange, [0, 0, 4]),
        (header(1, 3, 3, 1), &good, &bad_update, StepError::BlockRange, [0, 3, 1]),
        (header(1, 3, 3, 1), &good, &bad_block, StepError::BlockRange, [0, 0, 50]),
    ];
    for (header, records, updates, error, detail) in cases {
        let mut bench = Bench::new();
        bench.fill(header, records, &[1, 1, 1], updates);
        let state = bench.ingest(1);
        assert_eq!((state.error, state.error_detail, state.live_rows), (error as u32, detail, 0), "{header:?}");
        bench.assert_empty();
        assert!(bench.table.iter().all(|&block| block == -1));
    }
}

#[test]
fn ingest_waits_for_a_slot_that_is_being_written() {
    let mut bench = Bench::new();
    bench.fill(header(1, 1, 1, 0), &[record(0, 3, 1)], &[5], &[]);
    let number = slot_bytes(5, 7, 4) as usize / 8;
    bench.ring[number] = 0;
    bench.poll_limit = u32::MAX;
    let at = ptr(&mut bench.ring[number..=number]);
    let state = std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            // SAFETY: the ring outlives the scope, and `ingest` reads this word atomically.
            unsafe { std::sync::atomic::AtomicU64::from_ptr(at.0 as *mut u64) }.store(1, std::sync::atomic::Ordering::Release);
        });
        bench.ingest(1)
    });
    assert_eq!((state.error, bench.rows[3][0]), (0, 5));
}

#[test]
fn embed_looks_rows_up() {
    let mut table: Vec<bf16> = (0..4 * 3).map(|x| bf16::from_f32(x as f32)).collect();
    let mut wide: Vec<f32> = table.iter().map(|x| x.to_f32()).collect();
    let (mut tokens, mut lens) = (vec![3, 1, 0, 4, -1], vec![1, 0, 7, 1, 1]);
    for dtype in [DType::Bf16, DType::F32] {
        let mut out = vec![f32::NAN; 15];
        let table = if dtype == DType::F32 { ptr(&mut wide) } else { ptr(&mut table) };
        let (tokens, row_len) = (ptr(&mut tokens), ptr(&mut lens));
        let args =
            EmbedArgs { tokens, row_len, table, out: ptr(&mut out), rows: 5, width: 3, vocab: 4, table_dtype: dtype.code() };
        run(ops::embed, [5, 1, 1], &args);
        assert_eq!(out, [9.0, 10.0, 11.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }
}

#[test]
fn publish_answers_in_the_slot_of_its_step() {
    let mut state = vec![StepState {
        sequence: 7,
        live_rows: 3,
        live_sequences: 2,
        error: 3,
        error_detail: [1, 2, 3],
        ..StepState::default()
    }];
    let mut tokens = vec![4, 5, 6];
    let bytes = result_bytes(6) as usize;
    let mut results = vec![u64::MAX; 4 * bytes / 8];
    let args = PublishArgs {
        state: ptr(&mut state),
        tokens: ptr(&mut tokens),
        results: ptr(&mut results),
        rows: 3,
        ring_slots: 4,
        result_bytes: bytes as u32,
        reserved: 0,
    };
    run(ops::publish, [1, 1, 1], &args);
    let all: &[u8] = cast_slice(&results);
    let slot = &all[3 * bytes..];
    let found: ResultHeader = pod_read_unaligned(&slot[..64]);
    let expected =
        ResultHeader { sequence: 7, live_sequences: 2, live_rows: 3, error: 3, error_detail: [1, 2, 3], reserved: [0; 8] };
    assert_eq!(found, expected);
    assert_eq!(&slot[64..76], cast_slice::<i32, u8>(&[4, 5, 6]));
    assert!(slot[76..].iter().chain(&all[..3 * bytes]).all(|&x| x == 0xff));
}

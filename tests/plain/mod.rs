//! Runs a model's chains op by op on plain host memory: no arena, device, stream or executor, so that a test sees every buffer
//! between two ops. What is not written stays poisoned (NaN), caches included.

#![allow(dead_code, clippy::allow_attributes, reason = "each test that includes this uses a part of it")]
#![expect(unsafe_code, reason = "launches ops on memory of the test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::bytes_of;
use capstan::arena::{BufferId, Purpose};
use capstan::chain::{Chain, GraphKey, Op, StepChains};
use capstan::config::Limits;
use capstan::hal::Workgroup;
use capstan::kernels::Ptr;
use capstan::kernels::step::{
    BlockUpdate, SequenceRecord, SlotHeader, StepState, slot_bytes, slot_tokens_offset, slot_updates_offset,
};
use capstan::model::{Checkpoint, M3Chains};

/// One sequence's part of a step.
#[derive(Clone)]
pub struct Turn {
    /// Row of the block table.
    pub slot: u32,
    /// Its tokens in this step.
    pub tokens: Vec<i32>,
}

/// A model on plain memory.
pub struct Plain {
    pub chains: M3Chains,
    buffers: Vec<Vec<u64>>,
    /// Tokens each slot holds.
    lens: Vec<u32>,
    free_blocks: Vec<u32>,
    updates: Vec<BlockUpdate>,
    sequence: u64,
    threads: u32,
}

impl Plain {
    /// Loads a checkpoint.
    pub fn new(checkpoint: &Arc<Checkpoint>, limits: &Limits) -> Plain {
        let chains = M3Chains::new(checkpoint.clone(), limits).unwrap();
        let poison =
            |purpose| matches!(purpose, Purpose::KvCache | Purpose::IndexCache | Purpose::Activations | Purpose::Selection);
        let buffers = chains.plan().buffers.iter().map(|buffer| {
            let word = if poison(buffer.spec.purpose) { u64::MAX } else { 0 };
            vec![word; buffer.bytes.div_ceil(8) as usize]
        });
        let mut plain = Plain {
            buffers: buffers.collect(),
            lens: vec![0; limits.max_num_seqs as usize],
            // Blocks are handed out from the end and out of order: no sequence's are in a row.
            free_blocks: shuffled(chains.step_layout().cache_blocks),
            updates: vec![],
            sequence: 0,
            threads: 1,
            chains,
        };
        for packed in checkpoint.weights() {
            let buffer = plain.chains.m3_plan().weight(packed.weight).buffer;
            let sink = |offset: u64, bytes: &[u8]| {
                plain.bytes(buffer)[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok(())
            };
            checkpoint.stream(packed, sink).unwrap();
        }
        plain.write_cos_sin();
        plain
    }

    /// Runs workgroups on this many threads.
    pub fn threads(mut self, threads: u32) -> Plain {
        self.threads = threads;
        self
    }

    fn write_cos_sin(&mut self) {
        let plan = self.chains.m3_plan();
        let (half, positions) = (plan.dims.rotary_dim as usize / 2, plan.limits.max_model_len as usize);
        let theta = plan.shape.rope_theta as f32;
        let buffer = plan.attention.cos_sin;
        let mut table = vec![0f32; positions * 2 * half];
        for (at, row) in table.chunks_mut(2 * half).enumerate() {
            for i in 0..half {
                let angle = at as f32 * (1.0 / theta.powf((2 * i) as f32 / (2 * half) as f32));
                (row[i], row[half + i]) = (angle.cos(), angle.sin());
            }
        }
        self.bytes(buffer)[..table.len() * 4].copy_from_slice(bytemuck::cast_slice(&table));
    }

    /// A buffer's bytes.
    pub fn bytes(&mut self, buffer: BufferId) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.buffers[buffer.0 as usize])
    }

    /// `len` f32 of a buffer from `at`.
    pub fn floats(&mut self, buffer: BufferId, at: usize, len: usize) -> Vec<f32> {
        bytemuck::cast_slice(&self.bytes(buffer)[at * 4..][..len * 4]).to_vec()
    }

    /// `len` i32 of a buffer from `at`.
    pub fn ints(&mut self, buffer: BufferId, at: usize, len: usize) -> Vec<i32> {
        bytemuck::cast_slice(&self.bytes(buffer)[at * 4..][..len * 4]).to_vec()
    }

    /// Logits of row `row` of the last step.
    pub fn logits(&mut self, row: usize) -> Vec<f32> {
        let (buffer, vocab) = (self.chains.m3_plan().activations.logits, self.chains.vocab() as usize);
        self.floats(buffer, row * vocab, vocab)
    }

    /// Tokens the last step sampled.
    pub fn sampled(&mut self, rows: usize) -> Vec<i32> {
        let buffer = self.chains.step().sampled;
        self.ints(buffer, 0, rows)
    }

    /// Ends a sequence; its blocks are free again.
    pub fn close(&mut self, slot: u32) {
        let (table, width) = (self.chains.step().block_table, self.chains.step_layout().table_width as usize);
        let blocks = self.lens[slot as usize].div_ceil(self.chains.step_layout().block_size) as usize;
        let held = self.ints(table, slot as usize * width, blocks);
        self.free_blocks.extend(held.iter().map(|&block| block as u32));
        self.lens[slot as usize] = 0;
    }

    /// A prefill step.
    pub fn prefill(&mut self, turns: &[Turn], hook: impl FnMut(&Op, &mut Plain)) {
        let rows = turns.iter().map(|turn| turn.tokens.len()).sum::<usize>() as u32;
        self.submit(turns);
        let chain = self.chains.prefill(turns.len() as u32, rows);
        self.run(&chain, hook);
    }

    /// A decode step padded to `sequences`.
    pub fn decode(&mut self, turns: &[Turn], sequences: u32, hook: impl FnMut(&Op, &mut Plain)) {
        self.submit(turns);
        let query_len = turns[0].tokens.len() as u32;
        let kv_len_max = self.chains.limits().max_model_len;
        let chain = self.chains.decode(&GraphKey { query_len, sequences, kv_len_max, rank: 0, world: 1 });
        self.run(&chain, hook);
    }

    /// Fills the next slot of the ring.
    fn submit(&mut self, turns: &[Turn]) {
        let layout = *self.chains.step_layout();
        let records: Vec<SequenceRecord> = turns.iter().map(|turn| self.grow(turn)).collect();
        self.sequence += 1;
        let header = SlotHeader {
            sequence: self.sequence,
            live_sequences: turns.len() as u32,
            live_rows: records.iter().map(|record| record.query_len).sum(),
            updates: self.updates.len() as u32,
            kv_len_max: records.iter().map(|record| record.kv_len).max().unwrap(),
            ..Default::default()
        };
        let tokens: Vec<i32> = turns.iter().flat_map(|turn| turn.tokens.clone()).collect();
        let bytes = slot_bytes(layout.sequence_capacity, layout.row_capacity, layout.update_capacity);
        let base = ((self.sequence % u64::from(layout.ring_slots)) * bytes) as usize;
        let updates = std::mem::take(&mut self.updates);
        assert!(updates.len() <= layout.update_capacity as usize, "more new blocks than a step carries");
        let parts: [(u64, &[u8]); 4] = [
            (0, bytes_of(&header)),
            (size_of::<SlotHeader>() as u64, bytemuck::cast_slice(&records)),
            (slot_tokens_offset(layout.sequence_capacity), bytemuck::cast_slice(&tokens)),
            (slot_updates_offset(layout.sequence_capacity, layout.row_capacity), bytemuck::cast_slice(&updates)),
        ];
        let ring = self.chains.step().ring;
        for (offset, bytes) in parts {
            self.bytes(ring)[base + offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Makes room for a turn's tokens.
    fn grow(&mut self, turn: &Turn) -> SequenceRecord {
        let block_size = self.chains.step_layout().block_size;
        let len = &mut self.lens[turn.slot as usize];
        let (from, query_len) = (len.div_ceil(block_size), turn.tokens.len() as u32);
        *len += query_len;
        for index in from..len.div_ceil(block_size) {
            let block = self.free_blocks.pop().expect("a block is free");
            self.updates.push(BlockUpdate { slot: turn.slot, index, block, reserved: 0 });
        }
        SequenceRecord { slot: turn.slot, kv_len: *len, query_len, top_p: 1.0, ..Default::default() }
    }

    /// Runs every op of a chain; `hook` sees the memory after each.
    fn run(&mut self, chain: &Chain, mut hook: impl FnMut(&Op, &mut Plain)) {
        for op in &chain.ops {
            self.run_op(op);
            hook(op, self);
        }
        let state = self.chains.step().state;
        let state: StepState = bytemuck::pod_read_unaligned(&self.bytes(state)[..64]);
        assert_eq!((state.sequence, state.error), (self.sequence, 0), "{:?}", state.error_detail);
    }

    fn run_op(&mut self, op: &Op) {
        let mut args = op.args.clone();
        for field in op.kernel.args.pointers() {
            let extent = field.extent_bytes(&op.args);
            match field.pointer(&op.args).as_symbol() {
                None => assert_eq!(extent, 0, "{}.{}", op.label, field.name),
                Some((buffer, offset)) => {
                    let planned = self.chains.plan().buffers[buffer as usize].bytes;
                    assert!(offset + extent <= planned, "{}.{}: {offset}+{extent} > {planned}", op.label, field.name);
                    let address = self.buffers[buffer as usize].as_mut_ptr().expose_provenance() as u64 + offset;
                    field.set_pointer(&mut args, Ptr(address));
                }
            }
        }
        let [x, y, z] = op.shape.grid;
        let next = AtomicU32::new(0);
        let work = || {
            let mut lds = vec![0u64; op.shape.lds_bytes.div_ceil(8) as usize];
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= x * y * z {
                    return;
                }
                let id = [at % x, at / x % y, at / x / y];
                let lds = &mut bytemuck::cast_slice_mut(&mut lds)[..op.shape.lds_bytes as usize];
                // SAFETY: each pointer was just checked against its buffer, and ops run one after the other.
                unsafe { (op.kernel.cpu)(&args, &mut Workgroup { id, shape: op.shape, lds }) }
            }
        };
        if self.threads == 1 || x * y * z == 1 {
            return work();
        }
        std::thread::scope(|scope| (0..self.threads).for_each(|_| drop(scope.spawn(work))));
    }
}

fn shuffled(blocks: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..blocks).collect();
    order.sort_by_key(|block| block.wrapping_mul(0x9e37_79b1));
    order
}

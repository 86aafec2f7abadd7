//! Dummy batches around a capture (BAKE-1): sequences that are not there, at short lengths and at the limit.
//!
//! They use table rows and cache blocks that no open sequence holds, so a capture in the middle of serving harms nobody. All of
//! it is drawn from the key, so ranks that capture together see the same batches.

use std::sync::Arc;

use super::{Executor, poisoned};
use crate::capture::{CapturedGraph, launch_all, lower, record};
use crate::chain::{Chain, GraphKey};
use crate::error::Result;
use crate::hal::Graph;
use crate::invariant::{Report, audit, bake};
use crate::kernels::step::SequenceRecord;
use crate::random::Random;

/// Which dummy batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dummy {
    /// Every sequence short, half of the rows pads.
    Short,
    /// One sequence as long as the key allows, the others short: a batch at the limit that costs no more than it must.
    AtLimit,
}

impl Executor {
    /// Captures a key twice, around two dummy batches, and checks the result: BAKE-1 between the two, then the full audit of the
    /// graph that is kept.
    pub(super) fn capture_checked(&mut self, key: &GraphKey) -> Result<CapturedGraph> {
        let _span = tracing::debug_span!("capture", %key).entered();
        self.run_dummy(key, Dummy::AtLimit, &self.chains.decode(key))?;
        let chain = self.chains.decode(key);
        let first = self.record_only(&chain)?;
        self.run_dummy(key, Dummy::Short, &chain)?;
        let graph = CapturedGraph::capture(*key, self.chains.decode(key), &self.arena, &self.modules, &*self.stream)?;
        let mut report = Report::new(format!("capture of {key}"));
        bake::compare(&*first, &**graph.graph(), graph.chain(), &self.modules, &self.arena, &mut report);
        report.absorb(audit(&graph));
        report.into_result().map(|()| graph)
    }

    fn record_only(&self, chain: &Chain) -> Result<Arc<dyn Graph>> {
        let launches = lower(chain, &self.arena, &self.modules)?;
        record(&**self.arena.device(), &*self.stream, chain, &launches)
    }

    /// Runs a chain eagerly over a dummy batch and waits.
    fn run_dummy(&mut self, key: &GraphKey, dummy: Dummy, chain: &Chain) -> Result<()> {
        let launches = lower(chain, &self.arena, &self.modules)?;
        let batch = self.dummy_batch(key, dummy)?;
        self.meet("dummy batch")?;
        self.ring.room_for(1)?;
        let ticket = self.ring.fill(batch.iter().map(|(record, tokens)| (*record, &**tokens)), &[]);
        if let Err(error) = launch_all(&*self.stream, chain, &launches) {
            return Err(poisoned(&mut self.poison, error));
        }
        self.ring.commit(ticket, 0);
        self.discard(ticket)
    }

    /// Sequences for the free rows of the block table, a free cache block each; pads only if there are none.
    fn dummy_batch(&self, key: &GraphKey, dummy: Dummy) -> Result<Vec<(SequenceRecord, Vec<i32>)>> {
        let mut random = Random::new(u64::from(key.rows()) << 1 | u64::from(dummy == Dummy::AtLimit));
        let layout = self.chains.step_layout();
        let wanted = match dummy {
            Dummy::Short => key.sequences.div_ceil(2),
            Dummy::AtLimit => key.sequences,
        };
        let blocks = self.sequences.free_blocks().flat_map(|(first, count)| first..first + count);
        let places: Vec<(u32, u32)> = self.sequences.free_slots().zip(blocks).take(wanted as usize).collect();
        if places.is_empty() {
            tracing::warn!(%key, "no free table row or cache block: the dummy batches of this capture are pad rows only");
        }
        let (limit, short) = (key.kv_len_max, key.kv_len_max.min(2 * layout.block_size).max(key.query_len));
        let mut batch = Vec::with_capacity(places.len());
        for (at, (slot, block)) in places.into_iter().enumerate() {
            let row = vec![block; layout.table_width as usize];
            let offset = u64::from(slot) * u64::from(layout.table_width) * 4;
            self.arena.write(self.chains.step().block_table, offset, bytemuck::cast_slice(&row))?;
            let longest = dummy == Dummy::AtLimit && at == 0;
            let kv_len = if longest { limit } else { random.range(key.query_len, short) };
            let record = SequenceRecord {
                slot,
                kv_len,
                query_len: key.query_len,
                temperature: random.unit() as f32,
                top_k: random.range(0, 8),
                top_p: 1.0,
                seed: random.next_u64(),
                ..SequenceRecord::default()
            };
            let vocab = self.chains.vocab();
            batch.push((record, (0..key.query_len).map(|_| random.range(0, vocab - 1) as i32).collect()));
        }
        Ok(batch)
    }
}

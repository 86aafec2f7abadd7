//! Sequences: which row of the block table each holds, how long it is, and which cache blocks it owns.
//!
//! Host truth of the device's block table. Changes become [`BlockUpdate`]s that the next steps carry; a block belongs to at
//! most one sequence (PAGE-1), checked when it is granted and again when it is taken back.

use slotmap::{SlotMap, new_key_type};

use crate::error::{Error, Result};
use crate::kernels::step::BlockUpdate;

new_key_type! {
    /// A sequence that is open in an executor. Keys of closed sequences are never valid again.
    pub struct SequenceId;
}

/// A cache block's number.
pub type BlockId = u32;

const FREE: u32 = u32::MAX;

/// One open sequence.
#[derive(Debug)]
pub struct Sequence {
    /// Its row of the block table.
    pub slot: u32,
    /// Tokens whose keys and values are (or, by steps in flight, will be) in the cache.
    pub kv_len: u32,
    blocks: Vec<BlockId>,
    // Last batch that named it.
    batch: u64,
}

impl Sequence {
    /// Its cache blocks in order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// All open sequences.
#[derive(Debug)]
pub struct Sequences {
    open: SlotMap<SequenceId, Sequence>,
    free_slots: Vec<u32>,
    // Slot that owns each cache block.
    owners: Vec<u32>,
    pending: Vec<BlockUpdate>,
    block_size: u32,
    table_width: u32,
    // Batches checked so far.
    batch: u64,
    // Emptied block lists, so that reopening a slot allocates nothing.
    spare: Vec<Vec<BlockId>>,
}

impl Sequences {
    /// Room for `slots` sequences of up to `table_width` blocks of `block_size` tokens, over `cache_blocks` blocks.
    pub fn new(slots: u32, table_width: u32, block_size: u32, cache_blocks: u32) -> Sequences {
        let most = table_width.min(cache_blocks) as usize;
        Sequences {
            open: SlotMap::with_capacity_and_key(slots as usize),
            free_slots: (0..slots).rev().collect(),
            owners: vec![FREE; cache_blocks as usize],
            pending: Vec::with_capacity(slots as usize * 4),
            block_size,
            table_width,
            batch: 0,
            spare: (0..slots).map(|_| Vec::with_capacity(most.min(64))).collect(),
        }
    }

    /// Opens a sequence, empty and without blocks.
    pub fn open(&mut self) -> Result<SequenceId> {
        let Some(slot) = self.free_slots.pop() else {
            return Err(
                Error::state(format!("all {} sequences are open", self.open.len())).help("close one, or raise max_num_seqs")
            );
        };
        let blocks = self.spare.pop().unwrap_or_default();
        Ok(self.open.insert(Sequence { slot, kv_len: 0, blocks, batch: 0 }))
    }

    /// Closes a sequence and calls `freed` with each of its blocks.
    pub fn close(&mut self, id: SequenceId, mut freed: impl FnMut(BlockId)) -> Result<()> {
        let sequence = self.open.remove(id).ok_or_else(unknown)?;
        for &block in &sequence.blocks {
            assert_eq!(self.owners[block as usize], sequence.slot, "PAGE-1: block {block} changed hands behind its owner");
            self.owners[block as usize] = FREE;
            freed(block);
        }
        self.pending.retain(|update| update.slot != sequence.slot);
        self.free_slots.push(sequence.slot);
        let mut blocks = sequence.blocks;
        blocks.clear();
        self.spare.push(blocks);
        Ok(())
    }

    /// Appends cache blocks to a sequence. All or nothing.
    ///
    /// Errors: a block out of range or owned already (PAGE-1), more blocks than `max_model_len` has.
    pub fn grant(&mut self, id: SequenceId, blocks: &[BlockId]) -> Result<()> {
        let sequence = self.open.get_mut(id).ok_or_else(unknown)?;
        let first = sequence.blocks.len();
        if first + blocks.len() > self.table_width as usize {
            return Err(Error::batch(format!(
                "{} blocks for one sequence, the block table holds {}",
                first + blocks.len(),
                self.table_width
            ))
            .help("raise max_model_len or end the sequence"));
        }
        for (at, &block) in blocks.iter().enumerate() {
            let refused = match self.owners.get(block as usize) {
                None => Some(Error::batch(format!("block {block} is out of range: the cache has {}", self.owners.len()))),
                Some(&FREE) => None,
                Some(&owner) if owner == sequence.slot => {
                    Some(Error::invariant("PAGE-1", format!("block {block} is in this sequence already")))
                }
                Some(&owner) => Some(Error::invariant(
                    "PAGE-1",
                    format!(
                        "block {block} belongs to the sequence in table row {owner}, it cannot also go to row {}",
                        sequence.slot
                    ),
                )),
            };
            if let Some(error) = refused {
                for &taken in &blocks[..at] {
                    self.owners[taken as usize] = FREE;
                }
                return Err(error.help("grant each sequence blocks that no open sequence holds"));
            }
            self.owners[block as usize] = sequence.slot;
        }
        for (at, &block) in blocks.iter().enumerate() {
            sequence.blocks.push(block);
            self.pending.push(BlockUpdate { slot: sequence.slot, index: (first + at) as u32, block, reserved: 0 });
        }
        Ok(())
    }

    /// The sequence behind an id.
    pub fn get(&self, id: SequenceId) -> Result<&Sequence> {
        self.open.get(id).ok_or_else(unknown)
    }

    /// Starts the check of a new batch: each sequence may be in it once.
    pub fn begin_batch(&mut self) {
        self.batch += 1;
    }

    /// Checks that this batch's step may bring the sequence to `kv_len` tokens with its last `query_len`, and gives its table
    /// row.
    ///
    /// The step's first token must directly follow or overwrite what is cached (no gap), the length must not fall, and the
    /// granted blocks must hold it.
    pub fn check_step(&mut self, id: SequenceId, kv_len: u32, query_len: u32) -> Result<u32> {
        let batch = self.batch;
        let sequence = self.open.get_mut(id).ok_or_else(unknown)?;
        // A sequence in twice would write one cache place from two rows.
        if sequence.batch == batch {
            return Err(Error::batch("a sequence is in this batch twice").help("one entry a sequence and step"));
        }
        sequence.batch = batch;
        if kv_len < sequence.kv_len || (kv_len == sequence.kv_len && query_len == 0) {
            return Err(Error::batch(format!("kv_len {kv_len} is below the {} tokens this sequence holds", sequence.kv_len))
                .help("lengths never fall within a sequence; close it and open another to start over"));
        }
        if query_len > kv_len || kv_len - query_len > sequence.kv_len {
            return Err(Error::batch(format!(
                "{query_len} tokens that end at {kv_len} leave a gap: the sequence holds {} tokens",
                sequence.kv_len
            ))
            .help("pass kv_len counting this step's tokens, and leave out none"));
        }
        let needed = kv_len.div_ceil(self.block_size) as usize;
        if needed > sequence.blocks.len() {
            return Err(Error::batch(format!("{kv_len} tokens need {needed} blocks, {} are granted", sequence.blocks.len()))
                .help("grant blocks before the step that needs them"));
        }
        Ok(sequence.slot)
    }

    /// Records that a step to `kv_len` was queued. Panics if the sequence is not open: `check_step` came before.
    pub fn advance(&mut self, id: SequenceId, kv_len: u32) {
        self.open[id].kv_len = kv_len;
    }

    /// Shortens a sequence to `kv_len` tokens (rejected speculative tokens, a reused prefix). Its blocks stay.
    pub fn truncate(&mut self, id: SequenceId, kv_len: u32) -> Result<()> {
        let sequence = self.open.get_mut(id).ok_or_else(unknown)?;
        if kv_len > sequence.kv_len {
            return Err(Error::batch(format!("cannot truncate to {kv_len}: the sequence holds {} tokens", sequence.kv_len)));
        }
        sequence.kv_len = kv_len;
        Ok(())
    }

    /// Declares the first `kv_len` tokens of a sequence cached by other means. Its blocks must hold them.
    pub fn assume_cached(&mut self, id: SequenceId, kv_len: u32) -> Result<()> {
        let block_size = self.block_size;
        let sequence = self.open.get_mut(id).ok_or_else(unknown)?;
        let held = sequence.blocks.len() as u64 * u64::from(block_size);
        if kv_len < sequence.kv_len || u64::from(kv_len) > held {
            return Err(Error::batch(format!(
                "{kv_len} cached tokens: the sequence holds {} and its blocks {held}",
                sequence.kv_len
            ))
            .help("grant the blocks first; truncate to shorten"));
        }
        sequence.kv_len = kv_len;
        Ok(())
    }

    /// Table changes not yet uploaded, oldest first.
    pub fn pending(&self) -> &[BlockUpdate] {
        &self.pending
    }

    /// Forgets the first `count` pending changes: a queued step carries them.
    pub fn uploaded(&mut self, count: usize) {
        self.pending.drain(..count);
    }

    /// The open sequences.
    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.open.values()
    }

    /// Runs of cache blocks that no open sequence holds: (first, count).
    pub fn free_blocks(&self) -> impl Iterator<Item = (BlockId, u32)> {
        let mut at = 0;
        self.owners.chunk_by(|a, b| (*a == FREE) == (*b == FREE)).filter_map(move |run| {
            let first = at;
            at += run.len() as u32;
            (run[0] == FREE).then_some((first, run.len() as u32))
        })
    }

    /// Rows of the block table that no open sequence has.
    pub fn free_slots(&self) -> impl Iterator<Item = u32> {
        self.free_slots.iter().copied()
    }

    /// PAGE-1 from scratch: every block is owned by the one sequence that lists it. Errors name block and rows.
    pub fn check_owners(&self) -> Result<()> {
        let mut owners = vec![FREE; self.owners.len()];
        let broken = |what: String| Err(Error::invariant("PAGE-1", what).help("find who changed a block table behind its owner"));
        for sequence in self.open.values() {
            for &block in &sequence.blocks {
                let owner = std::mem::replace(&mut owners[block as usize], sequence.slot);
                if owner != FREE {
                    return broken(format!("block {block} is in the sequences of table rows {owner} and {}", sequence.slot));
                }
            }
        }
        match owners.iter().zip(&self.owners).position(|(listed, owner)| listed != owner) {
            None => Ok(()),
            Some(block) => broken(format!(
                "block {block} is listed by table row {:?}, its owner is {:?}",
                Some(owners[block]).filter(|&row| row != FREE),
                Some(self.owners[block]).filter(|&row| row != FREE),
            )),
        }
    }

    /// Open sequences.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// True if none is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

fn unknown() -> Error {
    Error::state("no such sequence: it was closed, or belongs to another executor")
        .help("keep the id that open_sequence gave, until close_sequence")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_block_has_one_owner() {
        let mut sequences = Sequences::new(2, 4, 16, 8);
        let (a, b) = (sequences.open().unwrap(), sequences.open().unwrap());
        sequences.grant(a, &[3, 5]).unwrap();
        // PAGE-1, all or nothing: 6 stays free.
        assert_eq!(sequences.grant(b, &[6, 5]).unwrap_err().kind(), ErrorKind::Invariant("PAGE-1"));
        assert_eq!(sequences.grant(a, &[6, 6]).unwrap_err().kind(), ErrorKind::Invariant("PAGE-1"));
        assert_eq!(sequences.grant(b, &[8]).unwrap_err().kind(), ErrorKind::Batch);
        sequences.grant(b, &[6]).unwrap();
        assert_eq!(sequences.pending().len(), 3);
        let mut freed = Vec::new();
        sequences.close(a, |block| freed.push(block)).unwrap();
        assert_eq!(freed, [3, 5]);
        assert_eq!(sequences.pending().len(), 1, "updates of a closed sequence are dropped");
        sequences.grant(b, &[5]).unwrap();
        assert_eq!(sequences.close(a, |_| ()).unwrap_err().kind(), ErrorKind::State);
    }

    #[test]
    fn steps_leave_no_gap_and_never_shrink() {
        let mut sequences = Sequences::new(1, 4, 16, 8);
        let a = sequences.open().unwrap();
        sequences.grant(a, &[0]).unwrap();
        sequences.begin_batch();
        assert!(sequences.check_step(a, 17, 17).is_err(), "needs a second block");
        sequences.begin_batch();
        sequences.check_step(a, 10, 10).unwrap();
        sequences.advance(a, 10);
        sequences.begin_batch();
        assert!(sequences.check_step(a, 12, 1).is_err(), "gap");
        sequences.begin_batch();
        assert!(sequences.check_step(a, 9, 1).is_err(), "shorter");
        sequences.begin_batch();
        sequences.check_step(a, 14, 4).unwrap();
        sequences.advance(a, 14);
        // Two of four speculative tokens were accepted: the next step overwrites the rest.
        sequences.begin_batch();
        sequences.check_step(a, 16, 4).unwrap();
        assert!(sequences.open().is_err());
    }
}

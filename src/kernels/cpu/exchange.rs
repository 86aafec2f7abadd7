//! `topk_exchange`: nominate over this rank's shard, exchange candidates with the peers, merge the heads this rank owns.
//!
//! The protocol stands in [`nominate`] and [`await_word`], over any [`Words`], so that `loom` can run it; docs/cp.md has the
//! proof that no word of an older generation is ever taken (GEN-1).

use std::time::{Duration, Instant};

use super::topk::{emission, insert, key};
use super::view::{Bound, ViewMut};
use crate::hal::Workgroup;
use crate::kernels::exchange::{HEAD_WORDS, POISON_WORD, RANKS_MAX, TopkExchangeArgs, candidate, tag};
use crate::kernels::step::StepError;

/// Blocks a launch selects at most.
const TOPK_MAX: usize = 64;
/// Byte of the error in the step state: its code and first detail are one word, claimed once.
const STATE_ERROR: usize = 16;

/// Words that several ranks store and load.
pub trait Words {
    /// Loads a word with acquire order.
    fn load(&self, index: usize) -> u64;
    /// Stores a word with release order.
    fn store(&self, index: usize, word: u64);
}

impl Words for ViewMut<'_, u64> {
    fn load(&self, index: usize) -> u64 {
        self.load_acquire(index)
    }
    fn store(&self, index: usize, word: u64) {
        self.store_release(index, word);
    }
}

/// Where the candidates of a peer buffer lie.
#[derive(Clone, Copy, Debug)]
pub struct CandidateLayout {
    /// Ranks.
    pub world: usize,
    /// Index heads a rank owns.
    pub owned: usize,
    /// Rows of a head.
    pub rows: usize,
    /// Nominees of a rank for a row.
    pub topk: usize,
}

impl CandidateLayout {
    /// The first word of what `source` nominates for a row of an owned head. Generations alternate between two halves.
    pub fn first(&self, generation: u32, source: usize, head: usize, row: usize) -> usize {
        let half = generation as usize % 2;
        HEAD_WORDS as usize + (((half * self.world + source) * self.owned + head) * self.rows + row) * self.topk
    }
}

/// Stores nominations, keys as of [`key`], one word each; 0 nominates nothing but says so.
pub fn nominate<W: Words>(words: &W, first: usize, generation: u32, tag_bits: u32, keys: &[u64]) {
    for (at, &key) in keys.iter().enumerate() {
        words.store(first + at, candidate(generation, tag_bits, key as u32, (key >> 32) as u32));
    }
}

/// Waits for a word of this generation; gives its key, or `None` once `give_up` says so.
pub fn await_word<W: Words>(
    words: &W,
    index: usize,
    generation: u32,
    tag_bits: u32,
    give_up: &mut impl FnMut() -> bool,
) -> Option<u64> {
    loop {
        let word = words.load(index);
        if word >> 48 == tag(generation, tag_bits) {
            return Some(word << 32 | word >> 32 & 0xffff);
        }
        if give_up() {
            return None;
        }
    }
}

/// A bounded wait: spins, then gives the core away; looks now and then for the end of the group and of its budget.
pub(super) struct Patience<'a> {
    own: &'a ViewMut<'a, u64>,
    budget: Duration,
    polls: u32,
    start: Option<Instant>,
}

impl<'a> Patience<'a> {
    pub fn new(own: &'a ViewMut<'a, u64>, budget_us: u32) -> Patience<'a> {
        Patience { own, budget: Duration::from_micros(u64::from(budget_us)), polls: 0, start: None }
    }

    /// True when there is nothing left to wait for.
    pub fn is_over(&mut self) -> bool {
        self.polls += 1;
        if self.polls < 64 {
            std::hint::spin_loop();
            return false;
        }
        std::thread::yield_now();
        self.polls.is_multiple_of(16)
            && (self.own.load(POISON_WORD as usize) != 0 || self.start.get_or_insert_with(Instant::now).elapsed() > self.budget)
    }
}

/// Writes the step's error unless there is one.
pub(super) fn record(state: &mut ViewMut<'_, u8>, error: StepError, detail: [u32; 3]) {
    if state.claim(STATE_ERROR, u64::from(error as u32) | u64::from(detail[0]) << 32) {
        state.write_pod(STATE_ERROR + 8, &[detail[1], detail[2]]);
    }
}

/// True if this step has an error already.
pub(super) fn has_error(state: &ViewMut<'_, u8>) -> bool {
    state.load_acquire(STATE_ERROR) as u32 != 0
}

/// Ends the group: the first rank to do so stays named in every rank's poison word.
pub(super) fn end_group(peers: &[Option<ViewMut<'_, u64>>], rank: u32) {
    for peer in peers.iter().flatten() {
        peer.claim(POISON_WORD as usize, u64::from(rank) + 1);
    }
}

/// Selects and emits for one (row, head).
pub fn topk_exchange(args: &Bound<'_, TopkExchangeArgs>, workgroup: &mut Workgroup<'_>) {
    let [row, y, _] = workgroup.id;
    if row >= args.rows || y >= args.heads {
        return;
    }
    let (world, rank, owned, heads) = (args.world, args.rank, args.owned, args.heads);
    let shares = owned * world == heads || owned == heads;
    assert!(world <= RANKS_MAX && rank < world && shares, "rank {rank} of {world} owns {owned} of {heads} heads");
    assert!(args.topk as usize <= TOPK_MAX && args.rows <= args.peer_rows, "top {} of {} rows", args.topk, args.rows);
    // Own heads come last: what waits is dispatched after everything that a peer waits for.
    let head = if owned == heads { y } else { (rank * owned + owned + y) % heads };
    Exchange::new(args, row as usize, head).run();
}

struct Exchange<'a> {
    args: &'a Bound<'a, TopkExchangeArgs>,
    layout: CandidateLayout,
    row: usize,
    head: usize,
    len: usize,
    peers: [Option<ViewMut<'a, u64>>; RANKS_MAX as usize],
    state: ViewMut<'a, u8>,
}

impl<'a> Exchange<'a> {
    fn new(args: &'a Bound<'a, TopkExchangeArgs>, row: usize, head: u32) -> Exchange<'a> {
        let layout = CandidateLayout {
            world: args.world as usize,
            owned: args.owned as usize,
            rows: args.peer_rows as usize,
            topk: args.topk as usize,
        };
        let len = args.read::<i32>(|a| &a.row_len).get(row).max(0) as usize;
        let peers = std::array::from_fn(|rank| {
            (rank < layout.world).then(|| match rank {
                0 => args.write(|a| &a.peer0),
                1 => args.write(|a| &a.peer1),
                2 => args.write(|a| &a.peer2),
                3 => args.write(|a| &a.peer3),
                4 => args.write(|a| &a.peer4),
                5 => args.write(|a| &a.peer5),
                6 => args.write(|a| &a.peer6),
                _ => args.write(|a| &a.peer7),
            })
        });
        Exchange { args, layout, row, head: head as usize, len, peers, state: args.write(|a| &a.state) }
    }

    fn run(mut self) {
        let rank = self.args.rank as usize;
        let owners = match self.args.owned == self.args.heads {
            true => 0..self.layout.world,
            false => self.head / self.layout.owned..self.head / self.layout.owned + 1,
        };
        let ended = self.peer(rank).load(POISON_WORD as usize);
        if ended != 0 {
            record(&mut self.state, StepError::PeerEnded, [ended as u32 - 1, self.row as u32, self.head as u32]);
        }
        let mut kept = [0; TOPK_MAX];
        let mut kept = &mut kept[..self.layout.topk];
        if self.len > 0 && !has_error(&self.state) {
            let generation = self.advance();
            self.best_of_shard(kept);
            let first = self.layout.first(generation, rank, self.head % self.layout.owned, self.row);
            for owner in owners.clone() {
                nominate(self.peer(owner), first, generation, self.args.tag_bits, kept);
            }
            kept.fill(0);
            if owners.contains(&rank) && !self.merge(generation, kept) {
                kept = &mut [];
            }
        } else {
            kept = &mut [];
        }
        if owners.contains(&rank) {
            self.emit(kept);
        }
    }

    fn peer(&self, rank: usize) -> &ViewMut<'a, u64> {
        self.peers[rank].as_ref().expect("invariant: ranks are below world")
    }

    /// The next generation of this (row, head); it belongs to this workgroup alone.
    fn advance(&self) -> u32 {
        let mut generations = self.args.write::<u32>(|a| &a.generations);
        let at = self.head * self.layout.rows + self.row;
        let generation = generations.get(at).wrapping_add(1);
        generations.set(at, generation);
        generation
    }

    /// The keys of the best blocks of this rank's shard, by their global ids.
    fn best_of_shard(&self, kept: &mut [u64]) {
        let args = self.args;
        let (rank, world) = (args.rank as usize, self.layout.world);
        let blocks = self.len.div_ceil(args.block_size as usize);
        let local = blocks.saturating_sub(rank).div_ceil(world).min(args.score_width as usize);
        let plane = self.head * args.score_rows as usize + self.row;
        let scores = args.read::<f32>(|a| &a.score).slice(plane * args.score_width as usize, local);
        for (at, &score) in scores.iter().enumerate() {
            let key = key(score, (at * world + rank) as u32);
            if key > kept[kept.len() - 1] {
                insert(kept, key);
            }
        }
    }

    /// Merges what every rank nominated; false if a rank is missing, which is then recorded and ends the group.
    fn merge(&mut self, generation: u32, kept: &mut [u64]) -> bool {
        let rank = self.args.rank as usize;
        for source in 0..self.layout.world {
            let first = self.layout.first(generation, source, self.head % self.layout.owned, self.row);
            let own = self.peers[rank].as_ref().expect("invariant: ranks are below world");
            let mut patience = Patience::new(own, self.args.budget_us);
            for at in 0..self.layout.topk {
                let Some(key) = await_word(own, first + at, generation, self.args.tag_bits, &mut || patience.is_over()) else {
                    self.give_up(source, generation);
                    return false;
                };
                if key > kept[kept.len() - 1] {
                    insert(kept, key);
                }
            }
        }
        true
    }

    fn give_up(&mut self, missing: usize, generation: u32) {
        match self.peer(self.args.rank as usize).load(POISON_WORD as usize) {
            0 => {
                let detail = [missing as u32 | (self.head as u32) << 16, self.row as u32, generation];
                record(&mut self.state, StepError::PeerTimeout, detail);
                end_group(&self.peers, self.args.rank);
            }
            ended => record(&mut self.state, StepError::PeerEnded, [ended as u32 - 1, self.row as u32, self.head as u32]),
        }
    }

    /// Writes the selection and its page table; no keys at all are an empty row.
    fn emit(&self, kept: &[u64]) {
        let args = self.args;
        let (head, topk) = (self.head % self.layout.owned, self.layout.topk);
        let mut topk_idx = args.write::<i32>(|a| &a.topk_idx);
        let selected = topk_idx.slice_mut((head * args.topk_rows as usize + self.row) * topk, topk);
        selected.fill(-1);
        for (to, &key) in selected.iter_mut().zip(kept).filter(|(_, key)| **key != 0) {
            *to = key as u32 as i32;
        }
        let len = if kept.is_empty() { 0 } else { self.len };
        emission!(args, self.layout.owned).emit(self.row, head, len, selected);
    }
}

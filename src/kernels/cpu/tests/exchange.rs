//! `topk_exchange` with ranks as threads over plain memory: the unsharded selection bit for bit, whatever the rows, lengths and
//! skew; and GEN-1 with generations of two bits.

use std::time::Duration;

use super::super::ops;
use super::{Rng, ptr, run};
use crate::kernels::Ptr;
use crate::kernels::exchange::{TAG_BITS, TopkExchangeArgs, peer_words};
use crate::kernels::msa::{INIT_SENTINEL, LOCAL_SENTINEL, TopkEmitArgs};
use crate::kernels::step::{StepError, StepState};

const BLOCK: usize = 128;
const WIDTH: usize = 64;
const TOPK: usize = 16;

/// What one rank holds.
pub(super) struct Rank {
    score: Vec<f32>,
    generations: Vec<u32>,
    state: Vec<u64>,
    buffer: Vec<u64>,
    pub topk_idx: Vec<i32>,
    pub page_table: Vec<i32>,
    pub page_len: Vec<i32>,
}

impl Rank {
    pub fn state(&self) -> StepState {
        bytemuck::pod_read_unaligned(bytemuck::cast_slice(&self.state))
    }
}

/// Ranks of one group, and what all of them see alike.
pub(super) struct Group {
    world: usize,
    heads: usize,
    owned: usize,
    peer_rows: usize,
    tag_bits: u32,
    budget: Duration,
    pub ranks: Vec<Rank>,
    table: Vec<i32>,
}

impl Group {
    /// Every rank owns `owned` of the heads: its share, or all.
    pub fn new(world: usize, heads: usize, owned: usize, peer_rows: usize) -> Group {
        let words = peer_words(world as u32, owned as u32, peer_rows as u32, TOPK as u32) as usize;
        let rank = || Rank {
            score: vec![f32::NAN; heads * peer_rows * WIDTH],
            generations: vec![0; heads * peer_rows],
            state: vec![0; 8],
            buffer: vec![0; words],
            topk_idx: vec![-7; owned * peer_rows * TOPK],
            page_table: vec![-7; peer_rows * owned * TOPK * BLOCK / 16],
            page_len: vec![-7; peer_rows * owned],
        };
        let ranks = (0..world).map(|_| rank()).collect();
        let table = (0..(peer_rows * WIDTH) as i32).rev().collect();
        Group { world, heads, owned, peer_rows, tag_bits: TAG_BITS, budget: Duration::from_secs(20), ranks, table }
    }

    /// Every rank's arguments for a step; `score` is [heads, peer_rows, WIDTH] by global block.
    fn args(&mut self, lens: &mut [i32], slots: &mut [i32], score: &[f32]) -> Vec<TopkExchangeArgs> {
        let (world, heads, owned, peer_rows) = (self.world, self.heads, self.owned, self.peer_rows);
        let mut buffers: Vec<Ptr> = self.ranks.iter_mut().map(|rank| ptr(&mut rank.buffer)).collect();
        buffers.resize(8, Ptr::NULL);
        let table = ptr(&mut self.table);
        let row_len = ptr(lens);
        let row_slot = ptr(slots);
        let each = self.ranks.iter_mut().enumerate().map(|(at, rank)| {
            for (plane, shard) in score.chunks(WIDTH).zip(rank.score.chunks_mut(WIDTH)) {
                plane[at..].iter().step_by(world).zip(shard).for_each(|(from, to)| *to = *from);
            }
            TopkExchangeArgs {
                score: ptr(&mut rank.score),
                row_slot,
                row_len,
                block_table: table,
                topk_idx: ptr(&mut rank.topk_idx),
                page_table: ptr(&mut rank.page_table),
                page_len: ptr(&mut rank.page_len),
                generations: ptr(&mut rank.generations),
                state: ptr(&mut rank.state),
                peer0: buffers[0],
                peer1: buffers[1],
                peer2: buffers[2],
                peer3: buffers[3],
                peer4: buffers[4],
                peer5: buffers[5],
                peer6: buffers[6],
                peer7: buffers[7],
                rows: lens.len() as u32,
                heads: heads as u32,
                owned: owned as u32,
                kv_heads: owned as u32,
                topk: TOPK as u32,
                block_size: BLOCK as u32,
                score_rows: peer_rows as u32,
                score_width: WIDTH as u32,
                topk_rows: peer_rows as u32,
                slots: peer_rows as u32,
                table_width: WIDTH as u32,
                cache_blocks: (peer_rows * WIDTH) as u32,
                peer_rows: peer_rows as u32,
                rank: at as u32,
                world: world as u32,
                tag_bits: self.tag_bits,
                budget_us: self.budget.as_micros() as u32,
                reserved: 0,
            }
        });
        each.collect()
    }

    /// Runs one step on every rank; rank r starts after `delays[r]`.
    fn step(&mut self, lens: &[i32], score: &[f32], delays: &[Duration]) {
        let (mut lens, mut slots) = (lens.to_vec(), (0..lens.len() as i32).collect::<Vec<_>>());
        let all = self.args(&mut lens, &mut slots, score);
        std::thread::scope(|scope| {
            for (args, delay) in all.iter().zip(delays) {
                scope.spawn(|| {
                    std::thread::sleep(*delay);
                    run(ops::topk_exchange, [args.rows, args.heads, 1], args);
                });
            }
        });
    }

    /// Every rank's result equals what it would select for its heads from unsharded scores.
    fn check(&self, lens: &[i32], score: &[f32]) {
        let owned = self.owned;
        let mut table = self.table.clone();
        let (mut lens, mut slots) = (lens.to_vec(), (0..lens.len() as i32).collect::<Vec<_>>());
        for (at, rank) in self.ranks.iter().enumerate() {
            assert_eq!(rank.state(), StepState::default(), "rank {at}");
            let plane = self.peer_rows * WIDTH;
            let first = if owned == self.heads { 0 } else { at * owned };
            let mut own = score[first * plane..(first + owned) * plane].to_vec();
            let mut topk_idx = vec![-7; rank.topk_idx.len()];
            let mut page_table = vec![-7; rank.page_table.len()];
            let mut page_len = vec![-7; rank.page_len.len()];
            let args = TopkEmitArgs {
                score: ptr(&mut own),
                row_slot: ptr(&mut slots),
                row_len: ptr(&mut lens),
                block_table: ptr(&mut table),
                topk_idx: ptr(&mut topk_idx),
                page_table: ptr(&mut page_table),
                page_len: ptr(&mut page_len),
                rows: lens.len() as u32,
                heads: owned as u32,
                kv_heads: owned as u32,
                topk: TOPK as u32,
                block_size: BLOCK as u32,
                score_rows: self.peer_rows as u32,
                score_width: WIDTH as u32,
                topk_rows: self.peer_rows as u32,
                slots: self.peer_rows as u32,
                table_width: WIDTH as u32,
                cache_blocks: table.len() as u32,
                reserved: 0,
            };
            run(ops::topk_emit, [args.rows, args.heads, 1], &args);
            let rows = lens.len();
            for (head, planes) in topk_idx.chunks(self.peer_rows * TOPK).enumerate() {
                let got = &rank.topk_idx[head * self.peer_rows * TOPK..][..rows * TOPK];
                assert_eq!(got, &planes[..rows * TOPK], "rank {at} of {} head {head}", self.world);
            }
            let pages = rows * owned * TOPK * BLOCK / 16;
            assert_eq!(rank.page_table[..pages], page_table[..pages], "rank {at}");
            assert_eq!(rank.page_len[..rows * owned], page_len[..rows * owned], "rank {at}");
        }
    }
}

/// Scores of [heads, rows, WIDTH] of one kind of row each, drawn anew.
fn scores(rng: &mut Rng, heads: usize, rows: usize, lens: &[i32], world: usize) -> Vec<f32> {
    let mut score = vec![0.0; heads * rows * WIDTH];
    for (at, plane) in score.chunks_mut(WIDTH).enumerate() {
        let kind = rng.below(7);
        let shard = rng.below(world);
        for (block, score) in plane.iter_mut().enumerate() {
            *score = match kind {
                // All tied; few values; all winners in one shard; NaN and infinities; all of it minus infinity.
                0 => 0.5,
                1 => [0.0, -0.0, 1.0, -1.0][rng.below(4)],
                2 => rng.normal() + if block % world == shard { 1e6 } else { 0.0 },
                3 => [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, 1e29, 3.0][rng.below(7)],
                4 => f32::NEG_INFINITY,
                _ => rng.normal(),
            };
        }
        let blocks = lens.get(at % rows).map_or(0, |&len| (len.max(0) as usize).div_ceil(BLOCK));
        if kind >= 5 && blocks > 0 {
            // Forced blocks, on some rows all that can be selected.
            let init = rng.below(TOPK + 1).min(blocks);
            plane[..init].fill(INIT_SENTINEL);
            plane[blocks - 1] = LOCAL_SENTINEL;
        }
    }
    score
}

/// Causal lengths of a batch of `sequences`, `query_len` rows each, some empty.
fn lengths(rng: &mut Rng, sequences: usize, query_len: usize) -> Vec<i32> {
    let mut lens = Vec::new();
    for _ in 0..sequences {
        let kv_len = match rng.below(5) {
            0 => 0,
            1 => 1 + rng.below(query_len + 2),
            2 => 1 + rng.below(3 * BLOCK),
            _ => 1 + rng.below(WIDTH * BLOCK),
        } as i32;
        lens.extend((0..query_len as i32).map(|t| (kv_len - query_len as i32 + t + 1).max(0)));
    }
    lens
}

#[test]
fn equals_the_unsharded_selection() {
    let mut rng = Rng::seeded("exchange");
    let shares = [(1, 1, 1), (1, 4, 4), (2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 8, 2), (8, 8, 1)];
    let all = [(2, 1, 1), (2, 4, 4), (4, 2, 2), (8, 3, 3)];
    for (world, heads, owned) in shares.into_iter().chain(all) {
        for query_len in 1..=4 {
            let mut group = Group::new(world, heads, owned, 32);
            for _ in 0..12 {
                let sequences = 1 + rng.below(32 / query_len);
                let lens = lengths(&mut rng, sequences, query_len);
                let score = scores(&mut rng, heads, 32, &lens, world);
                let delays: Vec<Duration> = (0..world).map(|_| Duration::from_micros(rng.below(300) as u64)).collect();
                group.step(&lens, &score, &delays);
                group.check(&lens, &score);
            }
        }
    }
}

/// Batches of a few rows, then all rows again, for a while; every rank late now and then.
fn shrink_and_regrow(rng: &mut Rng, group: &mut Group, steps: usize, mut before: impl FnMut(&mut Group, usize)) -> usize {
    let (world, heads, rows) = (group.world, group.heads, group.peer_rows);
    let mut wrong = 0;
    for step in 0..steps {
        let live = if rng.below(3) == 0 { rows } else { 1 + rng.below(2) };
        let lens: Vec<i32> = (0..live).map(|_| 1 + rng.below(WIDTH * BLOCK) as i32).collect();
        let score: Vec<f32> = (0..heads * rows * WIDTH).map(|_| rng.normal()).collect();
        // The first rank runs ahead of the others, so that what they have not written yet is what it must not take.
        let late = Duration::from_micros(200);
        let delays: Vec<Duration> = (0..world).map(|rank| if rank == 0 { Duration::ZERO } else { late }).collect();
        before(group, step);
        group.step(&lens, &score, &delays);
        let same = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| group.check(&lens, &score)));
        wrong += usize::from(same.is_err());
    }
    wrong
}

#[test]
fn no_older_word_is_taken_with_generations_of_two_bits() {
    let mut rng = Rng::seeded("exchange generations");
    let mut group = Group::new(2, 2, 1, 6);
    group.tag_bits = 2;
    assert_eq!(shrink_and_regrow(&mut rng, &mut group, 400, |_, _| ()), 0);
    // The same with one bit cannot work: two generations later is the same tag. So the test sees stale words.
    let mut group = Group::new(2, 2, 1, 6);
    group.tag_bits = 1;
    assert!(shrink_and_regrow(&mut rng, &mut group, 100, |_, _| ()) > 0);
}

#[test]
fn a_counter_shared_by_all_rows_would_take_older_words() {
    let mut rng = Rng::seeded("exchange shared counter");
    let mut group = Group::new(2, 2, 1, 6);
    group.tag_bits = 2;
    let wrong = shrink_and_regrow(&mut rng, &mut group, 200, |group, step| {
        for rank in &mut group.ranks {
            rank.generations.fill(step as u32);
        }
    });
    assert!(wrong > 0, "rows that sat idle for 4 steps found their old words");
}

#[test]
fn a_missing_rank_is_named_and_ends_the_group() {
    let mut rng = Rng::seeded("exchange missing");
    let mut group = Group::new(2, 4, 2, 8);
    group.budget = Duration::from_millis(50);
    let lens = [300, 5000];
    let score = scores(&mut rng, 4, 8, &lens, 2);
    let (mut live, mut slots) = (lens, [0, 1]);
    let args = group.args(&mut live, &mut slots, &score);
    let start = std::time::Instant::now();
    run(ops::topk_exchange, [2, 4, 1], &args[0]);
    assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
    let state = group.ranks[0].state();
    assert_eq!((state.error, state.error_detail[0] & 0xffff, state.error_detail[2]), (StepError::PeerTimeout as u32, 1, 1));
    assert!(state.error_detail[0] >> 16 < 2 && state.error_detail[1] < 2, "{state:?}");
    assert!(group.ranks[0].topk_idx[..32].iter().all(|&block| block == -1));
    assert_eq!(group.ranks[0].page_len[..4], [0; 4]);
    // The late rank finds the group ended, by rank 0, and does not wait.
    let start = std::time::Instant::now();
    run(ops::topk_exchange, [2, 4, 1], &args[1]);
    assert!(start.elapsed() < Duration::from_millis(40));
    let state = group.ranks[1].state();
    assert_eq!((state.error, state.error_detail[0]), (StepError::PeerEnded as u32, 0));
}

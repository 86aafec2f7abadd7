//! Context parallelism on the device: the candidate word, the layout of a rank's peer-visible buffer, and the argument structs
//! of `agree` and `topk_exchange` (`msa-spec` section 5; docs/cp.md has the protocol and its proof).
//!
//! Each rank owns one buffer of words that its peers write: a head of [`HEAD_WORDS`], then candidates [2 halves, source rank,
//! owned head, row, nominee]. Every word is stored and loaded whole, with release and acquire order, system-wide.

use super::args::product;
use super::msa::PAGE_TOKENS;
use crate::kernel_args;

/// Ranks of a group at most: pointers of the argument structs.
pub const RANKS_MAX: u32 = 8;
/// Bits of a candidate's generation.
pub const TAG_BITS: u32 = 16;
/// Words of a peer buffer before its candidates.
pub const HEAD_WORDS: u32 = 256;
/// Word of the head that ends the group: 0 while it lives, else 1 + the rank that ended it.
pub const POISON_WORD: u32 = 0;
/// First word of the agreement records: [2 halves, source rank, [`AGREE_WORDS`]].
pub const AGREE_FIRST: u32 = 16;
/// Words of an agreement record: what is compared, then the number of the agreement, stored last.
pub const AGREE_WORDS: u32 = 4;

/// A nominated block in one word: [generation 16 | block 16 | score key 32], so that no part of it can be older than another.
///
/// `key` is the order-preserving form of the score ([`key`](super::cpu::topk::key)); 0, which no score has, is no nomination.
pub const fn candidate(generation: u32, tag_bits: u32, block: u32, key: u32) -> u64 {
    tag(generation, tag_bits) << 48 | (block as u64 & 0xffff) << 32 | key as u64
}

/// The bits of a generation that a candidate carries.
pub const fn tag(generation: u32, tag_bits: u32) -> u64 {
    generation as u64 & ((1 << tag_bits) - 1)
}

/// Words of a rank's peer buffer: `owned` heads of its own, `rows` rows a head.
pub const fn peer_words(world: u32, owned: u32, rows: u32, topk: u32) -> u64 {
    HEAD_WORDS as u64 + product([2, world, owned, rows, topk])
}

kernel_args! {
    /// `topk_exchange`, grid [rows, heads], workgroup \[256\]: `topk_emit` over the scores of all ranks' shards, for the heads
    /// this rank owns: [rank * owned, (rank + 1) * owned), or all heads where `owned` is `heads`.
    ///
    /// Workgroup (row, y) takes head (first owned + owned + y) mod heads, so that whatever waits is dispatched after all that
    /// others wait for; where every rank owns every head it is head y, on all ranks in one order. It advances its own generation, stores its `topk` best local blocks into the buffer of
    /// each owner, and ends unless its rank is one. The owner waits for every rank's words of this generation and merges them. Rows of length 0
    /// take no part: nothing is stored, no generation advances. A wait longer than `budget_us` records who is missing in
    /// `state`, ends the group (the poison word of every rank) and emits an empty row; after an error in `state`, or in a
    /// group that ended, nothing is stored and nobody waits.
    pub struct TopkExchangeArgs |a| {
        pointers {
            /// [heads, score_rows, score_width] scores of this rank's shard: local block i is block i * world + rank.
            score: Read, F32, product([a.heads, a.score_rows, a.score_width]);
            /// \[rows\] block-table row.
            row_slot: Read, I32, u64::from(a.rows);
            /// \[rows\] causal length.
            row_len: Read, I32, u64::from(a.rows);
            /// [slots, table_width] attend group's block table.
            block_table: Read, I32, product([a.slots, a.table_width]);
            /// [owned, topk_rows, topk] selected block ids.
            topk_idx: ReadWrite, I32, product([a.owned, a.topk_rows, a.topk]);
            /// [rows * owned kv heads, topk * block_size / 16] page ids.
            page_table: Write, I32, product([a.rows, a.kv_heads, a.topk, a.block_size / PAGE_TOKENS]);
            /// [rows * owned kv heads] tokens the page table describes.
            page_len: Write, I32, product([a.rows, a.kv_heads]);
            /// [heads, peer_rows] generation of each (row, head), this rank's own.
            generations: ReadWrite, U32, product([a.heads, a.peer_rows]);
            /// [64 B] step state; the first error of the step.
            state: ReadWrite, U8, 64u64;
            /// Peer buffer of rank 0.
            peer0: ReadWrite, U64, words(a, 0);
            /// Peer buffer of rank 1.
            peer1: ReadWrite, U64, words(a, 1);
            /// Peer buffer of rank 2.
            peer2: ReadWrite, U64, words(a, 2);
            /// Peer buffer of rank 3.
            peer3: ReadWrite, U64, words(a, 3);
            /// Peer buffer of rank 4.
            peer4: ReadWrite, U64, words(a, 4);
            /// Peer buffer of rank 5.
            peer5: ReadWrite, U64, words(a, 5);
            /// Peer buffer of rank 6.
            peer6: ReadWrite, U64, words(a, 6);
            /// Peer buffer of rank 7.
            peer7: ReadWrite, U64, words(a, 7);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Index heads that are scored.
            heads: u32;
            /// Heads this rank selects for: `heads / world`, or `heads`.
            owned: u32;
            /// KV heads of this rank, a multiple of its index heads.
            kv_heads: u32;
            /// Blocks to select.
            topk: u32;
            /// Tokens of a block.
            block_size: u32;
            /// Rows of a head's plane of `score`.
            score_rows: u32;
            /// Columns of `score`.
            score_width: u32;
            /// Rows of a head's plane of `topk_idx`.
            topk_rows: u32;
            /// Rows of the block table.
            slots: u32;
            /// Columns of the block table.
            table_width: u32;
            /// Cache blocks there are.
            cache_blocks: u32;
            /// Rows of a head in a peer buffer, at least `rows`; the same for every launch over it.
            peer_rows: u32;
            /// This rank.
            rank: u32;
            /// Ranks.
            world: u32;
            /// Bits of the generation that candidates carry: [`TAG_BITS`], fewer in tests.
            tag_bits: u32;
            /// Longest wait for a peer, microseconds.
            budget_us: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

/// What two ranks may differ in, as `agree` reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Differs {
    /// Rows of the graph.
    Rows = 1,
    /// Rows a sequence.
    QueryLength = 2,
    /// Number of the step.
    Step = 3,
    /// Longest KV length of the graph; its complement where the step failed before.
    Graph = 4,
    /// Live rows and KV lengths, hashed.
    Batch = 5,
    /// Agreements made so far.
    Calls = 6,
}

impl Differs {
    /// All of them, in the order in which ranks compare.
    pub const ALL: [Differs; 6] =
        [Differs::Calls, Differs::Rows, Differs::QueryLength, Differs::Step, Differs::Graph, Differs::Batch];
}

kernel_args! {
    /// `agree`, grid \[1\], workgroup \[256\]: RANK-1, before anything of a step is exchanged.
    ///
    /// Stores what this rank runs into every rank's buffer, waits for the same of all ranks and compares. A difference is
    /// recorded in `state` on every rank, with both sides; nothing is exchanged in that step, the next may go on. A rank that does
    /// not come within `budget_us` is recorded, and the group ended.
    pub struct AgreeArgs |a| {
        pointers {
            /// \[sequences\] KV length of each sequence, 0 for pads.
            seq_len: Read, I32, u64::from(a.sequences);
            /// \[1\] agreements made so far, this rank's own.
            agreements: ReadWrite, U64, 1u64;
            /// [64 B] step state; the first error of the step.
            state: ReadWrite, U8, 64u64;
            /// Head of the peer buffer of rank 0.
            peer0: ReadWrite, U64, head(a.world, 0);
            /// Head of the peer buffer of rank 1.
            peer1: ReadWrite, U64, head(a.world, 1);
            /// Head of the peer buffer of rank 2.
            peer2: ReadWrite, U64, head(a.world, 2);
            /// Head of the peer buffer of rank 3.
            peer3: ReadWrite, U64, head(a.world, 3);
            /// Head of the peer buffer of rank 4.
            peer4: ReadWrite, U64, head(a.world, 4);
            /// Head of the peer buffer of rank 5.
            peer5: ReadWrite, U64, head(a.world, 5);
            /// Head of the peer buffer of rank 6.
            peer6: ReadWrite, U64, head(a.world, 6);
            /// Head of the peer buffer of rank 7.
            peer7: ReadWrite, U64, head(a.world, 7);
        }
        scalars {
            /// Sequences of the graph.
            sequences: u32;
            /// Rows of the graph.
            rows: u32;
            /// Rows a sequence.
            query_len: u32;
            /// Longest KV length of the graph.
            graph: u32;
            /// This rank.
            rank: u32;
            /// Ranks.
            world: u32;
            /// Longest wait for a peer, microseconds.
            budget_us: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

/// First word of an agreement record.
pub const fn agree_first(agreement: u64, source: u32) -> u64 {
    AGREE_FIRST as u64 + ((agreement % 2) * RANKS_MAX as u64 + source as u64) * AGREE_WORDS as u64
}

fn head(world: u32, rank: u32) -> u64 {
    if rank < world { u64::from(HEAD_WORDS) } else { 0 }
}

/// Words of the peer buffer of `rank`.
fn words(a: TopkExchangeArgs, rank: u32) -> u64 {
    if rank < a.world { peer_words(a.world, a.owned, a.peer_rows, a.topk) } else { 0 }
}

//! Cases of `agree` and `topk_exchange`: one rank's launch, with what the other ranks send already there, or missing.

use capstan::kernels::exchange::{
    AGREE_WORDS, AgreeArgs, HEAD_WORDS, POISON_WORD, TAG_BITS, TopkExchangeArgs, agree_first, candidate, peer_words,
};
use capstan::kernels::registry::{AGREE, TOPK_EXCHANGE};
use capstan::kernels::step::StepState;

use super::attention::table;
use super::ops::run_op;
use super::{Case, Compare, Draw};

/// Long enough for whatever is there, microseconds.
const AMPLE_US: u32 = 30_000_000;
/// Until a rank is given up.
const SHORT_US: u32 = 20_000;
const PEERS: [&str; 8] = ["peer0", "peer1", "peer2", "peer3", "peer4", "peer5", "peer6", "peer7"];

pub fn cases(draw: &mut Draw) -> Vec<Case> {
    let mut all: Vec<Case> = (0..6).map(|_| agree(draw)).collect();
    all.extend((0..8).map(|_| exchange(draw, Others::There)));
    all.extend([Others::Missing, Others::Ended, Others::Failed].map(|others| exchange(draw, others)));
    all
}

/// What the other ranks did.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Others {
    /// Sent everything.
    There,
    /// One sent nothing since two generations ago.
    Missing,
    /// One ended the group.
    Ended,
    /// Everything; this rank's step has failed before.
    Failed,
}

fn state(draw: &mut Draw, error: u32) -> Vec<u8> {
    let state =
        StepState { sequence: u64::from(draw.between(1, 1 << 20)), live_rows: draw.between(1, 9), error, ..Default::default() };
    bytemuck::bytes_of(&state).to_vec()
}

fn exchange(draw: &mut Draw, others: Others) -> Case {
    let whole = others == Others::There || others == Others::Failed;
    let world = draw.of(&[2, 4, 8]);
    // Of several workgroups that fail any may be the one that says so.
    let (owned, shared) = if whole { (draw.of(&[1, 2]), draw.chance(2)) } else { (1, true) };
    let heads = if shared { owned } else { owned * world };
    let (rows, topk) = (if whole { draw.between(1, 4) } else { 1 }, draw.of(&[16, 16, 3, 40]));
    let (peer_rows, block_size, slots) = (rows + draw.between(0, 3), draw.of(&[16, 128]), 6);
    let table_width: u32 = draw.of(&[4, 60, 300, 1500]);
    let score_width = table_width.div_ceil(world).next_multiple_of(64);
    let rank = draw.between(0, world - 1);
    let args = TopkExchangeArgs {
        rows,
        heads,
        owned,
        kv_heads: owned * draw.of(&[1, 2]),
        topk,
        block_size,
        score_rows: rows + 1,
        score_width,
        topk_rows: rows + 2,
        slots,
        table_width,
        cache_blocks: slots * table_width,
        peer_rows,
        rank,
        world,
        tag_bits: TAG_BITS,
        budget_us: if others == Others::Missing { SHORT_US } else { AMPLE_US },
        ..Default::default()
    };
    let kind = draw.between(0, 2);
    let score: Vec<f32> = (0..heads * (rows + 1) * score_width)
        .map(|_| match kind {
            0 => draw.normal(),
            1 => draw.normal().round(),
            _ => draw.of(&[f32::NAN, f32::NEG_INFINITY, 0.0, -0.0, 1e29, 1e30]),
        })
        .collect();
    let most = table_width * block_size;
    let row_len: Vec<i32> = (0..rows).map(|_| if whole && draw.chance(4) { 0 } else { draw.between(1, most) as i32 }).collect();
    // At the start, in the middle, and where what a word carries wraps.
    let first = draw.of(&[0, 5, (1 << TAG_BITS) - 2, u32::MAX - 1]);
    let generations: Vec<u32> = (0..heads * peer_rows).map(|_| first.wrapping_add(draw.between(0, 3))).collect();
    let missing = (others == Others::Missing).then(|| (rank + 1) % world);
    let own = received(draw, &args, &row_len, &generations, missing);
    let mut case = Case::new(format!("{others:?} {args:?} {row_len:?}"), &TOPK_EXCHANGE, [rows, heads, 1], &args)
        .with("score", &score)
        .with("row_slot", &draw.permutation(slots)[..rows as usize])
        .with("row_len", &row_len)
        .with("block_table", &table(draw, slots, table_width, args.cache_blocks))
        .undefined("topk_idx", Compare::Exact)
        .undefined("page_table", Compare::Exact)
        .undefined("page_len", Compare::Exact)
        .with("generations", &generations)
        .with("state", &state(draw, u32::from(others == Others::Failed)));
    for (name, peer) in PEERS.iter().zip(0..world) {
        let mut words = if peer == rank { own.clone() } else { vec![0; own.len()] };
        words[POISON_WORD as usize] = u64::from(others == Others::Ended) * 2;
        case = case.with(name, &words);
    }
    case
}

/// This rank's buffer with what the others nominated, of the generation that comes; of one that is `missing`, an older one.
fn received(draw: &mut Draw, a: &TopkExchangeArgs, row_len: &[i32], generations: &[u32], missing: Option<u32>) -> Vec<u64> {
    let mut words = vec![0; peer_words(a.world, a.owned, a.peer_rows, a.topk) as usize];
    for (source, head) in (0..a.world).flat_map(|source| (0..a.owned).map(move |head| (source, head))) {
        for (row, &len) in (0..).zip(row_len) {
            let of_all = if a.owned == a.heads { head } else { a.rank * a.owned + head };
            let coming = generations[(of_all * a.peer_rows + row) as usize].wrapping_add(1);
            let generation = if missing == Some(source) { coming.wrapping_sub(2) } else { coming };
            let blocks = (len as u32).div_ceil(a.block_size);
            let shard: Vec<u32> = (source..blocks).step_by(a.world as usize).collect();
            let half = generation % 2;
            let first = HEAD_WORDS + (((half * a.world + source) * a.owned + head) * a.peer_rows + row) * a.topk;
            // No key twice: they hold the block.
            for at in 0..a.topk {
                let block = shard.get(at as usize);
                let key = draw.of(&[1, 0x8000_0000, 0xf000_0000, 0xbf80_0000]) + draw.between(0, 3);
                words[(first + at) as usize] = match block {
                    Some(&block) => candidate(generation, a.tag_bits, block, key),
                    None => candidate(generation, a.tag_bits, 0, 0),
                };
            }
        }
    }
    words
}

fn agree(draw: &mut Draw) -> Case {
    let world = draw.of(&[2, 4, 8]);
    let (rank, sequences) = (draw.between(0, world - 1), draw.between(1, 600));
    let query_len = draw.between(1, 4);
    let args = AgreeArgs { sequences, rows: sequences * query_len, query_len, graph: 4096, rank, world, ..Default::default() };
    let agreements = u64::from(draw.between(0, 7)) << draw.of(&[0, 31]);
    let lens: Vec<i32> = draw.lens(sequences, 4096);
    let (failed, kind) = (draw.chance(4), draw.between(0, 5));
    let state = state(draw, if failed { 3 } else { 0 });
    let with = |args: &AgreeArgs, own: &[u64], poison: u64| {
        let case = Case::new(format!("kind {kind} failed {failed} {args:?}"), &AGREE, [1, 1, 1], args);
        let case = case.with("seq_len", &lens).with("agreements", &[agreements]).with("state", &state);
        PEERS.iter().zip(0..world).fold(case, |case, (name, peer)| {
            let mut words = if peer == rank { own.to_vec() } else { vec![0; HEAD_WORDS as usize] };
            words[POISON_WORD as usize] = poison;
            case.with(name, &words)
        })
    };
    // What this rank says, by the op itself with nobody there; the others say the same, or almost.
    let empty = vec![0; HEAD_WORDS as usize];
    let left = run_op(&with(&args, &empty, 1));
    let words: &[u64] =
        &left[3 + rank as usize].chunks(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap())).collect::<Vec<_>>();
    let ours = &words[agree_first(agreements + 1, rank) as usize..][..AGREE_WORDS as usize];
    assert_eq!(ours[3], agreements + 1);
    let mut own = empty;
    let odd = (rank + draw.between(1, world - 1)) % world;
    for source in (0..world).filter(|&source| source != rank) {
        let mut record = ours.to_vec();
        match kind {
            0 | 1 => {}
            2 if source == odd => record[draw.between(0, 2) as usize] ^= 1 << draw.of(&[0, 7]),
            3 if source == odd => record[draw.between(0, 1) as usize] ^= 1 << draw.of(&[32, 39]),
            // A rank that is behind, or was never there; with kind 5 the group has ended.
            4 | 5 if source == odd => record[3] = agreements.saturating_sub(1),
            _ => {}
        }
        own[agree_first(agreements + 1, source) as usize..][..AGREE_WORDS as usize].copy_from_slice(&record);
    }
    let budget_us = if kind == 4 { SHORT_US } else { AMPLE_US };
    with(&AgreeArgs { budget_us, ..args }, &own, if kind == 5 { 3 } else { 0 })
}

//! The memory orderings of the exchange and of the agreement, on the CPU ops' own code: `loom` runs every interleaving of small
//! groups, and every word an ordering lets a rank see. What must not work is run as well, so that a pass means something.

mod orderings {
    pub mod words;
}

use capstan::kernels::cpu::agree::{Record, await_record, publish};
use capstan::kernels::cpu::exchange::{CandidateLayout, Words, await_word, nominate};
use capstan::kernels::exchange::{HEAD_WORDS, TAG_BITS, agree_first};
use orderings::words::{Atomic, Loosely, model, patiently};

/// Two ranks, a head each, one row, one nominee.
const LAYOUT: CandidateLayout = CandidateLayout { world: 2, owned: 1, rows: 1, topk: 1 };
const WORDS: usize = HEAD_WORDS as usize + 4;

/// What a rank nominates for a head: another key each time.
fn key(rank: usize, head: usize, generation: u32) -> u64 {
    u64::from(generation) << 40 | (1 + rank as u64) << 36 | (head as u64) << 34 | 7
}

/// One rank's exchanges, as its launches make them: nominations for the peer's head and the own, then the merge.
fn exchanges<W: Words>(peers: &[W], rank: usize, generations: u32, tag_bits: u32) {
    for generation in 1..=generations {
        for owner in [1 - rank, rank] {
            let first = LAYOUT.first(generation, rank, 0, 0);
            nominate(&peers[owner], first, generation, tag_bits, &[key(rank, owner, generation)]);
        }
        for source in 0..2 {
            let first = LAYOUT.first(generation, source, 0, 0);
            let word = await_word(&peers[rank], first, generation, tag_bits, &mut patiently);
            assert_eq!(word, Some(key(source, rank, generation)), "rank {rank}, source {source}, generation {generation}");
        }
    }
}

#[test]
fn every_exchange_merges_its_own_generation() {
    model(2, || Atomic::all(2, WORDS), |peers, rank| exchanges(peers, rank, 4, TAG_BITS));
}

/// A word carries all that is needed, so no order between words is: what half the protocol relies on is causality alone.
#[test]
fn words_that_order_nothing_else_are_enough_for_candidates() {
    model(2, || Loosely::all(2, WORDS), |peers, rank| exchanges(peers, rank, 3, TAG_BITS));
}

/// GEN-1 needs the words of one half, which are two generations apart, to differ in what they carry of it: with one bit the first
/// word of the second half is taken before it is written.
#[test]
#[should_panic(expected = "generation 2")]
fn one_bit_of_generation_takes_older_words() {
    model(2, || Atomic::all(2, WORDS), |peers, rank| exchanges(peers, rank, 3, 1));
}

/// One rank's agreements: what it finds of the other is what that one published under this number.
fn agreements<W: Words>(peers: &[W], rank: usize, count: u64) {
    let record =
        |rank: usize, agreement: u64| -> Record { std::array::from_fn(|word| agreement << 8 | (rank * 3 + word) as u64) };
    for agreement in 1..=count {
        let at = agree_first(agreement, rank as u32) as usize;
        // Its own copy is its own business.
        publish(&peers[1 - rank], at, &record(rank, agreement), agreement);
        let other = 1 - rank;
        let at = agree_first(agreement, other as u32) as usize;
        let found = await_record(&peers[rank], at, agreement, &mut patiently);
        assert_eq!(found, Some((agreement, record(other, agreement))), "rank {rank}, agreement {agreement}");
    }
}

#[test]
fn every_agreement_compares_its_own_records() {
    model(2, || Atomic::all(2, HEAD_WORDS as usize), |peers, rank| agreements(peers, rank, 3));
}

#[test]
#[should_panic(expected = "agreement 1")]
fn a_record_needs_its_number_released_last() {
    model(2, || Loosely::all(2, HEAD_WORDS as usize), |peers, rank| agreements(peers, rank, 3));
}

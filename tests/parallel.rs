//! Context-parallel chains with ranks as threads: captured, replayed, and equal to one rank alone.

mod parallel {
    pub mod ranks;
}
mod serving;

use std::sync::Arc;

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{CaptureSizes, Limits, ModelShape};
use capstan::gates::Refusal;
use capstan::hal;
use capstan::random::Random;
use capstan::runtime::{Checks, Executor};
use parallel::ranks::{Step, compare, decode, run_checked, run_ranks, shape};

/// Steps of a few sequences each, of lengths that jump about, with idle rows between.
fn steps(random: &mut Random, limits: &Limits, count: usize) -> Vec<Step> {
    let query_len = 1 + limits.num_speculative_tokens;
    let mut steps = Vec::with_capacity(count);
    for at in 0..count {
        let live = if at % 7 == 0 { limits.max_num_seqs } else { random.range(1, 2) };
        let lens = (0..live).map(|_| match random.range(0, 4) {
            0 => random.range(query_len, 2 * query_len),
            1 => limits.max_model_len,
            _ => random.range(query_len, limits.max_model_len),
        });
        let lens: Vec<u32> = lens.collect();
        let tokens = lens.iter().map(|_| (0..query_len).map(|_| random.range(0, 31) as i32).collect()).collect();
        steps.push(Step { lens, tokens });
    }
    steps
}

/// A step of sequences that are all of one length.
fn step(random: &mut Random, query_len: u32, live: u32, len: u32) -> Step {
    let tokens = (0..live).map(|_| (0..query_len).map(|_| random.range(0, 31) as i32).collect()).collect();
    Step { lens: vec![len; live as usize], tokens }
}

/// Runs the steps on one rank alone and on `world` ranks, and compares.
fn as_one_rank(shape: &ModelShape, limits: &Limits, world: u32, steps: &[Step], seed: u64) {
    let alone = run_ranks(shape, limits, 1, steps, seed);
    let ranks = run_ranks(shape, limits, world, steps, seed);
    compare(shape, &alone[0], &ranks);
}

#[test]
fn ranks_select_and_attend_as_one_rank_would() {
    let seed = serving::seed(11);
    for (world, speculative) in [(2, 0), (4, 0), (2, 3), (4, 1), (4, 2), (4, 3)] {
        let mut random = Random::new(seed + u64::from(world));
        let limits = Limits { num_speculative_tokens: speculative, max_num_seqs: 6, ..serving::limits() };
        let steps = steps(&mut random, &limits, 40);
        as_one_rank(&shape(), &limits, world, &steps, seed);
    }
}

#[test]
fn eight_ranks_where_their_candidates_are_no_more_than_the_gate_allows() {
    let seed = serving::seed(13);
    let mut random = Random::new(seed);
    let shape = ModelShape { q_heads: 16, kv_heads: 8, index_heads: 8, topk_blocks: 8, ..ModelShape::nano() };
    let limits = Limits { num_speculative_tokens: 1, max_num_seqs: 4, max_model_len: 256, ..serving::limits() };
    let steps = steps(&mut random, &limits, 30);
    as_one_rank(&shape, &limits, 8, &steps, seed);
}

#[test]
fn a_rank_that_the_gate_refuses_scores_alone_counts_it_and_selects_the_same() {
    let seed = serving::seed(16);
    let mut random = Random::new(seed);
    let shape = ModelShape { topk_blocks: 33, ..shape() };
    let limits = Limits { max_num_seqs: 4, ..serving::limits() };
    let steps = steps(&mut random, &limits, 20);
    as_one_rank(&shape, &limits, 2, &steps, seed);
    let chains = Arc::new(MsaChains::new(&shape, &Limits { world: 2, ..limits.clone() }, seed).unwrap());
    assert_eq!(chains.parallel_refused(), [Refusal::Candidates { candidates: 66 }]);
    let device = hal::open("cpu").unwrap();
    let mut executor = Executor::new(&device, chains).unwrap();
    for step in &steps {
        decode(&mut executor, step).unwrap();
    }
    let metrics = executor.metrics();
    assert_eq!((metrics.scored_alone, metrics.decode_steps), (20, 20));
    let alone = Arc::new(MsaChains::new(&shape, &limits, seed).unwrap());
    assert!(alone.parallel_refused().is_empty(), "one rank falls back from nothing");
    let mut executor = Executor::new(&device, alone).unwrap();
    decode(&mut executor, &steps[0]).unwrap();
    assert_eq!(executor.metrics().scored_alone, 0);
}

/// Nothing in a graph comes from the lengths it was captured or first replayed with.
#[test]
fn graphs_that_first_ran_with_one_token_run_at_the_limit() {
    let seed = serving::seed(14);
    let mut random = Random::new(seed);
    for world in [2, 4] {
        let limits = Limits { max_num_seqs: 6, ..serving::limits() };
        let mut steps: Vec<Step> = (1..=6).map(|live| step(&mut random, 1, live, 1)).collect();
        steps.extend((1..=6).rev().map(|live| step(&mut random, 1, live, limits.max_model_len)));
        as_one_rank(&shape(), &limits, world, &steps, seed);
    }
}

#[test]
fn two_graphs_alternate() {
    let seed = serving::seed(15);
    let mut random = Random::new(seed);
    let limits = Limits { max_num_seqs: 6, max_model_len: 256, capture: CaptureSizes::List(vec![1, 6]), ..serving::limits() };
    let steps: Vec<Step> = (0..300)
        .map(|at| {
            let len = random.range(1, limits.max_model_len);
            step(&mut random, 1, if at % 2 == 0 { 1 } else { 6 }, len)
        })
        .collect();
    as_one_rank(&shape(), &limits, 4, &steps, seed);
}

#[test]
fn sizes_that_shrink_and_regrow_for_a_thousand_steps() {
    let seed = serving::seed(12);
    let mut random = Random::new(seed);
    let limits = Limits { max_num_seqs: 4, max_model_len: 256, ..serving::limits() };
    let steps = steps(&mut random, &limits, 1100);
    as_one_rank(&shape(), &limits, 2, &steps, seed);
}

/// The full audit of each step finds nothing on ranks that exchange, and changes nothing.
#[test]
fn ranks_run_clean_under_the_audit_of_each_step() {
    let seed = serving::seed(13);
    for (world, speculative, each_node) in [(2, 0, false), (4, 2, false), (2, 1, true)] {
        let mut random = Random::new(seed + u64::from(world));
        let limits = Limits { num_speculative_tokens: speculative, max_num_seqs: 4, max_model_len: 256, ..serving::limits() };
        let steps = steps(&mut random, &limits, 12);
        let alone = run_ranks(&shape(), &limits, 1, &steps, seed);
        let checks = Checks { audit_every: Some(1), each_node, ..Checks::default() };
        compare(&shape(), &alone[0], &run_checked(&shape(), &limits, world, &steps, seed, checks));
    }
}

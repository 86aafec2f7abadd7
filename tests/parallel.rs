//! Context-parallel chains with ranks as threads: captured, replayed, and equal to one rank alone.

mod parallel {
    pub mod ranks;
}
mod serving;

use capstan::config::Limits;
use capstan::random::Random;
use parallel::ranks::{Step, compare, run_ranks, shape};

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

#[test]
fn ranks_select_and_attend_as_one_rank_would() {
    let seed = serving::seed(11);
    for (world, speculative) in [(2, 0), (4, 0), (2, 3), (4, 1), (4, 2)] {
        let mut random = Random::new(seed + u64::from(world));
        let limits = Limits { num_speculative_tokens: speculative, max_num_seqs: 6, ..serving::limits() };
        let steps = steps(&mut random, &limits, 40);
        let alone = run_ranks(&shape(), &limits, 1, &steps, seed);
        let ranks = run_ranks(&shape(), &limits, world, &steps, seed);
        compare(&shape(), &alone[0], &ranks);
    }
}

#[test]
fn sizes_that_shrink_and_regrow_for_a_thousand_steps() {
    let seed = serving::seed(12);
    let mut random = Random::new(seed);
    let limits = Limits { max_num_seqs: 4, max_model_len: 256, ..serving::limits() };
    let steps = steps(&mut random, &limits, 1100);
    let alone = run_ranks(&shape(), &limits, 1, &steps, seed);
    let ranks = run_ranks(&shape(), &limits, 2, &steps, seed);
    compare(&shape(), &alone[0], &ranks);
}

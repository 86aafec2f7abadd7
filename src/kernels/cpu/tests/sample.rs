//! `sample` against a sort of the whole vocabulary in f64.

use super::super::ops;
use super::super::sample::{draw, uniform};
use super::{Rng, ptr, run};
use crate::kernels::step::{SampleArgs, SequenceRecord};

/// The tokens that may be drawn, in order of id, with their probabilities.
fn allowed(logits: &[f32], record: &SequenceRecord) -> Vec<(usize, f64)> {
    let value = |id: usize| if logits[id].is_nan() { f32::NEG_INFINITY } else { logits[id] };
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| value(b).partial_cmp(&value(a)).unwrap().then(a.cmp(&b)));
    if record.top_k > 0 {
        order.truncate(record.top_k as usize);
    }
    let most = f64::from(value(order[0]));
    let weight = |id: usize| ((f64::from(value(id)) - most) / f64::from(record.temperature)).exp();
    let total: f64 = order.iter().map(|&id| weight(id)).sum();
    let mut sum = 0.0;
    let mut kept: Vec<usize> = Vec::new();
    for id in order {
        if record.top_p < 1.0 && sum >= f64::from(record.top_p) * total && !kept.is_empty() {
            break;
        }
        sum += weight(id);
        kept.push(id);
    }
    kept.retain(|&id| weight(id) >= f64::from(record.min_p) && weight(id) > 0.0);
    kept.sort_unstable();
    let total: f64 = kept.iter().map(|&id| weight(id)).sum();
    kept.iter().map(|&id| (id, weight(id) / total)).collect()
}

/// The token at `u`, and whether `u` is too close to a border for f32 weights to say.
fn expected(allowed: &[(usize, f64)], u: f64) -> (usize, bool) {
    let mut sum = 0.0;
    for &(id, p) in allowed {
        sum += p;
        if sum > u {
            return (id, (sum - u).min(u - (sum - p)) < 1e-5);
        }
    }
    (allowed[allowed.len() - 1].0, true)
}

#[test]
fn draws_match_a_sort() {
    let mut rng = Rng::seeded("sample");
    let mut close = 0;
    for round in 0..2000 {
        let vocab = 1 + rng.below(400);
        let mut logits: Vec<f32> = (0..vocab).map(|_| rng.normal() * 3.0).collect();
        if round % 3 == 0 {
            // Many ties.
            logits.iter_mut().for_each(|x| *x = x.round());
        }
        if round % 5 == 0 {
            logits[rng.below(vocab)] = f32::NAN;
            logits[rng.below(vocab)] = f32::NEG_INFINITY;
            logits[rng.below(vocab)] = 0.25;
        }
        let record = SequenceRecord {
            temperature: 0.1 + rng.unit() as f32 * 2.0,
            top_k: if round % 2 == 0 { rng.below(vocab + 5) as u32 } else { 0 },
            top_p: if round % 4 < 2 { rng.unit() as f32 } else { 1.0 },
            min_p: if round % 7 == 0 { rng.unit() as f32 * 0.3 } else { 0.0 },
            seed: rng.next(),
            ..SequenceRecord::default()
        };
        if logits.iter().all(|x| x.is_nan() || *x == f32::NEG_INFINITY) {
            continue;
        }
        let position = 1 + rng.below(1000) as u64;
        let (id, near) = expected(&allowed(&logits, &record), uniform(record.seed, position));
        let found = draw(&logits, &record, position);
        assert!(near || found == id as i32, "round {round}: {found}, expected {id}: {record:?}");
        close += usize::from(near);
    }
    assert!(close < 100, "the border excuse was used {close} times");
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [1.0f32, 2.0, 0.5, 3.0, -1.0];
    let record = SequenceRecord { temperature: 1.3, top_p: 1.0, seed: 11, ..SequenceRecord::default() };
    let count = 40_000;
    let mut seen = [0; 5];
    (1..=count).for_each(|position| seen[draw(&logits, &record, position) as usize] += 1);
    for (id, p) in allowed(&logits, &record) {
        let (share, slack) = (f64::from(seen[id]) / count as f64, 5.0 * (p * (1.0 - p) / count as f64).sqrt());
        assert!((share - p).abs() < slack, "token {id}: {share}, expected {p}");
    }
}

#[test]
fn greedy_takes_the_lowest_of_ties() {
    let greedy = SequenceRecord::default();
    assert_eq!(draw(&[1.0, f32::NAN, 3.0, 3.0, f32::NEG_INFINITY], &greedy, 1), 2);
    assert_eq!(draw(&[-0.0, 0.0], &greedy, 1), 0);
    assert_eq!(draw(&[f32::NAN, f32::NEG_INFINITY], &greedy, 1), 0);
    let hot = SequenceRecord { temperature: 1.0, top_p: 1.0, ..greedy };
    assert_eq!(draw(&[f32::NAN, f32::NEG_INFINITY], &hot, 1), 0);
    assert_eq!(draw(&[0.0, f32::INFINITY, 5.0], &hot, 1), 1);
    assert_eq!(draw(&[0.0, 1.0, 5.0], &SequenceRecord { top_k: 1, ..hot }, 3), 2);
    assert_eq!(draw(&[0.0, 1.0, 5.0], &SequenceRecord { top_p: 0.0, ..hot }, 3), 2);
}

#[test]
fn a_row_depends_on_its_sequence_alone_and_the_last_row_is_kept() {
    let mut rng = Rng::seeded("sample rows");
    let vocab = 64;
    let mut logits: Vec<f32> = (0..4 * vocab).map(|_| rng.normal()).collect();
    let record = |slot, kv_len, query_len| SequenceRecord {
        slot,
        kv_len,
        query_len,
        temperature: 1.0,
        top_p: 0.9,
        seed: 5 + u64::from(slot),
        ..SequenceRecord::default()
    };
    let mut records = vec![record(2, 8, 2), record(0, 3, 1), SequenceRecord::default()];
    let (mut row_seq, mut row_slot, mut row_len) = (vec![0, 0, 1, 0], vec![2, 2, 0, 0], vec![7, 8, 3, 0]);
    let mut launch = |index: Option<&mut Vec<i32>>, rows: u32| {
        let mut out = vec![-9; rows as usize];
        let mut last_token = vec![-9; 3];
        let args = SampleArgs {
            logits: ptr(&mut logits),
            indexed: u32::from(index.is_some()),
            rows_index: index.map_or(crate::kernels::Ptr::NULL, |index| ptr(index)),
            row_seq: ptr(&mut row_seq),
            row_slot: ptr(&mut row_slot),
            row_len: ptr(&mut row_len),
            records: ptr(&mut records),
            out: ptr(&mut out),
            last_token: ptr(&mut last_token),
            rows,
            vocab: vocab as u32,
            step_rows: 4,
            sequences: 3,
            slots: 3,
        };
        run(ops::sample, [rows, 1, 1], &args);
        (out, last_token)
    };
    let (all, last) = launch(None, 4);
    assert_eq!(last, [all[2], -9, all[1]]);
    assert_eq!(all[3], 0);
    // Logits row 0 as step row 0; an index out of range draws nothing.
    let (some, last) = launch(Some(&mut vec![0, 77, -1]), 3);
    assert_eq!(some, [all[0], 0, 0]);
    assert_eq!(last, [-9, -9, -9]);
}

#[test]
fn a_large_vocabulary_works() {
    let mut rng = Rng::seeded("sample large");
    let logits: Vec<f32> = (0..200_064).map(|_| rng.normal()).collect();
    for (top_k, top_p) in [(50, 0.9), (0, 0.5), (0, 1.0), (1000, 1.0)] {
        let record = SequenceRecord { temperature: 0.8, top_k, top_p, seed: rng.next(), ..SequenceRecord::default() };
        let choices = allowed(&logits, &record);
        let found = draw(&logits, &record, 9) as usize;
        assert!(choices.iter().any(|&(id, _)| id == found), "{found} is not among {} choices", choices.len());
    }
}

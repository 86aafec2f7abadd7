//! Replay equals eager: random batches of two chains, step by step, on the device of `CAPSTAN_DEVICE`.

mod serving;

use std::sync::Arc;

use capstan::chain::StepChains;
use capstan::config::{CaptureSizes, Limits};
use capstan::error::ErrorKind;
use capstan::kernels::step::TOKEN_FROM_DEVICE;
use capstan::random::Random;
use capstan::runtime::{Executor, Fallback, Sampling, SequenceStep, StepPoll};

use serving::{Open, device, limits, m3, msa, prompt, sampling, seed};

/// One captured and one eager executor see the same random steps: lengths that grow, sequences that end, rows that are reused.
fn replay_equals_eager(chains: &Arc<dyn StepChains>, steps: u32, seed: u64) {
    let mut random = Random::new(seed);
    let (mut captured, mut eager) = (Open::new(chains), Open::new(chains));
    captured.executor.capture(|_| ()).unwrap();
    let query_len = 1 + chains.limits().num_speculative_tokens;
    let most = chains.limits().max_num_seqs as usize;
    let mut padded = 0;
    for step in 0..steps {
        while captured.sequences.is_empty() || (captured.sequences.len() < most && random.range(0, 2) > 0) {
            let len = random.range(1, 120);
            let prompt = prompt(&mut random, len);
            assert_eq!(captured.prefill(&prompt), eager.prefill(&prompt), "step {step}: prefill of {len} tokens");
        }
        // Any subset, in any order.
        let mut order: Vec<usize> = (0..captured.sequences.len()).collect();
        for at in (1..order.len()).rev() {
            order.swap(at, random.range(0, at as u32) as usize);
        }
        order.truncate(random.range(1, order.len() as u32) as usize);
        let tokens: Vec<_> = order.iter().map(|_| prompt(&mut random, query_len)).collect();
        let sampling: Vec<_> = order.iter().map(|_| sampling(&mut random)).collect();
        let replayed = captured.decode(&order, &tokens, &sampling);
        assert_eq!(replayed, eager.decode(&order, &tokens, &sampling), "step {step}: {} sequences", order.len());
        padded = captured.executor.metrics().pad_rows;
        for at in (0..captured.sequences.len()).rev() {
            if captured.sequences[at].1.len() > 400 || random.range(0, 9) == 0 {
                captured.close(at);
                eager.close(at);
            }
        }
    }
    assert!(padded > 0, "the test is about padded steps, too");
    assert_eq!(captured.executor.metrics().fallbacks, [0; 3], "every step of the captured executor replayed");
    assert_eq!(eager.executor.metrics().fallbacks[0], u64::from(steps), "the other never did");
}

#[test]
fn the_sparse_attention_chain_replays_as_it_runs_eagerly() {
    replay_equals_eager(&msa(&limits()), 150, seed(11));
}

#[test]
fn the_model_replays_as_it_runs_eagerly() {
    replay_equals_eager(&m3(&limits()), 60, seed(12));
}

#[test]
fn speculative_rows_replay_as_they_run_eagerly() {
    for query_len in 2..=4 {
        let limits = Limits { num_speculative_tokens: query_len - 1, ..limits() };
        replay_equals_eager(&msa(&limits), 40, seed(20 + u64::from(query_len)));
        replay_equals_eager(&m3(&limits), 10, seed(30 + u64::from(query_len)));
    }
}

/// A verified draft: `query_len` rows at once give what the same tokens give one by one; rejected rows are overwritten.
#[test]
fn rejected_rows_leave_no_trace() {
    let speculative = Limits { num_speculative_tokens: 3, ..limits() };
    let (mut draft, mut single) = (Open::new(&m3(&speculative)), Open::new(&m3(&limits())));
    draft.executor.capture(|_| ()).unwrap();
    single.executor.capture(|_| ()).unwrap();
    let mut random = Random::new(seed(5));
    let start = prompt(&mut random, 70);
    assert_eq!(draft.prefill(&start), single.prefill(&start));
    for _ in 0..12 {
        let tokens = prompt(&mut random, 4);
        let rows = draft.decode(&[0], std::slice::from_ref(&tokens), &[Sampling::GREEDY]);
        let accepted = random.range(1, 4) as usize;
        for at in 0..accepted {
            let one = single.decode(&[0], &[vec![tokens[at]]], &[Sampling::GREEDY]);
            assert_eq!(one, [rows[at]]);
        }
        let len = single.sequences[0].1.len();
        draft.sequences[0].1.truncate(len);
        draft.executor.truncate_sequence(draft.sequences[0].0, len as u32).unwrap();
    }
}

/// Steps are queued ahead, each fed by the last one's device output; the host never learns a token before it queues the next.
#[test]
fn tokens_feed_back_on_the_device_with_several_steps_in_flight() {
    let chains = m3(&limits());
    let (mut ahead, mut host) = (Open::new(&chains), Open::new(&chains));
    ahead.executor.capture(|_| ()).unwrap();
    host.executor.capture(|_| ()).unwrap();
    let start: Vec<i32> = (1..60).collect();
    let (_, first) = ahead.prefill(&start);
    host.prefill(&start);
    let mut expected = vec![first];
    for _ in 0..20 {
        let next = host.decode(&[0], &[vec![*expected.last().unwrap()]], &[Sampling::GREEDY]);
        expected.extend(next);
    }
    ahead.grow(0, start.len() + 20);
    let (id, slots) = (ahead.sequences[0].0, ahead.executor.ring_slots() as usize);
    assert!(slots > 1);
    let mut tickets = std::collections::VecDeque::new();
    let mut found = vec![first];
    for step in 0..20 {
        if tickets.len() == slots {
            let oldest = tickets.pop_front().unwrap();
            found.push(ahead.executor.wait(oldest).unwrap().tokens[0]);
        }
        let kv_len = (start.len() + step + 1) as u32;
        let batch = [SequenceStep { sequence: id, tokens: &[TOKEN_FROM_DEVICE], kv_len, sampling: Sampling::GREEDY }];
        tickets.push_back(ahead.executor.decode(&batch).unwrap());
    }
    for ticket in tickets {
        found.push(ahead.executor.wait(ticket).unwrap().tokens[0]);
    }
    assert_eq!(found, expected);
}

#[test]
fn a_full_ring_is_an_error_that_loses_nothing() {
    let mut open = Open::new(&msa(&Limits { ring_slots: 2, ..limits() }));
    open.executor.capture(|_| ()).unwrap();
    open.prefill(&[1, 2, 3]);
    open.grow(0, 16);
    let id = open.sequences[0].0;
    let step = |kv_len| [SequenceStep { sequence: id, tokens: &[5], kv_len, sampling: Sampling::GREEDY }];
    let first = open.executor.decode(&step(4)).unwrap();
    let second = open.executor.decode(&step(5)).unwrap();
    let error = open.executor.decode(&step(6)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::State);
    assert!(error.help_line().unwrap().contains("ring_slots"), "{error}");
    while let StepPoll::Pending = open.executor.poll(first).unwrap() {
        std::thread::yield_now();
    }
    assert_eq!(open.executor.wait(first).unwrap_err().kind(), ErrorKind::State, "a result is taken once");
    let third = open.executor.decode(&step(6)).unwrap();
    open.executor.wait(second).unwrap();
    open.executor.wait(third).unwrap();
}

/// Beyond the ladder a step runs eagerly, gives the same tokens, and is counted with its reason.
#[test]
fn beyond_the_ladder_is_eager_and_counted() {
    let limits = Limits { capture: CaptureSizes::List(vec![2]), ..limits() };
    let chains = msa(&limits);
    let (mut some, mut none) = (Open::new(&chains), Open::new(&chains));
    some.executor.capture(|_| ()).unwrap();
    let mut random = Random::new(seed(6));
    for _ in 0..5 {
        let len = random.range(1, 90);
        let prompt = prompt(&mut random, len);
        assert_eq!(some.prefill(&prompt), none.prefill(&prompt));
    }
    for rows in 1..=5 {
        let order: Vec<usize> = (0..rows).collect();
        let tokens = vec![vec![9]; rows];
        let sampling = vec![Sampling::GREEDY; rows];
        assert_eq!(some.decode(&order, &tokens, &sampling), none.decode(&order, &tokens, &sampling));
    }
    let metrics = some.executor.metrics();
    let beyond = Fallback::ALL.iter().position(|&why| why == Fallback::BeyondLadder).unwrap();
    assert_eq!(metrics.fallbacks[beyond], 3);
    assert_eq!((metrics.replays[0].rows, metrics.replays[0].replays), (2, 2));
    assert!(Fallback::BeyondLadder.reason().contains("--capture-sizes"));
}

/// A mixed batch is split decode-first; both parts equal what they give on their own.
#[test]
fn mixed_batches_run_both_parts() {
    let chains = m3(&limits());
    let (mut mixed, mut apart) = (Open::new(&chains), Open::new(&chains));
    mixed.executor.capture(|_| ()).unwrap();
    let mut random = Random::new(seed(8));
    for len in [33, 80] {
        let prompt = prompt(&mut random, len);
        assert_eq!(mixed.prefill(&prompt), apart.prefill(&prompt));
    }
    let fresh = prompt(&mut random, 41);
    let decoded = apart.decode(&[0, 1], &[vec![3], vec![4]], &[Sampling::GREEDY; 2]);
    let (_, prefilled) = apart.prefill(&fresh);
    let id = mixed.executor.open_sequence().unwrap();
    mixed.sequences.push((id, fresh.clone()));
    mixed.grow(1, 81);
    mixed.grow(2, fresh.len());
    let step = |at: usize, tokens| SequenceStep {
        sequence: mixed.sequences[at].0,
        tokens,
        kv_len: if at == 2 { 41 } else { mixed.sequences[at].1.len() as u32 + 1 },
        sampling: Sampling::GREEDY,
    };
    let batch = [step(0, &[3]), step(1, &[4]), step(2, &fresh[..])];
    let bad = [batch[0], SequenceStep { kv_len: 40, ..batch[2] }];
    assert_eq!(mixed.executor.step(&bad).unwrap_err().kind(), ErrorKind::Batch);
    assert_eq!(mixed.executor.metrics().decode_steps, 0, "a refused prefill keeps the decode part from being queued");
    let (decode, prefill, decodes) = mixed.executor.step(&batch).unwrap();
    assert_eq!(decodes, 2);
    assert_eq!(mixed.executor.wait(decode.unwrap()).unwrap().tokens, decoded);
    assert_eq!(mixed.executor.wait(prefill.unwrap()).unwrap().tokens, [prefilled]);
}

/// More table changes than a step carries are uploaded ahead of it.
#[test]
fn many_new_blocks_reach_the_device() {
    let limits = Limits { max_model_len: 1024, ..limits() };
    let chains = msa(&limits);
    let capacity = chains.step_layout().update_capacity as usize;
    let (mut many, mut few) = (Open::new(&chains), Open::new(&chains));
    many.executor.capture(|_| ()).unwrap();
    let prompt: Vec<i32> = (0..200).map(|at| at % 128).collect();
    assert_eq!(many.prefill(&prompt), few.prefill(&prompt));
    let mut others = Vec::new();
    while many.executor.sequences().pending().len() <= capacity {
        let id = many.executor.open_sequence().unwrap();
        many.sequences.push((id, Vec::new()));
        others.push(id);
        many.grow(many.sequences.len() - 1, 256);
    }
    assert_eq!(many.decode(&[0], &[vec![7]], &[Sampling::GREEDY]), few.decode(&[0], &[vec![7]], &[Sampling::GREEDY]),);
    assert!(many.executor.metrics().table_flushes > 0);
}

/// Bad batches are refused with a help line and change nothing: the next good one runs.
#[test]
fn bad_batches_are_refused_and_leave_the_executor_usable() {
    let chains = msa(&limits());
    let mut open = Open::new(&chains);
    open.executor.capture(|_| ()).unwrap();
    let (_, expected) = { Open::new(&chains).prefill(&[1, 2, 3]) };
    open.prefill(&[1, 2, 3]);
    open.grow(0, 16);
    let id = open.sequences[0].0;
    let greedy = Sampling::GREEDY;
    let step = |tokens, kv_len, sampling| SequenceStep { sequence: id, tokens, kv_len, sampling };
    let many = vec![1; 300];
    let nan = Sampling { temperature: f32::NAN, ..greedy };
    let cases: [(&str, Vec<SequenceStep<'_>>); 10] = [
        ("nothing", vec![]),
        ("no token", vec![step(&[], 3, greedy)]),
        ("past max_model_len", vec![step(&[1], 513, greedy)]),
        ("a gap", vec![step(&[1], 5, greedy)]),
        ("a falling length", vec![step(&[1], 2, greedy)]),
        ("no block", vec![step(&many[..17], 20, greedy)]),
        ("twice", vec![step(&[1], 4, greedy), step(&[1], 4, greedy)]),
        ("out of vocabulary", vec![step(&[256], 4, greedy)]),
        ("a negative token", vec![step(&[-7], 4, greedy)]),
        ("NaN temperature", vec![step(&[1], 4, nan)]),
    ];
    for (name, batch) in &cases {
        let error = open.executor.decode(batch).err().unwrap_or_else(|| panic!("{name} was accepted"));
        assert_eq!(error.kind(), ErrorKind::Batch, "{name}: {error}");
        assert!(!error.message().is_empty());
    }
    let error = open.executor.prefill(&[step(&many, 303, greedy)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Batch, "{error}");
    let stranger = Executor::new(&device(), chains.clone()).unwrap().open_sequence().unwrap();
    open.executor.close_sequence(id, |_| ()).unwrap();
    assert_eq!(open.executor.close_sequence(id, |_| ()).unwrap_err().kind(), ErrorKind::State);
    let closed = [SequenceStep { sequence: id, tokens: &[1], kv_len: 4, sampling: greedy }];
    assert!(open.executor.decode(&closed).is_err());
    let foreign = [SequenceStep { sequence: stranger, tokens: &[1], kv_len: 1, sampling: greedy }];
    assert!(open.executor.decode(&foreign).is_err(), "its blocks were never granted here");
    open.executor.open_sequence().unwrap();
    let mut fresh = Open::new(&chains);
    assert_eq!(fresh.prefill(&[1, 2, 3]).1, expected);
}

/// A second capture replaces the first, with steps before and after.
#[test]
fn capturing_again_is_allowed() {
    let chains = msa(&limits());
    let (mut twice, mut once) = (Open::new(&chains), Open::new(&chains));
    let mut seen = Vec::new();
    let report = twice.executor.capture(|at| seen.push((at.warming, at.rows))).unwrap();
    let sizes: Vec<u32> = report.sizes.iter().rev().copied().collect();
    let expected: Vec<_> = [true, false].iter().flat_map(|&warming| sizes.iter().map(move |&rows| (warming, rows))).collect();
    assert_eq!(seen, expected, "all sizes warm up before the first capture, largest first");
    once.executor.capture(|_| ()).unwrap();
    assert_eq!(twice.prefill(&[4; 40]), once.prefill(&[4; 40]));
    twice.executor.capture(|_| ()).unwrap();
    assert_eq!(twice.decode(&[0], &[vec![7]], &[Sampling::GREEDY]), once.decode(&[0], &[vec![7]], &[Sampling::GREEDY]),);
}

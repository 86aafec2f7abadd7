//! The executor on the CPU device: replay equals eager, padded equals unpadded, tokens fed on the device equal tokens fed by the
//! host, and bad input changes nothing.

use std::sync::Arc;

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use capstan::error::ErrorKind;
use capstan::hal;
use capstan::kernels::step::TOKEN_FROM_DEVICE;
use capstan::measure::Random;
use capstan::runtime::{Executor, Sampling, SequenceId, SequenceStep};

fn seed() -> u64 {
    let seed = std::env::var("CAPSTAN_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0x5eed);
    println!("CAPSTAN_SEED={seed}");
    seed
}

fn limits(speculative: u32) -> Limits {
    Limits {
        max_model_len: 256,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        num_speculative_tokens: speculative,
        capture: CaptureSizes::Default,
        cache: CacheBudget::Blocks(96),
        ..Limits::default()
    }
}

fn executor(limits: &Limits) -> Executor {
    let chains: Arc<dyn StepChains> = Arc::new(MsaChains::new(&ModelShape::nano(), limits, 7).expect("plans"));
    Executor::new(&hal::open("cpu").expect("the cpu device"), chains).expect("builds")
}

/// Sequences with their own blocks, driven the same way on every executor given.
struct Driver {
    ids: Vec<SequenceId>,
    lens: Vec<u32>,
    next_block: u32,
    block_size: u32,
}

impl Driver {
    fn new(executors: &mut [&mut Executor], count: usize) -> Driver {
        let ids = (0..count)
            .map(|_| {
                let ids: Vec<_> = executors.iter_mut().map(|executor| executor.open_sequence().expect("room")).collect();
                ids[0]
            })
            .collect();
        Driver { ids, lens: vec![0; count], next_block: 0, block_size: 16 }
    }

    fn grow(&mut self, executors: &mut [&mut Executor], at: usize, tokens: u32) {
        let (from, to) = (self.lens[at].div_ceil(self.block_size), (self.lens[at] + tokens).div_ceil(self.block_size));
        let held = executors[0].sequences().get(self.ids[at]).expect("open").blocks().len() as u32;
        for _ in from.max(held)..to {
            for executor in executors.iter_mut() {
                executor.grant_blocks(self.ids[at], &[self.next_block]).expect("a free block");
            }
            self.next_block += 1;
        }
        self.lens[at] += tokens;
    }
}

#[test]
fn replay_equals_an_unpadded_eager_run() {
    let mut random = Random::new(seed());
    for speculative in [0, 2] {
        let limits = limits(speculative);
        let query_len = 1 + speculative;
        let (mut replayed, mut eager) = (executor(&limits), executor(&limits));
        replayed.capture(|_| ()).expect("captures");
        let mut driver = Driver::new(&mut [&mut replayed, &mut eager], 7);
        for at in 0..7 {
            let len = random.range(1, 40);
            driver.grow(&mut [&mut replayed, &mut eager], at, len);
            let prompt: Vec<i32> = (0..len).map(|_| random.range(0, 99) as i32).collect();
            let steps = [SequenceStep { sequence: driver.ids[at], tokens: &prompt, kv_len: len, sampling: Sampling::GREEDY }];
            let (a, b) = (replayed.prefill(&steps).expect("runs"), eager.prefill(&steps).expect("runs"));
            assert_eq!(replayed.wait(a).expect("ends").tokens, eager.wait(b).expect("ends").tokens);
        }
        for step in 0..40 {
            let rows: Vec<usize> = (0..7).filter(|_| random.range(0, 2) > 0).collect();
            let rows = if rows.is_empty() { vec![step % 7] } else { rows };
            for &at in &rows {
                driver.grow(&mut [&mut replayed, &mut eager], at, query_len);
            }
            let tokens: Vec<Vec<i32>> = rows.iter().map(|_| (0..query_len).map(|_| random.range(0, 99) as i32).collect()).collect();
            let steps: Vec<_> = rows
                .iter()
                .zip(&tokens)
                .map(|(&at, tokens)| SequenceStep {
                    sequence: driver.ids[at],
                    tokens,
                    kv_len: driver.lens[at],
                    sampling: Sampling { temperature: (at % 2) as f32, seed: at as u64, ..Sampling::GREEDY },
                })
                .collect();
            let (a, b) = (replayed.decode(&steps).expect("replays"), eager.decode(&steps).expect("runs"));
            let expected = eager.wait(b).expect("ends").tokens.to_vec();
            assert_eq!(replayed.wait(a).expect("ends").tokens, expected, "speculative {speculative}, step {step}, rows {rows:?}");
        }
        assert_eq!(replayed.metrics().fallbacks, [0; 3]);
        assert_eq!(eager.metrics().fallbacks, [40, 0, 0], "counted, not silent");
        let (a, b) = (caches(&replayed), caches(&eager));
        assert!(a == b, "PAD-2: pad rows touched a cache");
    }
}

fn caches(executor: &Executor) -> Vec<(String, Vec<u8>)> {
    let arena = executor.arena();
    let buffers = arena.plan().buffers.iter().enumerate().filter(|(_, buffer)| buffer.spec.name.contains("cache"));
    buffers
        .map(|(at, buffer)| {
            let mut bytes = vec![0; buffer.bytes as usize];
            arena.read(capstan::arena::BufferId(at as u32), 0, &mut bytes).expect("readable");
            (buffer.spec.name.clone(), bytes)
        })
        .collect()
}

#[test]
fn tokens_fed_on_the_device_equal_tokens_fed_by_the_host() {
    let limits = limits(0);
    let (mut by_device, mut by_host) = (executor(&limits), executor(&limits));
    by_device.capture(|_| ()).expect("captures");
    by_host.capture(|_| ()).expect("captures");
    let mut driver = Driver::new(&mut [&mut by_device, &mut by_host], 3);
    let mut last = Vec::new();
    for at in 0..3 {
        driver.grow(&mut [&mut by_device, &mut by_host], at, 10);
        let prompt: Vec<i32> = (0..10).map(|i| (i * 13 + at as i32) % 100).collect();
        let steps = [SequenceStep { sequence: driver.ids[at], tokens: &prompt, kv_len: 10, sampling: Sampling::GREEDY }];
        let ticket = by_device.prefill(&steps).expect("runs");
        by_device.wait(ticket).expect("ends");
        let ticket = by_host.prefill(&steps).expect("runs");
        last.push(by_host.wait(ticket).expect("ends").tokens[0]);
    }
    // As many steps in flight as the ring holds, none read before the last is queued.
    let depth = by_device.ring_slots();
    let mut tickets = Vec::new();
    let mut expected = Vec::new();
    for _ in 0..depth {
        for at in 0..3 {
            driver.grow(&mut [&mut by_device, &mut by_host], at, 1);
        }
        let fed = [TOKEN_FROM_DEVICE];
        let steps: Vec<_> = (0..3)
            .map(|at| SequenceStep { sequence: driver.ids[at], tokens: &fed, kv_len: driver.lens[at], sampling: Sampling::GREEDY })
            .collect();
        tickets.push(by_device.decode(&steps).expect("queues"));
        let tokens = last.clone();
        let steps: Vec<_> = (0..3)
            .map(|at| SequenceStep {
                sequence: driver.ids[at],
                tokens: &tokens[at..=at],
                kv_len: driver.lens[at],
                sampling: Sampling::GREEDY,
            })
            .collect();
        let ticket = by_host.decode(&steps).expect("queues");
        last = by_host.wait(ticket).expect("ends").tokens.to_vec();
        expected.push(last.clone());
    }
    // The ring is full: one more is refused, and nothing is lost.
    driver.grow(&mut [&mut by_device, &mut by_host], 0, 1);
    let more = [SequenceStep { sequence: driver.ids[0], tokens: &[1], kv_len: driver.lens[0], sampling: Sampling::GREEDY }];
    let full = by_device.decode(&more).expect_err("the ring is full");
    assert_eq!(full.kind(), ErrorKind::State, "{full}");
    for (ticket, expected) in tickets.iter().zip(&expected) {
        assert_eq!(by_device.wait(*ticket).expect("ends").tokens, expected);
    }
    assert!(by_device.wait(tickets[0]).is_err(), "a ticket is redeemed once");
    let ticket = by_device.decode(&more).expect("room again");
    by_device.wait(ticket).expect("ends");
}

#[test]
fn a_bad_batch_is_refused_and_changes_nothing() {
    let mut executor = executor(&limits(0));
    executor.capture(|_| ()).expect("captures");
    let a = executor.open_sequence().expect("room");
    executor.grant_blocks(a, &[0, 1]).expect("free");
    let prompt = [1; 8];
    let step = |sequence, tokens, kv_len| SequenceStep { sequence, tokens, kv_len, sampling: Sampling::GREEDY };
    let ticket = executor.prefill(&[step(a, &prompt, 8)]).expect("runs");
    executor.wait(ticket).expect("ends");
    let wide = [1; 65];
    let nan = SequenceStep { sampling: Sampling { temperature: f32::NAN, ..Sampling::GREEDY }, ..step(a, &[1], 9) };
    let bad: Vec<(&str, Vec<SequenceStep<'_>>)> = vec![
        ("a length past max_model_len", vec![step(a, &[1], 257)]),
        ("a length that falls", vec![step(a, &[1], 7)]),
        ("a gap", vec![step(a, &[1], 12)]),
        ("a block that was not granted", vec![step(a, &[1; 25], 33)]),
        ("a sequence twice", vec![step(a, &[1], 9), step(a, &[1], 9)]),
        ("a token out of the vocabulary", vec![step(a, &[1_000_000], 9)]),
        ("a temperature that is no number", vec![nan]),
        ("no sequence", vec![]),
        ("no token", vec![step(a, &[], 8)]),
        ("more rows than the buffers hold", vec![step(a, &wide, 73)]),
        ("a sequence of nobody", vec![step(SequenceId::default(), &[1], 1)]),
    ];
    for (what, batch) in &bad {
        for error in [executor.decode(batch).expect_err(what), executor.prefill(batch).expect_err(what)] {
            assert!(matches!(error.kind(), ErrorKind::Batch | ErrorKind::State), "{what}: {error:?}");
        }
    }
    assert_eq!(executor.metrics().decode_steps, 0);
    let ticket = executor.decode(&[step(a, &[1], 9)]).expect("still usable");
    executor.wait(ticket).expect("ends");
}

#[test]
fn a_moved_buffer_stops_the_replay() {
    let mut executor = executor(&limits(0));
    executor.capture(|_| ()).expect("captures");
    let a = executor.open_sequence().expect("room");
    executor.grant_blocks(a, &[0]).expect("free");
    let step = [SequenceStep { sequence: a, tokens: &[1], kv_len: 1, sampling: Sampling::GREEDY }];
    let buffer = executor.chains().step().row_len;
    executor.arena().ledger().pretend_moved(buffer);
    let error = executor.decode(&step).expect_err("ADDR-2");
    assert_eq!(error.kind(), ErrorKind::Invariant("ADDR-2"), "{error}");
}

#[test]
fn beyond_the_ladder_is_eager_counted_and_equal() {
    let few = Limits { capture: CaptureSizes::List(vec![1, 2]), ..limits(0) };
    let (mut small, mut large) = (executor(&few), executor(&limits(0)));
    small.capture(|_| ()).expect("captures");
    large.capture(|_| ()).expect("captures");
    let mut driver = Driver::new(&mut [&mut small, &mut large], 5);
    for at in 0..5 {
        driver.grow(&mut [&mut small, &mut large], at, 1);
    }
    let steps: Vec<_> = driver
        .ids
        .iter()
        .map(|&sequence| SequenceStep { sequence, tokens: &[3], kv_len: 1, sampling: Sampling::GREEDY })
        .collect();
    let (a, b) = (small.decode(&steps).expect("runs"), large.decode(&steps).expect("replays"));
    let expected = large.wait(b).expect("ends").tokens.to_vec();
    assert_eq!(small.wait(a).expect("ends").tokens, expected);
    assert_eq!(small.metrics().fallbacks, [0, 1, 0]);
    assert_eq!(large.metrics().fallbacks, [0, 0, 0]);
}

#[test]
fn the_null_device_captures_and_says_that_it_runs_nothing() {
    let chains: Arc<dyn StepChains> = Arc::new(MsaChains::new(&ModelShape::nano(), &limits(0), 7).expect("plans"));
    let mut executor = Executor::new(&hal::open("null").expect("the null device"), chains).expect("builds");
    executor.capture(|_| ()).expect("captures");
    let a = executor.open_sequence().expect("room");
    executor.grant_blocks(a, &[0]).expect("free");
    let ticket = executor.decode(&[SequenceStep { sequence: a, tokens: &[1], kv_len: 1, sampling: Sampling::GREEDY }]).expect("queues");
    assert_eq!(executor.wait(ticket).expect_err("no result").kind(), ErrorKind::Unavailable);
}

//! The engine over the whole model: what a request gets does not depend on anything but itself.

mod recorded;
mod serving;

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use capstan::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use capstan::engine::{Engine, EngineLimits, Event, Finish, Request, RequestId};
use capstan::error::ErrorKind;
use capstan::model::{Checkpoint, M3Chains, make};
use capstan::random::Random;
use capstan::runtime::Sampling;

use recorded::{Logits, Recorded};
use serving::{device, limits, prompt, sampling, seed};

/// A random nano model.
fn checkpoint() -> Arc<Checkpoint> {
    let dir = tempfile::tempdir().expect("a temporary folder");
    make::make_model(&ModelShape::nano(), 3, dir.path(), |_| ()).expect("a model is written");
    Arc::new(Checkpoint::open(dir.path()).expect("a model that was just written opens"))
}

fn chains(checkpoint: &Arc<Checkpoint>, limits: &Limits) -> Arc<M3Chains> {
    Arc::new(M3Chains::new(checkpoint.clone(), limits).expect("the nano model plans"))
}

/// What has come through a request's channel.
fn received(events: &Receiver<Event>) -> (Vec<i32>, Option<Finish>) {
    let (mut tokens, mut finish) = (Vec::new(), None);
    for event in events.try_iter() {
        assert!(finish.is_none(), "nothing follows the end");
        match event {
            Event::Token(token) => tokens.push(token),
            Event::Finished(why) => finish = Some(why),
        }
    }
    (tokens, finish)
}

/// Requests of all lengths, greedy and sampled.
fn requests(random: &mut Random, count: u32) -> Vec<Request> {
    (0..count)
        .map(|at| {
            // Long prompts, or answers that outgrow their prompts.
            let (len, max_new) = match at % 3 {
                0 => (random.range(100, 330), random.range(1, 40)),
                _ => (random.range(1, 60), random.range(30, 120)),
            };
            Request { prompt: prompt(random, len), max_new, sampling: sampling(random), stop: Vec::new() }
        })
        .collect()
}

/// Each request alone, eagerly, its prompt in one piece, its blocks in order.
fn alone(checkpoint: &Arc<Checkpoint>, requests: &[Request], logits: &mut Logits) -> Vec<Vec<i32>> {
    let limits = Limits { max_num_seqs: 1, max_num_batched_tokens: 512, ..limits() };
    let chains = chains(checkpoint, &limits);
    let steps = Recorded::new(&device(), &chains, None, false, logits);
    let mut engine = Engine::new(steps, EngineLimits::of(&*chains));
    requests.iter().map(|request| engine.run(request.clone()).unwrap().0).collect()
}

/// Limits under which anything may happen: few or many sequences, blocks, tokens a step and capture sizes.
fn any_limits(random: &mut Random, scarce: bool) -> Limits {
    let max_num_seqs = random.range(if scarce { 5 } else { 1 }, 10);
    let mut sizes: Vec<u32> = (0..random.range(1, 4)).map(|_| random.range(1, max_num_seqs)).collect();
    sizes.sort();
    sizes.dedup();
    Limits {
        max_num_seqs,
        max_num_batched_tokens: random.range(max_num_seqs, 200),
        // The longest request takes 24 blocks of 16 tokens.
        cache: CacheBudget::Blocks(if scarce { random.range(24, 30) } else { 256 }),
        capture: if random.range(0, 1) == 0 { CaptureSizes::Default } else { CaptureSizes::List(sizes) },
        ..limits()
    }
}

#[test]
fn tokens_and_logits_depend_on_the_request_alone() {
    let seed = seed(41);
    let (checkpoint, mut logits) = (checkpoint(), Logits::default());
    let mut random = Random::new(seed);
    let requests = requests(&mut random, 14);
    let expected = alone(&checkpoint, &requests, &mut logits);
    let (mut preempted, mut chunks, mut padded, mut eager) = (0, 0, 0, 0);
    for run in 0..10 {
        let limits = any_limits(&mut random, run % 2 == 0);
        let chains = chains(&checkpoint, &limits);
        let captured = run % 4 != 3;
        let mut places = Random::new(random.next_u64());
        let steps = Recorded::new(&device(), &chains, Some(&mut places), captured, &mut logits);
        let mut engine = Engine::new(steps, EngineLimits::of(&*chains));
        let mut left: Vec<usize> = (0..requests.len()).collect();
        let mut open: Vec<(usize, RequestId, Receiver<Event>, Vec<i32>)> = Vec::new();
        while !(left.is_empty() && engine.is_idle()) {
            while !left.is_empty() && (engine.is_idle() || random.range(0, 2) == 0) {
                let at = left.swap_remove(random.range(0, left.len() as u32 - 1) as usize);
                let (id, events) = engine.submit(requests[at].clone()).unwrap();
                open.push((at, id, events, Vec::new()));
            }
            let summary = engine.step().unwrap_or_else(|error| panic!("run {run}, {limits:?}: {error}"));
            preempted += summary.preempted;
            chunks += usize::from(summary.prefilled == limits.max_num_batched_tokens as usize);
            open.retain_mut(|(at, id, events, tokens)| {
                let (more, finish) = received(events);
                tokens.extend(more);
                let same = expected[*at].starts_with(tokens);
                assert!(same, "run {run}, {limits:?}: request {at} got {tokens:?}, alone {:?}", expected[*at]);
                match finish {
                    Some(Finish::Cancelled) => false,
                    Some(_) => {
                        assert_eq!(*tokens, expected[*at], "run {run}");
                        false
                    }
                    // Some go away before their end.
                    None => {
                        if *at % 5 == 4 && tokens.len() > 3 {
                            engine.cancel(*id);
                        }
                        true
                    }
                }
            });
        }
        assert!(open.is_empty(), "run {run}: every request ended");
        let metrics = engine.steps().executor().metrics();
        padded += metrics.pad_rows;
        eager += metrics.fallbacks.iter().sum::<u64>();
    }
    println!(
        "{preempted} preemptions, {chunks} full chunks, {padded} pad rows, {eager} eager steps, {} rows compared",
        logits.compared
    );
    assert!(preempted > 0 && chunks > 20 && padded > 20 && eager > 20 && logits.compared > 1000);
}

/// An engine over plain executors, for what a request's life looks like from outside.
fn engine(limits: &Limits) -> Engine<capstan::runtime::Executor> {
    let chains = chains(&checkpoint(), limits);
    let executor = capstan::runtime::Executor::new(&device(), chains.clone()).unwrap();
    Engine::new(executor, EngineLimits::of(&*chains))
}

fn greedy(prompt: Vec<i32>, max_new: u32) -> Request {
    Request { prompt, max_new, sampling: Sampling::GREEDY, stop: Vec::new() }
}

fn drain<S: capstan::engine::Steps>(engine: &mut Engine<S>) {
    while !engine.is_idle() {
        engine.step().unwrap();
    }
}

#[test]
fn the_youngest_is_preempted_and_computed_again() {
    // Two requests that grow to 12 blocks of 16 tokens each, in a cache of 16.
    let mut random = Random::new(seed(42));
    let requests = [0, 1].map(|_| greedy(prompt(&mut random, 60), 130));
    let mut engine = engine(&Limits { cache: CacheBudget::Blocks(16), ..limits() });
    let alone = requests.clone().map(|request| engine.run(request).unwrap());
    let events = requests.map(|request| engine.submit(request).unwrap().1);
    let (mut preempted, mut first_ended) = (0, 0);
    for step in 1.. {
        let summary = engine.step().unwrap();
        preempted += summary.preempted;
        if summary.finished > 0 && first_ended == 0 {
            first_ended = step;
            assert_eq!(engine.load().0 + engine.load().1, 1, "the older one ended first");
        }
        if engine.is_idle() {
            break;
        }
    }
    assert_eq!(preempted, 1, "the older one is never preempted, the younger one waits for it");
    for (events, alone) in events.iter().zip(alone) {
        assert_eq!(received(events), (alone.0, Some(Finish::Length)), "tokens go out once");
    }
}

#[test]
fn a_request_is_cancelled_wherever_it_is() {
    let limits = Limits { max_num_seqs: 2, max_num_batched_tokens: 32, cache: CacheBudget::Blocks(24), ..limits() };
    let mut engine = engine(&limits);
    let mut random = Random::new(seed(43));
    let kept = greedy(prompt(&mut random, 40), 60);
    let expected = engine.run(kept.clone()).unwrap().0;
    let (_, kept) = engine.submit(kept).unwrap();
    let (in_prefill, prefilled) = engine.submit(greedy(prompt(&mut random, 200), 8)).unwrap();
    let (in_queue, queued) = engine.submit(greedy(prompt(&mut random, 10), 8)).unwrap();
    engine.step().unwrap();
    engine.step().unwrap();
    assert_eq!(engine.load(), (1, 2), "one waits, one is in its prompt");
    engine.cancel(in_prefill);
    engine.cancel(in_queue);
    assert_eq!(engine.step().unwrap().finished, 2);
    assert_eq!([received(&prefilled), received(&queued)], [0, 1].map(|_| (vec![], Some(Finish::Cancelled))));
    // While it decodes; its tokens so far are the right ones.
    let (in_decode, decoded) = engine.submit(greedy(prompt(&mut random, 30), 60)).unwrap();
    let first = (0..10).map(|_| engine.step().unwrap().tokens).sum::<usize>();
    assert!(first > 10);
    engine.cancel(in_decode);
    drain(&mut engine);
    assert!(matches!(received(&decoded), (tokens, Some(Finish::Cancelled)) if !tokens.is_empty()));
    assert_eq!(received(&kept), (expected, Some(Finish::Length)));
    // Cancelling what is gone changes nothing, and every block came back: the whole cache fits one request again.
    engine.cancel(in_decode);
    let (tokens, finish) = engine.run(greedy(prompt(&mut random, 300), 84)).unwrap();
    assert_eq!((tokens.len(), finish), (84, Finish::Length));
}

#[test]
fn a_receiver_that_is_gone_ends_its_request() {
    let mut engine = engine(&limits());
    let mut random = Random::new(seed(44));
    let kept = greedy(prompt(&mut random, 40), 30);
    let expected = engine.run(kept.clone()).unwrap().0;
    let (_, events) = engine.submit(kept).unwrap();
    let (_, gone) = engine.submit(greedy(prompt(&mut random, 20), 400)).unwrap();
    let (_, never_heard) = engine.submit(greedy(prompt(&mut random, 20), 400)).unwrap();
    drop(never_heard);
    let mut steps = 0;
    while received(&gone).0.is_empty() {
        engine.step().unwrap();
        steps += 1;
    }
    drop(gone);
    while !engine.is_idle() {
        engine.step().unwrap();
        steps += 1;
    }
    assert!(steps < 40, "the others' 400 tokens were not computed: {steps} steps");
    assert_eq!(received(&events), (expected, Some(Finish::Length)));
}

#[test]
fn a_request_ends_at_a_stop_token_its_limit_or_the_models() {
    let mut engine = engine(&Limits { max_model_len: 100, ..limits() });
    let mut random = Random::new(seed(45));
    let request = greedy(prompt(&mut random, 60), 20);
    let (tokens, finish) = engine.run(request.clone()).unwrap();
    assert_eq!((tokens.len(), finish), (20, Finish::Length));
    let stop = tokens[7];
    let until = 1 + tokens.iter().position(|&token| token == stop).unwrap();
    let stopped = Request { stop: vec![255, stop], max_new: 20, ..request.clone() };
    assert_eq!(engine.run(stopped).unwrap(), (tokens[..until].to_vec(), Finish::Stop));
    // A stop token in the prompt stops nothing.
    let in_prompt = Request { stop: vec![request.prompt[5]], max_new: 1, ..request.clone() };
    assert_eq!(engine.run(in_prompt).unwrap().0, tokens[..1]);
    let (long, finish) = engine.run(Request { max_new: 4000, ..request.clone() }).unwrap();
    assert_eq!((long.len(), finish), (40, Finish::ModelLength));
    assert_eq!(long[..20], tokens);
}

#[test]
fn what_cannot_be_served_is_refused_and_the_others_are_served_on() {
    let mut engine = engine(&Limits { cache: CacheBudget::Blocks(10), ..limits() });
    let mut random = Random::new(seed(46));
    let kept = greedy(prompt(&mut random, 50), 20);
    let expected = engine.run(kept.clone()).unwrap();
    let (_, events) = engine.submit(kept).unwrap();
    let long = prompt(&mut random, 512);
    let nan = Sampling { temperature: f32::NAN, ..Sampling::GREEDY };
    let refused = [
        (greedy(vec![], 5), "a request needs a prompt"),
        (greedy(vec![1], 0), "at least one token to generate"),
        (greedy(vec![1, 256], 5), "prompt token 256 is not in the vocabulary of 256"),
        (greedy(vec![-1], 5), "prompt token -1 is not in the vocabulary of 256"),
        (greedy(long, 5), "the prompt has 512 tokens, max_model_len is 512"),
        (greedy(vec![1; 100], 62), "the request may grow to 11 blocks, the whole cache has 10"),
        (Request { sampling: nan, ..greedy(vec![1], 5) }, "is no way to sample"),
    ];
    for (request, message) in refused {
        engine.step().unwrap();
        let error = engine.submit(request).unwrap_err();
        assert!(error.kind() == ErrorKind::Batch && error.message().contains(message), "{error}");
        assert!(error.help_line().is_some(), "{error}");
    }
    drain(&mut engine);
    assert_eq!(received(&events), (expected.0, Some(expected.1)));
    // The largest that fits does run: its last token is never cached.
    assert_eq!(engine.run(greedy(vec![1; 100], 61)).unwrap().0.len(), 61);
}

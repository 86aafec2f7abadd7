//! An async server loop around an executor: `cargo run --example embed`.
//!
//! One thread owns the executor, since a step is a launch and a poll. Handlers talk to it over channels.

use std::sync::Arc;

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{CacheBudget, Limits, ModelShape};
use capstan::engine::{Engine, EngineLimits, Event, Request};
use capstan::runtime::{Executor, Sampling};
use capstan::{Result, hal};
use tokio::sync::{mpsc, oneshot};

type Reply = oneshot::Sender<Result<Vec<i32>>>;

/// Owns the device: takes what has arrived, steps, and answers what has finished.
fn decode_loop(mut engine: Engine<Executor>, mut jobs: mpsc::Receiver<(Request, Reply)>) -> Result<()> {
    let mut live = Vec::new();
    loop {
        // Sleep only with nothing to do; otherwise take what is there and go on.
        let arrived = if live.is_empty() { jobs.blocking_recv() } else { jobs.try_recv().ok() };
        match arrived {
            Some((request, reply)) => match engine.submit(request) {
                Ok((_, events)) => live.push((events, reply, Vec::new())),
                // A bad request is its client's error; the others are served on.
                Err(error) => drop(reply.send(Err(error))),
            },
            None if live.is_empty() => return Ok(()),
            None => {}
        }
        engine.step()?;
        let mut at = 0;
        while at < live.len() {
            let (events, _, tokens) = &mut live[at];
            let finished = events.try_iter().any(|event| match event {
                Event::Token(token) => {
                    tokens.push(token);
                    false
                }
                Event::Finished(_) => true,
            });
            if finished {
                let (_, reply, tokens) = live.swap_remove(at);
                drop(reply.send(Ok(tokens)));
            } else {
                at += 1;
            }
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let limits = Limits { max_model_len: 512, max_num_seqs: 8, cache: CacheBudget::Blocks(256), ..Limits::default() };
    let chains: Arc<dyn StepChains> = Arc::new(MsaChains::new(&ModelShape::nano(), &limits, 1)?);
    let mut executor = Executor::new(&hal::open("auto")?, chains.clone())?;
    let report = executor.capture(|_| ())?;
    println!("captured {} sizes, {} nodes", report.sizes.len(), report.nodes);
    let engine = Engine::new(executor, EngineLimits::of(&*chains));
    let (jobs, queue) = mpsc::channel(64);
    let server = std::thread::spawn(move || decode_loop(engine, queue));

    let mut replies = Vec::new();
    for client in 0..5 {
        let prompt = (0..40).map(|token| (token * (client + 3)) % 128).collect();
        let request = Request { prompt, max_new: 8, sampling: Sampling::GREEDY, stop: Vec::new() };
        let (reply, answer) = oneshot::channel();
        jobs.send((request, reply)).await.expect("the decode loop runs");
        replies.push(answer);
    }
    for (client, answer) in replies.into_iter().enumerate() {
        println!("client {client}: {:?}", answer.await.expect("the decode loop runs")?);
    }
    drop(jobs);
    server.join().expect("the decode loop does not panic")
}

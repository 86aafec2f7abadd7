//! Capstan inside an asynchronous server loop: clients send prompts over a channel, one task drives the executor.
//!
//! `cargo run --release --example embed`

use std::sync::Arc;

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use capstan::hal;
use capstan::kernels::step::TOKEN_FROM_DEVICE;
use capstan::runtime::{Executor, Sampling, SequenceStep, StepPoll, Ticket};
use tokio::sync::{mpsc, oneshot};

type Job = (Vec<i32>, usize, oneshot::Sender<Vec<i32>>);

#[tokio::main(flavor = "current_thread")]
async fn main() -> capstan::Result<()> {
    // Build from limits and a chain, then capture every padded batch size once.
    let limits = Limits {
        max_model_len: 512,
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        capture: CaptureSizes::Default,
        cache: CacheBudget::Blocks(64),
        ..Limits::default()
    };
    let chains: Arc<dyn StepChains> = Arc::new(MsaChains::new(&ModelShape::nano(), &limits, 1)?);
    let mut executor = Executor::new(&hal::open("cpu")?, chains)?;
    let report = executor.capture(|_| ())?;
    eprintln!("captured {:?} in {:.1} ms", report.sizes, report.capture_seconds * 1e3);

    let (clients, mut jobs) = mpsc::channel::<Job>(16);
    let server = async move {
        let mut next_block = 0;
        while let Some((prompt, max_new, answer)) = jobs.recv().await {
            let sequence = executor.open_sequence()?;
            let blocks: Vec<u32> = (next_block..next_block + 4).collect();
            next_block = (next_block + 4) % 64;
            executor.grant_blocks(sequence, &blocks)?;
            let mut kv_len = prompt.len() as u32;
            let step = |tokens, kv_len| SequenceStep { sequence, tokens, kv_len, sampling: Sampling::GREEDY };
            let ticket = executor.prefill(&[step(&prompt, kv_len)])?;
            let mut tokens = vec![finished(&mut executor, ticket).await?];
            while tokens.len() < max_new {
                // The token comes from the last step's output on the device: no copy back and forth.
                kv_len += 1;
                let ticket = executor.decode(&[step(&[TOKEN_FROM_DEVICE], kv_len)])?;
                tokens.push(finished(&mut executor, ticket).await?);
            }
            executor.close_sequence(sequence, |_| ())?;
            // A client that went away does not stop the server.
            drop(answer.send(tokens));
        }
        eprintln!("{:?}", executor.metrics());
        capstan::Result::Ok(())
    };

    let client = async move {
        for index in 0..4 {
            let (answer, tokens) = oneshot::channel();
            let prompt = (0..20 + index).map(|i| (i * 7 + index) % 100).collect();
            if clients.send((prompt, 8, answer)).await.is_ok() {
                println!("request {index}: {:?}", tokens.await);
            }
        }
    };
    tokio::join!(server, client).0
}

/// Polls a step without blocking the runtime's other tasks.
async fn finished(executor: &mut Executor, ticket: Ticket) -> capstan::Result<i32> {
    loop {
        if let StepPoll::Ready(result) = executor.poll(ticket)? {
            return Ok(result.tokens[0]);
        }
        tokio::task::yield_now().await;
    }
}

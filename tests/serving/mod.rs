//! Executors of small models for the tests of steps: chains, open sequences, random batches.

#![allow(dead_code, clippy::allow_attributes, reason = "each test that includes this uses a part of it")]

use std::sync::Arc;

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use capstan::engine::BlockPool;
use capstan::hal::{self, Device};
use capstan::model::{Checkpoint, M3Chains, make};
use capstan::random::Random;
use capstan::runtime::{Executor, Sampling, SequenceId, SequenceStep};

/// The seed of a random test: `CAPSTAN_SEED` if set, printed either way.
pub fn seed(default: u64) -> u64 {
    let seed = std::env::var("CAPSTAN_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    println!("CAPSTAN_SEED={seed}");
    seed
}

/// The device under test: `CAPSTAN_DEVICE`, or the CPU.
pub fn device() -> Arc<dyn Device> {
    let name = std::env::var("CAPSTAN_DEVICE").unwrap_or_else(|_| "cpu".into());
    hal::open(&name).unwrap_or_else(|error| panic!("device {name}: {error}"))
}

/// Limits of the nano shape.
pub fn limits() -> Limits {
    Limits {
        max_model_len: 512,
        max_num_seqs: 12,
        max_num_batched_tokens: 256,
        cache: CacheBudget::Blocks(256),
        capture: CaptureSizes::Default,
        ..Limits::default()
    }
}

/// The sparse-attention chains of the nano shape.
pub fn msa(limits: &Limits) -> Arc<dyn StepChains> {
    Arc::new(MsaChains::new(&ModelShape::nano(), limits, 7).expect("the nano shape plans"))
}

/// The chains of a random nano model.
pub fn m3(limits: &Limits) -> Arc<dyn StepChains> {
    let dir = tempfile::tempdir().expect("a temporary folder");
    make::make_model(&ModelShape::nano(), 3, dir.path(), |_| ()).expect("a model is written");
    let checkpoint = Checkpoint::open(dir.path()).expect("a model that was just written opens");
    Arc::new(M3Chains::new(Arc::new(checkpoint), limits).expect("the nano model plans"))
}

/// An executor and the sequences a test has open in it.
pub struct Open {
    pub executor: Executor,
    pub pool: BlockPool,
    pub sequences: Vec<(SequenceId, Vec<i32>)>,
    block_size: usize,
}

impl Open {
    pub fn new(chains: &Arc<dyn StepChains>) -> Open {
        let executor = Executor::new(&device(), chains.clone()).expect("an executor of a nano model");
        let layout = chains.step_layout();
        let (pool, block_size) = (BlockPool::new(layout.cache_blocks), layout.block_size as usize);
        Open { executor, pool, sequences: Vec::new(), block_size }
    }

    /// Opens a sequence and prefills `prompt`; gives its number and the sampled token.
    pub fn prefill(&mut self, prompt: &[i32]) -> (usize, i32) {
        let id = self.executor.open_sequence().unwrap();
        self.sequences.push((id, prompt.to_vec()));
        let at = self.sequences.len() - 1;
        self.grow(at, prompt.len());
        let step = SequenceStep { sequence: id, tokens: prompt, kv_len: prompt.len() as u32, sampling: Sampling::GREEDY };
        let ticket = self.executor.prefill(&[step]).unwrap();
        (at, self.executor.wait(ticket).unwrap().tokens[0])
    }

    /// Makes room for `kv_len` tokens.
    pub fn grow(&mut self, at: usize, kv_len: usize) {
        let id = self.sequences[at].0;
        let held = self.executor.sequences().get(id).unwrap().blocks().len();
        let mut blocks = Vec::new();
        let missing = kv_len.div_ceil(self.block_size).saturating_sub(held);
        assert!(self.pool.take(missing, &mut blocks), "the test's cache is large enough");
        self.executor.grant_blocks(id, &blocks).unwrap();
    }

    /// Decodes `tokens[i]` of sequence `order[i]` and gives the sampled tokens, a row each.
    pub fn decode(&mut self, order: &[usize], tokens: &[Vec<i32>], sampling: &[Sampling]) -> Vec<i32> {
        for (&at, tokens) in order.iter().zip(tokens) {
            let len = self.sequences[at].1.len() + tokens.len();
            self.grow(at, len);
            self.sequences[at].1.extend_from_slice(tokens);
        }
        let batch: Vec<_> = order
            .iter()
            .zip(tokens)
            .zip(sampling)
            .map(|((&at, tokens), &sampling)| SequenceStep {
                sequence: self.sequences[at].0,
                tokens,
                kv_len: self.sequences[at].1.len() as u32,
                sampling,
            })
            .collect();
        let ticket = self.executor.decode(&batch).unwrap();
        self.executor.wait(ticket).unwrap().tokens.to_vec()
    }

    /// Closes a sequence.
    pub fn close(&mut self, at: usize) {
        let (id, _) = self.sequences.swap_remove(at);
        let pool = &mut self.pool;
        self.executor.close_sequence(id, |block| pool.give(block)).unwrap();
    }
}

/// A random prompt of tokens that both chains have.
pub fn prompt(random: &mut Random, len: u32) -> Vec<i32> {
    (0..len).map(|_| random.range(0, 127) as i32).collect()
}

/// A random way to sample.
pub fn sampling(random: &mut Random) -> Sampling {
    match random.range(0, 2) {
        0 => Sampling::GREEDY,
        1 => Sampling { temperature: 0.7, seed: random.next_u64(), ..Sampling::GREEDY },
        _ => Sampling { temperature: 1.3, top_k: 20, top_p: 0.9, min_p: 0.01, seed: random.next_u64() },
    }
}

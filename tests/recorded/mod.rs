//! Steps that remember what they computed: the logits after every run of tokens, and that they never differed.

use std::collections::HashMap;
use std::sync::Arc;

use capstan::Result;
use capstan::chain::StepChains;
use capstan::engine::Steps;
use capstan::hal::Device;
use capstan::model::M3Chains;
use capstan::random::Random;
use capstan::runtime::{BlockId, Executor, SequenceId, SequenceStep};

/// Bits of the logits after a run of tokens, whoever computed them.
#[derive(Default)]
pub struct Logits {
    after: HashMap<Vec<i32>, Vec<u32>>,
    /// Rows that were compared with an earlier computation of the same.
    pub compared: usize,
}

impl Logits {
    fn note(&mut self, tokens: &[i32], logits: &[f32], what: &str) {
        let bits: Vec<u32> = logits.iter().map(|logit| logit.to_bits()).collect();
        match self.after.get(tokens) {
            Some(before) => {
                let differ = before.iter().zip(&bits).filter(|(a, b)| a != b).count();
                assert_eq!(differ, 0, "{what}: logits after {} tokens differ from another run's", tokens.len());
                self.compared += 1;
            }
            None => drop(self.after.insert(tokens.to_vec(), bits)),
        }
    }
}

/// An executor behind a shuffled pool of blocks; every step's logits go to a [`Logits`].
pub struct Recorded<'a> {
    executor: Executor,
    chains: Arc<M3Chains>,
    /// The executor's block for each of the engine's.
    placed: Vec<BlockId>,
    cached: HashMap<SequenceId, Vec<i32>>,
    logits: &'a mut Logits,
    tokens: Vec<i32>,
}

impl<'a> Recorded<'a> {
    /// Blocks are where `random` puts them; without it where the engine does. `captured` replays, otherwise steps are eager.
    pub fn new(
        device: &Arc<dyn Device>,
        chains: &Arc<M3Chains>,
        random: Option<&mut Random>,
        captured: bool,
        logits: &'a mut Logits,
    ) -> Recorded<'a> {
        let mut executor = Executor::new(device, chains.clone()).expect("an executor of a nano model");
        if captured {
            executor.capture(|_| ()).expect("a nano model is captured");
        }
        let mut placed: Vec<BlockId> = (0..chains.step_layout().cache_blocks).collect();
        if let Some(random) = random {
            for at in (1..placed.len()).rev() {
                placed.swap(at, random.range(0, at as u32) as usize);
            }
        }
        Recorded { executor, chains: chains.clone(), placed, cached: HashMap::new(), logits, tokens: Vec::new() }
    }

    /// What it steps.
    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Reads row `i` of the logits for sequence `i` of the batch.
    fn note(&mut self, batch: &[SequenceStep<'_>], what: &str) {
        let mut row = vec![0f32; self.chains.vocab() as usize];
        let buffer = self.chains.m3_plan().activations.logits;
        for (at, step) in batch.iter().enumerate() {
            let cached = self.cached.get_mut(&step.sequence).expect("only open sequences are stepped");
            cached.extend_from_slice(step.tokens);
            assert_eq!(cached.len(), step.kv_len as usize);
            let offset = (at * row.len() * 4) as u64;
            self.executor.arena().read(buffer, offset, bytemuck::cast_slice_mut(&mut row)).expect("logits are read back");
            self.logits.note(cached, &row, what);
        }
    }
}

impl Steps for Recorded<'_> {
    fn open(&mut self) -> Result<SequenceId> {
        let sequence = self.executor.open_sequence()?;
        self.cached.insert(sequence, Vec::new());
        Ok(sequence)
    }

    fn grant(&mut self, sequence: SequenceId, blocks: &[BlockId]) -> Result<()> {
        let placed: Vec<BlockId> = blocks.iter().map(|&block| self.placed[block as usize]).collect();
        self.executor.grant_blocks(sequence, &placed)
    }

    fn close(&mut self, sequence: SequenceId, freed: &mut dyn FnMut(BlockId)) -> Result<()> {
        self.cached.remove(&sequence);
        let placed = &self.placed;
        let engine = |block| placed.iter().position(|&placed| placed == block).expect("a block that was granted") as BlockId;
        self.executor.close_sequence(sequence, |block| freed(engine(block)))
    }

    fn decode(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]> {
        self.tokens = Steps::decode(&mut self.executor, batch)?.to_vec();
        self.note(batch, "decode");
        Ok(&self.tokens)
    }

    fn prefill(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]> {
        self.tokens = Steps::prefill(&mut self.executor, batch)?.to_vec();
        self.note(batch, "prefill");
        Ok(&self.tokens)
    }
}

//! Steps checked against a second executor that runs each of them eagerly and unpadded (PAD-3).

use crate::engine::Steps;
use crate::error::{Error, Result};
use crate::runtime::{BlockId, Executor, SequenceId, SequenceStep};

/// An executor whose every step is repeated by a shadow that never captured anything; their tokens must be equal.
///
/// Both see the same calls in the same order, so their sequence ids and table rows are the same.
#[derive(Debug)]
pub struct Shadowed {
    primary: Executor,
    shadow: Executor,
    compared: u64,
    tokens: Vec<i32>,
}

impl Shadowed {
    /// Pairs two fresh executors of the same chains.
    ///
    /// Errors: the shadow has captured graphs, so it would replay too.
    pub fn new(primary: Executor, shadow: Executor) -> Result<Shadowed> {
        if !shadow.graphs().is_empty() {
            return Err(Error::state("the shadow has captured graphs").help("pass an executor that never called capture()"));
        }
        Ok(Shadowed { primary, shadow, compared: 0, tokens: Vec::new() })
    }

    /// The executor under check.
    pub fn primary(&self) -> &Executor {
        &self.primary
    }

    /// Steps compared so far.
    pub fn compared(&self) -> u64 {
        self.compared
    }

    fn compare(&mut self, shadow: Vec<i32>, what: &str) -> Result<&[i32]> {
        self.compared += 1;
        if let Some(row) = (0..shadow.len().max(self.tokens.len())).find(|&row| self.tokens.get(row) != shadow.get(row)) {
            return Err(Error::invariant(
                "PAD-3",
                format!(
                    "{what} step {}, row {row} of {}: replay gave {:?}, the unpadded eager run {:?}",
                    self.compared,
                    shadow.len(),
                    self.tokens.get(row),
                    shadow.get(row)
                ),
            )
            .help("run `capstan bisect` to find the first node that differs"));
        }
        Ok(&self.tokens)
    }
}

impl Steps for Shadowed {
    fn open(&mut self) -> Result<SequenceId> {
        let id = self.primary.open_sequence()?;
        assert_eq!(self.shadow.open_sequence()?, id, "invariant: both executors see the same calls");
        Ok(id)
    }

    fn grant(&mut self, sequence: SequenceId, blocks: &[BlockId]) -> Result<()> {
        self.primary.grant_blocks(sequence, blocks)?;
        self.shadow.grant_blocks(sequence, blocks)
    }

    fn close(&mut self, sequence: SequenceId, freed: &mut dyn FnMut(BlockId)) -> Result<()> {
        self.shadow.close_sequence(sequence, |_| ())?;
        self.primary.close_sequence(sequence, freed)
    }

    fn decode(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]> {
        let tokens = Steps::decode(&mut self.primary, batch)?;
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        let shadow = Steps::decode(&mut self.shadow, batch)?.to_vec();
        self.compare(shadow, "decode")
    }

    fn prefill(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]> {
        let tokens = Steps::prefill(&mut self.primary, batch)?;
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        let shadow = Steps::prefill(&mut self.shadow, batch)?.to_vec();
        self.compare(shadow, "prefill")
    }
}

//! What an engine needs of the thing it steps.

use crate::error::Result;
use crate::runtime::{BlockId, Executor, SequenceId, SequenceStep};

/// Sequences and synchronous steps. [`Executor`] is one; a wrapper that checks each step against another run is, too.
pub trait Steps {
    /// Opens a sequence.
    fn open(&mut self) -> Result<SequenceId>;
    /// Gives it blocks.
    fn grant(&mut self, sequence: SequenceId, blocks: &[BlockId]) -> Result<()>;
    /// Closes it; `freed` gets its blocks.
    fn close(&mut self, sequence: SequenceId, freed: &mut dyn FnMut(BlockId)) -> Result<()>;
    /// Decodes one token a sequence and gives the sampled tokens.
    fn decode(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]>;
    /// Prefills and gives the token sampled after each sequence's last token.
    fn prefill(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]>;
}

impl Steps for Executor {
    fn open(&mut self) -> Result<SequenceId> {
        self.open_sequence()
    }

    fn grant(&mut self, sequence: SequenceId, blocks: &[BlockId]) -> Result<()> {
        self.grant_blocks(sequence, blocks)
    }

    fn close(&mut self, sequence: SequenceId, freed: &mut dyn FnMut(BlockId)) -> Result<()> {
        self.close_sequence(sequence, freed)
    }

    fn decode(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]> {
        let ticket = Executor::decode(self, batch)?;
        Ok(self.wait(ticket)?.tokens)
    }

    fn prefill(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]> {
        let ticket = Executor::prefill(self, batch)?;
        Ok(self.wait(ticket)?.tokens)
    }
}

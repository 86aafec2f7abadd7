//! Steps that run eagerly, op by op, with someone looking between two ops.

use super::{Executor, fill, poisoned};
use crate::capture::{launch_one, lower};
use crate::chain::{Chain, Op};
use crate::error::{Error, Result};
use crate::runtime::SequenceStep;

impl Executor {
    /// Runs one decode step eagerly and unpadded; after each op has finished, `look` is called and may read the arena. Gives the
    /// sampled tokens, a row each.
    pub fn decode_observed(
        &mut self,
        batch: &[SequenceStep<'_>],
        look: impl FnMut(&Executor, &Op) -> Result<()>,
    ) -> Result<Vec<i32>> {
        self.healthy()?;
        let query_len = batch.first().map_or(0, |step| step.tokens.len());
        if query_len == 0 || batch.iter().any(|step| step.tokens.len() != query_len) {
            return Err(Error::batch("a decode step needs at least one sequence, and one number of tokens for all")
                .help("observe a decode step of equal rows, or a prefill step"));
        }
        self.check_batch(batch)?;
        self.make_room()?;
        let key = self.eager_key(query_len as u32, batch.len() as u32);
        let chain = self.chains.decode(&key);
        self.observe(&chain, batch, key.rows(), look)
    }

    /// Runs one prefill step likewise. Gives the sampled tokens, a sequence each.
    pub fn prefill_observed(
        &mut self,
        batch: &[SequenceStep<'_>],
        look: impl FnMut(&Executor, &Op) -> Result<()>,
    ) -> Result<Vec<i32>> {
        self.healthy()?;
        let rows = self.check_prefill(batch)?;
        self.make_room()?;
        let sequences = batch.len() as u32;
        let chain = self.chains.prefill(sequences, rows);
        self.observe(&chain, batch, sequences, look)
    }

    fn observe(
        &mut self,
        chain: &Chain,
        batch: &[SequenceStep<'_>],
        tokens: u32,
        mut look: impl FnMut(&Executor, &Op) -> Result<()>,
    ) -> Result<Vec<i32>> {
        let launches = lower(chain, &self.arena, &self.modules)?;
        let (ticket, updates) = fill(&mut self.ring, &self.sequences, batch)?;
        let mut seen = Ok(());
        for (op, launch) in chain.ops.iter().zip(&launches) {
            let ran = launch_one(&*self.stream, op, launch).and_then(|()| self.stream.synchronize());
            if let Err(error) = ran {
                return Err(poisoned(&mut self.poison, error));
            }
            // An error of the observer does not leave half a step behind.
            if seen.is_ok() {
                seen = look(self, op);
            }
        }
        self.commit(ticket, batch, updates, tokens);
        let tokens = self.wait(ticket)?.tokens.to_vec();
        seen.map(|()| tokens)
    }
}

//! Steps that run eagerly, op by op, with someone looking between two ops.

use super::{Executor, Source, Walk};
use crate::chain::Op;
use crate::error::Result;
use crate::runtime::SequenceStep;

impl Executor {
    /// Runs one decode step eagerly and unpadded; after each op has finished, `look` is called and may read the arena. Gives the
    /// sampled tokens, a row each.
    pub fn decode_observed(
        &mut self,
        batch: &[SequenceStep<'_>],
        look: impl FnMut(&Executor, &Op) -> Result<()>,
    ) -> Result<Vec<i32>> {
        let query_len = batch.first().map_or(0, |step| step.tokens.len());
        let key = self.eager_key(query_len as u32, batch.len() as u32);
        let walk = self.walk_decode(batch, &key, Source::Chain)?;
        self.observe(walk, batch, look)
    }

    /// Runs one prefill step likewise. Gives the sampled tokens, a sequence each.
    pub fn prefill_observed(
        &mut self,
        batch: &[SequenceStep<'_>],
        look: impl FnMut(&Executor, &Op) -> Result<()>,
    ) -> Result<Vec<i32>> {
        let walk = self.walk_prefill(batch)?;
        self.observe(walk, batch, look)
    }

    fn observe(
        &mut self,
        mut walk: Walk,
        batch: &[SequenceStep<'_>],
        mut look: impl FnMut(&Executor, &Op) -> Result<()>,
    ) -> Result<Vec<i32>> {
        let mut seen = Ok(());
        while let Some(at) = self.walk_next(&mut walk)? {
            // An error of the observer does not leave half a step behind.
            if seen.is_ok() {
                seen = look(self, &walk.chain().ops[at]);
            }
        }
        let tokens = self.walk_end(walk, batch)?;
        seen.map(|()| tokens)
    }
}

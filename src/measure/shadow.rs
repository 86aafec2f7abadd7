//! Steps whose host time is kept, and that a second executor repeats eagerly and unpadded (PAD-3).

use std::time::Instant;

use crate::engine::Steps;
use crate::error::{Error, Result};
use crate::runtime::{BlockId, Executor, SequenceId, SequenceStep};

/// An executor under watch: it keeps the host time of each decode step, and if there is a shadow, an executor of the same
/// chains that never captured anything, every step is repeated there and the tokens must be equal.
///
/// Both see the same calls in the same order, so their sequence ids and table rows are the same.
#[derive(Debug)]
pub struct Watched {
    primary: Executor,
    shadow: Option<Executor>,
    compared: u64,
    submit_us: Vec<f64>,
    tokens: Vec<i32>,
}

impl Watched {
    /// Watches `primary`; `shadow` is a fresh executor of the same chains.
    ///
    /// Errors: the shadow has captured graphs, so it would replay too.
    pub fn new(primary: Executor, shadow: Option<Executor>) -> Result<Watched> {
        if shadow.as_ref().is_some_and(|shadow| !shadow.graphs().is_empty()) {
            return Err(Error::state("the shadow has captured graphs").help("pass an executor that never called capture()"));
        }
        Ok(Watched { primary, shadow, compared: 0, submit_us: Vec::new(), tokens: Vec::new() })
    }

    /// The executor under watch.
    pub fn primary(&self) -> &Executor {
        &self.primary
    }

    /// Steps compared with the shadow's.
    pub fn compared(&self) -> u64 {
        self.compared
    }

    /// Host time of each decode call, microseconds, in order.
    pub fn submit_us(&self) -> &[f64] {
        &self.submit_us
    }

    /// Repeats the step on the shadow and compares.
    fn compare(&mut self, what: &str, step: impl FnOnce(&mut Executor) -> Result<Vec<i32>>) -> Result<&[i32]> {
        let Some(shadow) = &mut self.shadow else { return Ok(&self.tokens) };
        let expected = step(shadow)?;
        self.compared += 1;
        let rows = expected.len().max(self.tokens.len());
        if let Some(row) = (0..rows).find(|&row| self.tokens.get(row) != expected.get(row)) {
            return Err(Error::invariant(
                "PAD-3",
                format!(
                    "{what} step {}, row {row} of {rows}: got token {:?}, the unpadded eager run {:?}",
                    self.compared,
                    self.tokens.get(row),
                    expected.get(row)
                ),
            )
            .help("run `capstan bisect` to find the first node that differs"));
        }
        Ok(&self.tokens)
    }
}

impl Steps for Watched {
    fn open(&mut self) -> Result<SequenceId> {
        let id = self.primary.open_sequence()?;
        if let Some(shadow) = &mut self.shadow {
            assert_eq!(shadow.open_sequence()?, id, "invariant: both executors see the same calls");
        }
        Ok(id)
    }

    fn grant(&mut self, sequence: SequenceId, blocks: &[BlockId]) -> Result<()> {
        self.primary.grant_blocks(sequence, blocks)?;
        self.shadow.as_mut().map_or(Ok(()), |shadow| shadow.grant_blocks(sequence, blocks))
    }

    fn close(&mut self, sequence: SequenceId, freed: &mut dyn FnMut(BlockId)) -> Result<()> {
        if let Some(shadow) = &mut self.shadow {
            shadow.close_sequence(sequence, |_| ())?;
        }
        self.primary.close_sequence(sequence, freed)
    }

    fn decode(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]> {
        let started = Instant::now();
        let ticket = self.primary.decode(batch)?;
        self.submit_us.push(started.elapsed().as_secs_f64() * 1e6);
        self.tokens.clear();
        self.tokens.extend_from_slice(self.primary.wait(ticket)?.tokens);
        self.compare("decode", |shadow| Ok(Steps::decode(shadow, batch)?.to_vec()))
    }

    fn prefill(&mut self, batch: &[SequenceStep<'_>]) -> Result<&[i32]> {
        let tokens = Steps::prefill(&mut self.primary, batch)?;
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.compare("prefill", |shadow| Ok(Steps::prefill(shadow, batch)?.to_vec()))
    }
}

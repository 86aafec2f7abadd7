//! A step taken op by op: what observers, shadow steps and comparisons of two executors are made of.

use super::{Executor, fill, poisoned};
use crate::capture::{Launch, launch_one, lower};
use crate::chain::{Chain, GraphKey};
use crate::error::{Error, Result};
use crate::runtime::{SequenceStep, Ticket};

/// Where the launches of a walk come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The chain, lowered now: the eager run.
    Chain,
    /// The nodes of the captured graph of the key, read back from the driver.
    Graph,
}

/// A step under way. It is finished by [`Executor::walk_end`], also when the walker lost interest: half a step is none.
#[derive(Debug)]
pub struct Walk {
    pub(super) chain: Chain,
    pub(super) launches: Vec<Launch>,
    ticket: Ticket,
    updates: usize,
    tokens: u32,
    pub(super) next: usize,
}

impl Walk {
    /// The chain it walks.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }
}

impl Executor {
    /// The key that a decode of this batch replays, or else its eager key.
    ///
    /// Errors: the batch is refused, as by [`Executor::decode`].
    pub fn key_of(&mut self, batch: &[SequenceStep<'_>]) -> Result<GraphKey> {
        let (query_len, sequences) = (query_len(batch)?, batch.len() as u32);
        let kv_len_max = self.check_batch(batch)?;
        let graph = self.graphs.pick(query_len, sequences, kv_len_max);
        Ok(graph.map_or_else(|| self.eager_key(query_len, sequences), |graph| *graph.key()))
    }

    /// Starts a decode step of `key`, which must hold the batch.
    ///
    /// Errors: the batch is refused; with [`Source::Graph`], no graph of this key was captured, or it cannot be taken apart.
    pub fn walk_decode(&mut self, batch: &[SequenceStep<'_>], key: &GraphKey, source: Source) -> Result<Walk> {
        self.healthy()?;
        let query_len = query_len(batch)?;
        if batch.len() as u32 > key.sequences || query_len != key.query_len {
            return Err(Error::batch(format!("{} sequences of {query_len} tokens under {key}", batch.len()))
                .help("take the key from key_of"));
        }
        self.check_batch(batch)?;
        self.make_room()?;
        let chain = self.chains.decode(key);
        let launches = match source {
            Source::Chain => lower(&chain, &self.arena, &self.modules)?,
            Source::Graph => {
                let graph = self.graphs.iter().find(|graph| graph.key() == key);
                graph.ok_or_else(|| Error::state(format!("no graph of {key}")).help("capture first"))?.recorded()?
            }
        };
        let tokens = query_len * batch.len() as u32;
        self.begin(chain, launches, batch, tokens)
    }

    /// Starts a prefill step.
    pub fn walk_prefill(&mut self, batch: &[SequenceStep<'_>]) -> Result<Walk> {
        self.healthy()?;
        let rows = self.check_prefill(batch)?;
        self.make_room()?;
        let sequences = batch.len() as u32;
        let chain = self.chains.prefill(sequences, rows);
        let launches = lower(&chain, &self.arena, &self.modules)?;
        self.begin(chain, launches, batch, sequences)
    }

    fn begin(&mut self, chain: Chain, launches: Vec<Launch>, batch: &[SequenceStep<'_>], tokens: u32) -> Result<Walk> {
        self.stream.synchronize()?;
        let (ticket, updates) = fill(&mut self.ring, &self.sequences, batch)?;
        Ok(Walk { chain, launches, ticket, updates, tokens, next: 0 })
    }

    /// Runs the next op and waits for it; gives its index, or `None` after the last.
    pub fn walk_next(&mut self, walk: &mut Walk) -> Result<Option<usize>> {
        let at = walk.next;
        let Some(launch) = walk.launches.get(at) else { return Ok(None) };
        let ran = launch_one(&*self.stream, &walk.chain.ops[at], launch).and_then(|()| self.stream.synchronize());
        if let Err(error) = ran {
            return Err(poisoned(&mut self.poison, error));
        }
        walk.next += 1;
        Ok(Some(at))
    }

    /// Runs what is left and gives the sampled tokens: a row each for a decode step, a sequence each for a prefill.
    pub fn walk_end(&mut self, mut walk: Walk, batch: &[SequenceStep<'_>]) -> Result<Vec<i32>> {
        while self.walk_next(&mut walk)?.is_some() {}
        self.commit(walk.ticket, batch, walk.updates, walk.tokens);
        Ok(self.wait(walk.ticket)?.tokens.to_vec())
    }
}

/// Tokens that each sequence of a decode batch brings.
fn query_len(batch: &[SequenceStep<'_>]) -> Result<u32> {
    let query_len = batch.first().map_or(0, |step| step.tokens.len());
    if query_len == 0 || batch.iter().any(|step| step.tokens.len() != query_len) {
        return Err(Error::batch("a decode step needs at least one sequence, and one number of tokens for all")
            .help("pass a decode step of equal rows, or a prefill step"));
    }
    Ok(query_len as u32)
}

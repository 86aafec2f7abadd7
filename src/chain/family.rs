//! What the executor runs: a model's (or a user's) chains, buffers and weights behind one trait.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Chain, StepBuffers, StepLayout};
use crate::arena::{Arena, ArenaPlan, Sealed};
use crate::config::Limits;
use crate::error::Result;
use crate::gates::Refusal;
use crate::kernels::KernelSpec;
use crate::planning::PeerBuffers;

/// Every host value that shaped a decode chain and its capture (KEY-1). Two steps with equal keys may share a graph; nothing
/// else may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GraphKey {
    /// Rows a sequence.
    pub query_len: u32,
    /// Sequences: capture size / `query_len`.
    pub sequences: u32,
    /// Longest KV length the launch shapes were made for.
    pub kv_len_max: u32,
    /// Rank in the indexer's context-parallel group.
    pub rank: u32,
    /// World size of that group.
    pub world: u32,
}

impl GraphKey {
    /// The key of a decode graph of `rows` rows, all of the query length of `limits`.
    pub fn decode(limits: &Limits, rows: u32) -> GraphKey {
        let query_len = 1 + limits.num_speculative_tokens;
        GraphKey {
            query_len,
            sequences: rows / query_len,
            kv_len_max: limits.max_model_len,
            rank: limits.rank,
            world: limits.world,
        }
    }

    /// The capture size: rows this graph pads to.
    pub fn rows(&self) -> u32 {
        self.sequences * self.query_len
    }
}

impl fmt::Display for GraphKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GraphKey { query_len, kv_len_max, rank, world, .. } = self;
        write!(f, "rows={} query_len={query_len} kv_len_max={kv_len_max} rank={rank}/{world}", self.rows())
    }
}

/// The chains of one model: what an [`Executor`](crate::runtime::Executor) plans, captures and replays.
///
/// Pure but for [`StepChains::initialise`]: equal keys must give equal chains, and nothing of a chain may come from a batch.
pub trait StepChains: Send + Sync + fmt::Debug {
    /// Name in dumps and metrics: `msa`, `m3`.
    fn name(&self) -> &str;
    /// The limits everything was planned from.
    fn limits(&self) -> &Limits;
    /// Every persistent buffer.
    fn plan(&self) -> &ArenaPlan;
    /// The buffers of step metadata.
    fn step(&self) -> &StepBuffers;
    /// Their capacities.
    fn step_layout(&self) -> &StepLayout;
    /// Token ids are below this.
    fn vocab(&self) -> u32;
    /// Every kernel its chains launch; others are refused.
    fn kernels(&self) -> Vec<&'static KernelSpec>;
    /// The decode step of a key: from `ingest` to `publish`, one published token a row.
    fn decode(&self, key: &GraphKey) -> Chain;
    /// A prefill step of `sequences` sequences with `rows` tokens in all: from `ingest` to `publish`, one published token a
    /// sequence.
    fn prefill(&self, sequences: u32, rows: u32) -> Chain;
    /// Writes weights and tables into a fresh arena.
    fn initialise(&self, arena: &Arena<Sealed>) -> Result<()>;

    /// What the ranks of a context-parallel group exchange; `None`: one rank runs alone.
    fn peers(&self) -> Option<&PeerBuffers> {
        None
    }

    /// Why a rank of several scores decode rows alone; empty if they exchange candidates, or if there is one rank.
    fn parallel_refused(&self) -> Vec<Refusal> {
        Vec::new()
    }

    /// A step without sequences that only applies block-table updates.
    fn flush(&self) -> Chain {
        let mut chain = Chain::new(format!("{}.flush", self.name()));
        self.step().ingest(self.step_layout(), &mut chain, 1, 1, 0);
        self.step().publish(self.step_layout(), &mut chain, 1);
        chain
    }
}

//! An executor as one rank of a context-parallel group: it joins, compares what it will run, and ends the group when it fails.

use std::sync::Arc;

use super::Executor;
use crate::arena::{Arena, Sealed};
use crate::chain::{GraphKey, StepChains};
use crate::error::{Error, ErrorKind, Result};
use crate::gates::Refusal;
use crate::hal::Device;
use crate::kernels::exchange::Differs;
use crate::kernels::step::StepError;
use crate::peers::{Group, agree_on_chain, connect, end_group, pretend_connected};

impl Executor {
    /// An executor as a rank of `group`; see [`Executor::new`]. All ranks join, capture and step in the same order, each with its
    /// own rank in its limits, and bring the same batches.
    ///
    /// Errors: also those of the group: a rank that is missing or that planned something else.
    pub fn join(device: &Arc<dyn Device>, chains: Arc<dyn StepChains>, group: Arc<dyn Group>) -> Result<Executor> {
        Executor::build(device, chains, Some(group))
    }

    /// The group this executor is a rank of.
    pub fn group(&self) -> Option<&Arc<dyn Group>> {
        self.group.as_ref()
    }

    /// Opens the peers' memory, where the chains exchange anything.
    pub(super) fn connect(arena: &mut Arena<Sealed>, chains: &dyn StepChains, group: Option<&Arc<dyn Group>>) -> Result<()> {
        match (chains.peers(), group) {
            (None, _) => Ok(()),
            (Some(peers), Some(group)) => connect(arena, peers, &**group),
            (Some(peers), None) if !arena.device().info().executes => pretend_connected(arena, peers),
            (Some(peers), None) => {
                Err(Error::config(format!("world = {}: the chain exchanges candidates with other ranks", peers.world))
                    .help("make the executor with Executor::join and a group, or set world to 1"))
            }
        }
    }

    /// Why this rank of several scores alone, each reason said once; the steps are counted.
    pub(super) fn warn_of_refused(chains: &dyn StepChains) -> Vec<Refusal> {
        let refused = chains.parallel_refused();
        refused.iter().for_each(|refused| tracing::warn!(%refused, "every rank scores alone"));
        refused
    }

    /// Waits for the other ranks, so that none is late by more than a device waits.
    pub(super) fn meet(&self, label: &str) -> Result<()> {
        match &self.group {
            Some(group) if self.chains.peers().is_some() => group.all_gather(label, b"").map(drop),
            _ => Ok(()),
        }
    }

    /// RANK-1 before the first replay: every rank captures these keys, and each key's chain is the same but for the rank.
    pub(super) fn agree_on_capture(&self, keys: &[GraphKey]) -> Result<()> {
        let Some(group) = self.group.as_ref().filter(|_| self.chains.peers().is_some()) else { return Ok(()) };
        let sizes: Vec<String> = keys.iter().map(|key| key.rows().to_string()).collect();
        let help = "give every rank the same limits and capture sizes";
        crate::peers::agree(&**group, "capture sizes", sizes.join(",").as_bytes(), help)?;
        for key in keys {
            let what = format!("nodes of rows={} query_len={}", key.rows(), key.query_len);
            agree_on_chain(&**group, &what, &self.chains.decode(key), self.chains.plan())?;
        }
        Ok(())
    }

    /// Refuses rows that the peers' buffers have no room for.
    pub(super) fn check_parallel(&self, rows: u32) -> Result<()> {
        match self.chains.peers() {
            Some(peers) if rows > peers.rows => {
                let message = format!("{rows} rows in one decode step, the ranks exchange {}", peers.rows);
                Err(Error::batch(message).help("raise max_num_seqs or num_speculative_tokens, on every rank"))
            }
            _ => Ok(()),
        }
    }

    /// Ends the group, so that no rank waits for this one.
    pub(super) fn leave(&self) {
        if let Some(peers) = self.chains.peers()
            && self.group.is_some()
            && let Err(error) = end_group(&self.arena, peers)
        {
            tracing::error!(%error, "not every rank was told that the group ended");
        }
    }
}

/// What the device found wrong between ranks, in words.
pub(crate) fn peer_error(error: u32, [a, b, c]: [u32; 3]) -> Option<Error> {
    Some(if error == StepError::PeerTimeout as u32 {
        let (rank, head) = (a & 0xffff, a >> 16);
        Error::peer(format!("rank {rank} did not send the candidates of row {b}, head {head}, generation {c}"))
            .help("look for what ended or slowed that rank; the group ended, start every rank anew")
    } else if error == StepError::PeerEnded as u32 {
        Error::peer(format!("the group was ended by rank {a}")).help("read that rank's error; start every rank anew")
    } else if error == StepError::PeerAbsent as u32 {
        Error::peer(format!("rank {a} did not come to step {c} (agreement {b})"))
            .help("look for what ended or slowed that rank; the group ended, start every rank anew")
    } else if error == StepError::PeerMismatch as u32 {
        mismatch(a & 0xffff, a >> 16, b, c)
    } else {
        return None;
    })
}

fn mismatch(rank: u32, differs: u32, ours: u32, theirs: u32) -> Error {
    let what = match Differs::ALL.into_iter().find(|&known| known as u32 == differs) {
        Some(Differs::Rows) => "a graph of that many rows",
        Some(Differs::QueryLength) => "that many rows a sequence",
        Some(Differs::Step) => "the step of that number",
        Some(Differs::Graph) => "a graph up to that KV length",
        Some(Differs::Batch) => "a batch of lengths that hash to that",
        Some(Differs::Calls) => "the agreement of that number",
        None => "something this version does not know",
    };
    Error::invariant("RANK-1", format!("ranks run different steps: this rank {ours}, rank {rank} {theirs}: {what}"))
        .help("give every rank the same batches in the same order; nothing was exchanged in this step")
}

/// True for an error after which the group is no more.
pub(super) fn ends_group(error: &Error) -> bool {
    error.kind() == ErrorKind::Peer
}

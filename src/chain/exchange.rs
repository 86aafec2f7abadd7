//! What the ops of context parallelism share: the peers' pointers and the budget of a wait.

use super::{Chain, GraphKey, StepBuffers, pointer};
use crate::config::Limits;
use crate::kernels::exchange::{AgreeArgs, RANKS_MAX};
use crate::kernels::{Ptr, registry};
use crate::planning::PeerBuffers;

/// Appends the agreement of all ranks on this step, right after `ingest`.
pub fn agree(chain: &mut Chain, peers: &PeerBuffers, step: &StepBuffers, limits: &Limits, key: &GraphKey) {
    let [peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7] = pointers(peers);
    let args = AgreeArgs {
        seq_len: pointer(step.seq_len),
        agreements: pointer(peers.agreements),
        state: pointer(step.state),
        peer0,
        peer1,
        peer2,
        peer3,
        peer4,
        peer5,
        peer6,
        peer7,
        sequences: key.sequences,
        rows: key.rows(),
        query_len: key.query_len,
        graph: key.kv_len_max,
        rank: peers.rank,
        world: peers.world,
        budget_us: budget_us(limits),
        reserved: 0,
    };
    chain.push("agree", None, &registry::AGREE, [1, 1, 1], &args);
}

/// The words of each rank; null past the world.
pub(super) fn pointers(peers: &PeerBuffers) -> [Ptr; RANKS_MAX as usize] {
    std::array::from_fn(|rank| peers.words.get(rank).map_or(Ptr::NULL, |&words| pointer(words)))
}

/// Longest wait for a peer, microseconds.
pub(super) fn budget_us(limits: &Limits) -> u32 {
    limits.peer_timeout_ms.saturating_mul(1000)
}

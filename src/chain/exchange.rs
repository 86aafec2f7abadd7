//! What the ops of context parallelism share: the peers' pointers and the budget of a wait.

use super::pointer;
use crate::config::Limits;
use crate::kernels::Ptr;
use crate::kernels::exchange::RANKS_MAX;
use crate::planning::PeerBuffers;

/// The words of each rank; null past the world.
pub(super) fn pointers(peers: &PeerBuffers) -> [Ptr; RANKS_MAX as usize] {
    std::array::from_fn(|rank| peers.words.get(rank).map_or(Ptr::NULL, |&words| pointer(words)))
}

/// Longest wait for a peer, microseconds.
pub(super) fn budget_us(limits: &Limits) -> u32 {
    limits.peer_timeout_ms.saturating_mul(1000)
}

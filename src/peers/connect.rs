//! Peer slabs of all ranks, opened into this rank's ledger.

use super::Group;
use crate::arena::{Arena, BufferId, Sealed};
use crate::error::{Error, Result};
use crate::hal::IpcHandle;
use crate::kernels::exchange::POISON_WORD;
use crate::planning::PeerBuffers;

/// Exchanges the handles of the peer slabs and enters every rank's buffers into the ledger. Before anything is captured.
///
/// Errors: the group is not the one that was planned for, a rank is missing, memory cannot be opened.
pub fn connect(arena: &mut Arena<Sealed>, peers: &PeerBuffers, group: &dyn Group) -> Result<()> {
    if (group.rank(), group.world()) != (peers.rank, peers.world) {
        let (rank, world) = (group.rank(), group.world());
        return Err(Error::config(format!(
            "rank {rank} of {world} in the group, rank {} of {} in the limits",
            peers.rank, peers.world
        ))
        .help("set the limits' rank and world to the group's"));
    }
    let own = own_handle(arena)?;
    let handles = group.all_gather("peer memory", &own.0)?;
    for (rank, handle) in (0..).zip(handles).filter(|(rank, _)| *rank != peers.rank) {
        arena.import(rank, &IpcHandle(handle))?;
    }
    // Nobody writes to a rank that has not opened everything yet.
    group.all_gather("connected", b"").map(drop)
}

/// Stands in for the other ranks on a device that runs nothing: their buffers get addresses of their own.
pub fn pretend_connected(arena: &mut Arena<Sealed>, peers: &PeerBuffers) -> Result<()> {
    let own = own_handle(arena)?;
    (0..peers.world).filter(|&rank| rank != peers.rank).try_for_each(|rank| arena.import(rank, &own))
}

/// Ends the group: whoever waits on a device of any rank stops. Of several ranks that end it any may be named.
pub fn end_group(arena: &Arena<Sealed>, peers: &PeerBuffers) -> Result<()> {
    let word = u64::from(peers.rank) + 1;
    let tell = |&words: &BufferId| arena.write(words, u64::from(POISON_WORD) * 8, &word.to_ne_bytes());
    // Every rank is told, whatever became of another.
    peers.words.iter().map(tell).fold(Ok(()), Result::and)
}

fn own_handle(arena: &Arena<Sealed>) -> Result<IpcHandle> {
    let handle = arena.export()?;
    handle.ok_or_else(|| Error::state("nothing of this plan is visible to peers").help("plan PeerBuffers"))
}

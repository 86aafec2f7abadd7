//! The buffers of a context-parallel group: what peers write here, and where this rank writes there.

use super::{AttentionDims, device_buffer};
use crate::arena::{BufferId, BufferSpec, PlanBuilder, Purpose};
use crate::config::Limits;
use crate::dtype::DType;
use crate::hal::MemoryKind;
use crate::kernels::exchange::peer_words;

/// Peer-visible buffers of every rank of a group, and this rank's own counters.
#[derive(Clone, Debug)]
pub struct PeerBuffers {
    /// Words of each rank, indexed by rank; this rank's own among them, the others opened after the seal.
    pub words: Vec<BufferId>,
    /// [scored_heads, rows] generation of each (row, head).
    pub generations: BufferId,
    /// \[1\] agreements made so far.
    pub agreements: BufferId,
    /// Rows of a decode step at most.
    pub rows: u32,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub world: u32,
}

impl PeerBuffers {
    /// Plans them if `dims` say that decode rows are scored by several ranks.
    pub fn plan(dims: &AttentionDims, limits: &Limits, plan: &mut PlanBuilder) -> Option<PeerBuffers> {
        if !dims.is_parallel() {
            return None;
        }
        let (rank, world) = (limits.rank, limits.world);
        let rows = limits.max_num_seqs * (1 + limits.num_speculative_tokens);
        let own = plan.add(BufferSpec {
            name: "peers.words".into(),
            dtype: DType::U64,
            shape: vec![peer_words(world, dims.index_heads, rows, dims.topk)],
            formula: "[head + 2 * world * index_heads * decode rows * topk]".into(),
            memory: MemoryKind::Peer,
            purpose: Purpose::Exchange,
            reason: "agreements and candidates that every rank writes to this one".into(),
        });
        let words = (0..world).map(|other| if other == rank { own } else { plan.import(other, own) }).collect();
        let mut add = |name: &str, dtype, shape: &[u32], formula: &str, reason: &str| {
            device_buffer(plan, format!("peers.{name}"), dtype, shape, formula, Purpose::Exchange, reason)
        };
        let generations = add(
            "generations",
            DType::U32,
            &[dims.scored_heads, rows],
            "[index_heads of all ranks, decode rows]",
            "exchanges that each (row, head) took part in, advanced on the device",
        );
        let agreements = add("agreements", DType::U64, &[1], "[1]", "agreements made so far, advanced on the device");
        Some(PeerBuffers { words, generations, agreements, rows, rank, world })
    }

    /// The own words.
    pub fn own(&self) -> BufferId {
        self.words[self.rank as usize]
    }
}

//! What captured graphs cost in device memory: an estimate before anything is captured, so that cache blocks leave room.
//!
//! A graph has a fixed cost and a cost a node, both inside the driver and seen only as free memory that is gone.
//! [`GraphCost::of`] holds what is known per platform; `invariant::graph_cost` measures it on a device.

use serde::Serialize;

use super::Ladder;
use crate::chain::{GraphKey, StepChains};
use crate::error::Result;
use crate::hal::Platform;

/// Device memory that one captured graph takes, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GraphCost {
    /// Of every graph, whatever it holds.
    pub fixed_bytes: u64,
    /// Of every kernel node on top.
    pub node_bytes: u64,
}

impl GraphCost {
    /// What graphs of a platform cost, from the sources below; an estimate that rounds up.
    pub const fn of(platform: Platform) -> GraphCost {
        match platform {
            // Graphs live in host memory and count against no device.
            Platform::Cpu | Platform::Null => GraphCost { fixed_bytes: 0, node_bytes: 0 },
            // "About 4 MiB of device memory a graph inside the runtime": ROCm/rocm-systems #10257. A node has an AQL packet (64
            // bytes, HSA Platform System Architecture, section 2.9) and its kernel arguments (ours stay below 448 bytes with hidden ones); not
            // measured.
            Platform::Hip => GraphCost { fixed_bytes: 4 << 20, node_bytes: 512 },
            // One H200, driver 580.159.04, free memory before and after 35 graphs of kernels with 256 bytes of arguments: 117 KiB a
            // graph of 2 nodes, 1.31 MiB of 512, 2.51 MiB of 900. `capstan devices --self-test` measures the device at hand.
            Platform::Cuda => GraphCost { fixed_bytes: 128 << 10, node_bytes: 3 << 10 },
        }
    }

    /// Of `graphs` graphs of `nodes` nodes each.
    pub const fn estimate(self, graphs: u64, nodes: u64) -> u64 {
        graphs.saturating_mul(self.fixed_bytes.saturating_add(self.node_bytes.saturating_mul(nodes)))
    }

    /// Of all graphs that an executor of `chains` captures: its ladder's sizes, the nodes of each one's chain.
    ///
    /// Chains of any number of cache blocks will do: it does not change their nodes.
    pub fn of_ladder(self, chains: &dyn StepChains) -> Result<u64> {
        let limits = chains.limits();
        let nodes = |&rows: &u32| chains.decode(&GraphKey::decode(limits, rows)).ops.len() as u64;
        Ok(Ladder::new(limits)?.sizes().iter().map(|rows| self.estimate(1, nodes(rows))).sum())
    }

    /// The cost that explains `small` graphs of `small_nodes` nodes and `large` ones of `large_nodes`, of which `graphs` each
    /// took that many bytes together. Never negative: drivers hand out memory in large pieces, so small figures are coarse.
    pub fn fit(graphs: u64, (small_nodes, small): (u64, u64), (large_nodes, large): (u64, u64)) -> GraphCost {
        assert!(graphs > 0 && small_nodes < large_nodes, "two sizes of at least one graph");
        let node_bytes = large.saturating_sub(small) / (graphs * (large_nodes - small_nodes));
        GraphCost { fixed_bytes: (small / graphs).saturating_sub(node_bytes * small_nodes), node_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fit_gives_the_cost_that_made_the_figures() {
        let cost = GraphCost { fixed_bytes: 4096, node_bytes: 96 };
        let took = |nodes| (nodes, cost.estimate(16, nodes));
        assert_eq!(GraphCost::fit(16, took(1), took(512)), cost);
        assert_eq!(GraphCost::fit(4, (1, 0), (64, 0)), GraphCost::default());
        // Memory that came back while it was measured does not make a cost negative.
        assert_eq!(GraphCost::fit(4, (1, 4096), (64, 0)), GraphCost { fixed_bytes: 1024, node_bytes: 0 });
    }

    #[test]
    fn a_ladder_of_the_whole_model_on_hip_is_hundreds_of_mib() {
        let estimate = GraphCost::of(Platform::Hip).estimate(35, 1000);
        assert!((140 << 20..200 << 20).contains(&estimate), "{estimate}");
    }
}

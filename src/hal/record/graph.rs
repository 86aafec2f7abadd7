//! A recorded graph: nodes by value, edges, and orders to run them in.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::Function;
use crate::error::{Error, Result};
use crate::hal::{DevicePtr, FunctionHandle, KernelNode, LaunchShape, Node, NodeId};

/// One recorded operation, arguments by value.
#[derive(Clone)]
pub(crate) enum RecordedNode {
    Kernel { handle: FunctionHandle, function: Function, shape: LaunchShape, args: Box<[u8]> },
    Copy { dst: DevicePtr, src: DevicePtr, bytes: u64 },
    Fill { dst: DevicePtr, byte: u8, bytes: u64 },
}

impl RecordedNode {
    fn describe(&self) -> Node {
        match self {
            RecordedNode::Kernel { handle, function, shape, args } => Node::Kernel(KernelNode {
                function: *handle,
                symbol: function.kernel.symbol.to_owned(),
                shape: *shape,
                args: args.to_vec(),
            }),
            &RecordedNode::Copy { dst, src, bytes } => Node::Copy { dst, src, bytes },
            &RecordedNode::Fill { dst, byte, bytes } => Node::Fill { dst, byte, bytes },
        }
    }
}

/// What a capture recorded. Every edge leads from a lower id to a higher one, so recording order is a legal order.
pub(crate) struct Recording {
    pub nodes: Vec<RecordedNode>,
    /// Sorted, without repeats.
    pub edges: Vec<(NodeId, NodeId)>,
}

impl Recording {
    /// What a node holds.
    pub fn node(&self, id: NodeId) -> Result<Node> {
        self.nodes.get(id.0 as usize).map(RecordedNode::describe).ok_or_else(|| {
            Error::device(format!("graph has no node {}, only {}", id.0, self.nodes.len())).help("ask for ids below node_count")
        })
    }

    /// The flags of the modules that the graph calls into, each once.
    pub fn modules(&self) -> Vec<Arc<AtomicBool>> {
        let mut modules: Vec<Arc<AtomicBool>> = Vec::new();
        for node in &self.nodes {
            if let RecordedNode::Kernel { function, .. } = node
                && !modules.iter().any(|loaded| Arc::ptr_eq(loaded, &function.loaded))
            {
                modules.push(function.loaded.clone());
            }
        }
        modules
    }

    /// Recording order, or with a seed any other order the edges allow.
    pub fn order(&self, seed: Option<u64>) -> Vec<u32> {
        let Some(mut seed) = seed else {
            return (0..self.nodes.len() as u32).collect();
        };
        let mut waits_for = vec![0u32; self.nodes.len()];
        for (_, after) in &self.edges {
            waits_for[after.0 as usize] += 1;
        }
        let mut ready: Vec<u32> = (0..self.nodes.len() as u32).filter(|&id| waits_for[id as usize] == 0).collect();
        let mut order = Vec::with_capacity(self.nodes.len());
        while !ready.is_empty() {
            let id = ready.swap_remove((next_random(&mut seed) % ready.len() as u64) as usize);
            order.push(id);
            let from = self.edges.partition_point(|(before, _)| before.0 < id);
            for (_, after) in self.edges[from..].iter().take_while(|(before, _)| before.0 == id) {
                waits_for[after.0 as usize] -= 1;
                if waits_for[after.0 as usize] == 0 {
                    ready.push(after.0);
                }
            }
        }
        order
    }

    /// The graph in DOT, addresses and all.
    pub fn dot(&self) -> String {
        let mut dot = String::from("digraph recorded {\n");
        for (id, node) in self.nodes.iter().enumerate() {
            let label = match node {
                RecordedNode::Kernel { function, shape, .. } => format!("{} {:?}", function.kernel.symbol, shape.grid),
                RecordedNode::Copy { dst, src, bytes } => format!("copy {:#x} <- {:#x}, {bytes} B", dst.0, src.0),
                RecordedNode::Fill { dst, byte, bytes } => format!("fill {:#x} with {byte:#04x}, {bytes} B", dst.0),
            };
            let _ = writeln!(dot, "  n{id} [label=\"{label}\"];");
        }
        for (before, after) in &self.edges {
            let _ = writeln!(dot, "  n{} -> n{};", before.0, after.0);
        }
        dot.push_str("}\n");
        dot
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): one more draw from `seed`.
fn next_random(seed: &mut u64) -> u64 {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *seed;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diamond() -> Recording {
        let fill = |byte| RecordedNode::Fill { dst: DevicePtr(4096), byte, bytes: 1 };
        let edge = |a, b| (NodeId(a), NodeId(b));
        Recording {
            nodes: (0..6).map(fill).collect(),
            edges: vec![edge(0, 1), edge(0, 2), edge(1, 4), edge(2, 3), edge(3, 4), edge(4, 5)],
        }
    }

    #[test]
    fn every_seed_gives_an_order_the_edges_allow() {
        let recording = diamond();
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..64 {
            let order = recording.order(Some(seed));
            let place = |id: NodeId| order.iter().position(|&at| at == id.0).expect("each node runs");
            assert_eq!(order.len(), 6);
            for &(before, after) in &recording.edges {
                assert!(place(before) < place(after), "seed {seed}: {order:?}");
            }
            seen.insert(order);
        }
        assert_eq!(seen.len(), 3, "1 runs before 2, between 2 and 3, or after 3");
        assert_eq!(recording.order(None), [0, 1, 2, 3, 4, 5]);
    }
}

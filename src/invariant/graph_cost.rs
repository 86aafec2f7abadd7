//! Measures what graphs cost in device memory, the driver's own share included: free memory before and after.

use std::sync::Arc;

use super::probes::{Map, Probes};
use crate::arena::BufferId;
use crate::capture::{CapturedGraph, GraphCost};
use crate::error::Result;
use crate::hal::Device;

/// Graphs of each size: enough to see through the pieces in which a driver takes memory.
const GRAPHS: u64 = 16;
/// Nodes of the two sizes.
const NODES: [u32; 2] = [2, 512];

/// Captures graphs of two sizes, replays each once and fits the fixed cost and the cost a node.
///
/// Free memory belongs to the whole device: another process that allocates meanwhile disturbs the figures.
pub fn graph_cost(device: &Arc<dyn Device>) -> Result<GraphCost> {
    let probes = Probes::new(device, 2, 0)?;
    // The first launch sets up what serves all graphs; all graphs live to the end, as drivers reuse what a dropped one held.
    let mut graphs = vec![capture(&probes, NODES[0])?];
    let mut took = [0; 2];
    for (nodes, took) in NODES.into_iter().zip(&mut took) {
        let before = device.memory()?.free_bytes;
        for _ in 0..GRAPHS {
            graphs.push(capture(&probes, nodes)?);
        }
        *took = before.saturating_sub(device.memory()?.free_bytes);
    }
    Ok(GraphCost::fit(GRAPHS, (NODES[0].into(), took[0]), (NODES[1].into(), took[1])))
}

fn capture(probes: &Probes, nodes: u32) -> Result<CapturedGraph> {
    let map = Map { mul: 3, add: 1 };
    let steps = (0..nodes).map(|node| (BufferId(node % 2), map, BufferId((node + 1) % 2)));
    let graph = probes.capture("cost", steps)?;
    // Drivers put off part of the work, and of the memory, to the first launch.
    graph.replay(&*probes.stream)?;
    probes.stream.synchronize()?;
    Ok(graph)
}

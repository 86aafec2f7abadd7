//! A graph as its device tells it: kernel nodes, other nodes, edges. What the device cannot tell is a finding.

use super::{Finding, Report};
use crate::arena::{Arena, BufferId, Ledger, Sealed};
use crate::capture::graph::what_it_is;
use crate::error::Result;
use crate::hal::{DevicePtr, Graph, KernelNode, LaunchShape, Node, NodeId};
use crate::kernels::{Field, Ptr};

/// How far from a buffer an address may lie to be told by it: a guard band or two.
const NEAR_BYTES: u64 = 1024;

/// What was read back.
#[derive(Debug, Default)]
pub(super) struct ReadBack {
    /// Nodes of every kind.
    pub count: usize,
    /// Kernel nodes in recording order.
    pub kernels: Vec<(NodeId, KernelNode)>,
    /// Dependencies (before, after).
    pub edges: Vec<(NodeId, NodeId)>,
}

impl ReadBack {
    /// Asks the device for everything it knows of `graph`. Nodes that no chain may hold (CAP-1) and queries that fail become
    /// findings; `None` if the graph could not be read at all.
    pub fn of(graph: &dyn Graph, report: &mut Report) -> Option<ReadBack> {
        let count = answer(graph.node_count(), "node_count", "CAP-2", report)?;
        let edges = answer(graph.edges(), "edges", "RACE-1", report)?;
        let mut read = ReadBack { count, kernels: Vec::with_capacity(count), edges };
        let mut whole = true;
        for at in 0..count as u32 {
            match graph.node(NodeId(at)) {
                Ok(Node::Kernel(node)) => read.kernels.push((NodeId(at), node)),
                // Joins branches.
                Ok(Node::Empty) => {}
                Ok(other) => report.push(forbidden(at, &other)),
                Err(error) => {
                    report.query_failed("ADDR-4", &format!("node {at}"), &error);
                    whole = false;
                }
            }
        }
        whole.then_some(read)
    }

    /// True if the edges are 0 -> 1 -> 2 and so on, and nothing else.
    pub fn is_line(&self) -> bool {
        self.edges.len() == self.count.saturating_sub(1)
            && (0u32..).zip(&self.edges).all(|(at, &(before, after))| before.0 == at && after.0 == at + 1)
    }
}

fn answer<T>(result: Result<T>, query: &str, id: &'static str, report: &mut Report) -> Option<T> {
    result.map_err(|error| report.query_failed(id, query, &error)).ok()
}

fn forbidden(at: u32, node: &Node) -> Finding {
    let help = "something queued work on the stream during the capture that is no kernel of the chain: move it out of the window";
    Finding::new("CAP-1", "kernels only", what_it_is(node), help).at(at, "")
}

/// An address as buffer + offset, or by its distance to the nearest buffer where none holds it.
pub(super) fn place(arena: &Arena<Sealed>, pointer: Ptr) -> String {
    if pointer == Ptr::NULL {
        return "null".to_owned();
    }
    if let Some((buffer, offset)) = arena.ledger().resolve(DevicePtr(pointer.0), 0) {
        return format!("{}+{offset}", arena.plan().buffer(buffer).spec.name);
    }
    let near = (0u32..).zip(&arena.plan().buffers).filter_map(|(at, planned)| {
        let from = arena.ptr(BufferId(at)).0;
        let (before, behind) = (from.checked_sub(pointer.0), pointer.0.checked_sub(from + planned.bytes));
        let (distance, side) = before.map(|bytes| (bytes, "before")).or(behind.map(|bytes| (bytes, "behind")))?;
        (distance <= NEAR_BYTES).then_some((distance, side, &planned.spec.name))
    });
    match near.min() {
        Some((distance, side, name)) => format!("an address in no buffer, {distance} bytes {side} {name}"),
        None => "an address in no buffer".to_owned(),
    }
}

/// A launch shape for people.
pub(super) fn launch_shape(shape: &LaunchShape) -> String {
    format!("grid {:?} workgroup {:?} LDS {}", shape.grid, shape.workgroup, shape.lds_bytes)
}

/// A field's value for people: a place or a number.
pub(super) fn value(arena: &Arena<Sealed>, field: &Field, args: &[u8]) -> String {
    field.scalar_text(args).unwrap_or_else(|| place(arena, field.pointer(args)))
}

/// The name of the buffer a pointer leads into.
pub(super) fn buffer_name(arena: &Arena<Sealed>, ledger: &Ledger, pointer: Ptr) -> Option<String> {
    ledger.resolve(DevicePtr(pointer.0), 0).map(|(buffer, _)| arena.plan().buffer(buffer).spec.name.clone())
}

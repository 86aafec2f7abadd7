//! PAD-1 from the declarations alone: what a node reads of a step's own buffers, some node of the same graph writes.
//!
//! Metadata written for 100 rows under a graph of 112 is such a hole: the last 12 rows would be whatever an earlier step left.
//! State that one step hands the next counts as written: some node of the graph writes it, if later.

use super::race::Touch;
use super::{Finding, Report};
use crate::arena::{Arena, BufferId, Purpose, Sealed};
use crate::hal::NodeId;

/// Adds a finding for every read that no write of the graph covers.
pub fn covered(touches: &[Touch], label: impl Fn(NodeId) -> String, arena: &Arena<Sealed>, report: &mut Report) {
    let mut sorted: Vec<&Touch> = touches.iter().filter(|touch| is_of_a_step(arena, touch.buffer)).collect();
    sorted.sort_by_key(|touch| (touch.buffer, touch.from));
    for of_buffer in sorted.chunk_by(|a, b| a.buffer == b.buffer) {
        let written = merged(of_buffer);
        for read in of_buffer.iter().filter(|touch| touch.access.reads()) {
            // The written range that holds the first byte, if one does, tells how far the read is covered.
            let at = written.partition_point(|&(from, _)| from <= read.from);
            let end = at.checked_sub(1).map_or(read.from, |at| written[at].1.max(read.from));
            if end < read.to {
                report.push(finding(read, end, label(read.node), arena));
            }
        }
    }
}

/// Buffers that hold nothing but what the step itself put there.
fn is_of_a_step(arena: &Arena<Sealed>, buffer: BufferId) -> bool {
    matches!(arena.plan().buffer(buffer).spec.purpose, Purpose::Metadata | Purpose::Activations | Purpose::Selection)
}

/// The written ranges of one buffer, ascending and apart.
fn merged(touches: &[&Touch]) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for touch in touches.iter().filter(|touch| touch.access.writes()) {
        match ranges.last_mut() {
            Some((_, end)) if touch.from <= *end => *end = touch.to.max(*end),
            _ => ranges.push((touch.from, touch.to)),
        }
    }
    ranges
}

fn finding(read: &Touch, end: u64, label: String, arena: &Arena<Sealed>) -> Finding {
    let help = "an op before it is shaped for fewer rows than the capture size: shape every op of the chain by the key";
    let found = format!("nobody writes from offset {end} on");
    Finding::new("PAD-1", format!("bytes {} to {} written by this graph", read.from, read.to), found, help)
        .at(read.node.0, &label)
        .field(read.field)
        .buffer(&*arena.plan().buffer(read.buffer).spec.name)
}

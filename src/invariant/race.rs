//! RACE-1: two nodes that touch one range, one of them writing, are ordered by the graph's edges.
//!
//! What a node touches is what its kernel declares; what is ordered is what the edges reach. A straight line orders
//! everything, so the audit asks only for graphs with branches.

use super::{Finding, Report};
use crate::arena::{Arena, BufferId, Sealed};
use crate::hal::NodeId;
use crate::kernels::Access;

/// A range that a node touches.
#[derive(Clone, Copy, Debug)]
pub struct Touch {
    /// The node.
    pub node: NodeId,
    /// The field that points there.
    pub field: &'static str,
    /// What the kernel does there.
    pub access: Access,
    /// The buffer.
    pub buffer: BufferId,
    /// First byte in the buffer.
    pub from: u64,
    /// Byte after the last.
    pub to: u64,
}

/// Which nodes run before which, as one bit a pair.
#[derive(Debug)]
pub struct Reach {
    words: usize,
    // Row n: the nodes that run before n. Empty for a line, where the order of ids says it all.
    before: Vec<u64>,
}

impl Reach {
    /// Follows the edges (before, after) of `count` nodes; `None` if they run in a circle or leave the graph.
    pub fn of(count: usize, edges: &[(NodeId, NodeId)]) -> Option<Reach> {
        let is_line = edges.len() + 1 == count && (0u32..).zip(edges).all(|(at, edge)| *edge == (NodeId(at), NodeId(at + 1)));
        if is_line || count == 0 {
            return Some(Reach { words: 0, before: Vec::new() });
        }
        if edges.iter().any(|(before, after)| before.0.max(after.0) as usize >= count) {
            return None;
        }
        let mut sorted = edges.to_vec();
        sorted.sort_unstable();
        let mut waits_for = vec![0u32; count];
        sorted.iter().for_each(|(_, after)| waits_for[after.0 as usize] += 1);
        let mut ready: Vec<u32> = (0..count as u32).filter(|&node| waits_for[node as usize] == 0).collect();
        let words = count.div_ceil(64);
        let mut reach = Reach { words, before: vec![0; words * count] };
        let mut done = 0;
        while let Some(node) = ready.pop() {
            done += 1;
            let from = sorted.partition_point(|(before, _)| before.0 < node);
            for &(_, after) in sorted[from..].iter().take_while(|(before, _)| before.0 == node) {
                reach.inherit(node as usize, after.0 as usize);
                waits_for[after.0 as usize] -= 1;
                if waits_for[after.0 as usize] == 0 {
                    ready.push(after.0);
                }
            }
        }
        (done == count).then_some(reach)
    }

    /// `after` runs behind `before` and everything before that.
    fn inherit(&mut self, before: usize, after: usize) {
        for word in 0..self.words {
            self.before[after * self.words + word] |= self.before[before * self.words + word];
        }
        self.before[after * self.words + before / 64] |= 1 << (before % 64);
    }

    /// True if the edges make `first` finish before `second` starts.
    pub fn ordered(&self, first: NodeId, second: NodeId) -> bool {
        if self.words == 0 {
            return first < second;
        }
        self.before[second.0 as usize * self.words + first.0 as usize / 64] >> (first.0 % 64) & 1 == 1
    }
}

/// Adds a finding for every two nodes that touch one range unordered, one of them writing.
pub fn races(touches: &[Touch], reach: &Reach, label: impl Fn(NodeId) -> String, arena: &Arena<Sealed>, report: &mut Report) {
    let mut sorted: Vec<&Touch> = touches.iter().collect();
    sorted.sort_by_key(|touch| (touch.buffer, touch.from, touch.node));
    let mut pairs: Vec<(&Touch, &Touch)> = Vec::new();
    // Ranges that reach past the current start, of the current buffer.
    let mut open: Vec<&Touch> = Vec::new();
    for touch in sorted {
        open.retain(|other| other.buffer == touch.buffer && other.to > touch.from);
        for other in &open {
            let writes = touch.access.writes() || other.access.writes();
            let (first, second) = if other.node < touch.node { (*other, touch) } else { (touch, *other) };
            let ordered = reach.ordered(first.node, second.node) || reach.ordered(second.node, first.node);
            if writes && first.node != second.node && !ordered {
                pairs.push((first, second));
            }
        }
        open.push(touch);
    }
    // Nodes close to each other first: where one edge is missing, those are the ones it should lie between.
    pairs.sort_by_key(|(first, second)| (second.node.0 - first.node.0, first.node, first.field));
    pairs.iter().for_each(|(first, second)| report.push(finding(first, second, &label, arena)));
}

fn finding(first: &Touch, second: &Touch, label: &impl Fn(NodeId) -> String, arena: &Arena<Sealed>) -> Finding {
    let does = |touch: &Touch| if touch.access.writes() { "writes" } else { "reads" };
    let expected = format!("an edge path to or from node {} {}, which {} it", first.node.0, label(first.node), does(first));
    let from = first.from.max(second.from);
    let bytes = first.to.min(second.to) - from;
    let found = format!("none: it {} {bytes} bytes from offset {from} on at the same time", does(second));
    let help = "add the missing dependency to the chain's Order::Edges, or give each node a range of its own";
    Finding::new("RACE-1", expected, found, help)
        .at(second.node.0, &label(second.node))
        .field(second.field)
        .buffer(&*arena.plan().buffer(second.buffer).spec.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(pairs: &[(u32, u32)]) -> Vec<(NodeId, NodeId)> {
        pairs.iter().map(|&(before, after)| (NodeId(before), NodeId(after))).collect()
    }

    #[test]
    fn reach_follows_paths_and_refuses_circles() {
        // 0 -> 1 -> 3, 0 -> 2 -> 3: the sides of a diamond are unordered.
        let diamond = Reach::of(4, &edges(&[(0, 1), (0, 2), (1, 3), (2, 3)])).unwrap();
        let ordered = |a, b| diamond.ordered(NodeId(a), NodeId(b));
        assert!(ordered(0, 3) && ordered(0, 1) && ordered(2, 3));
        assert!(!ordered(1, 2) && !ordered(2, 1) && !ordered(3, 0));
        assert!(Reach::of(3, &edges(&[(0, 1), (1, 2), (2, 1)])).is_none());
        assert!(Reach::of(2, &edges(&[(0, 2)])).is_none());
        let line = Reach::of(3, &edges(&[(0, 1), (1, 2)])).unwrap();
        assert!(line.ordered(NodeId(0), NodeId(2)) && !line.ordered(NodeId(2), NodeId(0)));
    }

    #[test]
    fn reach_agrees_with_a_walk_on_random_graphs() {
        let mut random = crate::random::Random::new(17);
        for _ in 0..50 {
            let count = random.range(2, 90);
            let mut all: Vec<(u32, u32)> = (0..count * 2)
                .map(|_| (random.range(0, count - 1), random.range(0, count - 1)))
                .filter(|(before, after)| before < after)
                .collect();
            all.sort_unstable();
            all.dedup();
            let reach = Reach::of(count as usize, &edges(&all)).unwrap();
            for first in 0..count {
                // Edges lead to higher ids: one pass in order finds everything behind `first`.
                let mut behind = vec![false; count as usize];
                behind[first as usize] = true;
                for &(before, after) in &all {
                    behind[after as usize] |= behind[before as usize];
                }
                for second in (0..count).filter(|&second| second != first) {
                    assert_eq!(reach.ordered(NodeId(first), NodeId(second)), behind[second as usize], "{first} {second} {all:?}");
                }
            }
        }
    }
}

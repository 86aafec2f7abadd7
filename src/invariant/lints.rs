//! Lints: what a graph pays for and does not need. Nothing here is wrong; each warning carries the figure behind it.
//!
//! They follow from what kernels declare, as the checks do: a branch in the chain, a node that writes nothing at this size, one
//! that repeats another's work or whose work is overwritten unread, neighbours that could be one launch, device memory that was
//! taken between warm-up and capture. A lint that many layers share is told once, with how often.

use std::collections::HashMap;
use std::fmt;

use serde::Serialize;

use super::race::Touch;
use crate::arena::BufferId;
use crate::capture::CapturedGraph;
use crate::chain::{Op, Order};
use crate::config::ByteCount;
use crate::hal::{DevicePtr, NodeId};
use crate::kernels::{Access, FieldKind};

/// Device time of a node however small, microseconds: 0.81 measured on an H200 (driver 580), up to 1.5 on an MI300X or MI355X
/// (ROCm/rocm-systems #11282).
const NODE_US: [f64; 2] = [0.8, 1.5];
/// Pieces in which drivers take device memory: what is below one is no growth.
const PIECE_BYTES: u64 = 2 << 20;

/// What a warning is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LintKind {
    /// The chain is no straight line.
    Branch,
    /// A node writes no element at this size.
    WritesNothing,
    /// A node computes again what an earlier one left in place.
    Repeats,
    /// All that a node writes is overwritten before anything reads it.
    Overwritten,
    /// Neighbours of one kernel that do not depend on each other.
    OneLaunch,
    /// Device memory was taken between warm-up and capture.
    GrownWorkspace,
}

impl LintKind {
    /// True for what costs the host or can move memory under a graph; the others save the device a launch.
    pub fn is_grave(self) -> bool {
        matches!(self, LintKind::Branch | LintKind::WritesNothing | LintKind::GrownWorkspace)
    }
}

/// A warning.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lint {
    /// What it is about.
    pub kind: LintKind,
    /// The nodes concerned, of the first place it was seen.
    pub nodes: Vec<u32>,
    /// Their labels.
    pub ops: Vec<String>,
    /// In how many places it was seen: layers that look alike.
    pub times: u32,
    /// What could be saved of a replay, all places together, microseconds: on a fast and on a slow runtime. `None` where bytes tell.
    pub saves_us: Option<[f64; 2]>,
    /// The figure in words.
    pub message: String,
}

impl fmt::Display for Lint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if !self.ops.is_empty() {
            write!(f, ": {}", self.ops.join(", "))?;
        }
        if self.times > 1 {
            write!(f, " and {} more like it", self.times - 1)?;
        }
        match self.saves_us {
            Some([fast, slow]) => write!(f, " ({fast:.1} to {slow:.1} us a replay)"),
            None => Ok(()),
        }
    }
}

/// Everything that can be said about one graph, in the order of its nodes.
pub fn lint(graph: &CapturedGraph) -> Vec<Lint> {
    let nodes = nodes(graph);
    let mut found = Vec::new();
    found.extend(branch(graph));
    found.extend(nodes.iter().filter(|node| node.writes().next().is_none()).map(writes_nothing));
    // With branches, earlier and later are not what the order of recording says.
    if graph.chain().order == Order::Straight {
        let by_buffer = by_buffer(&nodes);
        found.extend(nodes.iter().filter_map(|node| repeats(node, &nodes, &by_buffer)));
        found.extend(nodes.iter().filter_map(|node| overwritten(node, &nodes, &by_buffer)));
        found.extend(one_launch(&nodes));
    }
    found.sort_by_key(|lint| lint.nodes.first().copied());
    fold(found)
}

/// A warning if a capture took more device memory than its graphs account for: `before` and `after` are free bytes after the
/// warm-ups and after the captures, `estimated` what the graphs were expected to take.
pub fn grown_workspace(before: u64, after: u64, estimated: u64) -> Option<Lint> {
    let grown = before.saturating_sub(after);
    let slack = if estimated == 0 { 0 } else { PIECE_BYTES };
    (grown > estimated.saturating_mul(2).saturating_add(slack)).then(|| Lint {
        kind: LintKind::GrownWorkspace,
        nodes: Vec::new(),
        ops: Vec::new(),
        times: 1,
        saves_us: None,
        message: format!(
            "{} of device memory were taken between warm-up and capture, where graphs account for about {}: a workspace that grew \
             then moves under the graphs that hold it",
            ByteCount(grown),
            ByteCount(estimated)
        ),
    })
}

/// A node, and what it touches.
struct Node<'a> {
    id: NodeId,
    op: &'a Op,
    touches: Vec<Touch>,
}

impl Node<'_> {
    fn writes(&self) -> impl Iterator<Item = &Touch> {
        self.touches.iter().filter(|touch| touch.access.writes())
    }

    fn lint(&self, kind: LintKind, message: impl Into<String>) -> Lint {
        let (nodes, ops) = (vec![self.id.0], vec![self.op.label.clone()]);
        Lint { kind, nodes, ops, times: 1, saves_us: Some(NODE_US), message: message.into() }
    }
}

fn nodes(graph: &CapturedGraph) -> Vec<Node<'_>> {
    let ledger = graph.arena().ledger();
    let launches = (0u32..).zip(graph.chain().ops.iter().zip(graph.launches()));
    launches
        .map(|(at, (op, launch))| {
            let touches = op.kernel.args.pointers().filter_map(|field| {
                let bytes = field.extent_bytes(&launch.args);
                let FieldKind::Pointer { access, .. } = field.kind else { return None };
                let (buffer, from) = ledger.resolve(DevicePtr(field.pointer(&launch.args).0), bytes)?;
                let touch = Touch { node: NodeId(at), field: field.name, access, buffer, from, to: from + bytes };
                (bytes > 0).then_some(touch)
            });
            Node { id: NodeId(at), op, touches: touches.collect() }
        })
        .collect()
}

/// The touches of each buffer, in the order of nodes.
fn by_buffer<'a>(nodes: &'a [Node<'_>]) -> HashMap<BufferId, Vec<&'a Touch>> {
    let mut all: HashMap<BufferId, Vec<&Touch>> = HashMap::new();
    for touch in nodes.iter().flat_map(|node| &node.touches) {
        all.entry(touch.buffer).or_default().push(touch);
    }
    all
}

fn overlap(one: &Touch, other: &Touch) -> bool {
    one.buffer == other.buffer && one.from < other.to && other.from < one.to
}

/// True if the two nodes cannot run at the same time.
fn depend(one: &Node<'_>, other: &Node<'_>) -> bool {
    let conflict = |a: &Touch, b: &Touch| (a.access.writes() || b.access.writes()) && overlap(a, b);
    one.touches.iter().any(|a| other.touches.iter().any(|b| conflict(a, b)))
}

fn branch(graph: &CapturedGraph) -> Option<Lint> {
    let Order::Edges(edges) = &graph.chain().order else { return None };
    let count = graph.chain().ops.len();
    let (mut before, mut after) = (vec![0u32; count], vec![0u32; count]);
    for &(from, to) in edges {
        after[from as usize] += 1;
        before[to as usize] += 1;
    }
    // Ends of the line count once each: what is more than one start, or more than one way on, is a branch.
    let starts = before.iter().filter(|&&edges| edges == 0).count();
    let forks = after.iter().filter(|&&edges| edges > 1).count();
    let at = (0..count).find(|&at| after[at] > 1 || (at > 0 && before[at] == 0))?;
    Some(Lint {
        kind: LintKind::Branch,
        nodes: vec![at as u32],
        ops: vec![graph.chain().ops[at].label.clone()],
        times: 1,
        saves_us: None,
        message: format!(
            "{forks} forks and {starts} starts in {count} nodes: two branches at 1,024 nodes cost the host 910 us a launch on ROCm 7.2, 8 us \
             on 7.13; keep the chain straight unless the branches save more"
        ),
    })
}

fn writes_nothing(node: &Node<'_>) -> Lint {
    node.lint(LintKind::WritesNothing, "a node writes no element at this size; leave it out of the chain")
}

fn repeats(node: &Node<'_>, nodes: &[Node<'_>], by_buffer: &HashMap<BufferId, Vec<&Touch>>) -> Option<Lint> {
    if node.touches.iter().any(|touch| touch.access == Access::ReadWrite) || node.writes().next().is_none() {
        return None;
    }
    let same = |other: &&Node<'_>| {
        std::ptr::eq(other.op.kernel, node.op.kernel) && other.op.args == node.op.args && other.op.shape == node.op.shape
    };
    let first = nodes[..node.id.0 as usize].iter().rev().find(same)?;
    let written_between = |own: &Touch| {
        let of_buffer = by_buffer[&own.buffer].iter();
        of_buffer
            .filter(|other| first.id < other.node && other.node < node.id)
            .any(|other| other.access.writes() && overlap(own, other))
    };
    if node.touches.iter().any(written_between) {
        return None;
    }
    let mut lint =
        node.lint(LintKind::Repeats, "two nodes compute the same of the same, and nothing changed between them; keep the first");
    lint.nodes.insert(0, first.id.0);
    lint.ops.insert(0, first.op.label.clone());
    Some(lint)
}

/// Conservative: only a later node that overwrites a whole range, before any other touches it, makes a write useless.
fn overwritten(node: &Node<'_>, nodes: &[Node<'_>], by_buffer: &HashMap<BufferId, Vec<&Touch>>) -> Option<Lint> {
    let dead = |own: &Touch| {
        let of_buffer = by_buffer[&own.buffer].iter();
        let mut later = of_buffer.filter(|other| other.node > node.id && overlap(own, other)).peekable();
        let next = later.peek()?.node;
        let whole = |other: &&&Touch| other.access == Access::Write && other.from <= own.from && own.to <= other.to;
        let of_next: Vec<_> = later.take_while(|other| other.node == next).collect();
        (of_next.iter().all(|other| !other.access.reads()) && of_next.iter().any(whole)).then_some(next)
    };
    let mut by = None;
    for own in node.writes() {
        by = by.max(Some(dead(own)?));
    }
    let mut lint = node
        .lint(LintKind::Overwritten, "all that the first node writes is overwritten unread by the second; leave the first out");
    let by = &nodes[by?.0 as usize];
    lint.nodes.push(by.id.0);
    lint.ops.push(by.op.label.clone());
    Some(lint)
}

/// Runs of neighbours that launch one kernel with one workgroup and do not touch what another of the run writes.
fn one_launch(nodes: &[Node<'_>]) -> Vec<Lint> {
    let mut found = Vec::new();
    let mut run: Vec<&Node<'_>> = Vec::new();
    let mut close = |run: &mut Vec<&Node<'_>>| {
        if let [first, _, ..] = run[..] {
            let saved = run.len() as f64 - 1.0;
            let message = format!(
                "{} neighbours of kernel {} do not depend on each other: they could be one launch",
                run.len(),
                first.op.kernel.symbol
            );
            found.push(Lint {
                nodes: run.iter().map(|node| node.id.0).collect(),
                ops: run.iter().map(|node| node.op.label.clone()).collect(),
                saves_us: Some(NODE_US.map(|us| us * saved)),
                ..first.lint(LintKind::OneLaunch, message)
            });
        }
        run.clear();
    };
    for node in nodes {
        let joins = run.first().is_some_and(|first| {
            let (one, other) = (&first.op, &node.op);
            std::ptr::eq(one.kernel, other.kernel)
                && one.shape.workgroup == other.shape.workgroup
                && one.shape.lds_bytes == other.shape.lds_bytes
        });
        if !joins || run.iter().any(|other| depend(other, node)) {
            close(&mut run);
        }
        run.push(node);
    }
    close(&mut run);
    found
}

/// Joins lints that differ in nothing but the layer.
fn fold(found: Vec<Lint>) -> Vec<Lint> {
    let mut folded: Vec<(Vec<String>, Lint)> = Vec::new();
    for lint in found {
        let ops: Vec<String> = lint.ops.iter().map(|label| without_layer(label).to_owned()).collect();
        match folded.iter_mut().find(|(other, first)| first.kind == lint.kind && first.message == lint.message && *other == ops) {
            Some((_, first)) => {
                first.times += lint.times;
                if let (Some(all), Some(more)) = (&mut first.saves_us, lint.saves_us) {
                    *all = [all[0] + more[0], all[1] + more[1]];
                }
            }
            None => folded.push((ops, lint)),
        }
    }
    folded.into_iter().map(|(_, lint)| lint).collect()
}

/// `score` of `layer3.score`.
fn without_layer(label: &str) -> &str {
    match label.split_once('.') {
        Some((layer, rest)) if layer.strip_prefix("layer").is_some_and(|number| number.parse::<u32>().is_ok()) => rest,
        _ => label,
    }
}

#[cfg(test)]
#[path = "lints_tests.rs"]
mod tests;

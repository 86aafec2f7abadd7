//! Captured graphs and the set of them.
#![expect(unsafe_code, reason = "launches graphs; the one caller of raw replay")]

use std::fmt;
use std::sync::Arc;

use super::{Launch, Modules, record};
use crate::arena::{Arena, Sealed};
use crate::chain::{Chain, GraphKey, Order};
use crate::error::{Error, Result};
use crate::hal::{Graph, GraphExec, Node, NodeId, Stream};

/// A graph, with everything its nodes point at kept alive.
pub struct CapturedGraph {
    key: GraphKey,
    chain: Chain,
    launches: Vec<Launch>,
    graph: Arc<dyn Graph>,
    exec: Arc<dyn GraphExec>,
    fingerprint: u64,
    arena: Arc<Arena<Sealed>>,
    modules: Arc<Modules>,
}

impl CapturedGraph {
    /// Records `chain` on `stream`, checks that the driver's nodes are the lowered chain (CAP-1, CAP-2, ADDR-4), instantiates
    /// and uploads it.
    pub fn capture(
        key: GraphKey,
        chain: Chain,
        arena: &Arc<Arena<Sealed>>,
        modules: &Arc<Modules>,
        stream: &dyn Stream,
    ) -> Result<CapturedGraph> {
        let launches = super::lower(&chain, arena, modules)?;
        let graph = record(&**arena.device(), stream, &chain, &launches)?;
        check_nodes(&*graph, &chain, &launches)?;
        let exec = graph.instantiate()?;
        exec.upload(stream)?;
        let fingerprint = arena.ledger().fingerprint();
        Ok(CapturedGraph { key, chain, launches, graph, exec, fingerprint, arena: arena.clone(), modules: modules.clone() })
    }

    /// Queues one replay, after the cheap checks of every step: the ledger's fingerprint is capture's (ADDR-2).
    pub fn replay(&self, stream: &dyn Stream) -> Result<()> {
        self.check_fingerprint()?;
        // SAFETY: ADDR-2, checked above, and the Arcs of this struct keep arena and modules alive; the executor synchronises
        // its stream before it drops a graph.
        unsafe { stream.launch_graph(&*self.exec) }.map_err(|error| error.at(|| format!("replay {}", self.key)))
    }

    /// ADDR-2: no buffer moved since capture.
    #[inline]
    pub fn check_fingerprint(&self) -> Result<()> {
        let now = self.arena.ledger().fingerprint();
        if now == self.fingerprint {
            return Ok(());
        }
        Err(Error::invariant(
            "ADDR-2",
            format!("graph {} was recorded against other buffers (ledger {:016x}, now {now:016x})", self.key, self.fingerprint),
        )
        .help("a buffer moved or was freed after capture: capture again, and find who touched the sealed arena"))
    }

    /// Reads every node back from the driver and compares it with what was recorded (CAP-2, ADDR-4).
    pub fn check_nodes(&self) -> Result<()> {
        check_nodes(&*self.graph, &self.chain, &self.launches)
    }

    /// Instantiates and uploads the recorded graph anew; the old instance is dropped once the stream has finished.
    pub fn reinstantiate(&mut self, stream: &dyn Stream) -> Result<()> {
        stream.synchronize()?;
        let exec = self.graph.instantiate()?;
        exec.upload(stream)?;
        self.exec = exec;
        Ok(())
    }

    /// The key.
    pub fn key(&self) -> &GraphKey {
        &self.key
    }

    /// The chain it was recorded from.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// What was recorded: the lowered chain.
    pub fn launches(&self) -> &[Launch] {
        &self.launches
    }

    /// The driver's graph.
    pub fn graph(&self) -> &Arc<dyn Graph> {
        &self.graph
    }

    /// The arena its nodes point into.
    pub fn arena(&self) -> &Arc<Arena<Sealed>> {
        &self.arena
    }

    /// The code its nodes run.
    pub fn modules(&self) -> &Arc<Modules> {
        &self.modules
    }
}

impl fmt::Debug for CapturedGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapturedGraph").field("key", &self.key).field("nodes", &self.launches.len()).finish_non_exhaustive()
    }
}

/// CAP-1: kernels only; CAP-2 and ADDR-4: the driver's nodes are the lowered chain, byte for byte, in the chain's order.
fn check_nodes(graph: &dyn Graph, chain: &Chain, launches: &[Launch]) -> Result<()> {
    let broken = |id, message: String| {
        Error::invariant(id, message).help("do not replay this graph; report the device and driver version")
    };
    let count = graph.node_count()?;
    // Joining branches may add empty nodes; kernels must match one to one.
    let mut kernels = Vec::with_capacity(launches.len());
    for at in 0..count {
        let id = NodeId(at as u32);
        match graph.node(id)? {
            Node::Kernel(node) => kernels.push((id, node)),
            Node::Empty => {}
            other => return Err(broken("CAP-1", format!("{}: node {at} is {}", chain.name, what_it_is(&other)))),
        }
    }
    if kernels.len() != launches.len() {
        return Err(broken(
            "CAP-2",
            format!("{}: {} kernels were launched, the graph holds {}", chain.name, launches.len(), kernels.len()),
        ));
    }
    for ((op, launch), (_, node)) in chain.ops.iter().zip(launches).zip(&kernels) {
        if node.symbol != op.kernel.symbol || node.function != launch.function {
            return Err(broken(
                "CAP-2",
                format!("{}: expected kernel {}, the graph holds {}", op.label, op.kernel.symbol, node.symbol),
            ));
        }
        if node.shape != launch.shape {
            return Err(broken(
                "CAP-2",
                format!("{}: launched with {:?}, the graph holds {:?}", op.label, launch.shape, node.shape),
            ));
        }
        if node.args != launch.args.as_slice() {
            let field =
                op.kernel.args.fields.iter().rev().find(|field| field.offset <= first_difference(&node.args, &launch.args));
            let name = field.map_or("arguments", |field| field.name);
            return Err(broken("ADDR-4", format!("{}.{name}: the graph does not hold the recorded value", op.label)));
        }
    }
    if chain.order == Order::Straight {
        let edges = graph.edges()?;
        let expected = (1..count as u32).map(|after| (NodeId(after - 1), NodeId(after)));
        if !edges.iter().copied().eq(expected) {
            return Err(broken(
                "CAP-2",
                format!("{}: the chain is straight, the graph's {} edges are not a line", chain.name, edges.len()),
            ));
        }
    }
    Ok(())
}

/// A node in words, without addresses.
pub(crate) fn what_it_is(node: &Node) -> String {
    match node {
        Node::Kernel(node) => format!("kernel {}", node.symbol),
        Node::Copy { bytes, .. } => format!("a copy of {bytes} bytes"),
        Node::Fill { bytes, .. } => format!("a fill of {bytes} bytes"),
        Node::Empty => "empty".to_owned(),
        Node::Other(name) => format!("a node of kind {name}"),
    }
}

fn first_difference(found: &[u8], expected: &[u8]) -> usize {
    found.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(found.len().min(expected.len()))
}

/// The captured graphs of one chain family, found by query length, bound and rows.
#[derive(Debug, Default)]
pub struct GraphSet {
    // Sorted by (query_len, kv_len_max, sequences): a lookup is one binary search.
    graphs: Vec<CapturedGraph>,
}

impl GraphSet {
    /// Adds a graph. A second graph of the same key replaces the first: the caller has synchronised.
    pub fn insert(&mut self, graph: CapturedGraph) {
        match self.graphs.binary_search_by_key(&order(&graph.key), |other| order(&other.key)) {
            Ok(at) => self.graphs[at] = graph,
            Err(at) => self.graphs.insert(at, graph),
        }
    }

    /// The graph with the smallest bound that covers `kv_len`, and of those the one with the fewest sequences that covers
    /// `sequences`.
    pub fn pick(&self, query_len: u32, sequences: u32, kv_len: u32) -> Option<&CapturedGraph> {
        let mut from = self.graphs.partition_point(|graph| (graph.key.query_len, graph.key.kv_len_max) < (query_len, kv_len));
        while let Some(graph) = self.graphs.get(from).filter(|graph| graph.key.query_len == query_len) {
            let bound = graph.key.kv_len_max;
            from += self.graphs[from..].partition_point(|graph| order(&graph.key) < (query_len, bound, sequences));
            match self.graphs.get(from) {
                Some(graph) if graph.key.query_len == query_len && graph.key.kv_len_max == bound => return Some(graph),
                _ => {}
            }
        }
        None
    }

    /// All of them, by query length, bound and rows.
    pub fn iter(&self) -> impl Iterator<Item = &CapturedGraph> {
        self.graphs.iter()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.graphs.len()
    }

    /// True before the first capture.
    pub fn is_empty(&self) -> bool {
        self.graphs.is_empty()
    }

    /// Drops all graphs; the caller has synchronised.
    pub fn clear(&mut self) {
        self.graphs.clear();
    }
}

fn order(key: &GraphKey) -> (u32, u32, u32) {
    (key.query_len, key.kv_len_max, key.sequences)
}

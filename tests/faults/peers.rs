//! Faults of what a rank of a context-parallel group holds of its peers: the table of pointers in every node that exchanges.

use std::sync::Arc;

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{Limits, ModelShape};
use capstan::hal::{KernelNode, Node, NodeId};

use super::liar::Lies;
use super::rig::{Fault, Rig, limits, point, pointer, scalar};

/// Rank 0 of two, on a device that runs nothing: the other rank's buffers have addresses, and nobody behind them.
fn rank() -> capstan::Result<Rig> {
    let limits = Limits { world: 2, ..limits() };
    let chains: Arc<dyn StepChains> = Arc::new(MsaChains::new(&ModelShape::nano(), &limits, 7)?);
    let mut rig = Rig::on("null", chains)?;
    rig.executor.capture(|_| ())?;
    Ok(rig)
}

/// Captures, then audits while the node of this label reads back changed.
fn audit_with(label: &str, change: impl Fn(&Rig, &mut KernelNode)) -> capstan::Result<()> {
    let rig = rank()?;
    let graph = rig.executor.graphs().iter().next().expect("one size was captured");
    let at = graph.chain().ops.iter().position(|op| op.label == label).expect("the chain exchanges") as u32;
    let Node::Kernel(mut lie) = graph.graph().node(NodeId(at))? else { panic!("{label} is no kernel") };
    change(&rig, &mut lie);
    rig.audit_under(Lies {
        node: Some(Arc::new(move |truth, id| if id.0 == at { Ok(Node::Kernel(lie.clone())) } else { truth.node(id) })),
        ..Lies::default()
    })
}

pub static FAULTS: &[Fault] = &[
    Fault {
        name: "a peer's words are this rank's own",
        caught_by: "ADDR-4",
        names: &["layer0.topk_exchange.peer1", "peer1/peers.words+0", "peers.words+0"],
        run: || audit_with("layer0.topk_exchange", |rig, node| point(node, "peer1", rig.address("peers.words"))),
    },
    Fault {
        name: "a peer's words where nobody's memory is",
        caught_by: "ADDR-1",
        names: &["layer1.topk_exchange.peer1", "an address in no buffer"],
        run: || audit_with("layer1.topk_exchange", |_, node| point(node, "peer1", 0x1000)),
    },
    Fault {
        name: "a peer's words slid forward by one",
        caught_by: "ADDR-1",
        names: &["layer0.topk_exchange.peer1", "buffer peer1/peers.words", "from offset 8"],
        run: || audit_with("layer0.topk_exchange", |_, node| point(node, "peer1", pointer(node, "peer1") + 8)),
    },
    Fault {
        name: "a peer's words that were not opened",
        caught_by: "ADDR-1",
        names: &["agree.peer1", "null"],
        run: || audit_with("agree", |_, node| point(node, "peer1", 0)),
    },
    Fault {
        name: "more rows than the peers' words hold",
        caught_by: "ADDR-1",
        names: &["layer0.topk_exchange.peer1", "buffer peer1/peers.words"],
        run: || audit_with("layer0.topk_exchange", |_, node| scalar(node, "peer_rows", |rows| rows + 1)),
    },
];

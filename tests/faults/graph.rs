//! Faults of the device's graph: what it holds is not what was recorded.

use std::sync::Arc;

use capstan::Error;
use capstan::hal::{Device, DevicePtr, KernelNode, MemoryKind, Node, NodeId};

use super::liar::Lies;
use super::rig::{Fault, Rig, audit_with, msa, point, pointer, scalar};

type Edges = Vec<(NodeId, NodeId)>;

/// Captures, then audits while the device lies about the whole graph.
fn lied(lies: Lies) -> capstan::Result<()> {
    Rig::captured(msa())?.audit_under(lies)
}

fn edges(lie: fn(Edges) -> Edges) -> capstan::Result<()> {
    lied(Lies { edges: Some(Arc::new(move |truth| Ok(lie(truth)))), ..Lies::default() })
}

fn foreign(node: Node) -> capstan::Result<()> {
    let lie = move |truth: &dyn capstan::hal::Graph, id: NodeId| if id.0 == 3 { Ok(node.clone()) } else { truth.node(id) };
    lied(Lies { node: Some(Arc::new(lie)), ..Lies::default() })
}

fn kernel(truth: &dyn capstan::hal::Graph, id: NodeId) -> KernelNode {
    match truth.node(id) {
        Ok(Node::Kernel(node)) => node,
        other => panic!("node {id:?} is {other:?}"),
    }
}

fn failing() -> Error {
    Error::device("the driver does not answer").call("hipGraphKernelNodeGetParams", 719, "")
}

pub static FAULTS: &[Fault] = &[
    Fault {
        name: "a buffer of a node moved out of the arena",
        caught_by: "ADDR-1",
        names: &["node 2", "layer0.norm_rope_insert.packed", "an address in no buffer"],
        run: || audit_with(2, |_, node| point(node, "packed", 0x1000)),
    },
    Fault {
        name: "a node points at memory that was freed",
        caught_by: "ADDR-1",
        names: &["node 1", "embed.table", "an address in no buffer"],
        run: || {
            audit_with(1, |rig, node| {
                let other = rig.liar.allocate(MemoryKind::Device, 1 << 20).unwrap();
                point(node, "table", other.ptr.0);
                // SAFETY: nothing was queued that uses it (SEAL-1); the graph that claims to is never launched.
                unsafe { rig.liar.free(other) }.unwrap();
            })
        },
    },
    Fault {
        name: "a pointer slid forward by 16 bytes",
        caught_by: "ADDR-1",
        names: &["node 1", "embed.table", "buffer msa.table", "from offset 16"],
        run: || audit_with(1, |_, node| point(node, "table", pointer(node, "table") + 16)),
    },
    Fault {
        name: "a pointer slid back into the guard band",
        caught_by: "ADDR-1",
        names: &["node 5", "layer0.attend.out", "64 bytes before attention.out"],
        run: || audit_with(5, |_, node| point(node, "out", pointer(node, "out") - 64)),
    },
    Fault {
        name: "a pointer read back as null",
        caught_by: "ADDR-1",
        names: &["node 5", "layer0.attend.kv_cache", "null"],
        run: || audit_with(5, |_, node| point(node, "kv_cache", 0)),
    },
    Fault {
        name: "a pointer to the next layer's buffer",
        caught_by: "ADDR-4",
        names: &["node 5", "layer0.attend.kv_cache", "layer0.kv_cache+0", "layer1.kv_cache+0"],
        run: || audit_with(5, |rig, node| point(node, "kv_cache", rig.address("layer1.kv_cache"))),
    },
    Fault {
        name: "two arguments swapped",
        caught_by: "ADDR-4",
        names: &["node 2", "layer0.norm_rope_insert.q_norm", "layer0.norm_rope_insert.k_norm", "layer0.k_norm+0"],
        run: || {
            audit_with(2, |_, node| {
                let (q, k) = (pointer(node, "q_norm"), pointer(node, "k_norm"));
                point(node, "q_norm", k);
                point(node, "k_norm", q);
            })
        },
    },
    Fault {
        name: "an extent one row too long",
        caught_by: "ADDR-1",
        names: &["node 1", "embed.table", "buffer msa.table"],
        run: || audit_with(1, |_, node| scalar(node, "vocab", |vocab| vocab + 1)),
    },
    Fault {
        name: "a stale width",
        caught_by: "ADDR-4",
        names: &["node 3", "layer0.score.score_width", "expected 64, found 32"],
        run: || audit_with(3, |_, node| scalar(node, "score_width", |width| width / 2)),
    },
    Fault {
        name: "the row count of another capture size",
        caught_by: "ADDR-4",
        names: &["node 2", "layer0.norm_rope_insert.rows", "expected 4, found 3"],
        run: || audit_with(2, |_, node| scalar(node, "rows", |rows| rows - 1)),
    },
    Fault {
        name: "one bit of a float argument",
        caught_by: "ADDR-4",
        names: &["node 5", "layer0.attend.scale"],
        run: || audit_with(5, |_, node| scalar(node, "scale", |bits| bits ^ 1)),
    },
    Fault {
        name: "an argument struct with a field too many",
        caught_by: "ADDR-1",
        names: &["node 4", "layer0.topk_emit", "topk_emit", "bytes of arguments"],
        run: || audit_with(4, |_, node| node.args.extend([0; 8])),
    },
    Fault {
        name: "a node of code that nobody declared",
        caught_by: "ADDR-1",
        names: &["node 6", "layer1.norm_rope_insert", "kernel mystery"],
        run: || {
            audit_with(6, |_, node| {
                node.function.0 += 1 << 40;
                node.symbol = "mystery".into();
            })
        },
    },
    Fault {
        name: "a node runs another declared kernel",
        caught_by: "CAP-2",
        names: &["node 3", "layer0.score", "expected kernel score_decode", "found kernel topk_emit"],
        run: || {
            lied(Lies {
                node: Some(Arc::new(|truth, id| if id.0 == 3 { truth.node(NodeId(4)) } else { truth.node(id) })),
                ..Lies::default()
            })
        },
    },
    Fault {
        name: "two nodes in the other order",
        caught_by: "CAP-2",
        names: &["node 4", "layer0.topk_emit", "found kernel attend_sparse"],
        run: || {
            let swapped = |id: NodeId| {
                NodeId(if id.0 == 4 {
                    5
                } else if id.0 == 5 {
                    4
                } else {
                    id.0
                })
            };
            lied(Lies { node: Some(Arc::new(move |truth, id| truth.node(swapped(id)))), ..Lies::default() })
        },
    },
    Fault {
        name: "the last node is missing",
        caught_by: "CAP-2",
        names: &["expected 12 kernels, found 11 kernels"],
        run: || {
            lied(Lies {
                count: Some(Arc::new(|count| Ok(count - 1))),
                edges: Some(Arc::new(|mut edges| {
                    edges.pop();
                    Ok(edges)
                })),
                ..Lies::default()
            })
        },
    },
    Fault {
        name: "a node in the middle is missing",
        caught_by: "CAP-2",
        names: &["node 4", "layer0.topk_emit", "found kernel attend_sparse", "found 11 kernels"],
        run: || {
            lied(Lies {
                count: Some(Arc::new(|count| Ok(count - 1))),
                node: Some(Arc::new(|truth, id| truth.node(NodeId(if id.0 >= 4 { id.0 + 1 } else { id.0 })))),
                edges: Some(Arc::new(|mut edges| {
                    edges.pop();
                    Ok(edges)
                })),
                ..Lies::default()
            })
        },
    },
    Fault {
        name: "a node too many",
        caught_by: "CAP-2",
        names: &["expected 12 kernels, found 13 kernels"],
        run: || {
            lied(Lies {
                count: Some(Arc::new(|count| Ok(count + 1))),
                node: Some(Arc::new(|truth, id| truth.node(NodeId(id.0.min(11))))),
                edges: Some(Arc::new(|mut edges| {
                    edges.push((NodeId(11), NodeId(12)));
                    Ok(edges)
                })),
                ..Lies::default()
            })
        },
    },
    Fault {
        name: "a grid one workgroup short",
        caught_by: "CAP-2",
        names: &["node 1", "embed", "found grid [3, 1, 1]"],
        run: || audit_with(1, |_, node| node.shape.grid[0] -= 1),
    },
    Fault {
        name: "a workgroup of other lanes",
        caught_by: "CAP-2",
        names: &["node 4", "layer0.topk_emit", "found grid [4, 2, 1] workgroup [64, 1, 1]"],
        run: || audit_with(4, |_, node| node.shape.workgroup[0] = 64),
    },
    Fault {
        name: "other LDS",
        caught_by: "CAP-2",
        names: &["node 5", "layer0.attend", "LDS 512"],
        run: || audit_with(5, |_, node| node.shape.lds_bytes = 512),
    },
    Fault {
        name: "a copy among the nodes",
        caught_by: "CAP-1",
        names: &["node 3", "a copy of 64 bytes"],
        run: || foreign(Node::Copy { dst: DevicePtr(0x1000), src: DevicePtr(0x2000), bytes: 64 }),
    },
    Fault {
        name: "a fill among the nodes",
        caught_by: "CAP-1",
        names: &["node 3", "a fill of 64 bytes"],
        run: || foreign(Node::Fill { dst: DevicePtr(0x1000), byte: 0, bytes: 64 }),
    },
    Fault {
        name: "a host function among the nodes",
        caught_by: "CAP-1",
        names: &["node 3", "host function"],
        run: || foreign(Node::Other("host function")),
    },
    Fault {
        name: "an allocation among the nodes",
        caught_by: "CAP-1",
        names: &["node 3", "memory allocation"],
        run: || foreign(Node::Other("memory allocation")),
    },
    Fault {
        name: "an edge of the line is missing",
        caught_by: "CAP-2",
        names: &["expected a line of 12 nodes", "10 edges"],
        run: || {
            edges(|mut edges| {
                edges.remove(6);
                edges
            })
        },
    },
    Fault {
        name: "the line is missing an edge: its nodes race",
        caught_by: "RACE-1",
        names: &["node 5", "layer0.attend", "page_table", "node 4 layer0.topk_emit, which writes it"],
        run: || {
            edges(|mut edges| {
                edges.remove(4);
                edges
            })
        },
    },
    Fault {
        name: "an edge too many",
        caught_by: "CAP-2",
        names: &["expected a line of 12 nodes", "12 edges"],
        run: || {
            edges(|mut edges| {
                edges.push((NodeId(0), NodeId(5)));
                edges
            })
        },
    },
    Fault {
        name: "edges in a circle",
        caught_by: "CAP-2",
        names: &["edges that run in a circle"],
        run: || {
            edges(|mut edges| {
                edges.push((NodeId(5), NodeId(2)));
                edges
            })
        },
    },
    Fault {
        name: "the device does not say what a node holds",
        caught_by: "ADDR-4",
        names: &["node 7", "hipGraphKernelNodeGetParams returned 719"],
        run: || {
            lied(Lies {
                node: Some(Arc::new(|truth, id| if id.0 == 7 { Err(failing()) } else { truth.node(id) })),
                ..Lies::default()
            })
        },
    },
    Fault {
        name: "the device does not tell the edges",
        caught_by: "RACE-1",
        names: &["an answer to edges", "the driver does not answer"],
        run: || lied(Lies { edges: Some(Arc::new(|_| Err(failing()))), ..Lies::default() }),
    },
    Fault {
        name: "the device does not count the nodes",
        caught_by: "CAP-2",
        names: &["an answer to node_count", "the driver does not answer"],
        run: || lied(Lies { count: Some(Arc::new(|_| Err(failing()))), ..Lies::default() }),
    },
    Fault {
        name: "the driver recorded another value at capture",
        caught_by: "ADDR-4",
        names: &["layer0.score", "score_width"],
        run: || {
            let mut rig = Rig::new(msa())?;
            rig.liar.lie(Lies {
                node: Some(Arc::new(|truth, id| {
                    let mut node = kernel(truth, id);
                    if id.0 == 3 {
                        scalar(&mut node, "score_width", |width| width / 2);
                    }
                    Ok(Node::Kernel(node))
                })),
                ..Lies::default()
            });
            rig.executor.capture(|_| ()).map(drop)
        },
    },
];

//! What a graph's nodes hold by the word of its driver, ready to be launched one by one.

use super::{CapturedGraph, Launch};
use crate::error::{Error, Result};
use crate::hal::{DevicePtr, Node, NodeId};
use crate::kernels::Ptr;

impl CapturedGraph {
    /// Every kernel node read back from the driver, in the chain's order.
    ///
    /// Errors: the nodes are not the chain's kernels (CAP-2), or a pointer lies in no buffer (ADDR-1): such a node must not run.
    pub fn recorded(&self) -> Result<Vec<Launch>> {
        let graph = self.graph();
        let mut launches = Vec::with_capacity(self.launches().len());
        for at in 0..graph.node_count()? as u32 {
            match graph.node(NodeId(at))? {
                Node::Kernel(node) => {
                    let (op, declared) = (self.chain().ops.get(launches.len()), self.modules().kernel(node.function));
                    let Some(op) = op.filter(|op| declared.is_some_and(|kernel| std::ptr::eq(kernel, op.kernel))) else {
                        return Err(broken("CAP-2", format!("node {at} is kernel {}, not the chain's", node.symbol)));
                    };
                    if node.args.len() != op.kernel.args.bytes {
                        return Err(broken("ADDR-1", format!("{}: {} bytes of arguments", op.label, node.args.len())));
                    }
                    for field in op.kernel.args.pointers() {
                        let (pointer, extent) = (field.pointer(&node.args), field.extent_bytes(&node.args));
                        let unused = pointer == Ptr::NULL && extent == 0;
                        if !unused && self.arena().ledger().resolve(DevicePtr(pointer.0), extent).is_none() {
                            return Err(broken("ADDR-1", format!("{}.{}: points into no buffer", op.label, field.name)));
                        }
                    }
                    launches.push(Launch { function: node.function, shape: node.shape, args: node.args.as_slice().into() });
                }
                Node::Empty => {}
                other => return Err(broken("CAP-1", format!("node {at} is {}", super::graph::what_it_is(&other)))),
            }
        }
        match launches.len() == self.launches().len() {
            true => Ok(launches),
            false => Err(broken("CAP-2", format!("{} kernels of {}", launches.len(), self.launches().len()))),
        }
    }
}

fn broken(id: &'static str, message: String) -> Error {
    Error::invariant(id, message).help("this graph cannot be taken apart: Executor::audit says what is wrong with it")
}

//! What the runtime says a graph's nodes hold.

#![expect(unsafe_code, reason = "calls the runtime, reads arguments that it holds")]

use std::collections::HashMap;
use std::mem::MaybeUninit;

use super::device::Core;
use super::status::call;
use super::table::{CopySide, GraphHandle, NodeHandle};
use super::version::NodeKind;
use crate::error::{Error, Result};
use crate::hal::topology;
use crate::hal::{DevicePtr, FunctionHandle, KernelNode, LaunchShape, Node, NodeId};

/// Nodes in recording order, and their dependencies.
#[derive(Default)]
pub(super) struct Nodes {
    pub handles: Vec<NodeHandle>,
    pub edges: Vec<(NodeId, NodeId)>,
}

impl Nodes {
    /// Asks the runtime.
    pub fn read(core: &Core, graph: GraphHandle) -> Result<Nodes> {
        let mut count = 0;
        // SAFETY: the graph is live; a null list asks for the count.
        unsafe { call!(core.table, "nodes", hipGraphGetNodes(graph, std::ptr::null_mut(), &mut count)) }?;
        let mut listed = vec![NodeHandle::NULL; count];
        if count > 0 {
            // SAFETY: the list has the size that the runtime asked for.
            unsafe { call!(core.table, "nodes", hipGraphGetNodes(graph, listed.as_mut_ptr(), &mut count)) }?;
        }
        let places: HashMap<NodeHandle, usize> = listed.iter().enumerate().map(|(at, &node)| (node, at)).collect();
        let unknown =
            || Error::device("edges: the runtime's edges and nodes contradict each other").help("report the runtime's version");
        let place = |node| places.get(&node).copied().ok_or_else(unknown);
        let edges = edges(core, graph)?;
        let edges = edges.into_iter().map(|(from, to)| Ok((place(from)?, place(to)?))).collect::<Result<Vec<_>>>()?;
        let order = topology::order(count, &edges).ok_or_else(unknown)?;
        let mut number = vec![NodeId(0); count];
        for (at, &place) in order.iter().enumerate() {
            number[place] = NodeId(at as u32);
        }
        let mut edges: Vec<_> = edges.into_iter().map(|(from, to)| (number[from], number[to])).collect();
        edges.sort();
        Ok(Nodes { handles: order.into_iter().map(|place| listed[place]).collect(), edges })
    }
}

fn edges(core: &Core, graph: GraphHandle) -> Result<Vec<(NodeHandle, NodeHandle)>> {
    let (none, mut count) = (std::ptr::null_mut(), 0);
    // SAFETY: the graph is live; null lists ask for the count.
    unsafe { call!(core.table, "edges", hipGraphGetEdges(graph, none, none, &mut count)) }?;
    let (mut from, mut to) = (vec![NodeHandle::NULL; count], vec![NodeHandle::NULL; count]);
    if count > 0 {
        // SAFETY: both lists have the size that the runtime asked for.
        unsafe { call!(core.table, "edges", hipGraphGetEdges(graph, from.as_mut_ptr(), to.as_mut_ptr(), &mut count)) }?;
    }
    Ok(from.into_iter().zip(to).collect())
}

/// What a node holds.
pub(super) fn what_it_holds(core: &Core, node: NodeHandle) -> Result<Node> {
    let mut kind = 0;
    // SAFETY: the node is of a live graph; the result has a place.
    unsafe { call!(core.table, "node", hipGraphNodeGetType(node, &mut kind)) }?;
    Ok(match core.version.node_kind(kind) {
        NodeKind::Kernel => Node::Kernel(kernel(core, node)?),
        NodeKind::Copy => copy(core, node)?,
        NodeKind::Fill => fill(core, node)?,
        NodeKind::Empty => Node::Empty,
        NodeKind::Other(kind) => Node::Other(kind),
    })
}

fn kernel(core: &Core, node: NodeHandle) -> Result<KernelNode> {
    let mut params = MaybeUninit::uninit();
    // SAFETY: a kernel node of a live graph; the result has a place, which is filled if the call succeeds.
    let params = unsafe {
        call!(core.table, "node", hipGraphKernelNodeGetParams(node, params.as_mut_ptr()))?;
        params.assume_init()
    };
    let shape = LaunchShape { grid: params.grid, workgroup: params.block, lds_bytes: params.shared_bytes };
    let function = FunctionHandle(params.function.0 as u64);
    // Code that others loaded has no known arguments.
    let Some(kernel) = core.kernels.find(params.function).filter(|_| !params.params.is_null()) else {
        return Ok(KernelNode { function, symbol: "?".to_owned(), shape, args: Vec::new() });
    };
    // SAFETY: the runtime keeps the node's one argument, whose size the kernel was looked up with.
    let args = unsafe { std::slice::from_raw_parts((*params.params).cast::<u8>(), kernel.args_bytes) }.to_vec();
    Ok(KernelNode { function, symbol: kernel.symbol.to_string(), shape, args })
}

fn copy(core: &Core, node: NodeHandle) -> Result<Node> {
    let mut params = MaybeUninit::uninit();
    // SAFETY: a copy node of a live graph; the result has a place, which is filled if the call succeeds.
    let params = unsafe {
        call!(core.table, "node", hipGraphMemcpyNodeGetParams(node, params.as_mut_ptr()))?;
        params.assume_init()
    };
    // An array holds no address; a copy of several rows is none that this crate records.
    if !params.src.array.is_null() || !params.dst.array.is_null() || params.height * params.depth > 1 {
        return Ok(Node::Other("copy of rows or arrays"));
    }
    // Some versions leave the description of a copy between two plain ranges empty.
    if params.width_bytes == 0 {
        return Ok(Node::Other("copy that the runtime does not describe"));
    }
    Ok(Node::Copy { dst: address(&params.dst), src: address(&params.src), bytes: params.width_bytes as u64 })
}

fn address(side: &CopySide) -> DevicePtr {
    DevicePtr(side.pointer as u64 + side.x_bytes as u64)
}

fn fill(core: &Core, node: NodeHandle) -> Result<Node> {
    let mut params = MaybeUninit::uninit();
    // SAFETY: a fill node of a live graph; the result has a place, which is filled if the call succeeds.
    let params = unsafe {
        call!(core.table, "node", hipGraphMemsetNodeGetParams(node, params.as_mut_ptr()))?;
        params.assume_init()
    };
    let bytes = params.value.to_le_bytes();
    let repeats = bytes.iter().take(params.element_bytes as usize).all(|&byte| byte == bytes[0]);
    if params.height > 1 || !repeats {
        return Ok(Node::Other("fill of rows or of a pattern"));
    }
    let size = params.width as u64 * u64::from(params.element_bytes);
    Ok(Node::Fill { dst: DevicePtr(params.dst as u64), byte: bytes[0], bytes: size })
}

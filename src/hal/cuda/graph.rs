//! Recorded graphs, read back from the driver, and launchable ones.

#![expect(unsafe_code, reason = "calls the driver, reads arguments that it holds")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::device::Core;
use super::dot;
use super::nodes::{self, Nodes};
use super::status::call;
use super::stream::CudaStream;
use super::table::{ExecHandle, GraphHandle};
use crate::error::{Error, Result};
use crate::hal::{Graph, GraphExec, Node, NodeId, Stream};

/// A recorded graph.
pub(super) struct CudaGraph {
    core: Arc<Core>,
    graph: GraphHandle,
    nodes: Nodes,
}

impl CudaGraph {
    /// Takes the graph over and reads which nodes it has.
    pub fn new(core: Arc<Core>, graph: GraphHandle) -> Result<CudaGraph> {
        let mut taken = CudaGraph { core, graph, nodes: Nodes::default() };
        taken.nodes = Nodes::read(&taken.core, graph)?;
        Ok(taken)
    }
}

impl Graph for CudaGraph {
    fn node_count(&self) -> Result<usize> {
        Ok(self.nodes.handles.len())
    }

    fn edges(&self) -> Result<Vec<(NodeId, NodeId)>> {
        Ok(self.nodes.edges.clone())
    }

    fn node(&self, id: NodeId) -> Result<Node> {
        self.core.enter()?;
        let node = self.nodes.handles.get(id.0 as usize).ok_or_else(|| {
            Error::device(format!("node: the graph has {} nodes, none numbered {}", self.nodes.handles.len(), id.0))
                .help("ask for numbers below node_count")
        })?;
        nodes::what_it_holds(&self.core, *node)
    }

    fn instantiate(&self) -> Result<Arc<dyn GraphExec>> {
        self.core.enter()?;
        let mut exec = ExecHandle::NULL;
        // SAFETY: the graph is live, and the result has a place.
        unsafe { call!(self.core.table, "instantiate", cuGraphInstantiateWithFlags(&mut exec, self.graph, 0)) }?;
        Ok(Arc::new(CudaExec { core: self.core.clone(), exec }))
    }

    fn native_dot(&self) -> Result<String> {
        self.core.enter()?;
        dot::native_dot(&self.core, self.graph)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; instances are their own.
        self.core.destroy("graph", |table| unsafe { (table.cuGraphDestroy)(self.graph) });
    }
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaGraph").field("nodes", &self.nodes.handles.len()).finish_non_exhaustive()
    }
}

/// A launchable graph.
pub(super) struct CudaExec {
    core: Arc<Core>,
    pub(super) exec: ExecHandle,
}

impl CudaExec {
    /// The instance as one of `core`'s device.
    pub fn of<'a>(exec: &'a dyn GraphExec, core: &Arc<Core>, call: &'static str) -> Result<&'a CudaExec> {
        exec.as_any().downcast_ref::<CudaExec>().filter(|exec| Arc::ptr_eq(&exec.core, core)).ok_or_else(|| {
            Error::device(format!("{call}: the graph is not of this device"))
                .help("launch a graph on the device it was captured on")
        })
    }
}

impl GraphExec for CudaExec {
    fn upload(&self, stream: &dyn Stream) -> Result<()> {
        self.core.enter()?;
        let stream = CudaStream::of(stream, &self.core, "upload")?;
        let Some(upload) = self.core.table.cuGraphUpload else { return Ok(()) };
        // SAFETY: both are live.
        unsafe { upload(self.exec, stream.stream) }.check(&self.core.table, "upload", "cuGraphUpload")
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaExec {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; the driver keeps what a queued launch still needs.
        self.core.destroy("graph instance", |table| unsafe { (table.cuGraphExecDestroy)(self.exec) });
    }
}

impl fmt::Debug for CudaExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaExec").finish_non_exhaustive()
    }
}

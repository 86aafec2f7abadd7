//! Recorded graphs, read back from the runtime, and launchable ones.

#![expect(unsafe_code, reason = "calls the runtime, reads arguments that it holds")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::device::Core;
use super::dot;
use super::nodes::{self, Nodes};
use super::status::call;
use super::stream::HipStream;
use super::table::{ExecHandle, GraphHandle};
use crate::error::{Error, Result};
use crate::hal::{Graph, GraphExec, Node, NodeId, Stream};

/// A recorded graph.
pub(super) struct HipGraph {
    core: Arc<Core>,
    graph: GraphHandle,
    nodes: Nodes,
}

impl HipGraph {
    /// Takes the graph over and reads which nodes it has.
    pub fn new(core: Arc<Core>, graph: GraphHandle) -> Result<HipGraph> {
        let mut taken = HipGraph { core, graph, nodes: Nodes::default() };
        taken.nodes = Nodes::read(&taken.core, graph)?;
        Ok(taken)
    }
}

impl Graph for HipGraph {
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
        unsafe {
            call!(
                self.core.table,
                "instantiate",
                hipGraphInstantiate(&mut exec, self.graph, std::ptr::null_mut(), std::ptr::null_mut(), 0)
            )
        }?;
        Ok(Arc::new(HipExec { core: self.core.clone(), exec }))
    }

    fn native_dot(&self) -> Result<String> {
        self.core.enter()?;
        dot::native_dot(&self.core, self.graph)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for HipGraph {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; instances are their own.
        self.core.destroy("graph", |table| unsafe { (table.hipGraphDestroy)(self.graph) });
    }
}

impl fmt::Debug for HipGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HipGraph").field("nodes", &self.nodes.handles.len()).finish_non_exhaustive()
    }
}

/// A launchable graph.
pub(super) struct HipExec {
    core: Arc<Core>,
    pub(super) exec: ExecHandle,
}

impl HipExec {
    /// The instance as one of `core`'s device.
    pub fn of<'a>(exec: &'a dyn GraphExec, core: &Arc<Core>, call: &'static str) -> Result<&'a HipExec> {
        exec.as_any().downcast_ref::<HipExec>().filter(|exec| Arc::ptr_eq(&exec.core, core)).ok_or_else(|| {
            Error::device(format!("{call}: the graph is not of this device"))
                .help("launch a graph on the device it was captured on")
        })
    }
}

impl GraphExec for HipExec {
    fn upload(&self, stream: &dyn Stream) -> Result<()> {
        self.core.enter()?;
        let stream = HipStream::of(stream, &self.core, "upload")?;
        let Some(upload) = self.core.table.hipGraphUpload else { return Ok(()) };
        // SAFETY: both are live.
        unsafe { upload(self.exec, stream.stream) }.check(&self.core.table, "upload", "hipGraphUpload")
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for HipExec {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; the runtime keeps what a queued launch still needs.
        self.core.destroy("graph instance", |table| unsafe { (table.hipGraphExecDestroy)(self.exec) });
    }
}

impl fmt::Debug for HipExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HipExec").finish_non_exhaustive()
    }
}

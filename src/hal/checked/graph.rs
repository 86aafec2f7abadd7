//! Graphs of a checked device: node numbers in range, and no launch of one whose kernels or copied memory are gone.

use std::any::Any;
use std::sync::Arc;

use super::broken;
use super::stream::CheckedStream;
use super::tables::Tables;
use crate::error::Result;
use crate::hal::{Graph, GraphExec, Node, NodeId, Stream};

#[derive(Debug)]
pub(super) struct CheckedGraph {
    inner: Arc<dyn Graph>,
    tables: Arc<Tables>,
}

impl CheckedGraph {
    pub(super) fn new(inner: Arc<dyn Graph>, tables: Arc<Tables>) -> CheckedGraph {
        CheckedGraph { inner, tables }
    }
}

impl Graph for CheckedGraph {
    fn node_count(&self) -> Result<usize> {
        self.inner.node_count()
    }

    fn edges(&self) -> Result<Vec<(NodeId, NodeId)>> {
        let (edges, count) = (self.inner.edges()?, self.inner.node_count()? as u32);
        match edges.iter().find(|(before, after)| before.0 >= count || after.0 >= count) {
            None => Ok(edges),
            Some(edge) => Err(broken("edges", format!("{edge:?} is no edge of a graph of {count} nodes"))),
        }
    }

    fn node(&self, id: NodeId) -> Result<Node> {
        let count = self.inner.node_count()?;
        if id.0 as usize >= count {
            return Err(broken("node", format!("{id:?} of a graph of {count} nodes")));
        }
        self.inner.node(id)
    }

    fn instantiate(&self) -> Result<Arc<dyn GraphExec>> {
        let count = self.inner.node_count()? as u32;
        let nodes = (0..count).map(|id| self.inner.node(NodeId(id))).collect::<Result<_>>()?;
        Ok(Arc::new(CheckedExec { inner: self.inner.instantiate()?, tables: self.tables.clone(), nodes }))
    }

    fn native_dot(&self) -> Result<String> {
        self.inner.native_dot()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Debug)]
pub(super) struct CheckedExec {
    pub(super) inner: Arc<dyn GraphExec>,
    tables: Arc<Tables>,
    nodes: Vec<Node>,
}

impl CheckedExec {
    pub(super) fn is_of(&self, tables: &Arc<Tables>) -> bool {
        Arc::ptr_eq(&self.tables, tables)
    }

    /// Kernels must still be loaded and copied ranges allocated. Pointers inside arguments are the checker's to resolve (ADDR-1):
    /// a device does not know which bytes of a struct they are.
    pub(super) fn check_alive(&self) -> Result<()> {
        for (at, node) in self.nodes.iter().enumerate() {
            let found = match node {
                Node::Kernel(kernel) => self.tables.check_launch(kernel.function, &kernel.shape, &kernel.args).map(drop),
                Node::Copy { dst, src, bytes } => self
                    .tables
                    .check_range("copy", "destination", *dst, *bytes)
                    .and_then(|()| self.tables.check_range("copy", "source", *src, *bytes)),
                Node::Fill { dst, bytes, .. } => self.tables.check_range("fill", "destination", *dst, *bytes),
                Node::Empty | Node::Other(_) => Ok(()),
            };
            found.map_err(|error| broken("launch_graph", format!("node {at}: {}", error.message())))?;
        }
        Ok(())
    }
}

impl GraphExec for CheckedExec {
    fn upload(&self, stream: &dyn Stream) -> Result<()> {
        match stream.as_any().downcast_ref::<CheckedStream>() {
            Some(stream) => self.inner.upload(&*stream.inner),
            None => Err(broken("upload", "the stream belongs to another device")),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

//! Graphs and their replays: a flat list of steps, arguments in one block, nothing looked up at launch.

#![expect(unsafe_code, reason = "runs recorded ops, copies and fills")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Shared;
use super::pool::{Lds, Pool};
use super::stream;
use crate::error::{Error, Result};
use crate::hal::record::{RecordedNode, Recording};
use crate::hal::{CpuKernel, DevicePtr, Graph, GraphExec, LaunchShape, Node, NodeId, Stream};

/// A recorded graph.
pub(super) struct CpuGraph {
    shared: Arc<Shared>,
    recording: Recording,
}

impl CpuGraph {
    pub fn new(shared: Arc<Shared>, recording: Recording) -> CpuGraph {
        CpuGraph { shared, recording }
    }
}

impl Graph for CpuGraph {
    fn node_count(&self) -> Result<usize> {
        Ok(self.recording.nodes.len())
    }

    fn edges(&self) -> Result<Vec<(NodeId, NodeId)>> {
        Ok(self.recording.edges.clone())
    }

    fn node(&self, id: NodeId) -> Result<Node> {
        self.recording.node(id)
    }

    fn instantiate(&self) -> Result<Arc<dyn GraphExec>> {
        let seed = self.shared.replay_seed.load(Ordering::Relaxed).checked_sub(1);
        let replay = Arc::new(Replay::new(&self.recording, seed));
        Ok(Arc::new(CpuGraphExec { shared: self.shared.clone(), replay }))
    }

    fn native_dot(&self) -> Result<String> {
        Ok(self.recording.dot())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for CpuGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuGraph").field("nodes", &self.recording.nodes.len()).finish_non_exhaustive()
    }
}

/// A launchable graph.
pub(super) struct CpuGraphExec {
    shared: Arc<Shared>,
    pub replay: Arc<Replay>,
}

impl CpuGraphExec {
    /// The exec behind a trait object, if it is this device's.
    pub fn of<'a>(exec: &'a dyn GraphExec, shared: &Arc<Shared>, call: &str) -> Result<&'a CpuGraphExec> {
        exec.as_any().downcast_ref::<CpuGraphExec>().filter(|exec| Arc::ptr_eq(&exec.shared, shared)).ok_or_else(|| {
            Error::device(format!("{call}: the graph is not of this device"))
                .help("launch a graph on the device it was captured on")
        })
    }

    /// Errs if a module that the graph calls into was unloaded.
    pub fn check_modules(&self) -> Result<()> {
        if self.replay.modules.iter().all(|loaded| loaded.load(Ordering::Acquire)) {
            return Ok(());
        }
        Err(Error::device("launch_graph: a module that the graph was captured with was unloaded")
            .call("launch_graph", 98, "")
            .help("keep modules alive as long as graphs that call them"))
    }
}

impl GraphExec for CpuGraphExec {
    /// Nothing to do: a replay needs no device memory of its own.
    fn upload(&self, _stream: &dyn Stream) -> Result<()> {
        self.check_modules()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for CpuGraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuGraphExec").field("steps", &self.replay.steps.len()).finish_non_exhaustive()
    }
}

/// What a launch runs: nodes in an order their edges allow.
pub(super) struct Replay {
    steps: Vec<Step>,
    /// Arguments of all kernels, each 16-byte aligned.
    args: Vec<u128>,
    /// Whether each module that the graph calls into is loaded.
    modules: Vec<Arc<AtomicBool>>,
}

enum Step {
    Kernel { kernel: CpuKernel, shape: LaunchShape, args_at: usize },
    Copy { dst: DevicePtr, src: DevicePtr, bytes: u64 },
    Fill { dst: DevicePtr, byte: u8, bytes: u64 },
}

impl Replay {
    fn new(recording: &Recording, seed: Option<u64>) -> Replay {
        let mut replay =
            Replay { steps: Vec::with_capacity(recording.nodes.len()), args: Vec::new(), modules: recording.modules() };
        for id in recording.order(seed) {
            let step = match &recording.nodes[id as usize] {
                RecordedNode::Kernel { function, shape, args, .. } => {
                    Step::Kernel { kernel: function.kernel, shape: *shape, args_at: replay.push_args(args) }
                }
                &RecordedNode::Copy { dst, src, bytes } => Step::Copy { dst, src, bytes },
                &RecordedNode::Fill { dst, byte, bytes } => Step::Fill { dst, byte, bytes },
            };
            replay.steps.push(step);
        }
        replay
    }

    fn push_args(&mut self, args: &[u8]) -> usize {
        let at = self.args.len();
        self.args.resize(at + args.len().div_ceil(16), 0);
        bytemuck::cast_slice_mut::<u128, u8>(&mut self.args[at..])[..args.len()].copy_from_slice(args);
        at
    }

    /// Runs every step; `Err` names the kernel that panicked.
    ///
    /// # Safety
    /// Everything the graph was recorded against is alive and unmoved (ADDR-2).
    pub unsafe fn run(&self, pool: &Pool, lds: &mut Lds) -> Result<(), String> {
        for step in &self.steps {
            match step {
                Step::Kernel { kernel, shape, args_at } => {
                    let args = &bytemuck::cast_slice::<u128, u8>(&self.args[*args_at..])[..kernel.args_bytes];
                    // SAFETY: the caller's contract, and whoever recorded the launch answered for its pointers (ADDR-1).
                    unsafe { pool.run(kernel.op, shape, args, lds) }
                        .map_err(|panic| format!("kernel {} panicked in a replay: {panic}", kernel.symbol))?;
                }
                // SAFETY: as above, for both ranges.
                Step::Copy { dst, src, bytes } => unsafe { stream::copy(*dst, *src, *bytes) },
                // SAFETY: as above, for the range.
                Step::Fill { dst, byte, bytes } => unsafe { stream::fill(*dst, *byte, *bytes) },
            }
        }
        Ok(())
    }
}

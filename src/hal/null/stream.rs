//! Streams, events and graphs that record and count.

#![expect(unsafe_code, reason = "implements unsafe methods of Stream")]

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::Shared;
use crate::error::{Error, Result};
use crate::hal::record::{CapturedPoint, RecordedNode, Recording, StreamCapture};
use crate::hal::{
    CaptureMode, CaptureStatus, DevicePtr, Event, FunctionHandle, Graph, GraphExec, LaunchShape, Node, NodeId, Stream,
};

/// A stream of the null device: always idle.
pub(super) struct NullStream {
    shared: Arc<Shared>,
    capture: StreamCapture,
}

impl NullStream {
    pub fn new(shared: Arc<Shared>) -> NullStream {
        let capture = StreamCapture::new(shared.recorder.clone());
        NullStream { shared, capture }
    }

    fn record_or_count(&self, call: &'static str, node: impl FnOnce() -> RecordedNode) -> Result<()> {
        if !self.capture.record_node(call, node)? {
            self.shared.launches.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Stream for NullStream {
    unsafe fn launch(&self, function: FunctionHandle, shape: &LaunchShape, args: &[u8]) -> Result<()> {
        let resolved = self.shared.functions.resolve(function, shape, args)?;
        self.record_or_count("launch", || RecordedNode::Kernel {
            handle: function,
            function: resolved,
            shape: *shape,
            args: args.into(),
        })
    }

    unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        self.record_or_count("copy", || RecordedNode::Copy { dst, src, bytes })
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: u64) -> Result<()> {
        self.record_or_count("fill", || RecordedNode::Fill { dst, byte, bytes })
    }

    unsafe fn write(&self, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.capture.forbid("write")?;
        self.shared.memory.write(dst, bytes);
        Ok(())
    }

    unsafe fn read(&self, src: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        self.capture.forbid("read")?;
        self.shared.memory.read(src, bytes)
    }

    fn record(&self, event: &dyn Event) -> Result<()> {
        let event = NullEvent::of(event, &self.shared, "record")?;
        if !self.capture.record_event(&event.captured)? {
            event.captured.clear();
            *event.passed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        Ok(())
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        let event = NullEvent::of(event, &self.shared, "wait")?;
        self.capture.wait_event(&event.captured).map(|_| ())
    }

    fn synchronize(&self) -> Result<()> {
        self.capture.forbid("synchronize")
    }

    fn query(&self) -> Result<bool> {
        self.capture.forbid("query").map(|()| true)
    }

    fn begin_capture(&self, mode: CaptureMode) -> Result<()> {
        self.capture.begin(mode)
    }

    fn end_capture(&self) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(NullGraph { shared: self.shared.clone(), recording: self.capture.end()? }))
    }

    fn capture_status(&self) -> Result<CaptureStatus> {
        Ok(self.capture.status())
    }

    unsafe fn launch_graph(&self, exec: &dyn GraphExec) -> Result<()> {
        self.capture.forbid("launch_graph")?;
        let exec = exec.as_any().downcast_ref::<NullGraphExec>().filter(|exec| Arc::ptr_eq(&exec.shared, &self.shared));
        let exec = exec.ok_or_else(|| {
            Error::device("launch_graph: the graph is not of this device").help("launch a graph on the device it was captured on")
        })?;
        exec.check_modules()?;
        self.shared.replays.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for NullStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullStream").finish_non_exhaustive()
    }
}

/// An event of the null device: passes the moment it is recorded, which is also its time.
pub(super) struct NullEvent {
    shared: Arc<Shared>,
    captured: CapturedPoint,
    timing: bool,
    passed: Mutex<Option<Instant>>,
}

impl NullEvent {
    pub fn new(shared: Arc<Shared>, timing: bool) -> NullEvent {
        NullEvent { shared, captured: CapturedPoint::default(), timing, passed: Mutex::default() }
    }

    fn of<'a>(event: &'a dyn Event, shared: &Arc<Shared>, call: &str) -> Result<&'a NullEvent> {
        event.as_any().downcast_ref::<NullEvent>().filter(|event| Arc::ptr_eq(&event.shared, shared)).ok_or_else(|| {
            Error::device(format!("{call}: the event is not of this device")).help("create events on the device that uses them")
        })
    }

    fn time(&self) -> Result<Instant> {
        if !self.timing {
            return Err(Error::device("seconds_since: the event was created without timing").help("create it with timing = true"));
        }
        self.captured.forbid("seconds_since")?;
        let passed = *self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        passed.ok_or_else(|| {
            Error::device("seconds_since: the event has not passed").call("seconds_since", 600, "").help("record it first")
        })
    }
}

impl Event for NullEvent {
    fn query(&self) -> Result<bool> {
        self.captured.forbid("event query").map(|()| true)
    }

    fn synchronize(&self) -> Result<()> {
        self.captured.forbid("event synchronize")
    }

    fn seconds_since(&self, earlier: &dyn Event) -> Result<f64> {
        let (end, start) = (self.time()?, NullEvent::of(earlier, &self.shared, "seconds_since")?.time()?);
        Ok(match end.checked_duration_since(start) {
            Some(later) => later.as_secs_f64(),
            None => -start.duration_since(end).as_secs_f64(),
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for NullEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullEvent").field("timing", &self.timing).finish_non_exhaustive()
    }
}

struct NullGraph {
    shared: Arc<Shared>,
    recording: Recording,
}

impl Graph for NullGraph {
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
        Ok(Arc::new(NullGraphExec { shared: self.shared.clone(), modules: self.recording.modules() }))
    }

    fn native_dot(&self) -> Result<String> {
        Ok(self.recording.dot())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for NullGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullGraph").field("nodes", &self.recording.nodes.len()).finish_non_exhaustive()
    }
}

struct NullGraphExec {
    shared: Arc<Shared>,
    modules: Vec<Arc<AtomicBool>>,
}

impl NullGraphExec {
    fn check_modules(&self) -> Result<()> {
        if self.modules.iter().all(|loaded| loaded.load(Ordering::Acquire)) {
            return Ok(());
        }
        Err(Error::device("launch_graph: a module that the graph was captured with was unloaded")
            .call("launch_graph", 98, "")
            .help("keep modules alive as long as graphs that call them"))
    }
}

impl GraphExec for NullGraphExec {
    fn upload(&self, _stream: &dyn Stream) -> Result<()> {
        self.check_modules()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for NullGraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullGraphExec").finish_non_exhaustive()
    }
}

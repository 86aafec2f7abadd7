//! Streams and events of a checked device.

#![expect(unsafe_code, reason = "forwards unsafe calls whose contracts were checked")]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::broken;
use super::graph::{CheckedExec, CheckedGraph};
use super::tables::{Tables, forbidden};
use crate::error::Result;
use crate::hal::{CaptureMode, CaptureStatus, DevicePtr, Event, FunctionHandle, Graph, GraphExec, LaunchShape, Stream};

#[derive(Debug)]
pub(super) struct CheckedStream {
    pub(super) inner: Arc<dyn Stream>,
    tables: Arc<Tables>,
    id: u64,
}

impl CheckedStream {
    pub(super) fn new(inner: Arc<dyn Stream>, tables: Arc<Tables>) -> CheckedStream {
        CheckedStream { id: tables.next_id(), inner, tables }
    }

    /// Waiting for a stream that records waits for work that never runs.
    fn forbid_own_capture(&self, call: &'static str) -> Result<()> {
        match self.tables.capture_of(self.id) {
            Some(capture) => Err(forbidden(call, self.id, &capture)),
            None if self.inner.capture_status()? != CaptureStatus::None => {
                Err(broken(call, "the stream joined another stream's capture, where this call is forbidden"))
            }
            None => Ok(()),
        }
    }

    fn event<'a>(&self, call: &'static str, event: &'a dyn Event) -> Result<&'a CheckedEvent> {
        match event.as_any().downcast_ref::<CheckedEvent>() {
            Some(event) if Arc::ptr_eq(&event.tables, &self.tables) => Ok(event),
            _ => Err(broken(call, "the event belongs to another device")),
        }
    }
}

impl Stream for CheckedStream {
    unsafe fn launch(&self, function: FunctionHandle, shape: &LaunchShape, args: &[u8]) -> Result<()> {
        let symbol = self.tables.check_launch(function, shape, args)?;
        // SAFETY: the caller's promise for the pointers; kernel, size and shape were checked.
        unsafe { self.inner.launch(function, shape, args) }?;
        self.tables.recorded(self.id, symbol);
        Ok(())
    }

    unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        self.tables.check_range("copy", "destination", dst, bytes)?;
        self.tables.check_range("copy", "source", src, bytes)?;
        if dst.0 < src.0.saturating_add(bytes) && src.0 < dst.0.saturating_add(bytes) && bytes > 0 {
            return Err(broken("copy", "source and destination overlap"));
        }
        // SAFETY: both ranges lie in live allocations.
        unsafe { self.inner.copy(dst, src, bytes) }
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: u64) -> Result<()> {
        self.tables.check_range("fill", "destination", dst, bytes)?;
        // SAFETY: the range lies in a live allocation.
        unsafe { self.inner.fill(dst, byte, bytes) }
    }

    unsafe fn write(&self, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.forbid_own_capture("write")?;
        self.tables.forbid_in_capture("write")?;
        self.tables.check_range("write", "destination", dst, bytes.len() as u64)?;
        // SAFETY: the range lies in a live allocation.
        unsafe { self.inner.write(dst, bytes) }
    }

    unsafe fn read(&self, src: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        self.forbid_own_capture("read")?;
        self.tables.forbid_in_capture("read")?;
        self.tables.check_range("read", "source", src, bytes.len() as u64)?;
        // SAFETY: the range lies in a live allocation.
        unsafe { self.inner.read(src, bytes) }
    }

    fn record(&self, event: &dyn Event) -> Result<()> {
        let event = self.event("record", event)?;
        self.inner.record(&*event.inner)?;
        event.recorded.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        self.inner.wait(&*self.event("wait", event)?.inner)
    }

    fn synchronize(&self) -> Result<()> {
        self.forbid_own_capture("synchronize")?;
        self.inner.synchronize()
    }

    fn query(&self) -> Result<bool> {
        self.forbid_own_capture("query")?;
        self.inner.query()
    }

    fn begin_capture(&self, mode: CaptureMode) -> Result<()> {
        if let Some(capture) = self.tables.capture_of(self.id) {
            return Err(forbidden("begin_capture", self.id, &capture));
        }
        self.inner.begin_capture(mode)?;
        self.tables.begin_capture(self.id, mode);
        Ok(())
    }

    fn end_capture(&self) -> Result<Arc<dyn Graph>> {
        if self.tables.end_capture(self.id).is_none() {
            return Err(broken("end_capture", format!("stream {} began no capture", self.id)));
        }
        Ok(Arc::new(CheckedGraph::new(self.inner.end_capture()?, self.tables.clone())))
    }

    fn capture_status(&self) -> Result<CaptureStatus> {
        self.inner.capture_status()
    }

    unsafe fn launch_graph(&self, exec: &dyn GraphExec) -> Result<()> {
        let exec = match exec.as_any().downcast_ref::<CheckedExec>() {
            Some(exec) if exec.is_of(&self.tables) => exec,
            _ => return Err(broken("launch_graph", "the graph was instantiated on another device")),
        };
        if let Some(capture) = self.tables.capture_of(self.id) {
            return Err(forbidden("launch_graph", self.id, &capture));
        }
        exec.check_alive()?;
        // SAFETY: the caller's promise; every kernel and copied range of the graph is still alive.
        unsafe { self.inner.launch_graph(&*exec.inner) }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CheckedStream {
    fn drop(&mut self) {
        self.tables.end_capture(self.id);
    }
}

#[derive(Debug)]
pub(super) struct CheckedEvent {
    inner: Arc<dyn Event>,
    tables: Arc<Tables>,
    timing: bool,
    recorded: AtomicBool,
}

impl CheckedEvent {
    pub(super) fn new(inner: Arc<dyn Event>, tables: Arc<Tables>, timing: bool) -> CheckedEvent {
        CheckedEvent { inner, tables, timing, recorded: AtomicBool::new(false) }
    }
}

impl Event for CheckedEvent {
    fn query(&self) -> Result<bool> {
        self.inner.query()
    }

    fn synchronize(&self) -> Result<()> {
        self.tables.forbid_in_capture("event synchronize")?;
        self.inner.synchronize()
    }

    fn seconds_since(&self, earlier: &dyn Event) -> Result<f64> {
        let Some(earlier) = earlier.as_any().downcast_ref::<CheckedEvent>() else {
            return Err(broken("seconds_since", "the earlier event belongs to another device"));
        };
        for (name, event) in [("this", self), ("the earlier", earlier)] {
            if !event.timing {
                return Err(broken("seconds_since", format!("{name} event was created without timing")));
            }
            if !event.recorded.load(Ordering::Relaxed) || !event.inner.query()? {
                return Err(broken("seconds_since", format!("{name} event has not passed")));
            }
        }
        self.inner.seconds_since(&*earlier.inner)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

//! Streams: launches, copies, captures and replays.

#![expect(unsafe_code, reason = "calls the runtime; implements unsafe methods of Stream")]

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::Arc;

use super::device::Core;
use super::event::HipEvent;
use super::graph::{HipExec, HipGraph};
use super::status::call;
use super::table::{Function, GraphHandle, Pointer, StreamHandle, flag};
use crate::error::{Error, Result};
use crate::hal::{CaptureMode, CaptureStatus, DevicePtr, Event, FunctionHandle, Graph, GraphExec, LaunchShape, Stream};

/// A stream that does not wait for the legacy default one.
pub(super) struct HipStream {
    core: Arc<Core>,
    pub(super) stream: StreamHandle,
}

impl HipStream {
    pub fn new(core: Arc<Core>) -> Result<HipStream> {
        core.enter()?;
        let mut stream = StreamHandle::NULL;
        // SAFETY: the result has a place.
        unsafe { call!(core.table, "create_stream", hipStreamCreateWithFlags(&mut stream, flag::STREAM_NON_BLOCKING)) }?;
        Ok(HipStream { core, stream })
    }

    /// The stream as one of `core`'s device.
    pub fn of<'a>(stream: &'a dyn Stream, core: &Arc<Core>, call: &'static str) -> Result<&'a HipStream> {
        stream.as_any().downcast_ref::<HipStream>().filter(|stream| Arc::ptr_eq(&stream.core, core)).ok_or_else(|| {
            Error::device(format!("{call}: the stream is not of this device")).help("use a stream of the graph's own device")
        })
    }

    /// Refuses a copy that waits while the stream captures. the runtime would record the copy and, at the wait, invalidate; here
    /// the wait comes first, so that nothing is recorded.
    fn forbid_in_capture(&self) -> Result<()> {
        if self.capture_status()? == CaptureStatus::None { Ok(()) } else { self.synchronize() }
    }
}

fn address(ptr: DevicePtr) -> Pointer {
    ptr.0 as Pointer
}

impl Stream for HipStream {
    unsafe fn launch(&self, function: FunctionHandle, shape: &LaunchShape, args: &[u8]) -> Result<()> {
        self.core.enter()?;
        let function = Function(function.0 as *mut c_void);
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.workgroup);
        let mut params = [args.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the function is loaded and takes one argument of this size (the caller's word), which the runtime copies.
        unsafe {
            call!(
                self.core.table,
                "launch",
                hipModuleLaunchKernel(
                    function,
                    gx,
                    gy,
                    gz,
                    bx,
                    by,
                    bz,
                    shape.lds_bytes,
                    self.stream,
                    params.as_mut_ptr(),
                    std::ptr::null_mut()
                )
            )
        }
    }

    unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        self.core.enter()?;
        // SAFETY: the caller's word for both ranges.
        unsafe {
            call!(
                self.core.table,
                "copy",
                hipMemcpyAsync(address(dst), address(src), bytes as usize, flag::COPY_DEFAULT, self.stream)
            )
        }
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: u64) -> Result<()> {
        self.core.enter()?;
        // SAFETY: the caller's word for the range.
        unsafe { call!(self.core.table, "fill", hipMemsetAsync(address(dst), byte.into(), bytes as usize, self.stream)) }
    }

    unsafe fn write(&self, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.core.enter()?;
        self.forbid_in_capture()?;
        let src = bytes.as_ptr().cast();
        // SAFETY: the caller's word for the device's range; the host's is waited for below.
        unsafe {
            call!(self.core.table, "write", hipMemcpyAsync(address(dst), src, bytes.len(), flag::COPY_DEFAULT, self.stream))
        }?;
        self.synchronize()
    }

    unsafe fn read(&self, src: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        self.core.enter()?;
        self.forbid_in_capture()?;
        let dst = bytes.as_mut_ptr().cast();
        // SAFETY: the caller's word for the device's range; the host's is waited for below.
        unsafe {
            call!(self.core.table, "read", hipMemcpyAsync(dst, address(src), bytes.len(), flag::COPY_DEFAULT, self.stream))
        }?;
        self.synchronize()
    }

    fn record(&self, event: &dyn Event) -> Result<()> {
        self.core.enter()?;
        let event = HipEvent::of(event, &self.core, "record")?;
        // SAFETY: both are live.
        unsafe { call!(self.core.table, "record", hipEventRecord(event.event, self.stream)) }
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        self.core.enter()?;
        let event = HipEvent::of(event, &self.core, "wait")?;
        // SAFETY: both are live.
        unsafe { call!(self.core.table, "wait", hipStreamWaitEvent(self.stream, event.event, 0)) }
    }

    fn synchronize(&self) -> Result<()> {
        self.core.enter()?;
        // SAFETY: the stream is live.
        unsafe { call!(self.core.table, "synchronize", hipStreamSynchronize(self.stream)) }
    }

    fn query(&self) -> Result<bool> {
        self.core.enter()?;
        let table = &self.core.table;
        // SAFETY: the stream is live.
        unsafe { (table.hipStreamQuery)(self.stream) }.ready(table, "query", "hipStreamQuery")
    }

    fn begin_capture(&self, mode: CaptureMode) -> Result<()> {
        self.core.enter()?;
        let mode: c_int = match mode {
            CaptureMode::Global => 0,
            CaptureMode::ThreadLocal => 1,
            CaptureMode::Relaxed => 2,
        };
        // SAFETY: the stream is live.
        unsafe { call!(self.core.table, "begin_capture", hipStreamBeginCapture(self.stream, mode)) }
    }

    fn end_capture(&self) -> Result<Arc<dyn Graph>> {
        self.core.enter()?;
        let mut graph = GraphHandle::NULL;
        // SAFETY: the stream is live, and the result has a place.
        unsafe { call!(self.core.table, "end_capture", hipStreamEndCapture(self.stream, &mut graph)) }?;
        Ok(Arc::new(HipGraph::new(self.core.clone(), graph)?))
    }

    fn capture_status(&self) -> Result<CaptureStatus> {
        self.core.enter()?;
        let mut status = 0;
        // SAFETY: the stream is live, and the result has a place.
        unsafe { call!(self.core.table, "capture_status", hipStreamIsCapturing(self.stream, &mut status)) }?;
        match status {
            0 => Ok(CaptureStatus::None),
            1 => Ok(CaptureStatus::Active),
            2 => Ok(CaptureStatus::Invalidated),
            other => Err(Error::device(format!("capture_status: {other} is no state that this version knows"))
                .call("hipStreamIsCapturing", 0, "")
                .help("report the runtime's version")),
        }
    }

    unsafe fn launch_graph(&self, exec: &dyn GraphExec) -> Result<()> {
        self.core.enter()?;
        let exec = HipExec::of(exec, &self.core, "launch_graph")?;
        // SAFETY: the caller's word for everything that the graph points at.
        unsafe { call!(self.core.table, "launch_graph", hipGraphLaunch(exec.exec, self.stream)) }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for HipStream {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; the runtime finishes what is queued first.
        self.core.destroy("stream", |table| unsafe { (table.hipStreamDestroy)(self.stream) });
    }
}

impl fmt::Debug for HipStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HipStream").finish_non_exhaustive()
    }
}

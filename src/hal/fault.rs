//! A device that fails the n-th call, over any other: what a test walks to see that every failure ends well.
//!
//! Every call of every trait counts, in the order it is made, but for [`Device::info`] and [`Device::free`] (freeing is how
//! others clean up after a failure). The failed call does nothing; all others go through.

#![expect(unsafe_code, reason = "forwards unsafe calls under the caller's promise")]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

/// Which call fails.
#[derive(Debug, Default)]
pub struct Fault {
    calls: AtomicU64,
    fail_at: AtomicU64,
}

impl Fault {
    /// No call fails until [`Fault::fail_at`].
    pub fn new() -> Arc<Fault> {
        Arc::default()
    }

    /// Counts from zero again and fails call `number`, from 1; 0 fails none.
    pub fn fail_at(&self, number: u64) {
        self.calls.store(0, Ordering::SeqCst);
        self.fail_at.store(number, Ordering::SeqCst);
    }

    /// Calls since the last [`Fault::fail_at`].
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    fn pass(&self, call: &'static str) -> Result<()> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        if number != self.fail_at.load(Ordering::SeqCst) {
            return Ok(());
        }
        let error = match call {
            "allocate" => Error::memory(format!("{call}: out of memory by request")),
            _ => Error::device(format!("{call}: failed by request")),
        };
        Err(error.call(call, 999, format!("call {number}")).help("this device fails a call on purpose"))
    }
}

/// The device.
#[derive(Debug)]
pub struct FaultDevice {
    inner: Arc<dyn Device>,
    fault: Arc<Fault>,
}

impl FaultDevice {
    /// Wraps `inner`; `fault` says which call fails.
    pub fn wrap(inner: Arc<dyn Device>, fault: Arc<Fault>) -> Arc<dyn Device> {
        Arc::new(FaultDevice { inner, fault })
    }
}

#[derive(Debug)]
struct FaultStream {
    inner: Arc<dyn Stream>,
    fault: Arc<Fault>,
}

#[derive(Debug)]
struct FaultEvent {
    inner: Arc<dyn Event>,
    fault: Arc<Fault>,
}

#[derive(Debug)]
struct FaultModule {
    inner: Arc<dyn Module>,
    fault: Arc<Fault>,
}

#[derive(Debug)]
struct FaultGraph {
    inner: Arc<dyn Graph>,
    fault: Arc<Fault>,
}

#[derive(Debug)]
struct FaultExec {
    inner: Arc<dyn GraphExec>,
    fault: Arc<Fault>,
}

/// The inner object behind a wrapper of this device; itself if it is none, for the inner device to judge.
fn event(event: &dyn Event) -> &dyn Event {
    event.as_any().downcast_ref::<FaultEvent>().map_or(event, |event| &*event.inner)
}

fn exec(exec: &dyn GraphExec) -> &dyn GraphExec {
    exec.as_any().downcast_ref::<FaultExec>().map_or(exec, |exec| &*exec.inner)
}

fn stream(stream: &dyn Stream) -> &dyn Stream {
    stream.as_any().downcast_ref::<FaultStream>().map_or(stream, |stream| &*stream.inner)
}

impl Device for FaultDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn memory(&self) -> Result<MemoryInfo> {
        self.fault.pass("memory")?;
        self.inner.memory()
    }
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        self.fault.pass("allocate")?;
        self.inner.allocate(kind, bytes)
    }
    unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.free(allocation) }
    }
    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        self.fault.pass("create_stream")?;
        Ok(Arc::new(FaultStream { inner: self.inner.create_stream()?, fault: self.fault.clone() }))
    }
    fn create_event(&self, timing: bool) -> Result<Arc<dyn Event>> {
        self.fault.pass("create_event")?;
        Ok(Arc::new(FaultEvent { inner: self.inner.create_event(timing)?, fault: self.fault.clone() }))
    }
    fn load_module(&self, image: ModuleImage<'_>) -> Result<Arc<dyn Module>> {
        self.fault.pass("load_module")?;
        Ok(Arc::new(FaultModule { inner: self.inner.load_module(image)?, fault: self.fault.clone() }))
    }
    fn synchronize(&self) -> Result<()> {
        self.fault.pass("device synchronize")?;
        self.inner.synchronize()
    }
    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        self.fault.pass("ipc_export")?;
        self.inner.ipc_export(allocation)
    }
    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.fault.pass("ipc_open")?;
        self.inner.ipc_open(handle)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Stream for FaultStream {
    unsafe fn launch(&self, function: FunctionHandle, shape: &LaunchShape, args: &[u8]) -> Result<()> {
        self.fault.pass("launch")?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.launch(function, shape, args) }
    }
    unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        self.fault.pass("copy")?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy(dst, src, bytes) }
    }
    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: u64) -> Result<()> {
        self.fault.pass("fill")?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.fill(dst, byte, bytes) }
    }
    unsafe fn write(&self, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.fault.pass("write")?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.write(dst, bytes) }
    }
    unsafe fn read(&self, src: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        self.fault.pass("read")?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.read(src, bytes) }
    }
    fn record(&self, at: &dyn Event) -> Result<()> {
        self.fault.pass("record")?;
        self.inner.record(event(at))
    }
    fn wait(&self, at: &dyn Event) -> Result<()> {
        self.fault.pass("wait")?;
        self.inner.wait(event(at))
    }
    fn synchronize(&self) -> Result<()> {
        self.fault.pass("synchronize")?;
        self.inner.synchronize()
    }
    fn query(&self) -> Result<bool> {
        self.fault.pass("query")?;
        self.inner.query()
    }
    fn begin_capture(&self, mode: CaptureMode) -> Result<()> {
        self.fault.pass("begin_capture")?;
        self.inner.begin_capture(mode)
    }
    fn end_capture(&self) -> Result<Arc<dyn Graph>> {
        // The capture ends even where the call fails, as it does on GPUs: a stream that records for ever is of no use.
        let graph = self.inner.end_capture();
        self.fault.pass("end_capture")?;
        Ok(Arc::new(FaultGraph { inner: graph?, fault: self.fault.clone() }))
    }
    fn capture_status(&self) -> Result<CaptureStatus> {
        self.fault.pass("capture_status")?;
        self.inner.capture_status()
    }
    unsafe fn launch_graph(&self, graph: &dyn GraphExec) -> Result<()> {
        self.fault.pass("launch_graph")?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.launch_graph(exec(graph)) }
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Event for FaultEvent {
    fn query(&self) -> Result<bool> {
        self.fault.pass("event query")?;
        self.inner.query()
    }
    fn synchronize(&self) -> Result<()> {
        self.fault.pass("event synchronize")?;
        self.inner.synchronize()
    }
    fn seconds_since(&self, earlier: &dyn Event) -> Result<f64> {
        self.fault.pass("seconds_since")?;
        self.inner.seconds_since(event(earlier))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Module for FaultModule {
    fn function(&self, symbol: &str, args_bytes: usize) -> Result<FunctionHandle> {
        self.fault.pass("function")?;
        self.inner.function(symbol, args_bytes)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Graph for FaultGraph {
    fn node_count(&self) -> Result<usize> {
        self.fault.pass("node_count")?;
        self.inner.node_count()
    }
    fn edges(&self) -> Result<Vec<(NodeId, NodeId)>> {
        self.fault.pass("edges")?;
        self.inner.edges()
    }
    fn node(&self, id: NodeId) -> Result<Node> {
        self.fault.pass("node")?;
        self.inner.node(id)
    }
    fn instantiate(&self) -> Result<Arc<dyn GraphExec>> {
        self.fault.pass("instantiate")?;
        Ok(Arc::new(FaultExec { inner: self.inner.instantiate()?, fault: self.fault.clone() }))
    }
    fn native_dot(&self) -> Result<String> {
        self.fault.pass("native_dot")?;
        self.inner.native_dot()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl GraphExec for FaultExec {
    fn upload(&self, on: &dyn Stream) -> Result<()> {
        self.fault.pass("upload")?;
        self.inner.upload(stream(on))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

//! A device that lies: wraps another, and changes what the runtime hears of its graphs or slips calls in between.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use capstan::Result;
use capstan::hal::{
    Allocation, CaptureMode, CaptureStatus, Device, DeviceInfo, DevicePtr, Event, FunctionHandle, Graph, GraphExec, IpcHandle,
    LaunchShape, MemoryInfo, MemoryKind, Module, ModuleImage, Node, NodeId, Stream,
};

/// What an open capture window looks like to a call that is slipped in.
pub struct Window<'a> {
    pub device: &'a Arc<dyn Device>,
    pub stream: &'a dyn Stream,
}

type NodeLie = Arc<dyn Fn(&dyn Graph, NodeId) -> Result<Node> + Send + Sync>;
type CountLie = Arc<dyn Fn(usize) -> Result<usize> + Send + Sync>;
type EdgeLie = Arc<dyn Fn(Vec<(NodeId, NodeId)>) -> Result<Vec<(NodeId, NodeId)>> + Send + Sync>;
type WindowLie = Arc<dyn Fn(&Window<'_>) + Send + Sync>;
type RecordLie = Arc<dyn Fn(usize, &[u8]) -> Vec<u8> + Send + Sync>;
type LaunchLie = Arc<dyn Fn() + Send + Sync>;

/// The lies of the moment; none by default.
#[derive(Clone, Default)]
pub struct Lies {
    pub node: Option<NodeLie>,
    pub count: Option<CountLie>,
    pub edges: Option<EdgeLie>,
    /// Called before the third launch of every capture.
    pub window: Option<WindowLie>,
    /// Called before every replay.
    pub replay: Option<LaunchLie>,
    /// Called after every replay was queued.
    pub replayed: Option<LaunchLie>,
    /// What a capture records instead of the arguments of its n-th launch.
    pub record: Option<RecordLie>,
}

/// The lying device. Clones share their lies.
#[derive(Clone)]
pub struct Liar {
    inner: Arc<dyn Device>,
    lies: Arc<Mutex<Lies>>,
}

impl Liar {
    pub fn new(inner: Arc<dyn Device>) -> Liar {
        Liar { inner, lies: Arc::default() }
    }

    /// Changes what it lies about from now on.
    pub fn lie(&self, lies: Lies) {
        *self.lies.lock().unwrap() = lies;
    }

    fn lies(&self) -> Lies {
        self.lies.lock().unwrap().clone()
    }
}

impl fmt::Debug for Liar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Liar")
    }
}

impl Device for Liar {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn memory(&self) -> Result<MemoryInfo> {
        self.inner.memory()
    }
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        self.inner.allocate(kind, bytes)
    }
    unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        // SAFETY: the caller's contract (SEAL-1).
        unsafe { self.inner.free(allocation) }
    }
    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(LyingStream { device: self.clone(), inner: self.inner.create_stream()?, launches: AtomicUsize::new(0) }))
    }
    fn create_event(&self, timing: bool) -> Result<Arc<dyn Event>> {
        self.inner.create_event(timing)
    }
    fn load_module(&self, image: ModuleImage<'_>) -> Result<Arc<dyn Module>> {
        self.inner.load_module(image)
    }
    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }
    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        self.inner.ipc_export(allocation)
    }
    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.inner.ipc_open(handle)
    }
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}

struct LyingStream {
    device: Liar,
    inner: Arc<dyn Stream>,
    /// Launches since the last begin_capture.
    launches: AtomicUsize,
}

impl fmt::Debug for LyingStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LyingStream")
    }
}

impl Stream for LyingStream {
    unsafe fn launch(&self, function: FunctionHandle, shape: &LaunchShape, args: &[u8]) -> Result<()> {
        let (at, lies) = (self.launches.fetch_add(1, Ordering::Relaxed), self.device.lies());
        let capturing = || self.inner.capture_status().map(|status| status == CaptureStatus::Active);
        if let Some(window) = lies.window.filter(|_| at == 2)
            && capturing()?
        {
            window(&Window { device: &self.device.inner, stream: &*self.inner });
        }
        if let Some(record) = lies.record
            && capturing()?
        {
            // SAFETY: the test records arguments of the same struct with pointers into the same buffers.
            return unsafe { self.inner.launch(function, shape, &record(at, args)) };
        }
        // SAFETY: the caller's contract (ADDR-1, RACE-1).
        unsafe { self.inner.launch(function, shape, args) }
    }
    unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        // SAFETY: the caller's contract (ADDR-1).
        unsafe { self.inner.copy(dst, src, bytes) }
    }
    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: u64) -> Result<()> {
        // SAFETY: the caller's contract (ADDR-1).
        unsafe { self.inner.fill(dst, byte, bytes) }
    }
    unsafe fn write(&self, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller's contract (ADDR-1).
        unsafe { self.inner.write(dst, bytes) }
    }
    unsafe fn read(&self, src: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's contract (ADDR-1).
        unsafe { self.inner.read(src, bytes) }
    }
    fn record(&self, event: &dyn Event) -> Result<()> {
        self.inner.record(event)
    }
    fn wait(&self, event: &dyn Event) -> Result<()> {
        self.inner.wait(event)
    }
    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }
    fn query(&self) -> Result<bool> {
        self.inner.query()
    }
    fn begin_capture(&self, mode: CaptureMode) -> Result<()> {
        self.launches.store(0, Ordering::Relaxed);
        self.inner.begin_capture(mode)
    }
    fn end_capture(&self) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(LyingGraph { device: self.device.clone(), inner: self.inner.end_capture()? }))
    }
    fn capture_status(&self) -> Result<CaptureStatus> {
        self.inner.capture_status()
    }
    unsafe fn launch_graph(&self, exec: &dyn GraphExec) -> Result<()> {
        if let Some(replay) = self.device.lies().replay {
            replay();
        }
        // SAFETY: the caller's contract (ADDR-2).
        unsafe { self.inner.launch_graph(exec) }?;
        if let Some(replayed) = self.device.lies().replayed {
            replayed();
        }
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}

struct LyingGraph {
    device: Liar,
    inner: Arc<dyn Graph>,
}

impl fmt::Debug for LyingGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LyingGraph")
    }
}

impl Graph for LyingGraph {
    fn node_count(&self) -> Result<usize> {
        let truth = self.inner.node_count()?;
        self.device.lies().count.map_or(Ok(truth), |lie| lie(truth))
    }
    fn edges(&self) -> Result<Vec<(NodeId, NodeId)>> {
        let truth = self.inner.edges()?;
        match self.device.lies().edges {
            None => Ok(truth),
            Some(lie) => lie(truth),
        }
    }
    fn node(&self, id: NodeId) -> Result<Node> {
        match self.device.lies().node {
            None => self.inner.node(id),
            Some(lie) => lie(&*self.inner, id),
        }
    }
    fn instantiate(&self) -> Result<Arc<dyn GraphExec>> {
        self.inner.instantiate()
    }
    fn native_dot(&self) -> Result<String> {
        self.inner.native_dot()
    }
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }
}

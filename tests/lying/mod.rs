//! A device that is right in everything it reports and wrong in what it replays, one lie at a time.
//!
//! The lies are the public reports' symptoms: what `hal::fault` makes fail loudly, this makes wrong silently.
#![expect(unsafe_code, reason = "forwards unsafe calls, changed")]
#![allow(dead_code, clippy::allow_attributes, reason = "each test that includes this uses a part of it")]

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use capstan::Result;
use capstan::hal::{
    Allocation, CaptureMode, CaptureStatus, Device, DeviceInfo, DevicePtr, Event, FunctionHandle, Graph, GraphExec, IpcHandle,
    LaunchShape, MemoryInfo, MemoryKind, Module, ModuleImage, Node, NodeId, Stream,
};
use capstan::kernels::{KernelArgs, Ptr, probe::ProbeArgs};

/// What the device does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// Nothing.
    None,
    /// Nodes from this one on run with the arguments of the one before it.
    StalePastNode(u32),
    /// Kernels of a graph read pinned memory as it was at the launch before.
    StalePinned,
    /// A write to an address arrives with the next write to it.
    StaleWrites,
    /// Every fifth switch between two graphs of a stream replays the one before again.
    WrongExec,
    /// All but the first instance of a graph do nothing.
    DeadInstance,
    /// Every instance takes this many bytes of device memory and never gives them back.
    KeepsMemory(u64),
    /// The sixth launch of a capture is not recorded.
    SwallowedLaunch,
}

#[derive(Debug)]
struct State {
    lie: Lie,
    device: Arc<dyn Device>,
    /// Pinned allocations, each with device memory that holds what it held at the launch before.
    shadows: Mutex<Vec<Shadow>>,
    writes: Mutex<HashMap<u64, Vec<u8>>>,
}

#[derive(Debug)]
struct Shadow {
    pinned: Allocation,
    copy: Allocation,
    filled: bool,
}

#[derive(Debug)]
pub struct LyingDevice(Arc<State>);

impl LyingDevice {
    pub fn new(device: Arc<dyn Device>, lie: Lie) -> LyingDevice {
        LyingDevice(Arc::new(State { lie, device, shadows: Mutex::default(), writes: Mutex::default() }))
    }
}

impl Device for LyingDevice {
    fn info(&self) -> &DeviceInfo {
        self.0.device.info()
    }
    fn memory(&self) -> Result<MemoryInfo> {
        self.0.device.memory()
    }
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        // An address that is given out again starts anew.
        self.0.writes.lock().unwrap().clear();
        let allocation = self.0.device.allocate(kind, bytes)?;
        if self.0.lie == Lie::StalePinned && kind == MemoryKind::Pinned {
            let copy = self.0.device.allocate(MemoryKind::Device, bytes)?;
            self.0.shadows.lock().unwrap().push(Shadow { pinned: allocation, copy, filled: false });
        }
        Ok(allocation)
    }
    unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        let mut shadows = self.0.shadows.lock().unwrap();
        if let Some(at) = shadows.iter().position(|shadow| shadow.pinned == allocation) {
            // SAFETY: as for the allocation it shadows, by the caller's word.
            unsafe { self.0.device.free(shadows.remove(at).copy) }?;
        }
        // SAFETY: the caller's promise.
        unsafe { self.0.device.free(allocation) }
    }
    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        let stream = self.0.device.create_stream()?;
        Ok(Arc::new(LyingStream {
            state: self.0.clone(),
            stream,
            recorded: Mutex::default(),
            last: Mutex::default(),
            switches: AtomicU32::new(0),
        }))
    }
    fn create_event(&self, timing: bool) -> Result<Arc<dyn Event>> {
        self.0.device.create_event(timing)
    }
    fn load_module(&self, image: ModuleImage<'_>) -> Result<Arc<dyn Module>> {
        self.0.device.load_module(image)
    }
    fn synchronize(&self) -> Result<()> {
        self.0.device.synchronize()
    }
    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        self.0.device.ipc_export(allocation)
    }
    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.0.device.ipc_open(handle)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Debug)]
struct LyingStream {
    state: Arc<State>,
    stream: Arc<dyn Stream>,
    /// Arguments of the launches of the capture at hand, as the caller gave them.
    recorded: Mutex<Option<Vec<Vec<u8>>>>,
    last: Mutex<Option<Arc<dyn GraphExec>>>,
    switches: AtomicU32,
}

impl LyingStream {
    /// What is recorded in place of `args`; nothing if the launch is swallowed.
    fn changed(&self, recorded: &[Vec<u8>], args: &[u8]) -> Option<Vec<u8>> {
        let mut args = args.to_vec();
        match self.state.lie {
            Lie::StalePastNode(node) if recorded.len() as u32 >= node => args.clone_from(&recorded[node as usize - 1]),
            Lie::StalePinned => {
                let src = ProbeArgs::LAYOUT.field("src").unwrap();
                let at = src.pointer(&args).0;
                for Shadow { pinned, copy, .. } in self.state.shadows.lock().unwrap().iter() {
                    if (pinned.ptr.0..pinned.ptr.0 + pinned.bytes).contains(&at) {
                        src.set_pointer(&mut args, Ptr(copy.ptr.0 + (at - pinned.ptr.0)));
                    }
                }
            }
            Lie::SwallowedLaunch if recorded.len() == 5 => return None,
            _ => {}
        }
        Some(args)
    }

    /// Takes pinned memory as it is now for the launch that comes next.
    fn fill_shadows(&self, first_only: bool) -> Result<()> {
        for shadow in self.state.shadows.lock().unwrap().iter_mut().filter(|shadow| !first_only || !shadow.filled) {
            shadow.filled = true;
            // SAFETY: both allocations are live and equally long.
            unsafe { self.stream.copy(shadow.copy.ptr, shadow.pinned.ptr, shadow.pinned.bytes) }?;
        }
        Ok(())
    }
}

impl Stream for LyingStream {
    unsafe fn launch(&self, function: FunctionHandle, shape: &LaunchShape, args: &[u8]) -> Result<()> {
        let mut recorded = self.recorded.lock().unwrap();
        let changed = match &mut *recorded {
            None => Some(args.to_vec()),
            Some(recorded) => {
                let changed = self.changed(recorded, args);
                recorded.push(args.to_vec());
                changed
            }
        };
        // SAFETY: the caller's promise; a changed pointer is an older argument's or a live shadow's.
        changed.map_or(Ok(()), |args| unsafe { self.stream.launch(function, shape, &args) })
    }
    unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.stream.copy(dst, src, bytes) }
    }
    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.stream.fill(dst, byte, bytes) }
    }
    unsafe fn write(&self, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        let before = self.state.writes.lock().unwrap().insert(dst.0, bytes.to_vec());
        let stale = before.filter(|before| self.state.lie == Lie::StaleWrites && before.len() == bytes.len());
        // SAFETY: the caller's promise; the older bytes are as many.
        unsafe { self.stream.write(dst, stale.as_deref().unwrap_or(bytes)) }
    }
    unsafe fn read(&self, src: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.stream.read(src, bytes) }
    }
    fn record(&self, event: &dyn Event) -> Result<()> {
        self.stream.record(event)
    }
    fn wait(&self, event: &dyn Event) -> Result<()> {
        self.stream.wait(event)
    }
    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }
    fn query(&self) -> Result<bool> {
        self.stream.query()
    }
    fn begin_capture(&self, mode: CaptureMode) -> Result<()> {
        self.stream.begin_capture(mode)?;
        *self.recorded.lock().unwrap() = Some(Vec::new());
        Ok(())
    }
    fn end_capture(&self) -> Result<Arc<dyn Graph>> {
        let recorded = self.recorded.lock().unwrap().take().unwrap_or_default();
        let graph = self.stream.end_capture()?;
        Ok(Arc::new(LyingGraph { state: self.state.clone(), graph, recorded, instances: AtomicU32::new(0) }))
    }
    fn capture_status(&self) -> Result<CaptureStatus> {
        self.stream.capture_status()
    }
    unsafe fn launch_graph(&self, exec: &dyn GraphExec) -> Result<()> {
        let exec = exec.as_any().downcast_ref::<LyingExec>().expect("an instance of this device");
        if exec.dead {
            return Ok(());
        }
        let mut run = exec.exec.clone();
        let last = self.last.lock().unwrap().replace(run.clone());
        if let Some(last) = last.filter(|last| !Arc::ptr_eq(last, &run))
            && self.switches.fetch_add(1, Ordering::Relaxed) % 5 == 4
            && self.state.lie == Lie::WrongExec
        {
            run = last;
        }
        self.fill_shadows(true)?;
        // SAFETY: the caller's promise; an older instance of this stream points into the same arena.
        unsafe { self.stream.launch_graph(&*run) }?;
        self.fill_shadows(false)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Debug)]
struct LyingGraph {
    state: Arc<State>,
    graph: Arc<dyn Graph>,
    recorded: Vec<Vec<u8>>,
    instances: AtomicU32,
}

impl Graph for LyingGraph {
    fn node_count(&self) -> Result<usize> {
        self.graph.node_count()
    }
    fn edges(&self) -> Result<Vec<(NodeId, NodeId)>> {
        self.graph.edges()
    }
    /// The arguments as the caller gave them: what is asked for is right, what runs is not.
    fn node(&self, id: NodeId) -> Result<Node> {
        let mut node = self.graph.node(id)?;
        if let Node::Kernel(kernel) = &mut node {
            kernel.args.clone_from(&self.recorded[id.0 as usize]);
        }
        Ok(node)
    }
    fn instantiate(&self) -> Result<Arc<dyn GraphExec>> {
        let dead = self.instances.fetch_add(1, Ordering::Relaxed) > 0 && self.state.lie == Lie::DeadInstance;
        if let Lie::KeepsMemory(bytes) = self.state.lie {
            self.state.device.allocate(MemoryKind::Device, bytes)?;
        }
        Ok(Arc::new(LyingExec { exec: self.graph.instantiate()?, dead }))
    }
    fn native_dot(&self) -> Result<String> {
        self.graph.native_dot()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[derive(Debug)]
struct LyingExec {
    exec: Arc<dyn GraphExec>,
    dead: bool,
}

impl GraphExec for LyingExec {
    fn upload(&self, stream: &dyn Stream) -> Result<()> {
        let stream = stream.as_any().downcast_ref::<LyingStream>().expect("a stream of this device");
        self.exec.upload(&*stream.stream)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

//! The hardware abstraction: object-safe traits shaped after HIP.
//!
//! Devices: `cpu` runs everything, `null` records and runs nothing; `hip` and `cuda` find their drivers at run time.
//! Wrappers: `checked` validates every contract of this page over any device, `fault` fails the n-th call. Drivers are
//! thin: they translate and report. Validation lives once, in `checked`.
//!
//! Promises: a stream runs its work in order and asynchronously; a capture records kernel arguments *by value*; a replay
//! runs exactly what was recorded, whatever happened to the host's copies since.

#![expect(unsafe_code, reason = "declares the contracts of raw launches; calls none")]

pub mod checked;
pub mod cpu;
pub mod cuda;
pub mod fault;
pub mod hip;
mod loader;
pub mod null;
mod record;
mod topology;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Opens a device by name: `cpu`, `null`, `hip`, `cuda`, or `auto`, which takes the first GPU there is and else the CPU.
///
/// Errors: the name is none of these, or the device or its driver is not there.
pub fn open(name: &str) -> Result<Arc<dyn Device>> {
    open_for(name, 0)
}

/// The same for a rank: of several devices of one kind that with the number of the rank among those of this host.
pub fn open_for(name: &str, local_rank: u32) -> Result<Arc<dyn Device>> {
    match name {
        "cpu" => Ok(cpu::CpuDevice::new(0)?),
        "null" => Ok(null::NullDevice::new()),
        "auto" => ["hip", "cuda"].into_iter().find_map(|name| open_for(name, local_rank).ok()).map_or_else(|| open("cpu"), Ok),
        "cuda" => Ok(cuda::CudaDevice::open(local_rank)?),
        "hip" => Ok(hip::HipDevice::open(local_rank)?),
        _ => Err(Error::config(format!("unknown device {name:?}")).help("use one of auto, cpu, null, hip, cuda")),
    }
}

/// An address in a device's memory space; on the CPU device it is a host address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The null address.
    pub const NULL: DevicePtr = DevicePtr(0);

    /// The address `bytes` further.
    pub const fn add(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0 + bytes)
    }
}

/// Where an allocation lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// Device memory, private to one rank.
    Device,
    /// Device memory that running kernels of peer ranks read and write (uncached on AMD).
    Peer,
    /// Pinned host memory mapped into the device's address space.
    Pinned,
}

/// One driver allocation. Not RAII: the arena that made it hands it back to [`Device::free`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Where it lives.
    pub kind: MemoryKind,
    /// Its address for kernels and copies.
    pub ptr: DevicePtr,
    /// Its address for the host; null unless `kind` is [`MemoryKind::Pinned`] (the CPU device answers for all kinds).
    pub host: u64,
    /// Its size.
    pub bytes: u64,
}

/// Memory of a device in bytes, as the driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryInfo {
    /// Free now.
    pub free_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
}

/// Which API a device speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Platform {
    /// The host's own cores.
    Cpu,
    /// Records and runs nothing.
    Null,
    /// AMD's HIP runtime.
    Hip,
    /// NVIDIA's CUDA driver.
    Cuda,
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Platform::Cpu => "cpu",
            Platform::Null => "null",
            Platform::Hip => "hip",
            Platform::Cuda => "cuda",
        })
    }
}

/// What a device is and can do.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceInfo {
    /// The API it speaks.
    pub platform: Platform,
    /// Marketing name, e.g. `AMD Instinct MI355X`.
    pub name: String,
    /// Target of its compiler, e.g. `gfx950`, `sm_90`, `x86_64+avx2`.
    pub arch: String,
    /// Version of the driver or runtime as it reports itself.
    pub driver: String,
    /// Lanes of a wave (a warp): 64 on CDNA, 32 on NVIDIA, 1 on the CPU.
    pub wave_lanes: u32,
    /// Compute units (multiprocessors, cores).
    pub compute_units: u32,
    /// Largest LDS (shared memory) of a workgroup, bytes.
    pub lds_bytes_max: u32,
    /// False where launches are recorded but never run: nothing is ever published.
    pub executes: bool,
}

/// Grid and workgroup of a launch. The same on every device, so that dumps compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LaunchShape {
    /// Workgroups in x, y, z; none may be zero.
    pub grid: [u32; 3],
    /// Lanes of a workgroup in x, y, z.
    pub workgroup: [u32; 3],
    /// Dynamic LDS (shared memory), bytes.
    pub lds_bytes: u32,
}

/// A loaded kernel, valid while its [`Module`] lives. Raw, as in HIP: `checked` finds stale ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FunctionHandle(pub u64);

/// Code to load.
#[derive(Clone, Copy)]
pub enum ModuleImage<'a> {
    /// Ops of the CPU device; the null device takes them too.
    Ops(&'a [CpuKernel]),
    /// A code object or cubin for the device's exact architecture.
    Object(&'a [u8]),
}

/// One kernel of the CPU device.
#[derive(Clone, Copy)]
pub struct CpuKernel {
    /// Symbol, the same as in the GPU source.
    pub symbol: &'static str,
    /// Size of the argument struct.
    pub args_bytes: usize,
    /// The op: runs one workgroup.
    pub op: CpuOp,
}

/// Runs one workgroup of a kernel: the argument struct's bytes, and where in the grid it is.
///
/// Unsafe to call: every pointer of the arguments must be valid for the extent its kernel declares (ADDR-1), and no other
/// launch may touch what this one writes meanwhile (RACE-1).
pub type CpuOp = unsafe fn(args: &[u8], workgroup: &mut Workgroup<'_>);

/// Position of one workgroup of a launch on the CPU device, and its LDS.
pub struct Workgroup<'a> {
    /// Index in the grid.
    pub id: [u32; 3],
    /// The whole launch.
    pub shape: LaunchShape,
    /// The launch's LDS, 64-byte aligned; contents are undefined at the start.
    pub lds: &'a mut [u8],
}

/// How strictly a capture forbids calls that would break it (`hipStreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// No thread may make a potentially unsafe call.
    Global,
    /// This thread may not.
    ThreadLocal,
    /// Nothing is forbidden.
    Relaxed,
}

/// State of a stream's capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// Not capturing.
    None,
    /// Capturing.
    Active,
    /// A forbidden call invalidated the capture; only `end_capture` is left.
    Invalidated,
}

/// Index of a node in its graph, in recording order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct NodeId(pub u32);

/// What the driver says a node holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// A kernel launch.
    Kernel(KernelNode),
    /// A copy.
    Copy {
        /// Destination.
        dst: DevicePtr,
        /// Source.
        src: DevicePtr,
        /// Size.
        bytes: u64,
    },
    /// A fill.
    Fill {
        /// Destination.
        dst: DevicePtr,
        /// Value of every byte.
        byte: u8,
        /// Size.
        bytes: u64,
    },
    /// Joins branches, does nothing.
    Empty,
    /// Anything else (host function, allocation, free, event), by the driver's name for it. Never legal in a chain (CAP-1).
    Other(&'static str),
}

/// A kernel node: function, shape and the argument struct's bytes as recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelNode {
    /// The loaded kernel.
    pub function: FunctionHandle,
    /// Its symbol.
    pub symbol: String,
    /// Grid and workgroup.
    pub shape: LaunchShape,
    /// Argument struct, by value.
    pub args: Vec<u8>,
}

/// Bytes that name an allocation of kind [`MemoryKind::Peer`] to another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpcHandle(pub Vec<u8>);

/// A device. All methods may be called from any thread.
pub trait Device: Send + Sync + fmt::Debug {
    /// What it is.
    fn info(&self) -> &DeviceInfo;
    /// Free and total memory.
    fn memory(&self) -> Result<MemoryInfo>;
    /// Allocates; contents are undefined. 256-byte aligned at least (4096 for [`MemoryKind::Peer`]).
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation>;
    /// Frees what [`Device::allocate`] or [`Device::ipc_open`] gave.
    ///
    /// # Safety
    /// Nothing queued or recorded for replay may still use it (SEAL-1: only a dropped arena frees).
    unsafe fn free(&self, allocation: Allocation) -> Result<()>;
    /// A new asynchronous stream.
    fn create_stream(&self) -> Result<Arc<dyn Stream>>;
    /// A new event; `timing` if its time will be asked for.
    fn create_event(&self, timing: bool) -> Result<Arc<dyn Event>>;
    /// Loads code.
    fn load_module(&self, image: ModuleImage<'_>) -> Result<Arc<dyn Module>>;
    /// Waits for everything on the device.
    fn synchronize(&self) -> Result<()>;
    /// Names a peer allocation to another process.
    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle>;
    /// Opens what another process exported.
    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation>;
    /// For downcasts by the backend itself.
    fn as_any(&self) -> &dyn Any;
}

/// A queue of work that runs in order.
pub trait Stream: Send + Sync + fmt::Debug {
    /// Queues a kernel. `args` is the kernel's whole argument struct, copied before the call returns.
    ///
    /// # Safety
    /// Every pointer in `args` is valid for the kernel's declared extent until the work (or every replay of the graph it is
    /// recorded in) has run (ADDR-1), and nothing unordered with it touches what it writes (RACE-1).
    unsafe fn launch(&self, function: FunctionHandle, shape: &LaunchShape, args: &[u8]) -> Result<()>;
    /// Queues a copy between any two device-visible ranges.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()>;
    /// Queues a fill.
    ///
    /// # Safety
    /// As for [`Stream::launch`].
    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: u64) -> Result<()>;
    /// Copies host bytes to the device and waits. Illegal during capture.
    ///
    /// # Safety
    /// `dst` is valid for `bytes.len()`.
    unsafe fn write(&self, dst: DevicePtr, bytes: &[u8]) -> Result<()>;
    /// Waits for the stream, then copies device bytes to the host. Illegal during capture.
    ///
    /// # Safety
    /// `src` is valid for `bytes.len()`.
    unsafe fn read(&self, src: DevicePtr, bytes: &mut [u8]) -> Result<()>;
    /// Records an event.
    fn record(&self, event: &dyn Event) -> Result<()>;
    /// Makes later work wait for an event. During a capture of the event's stream this stream joins the capture.
    fn wait(&self, event: &dyn Event) -> Result<()>;
    /// Waits for everything queued. Illegal during capture.
    fn synchronize(&self) -> Result<()>;
    /// True when everything queued has run. Illegal during capture.
    fn query(&self) -> Result<bool>;
    /// Starts recording instead of running.
    fn begin_capture(&self, mode: CaptureMode) -> Result<()>;
    /// Stops recording and gives the graph. Errors if the capture was invalidated or a joined stream was not joined back.
    fn end_capture(&self) -> Result<Arc<dyn Graph>>;
    /// State of the capture.
    fn capture_status(&self) -> Result<CaptureStatus>;
    /// Queues one replay of a graph.
    ///
    /// # Safety
    /// All memory and modules the graph was recorded against are alive and unmoved until the replay has run (ADDR-2);
    /// `runtime::replay` is the one caller.
    unsafe fn launch_graph(&self, exec: &dyn GraphExec) -> Result<()>;
    /// For downcasts by the backend itself.
    fn as_any(&self) -> &dyn Any;
}

/// A point in a stream.
pub trait Event: Send + Sync + fmt::Debug {
    /// True when the recorded point has passed (or nothing was recorded).
    fn query(&self) -> Result<bool>;
    /// Waits for it.
    fn synchronize(&self) -> Result<()>;
    /// Seconds from `earlier` to this event; both were created with timing and have passed.
    fn seconds_since(&self, earlier: &dyn Event) -> Result<f64>;
    /// For downcasts by the backend itself.
    fn as_any(&self) -> &dyn Any;
}

/// Loaded code.
pub trait Module: Send + Sync + fmt::Debug {
    /// Finds a kernel whose argument struct has `args_bytes` bytes.
    fn function(&self, symbol: &str, args_bytes: usize) -> Result<FunctionHandle>;
    /// For downcasts by the backend itself.
    fn as_any(&self) -> &dyn Any;
}

/// A recorded graph.
pub trait Graph: Send + Sync + fmt::Debug {
    /// Number of nodes; ids are `0..count` in recording order.
    fn node_count(&self) -> Result<usize>;
    /// Dependencies (before, after), sorted.
    fn edges(&self) -> Result<Vec<(NodeId, NodeId)>>;
    /// What a node holds, asked of the driver.
    fn node(&self, id: NodeId) -> Result<Node>;
    /// Makes it launchable.
    fn instantiate(&self) -> Result<Arc<dyn GraphExec>>;
    /// The driver's own DOT output, where it offers one.
    fn native_dot(&self) -> Result<String>;
    /// For downcasts by the backend itself.
    fn as_any(&self) -> &dyn Any;
}

/// A launchable graph.
pub trait GraphExec: Send + Sync + fmt::Debug {
    /// Uploads it to the device ahead of the first launch, where the driver offers that.
    fn upload(&self, stream: &dyn Stream) -> Result<()>;
    /// For downcasts by the backend itself.
    fn as_any(&self) -> &dyn Any;
}

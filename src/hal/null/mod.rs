//! The null device: records everything, runs nothing.
//!
//! Device and peer memory are ranges of addresses without backing, so that plans and graphs of a full-size model work on a
//! laptop; pinned memory is real, for rings that the host writes. Captures, graphs and node queries are those of the CPU
//! device, by the same code. Work passes the moment it is queued; nothing it would compute is ever there to read.

#![expect(unsafe_code, reason = "the Device trait has an unsafe method")]

mod memory;
mod stream;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Result;
use crate::hal::record::{Functions, LDS_BYTES_MAX, Recorder};
use crate::hal::{
    Allocation, Device, DeviceInfo, Event, IpcHandle, MemoryInfo, MemoryKind, Module, ModuleImage, Platform, Stream,
};
use memory::Memory;
use stream::{NullEvent, NullStream};

/// The null device; make one with [`NullDevice::new`].
pub struct NullDevice {
    info: DeviceInfo,
    shared: Arc<Shared>,
}

/// What streams, events and graphs of one device share.
#[derive(Default)]
struct Shared {
    memory: Memory,
    recorder: Arc<Recorder>,
    functions: Arc<Functions>,
    launches: AtomicU64,
    replays: AtomicU64,
}

impl NullDevice {
    /// A null device with a pebibyte of memory.
    pub fn new() -> Arc<NullDevice> {
        let info = DeviceInfo {
            platform: Platform::Null,
            name: "null".to_owned(),
            arch: "none".to_owned(),
            driver: concat!("capstan ", env!("CARGO_PKG_VERSION")).to_owned(),
            wave_lanes: 1,
            compute_units: 1,
            lds_bytes_max: LDS_BYTES_MAX,
            executes: false,
        };
        Arc::new(NullDevice { info, shared: Arc::default() })
    }

    /// Lets the device hold `bytes` at most, of all memory kinds together.
    pub fn set_memory_limit(&self, bytes: u64) {
        self.shared.memory.set_limit(bytes);
    }

    /// Eager kernels, copies and fills queued so far.
    pub fn launches(&self) -> u64 {
        self.shared.launches.load(Ordering::Relaxed)
    }

    /// Graphs launched so far.
    pub fn replays(&self) -> u64 {
        self.shared.replays.load(Ordering::Relaxed)
    }

    /// Allocations not freed yet, opened peer memory included.
    pub fn allocation_count(&self) -> usize {
        self.shared.memory.count()
    }
}

impl Device for NullDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryInfo> {
        Ok(self.shared.memory.info())
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        self.shared.recorder.forbid_unsafe("allocate")?;
        self.shared.memory.allocate(kind, bytes)
    }

    unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        self.shared.recorder.forbid_unsafe("free")?;
        self.shared.memory.free(&allocation)
    }

    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(NullStream::new(self.shared.clone())))
    }

    fn create_event(&self, timing: bool) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(NullEvent::new(self.shared.clone(), timing)))
    }

    fn load_module(&self, image: ModuleImage<'_>) -> Result<Arc<dyn Module>> {
        self.shared.recorder.forbid_unsafe("load_module")?;
        Ok(Arc::new(self.shared.functions.load("null", image)?))
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.recorder.forbid_any("device synchronize")
    }

    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        self.shared.memory.export(allocation)
    }

    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.shared.recorder.forbid_unsafe("ipc_open")?;
        self.shared.memory.open(handle)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for NullDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullDevice").field("launches", &self.launches()).field("replays", &self.replays()).finish()
    }
}

//! The CPU device: the host's own cores behind the same contracts as a GPU.
//!
//! Streams are queues with a thread each, launches spread their workgroups over a pool of workers, a capture records
//! arguments by value and a replay runs what was recorded. Once streams exist and graphs are instantiated, neither queuing
//! nor running allocates on the host heap (eager launches with more than 512 bytes of arguments excepted).
//!
//! Never validates pointers: a wrong address faults here as it does on a GPU. `hal::checked` finds it first.

#![expect(unsafe_code, reason = "the Device trait has an unsafe method")]

mod event;
mod graph;
mod memory;
mod module;
mod pool;
mod stream;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;

use crate::error::Result;
use crate::hal::record::{Functions, LDS_BYTES_MAX, Recorder};
use crate::hal::{
    Allocation, Device, DeviceInfo, Event, IpcHandle, MemoryInfo, MemoryKind, Module, ModuleImage, Platform, Stream,
};
use event::CpuEvent;
use memory::Memory;
use pool::Pool;
use stream::{CpuStream, Queue};

/// The CPU device; make one with [`CpuDevice::new`].
pub struct CpuDevice {
    info: DeviceInfo,
    shared: Arc<Shared>,
}

/// What streams, events and graphs of one device share.
struct Shared {
    pool: Pool,
    memory: Memory,
    recorder: Arc<Recorder>,
    functions: Arc<Functions>,
    queues: Mutex<Vec<Weak<Queue>>>,
    /// Orders of later instantiations: 0 recording order, else seed + 1.
    replay_seed: AtomicU64,
}

impl CpuDevice {
    /// A device that runs a launch on at most `threads` threads, a stream's own included; 0 takes all cores.
    ///
    /// Errors: the system refuses a thread.
    pub fn new(threads: usize) -> Result<Arc<CpuDevice>> {
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
        let threads = if threads == 0 { cores } else { threads };
        let shared = Arc::new(Shared {
            pool: Pool::new(threads - 1)?,
            memory: Memory::new(),
            recorder: Arc::default(),
            functions: Arc::default(),
            queues: Mutex::default(),
            replay_seed: AtomicU64::new(0),
        });
        let info = DeviceInfo {
            platform: Platform::Cpu,
            name: cpu_name(),
            arch: cpu_arch(),
            driver: concat!("capstan ", env!("CARGO_PKG_VERSION")).to_owned(),
            wave_lanes: 1,
            compute_units: threads as u32,
            lds_bytes_max: LDS_BYTES_MAX,
            executes: true,
        };
        Ok(Arc::new(CpuDevice { info, shared }))
    }

    /// Lets the device hold `bytes` at most, of all memory kinds together. The default is the machine's memory.
    pub fn set_memory_limit(&self, bytes: u64) {
        self.shared.memory.set_limit(bytes);
    }

    /// Graphs instantiated from now on run their nodes in an order that `seed` draws among all orders the edges allow, so
    /// that a missing edge shows as a wrong result. `None`, the default, is recording order.
    pub fn set_replay_seed(&self, seed: Option<u64>) {
        self.shared.replay_seed.store(seed.map_or(0, |seed| seed.saturating_add(1)), Ordering::Relaxed);
    }

    /// Allocations not freed yet, opened peer memory included.
    pub fn allocation_count(&self) -> usize {
        self.shared.memory.count()
    }
}

impl Device for CpuDevice {
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
        Ok(Arc::new(CpuStream::new(self.shared.clone())?))
    }

    fn create_event(&self, timing: bool) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(CpuEvent::new(self.shared.clone(), timing)))
    }

    fn load_module(&self, image: ModuleImage<'_>) -> Result<Arc<dyn Module>> {
        self.shared.recorder.forbid_unsafe("load_module")?;
        module::load(&self.shared, image)
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.recorder.forbid_any("device synchronize")?;
        let queues: Vec<Arc<Queue>> = {
            let mut queues = self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner);
            queues.retain(|queue| queue.strong_count() > 0);
            queues.iter().filter_map(Weak::upgrade).collect()
        };
        // Every queue is waited for, then the first failure is told.
        queues.iter().map(|queue| queue.synchronize("device synchronize")).fold(Ok(()), Result::and)
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

impl fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuDevice").field("threads", &self.info.compute_units).finish_non_exhaustive()
    }
}

/// The processor's marketing name where the system tells it.
fn cpu_name() -> String {
    std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        })
        .unwrap_or_else(|| "host cores".to_owned())
}

/// Architecture and the widest vector extension, as `x86_64+avx2`.
fn cpu_arch() -> String {
    #[cfg(target_arch = "x86_64")]
    let vectors = if std::arch::is_x86_feature_detected!("avx512f") {
        "+avx512f"
    } else if std::arch::is_x86_feature_detected!("avx2") {
        "+avx2"
    } else {
        ""
    };
    #[cfg(not(target_arch = "x86_64"))]
    let vectors = "";
    format!("{}{vectors}", std::env::consts::ARCH)
}

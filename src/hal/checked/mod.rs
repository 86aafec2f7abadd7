//! A device that holds every caller to the contracts of [`hal`](crate::hal), over any other device.
//!
//! Drivers stay thin; what they would answer with a crash, a late "invalid state" or silence is an error here, at the call
//! that broke the contract, with the call, the stream, the capture mode and the kernel recorded last. Tables of what is alive
//! are kept under one lock: this is a debugging device, not a fast one.

mod graph;
mod stream;
mod tables;

use std::any::Any;
use std::sync::Arc;

use super::*;

pub use tables::Alive;

use stream::{CheckedEvent, CheckedStream};
use tables::Tables;

/// The device.
#[derive(Debug)]
pub struct CheckedDevice {
    inner: Arc<dyn Device>,
    tables: Arc<Tables>,
}

impl CheckedDevice {
    /// Wraps `inner`.
    pub fn wrap(inner: Arc<dyn Device>) -> Arc<CheckedDevice> {
        Arc::new(CheckedDevice { tables: Arc::new(Tables::new(inner.info().clone())), inner })
    }

    /// What is alive: zero of everything once all owners are dropped, or something leaks.
    pub fn alive(&self) -> Alive {
        self.tables.alive()
    }
}

/// A broken contract: the caller's bug.
fn broken(call: &'static str, what: impl std::fmt::Display) -> Error {
    Error::state(format!("{call}: {what}"))
        .call(call, 1, "checked")
        .help("the caller broke the contract of this call; see capstan::hal")
}

impl Device for CheckedDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.inner.memory()
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        self.tables.forbid_in_capture("allocate")?;
        if bytes == 0 {
            return Err(broken("allocate", "0 bytes"));
        }
        let allocation = self.inner.allocate(kind, bytes)?;
        self.tables.insert_allocation(allocation);
        let aligned = if kind == MemoryKind::Peer { 4096 } else { 256 };
        if allocation.bytes != bytes || allocation.kind != kind || !allocation.ptr.0.is_multiple_of(aligned) {
            return Err(Error::device(format!("allocate: asked for {bytes} bytes of {kind:?}, got {allocation:?}"))
                .call("allocate", 1, "checked")
                .help("the device broke its contract; report it"));
        }
        Ok(allocation)
    }

    #[expect(unsafe_code, reason = "forwards the call")]
    unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        self.tables.forbid_in_capture("free")?;
        self.tables.remove_allocation(&allocation)?;
        // SAFETY: the caller's promise; it is an allocation of this device that was alive until now.
        unsafe { self.inner.free(allocation) }
    }

    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CheckedStream::new(self.inner.create_stream()?, self.tables.clone())))
    }

    fn create_event(&self, timing: bool) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(CheckedEvent::new(self.inner.create_event(timing)?, self.tables.clone(), timing)))
    }

    fn load_module(&self, image: ModuleImage<'_>) -> Result<Arc<dyn Module>> {
        self.tables.forbid_in_capture("load_module")?;
        if let ModuleImage::Ops(ops) = image
            && let Some(at) = (0..ops.len()).find(|&at| ops[..at].iter().any(|op| op.symbol == ops[at].symbol))
        {
            return Err(broken("load_module", format!("two kernels are called {}", ops[at].symbol)));
        }
        Ok(Arc::new(CheckedModule {
            inner: self.inner.load_module(image)?,
            tables: self.tables.clone(),
            id: self.tables.next_id(),
        }))
    }

    fn synchronize(&self) -> Result<()> {
        self.tables.forbid_in_capture("device synchronize")?;
        self.inner.synchronize()
    }

    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        self.tables.check_allocation("ipc_export", allocation)?;
        if allocation.kind != MemoryKind::Peer {
            return Err(broken("ipc_export", format!("{:?} memory is private to its process", allocation.kind)));
        }
        self.inner.ipc_export(allocation)
    }

    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.tables.forbid_in_capture("ipc_open")?;
        let allocation = self.inner.ipc_open(handle)?;
        self.tables.insert_allocation(allocation);
        Ok(allocation)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A module; its functions end with it.
#[derive(Debug)]
struct CheckedModule {
    inner: Arc<dyn Module>,
    tables: Arc<Tables>,
    id: u64,
}

impl Module for CheckedModule {
    fn function(&self, symbol: &str, args_bytes: usize) -> Result<FunctionHandle> {
        let function = self.inner.function(symbol, args_bytes)?;
        self.tables.insert_function(function, self.id, symbol, args_bytes);
        Ok(function)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CheckedModule {
    fn drop(&mut self) {
        self.tables.remove_module(self.id);
    }
}

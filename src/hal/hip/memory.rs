//! Memory of the device, of peers, and of the host pinned for both.

#![expect(unsafe_code, reason = "calls the runtime")]

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::Core;
use super::status::call;
use super::table::{IpcMemory, Pointer, flag};
use super::version::Version;
use crate::error::{Error, Result};
use crate::hal::{Allocation, DevicePtr, IpcHandle, MemoryKind};

/// What is allocated, so that each is freed the way it came and once.
#[derive(Default)]
pub(super) struct Memory(Mutex<BTreeMap<u64, Entry>>);

#[derive(Clone, Copy)]
struct Entry {
    allocation: Allocation,
    /// Came from another process.
    opened: bool,
}

impl Memory {
    fn table(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn allocate(&self, core: &Core, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        core.enter()?;
        let (ptr, host) = match kind {
            MemoryKind::Device => (device_memory(core, bytes)?, 0),
            MemoryKind::Peer => (peer_memory(core, bytes)?, 0),
            MemoryKind::Pinned => pinned_memory(core, bytes)?,
        };
        let allocation = Allocation { kind, ptr: DevicePtr(ptr), host, bytes };
        self.table().insert(ptr, Entry { allocation, opened: false });
        Ok(allocation)
    }

    pub fn free(&self, core: &Core, allocation: &Allocation) -> Result<()> {
        core.enter()?;
        let entry = self.find("free", allocation)?;
        let (table, ptr) = (&core.table, allocation.ptr.0 as Pointer);
        // SAFETY: live and of this device, as it is in the table; the caller's word that nothing uses it.
        unsafe {
            match allocation.kind {
                _ if entry.opened => call!(table, "free", hipIpcCloseMemHandle(ptr)),
                MemoryKind::Device | MemoryKind::Peer => call!(table, "free", hipFree(ptr)),
                MemoryKind::Pinned => call!(table, "free", hipHostFree(allocation.host as *mut _)),
            }
        }?;
        self.table().remove(&allocation.ptr.0);
        Ok(())
    }

    /// the runtime's handle and the size.
    pub fn export(&self, core: &Core, allocation: &Allocation) -> Result<IpcHandle> {
        core.enter()?;
        if self.find("ipc_export", allocation)?.opened || allocation.kind != MemoryKind::Peer {
            return Err(Error::device("ipc_export: only this process's own peer memory can be exported")
                .call("ipc_export", 1, "")
                .help("allocate it with MemoryKind::Peer in the process that exports it"));
        }
        let mut handle = IpcMemory([0; 64]);
        // SAFETY: the allocation is live, and the handle has a place.
        unsafe { call!(core.table, "ipc_export", hipIpcGetMemHandle(&mut handle, allocation.ptr.0 as Pointer)) }?;
        Ok(IpcHandle([&handle.0[..], &allocation.bytes.to_le_bytes()].concat()))
    }

    pub fn open(&self, core: &Core, handle: &IpcHandle) -> Result<Allocation> {
        core.enter()?;
        let (bytes, handle) = split(handle).ok_or_else(|| {
            Error::device("ipc_open: the handle is not of a HIP device")
                .call("ipc_open", 1, "")
                .help("pass on the bytes of ipc_export unchanged, between devices of one platform")
        })?;
        let (mut ptr, flags) = (std::ptr::null_mut(), core.version.lazy_peer_access());
        // SAFETY: a wrong handle is refused by the runtime; the result has a place.
        unsafe { call!(core.table, "ipc_open", hipIpcOpenMemHandle(&mut ptr, handle, flags)) }?;
        let ptr = ptr as u64;
        let allocation = Allocation { kind: MemoryKind::Peer, ptr: DevicePtr(ptr), host: 0, bytes };
        self.table().insert(ptr, Entry { allocation, opened: true });
        Ok(allocation)
    }

    fn find(&self, call: &'static str, allocation: &Allocation) -> Result<Entry> {
        self.table().get(&allocation.ptr.0).filter(|entry| entry.allocation == *allocation).copied().ok_or_else(|| {
            Error::device(format!(
                "{call}: no allocation of {} bytes at {:#x} on this device",
                allocation.bytes, allocation.ptr.0
            ))
            .call(call, 1, "")
            .help("hand back each allocation once, to the device that gave it")
        })
    }
}

fn device_memory(core: &Core, bytes: u64) -> Result<u64> {
    let mut ptr = std::ptr::null_mut();
    // SAFETY: the result has a place.
    unsafe { call!(core.table, "allocate", hipMalloc(&mut ptr, bytes as usize)) }?;
    Ok(ptr as u64)
}

/// Uncached: what a peer's running kernel wrote is seen without a launch in between.
fn peer_memory(core: &Core, bytes: u64) -> Result<u64> {
    if core.version < Version::UNCACHED {
        return Err(Error::unavailable(format!("{} offers no uncached memory for peers", core.version))
            .help("install ROCm 5.5 or later, or run one rank"));
    }
    let mut ptr = std::ptr::null_mut();
    // SAFETY: the result has a place.
    unsafe { call!(core.table, "allocate", hipExtMallocWithFlags(&mut ptr, bytes as usize, flag::DEVICE_UNCACHED)) }?;
    Ok(ptr as u64)
}

/// Device and host address. Coherent: the host polls what a running kernel writes.
fn pinned_memory(core: &Core, bytes: u64) -> Result<(u64, u64)> {
    let (mut host, mut ptr) = (std::ptr::null_mut(), std::ptr::null_mut());
    let flags = flag::HOST_PORTABLE | flag::HOST_MAPPED | flag::HOST_COHERENT;
    // SAFETY: the results have places; the second call asks about what the first gave.
    unsafe {
        call!(core.table, "allocate", hipHostMalloc(&mut host, bytes as usize, flags))?;
        if let Err(error) = call!(core.table, "allocate", hipHostGetDevicePointer(&mut ptr, host, 0)) {
            core.destroy("pinned memory", |table| (table.hipHostFree)(host));
            return Err(error);
        }
    }
    Ok((ptr as u64, host as u64))
}

fn split(handle: &IpcHandle) -> Option<(u64, IpcMemory)> {
    let (handle, bytes) = handle.0.split_at_checked(64)?;
    Some((u64::from_le_bytes(bytes.try_into().ok()?), IpcMemory(handle.try_into().ok()?)))
}

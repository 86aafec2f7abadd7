//! Memory of the device, of peers, and of the host pinned for both.

#![expect(unsafe_code, reason = "calls the driver")]

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::Core;
use super::status::call;
use super::table::{IpcMemory, flag};
use crate::error::{Error, Result};
use crate::hal::{Allocation, DevicePtr, IpcHandle, MemoryKind};

/// Peer memory comes in multiples of the driver's own granule: an IPC handle names a whole granule, and one that were shared
/// would hand out its neighbours too.
const PEER_GRANULE_BYTES: u64 = 2 << 20;

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
        let (table, ptr) = (&core.table, allocation.ptr.0);
        // SAFETY: live and of this device, as it is in the table; the caller's word that nothing uses it.
        unsafe {
            match allocation.kind {
                _ if entry.opened => call!(table, "free", cuIpcCloseMemHandle(ptr)),
                MemoryKind::Device | MemoryKind::Peer => call!(table, "free", cuMemFree_v2(ptr)),
                MemoryKind::Pinned => call!(table, "free", cuMemFreeHost(allocation.host as *mut _)),
            }
        }?;
        self.table().remove(&ptr);
        Ok(())
    }

    /// The driver's handle and the size.
    pub fn export(&self, core: &Core, allocation: &Allocation) -> Result<IpcHandle> {
        core.enter()?;
        if self.find("ipc_export", allocation)?.opened || allocation.kind != MemoryKind::Peer {
            return Err(Error::device("ipc_export: only this process's own peer memory can be exported")
                .call("ipc_export", 1, "")
                .help("allocate it with MemoryKind::Peer in the process that exports it"));
        }
        let mut handle = IpcMemory([0; 64]);
        // SAFETY: the allocation is live, and the handle has a place.
        unsafe { call!(core.table, "ipc_export", cuIpcGetMemHandle(&mut handle, allocation.ptr.0)) }?;
        Ok(IpcHandle([&handle.0[..], &allocation.bytes.to_le_bytes()].concat()))
    }

    pub fn open(&self, core: &Core, handle: &IpcHandle) -> Result<Allocation> {
        core.enter()?;
        let (bytes, handle) = split(handle).ok_or_else(|| {
            Error::device("ipc_open: the handle is not of a CUDA device")
                .call("ipc_open", 1, "")
                .help("pass on the bytes of ipc_export unchanged, between devices of one platform")
        })?;
        let mut ptr = 0;
        // SAFETY: a wrong handle is refused by the driver; the result has a place.
        unsafe { call!(core.table, "ipc_open", cuIpcOpenMemHandle_v2(&mut ptr, handle, flag::IPC_LAZY_PEER_ACCESS)) }?;
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
    let mut ptr = 0;
    // SAFETY: the result has a place.
    unsafe { call!(core.table, "allocate", cuMemAlloc_v2(&mut ptr, bytes as usize)) }?;
    Ok(ptr)
}

fn peer_memory(core: &Core, bytes: u64) -> Result<u64> {
    // What does not fit 64 bits is more than there is: let the driver say so.
    device_memory(core, bytes.checked_next_multiple_of(PEER_GRANULE_BYTES).unwrap_or(bytes))
}

/// Device and host address.
fn pinned_memory(core: &Core, bytes: u64) -> Result<(u64, u64)> {
    let (mut host, mut ptr) = (std::ptr::null_mut(), 0);
    let flags = flag::HOST_PORTABLE | flag::HOST_DEVICE_MAP;
    // SAFETY: the results have places; the second call asks about what the first gave.
    unsafe {
        call!(core.table, "allocate", cuMemHostAlloc(&mut host, bytes as usize, flags))?;
        if let Err(error) = call!(core.table, "allocate", cuMemHostGetDevicePointer_v2(&mut ptr, host, 0)) {
            core.destroy("pinned memory", |table| (table.cuMemFreeHost)(host));
            return Err(error);
        }
    }
    Ok((ptr, host as u64))
}

fn split(handle: &IpcHandle) -> Option<(u64, IpcMemory)> {
    let (handle, bytes) = handle.0.split_at_checked(64)?;
    Some((u64::from_le_bytes(bytes.try_into().ok()?), IpcMemory(handle.try_into().ok()?)))
}

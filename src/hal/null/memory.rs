//! Address ranges without backing, and pinned memory with it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;

use crate::error::{Error, Result};
use crate::hal::{Allocation, DevicePtr, IpcHandle, MemoryInfo, MemoryKind};

/// First address without backing: past every address that a process of a 64-bit system maps.
const VIRTUAL_BASE: u64 = 1 << 48;
/// End of such addresses.
const VIRTUAL_END: u64 = 1 << 62;
/// Alignment of every range, and the least gap between two.
const PAGE_BYTES: u64 = 4096;
/// Memory of a device without a limit set: 1 PiB.
const DEFAULT_BYTES: u64 = 1 << 50;

/// Memory of one device.
pub(super) struct Memory(Mutex<Table>);

struct Table {
    by_address: BTreeMap<u64, Entry>,
    next: u64,
    used_bytes: u64,
    limit_bytes: u64,
}

struct Entry {
    allocation: Allocation,
    /// Present for pinned memory.
    pinned: Option<MmapMut>,
    opened: bool,
}

impl Default for Memory {
    fn default() -> Memory {
        let by_address = BTreeMap::new();
        Memory(Mutex::new(Table { by_address, next: VIRTUAL_BASE, used_bytes: 0, limit_bytes: DEFAULT_BYTES }))
    }
}

impl Memory {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_limit(&self, bytes: u64) {
        self.table().limit_bytes = bytes;
    }

    pub fn count(&self) -> usize {
        self.table().by_address.len()
    }

    pub fn info(&self) -> MemoryInfo {
        let table = self.table();
        MemoryInfo { free_bytes: table.limit_bytes.saturating_sub(table.used_bytes), total_bytes: table.limit_bytes }
    }

    pub fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        if bytes == 0 {
            return Err(Error::device("allocate: 0 bytes").call("allocate", 1, "").help("ask for at least one byte"));
        }
        let mut table = self.table();
        let free = table.limit_bytes.saturating_sub(table.used_bytes);
        if bytes > free {
            return Err(out_of_memory(bytes, &format!("{free} bytes are free")));
        }
        let allocation = match kind {
            MemoryKind::Pinned => table.insert_pinned(bytes)?,
            MemoryKind::Device | MemoryKind::Peer => table.insert_virtual(kind, bytes, false)?,
        };
        table.used_bytes += bytes;
        Ok(allocation)
    }

    pub fn free(&self, allocation: &Allocation) -> Result<()> {
        let mut table = self.table();
        table.find("free", allocation)?;
        if let Some(entry) = table.by_address.remove(&allocation.ptr.0)
            && !entry.opened
        {
            table.used_bytes -= allocation.bytes;
        }
        Ok(())
    }

    /// `null:bytes`: there is nothing behind the address to find again.
    pub fn export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        let table = self.table();
        if table.find("ipc_export", allocation)?.opened || allocation.kind != MemoryKind::Peer {
            return Err(Error::device("ipc_export: only this process's own peer memory can be exported")
                .call("ipc_export", 1, "")
                .help("allocate it with MemoryKind::Peer in the process that exports it"));
        }
        Ok(IpcHandle(format!("null:{}", allocation.bytes).into_bytes()))
    }

    pub fn open(&self, handle: &IpcHandle) -> Result<Allocation> {
        let bytes = std::str::from_utf8(&handle.0).ok().and_then(|text| text.strip_prefix("null:")?.parse().ok());
        let bytes: u64 = bytes.filter(|&bytes| bytes > 0).ok_or_else(|| {
            Error::device("ipc_open: the handle is not of a null device")
                .call("ipc_open", 1, "")
                .help("pass on the bytes of ipc_export unchanged, between devices of one platform")
        })?;
        self.table().insert_virtual(MemoryKind::Peer, bytes, true)
    }

    /// Writes to pinned memory; what goes elsewhere is dropped.
    pub fn write(&self, dst: DevicePtr, bytes: &[u8]) {
        let mut table = self.table();
        if let Some(range) = table.pinned_at(dst, bytes.len()) {
            range.copy_from_slice(bytes);
        }
    }

    /// Reads pinned memory.
    pub fn read(&self, src: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        let mut table = self.table();
        let range = table.pinned_at(src, bytes.len()).ok_or_else(|| {
            Error::unavailable(format!("read: the null device holds nothing at {:#x}", src.0))
                .help("check DeviceInfo::executes first, or use --device cpu")
        })?;
        bytes.copy_from_slice(range);
        Ok(())
    }
}

impl Table {
    fn insert_pinned(&mut self, bytes: u64) -> Result<Allocation> {
        let size = usize::try_from(bytes).map_err(|_| out_of_memory(bytes, "no address space is that large"))?;
        let mut map = MmapMut::map_anon(size).map_err(|error| out_of_memory(bytes, &error.to_string()))?;
        let address = map.as_mut_ptr().expose_provenance() as u64;
        let allocation = Allocation { kind: MemoryKind::Pinned, ptr: DevicePtr(address), host: address, bytes };
        self.by_address.insert(address, Entry { allocation, pinned: Some(map), opened: false });
        Ok(allocation)
    }

    fn insert_virtual(&mut self, kind: MemoryKind, bytes: u64, opened: bool) -> Result<Allocation> {
        let address = self.next;
        let end = bytes.checked_next_multiple_of(PAGE_BYTES).and_then(|size| address.checked_add(size)?.checked_add(PAGE_BYTES));
        self.next = end
            .filter(|&end| end <= VIRTUAL_END)
            .ok_or_else(|| out_of_memory(bytes, "the null device's addresses are used up"))?;
        let allocation = Allocation { kind, ptr: DevicePtr(address), host: 0, bytes };
        self.by_address.insert(address, Entry { allocation, pinned: None, opened });
        Ok(allocation)
    }

    fn find(&self, call: &'static str, allocation: &Allocation) -> Result<&Entry> {
        self.by_address.get(&allocation.ptr.0).filter(|entry| entry.allocation == *allocation).ok_or_else(|| {
            Error::device(format!(
                "{call}: no allocation of {} bytes at {:#x} on this device",
                allocation.bytes, allocation.ptr.0
            ))
            .call(call, 1, "")
            .help("hand back each allocation once, to the device that gave it")
        })
    }

    fn pinned_at(&mut self, at: DevicePtr, bytes: usize) -> Option<&mut [u8]> {
        let (start, entry) = self.by_address.range_mut(..=at.0).next_back()?;
        let offset = usize::try_from(at.0 - start).ok()?;
        entry.pinned.as_mut()?.get_mut(offset..offset.checked_add(bytes)?)
    }
}

fn out_of_memory(bytes: u64, why: &str) -> Error {
    Error::device(format!("out of memory: {bytes} bytes asked for, {why}"))
        .call("allocate", 2, "")
        .help("lower max_num_seqs, max_model_len or the cache blocks, or raise the device's memory limit")
}

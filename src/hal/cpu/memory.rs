//! Memory of the CPU device: anonymous mappings, and shareable ones for peers.
//!
//! Freed memory is unmapped: a stale address faults. In debug builds fresh memory holds 0xA5. Peer memory is an unnamed
//! memory file; another process of the same user opens it through `/proc/PID/fd`, checked by a random 128-bit tag. It is
//! gone when its last mapping is, even if a process was killed.

#![expect(unsafe_code, reason = "maps memory files that other processes write")]

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{MmapMut, MmapOptions};

use crate::error::{Error, Result};
use crate::hal::{Allocation, DevicePtr, IpcHandle, MemoryInfo, MemoryKind};

/// Value of every byte of a fresh allocation in debug builds.
const POISON: u8 = 0xA5;

/// Memory of one device.
pub(super) struct Memory {
    limit_bytes: AtomicU64,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    by_address: BTreeMap<u64, Entry>,
    /// Own allocations; opened peer memory counts for its owner.
    used_bytes: u64,
}

struct Entry {
    allocation: Allocation,
    /// Holds the mapping; unmapped on drop.
    _map: MmapMut,
    /// The file behind peer memory and its tag.
    file: Option<(File, String)>,
    opened: bool,
}

impl Memory {
    pub fn new() -> Memory {
        Memory { limit_bytes: AtomicU64::new(machine_bytes()), table: Mutex::default() }
    }

    pub fn set_limit(&self, bytes: u64) {
        self.limit_bytes.store(bytes, Ordering::Relaxed);
    }

    pub fn count(&self) -> usize {
        self.table().by_address.len()
    }

    pub fn info(&self) -> MemoryInfo {
        let total_bytes = self.limit_bytes.load(Ordering::Relaxed);
        MemoryInfo { free_bytes: total_bytes.saturating_sub(self.table().used_bytes), total_bytes }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        if bytes == 0 {
            return Err(Error::device("allocate: 0 bytes").call("allocate", 1, "").help("ask for at least one byte"));
        }
        let mut table = self.table();
        let free = self.limit_bytes.load(Ordering::Relaxed).saturating_sub(table.used_bytes);
        if bytes > free {
            return Err(out_of_memory(bytes, &format!("{free} bytes are free")));
        }
        let size = usize::try_from(bytes).map_err(|_| out_of_memory(bytes, "no address space is that large"))?;
        let file = match kind {
            MemoryKind::Peer => memory_file(bytes)?,
            MemoryKind::Device | MemoryKind::Pinned => None,
        };
        let mapped = match &file {
            // SAFETY: the file is ours and never shrinks; processes that map it too race only as device code may (RACE-1).
            Some((file, _)) => unsafe { MmapOptions::new().len(size).map_mut(file) },
            None => MmapMut::map_anon(size),
        };
        let mut map = mapped.map_err(|error| out_of_memory(bytes, &error.to_string()))?;
        if cfg!(debug_assertions) {
            map.fill(POISON);
        }
        table.used_bytes += bytes;
        Ok(table.insert(kind, bytes, map, file, false))
    }

    pub fn free(&self, allocation: &Allocation) -> Result<()> {
        let mut table = self.table();
        match table.by_address.get(&allocation.ptr.0) {
            Some(entry) if entry.allocation == *allocation => {}
            _ => return Err(unknown("free", allocation)),
        }
        let entry = table.by_address.remove(&allocation.ptr.0).expect("invariant: found above, under the same lock");
        if !entry.opened {
            table.used_bytes -= allocation.bytes;
        }
        Ok(())
    }

    pub fn export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        let table = self.table();
        let entry = table
            .by_address
            .get(&allocation.ptr.0)
            .filter(|entry| entry.allocation == *allocation)
            .ok_or_else(|| unknown("ipc_export", allocation))?;
        if allocation.kind != MemoryKind::Peer || entry.opened {
            return Err(Error::device("ipc_export: only this process's own peer memory can be exported")
                .call("ipc_export", 1, "")
                .help("allocate it with MemoryKind::Peer in the process that exports it"));
        }
        let Some((file, tag)) = &entry.file else {
            return Err(
                Error::unavailable("ipc_export: this system has no memory files").help("run ranks as threads of one process")
            );
        };
        Ok(handle_of(file, tag, allocation.bytes))
    }

    pub fn open(&self, handle: &IpcHandle) -> Result<Allocation> {
        let (file, tag, bytes) = open_file(handle)?;
        let size = usize::try_from(bytes).map_err(|_| out_of_memory(bytes, "no address space is that large"))?;
        // SAFETY: the exporter's file never shrinks (checked to hold `bytes`); processes that map it race only as device code may (RACE-1).
        let map =
            unsafe { MmapOptions::new().len(size).map_mut(&file) }.map_err(|error| out_of_memory(bytes, &error.to_string()))?;
        Ok(self.table().insert(MemoryKind::Peer, bytes, map, Some((file, tag)), true))
    }
}

impl Table {
    fn insert(
        &mut self,
        kind: MemoryKind,
        bytes: u64,
        mut map: MmapMut,
        file: Option<(File, String)>,
        opened: bool,
    ) -> Allocation {
        let address = map.as_mut_ptr().expose_provenance() as u64;
        let allocation = Allocation { kind, ptr: DevicePtr(address), host: address, bytes };
        self.by_address.insert(address, Entry { allocation, _map: map, file, opened });
        allocation
    }
}

fn out_of_memory(bytes: u64, why: &str) -> Error {
    Error::device(format!("out of memory: {bytes} bytes asked for, {why}"))
        .call("allocate", 2, "")
        .help("lower max_num_seqs, max_model_len or the cache blocks, or raise the device's memory limit")
}

fn unknown(call: &'static str, allocation: &Allocation) -> Error {
    Error::device(format!("{call}: no allocation of {} bytes at {:#x} on this device", allocation.bytes, allocation.ptr.0))
        .call(call, 1, "")
        .help("hand back each allocation once, to the device that gave it")
}

#[cfg(target_os = "linux")]
fn machine_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

#[cfg(not(target_os = "linux"))]
fn machine_bytes() -> u64 {
    // No portable call tells it; the limit is then what the system's mappings refuse.
    u64::MAX
}

#[cfg(target_os = "linux")]
fn memory_file(bytes: u64) -> Result<Option<(File, String)>> {
    use rustix::fs::MemfdFlags;
    let failed = |error: rustix::io::Errno| {
        Error::device(format!("peer memory of {bytes} bytes: {error}"))
            .call("allocate", error.raw_os_error(), "")
            .help("raise the limit on open files or on shared memory")
    };
    let mut random = [0u8; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).map_err(failed)?;
    let tag = format!("capstan-{:032x}", u128::from_ne_bytes(random));
    let file = rustix::fs::memfd_create(tag.as_str(), MemfdFlags::CLOEXEC).map_err(failed)?;
    rustix::fs::ftruncate(&file, bytes).map_err(failed)?;
    Ok(Some((File::from(file), tag)))
}

#[cfg(not(target_os = "linux"))]
fn memory_file(_bytes: u64) -> Result<Option<(File, String)>> {
    Ok(None)
}

/// `pid:fd:bytes:tag`.
fn handle_of(file: &File, tag: &str, bytes: u64) -> IpcHandle {
    #[cfg(unix)]
    let fd = std::os::fd::AsRawFd::as_raw_fd(file);
    #[cfg(not(unix))]
    let fd = {
        let _ = file;
        0
    };
    IpcHandle(format!("{}:{fd}:{bytes}:{tag}", std::process::id()).into_bytes())
}

/// Opens the memory file a handle names, if it is still the one that was exported.
fn open_file(handle: &IpcHandle) -> Result<(File, String, u64)> {
    let malformed = || {
        Error::device("ipc_open: the handle is malformed")
            .call("ipc_open", 1, "")
            .help("pass on the bytes of ipc_export unchanged")
    };
    let gone = |why: String| {
        Error::device(format!("ipc_open: the exported memory is not there ({why})"))
            .call("ipc_open", 17, "")
            .help("keep the exporting process and its allocation alive; both must run as the same user, in one pid namespace")
    };
    let text = std::str::from_utf8(&handle.0).map_err(|_| malformed())?;
    let fields: Vec<&str> = text.split(':').collect();
    let [pid, fd, bytes, tag] = fields[..] else { return Err(malformed()) };
    let pid: u32 = pid.parse().map_err(|_| malformed())?;
    let fd: u32 = fd.parse().map_err(|_| malformed())?;
    let bytes: u64 = bytes.parse().map_err(|_| malformed())?;
    let path = format!("/proc/{pid}/fd/{fd}");
    let file = File::options().read(true).write(true).open(&path).map_err(|error| gone(error.to_string()))?;
    // The tag is asked of the file just opened, so that a descriptor reused meanwhile cannot pass.
    let name = own_name(&file).map_err(|error| gone(error.to_string()))?;
    if name != format!("/memfd:{tag} (deleted)") {
        return Err(gone("another file took its place".to_owned()));
    }
    let held = file.metadata().map_err(|error| gone(error.to_string()))?.len();
    if bytes == 0 || held < bytes {
        return Err(gone(format!("it holds {held} bytes, not {bytes}")));
    }
    Ok((file, tag.to_owned(), bytes))
}

#[cfg(unix)]
fn own_name(file: &File) -> std::io::Result<String> {
    let fd = std::os::fd::AsRawFd::as_raw_fd(file);
    Ok(std::fs::read_link(format!("/proc/self/fd/{fd}"))?.to_string_lossy().into_owned())
}

#[cfg(not(unix))]
fn own_name(_file: &File) -> std::io::Result<String> {
    Err(std::io::ErrorKind::Unsupported.into())
}

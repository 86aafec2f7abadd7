//! Pinned host memory that the device reads and writes while the host does.
#![expect(unsafe_code, reason = "accesses memory shared with a running device, by volatile and atomic operations")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::{Arena, Sealed};

/// A buffer in pinned memory. Bounds are checked; the sequence numbers stored and loaded with release and acquire order say who
/// owns the rest.
pub struct PinnedView {
    arena: Arc<Arena<Sealed>>,
    host: u64,
    bytes: u64,
}

impl PinnedView {
    pub(super) fn new(arena: Arc<Arena<Sealed>>, host: u64, bytes: u64) -> PinnedView {
        assert_eq!(host % 8, 0, "invariant: buffers are aligned");
        PinnedView { arena, host, bytes }
    }

    /// Copies `bytes` to `offset`. The caller owns that part: the device reads it only after the number that hands it over.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset, bytes.len() as u64) as *mut u8;
        // SAFETY: in bounds of an allocation the Arc keeps alive; by the ring's protocol the device does not touch a slot that
        // the host fills.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies out of `offset`. The caller owns that part: the device wrote it before the number that hands it over.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len() as u64) as *const u8;
        // SAFETY: as for `write`, the device is done with a slot whose number was seen.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Stores a number after everything written before it. `offset` is a multiple of 8.
    pub fn store_release(&self, offset: u64, value: u64) {
        self.word(offset).store(value, Ordering::Release);
        // A device behind a bus sees stores in order only past a full fence on weakly ordered hosts.
        fence(Ordering::SeqCst);
    }

    /// Loads a number before everything read after it. `offset` is a multiple of 8.
    pub fn load_acquire(&self, offset: u64) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        assert_eq!(offset % 8, 0, "numbers are aligned");
        let at = self.at(offset, 8) as *mut u64;
        // SAFETY: in bounds, aligned, alive as long as self; host and device access it atomically.
        unsafe { AtomicU64::from_ptr(at) }
    }

    fn at(&self, offset: u64, bytes: u64) -> u64 {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "{bytes} bytes at {offset} of {}", self.bytes);
        self.host + offset
    }
}

impl std::fmt::Debug for PinnedView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinnedView").field("bytes", &self.bytes).field("device", &self.arena.device().info().name).finish()
    }
}

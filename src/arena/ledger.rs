//! The ledger: buffer name to range and generation, with a fingerprint.

use std::sync::atomic::{AtomicU64, Ordering};

use slotmap::{SlotMap, new_key_type};

use super::BufferId;
use crate::hal::DevicePtr;

new_key_type! {
    /// A buffer's handle in its ledger; its generation tells a replaced buffer from the one it replaced.
    pub struct LedgerKey;
}

/// One buffer's range of addresses.
#[derive(Clone, Debug)]
pub struct LedgerEntry {
    /// Which buffer of the plan.
    pub buffer: BufferId,
    /// Its address.
    pub ptr: DevicePtr,
    /// Its size.
    pub bytes: u64,
}

/// Every range kernels may touch.
#[derive(Debug)]
pub struct Ledger {
    entries: SlotMap<LedgerKey, LedgerEntry>,
    by_buffer: Vec<LedgerKey>,
    // Sorted by address: a lookup is one binary search.
    by_address: Vec<(DevicePtr, LedgerKey)>,
    fingerprint: AtomicU64,
}

impl Ledger {
    pub(super) fn new(ranges: impl Iterator<Item = LedgerEntry>) -> Ledger {
        let mut ledger = Ledger {
            entries: SlotMap::with_key(),
            by_buffer: Vec::new(),
            by_address: Vec::new(),
            fingerprint: AtomicU64::new(0),
        };
        for entry in ranges {
            let ptr = entry.ptr;
            let key = ledger.entries.insert(entry);
            ledger.by_buffer.push(key);
            ledger.by_address.push((ptr, key));
        }
        ledger.settle();
        ledger
    }

    fn settle(&mut self) {
        use slotmap::Key;
        self.by_address.sort();
        // FNV-1a over every buffer's address, size and generation.
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for key in &self.by_buffer {
            let entry = &self.entries[*key];
            for word in [entry.ptr.0, entry.bytes, key.data().as_ffi()] {
                hash = (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
            }
        }
        *self.fingerprint.get_mut() = hash;
    }

    /// Gives a buffer its range, before anything was captured.
    pub(super) fn place(&mut self, buffer: BufferId, ptr: DevicePtr, bytes: u64) {
        let key = self.by_buffer[buffer.0 as usize];
        self.entries[key] = LedgerEntry { buffer, ptr, bytes };
        self.by_address.retain(|(_, other)| *other != key);
        self.by_address.push((ptr, key));
        self.settle();
    }

    /// A number that changes when any buffer moves, is resized or replaced (ADDR-2). Costs a load.
    #[inline]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint.load(Ordering::Relaxed)
    }

    /// Makes the ledger look as if `buffer` had moved, without moving it: how tests trip ADDR-2.
    #[doc(hidden)]
    pub fn pretend_moved(&self, buffer: BufferId) {
        self.fingerprint.fetch_xor(1 << (buffer.0 % 64), Ordering::Relaxed);
    }

    /// A buffer's entry.
    pub fn entry(&self, buffer: BufferId) -> &LedgerEntry {
        &self.entries[self.by_buffer[buffer.0 as usize]]
    }

    /// A buffer's handle.
    pub fn key(&self, buffer: BufferId) -> LedgerKey {
        self.by_buffer[buffer.0 as usize]
    }

    /// The buffer that holds `extent_bytes` from an address on, and the offset in it; `None` if no one buffer holds all of it.
    pub fn resolve(&self, ptr: DevicePtr, extent_bytes: u64) -> Option<(BufferId, u64)> {
        let after = self.by_address.partition_point(|(start, _)| *start <= ptr);
        let entry = &self.entries[self.by_address.get(after.checked_sub(1)?)?.1];
        let offset = ptr.0 - entry.ptr.0;
        (offset.checked_add(extent_bytes)? <= entry.bytes && (offset < entry.bytes || extent_bytes == 0))
            .then_some((entry.buffer, offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolves_inside_one_buffer_only() {
        let range = |buffer, ptr, bytes| LedgerEntry { buffer: BufferId(buffer), ptr: DevicePtr(ptr), bytes };
        let ledger = Ledger::new([range(0, 2048, 100), range(1, 1024, 256)].into_iter());
        assert_eq!(ledger.resolve(DevicePtr(2050), 98), Some((BufferId(0), 2)));
        assert_eq!(ledger.resolve(DevicePtr(2050), 99), None);
        assert_eq!(ledger.resolve(DevicePtr(1023), 1), None);
        assert_eq!(ledger.resolve(DevicePtr(1024), 256), Some((BufferId(1), 0)));
        assert_eq!(ledger.resolve(DevicePtr(1024 + 256), 1), None);
        let before = ledger.fingerprint();
        ledger.pretend_moved(BufferId(1));
        assert_ne!(ledger.fingerprint(), before);
    }
}

//! Slabs: the arena's allocations, from planning to sealed.
#![expect(unsafe_code, reason = "frees its own allocations and copies inside their bounds")]

use std::marker::PhantomData;
use std::sync::Arc;

use super::plan::GUARD_BYTES;
use super::{ArenaPlan, BufferId, Ledger, LedgerEntry, PinnedView};
use crate::error::{Error, Result};
use crate::hal::{Allocation, Device, DevicePtr, IpcHandle, MemoryKind, Stream};

/// Byte of every guard band.
const GUARD_PATTERN: u8 = 0xc5;

/// State of an arena that still allocates.
#[derive(Debug)]
pub struct Planning;
/// State of an arena whose addresses are final.
#[derive(Debug)]
pub struct Sealed;

/// All persistent memory of one device and rank.
///
/// [`Arena::allocate`] makes the slabs, [`Arena::seal`] freezes them. Dropping it frees everything: captured graphs hold an
/// `Arc` of their arena, so they never outlive it.
#[derive(Debug)]
pub struct Arena<State> {
    slabs: Slabs,
    plan: ArenaPlan,
    ledger: Ledger,
    stream: Arc<dyn Stream>,
    state: PhantomData<State>,
}

/// The allocations, freed together; a failure half way frees what was there.
#[derive(Debug)]
struct Slabs {
    device: Arc<dyn Device>,
    allocations: Vec<Allocation>,
    // Peer slabs of other ranks.
    opened: Vec<Allocation>,
}

impl Slabs {
    fn of(&self, kind: MemoryKind) -> Option<&Allocation> {
        self.allocations.iter().find(|allocation| allocation.kind == kind)
    }
}

impl Drop for Slabs {
    fn drop(&mut self) {
        if !self.allocations.is_empty()
            && let Err(error) = self.device.synchronize()
        {
            tracing::error!(%error, "the device did not finish before its arena was freed");
        }
        for allocation in self.opened.drain(..).chain(self.allocations.drain(..)) {
            // SAFETY: SEAL-1, these are this arena's own allocations; graphs that point into them hold the arena, and the
            // device was synchronised.
            if let Err(error) = unsafe { self.device.free(allocation) } {
                tracing::error!(%error, "a slab was not freed");
            }
        }
    }
}

impl Arena<Planning> {
    /// Allocates every slab of `plan`, zeroes the buffers and writes the guard bands.
    ///
    /// Errors: out of memory (names the slab and its largest buffers); whatever was allocated is freed.
    pub fn allocate(device: &Arc<dyn Device>, plan: ArenaPlan) -> Result<Arena<Planning>> {
        fits(&plan)?;
        let mut slabs = Slabs { device: device.clone(), allocations: Vec::with_capacity(plan.slabs.len()), opened: Vec::new() };
        for slab in &plan.slabs {
            let allocation = device.allocate(slab.memory, slab.bytes).map_err(|error| describe(error, &plan, slab.memory))?;
            slabs.allocations.push(allocation);
        }
        let stream = device.create_stream()?;
        let ranges = plan.buffers.iter().enumerate().map(|(at, buffer)| {
            if plan.imports.contains_key(&BufferId(at as u32)) {
                return LedgerEntry { buffer: BufferId(at as u32), ptr: DevicePtr::NULL, bytes: 0 };
            }
            let slab = slabs.of(buffer.spec.memory).expect("invariant: the plan has a slab for every buffer");
            LedgerEntry { buffer: BufferId(at as u32), ptr: slab.ptr.add(buffer.offset), bytes: buffer.bytes }
        });
        let ledger = Ledger::new(ranges);
        for slab in &slabs.allocations {
            for band in bands(&plan, slab) {
                // SAFETY: the plan places every band inside its slab.
                unsafe { stream.fill(slab.ptr.add(band.from), GUARD_PATTERN, band.to - band.from) }?;
            }
        }
        for at in 0..plan.buffers.len() as u32 {
            let LedgerEntry { ptr, bytes, .. } = *ledger.entry(BufferId(at));
            if bytes > 0 {
                // SAFETY: the plan places every buffer inside its slab.
                unsafe { stream.fill(ptr, 0, bytes) }?;
            }
        }
        stream.synchronize()?;
        Ok(Arena { slabs, plan, ledger, stream, state: PhantomData })
    }

    /// Freezes every address. Nothing allocates or frees from here on (SEAL-1).
    pub fn seal(self) -> Result<Arena<Sealed>> {
        let Arena { slabs, plan, ledger, stream, .. } = self;
        let arena = Arena { slabs, plan, ledger, stream, state: PhantomData };
        arena.check_guards()?;
        tracing::debug!(bytes = arena.plan.total_bytes(), buffers = arena.plan.buffers.len(), "arena sealed");
        Ok(arena)
    }
}

impl Arena<Sealed> {
    /// The plan it was made from.
    pub fn plan(&self) -> &ArenaPlan {
        &self.plan
    }

    /// The device it lives on.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.slabs.device
    }

    /// Every range and its fingerprint.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The handle of the slab that peers write; `None` if nothing of this arena is visible to them.
    pub fn export(&self) -> Result<Option<IpcHandle>> {
        self.slabs.of(MemoryKind::Peer).map(|slab| self.slabs.device.ipc_export(slab)).transpose()
    }

    /// Opens the peer slab of another rank and enters its buffers into the ledger. Once a rank, before anything is captured.
    ///
    /// Errors: the handle is of no living allocation, or of one that is smaller than this rank's own slab.
    pub fn import(&mut self, rank: u32, handle: &IpcHandle) -> Result<()> {
        let opened = self.slabs.device.ipc_open(handle)?;
        self.slabs.opened.push(opened);
        let least = self.slabs.of(MemoryKind::Peer).map_or(0, |slab| slab.bytes);
        if opened.bytes < least {
            let found = opened.bytes;
            return Err(Error::peer(format!("rank {rank} shares {found} bytes, this rank {least}"))
                .help("give every rank the same limits and the same model"));
        }
        let imports: Vec<BufferId> =
            self.plan.imports.iter().filter(|(_, from)| **from == rank).map(|(&buffer, _)| buffer).collect();
        for buffer in imports {
            let planned = self.plan.buffer(buffer);
            self.ledger.place(buffer, opened.ptr.add(planned.offset), planned.bytes);
        }
        Ok(())
    }

    /// A buffer's address.
    pub fn ptr(&self, buffer: BufferId) -> DevicePtr {
        self.ledger.entry(buffer).ptr
    }

    /// Copies `bytes` into a buffer and waits. Panics if they do not fit. Not during a capture.
    pub fn write(&self, buffer: BufferId, offset: u64, bytes: &[u8]) -> Result<()> {
        let ptr = self.range(buffer, offset, bytes.len() as u64);
        // SAFETY: ADDR-1, the range was just checked against the ledger.
        unsafe { self.stream.write(ptr, bytes) }
    }

    /// Copies out of a buffer once its earlier work on this arena's own stream is done. Panics if the range does not fit. Not
    /// during a capture; the caller has waited for steps that write it.
    pub fn read(&self, buffer: BufferId, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let ptr = self.range(buffer, offset, bytes.len() as u64);
        // SAFETY: ADDR-1, the range was just checked against the ledger.
        unsafe { self.stream.read(ptr, bytes) }
    }

    /// Fills a range of a buffer with one byte and waits. Panics if it does not fit. Not during a capture; the caller has waited
    /// for steps that touch it.
    pub fn fill(&self, buffer: BufferId, offset: u64, bytes: u64, byte: u8) -> Result<()> {
        let ptr = self.range(buffer, offset, bytes);
        // SAFETY: ADDR-1, the range was just checked against the ledger.
        unsafe { self.stream.fill(ptr, byte, bytes) }?;
        self.stream.synchronize()
    }

    /// A buffer in pinned memory, as the host sees it.
    pub fn pinned(self: &Arc<Self>, buffer: BufferId) -> Result<PinnedView> {
        let planned = self.plan.buffer(buffer);
        let slab = self.slabs.of(planned.spec.memory).filter(|slab| slab.kind == MemoryKind::Pinned && slab.host != 0);
        let Some(slab) = slab else {
            return Err(Error::state(format!("buffer {} is not in pinned memory", planned.spec.name)));
        };
        Ok(PinnedView::new(self.clone(), slab.host + planned.offset, planned.bytes))
    }

    /// GUARD-1: every guard band still holds its pattern. The error names the buffers on both sides of a damaged one.
    pub fn check_guards(&self) -> Result<()> {
        if !self.slabs.device.info().executes {
            return Ok(());
        }
        let mut bytes = Vec::new();
        for slab in &self.slabs.allocations {
            for Band { from, to, before, after } in bands(&self.plan, slab) {
                bytes.resize((to - from) as usize, 0);
                // SAFETY: the plan places every band inside its slab.
                unsafe { self.stream.read(slab.ptr.add(from), &mut bytes) }?;
                if let Some(at) = bytes.iter().position(|&byte| byte != GUARD_PATTERN) {
                    return Err(Error::invariant(
                        "GUARD-1",
                        format!("the guard band between {before} and {after} is damaged, {at} bytes in"),
                    )
                    .help(format!("a kernel writes past the end of {before} or before the start of {after}")));
                }
            }
        }
        Ok(())
    }

    fn range(&self, buffer: BufferId, offset: u64, bytes: u64) -> DevicePtr {
        let entry = self.ledger.entry(buffer);
        let name = &self.plan.buffer(buffer).spec.name;
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= entry.bytes),
            "{bytes} bytes at {offset} do not fit buffer {name}"
        );
        entry.ptr.add(offset)
    }
}

/// A guard band: its range in the slab and what lies on its sides.
struct Band<'a> {
    from: u64,
    to: u64,
    before: &'a str,
    after: &'a str,
}

/// The guard bands of a slab, from its start to its end; the gaps that alignment leaves belong to them.
fn bands<'a>(plan: &'a ArenaPlan, slab: &Allocation) -> Vec<Band<'a>> {
    let mut buffers: Vec<_> = plan.own().filter(|buffer| buffer.spec.memory == slab.kind).collect();
    buffers.sort_by_key(|buffer| buffer.offset);
    let mut bands = Vec::with_capacity(buffers.len() + 1);
    let (mut from, mut before) = (0, "the start of the slab");
    for next in buffers {
        // Buffers that overlap (ADDR-3) have no band between them.
        if next.offset > from {
            bands.push(Band { from, to: next.offset, before, after: &next.spec.name });
        }
        (from, before) = (from.max(next.offset + next.bytes), &next.spec.name);
    }
    bands.push(Band { from, to: slab.bytes, before, after: "the end of the slab" });
    bands
}

/// ADDR-1: every buffer lies inside its slab, with room for a guard band behind it.
fn fits(plan: &ArenaPlan) -> Result<()> {
    for buffer in &plan.buffers {
        let slab = plan.slabs.iter().find(|slab| slab.memory == buffer.spec.memory).map_or(0, |slab| slab.bytes);
        let end = buffer.offset.checked_add(buffer.bytes).and_then(|end| end.checked_add(GUARD_BYTES));
        if end.is_none_or(|end| end > slab) {
            let (name, memory) = (&buffer.spec.name, buffer.spec.memory);
            let message = format!("buffer {name} and its guard band do not fit the {memory:?} slab of {slab} bytes");
            return Err(Error::invariant("ADDR-1", message).help("lay the plan out with PlanBuilder::finish"));
        }
    }
    Ok(())
}

fn describe(error: Error, plan: &ArenaPlan, kind: MemoryKind) -> Error {
    let mut buffers: Vec<_> = plan.buffers.iter().filter(|buffer| buffer.spec.memory == kind).collect();
    buffers.sort_by_key(|buffer| std::cmp::Reverse(buffer.bytes));
    let largest: Vec<String> = buffers
        .iter()
        .take(3)
        .map(|buffer| format!("{} {} {} bytes", buffer.spec.name, buffer.spec.formula, buffer.bytes))
        .collect();
    error
        .at(|| format!("allocating the {kind:?} slab"))
        .help(format!("the largest buffers are {}; lower the limits they are made of", largest.join(", ")))
}

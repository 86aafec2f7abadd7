//! The arena over a device of plain host memory that counts its allocations and can fail any call: nothing leaks, whatever
//! fails; guard bands and the ledger tell damage and moves.

#![expect(unsafe_code, reason = "a device of plain host memory")]

use std::alloc::{Layout, alloc, dealloc};
use std::any::Any;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use capstan::arena::{Arena, ArenaPlan, BufferId, BufferSpec, PlanBuilder, Purpose, Sealed};
use capstan::error::ErrorKind;
use capstan::hal::*;
use capstan::{DType, Error, Result};

/// Calls made, calls allowed, and allocations alive.
#[derive(Debug, Default)]
struct Counts {
    calls: AtomicU64,
    fail_at: AtomicU64,
    alive: AtomicI64,
    allocated: AtomicU64,
    freed: Mutex<Vec<MemoryKind>>,
}

impl Counts {
    fn call(&self, name: &'static str) -> Result<()> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        if number == self.fail_at.load(Ordering::SeqCst) { Err(Error::device("refused").call(name, 2, "")) } else { Ok(()) }
    }
}

#[derive(Debug)]
struct Heap {
    info: DeviceInfo,
    counts: Arc<Counts>,
}

#[derive(Debug)]
struct Queue(Arc<Counts>);

const PAGE: usize = 4096;

fn layout(bytes: u64) -> Layout {
    Layout::from_size_align(bytes as usize, PAGE).expect("a small size")
}

impl Device for Heap {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn memory(&self) -> Result<MemoryInfo> {
        Ok(MemoryInfo { free_bytes: 1 << 30, total_bytes: 1 << 30 })
    }
    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        self.counts.call("allocate")?;
        self.counts.alive.fetch_add(1, Ordering::SeqCst);
        self.counts.allocated.fetch_add(bytes, Ordering::SeqCst);
        // SAFETY: no plan asks for zero bytes.
        let at = unsafe { alloc(layout(bytes)) } as u64;
        assert_ne!(at, 0);
        Ok(Allocation { kind, ptr: DevicePtr(at), host: at, bytes })
    }
    unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        self.counts.alive.fetch_sub(1, Ordering::SeqCst);
        self.counts.freed.lock().unwrap().push(allocation.kind);
        // SAFETY: allocated above with the same layout.
        unsafe { dealloc(allocation.ptr.0 as *mut u8, layout(allocation.bytes)) };
        Ok(())
    }
    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        self.counts.call("create_stream")?;
        Ok(Arc::new(Queue(self.counts.clone())))
    }
    fn create_event(&self, _timing: bool) -> Result<Arc<dyn Event>> {
        Err(Error::unavailable("no events"))
    }
    fn load_module(&self, _image: ModuleImage<'_>) -> Result<Arc<dyn Module>> {
        Err(Error::unavailable("no modules"))
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn ipc_export(&self, _allocation: &Allocation) -> Result<IpcHandle> {
        Err(Error::unavailable("no other process"))
    }
    fn ipc_open(&self, _handle: &IpcHandle) -> Result<Allocation> {
        Err(Error::unavailable("no other process"))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Stream for Queue {
    unsafe fn launch(&self, _: FunctionHandle, _: &LaunchShape, _: &[u8]) -> Result<()> {
        Err(Error::unavailable("no kernels"))
    }
    unsafe fn copy(&self, _: DevicePtr, _: DevicePtr, _: u64) -> Result<()> {
        Err(Error::unavailable("no copies"))
    }
    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: u64) -> Result<()> {
        self.0.call("fill")?;
        // SAFETY: the arena fills inside its slabs.
        unsafe { std::ptr::write_bytes(dst.0 as *mut u8, byte, bytes as usize) };
        Ok(())
    }
    unsafe fn write(&self, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.0.call("write")?;
        // SAFETY: the arena writes inside its buffers.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst.0 as *mut u8, bytes.len()) };
        Ok(())
    }
    unsafe fn read(&self, src: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        self.0.call("read")?;
        // SAFETY: the arena reads inside its slabs.
        unsafe { std::ptr::copy_nonoverlapping(src.0 as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
    fn record(&self, _: &dyn Event) -> Result<()> {
        Err(Error::unavailable("no events"))
    }
    fn wait(&self, _: &dyn Event) -> Result<()> {
        Err(Error::unavailable("no events"))
    }
    fn synchronize(&self) -> Result<()> {
        self.0.call("synchronize")
    }
    fn query(&self) -> Result<bool> {
        Ok(true)
    }
    fn begin_capture(&self, _: CaptureMode) -> Result<()> {
        Err(Error::unavailable("no capture"))
    }
    fn end_capture(&self) -> Result<Arc<dyn Graph>> {
        Err(Error::unavailable("no capture"))
    }
    fn capture_status(&self) -> Result<CaptureStatus> {
        Ok(CaptureStatus::None)
    }
    unsafe fn launch_graph(&self, _: &dyn GraphExec) -> Result<()> {
        Err(Error::unavailable("no capture"))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn heap() -> (Arc<dyn Device>, Arc<Counts>) {
    let counts = Arc::new(Counts::default());
    let info = DeviceInfo {
        platform: Platform::Cpu,
        name: "heap".into(),
        arch: "host".into(),
        driver: "none".into(),
        wave_lanes: 1,
        compute_units: 1,
        lds_bytes_max: 0,
        executes: true,
    };
    (Arc::new(Heap { info, counts: counts.clone() }), counts)
}

fn plan() -> ArenaPlan {
    let mut builder = PlanBuilder::default();
    let kinds = [MemoryKind::Device, MemoryKind::Pinned, MemoryKind::Device, MemoryKind::Peer, MemoryKind::Device];
    for (at, memory) in kinds.into_iter().enumerate() {
        builder.add(BufferSpec {
            name: format!("buffer{at}"),
            dtype: DType::U8,
            shape: vec![100 + 300 * at as u64],
            formula: "[n]".into(),
            memory,
            purpose: Purpose::Workspace,
            reason: "test".into(),
        });
    }
    builder.finish().unwrap()
}

fn sealed(device: &Arc<dyn Device>) -> Result<Arc<Arena<Sealed>>> {
    Ok(Arc::new(Arena::allocate(device, plan())?.seal()?))
}

#[test]
fn whatever_call_fails_nothing_leaks_and_the_next_try_works() {
    let (device, counts) = heap();
    drop(sealed(&device).unwrap());
    let calls = counts.calls.load(Ordering::SeqCst);
    assert!(calls > 10);
    for fail_at in 1..=calls {
        counts.calls.store(0, Ordering::SeqCst);
        counts.fail_at.store(fail_at, Ordering::SeqCst);
        let error = sealed(&device).expect_err("a call fails");
        assert_eq!(error.kind(), ErrorKind::Device, "call {fail_at}");
        assert_eq!(counts.alive.load(Ordering::SeqCst), 0, "call {fail_at} leaked");
    }
    counts.fail_at.store(0, Ordering::SeqCst);
    let arena = sealed(&device).unwrap();
    assert_eq!(counts.alive.load(Ordering::SeqCst), 3, "one slab a memory kind");
    drop(arena);
    assert_eq!(counts.alive.load(Ordering::SeqCst), 0);
}

#[test]
fn a_failed_allocation_names_the_largest_buffers() {
    let (device, counts) = heap();
    counts.fail_at.store(1, Ordering::SeqCst);
    let error = sealed(&device).unwrap_err();
    assert!(error.help_line().unwrap().contains("buffer4") && error.device_call().unwrap().call == "allocate", "{error}");
}

#[test]
fn buffers_start_as_zeros_and_a_view_outlives_nothing() {
    let (device, counts) = heap();
    let arena = sealed(&device).unwrap();
    let before = counts.allocated.load(Ordering::SeqCst);
    for at in 0..5u32 {
        let id = BufferId(at);
        let planned = arena.plan().buffer(id).clone();
        let mut bytes = vec![1; planned.bytes as usize];
        arena.read(id, 0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0), "{}", planned.spec.name);
        arena.write(id, planned.bytes - 3, &[7, 8, 9]).unwrap();
        arena.read(id, 0, &mut bytes).unwrap();
        assert_eq!(bytes[bytes.len() - 3..], [7, 8, 9]);
        assert_eq!(arena.ledger().resolve(arena.ptr(id), planned.bytes), Some((id, 0)));
        assert_eq!(arena.ledger().resolve(arena.ptr(id), planned.bytes + 1), None);
    }
    arena.check_guards().unwrap();
    let ring = arena.pinned(BufferId(1)).unwrap();
    assert_eq!(arena.pinned(BufferId(0)).unwrap_err().kind(), ErrorKind::State);
    ring.store_release(8, 0xdead);
    ring.write(16, b"slot");
    let mut word = [0; 8];
    arena.read(BufferId(1), 8, &mut word).unwrap();
    assert_eq!((u64::from_le_bytes(word), ring.load_acquire(8)), (0xdead, 0xdead));
    // SEAL-1: none of this allocated device memory, and the view keeps the slabs alive.
    assert_eq!(counts.allocated.load(Ordering::SeqCst), before);
    drop(arena);
    assert_eq!(counts.alive.load(Ordering::SeqCst), 3);
    assert_eq!(ring.load_acquire(8), 0xdead);
    drop(ring);
    assert_eq!(counts.alive.load(Ordering::SeqCst), 0);
}

#[test]
fn every_damaged_guard_band_is_named() {
    let (device, _) = heap();
    let arena = sealed(&device).unwrap();
    let stream = device.create_stream().unwrap();
    for at in 0..5u32 {
        let id = BufferId(at);
        let bytes = arena.plan().buffer(id).bytes;
        let name = format!("buffer{at}");
        for (ptr, side) in [(arena.ptr(id).add(bytes), "past the end"), (DevicePtr(arena.ptr(id).0 - 1), "before the start")] {
            let mut kept = [0];
            // SAFETY: one byte of a guard band, inside the slab.
            unsafe { stream.read(ptr, &mut kept) }.unwrap();
            // SAFETY: as above.
            unsafe { stream.write(ptr, &[!kept[0]]) }.unwrap();
            let error = arena.check_guards().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invariant("GUARD-1"));
            assert!(error.message().contains(&name), "{side} of {name}: {error}");
            // SAFETY: as above.
            unsafe { stream.write(ptr, &kept) }.unwrap();
            arena.check_guards().unwrap();
        }
    }
}

#[test]
fn the_fingerprint_tells_arenas_and_moves_apart() {
    let (device, _) = heap();
    let (one, other) = (sealed(&device).unwrap(), sealed(&device).unwrap());
    assert_ne!(one.ledger().fingerprint(), other.ledger().fingerprint());
    let before = one.ledger().fingerprint();
    one.ledger().pretend_moved(BufferId(2));
    assert_ne!(one.ledger().fingerprint(), before);
}

#[test]
#[should_panic(expected = "do not fit buffer buffer0")]
fn a_write_past_a_buffer_is_a_bug_of_the_caller() {
    let (device, _) = heap();
    let _ = sealed(&device).unwrap().write(BufferId(0), 99, &[0, 0]);
}

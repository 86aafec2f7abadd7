//! Workers that share a launch's workgroups with the stream that runs it.
//!
//! One launch uses the pool at a time; a stream that finds it taken runs its launch alone, so no stream ever waits for
//! another one's op. Workgroups are handed out by a counter. Workers spin briefly, then park; parked ones are woken only
//! when the first workgroup's time says that the rest is worth it. Nothing allocates.

#![expect(unsafe_code, reason = "runs ops, shares a launch between threads")]

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::hal::record::LDS_BYTES_MAX;
use crate::hal::{CpuOp, LaunchShape, Workgroup};

/// How long anyone spins before parking: long enough for the gap between two nodes, short enough for two cores.
const SPIN: Duration = Duration::from_micros(20);
/// Work left that is worth a wake-up, which costs the waker about this much.
const WAKE_WORTH: Duration = Duration::from_micros(10);

/// Spins until `ready` for [`SPIN`]; false if it ran out.
pub(super) fn spin_until(ready: impl Fn() -> bool) -> bool {
    for _ in 0..16 {
        if ready() {
            return true;
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    loop {
        for _ in 0..32 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}

/// A thread's LDS, allocated once.
pub(super) struct Lds(Box<[Line]>);

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Lds {
    pub fn new() -> Lds {
        Lds(vec![Line([0; 64]); LDS_BYTES_MAX as usize / 64].into_boxed_slice())
    }

    /// The first `bytes`, poisoned in debug builds: an op must not count on what an earlier workgroup left.
    fn take(&mut self, bytes: u32) -> &mut [u8] {
        let lds = &mut bytemuck::cast_slice_mut::<Line, u8>(&mut self.0)[..bytes as usize];
        if cfg!(debug_assertions) {
            lds.fill(0xA5);
        }
        lds
    }
}

/// A launch as threads share it. Plain copies: the pointers live as long as the gate says.
#[derive(Clone, Copy)]
struct Job {
    op: CpuOp,
    args: *const u8,
    args_bytes: usize,
    shape: LaunchShape,
    workgroups: u64,
}

const OPEN: u64 = 1 << 15;
const INSIDE: u64 = OPEN - 1;
const EPOCH_SHIFT: u32 = 16;

struct Shared {
    /// `epoch << 16 | OPEN | workers inside`. A worker enters by counting itself in while OPEN is set; the owner writes
    /// `job` only while OPEN is clear and nobody is inside.
    gate: AtomicU64,
    job: UnsafeCell<Job>,
    next: AtomicU64,
    panicked: Mutex<Option<String>>,
    any_panicked: AtomicBool,
    sleepers: AtomicUsize,
    stop: AtomicBool,
    parking: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job`, the one field that is not Sync by itself, is written by the pool's owner alone, while the gate is closed
// and empty, and read only by threads counted in through the open gate.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only while the launch it belongs to is running.
unsafe impl Send for Shared {}

/// The workers of one device.
pub(super) struct Pool {
    shared: Arc<Shared>,
    /// Taken by the stream whose launch the workers share.
    taken: AtomicBool,
    threads: Vec<JoinHandle<()>>,
}

unsafe fn no_op(_: &[u8], _: &mut Workgroup<'_>) {}

impl Pool {
    /// Starts `workers` threads.
    pub fn new(workers: usize) -> Result<Pool> {
        let shape = LaunchShape { grid: [1; 3], workgroup: [1; 3], lds_bytes: 0 };
        let job = Job { op: no_op, args: std::ptr::null(), args_bytes: 0, shape, workgroups: 0 };
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            job: UnsafeCell::new(job),
            next: AtomicU64::new(0),
            panicked: Mutex::default(),
            any_panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            parking: Mutex::default(),
            wake: Condvar::new(),
        });
        let mut pool = Pool { shared, taken: AtomicBool::new(false), threads: Vec::with_capacity(workers) };
        for worker in 0..workers.min(INSIDE as usize) {
            let shared = pool.shared.clone();
            let thread = thread::Builder::new().name(format!("capstan-worker-{worker}")).spawn(move || work(&shared));
            pool.threads.push(thread.map_err(|error| {
                Error::device(format!("cannot start worker {worker}: {error}")).help("ask for fewer threads")
            })?);
        }
        Ok(pool)
    }

    /// Runs every workgroup of a launch and returns when all have run; `Err` holds the message of an op that panicked.
    ///
    /// # Safety
    /// As for the op: every pointer in `args` is valid for its kernel's extent (ADDR-1), nothing else touches what the
    /// launch writes (RACE-1).
    pub unsafe fn run(&self, op: CpuOp, shape: &LaunchShape, args: &[u8], lds: &mut Lds) -> Result<(), String> {
        let workgroups = shape.grid.iter().map(|&dim| u64::from(dim)).product();
        let job = Job { op, args: args.as_ptr(), args_bytes: args.len(), shape: *shape, workgroups };
        let alone = workgroups == 1 || self.threads.is_empty() || self.taken.swap(true, Ordering::Acquire);
        if alone {
            let next = AtomicU64::new(0);
            // SAFETY: the caller's contract; `args` outlives this call.
            return catch_unwind(AssertUnwindSafe(|| unsafe { run_workgroups(&job, &next, lds) }))
                .map_err(|panic| message(&*panic));
        }
        // SAFETY: the caller's contract; `taken` is ours, so the gate is closed and empty.
        let result = unsafe { self.run_shared(job, lds) };
        self.taken.store(false, Ordering::Release);
        result
    }

    /// # Safety
    /// As for [`Pool::run`]; the caller holds `taken`.
    unsafe fn run_shared(&self, job: Job, lds: &mut Lds) -> Result<(), String> {
        let shared = &*self.shared;
        // SAFETY: the gate is closed and nobody is inside, see `gate`.
        unsafe { *shared.job.get() = job };
        shared.next.store(1, Ordering::Relaxed);
        let epoch = (shared.gate.load(Ordering::Relaxed) >> EPOCH_SHIFT) + 1;
        shared.gate.store(epoch << EPOCH_SHIFT | OPEN, Ordering::SeqCst);
        let own = catch_unwind(AssertUnwindSafe(|| {
            let start = Instant::now();
            // SAFETY: the caller's contract; workgroup 0 was kept back from the counter for this thread.
            unsafe { run_workgroup(&job, 0, lds) };
            let left = job.workgroups - 1;
            if start.elapsed().saturating_mul(left.min(1 << 20) as u32) >= WAKE_WORTH {
                shared.wake(left);
            }
            // SAFETY: the caller's contract.
            unsafe { run_workgroups(&job, &shared.next, lds) };
        }));
        if let Err(panic) = own {
            shared.panic(&job, &*panic);
        }
        shared.gate.fetch_and(!OPEN, Ordering::AcqRel);
        let empty = || shared.gate.load(Ordering::Acquire) & INSIDE == 0;
        while !spin_until(empty) {
            thread::yield_now();
        }
        if shared.any_panicked.swap(false, Ordering::Acquire) {
            let panicked = shared.panicked.lock().unwrap_or_else(PoisonError::into_inner).take();
            return Err(panicked.unwrap_or_default());
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake(u64::MAX);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Wakes up to `count` parked workers.
    fn wake(&self, count: u64) {
        let sleepers = self.sleepers.load(Ordering::SeqCst) as u64;
        if sleepers == 0 {
            return;
        }
        drop(self.parking.lock().unwrap_or_else(PoisonError::into_inner));
        for _ in 0..count.min(sleepers) {
            self.wake.notify_one();
        }
    }

    /// Keeps the message and stops handing out workgroups.
    fn panic(&self, job: &Job, panic: &(dyn Any + Send)) {
        self.next.store(job.workgroups, Ordering::Relaxed);
        self.panicked.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| message(panic));
        self.any_panicked.store(true, Ordering::Release);
    }

    /// True if a launch after `seen` is open.
    fn open_after(&self, seen: u64) -> bool {
        let gate = self.gate.load(Ordering::SeqCst);
        gate & OPEN != 0 && gate >> EPOCH_SHIFT != seen
    }

    /// Counts this thread in if a launch is open; gives its epoch.
    fn enter(&self) -> Option<u64> {
        let entered = self.gate.fetch_update(Ordering::AcqRel, Ordering::Acquire, |gate| (gate & OPEN != 0).then_some(gate + 1));
        entered.ok().map(|gate| gate >> EPOCH_SHIFT)
    }

    fn park(&self, seen: u64) {
        let mut parking = self.parking.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !self.stop.load(Ordering::SeqCst) && !self.open_after(seen) {
            parking = self.wake.wait(parking).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A worker's life.
fn work(shared: &Shared) {
    let mut lds = Lds::new();
    let mut seen = 0;
    while !shared.stop.load(Ordering::Acquire) {
        if !spin_until(|| shared.open_after(seen) || shared.stop.load(Ordering::Relaxed)) {
            shared.park(seen);
            continue;
        }
        let Some(epoch) = shared.enter() else { continue };
        seen = epoch;
        // SAFETY: counted in through the open gate, so `job` is not written until this thread counts itself out.
        let job = unsafe { *shared.job.get() };
        // SAFETY: whoever queued the launch answers for its pointers (contract of `Pool::run`); the owner keeps `args`
        // alive until the gate is empty.
        let run = catch_unwind(AssertUnwindSafe(|| unsafe { run_workgroups(&job, &shared.next, &mut lds) }));
        if let Err(panic) = run {
            shared.panic(&job, &*panic);
        }
        shared.gate.fetch_sub(1, Ordering::Release);
    }
}

/// # Safety
/// As for [`Pool::run`].
unsafe fn run_workgroups(job: &Job, next: &AtomicU64, lds: &mut Lds) {
    loop {
        let at = next.fetch_add(1, Ordering::Relaxed);
        if at >= job.workgroups {
            return;
        }
        // SAFETY: the caller's contract.
        unsafe { run_workgroup(job, at, lds) };
    }
}

/// # Safety
/// As for [`Pool::run`].
unsafe fn run_workgroup(job: &Job, at: u64, lds: &mut Lds) {
    let [x, y, _] = job.shape.grid.map(u64::from);
    let id = [(at % x) as u32, (at / x % y) as u32, (at / x / y) as u32];
    let mut workgroup = Workgroup { id, shape: job.shape, lds: lds.take(job.shape.lds_bytes) };
    // SAFETY: `args` is alive (contract of `Pool::run`) and holds `args_bytes` bytes; the op's own contract is the caller's.
    unsafe { (job.op)(std::slice::from_raw_parts(job.args, job.args_bytes), &mut workgroup) };
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panicked".to_owned())
}

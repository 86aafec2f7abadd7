//! Streams: bounded queues of commands, run in order by a thread each.

#![expect(unsafe_code, reason = "implements unsafe methods of Stream, runs copies and fills")]

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use super::Shared;
use super::event::{CpuEvent, Point, Stamp};
use super::graph::{CpuGraph, CpuGraphExec, Replay};
use super::pool::{Lds, spin_until};
use crate::error::{Error, Result};
use crate::hal::record::{RecordedNode, StreamCapture};
use crate::hal::{
    CaptureMode, CaptureStatus, CpuKernel, DevicePtr, Event, FunctionHandle, Graph, GraphExec, LaunchShape, Stream,
};

/// Commands a queue holds; a caller that is further ahead waits.
const DEPTH: usize = 256;
/// Arguments up to this size travel inside the command; larger ones cost an allocation.
const INLINE_ARGS_BYTES: usize = 512;

/// A stream of the CPU device. Dropping it waits for what is queued.
pub(super) struct CpuStream {
    shared: Arc<Shared>,
    queue: Arc<Queue>,
    capture: StreamCapture,
    thread: Option<JoinHandle<()>>,
}

/// The queue and how far it is.
pub(super) struct Queue {
    id: u64,
    commands: Mutex<Commands>,
    /// Commands arrived, or the thread must stop.
    ready: Condvar,
    /// Room in a full queue.
    space: Condvar,
    submitted: AtomicU64,
    done: AtomicU64,
    waiters: AtomicUsize,
    passing: Mutex<()>,
    passed: Condvar,
    /// The first command that failed, and why. Commands after it do not run.
    failure: OnceLock<(u64, String)>,
}

struct Commands {
    queue: VecDeque<Command>,
    parked: bool,
    space_waiters: usize,
}

#[expect(clippy::large_enum_variant, reason = "the queue is allocated once; boxing a launch would allocate on the hot path")]
enum Command {
    Kernel { kernel: CpuKernel, shape: LaunchShape, args: Args },
    Copy { dst: DevicePtr, src: DevicePtr, bytes: u64 },
    Fill { dst: DevicePtr, byte: u8, bytes: u64 },
    Stamp(Arc<Stamp>),
    Wait(Point),
    Replay(Arc<Replay>),
    Stop,
}

/// A launch's arguments, 16-byte aligned.
#[expect(clippy::large_enum_variant, reason = "the common case is inline, so that a launch allocates nothing")]
enum Args {
    Inline(InlineArgs, usize),
    Heap(Box<[u128]>, usize),
}

#[repr(align(16))]
struct InlineArgs([u8; INLINE_ARGS_BYTES]);

impl Args {
    fn copy(args: &[u8]) -> Args {
        if args.len() <= INLINE_ARGS_BYTES {
            let mut inline = InlineArgs([0; INLINE_ARGS_BYTES]);
            inline.0[..args.len()].copy_from_slice(args);
            return Args::Inline(inline, args.len());
        }
        let mut heap = vec![0u128; args.len().div_ceil(16)].into_boxed_slice();
        bytemuck::cast_slice_mut::<u128, u8>(&mut heap)[..args.len()].copy_from_slice(args);
        Args::Heap(heap, args.len())
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Args::Inline(inline, bytes) => &inline.0[..*bytes],
            Args::Heap(heap, bytes) => &bytemuck::cast_slice::<u128, u8>(heap)[..*bytes],
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Queue {
    fn new() -> Queue {
        static NEXT_QUEUE: AtomicU64 = AtomicU64::new(1);
        Queue {
            id: NEXT_QUEUE.fetch_add(1, Ordering::Relaxed),
            commands: Mutex::new(Commands { queue: VecDeque::with_capacity(DEPTH), parked: false, space_waiters: 0 }),
            ready: Condvar::new(),
            space: Condvar::new(),
            submitted: AtomicU64::new(0),
            done: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            passing: Mutex::default(),
            passed: Condvar::new(),
            failure: OnceLock::new(),
        }
    }

    /// Errs if a command has failed: the stream is of no use any more.
    fn check(&self, call: &str) -> Result<()> {
        match self.failure.get() {
            None => Ok(()),
            Some((_, why)) => Err(Error::device(format!("{call}: the stream has failed: {why}"))
                .call("stream", 719, "")
                .help("fix the kernel or its arguments, then go on with a new stream")),
        }
    }

    fn push(&self, command: Command) -> u64 {
        self.push_with(|_| command)
    }

    fn push_with(&self, command: impl FnOnce(u64) -> Command) -> u64 {
        let mut commands = lock(&self.commands);
        while commands.queue.len() == DEPTH {
            commands.space_waiters += 1;
            commands = self.space.wait(commands).unwrap_or_else(PoisonError::into_inner);
            commands.space_waiters -= 1;
        }
        let sequence = self.submitted.load(Ordering::Relaxed) + 1;
        commands.queue.push_back(command(sequence));
        self.submitted.store(sequence, Ordering::Release);
        let parked = std::mem::take(&mut commands.parked);
        drop(commands);
        if parked {
            self.ready.notify_one();
        }
        sequence
    }

    fn pop(&self) -> Command {
        let ran = self.done.load(Ordering::Relaxed);
        spin_until(|| self.submitted.load(Ordering::Acquire) > ran);
        let mut commands = lock(&self.commands);
        loop {
            if let Some(command) = commands.queue.pop_front() {
                if commands.space_waiters > 0 {
                    self.space.notify_one();
                }
                return command;
            }
            commands.parked = true;
            commands = self.ready.wait(commands).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The newest command's place.
    pub fn end(&self) -> u64 {
        self.submitted.load(Ordering::Acquire)
    }

    /// Queues a time stamp; gives its place.
    pub fn stamp(&self, stamp: Arc<Stamp>) -> Result<u64> {
        self.check("record")?;
        Ok(self.push(Command::Stamp(stamp)))
    }

    /// A number for a place in this queue that no other queue has.
    pub fn ticket(&self, sequence: u64) -> u64 {
        self.id << 40 | sequence
    }

    /// True once the place has passed; errs if it cannot any more.
    pub fn passed(&self, sequence: u64) -> Result<bool> {
        match self.failure.get() {
            Some((failed, _)) if *failed <= sequence => self.check("query").map(|()| false),
            _ => Ok(self.done.load(Ordering::Acquire) >= sequence),
        }
    }

    /// Waits until the place has passed.
    pub fn wait(&self, sequence: u64) -> Result<()> {
        let ready = || self.done.load(Ordering::Acquire) >= sequence;
        if !spin_until(ready) {
            let mut passing = lock(&self.passing);
            self.waiters.fetch_add(1, Ordering::SeqCst);
            while self.done.load(Ordering::SeqCst) < sequence {
                passing = self.passed.wait(passing).unwrap_or_else(PoisonError::into_inner);
            }
            self.waiters.fetch_sub(1, Ordering::SeqCst);
        }
        self.passed(sequence).map(|_| ())
    }

    /// Waits for everything queued so far.
    pub fn synchronize(&self, call: &str) -> Result<()> {
        let waited = self.wait(self.end());
        self.check(call).and(waited)
    }

    fn complete(&self, sequence: u64) {
        self.done.store(sequence, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.passing));
            self.passed.notify_all();
        }
    }
}

/// A stream thread's life.
fn work(queue: &Queue, shared: &Shared) {
    let mut lds = Lds::new();
    for sequence in 1.. {
        let command = queue.pop();
        if matches!(command, Command::Stop) {
            queue.complete(sequence);
            return;
        }
        if queue.failure.get().is_none()
            && let Err(why) = run(command, queue.ticket(sequence), shared, &mut lds)
        {
            let _ = queue.failure.set((sequence, why));
        }
        queue.complete(sequence);
    }
}

fn run(command: Command, ticket: u64, shared: &Shared, lds: &mut Lds) -> Result<(), String> {
    match command {
        // SAFETY: whoever queued the launch answered for its pointers (contract of `Stream::launch`, ADDR-1).
        Command::Kernel { kernel, shape, args } => unsafe { shared.pool.run(kernel.op, &shape, args.bytes(), lds) }
            .map_err(|panic| format!("kernel {} panicked: {panic}", kernel.symbol)),
        Command::Copy { dst, src, bytes } => {
            // SAFETY: whoever queued the copy answered for both ranges (contract of `Stream::copy`, ADDR-1).
            unsafe { copy(dst, src, bytes) };
            Ok(())
        }
        Command::Fill { dst, byte, bytes } => {
            // SAFETY: whoever queued the fill answered for the range (contract of `Stream::fill`, ADDR-1).
            unsafe { fill(dst, byte, bytes) };
            Ok(())
        }
        Command::Stamp(stamp) => {
            stamp.set(ticket);
            Ok(())
        }
        Command::Wait(point) => point.queue.wait(point.sequence).map_err(|error| error.message().to_owned()),
        // SAFETY: whoever queued the replay answered for memory and modules (contract of `Stream::launch_graph`, ADDR-2).
        Command::Replay(replay) => unsafe { replay.run(&shared.pool, lds) },
        Command::Stop => Ok(()),
    }
}

/// # Safety
/// Both ranges are valid for `bytes`.
pub(super) unsafe fn copy(dst: DevicePtr, src: DevicePtr, bytes: u64) {
    let (from, to) =
        (std::ptr::with_exposed_provenance::<u8>(src.0 as usize), std::ptr::with_exposed_provenance_mut::<u8>(dst.0 as usize));
    // SAFETY: the caller's contract; `copy` allows overlap.
    unsafe { std::ptr::copy(from, to, bytes as usize) }
}

/// # Safety
/// The range is valid for `bytes`.
pub(super) unsafe fn fill(dst: DevicePtr, byte: u8, bytes: u64) {
    // SAFETY: the caller's contract.
    unsafe { std::ptr::write_bytes(std::ptr::with_exposed_provenance_mut::<u8>(dst.0 as usize), byte, bytes as usize) }
}

impl CpuStream {
    pub fn new(shared: Arc<Shared>) -> Result<CpuStream> {
        let queue = Arc::new(Queue::new());
        let (own_queue, own_shared) = (queue.clone(), shared.clone());
        let thread = thread::Builder::new().name("capstan-stream".to_owned()).spawn(move || work(&own_queue, &own_shared));
        let thread = thread.map_err(|error| {
            Error::device(format!("cannot start a stream's thread: {error}")).help("drop streams that are not in use")
        })?;
        lock(&shared.queues).push(Arc::downgrade(&queue));
        let capture = StreamCapture::new(shared.recorder.clone());
        Ok(CpuStream { shared, queue, capture, thread: Some(thread) })
    }
}

impl Stream for CpuStream {
    unsafe fn launch(&self, function: FunctionHandle, shape: &LaunchShape, args: &[u8]) -> Result<()> {
        self.queue.check("launch")?;
        let resolved = self.shared.functions.resolve(function, shape, args)?;
        let kernel = resolved.kernel;
        let node = || RecordedNode::Kernel { handle: function, function: resolved, shape: *shape, args: args.into() };
        if !self.capture.record_node("launch", node)? {
            self.queue.push(Command::Kernel { kernel, shape: *shape, args: Args::copy(args) });
        }
        Ok(())
    }

    unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        self.queue.check("copy")?;
        if !self.capture.record_node("copy", || RecordedNode::Copy { dst, src, bytes })? {
            self.queue.push(Command::Copy { dst, src, bytes });
        }
        Ok(())
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: u64) -> Result<()> {
        self.queue.check("fill")?;
        if !self.capture.record_node("fill", || RecordedNode::Fill { dst, byte, bytes })? {
            self.queue.push(Command::Fill { dst, byte, bytes });
        }
        Ok(())
    }

    unsafe fn write(&self, dst: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.capture.forbid("write")?;
        self.queue.synchronize("write")?;
        let to = std::ptr::with_exposed_provenance_mut::<u8>(dst.0 as usize);
        // SAFETY: the caller's contract; everything queued before has run. Device memory and host bytes may not overlap.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, src: DevicePtr, bytes: &mut [u8]) -> Result<()> {
        self.capture.forbid("read")?;
        self.queue.synchronize("read")?;
        let from = std::ptr::with_exposed_provenance::<u8>(src.0 as usize);
        // SAFETY: the caller's contract; everything queued before has run.
        unsafe { std::ptr::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn record(&self, event: &dyn Event) -> Result<()> {
        self.queue.check("record")?;
        let event = CpuEvent::of(event, &self.shared, "record")?;
        if !self.capture.record_event(&event.captured)? {
            event.record(&self.queue)?;
        }
        Ok(())
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        self.queue.check("wait")?;
        let event = CpuEvent::of(event, &self.shared, "wait")?;
        if self.capture.wait_event(&event.captured)? {
            return Ok(());
        }
        if let Some(point) = event.point()
            && !Arc::ptr_eq(&point.queue, &self.queue)
        {
            self.queue.push(Command::Wait(point));
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        self.capture.forbid("synchronize")?;
        self.queue.synchronize("synchronize")
    }

    fn query(&self) -> Result<bool> {
        self.capture.forbid("query")?;
        self.queue.check("query")?;
        self.queue.passed(self.queue.end())
    }

    fn begin_capture(&self, mode: CaptureMode) -> Result<()> {
        self.queue.check("begin_capture")?;
        self.capture.begin(mode)
    }

    fn end_capture(&self) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(CpuGraph::new(self.shared.clone(), self.capture.end()?)))
    }

    fn capture_status(&self) -> Result<CaptureStatus> {
        Ok(self.capture.status())
    }

    unsafe fn launch_graph(&self, exec: &dyn GraphExec) -> Result<()> {
        self.capture.forbid("launch_graph")?;
        self.queue.check("launch_graph")?;
        let exec = CpuGraphExec::of(exec, &self.shared, "launch_graph")?;
        exec.check_modules()?;
        self.queue.push(Command::Replay(exec.replay.clone()));
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CpuStream {
    fn drop(&mut self) {
        self.queue.push(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for CpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = self.queue.done.load(Ordering::Relaxed);
        f.debug_struct("CpuStream").field("submitted", &self.queue.end()).field("done", &done).finish_non_exhaustive()
    }
}

//! Stream capture as HIP has it: modes, forks and joins by events, forbidden calls.
//!
//! A [`Recorder`] knows the captures of a device, a [`StreamCapture`] the one a stream takes part in, a [`CapturedPoint`]
//! the place an event was recorded at. A forbidden call returns an error that names it and invalidates the capture.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use smallvec::SmallVec;

use super::{RecordedNode, Recording};
use crate::error::{Error, Result};
use crate::hal::{CaptureMode, CaptureStatus, NodeId};

/// Nodes that the next one of a stream depends on.
type Tails = SmallVec<[u32; 2]>;

/// Captures open on one device.
#[derive(Default)]
pub(crate) struct Recorder {
    open: Mutex<Vec<Arc<Capture>>>,
    any_open: AtomicBool,
}

struct Capture {
    mode: CaptureMode,
    thread: ThreadId,
    origin: u64,
    state: Mutex<CaptureState>,
}

#[derive(Default)]
struct CaptureState {
    ended: bool,
    /// The call that invalidated it.
    invalidated_by: Option<&'static str>,
    nodes: Vec<RecordedNode>,
    edges: Vec<(NodeId, NodeId)>,
    /// Streams that take part, the origin first.
    streams: Vec<(u64, Tails)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn invalidated(call: &str, by: &str) -> Error {
    Error::state(format!("{call}: the capture was invalidated by {by}"))
        .help("end the capture, then capture again without that call")
}

impl Capture {
    fn invalidate(&self, call: &'static str) {
        lock(&self.state).invalidated_by.get_or_insert(call);
    }
}

impl Recorder {
    /// Errs, and invalidates, if an open capture forbids `call`: a potentially unsafe one (allocation, free, module load).
    pub fn forbid_unsafe(&self, call: &'static str) -> Result<()> {
        self.forbid(call, |capture| match capture.mode {
            CaptureMode::Global => true,
            CaptureMode::ThreadLocal => capture.thread == thread::current().id(),
            CaptureMode::Relaxed => false,
        })
    }

    /// Errs, and invalidates, if any capture is open: `call` waits for the whole device.
    pub fn forbid_any(&self, call: &'static str) -> Result<()> {
        self.forbid(call, |_| true)
    }

    fn forbid(&self, call: &'static str, forbids: impl Fn(&Capture) -> bool) -> Result<()> {
        if !self.any_open.load(Ordering::Acquire) {
            return Ok(());
        }
        let open = lock(&self.open);
        let mut forbidden = false;
        for capture in open.iter().filter(|capture| forbids(capture)) {
            capture.invalidate(call);
            forbidden = true;
        }
        if forbidden { Err(forbidden_error(call)) } else { Ok(()) }
    }
}

fn forbidden_error(call: &str) -> Error {
    Error::state(format!("{call} is forbidden during a capture, which is now invalidated"))
        .help("move the call before begin_capture or after end_capture")
}

/// A stream's part in a capture.
pub(crate) struct StreamCapture {
    id: u64,
    recorder: Arc<Recorder>,
    /// False without looking at `slot`: launches outside a capture pay one load.
    engaged: AtomicBool,
    slot: Mutex<Option<Arc<Capture>>>,
}

/// Where an event was recorded in a capture; empty if its last record was not in one.
#[derive(Default)]
pub(crate) struct CapturedPoint(Mutex<Option<(Arc<Capture>, Tails)>>);

impl CapturedPoint {
    /// Forgets the point: the event was recorded outside a capture.
    pub fn clear(&self) {
        *lock(&self.0) = None;
    }

    /// Errs if the event was recorded in a capture: it has no time that could pass. Invalidates the capture if open.
    pub fn forbid(&self, call: &'static str) -> Result<()> {
        let point = lock(&self.0);
        let Some((capture, _)) = &*point else { return Ok(()) };
        if !lock(&capture.state).ended {
            capture.invalidate(call);
            return Err(forbidden_error(call));
        }
        Err(Error::state(format!("{call}: the event was last recorded in a capture, it never passes"))
            .help("record it again outside the capture"))
    }
}

impl StreamCapture {
    pub fn new(recorder: Arc<Recorder>) -> StreamCapture {
        static NEXT_STREAM: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_STREAM.fetch_add(1, Ordering::Relaxed);
        StreamCapture { id, recorder, engaged: AtomicBool::new(false), slot: Mutex::new(None) }
    }

    fn current(&self) -> Option<Arc<Capture>> {
        if !self.engaged.load(Ordering::Acquire) {
            return None;
        }
        let mut slot = lock(&self.slot);
        let ended = slot.as_ref().is_none_or(|capture| lock(&capture.state).ended);
        if ended {
            *slot = None;
            self.engaged.store(false, Ordering::Release);
        }
        slot.clone()
    }

    fn engage(&self, capture: Arc<Capture>) {
        *lock(&self.slot) = Some(capture);
        self.engaged.store(true, Ordering::Release);
    }

    /// Errs, and invalidates the capture, if the stream is capturing.
    pub fn forbid(&self, call: &'static str) -> Result<()> {
        match self.current() {
            None => Ok(()),
            Some(capture) => {
                capture.invalidate(call);
                Err(forbidden_error(call))
            }
        }
    }

    /// Records a node if the stream is capturing; `Ok(false)` if it is not and the caller must run it.
    pub fn record_node(&self, call: &'static str, node: impl FnOnce() -> RecordedNode) -> Result<bool> {
        let Some(capture) = self.current() else { return Ok(false) };
        let node = node();
        let mut state = lock(&capture.state);
        if let Some(by) = state.invalidated_by {
            return Err(invalidated(call, by));
        }
        let id = state.nodes.len() as u32;
        state.nodes.push(node);
        let CaptureState { streams, edges, .. } = &mut *state;
        let tails = tails_of(streams, self.id);
        edges.extend(tails.iter().map(|&before| (NodeId(before), NodeId(id))));
        tails.clear();
        tails.push(id);
        Ok(true)
    }

    /// Records an event if the stream is capturing; `Ok(false)` if it is not.
    pub fn record_event(&self, point: &CapturedPoint) -> Result<bool> {
        let Some(capture) = self.current() else { return Ok(false) };
        let mut state = lock(&capture.state);
        if let Some(by) = state.invalidated_by {
            return Err(invalidated("record", by));
        }
        let tails = tails_of(&mut state.streams, self.id).clone();
        drop(state);
        *lock(&point.0) = Some((capture, tails));
        Ok(true)
    }

    /// Takes a wait into a capture, joining it if the event was captured; `Ok(false)` if no capture is concerned.
    pub fn wait_event(&self, point: &CapturedPoint) -> Result<bool> {
        let current = self.current();
        let point = lock(&point.0).clone();
        let (capture, deps) = match (&current, point) {
            (None, None) => return Ok(false),
            (Some(current), None) => {
                current.invalidate("wait");
                return Err(Error::state(
                    "wait: a capturing stream waits for an event recorded outside the capture, which is now invalidated",
                )
                .help("record the event on a stream of the capture, or wait before begin_capture"));
            }
            (_, Some(point)) => point,
        };
        if let Some(current) = &current
            && !Arc::ptr_eq(current, &capture)
        {
            current.invalidate("wait");
            capture.invalidate("wait");
            return Err(Error::state("wait: the event belongs to another capture; both are now invalidated")
                .help("join streams of one capture only"));
        }
        let mut state = lock(&capture.state);
        if state.ended {
            return Err(Error::state("wait: the event was recorded in a capture that has ended")
                .help("record it again outside the capture"));
        }
        if let Some(by) = state.invalidated_by {
            return Err(invalidated("wait", by));
        }
        let tails = tails_of(&mut state.streams, self.id);
        for dep in deps {
            if !tails.contains(&dep) {
                tails.push(dep);
            }
        }
        drop(state);
        self.engage(capture);
        Ok(true)
    }

    /// Starts a capture with this stream as its origin.
    pub fn begin(&self, mode: CaptureMode) -> Result<()> {
        if self.current().is_some() {
            return Err(Error::state("begin_capture: the stream is capturing already").help("end that capture first"));
        }
        let state = CaptureState { streams: vec![(self.id, Tails::new())], ..CaptureState::default() };
        let capture = Arc::new(Capture { mode, thread: thread::current().id(), origin: self.id, state: Mutex::new(state) });
        lock(&self.recorder.open).push(capture.clone());
        self.recorder.any_open.store(true, Ordering::Release);
        self.engage(capture);
        Ok(())
    }

    /// Ends the capture this stream began.
    pub fn end(&self) -> Result<Recording> {
        let Some(capture) = self.current() else {
            return Err(Error::state("end_capture: the stream is not capturing").help("call begin_capture first"));
        };
        if capture.origin != self.id {
            return Err(Error::state("end_capture: the stream joined the capture, another one began it")
                .help("end the capture on the stream that began it"));
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != thread::current().id() {
            return Err(Error::state("end_capture: another thread began the capture")
                .help("end it on that thread, or begin it with CaptureMode::Relaxed"));
        }
        self.close(&capture);
        let mut state = lock(&capture.state);
        if let Some(by) = state.invalidated_by {
            return Err(invalidated("end_capture", by));
        }
        if unjoined(&state) {
            return Err(Error::state("end_capture: work of a forked stream was not joined back")
                .help("record an event on the forked stream and wait for it on the origin before end_capture"));
        }
        let mut recording = Recording { nodes: std::mem::take(&mut state.nodes), edges: std::mem::take(&mut state.edges) };
        recording.edges.sort_unstable();
        recording.edges.dedup();
        Ok(recording)
    }

    fn close(&self, capture: &Arc<Capture>) {
        lock(&capture.state).ended = true;
        let mut open = lock(&self.recorder.open);
        open.retain(|other| !Arc::ptr_eq(other, capture));
        self.recorder.any_open.store(!open.is_empty(), Ordering::Release);
        drop(open);
        let _ = self.current();
    }

    /// State of the stream's capture.
    pub fn status(&self) -> CaptureStatus {
        match self.current() {
            None => CaptureStatus::None,
            Some(capture) if lock(&capture.state).invalidated_by.is_some() => CaptureStatus::Invalidated,
            Some(_) => CaptureStatus::Active,
        }
    }
}

impl Drop for StreamCapture {
    /// A stream that goes away mid-capture takes its capture with it: nobody could end it any more.
    fn drop(&mut self) {
        if let Some(capture) = self.current()
            && capture.origin == self.id
        {
            self.close(&capture);
        }
    }
}

fn tails_of(streams: &mut Vec<(u64, Tails)>, id: u64) -> &mut Tails {
    let at = streams.iter().position(|(stream, _)| *stream == id).unwrap_or_else(|| {
        streams.push((id, Tails::new()));
        streams.len() - 1
    });
    &mut streams[at].1
}

/// True if a node at the end of some stream is no ancestor of the origin's end.
fn unjoined(state: &CaptureState) -> bool {
    let [(_, origin), forks @ ..] = &state.streams[..] else { return false };
    if forks.is_empty() {
        return false;
    }
    let mut joined = vec![false; state.nodes.len()];
    for &tail in origin {
        joined[tail as usize] = true;
    }
    // Edges were recorded with their later node ascending, so one pass from the back finds every ancestor.
    for (before, after) in state.edges.iter().rev() {
        if joined[after.0 as usize] {
            joined[before.0 as usize] = true;
        }
    }
    forks.iter().any(|(_, tails)| tails.iter().any(|&tail| !joined[tail as usize]))
}

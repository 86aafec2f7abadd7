//! The capture state machine: one place where a stream records instead of running.
//!
//! [`Recording::begin`] opens a capture, [`Recording::launch`] records, [`Recording::finish`] closes it and gives the graph.
//! Dropping the guard ends the capture, so an error on the way never leaves a stream recording.
#![expect(unsafe_code, reason = "hands lowered launches to a stream")]

use std::sync::Arc;

use super::Launch;
use crate::chain::{Chain, Op, Order};
use crate::error::{Error, ErrorKind, Result};
use crate::hal::{CaptureMode, CaptureStatus, Device, Event, Graph, Stream};

/// Queues every launch of a lowered chain on a stream: the eager path.
pub fn launch_all(stream: &dyn Stream, chain: &Chain, launches: &[Launch]) -> Result<()> {
    chain.ops.iter().zip(launches).try_for_each(|(op, launch)| launch_one(stream, op, launch))
}

/// Queues one launch of a lowered chain; those before it were queued on the same stream.
pub fn launch_one(stream: &dyn Stream, op: &Op, launch: &Launch) -> Result<()> {
    // SAFETY: ADDR-1, lowering placed every pointer inside a live buffer of the arena the caller holds; RACE-1, one stream runs
    // them in order.
    unsafe { stream.launch(launch.function, &launch.shape, &launch.args) }
        .map_err(|error| error.at(|| format!("eager op={}", op.label)))
}

/// Records a lowered chain into a graph, straight or with the branches it asks for.
pub fn record(device: &dyn Device, stream: &dyn Stream, chain: &Chain, launches: &[Launch]) -> Result<Arc<dyn Graph>> {
    assert_eq!(chain.ops.len(), launches.len(), "launches were lowered from this chain");
    let branches = match &chain.order {
        Order::Straight => None,
        Order::Edges(edges) => Some(Branches::new(device, chain.ops.len(), edges)?),
    };
    let recording = Recording::begin(stream)?;
    match branches {
        None => {
            for (op, launch) in chain.ops.iter().zip(launches) {
                recording.launch(stream, launch, &op.label)?;
            }
        }
        Some(mut branches) => branches.record(&recording, chain, launches)?,
    }
    recording.finish()
}

/// An open capture.
struct Recording<'a> {
    stream: &'a dyn Stream,
    open: bool,
}

impl<'a> Recording<'a> {
    fn begin(stream: &'a dyn Stream) -> Result<Recording<'a>> {
        match stream.capture_status()? {
            CaptureStatus::None => {}
            status => {
                return Err(Error::state(format!("the stream is already capturing ({status:?})"))
                    .help("finish the other capture first; one stream records one graph at a time"));
            }
        }
        stream.begin_capture(CaptureMode::ThreadLocal)?;
        Ok(Recording { stream, open: true })
    }

    fn launch(&self, stream: &dyn Stream, launch: &Launch, label: &str) -> Result<()> {
        // SAFETY: ADDR-1 held at lowering; the graph made from this capture owns the arena and modules it points at, and
        // RACE-1 is checked against the chain's declared order before its first replay.
        unsafe { stream.launch(launch.function, &launch.shape, &launch.args) }.map_err(|error| in_window(error, label))
    }

    fn finish(mut self) -> Result<Arc<dyn Graph>> {
        self.open = false;
        self.stream.end_capture().map_err(|error| in_window(error, "the end of the chain"))
    }
}

/// CAP-1: a call that the capture forbids, told with the place in the chain where it showed.
fn in_window(error: Error, at: &str) -> Error {
    if error.kind() != ErrorKind::State {
        return error.at(|| format!("capture mode=ThreadLocal op={at}"));
    }
    let message = format!("capture mode=ThreadLocal, at {at}: {}", error.message());
    Error::invariant("CAP-1", message)
        .help(error.help_line().unwrap_or("keep everything but the chain's launches out of the window"))
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.open {
            // The error that dropped the guard is the one to report; this graph is thrown away.
            drop(self.stream.end_capture());
        }
    }
}

/// Side streams and events for a chain that asks for branches.
struct Branches {
    side_streams: Vec<Arc<dyn Stream>>,
    events: Vec<Arc<dyn Event>>,
    start: Arc<dyn Event>,
    predecessors: Vec<Vec<usize>>,
}

impl Branches {
    fn new(device: &dyn Device, ops: usize, edges: &[(u32, u32)]) -> Result<Branches> {
        let mut predecessors = vec![Vec::new(); ops];
        for &(before, after) in edges {
            let (before, after) = (before as usize, after as usize);
            if before >= after || after >= ops {
                return Err(Error::state(format!("edge {before} -> {after} does not point forward inside a chain of {ops} ops"))
                    .help("list ops in an order that respects their dependencies"));
            }
            predecessors[after].push(before);
        }
        let events = (0..ops).map(|_| device.create_event(false)).collect::<Result<_>>()?;
        let side_streams = (1..ops).map(|_| device.create_stream()).take(width(&predecessors)).collect::<Result<_>>()?;
        Ok(Branches { side_streams, events, start: device.create_event(false)?, predecessors })
    }

    fn record(&mut self, recording: &Recording<'_>, chain: &Chain, launches: &[Launch]) -> Result<()> {
        let main = recording.stream;
        main.record(&*self.start)?;
        // Per stream (0 is main): the last op on it.
        let mut tails: Vec<Option<usize>> = vec![None; self.side_streams.len() + 1];
        for (at, (op, launch)) in chain.ops.iter().zip(launches).enumerate() {
            let predecessors = &self.predecessors[at];
            let continues = tails.iter().position(|tail| tail.is_some_and(|tail| predecessors.contains(&tail)));
            let on = continues
                .or_else(|| tails.iter().position(Option::is_none))
                .expect("invariant: there are as many streams as the chain is wide");
            let stream: &dyn Stream = if on == 0 { main } else { &*self.side_streams[on - 1] };
            if tails[on].is_none() && on != 0 {
                stream.wait(&*self.start)?;
            }
            for &before in predecessors.iter().filter(|&&before| tails[on] != Some(before)) {
                stream.wait(&*self.events[before])?;
            }
            recording.launch(stream, launch, &op.label)?;
            stream.record(&*self.events[at])?;
            tails[on] = Some(at);
        }
        for tail in tails.iter().skip(1).flatten() {
            main.wait(&*self.events[*tail])?;
        }
        Ok(())
    }
}

/// Streams a chain needs besides the main one: an op either continues a stream whose last op it depends on or takes a new one.
fn width(predecessors: &[Vec<usize>]) -> usize {
    let mut tails: Vec<usize> = Vec::new();
    for (at, predecessors) in predecessors.iter().enumerate() {
        match tails.iter_mut().find(|tail| predecessors.contains(tail)) {
            Some(tail) => *tail = at,
            None => tails.push(at),
        }
    }
    tails.len().saturating_sub(1)
}

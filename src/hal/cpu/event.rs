//! Events: a point of one stream's queue. An event recorded again stands for its newest point only.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::Shared;
use super::stream::Queue;
use crate::error::{Error, Result};
use crate::hal::Event;
use crate::hal::record::CapturedPoint;

/// An event of the CPU device.
pub(super) struct CpuEvent {
    pub shared: Arc<Shared>,
    pub captured: CapturedPoint,
    pub timing: bool,
    point: Mutex<Option<Point>>,
    stamp: Arc<Stamp>,
}

/// A place in a queue: passed once the queue has run `sequence` commands.
#[derive(Clone)]
pub(super) struct Point {
    pub queue: Arc<Queue>,
    pub sequence: u64,
}

/// When a point passed, written by the stream that passed it.
#[derive(Default)]
pub(super) struct Stamp(Mutex<Option<(u64, Instant)>>);

impl Stamp {
    pub fn set(&self, ticket: u64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((ticket, Instant::now()));
    }
}

impl CpuEvent {
    pub fn new(shared: Arc<Shared>, timing: bool) -> CpuEvent {
        CpuEvent { shared, captured: CapturedPoint::default(), timing, point: Mutex::default(), stamp: Arc::default() }
    }

    /// The event behind a trait object, if it is this device's.
    pub fn of<'a>(event: &'a dyn Event, shared: &Arc<Shared>, call: &str) -> Result<&'a CpuEvent> {
        event.as_any().downcast_ref::<CpuEvent>().filter(|event| Arc::ptr_eq(&event.shared, shared)).ok_or_else(|| {
            Error::device(format!("{call}: the event is not of this device")).help("create events on the device that uses them")
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Point>> {
        self.point.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest recorded point.
    pub fn point(&self) -> Option<Point> {
        self.lock().clone()
    }

    /// Makes the end of `queue` the event's point, with a time stamp if it was created for that.
    pub fn record(&self, queue: &Arc<Queue>) -> Result<()> {
        let mut point = self.lock();
        let sequence = if self.timing { queue.stamp(self.stamp.clone())? } else { queue.end() };
        *point = Some(Point { queue: queue.clone(), sequence });
        self.captured.clear();
        Ok(())
    }

    fn time(&self) -> Result<Instant> {
        if !self.timing {
            return Err(Error::device("seconds_since: the event was created without timing").help("create it with timing = true"));
        }
        self.captured.forbid("seconds_since")?;
        let not_passed = || {
            Error::device("seconds_since: the event has not passed").call("seconds_since", 600, "").help("synchronize it first")
        };
        let point = self.point().ok_or_else(not_passed)?;
        if !point.queue.passed(point.sequence)? {
            return Err(not_passed());
        }
        let stamp = *self.stamp.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = point.queue.ticket(point.sequence);
        stamp.filter(|&(stamped, _)| stamped == ticket).map(|(_, at)| at).ok_or_else(not_passed)
    }
}

impl Event for CpuEvent {
    fn query(&self) -> Result<bool> {
        self.captured.forbid("event query")?;
        self.point().map_or(Ok(true), |point| point.queue.passed(point.sequence))
    }

    fn synchronize(&self) -> Result<()> {
        self.captured.forbid("event synchronize")?;
        self.point().map_or(Ok(()), |point| point.queue.wait(point.sequence))
    }

    fn seconds_since(&self, earlier: &dyn Event) -> Result<f64> {
        let (end, start) = (self.time()?, CpuEvent::of(earlier, &self.shared, "seconds_since")?.time()?);
        Ok(match end.checked_duration_since(start) {
            Some(later) => later.as_secs_f64(),
            None => -start.duration_since(end).as_secs_f64(),
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for CpuEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuEvent").field("timing", &self.timing).finish_non_exhaustive()
    }
}

//! Times of a decode step's nodes and of its replay, by events of the device.

use std::sync::Arc;
use std::time::Instant;

use super::{Executor, Source};
use crate::capture::launch_one;
use crate::chain::GraphKey;
use crate::error::Result;
use crate::hal::Event;
use crate::runtime::SequenceStep;

/// When one node ran, launched by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeSpan {
    /// Start, microseconds after the step's first event.
    pub start_us: f64,
    /// Duration, microseconds.
    pub us: f64,
}

/// What one replay took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplaySpan {
    /// Host time of the decode call, microseconds.
    pub submit_us: f64,
    /// Device time of the graph, microseconds.
    pub device_us: f64,
}

impl Executor {
    /// Takes one decode step by launching each node of the captured graph of `key`, as its driver has recorded it, between two
    /// events; one span a node, in recording order.
    ///
    /// Errors: as of [`Executor::walk_decode`].
    pub fn time_nodes(&mut self, batch: &[SequenceStep<'_>], key: &GraphKey) -> Result<Vec<NodeSpan>> {
        let mut walk = self.walk_decode(batch, key, Source::Graph)?;
        let device = self.arena.device().clone();
        let events = (0..=2 * walk.chain().ops.len()).map(|_| device.create_event(true)).collect::<Result<Vec<_>>>()?;
        let (base, pairs) = events.split_first().expect("invariant: there is one more than twice the ops");
        self.stream.record(&**base)?;
        for (at, pair) in pairs.chunks(2).enumerate() {
            self.stream.record(&*pair[0])?;
            launch_one(&*self.stream, &walk.chain.ops[at], &walk.launches[at])?;
            self.stream.record(&*pair[1])?;
        }
        self.stream.synchronize()?;
        walk.next = walk.launches.len();
        self.walk_end(walk, batch)?;
        let us = |later: &Arc<dyn Event>, earlier: &Arc<dyn Event>| Ok(later.seconds_since(&**earlier)? * 1e6);
        pairs.chunks(2).map(|pair| Ok(NodeSpan { start_us: us(&pair[0], base)?, us: us(&pair[1], &pair[0])? })).collect()
    }

    /// Takes one decode step as [`Executor::decode`] does, between two events.
    pub fn time_replay(&mut self, batch: &[SequenceStep<'_>]) -> Result<ReplaySpan> {
        let device = self.arena.device().clone();
        let [before, after] = [device.create_event(true)?, device.create_event(true)?];
        self.stream.record(&*before)?;
        let started = Instant::now();
        let ticket = self.decode(batch)?;
        let submit_us = started.elapsed().as_secs_f64() * 1e6;
        self.stream.record(&*after)?;
        self.wait(ticket)?;
        after.synchronize()?;
        Ok(ReplaySpan { submit_us, device_us: after.seconds_since(&*before)? * 1e6 })
    }
}

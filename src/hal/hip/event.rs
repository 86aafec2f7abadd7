//! Events.

#![expect(unsafe_code, reason = "calls the runtime")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::device::Core;
use super::status::call;
use super::table::{EventHandle, flag};
use crate::error::{Error, Result};
use crate::hal::Event;

/// An event.
pub(super) struct HipEvent {
    core: Arc<Core>,
    pub(super) event: EventHandle,
}

impl HipEvent {
    pub fn new(core: Arc<Core>, timing: bool) -> Result<HipEvent> {
        core.enter()?;
        let mut event = EventHandle::NULL;
        let flags = if timing { 0 } else { flag::EVENT_DISABLE_TIMING };
        // SAFETY: the result has a place.
        unsafe { call!(core.table, "create_event", hipEventCreateWithFlags(&mut event, flags)) }?;
        Ok(HipEvent { core, event })
    }

    /// The event as one of `core`'s device.
    pub fn of<'a>(event: &'a dyn Event, core: &Arc<Core>, call: &'static str) -> Result<&'a HipEvent> {
        event.as_any().downcast_ref::<HipEvent>().filter(|event| Arc::ptr_eq(&event.core, core)).ok_or_else(|| {
            Error::device(format!("{call}: the event is not of this device")).help("create the event on the stream's own device")
        })
    }
}

impl Event for HipEvent {
    fn query(&self) -> Result<bool> {
        self.core.enter()?;
        let table = &self.core.table;
        // SAFETY: the event is live.
        unsafe { (table.hipEventQuery)(self.event) }.ready(table, "event query", "hipEventQuery")
    }

    fn synchronize(&self) -> Result<()> {
        self.core.enter()?;
        // SAFETY: the event is live.
        unsafe { call!(self.core.table, "event synchronize", hipEventSynchronize(self.event)) }
    }

    fn seconds_since(&self, earlier: &dyn Event) -> Result<f64> {
        self.core.enter()?;
        let earlier = HipEvent::of(earlier, &self.core, "seconds_since")?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are live, and the result has a place.
        unsafe { call!(self.core.table, "seconds_since", hipEventElapsedTime(&mut milliseconds, earlier.event, self.event)) }?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for HipEvent {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        self.core.destroy("event", |table| unsafe { (table.hipEventDestroy)(self.event) });
    }
}

impl fmt::Debug for HipEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HipEvent").finish_non_exhaustive()
    }
}

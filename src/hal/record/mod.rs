//! Recording, shared by the devices that have no driver to do it: kernel tables, stream capture, recorded graphs.
//!
//! Promises: `cpu` and `null` capture the same calls into the same nodes and edges, and refuse the same calls with the same
//! words. Never runs anything; what a device does with a [`Recording`] is its own.

mod capture;
mod functions;
mod graph;

pub(crate) use capture::{CapturedPoint, Recorder, StreamCapture};
pub(crate) use functions::{Function, Functions};
pub(crate) use graph::{RecordedNode, Recording};

/// LDS of a workgroup on a device without hardware: what gfx950 has.
pub(crate) const LDS_BYTES_MAX: u32 = 160 * 1024;

//! The executor: what a server embeds.
//!
//! [`Executor`] runs decode steps by replay and prefill eagerly; [`Sequences`] is the host's truth of block tables; the step
//! ring carries metadata in and results out. It schedules nothing: admission and block allocation are its caller's.

mod batch;
mod executor;
mod metrics;
mod ring;
mod sequences;

pub use batch::{Sampling, SequenceStep, Split, split};
pub(crate) use executor::peer_error;
pub use executor::{
    CaptureProgress, CaptureReport, Checks, Executor, GraphMemory, NodeDifference, NodeSpan, ReplaySpan, Source, StepPoll,
    StepResult, Walk,
};
pub use metrics::{BatchRows, Fallback, Metrics, SizeCount};
pub use ring::{RingLayout, Ticket};
pub use sequences::{BlockId, Sequence, SequenceId, Sequences};

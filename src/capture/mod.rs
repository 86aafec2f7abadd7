//! Capture: from a chain to graphs that replay.
//!
//! [`ladder`] says which sizes, [`lower`] turns symbols into addresses, [`record`] is the capture state machine, and a
//! [`CapturedGraph`] owns everything its nodes point at. Kernels are loaded once into [`Modules`].

pub mod advice;
pub mod cost;
pub mod graph;
pub mod ladder;
mod lower;
mod modules;
mod record;
mod recorded;

pub use cost::GraphCost;
pub use graph::{CapturedGraph, GraphSet};
pub use ladder::Ladder;
pub use lower::{Launch, lower};
pub use modules::Modules;
pub use record::{launch_all, launch_one, record};

//! Workloads and checks that measure an executor.

mod replay;
mod shadow;
pub mod workload;

pub use crate::random::Random;
pub use replay::{Probe, ReplayLatency, replay_latency};
pub use shadow::Shadowed;
pub use workload::{Served, Workload};

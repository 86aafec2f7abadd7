//! Workloads and checks that measure an executor.

mod random;
mod replay;
mod shadow;
pub mod workload;

pub use random::Random;
pub use replay::{Probe, ReplayLatency, replay_latency};
pub use shadow::Shadowed;
pub use workload::{Served, Workload};

//! Workloads and checks that measure an executor.

mod client;
mod memory;
mod pair;
pub mod ranks;
mod replay;
pub mod serve;
mod shadow;
pub mod soak;
pub mod timing;
pub mod verify;
pub mod verify_model;
pub mod workload;

pub use client::{Client, Outcome};
pub use memory::resident_bytes;
pub use pair::{Found, Pair};
pub use replay::{Probe, ReplayLatency, replay_latency};
pub use serve::{Check, ServeReport, serve};
pub use shadow::Watched;
pub use workload::{Served, Workload};

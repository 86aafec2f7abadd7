//! Workloads and checks that measure an executor.

mod random;
mod shadow;
pub mod workload;

pub use random::Random;
pub use shadow::Shadowed;
pub use workload::{Served, Workload};

//! All persistent memory of a device: planned, allocated once, sealed.
//!
//! [`plan`] is pure: buffers with names, shapes and reasons become offsets. The slab and the ledger make it real.

pub mod plan;

pub use plan::{ArenaPlan, BufferId, BufferSpec, PlanBuilder, PlannedBuffer, Purpose, SlabPlan};

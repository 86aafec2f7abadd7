//! All persistent memory of a device: planned, allocated once, sealed.
//!
//! [`plan`] is pure: buffers with names, shapes and reasons become offsets. [`Arena`] makes them real, one slab a memory kind
//! with guard bands between buffers, and hands out views only once sealed; the [`Ledger`] knows every range. After the seal
//! nothing allocates or frees (SEAL-1): an address cannot change if nothing may allocate.

mod ledger;
mod pinned;
pub mod plan;
mod slab;

pub use ledger::{Ledger, LedgerEntry, LedgerKey};
pub use pinned::PinnedView;
pub use plan::{ArenaPlan, BufferId, BufferSpec, PlanBuilder, PlannedBuffer, Purpose, SlabPlan};
pub use slab::{Arena, Planning, Sealed};

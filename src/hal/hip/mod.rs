//! The HIP device: AMD's runtime, found at run time.
//!
//! Mirrors `hal::cuda` file by file; `version` is its own, as the runtime's numbers moved. Thin: every method is a call or two,
//! and an error carries the runtime's own words. A wrong pointer is not noticed until later; `hal::checked` refuses it before.
//!
//! One device a process, of those that `HIP_VISIBLE_DEVICES` leaves visible. `CAPSTAN_HIP_LIBRARY` names another library than
//! libamdhip64. Graphs are instantiated anew, never updated: an update leaks (rocm-systems #10713).

mod device;
mod dot;
mod event;
mod graph;
mod memory;
mod module;
mod nodes;
mod status;
mod stream;
mod table;
mod version;

pub use device::HipDevice;

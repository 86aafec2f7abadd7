//! Kernels: source, symbol, argument struct and CPU op of each, tied together by a [`KernelSpec`].
//!
//! [`args`] defines how an argument struct names its fields, so that the checker and the dump can tell every pointer and
//! scalar of every node. [`step`], [`msa`], [`exchange`], [`m3`], [`probe`] hold the argument structs; the CPU ops live in [`cpu`], the device source in
//! `/kernels`, and [`registry`] ties them together. A user's kernel is a [`KernelSpec`] like any other.

pub mod args;
pub mod build;
pub mod cpu;
pub mod exchange;
pub mod header;
pub mod m3;
pub mod msa;
pub mod probe;
pub mod registry;
pub mod step;

use crate::hal::CpuOp;
pub use args::{Access, ArgsLayout, Field, FieldKind, KernelArgs, Ptr, ScalarKind};

/// Everything the runtime knows of one kernel.
pub struct KernelSpec {
    /// Symbol in the device source and name in dumps.
    pub symbol: &'static str,
    /// File under `/kernels` that defines it, e.g. `score.hip`.
    pub source: &'static str,
    /// Its argument struct.
    pub args: &'static ArgsLayout,
    /// Its op on the CPU device.
    pub cpu: CpuOp,
    /// One sentence: what it computes.
    pub summary: &'static str,
}

impl std::fmt::Debug for KernelSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelSpec").field("symbol", &self.symbol).finish_non_exhaustive()
    }
}

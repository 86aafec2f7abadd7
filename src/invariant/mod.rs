//! The checker: proves that a captured graph is the chain it was recorded from and nothing else.
//!
//! [`id`] lists the invariants, [`report`] says what a check found. [`audit`](audit()) holds a graph, read back from its
//! device, against the ledger and the lowered chain; [`race`] looks for unordered nodes, [`coverage`] for reads of what no node wrote, [`bake`] for values that came from a
//! batch, [`memory`] for buffers that overlap and guard bands that were damaged, [`written`] for outputs that a kernel left out,
//! [`compare`] for the first element in which two runs of a node differ.
//!
//! [`lint`] warns of what a graph pays for and does not need. [`self_test`] replays small graphs with known results before a device is trusted with a model; [`issues`] are the public
//! reports its faults are named by.
//!
//! Checks fail closed: a query that errs is a finding. Nothing in here changes a graph or an address.

mod audit;
pub mod bake;
pub mod compare;
pub mod coverage;
mod graph_cost;
pub mod id;
pub mod issues;
pub mod lints;
pub mod memory;
mod nodes;
mod probes;
pub mod race;
pub mod ranges;
pub mod report;
pub mod selftest;
pub mod written;

pub use audit::{Audit, audit};
pub use graph_cost::graph_cost;
pub use id::Invariant;
pub use lints::{Lint, LintKind, lint};
pub use report::{Finding, Report};
pub use selftest::{SelfTestReport, self_test};

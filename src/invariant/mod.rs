//! The checker: proves that a captured graph is the chain it was recorded from and nothing else.
//!
//! [`id`] lists the invariants, [`report`] says what a check found.
//!
//! Checks fail closed: a query that errs is a finding. Nothing in here changes a graph, an arena or a step.

pub mod id;
pub mod report;

pub use id::Invariant;
pub use report::{Finding, Report};

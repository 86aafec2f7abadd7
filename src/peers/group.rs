//! A group of ranks as the host sees it.

use std::fmt;

use crate::error::{Error, Result};

/// The ranks that run one model together. All of them call the same methods in the same order.
pub trait Group: Send + Sync + fmt::Debug {
    /// This rank.
    fn rank(&self) -> u32;

    /// Ranks.
    fn world(&self) -> u32;

    /// Gives every rank's bytes to every rank, indexed by rank; waits for all of them. `label` says what is gathered; ranks that
    /// gather different things at once are an error on all of them.
    ///
    /// Errors: a rank is gone, late, or elsewhere.
    fn all_gather(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;
}

/// Every rank's `value` of one thing is the same, or an error on every rank that names one that differs.
pub fn agree(group: &dyn Group, what: &str, value: &[u8], help: &str) -> Result<()> {
    let all = group.all_gather(what, value)?;
    let own = group.rank() as usize;
    match all.iter().position(|other| other != &all[own]) {
        None => Ok(()),
        Some(other) => {
            let show = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let (ours, theirs) = (show(&all[own]), show(&all[other]));
            let message = format!("{what}: rank {own} has {ours}, rank {other} has {theirs}");
            Err(Error::invariant("RANK-1", message).help(help.to_string()))
        }
    }
}

/// A rank that did not come in time, or came with something else.
pub(super) fn absent(label: &str, rank: u32, seconds: f64) -> Error {
    Error::peer(format!("rank {rank} did not come to {label:?} within {seconds:.1} s"))
        .help("look for what ended or slowed that rank; all ranks must make the same calls in the same order")
}

/// Two ranks gather different things.
pub(super) fn elsewhere(label: &str, rank: u32, other: &str) -> Error {
    Error::invariant("RANK-1", format!("this rank is at {label:?}, rank {rank} at {other:?}"))
        .help("all ranks must make the same calls in the same order")
}

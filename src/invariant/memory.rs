//! The memory under the graphs: the ledger is the plan, buffers lie apart (ADDR-3), guard bands hold (GUARD-1).

use super::{Finding, Report};
use crate::arena::{Arena, BufferId, Sealed};
use crate::error::ErrorKind;

/// Holds the ledger against the plan and adds what differs. No device call.
pub fn ledger(arena: &Arena<Sealed>, report: &mut Report) {
    let plan = arena.plan();
    let mut ranges = Vec::with_capacity(plan.buffers.len());
    for (at, planned) in plan.buffers.iter().enumerate() {
        let entry = arena.ledger().entry(BufferId(at as u32));
        if entry.bytes != planned.bytes {
            let help = "a sealed arena changed: find who replaced the buffer";
            let (expected, found) = (format!("{} bytes", planned.bytes), format!("{} bytes", entry.bytes));
            report.push(Finding::new("SEAL-1", expected, found, help).buffer(&*planned.spec.name));
        }
        if entry.bytes > 0 {
            ranges.push((entry.ptr, entry.bytes, &planned.spec.name));
        }
    }
    ranges.sort();
    for pair in ranges.windows(2) {
        let [(ptr, bytes, name), (next, _, other)] = pair else { continue };
        if ptr.add(*bytes) > *next {
            let overlap = ptr.add(*bytes).0 - next.0;
            let help = "two live buffers share bytes and no alias is declared: lay them out apart in the plan";
            let found = format!("{overlap} bytes shared with {other}");
            report.push(Finding::new("ADDR-3", "a range of its own", found, help).buffer(&**name));
        }
    }
}

/// GUARD-1: reads every guard band. The device must be idle.
pub fn guards(arena: &Arena<Sealed>, report: &mut Report) {
    let Err(error) = arena.check_guards() else { return };
    let help = "a kernel writes outside its buffer: run with Checks::each_node to find which";
    match error.kind() {
        ErrorKind::Invariant(_) => report.push(Finding::new("GUARD-1", "the pattern in every guard band", error.message(), help)),
        _ => report.query_failed("GUARD-1", "reading the guard bands", &error),
    }
}

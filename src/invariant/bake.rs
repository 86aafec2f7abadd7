//! BAKE-1: one key, captured twice around two different dummy batches, gives the same nodes, byte for byte.
//!
//! What differs came from a batch and not from the key: it would be stale when the graph is replayed for another batch.

use super::audit::differing;
use super::nodes::{ReadBack, launch_shape, value};
use super::{Finding, Report};
use crate::arena::{Arena, Sealed};
use crate::capture::Modules;
use crate::chain::Chain;
use crate::hal::{Graph, KernelNode, NodeId};

const HELP: &str =
    "a graph holds only what follows from its key and limits: bound this value by the limits, or read it on the device";

/// Compares two recordings of one key and adds what differs; `chain` is the second's and lends its labels.
pub fn compare(
    first: &dyn Graph,
    second: &dyn Graph,
    chain: &Chain,
    modules: &Modules,
    arena: &Arena<Sealed>,
    report: &mut Report,
) {
    let (Some(first), Some(second)) = (ReadBack::of(first, report), ReadBack::of(second, report)) else { return };
    for (at, ((id, old), (_, new))) in first.kernels.iter().zip(&second.kernels).enumerate() {
        let label = chain.ops.get(at).map_or("", |op| &*op.label);
        if old.symbol != new.symbol || old.function != new.function {
            let (expected, found) = (format!("kernel {} as in the first capture", old.symbol), format!("kernel {}", new.symbol));
            report.push(Finding::new("BAKE-1", expected, found, HELP).at(id.0, label));
            // Behind an op that one of them lacks, nothing lines up.
            break;
        }
        if old.shape != new.shape {
            let (expected, found) = (format!("{} as in the first capture", launch_shape(&old.shape)), launch_shape(&new.shape));
            report.push(Finding::new("BAKE-1", expected, found, HELP).at(id.0, label));
        }
        if old.args != new.args {
            arguments(*id, label, old, new, modules, arena, report);
        }
    }
    if first.kernels.len() != second.kernels.len() {
        let (expected, found) =
            (format!("{} kernels as in the first capture", first.kernels.len()), format!("{} kernels", second.kernels.len()));
        report.push(Finding::new("BAKE-1", expected, found, HELP));
    } else if first.edges != second.edges {
        report.push(Finding::new("BAKE-1", "the first capture's edges", "other edges", HELP));
    }
}

fn arguments(
    id: NodeId,
    label: &str,
    old: &KernelNode,
    new: &KernelNode,
    modules: &Modules,
    arena: &Arena<Sealed>,
    report: &mut Report,
) {
    let Some(kernel) = modules.kernel(new.function).filter(|kernel| kernel.args.bytes == new.args.len()) else {
        let found = format!("other arguments of kernel {}, which nobody declared", new.symbol);
        report.push(Finding::new("BAKE-1", "the first capture's arguments", found, HELP).at(id.0, label));
        return;
    };
    for field in differing(kernel, &old.args, &new.args) {
        let expected = format!("{} as in the first capture", value(arena, field, &old.args));
        let finding = Finding::new("BAKE-1", expected, value(arena, field, &new.args), HELP);
        report.push(finding.at(id.0, label).field(field.name));
    }
}

//! Lints of the crate's own chains, and of a capture that takes memory no graph accounts for.

mod lying;
mod serving;

use std::sync::Arc;

use capstan::chain::StepChains;
use capstan::hal::{self, Device};
use capstan::invariant::LintKind;
use capstan::runtime::{CaptureReport, Executor};
use lying::{Lie, LyingDevice};

fn capture(device: &Arc<dyn Device>, chains: Arc<dyn StepChains>) -> CaptureReport {
    Executor::new(device, chains).unwrap().capture(|_| ()).unwrap()
}

#[test]
fn the_whole_model_needs_every_node() {
    let report = capture(&serving::device(), serving::m3(&serving::limits()));
    assert_eq!(report.lints, []);
}

#[test]
fn sparse_layers_alone_overwrite_each_others_output() {
    let report = capture(&serving::device(), serving::msa(&serving::limits()));
    let told: Vec<_> = report.lints.iter().map(|lint| (lint.kind, lint.ops.clone())).collect();
    // No projection stands between them: what one layer attends to, the next does not read.
    assert_eq!(told, [(LintKind::Overwritten, vec!["layer0.attend".into(), "layer1.attend".into()])]);
}

#[test]
fn memory_that_no_graph_accounts_for_is_told() {
    let device: Arc<dyn Device> = Arc::new(LyingDevice::new(hal::open("cpu").unwrap(), Lie::KeepsMemory(8192)));
    let report = capture(&device, serving::m3(&serving::limits()));
    assert_eq!(report.lints.iter().map(|lint| lint.kind).collect::<Vec<_>>(), [LintKind::GrownWorkspace]);
    let bytes = 8192 * report.sizes.len() as u64;
    assert_eq!((report.graph_bytes, report.estimated_graph_bytes), (bytes, 0));
    assert_eq!(report.graphs.iter().map(|graph| graph.bytes).collect::<Vec<_>>(), vec![8192; report.sizes.len()]);
    assert!(report.graphs.iter().all(|graph| graph.nodes * report.sizes.len() == report.nodes));
}

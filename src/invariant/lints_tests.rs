use std::sync::Arc;

use super::super::probes::{Map, Probes};
use super::*;
use crate::hal;

const MAP: Map = Map { mul: 3, add: 1 };
const OTHER: Map = Map { mul: 5, add: 2 };

/// The lints of a straight chain of (source, map, destination) over buffers 0 to 7.
fn lints(steps: &[(u32, Map, u32)]) -> Vec<Lint> {
    let probes = Probes::new(&hal::open("null").unwrap(), 8, 0).unwrap();
    let steps = steps.iter().map(|&(src, map, dst)| (BufferId(src), map, BufferId(dst)));
    lint(&probes.capture("layer0", steps).unwrap())
}

fn told(lints: &[Lint]) -> Vec<(LintKind, &[u32])> {
    lints.iter().map(|lint| (lint.kind, &lint.nodes[..])).collect()
}

#[test]
fn a_chain_that_needs_all_it_does_has_no_lint() {
    assert_eq!(lints(&[(0, MAP, 1), (1, MAP, 2), (2, MAP, 0)]), []);
    // Writing a buffer again after it was read is no waste.
    assert_eq!(lints(&[(0, MAP, 1), (1, MAP, 2), (2, OTHER, 1)]), []);
}

#[test]
fn independent_neighbours_could_be_one_launch() {
    let found = lints(&[(0, MAP, 1), (0, MAP, 2), (0, OTHER, 3), (3, MAP, 4)]);
    assert_eq!(told(&found), [(LintKind::OneLaunch, &[0, 1, 2][..])]);
    let [fast, slow] = found[0].saves_us.unwrap();
    assert!((fast - 1.6).abs() < 1e-9 && (slow - 3.0).abs() < 1e-9, "{fast} {slow}");
    assert!(found[0].to_string().contains("3 neighbours of kernel probe"), "{}", found[0]);
    // One that writes what its neighbour reads is no part of the run.
    assert_eq!(lints(&[(0, MAP, 1), (2, MAP, 0)]), []);
}

#[test]
fn work_that_is_done_twice_or_overwritten_is_told() {
    let found = lints(&[(0, MAP, 1), (1, OTHER, 2), (0, MAP, 1), (1, OTHER, 3)]);
    assert_eq!(told(&found), [(LintKind::Repeats, &[0, 2][..])]);
    // Its input changed in between: not a repeat.
    assert_eq!(lints(&[(0, MAP, 1), (1, OTHER, 0), (0, MAP, 1), (1, OTHER, 3)]), []);
    let found = lints(&[(0, MAP, 1), (1, MAP, 2), (1, OTHER, 3), (3, MAP, 2), (2, MAP, 4)]);
    assert_eq!(told(&found), [(LintKind::Overwritten, &[1, 3][..]), (LintKind::OneLaunch, &[1, 2][..])]);
    assert_eq!(found[0].ops, ["layer0.1", "layer0.3"]);
}

#[test]
fn a_branch_and_a_node_of_no_elements_are_told() {
    use crate::capture::{CapturedGraph, Modules};
    use crate::chain::{Chain, GraphKey};
    use crate::kernels::probe::ProbeArgs;
    use crate::kernels::{Ptr, registry};

    let probes = Probes::new(&hal::open("null").unwrap(), 4, 0).unwrap();
    let mut chain = Chain::new("branch");
    for (at, (src, dst, count)) in [(0, 1, 8), (1, 2, 8), (1, 3, 8), (3, 0, 0)].into_iter().enumerate() {
        let pointer = |buffer| Ptr::symbol(buffer, 0);
        let args = ProbeArgs { dst: pointer(dst), src: pointer(src), count, mul: 3, add: 0, reserved: 0 };
        chain.push(format!("op{at}"), None, &registry::PROBE, [1, 1, 1], &args);
    }
    chain.order = Order::Edges(vec![(0, 1), (0, 2), (1, 3), (2, 3)]);
    let modules = Arc::new(Modules::load(&**probes.arena.device(), &[&registry::PROBE]).unwrap());
    let key = GraphKey { query_len: 1, sequences: 1, kv_len_max: 1, rank: 0, world: 1 };
    let graph = CapturedGraph::capture(key, chain, &probes.arena, &modules, &*probes.stream).unwrap();
    let found = lint(&graph);
    assert_eq!(told(&found), [(LintKind::Branch, &[0][..]), (LintKind::WritesNothing, &[3][..])]);
    assert!(found[0].message.starts_with("1 forks and 1 starts in 4 nodes"), "{}", found[0]);
}

#[test]
fn layers_that_look_alike_are_told_once() {
    let one = |layer: u32| Lint {
        kind: LintKind::OneLaunch,
        nodes: vec![layer * 2, layer * 2 + 1],
        ops: vec![format!("layer{layer}.q"), format!("layer{layer}.k")],
        times: 1,
        saves_us: Some([1.0, 2.0]),
        message: "told".into(),
    };
    let found = fold((0..57).map(one).collect());
    assert_eq!((found.len(), found[0].times, found[0].saves_us), (1, 57, Some([57.0, 114.0])));
    assert_eq!(found[0].nodes, [0, 1]);
    assert_eq!((without_layer("layer12.q.a"), without_layer("layers.q"), without_layer("embed")), ("q.a", "layers.q", "embed"));
}

#[test]
fn memory_beyond_what_graphs_take_is_a_workspace_that_grew() {
    assert_eq!(grown_workspace(1000, 1000, 0), None);
    assert!(grown_workspace(1000, 999, 0).unwrap().message.contains("1 B"));
    // Drivers take pieces of MiB: as much as was estimated twice over, and a piece, is not told.
    assert_eq!(grown_workspace(100 << 20, 90 << 20, 4 << 20), None);
    assert_eq!(grown_workspace(100 << 20, 89 << 20, 4 << 20).unwrap().kind, LintKind::GrownWorkspace);
}

//! Two executors in lockstep: nothing is found without damage, and one damaged node is found by name, its tensors saved.

#![expect(unsafe_code, reason = "wraps a device, which lies about its graphs")]

#[path = "faults/damaged.rs"]
#[allow(dead_code, clippy::allow_attributes, reason = "other tests use the rest")]
mod damaged;
#[path = "faults/liar.rs"]
#[allow(dead_code, clippy::allow_attributes, reason = "other tests use the rest")]
mod liar;
#[path = "faults/recorded.rs"]
mod recorded;
#[path = "faults/rig.rs"]
#[allow(dead_code, clippy::allow_attributes, reason = "other tests use the rest")]
mod rig;
mod serving;

use std::sync::Arc;

use capstan::chain::StepChains;
use capstan::config::Limits;
use capstan::engine::{Engine, EngineLimits};
use capstan::error::ErrorKind;
use capstan::hal;
use capstan::kernels::msa::AttendSparseArgs;
use capstan::measure::{Found, Pair, Workload};
use capstan::runtime::Executor;
use safetensors::SafeTensors;

use damaged::{Damaged, edit};
use recorded::recorded_otherwise;

fn captured(chains: &Arc<dyn StepChains>) -> Executor {
    let mut executor = Executor::new(&hal::open("cpu").unwrap(), chains.clone()).unwrap();
    executor.capture(|_| ()).unwrap();
    executor
}

/// Serves a few requests; gives the error and what was found, or the counts of a clean run.
fn serve(pair: Pair, limits: EngineLimits) -> Result<(u64, u64, u64), Box<(ErrorKind, Found)>> {
    let seed = serving::seed(1);
    let workload = Workload { seed, requests: 5, arrivals_a_step: 0.7, prompt_len: (1, 60), max_new: (3, 8), sampled: 0.5 };
    let requests = workload.requests(limits.vocab, limits.max_model_len);
    let mut engine = Engine::new(pair, limits);
    match workload.serve(&mut engine, requests, |_, _| ()) {
        Ok(_) => {
            assert!(engine.steps().found().is_none());
            Ok(engine.steps().counts())
        }
        Err(error) => Err(Box::new((error.kind(), engine.steps().found().expect("what was found is kept").clone()))),
    }
}

#[test]
fn nothing_differs_without_damage() {
    let limits = Limits { max_num_seqs: 4, ..serving::limits() };
    for chains in [serving::msa(&limits), serving::m3(&limits)] {
        let pair = Pair::new(captured(&chains), captured(&chains), 0.0);
        let (steps, replayed, nodes) = serve(pair, EngineLimits::of(&*chains)).unwrap();
        assert!(replayed > 3 && steps > replayed && nodes > steps * 10, "{steps} {replayed} {nodes}");
    }
}

#[test]
fn a_node_recorded_otherwise_is_found_and_its_tensors_are_saved() {
    let rig = recorded_otherwise(9, "scale").unwrap();
    let chains = rig.executor.chains().clone();
    // Captured twice, as the rig was.
    let mut eager = captured(&chains);
    eager.capture(|_| ()).unwrap();
    let (kind, found) = *serve(Pair::new(rig.executor, eager, 0.0), EngineLimits::of(&*chains)).unwrap_err();
    assert_eq!(kind, ErrorKind::Invariant("PAD-3"));
    let difference = &found.node.difference;
    let named = (difference.node, &*difference.op, &*difference.kernel, difference.field, &*difference.buffer);
    assert_eq!(named, (9, "layer1.attend", "attend_sparse", "out", "attention.out"));
    assert!(!found.prefill && difference.differing > 0);
    let sides = ["in the graph".to_string(), "in the eager run".to_string()];
    let told = found.told(&sides);
    let element =
        format!("element {}: {} in the graph, {} in the eager run", difference.element, difference.left, difference.right);
    assert!(told.contains("node 9 layer1.attend") && told.contains(&element), "{told}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("node.safetensors");
    found.save(&file, &sides).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let f32s = |name: &str| -> Vec<f32> { bytemuck::pod_collect_to_vec(tensors.tensor(name).unwrap().data()) };
    let (left, right) = (f32s("left.out"), f32s("right.out"));
    let first = left.iter().zip(&right).position(|(a, b)| a.to_bits() != b.to_bits()).unwrap();
    assert_eq!(first as u64, difference.element);
    assert_eq!(
        [left[first], right[first]].map(|value| format!("{value:?}")),
        [difference.left.clone(), difference.right.clone()]
    );
    assert!(tensors.names().iter().any(|name| name.starts_with("input.kv_cache")));
    assert_eq!(tensors.tensor("input.q").unwrap().shape()[0], 4, "as many rows as the graph has");
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let about = header.metadata().as_ref().unwrap();
    assert_eq!((&*about["op"], &*about["buffer"]), ("layer1.attend", "attention.out"));
    assert!(found.save(folder.path(), &sides).unwrap_err().help_line().is_some());
}

/// Two devices that disagree in one node, as a kernel of one of them with another rounding would.
#[test]
fn one_node_of_another_device_is_found_unless_it_is_tolerated() {
    let limits = Limits { max_num_seqs: 4, ..serving::limits() };
    let chains = serving::msa(&limits);
    let other = |factor: f32| -> Arc<dyn StepChains> {
        Arc::new(Damaged::new(serving::msa(&limits), move |chain, _| {
            edit::<AttendSparseArgs>(chain, "layer0.attend", |args| args.scale *= factor);
        }))
    };
    let run = |factor: f32, tolerance: f64| {
        serve(Pair::new(captured(&chains), captured(&other(factor)), tolerance), EngineLimits::of(&*chains))
    };
    let op = |outcome: Result<_, Box<(ErrorKind, Found)>>| outcome.map_err(|found| found.1.node.difference.op);
    assert_eq!(op(run(1.0001, 0.0)), Err("layer0.attend".to_string()));
    assert_eq!(op(run(1.5, 1e-3)), Err("layer0.attend".to_string()));
    assert!(op(run(1.0001, 1e-3)).is_ok());
}

#[cfg(feature = "cli")]
#[test]
fn the_command_says_that_nothing_differs_and_refuses_a_device_that_runs_nothing() {
    let capstan = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_capstan"));
        let output = command.arg("bisect").args(args).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).to_string())
    };
    for chain in ["msa", "m3"] {
        let (code, text) = capstan(&["--device", "cpu", "--chain", chain, "--against", "cpu", "--requests", "2"]);
        assert!(code == 0 && text.contains("no node differs"), "{code}: {text}");
    }
    let (code, text) = capstan(&["--device", "null"]);
    assert!(code == 1 && text.contains("nothing to compare"), "{code}: {text}");
    assert_eq!(capstan(&["--device", "cpu", "--tolerance", "2"]).0, 2);
}

#[cfg(feature = "cli")]
#[test]
fn a_served_run_repeats_every_third_replay() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_capstan"));
    let args = ["run", "--device", "cpu", "--requests", "4", "--audit-every", "4", "--shadow-every", "3", "--json"];
    let output = command.args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let (steps, shadowed) =
        (report["metrics"]["decode_steps"].as_u64().unwrap(), report["metrics"]["shadowed"].as_u64().unwrap());
    assert_eq!(shadowed, steps.div_ceil(3));
}

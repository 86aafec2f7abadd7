//! The `capstan` command end to end: the self-test, and advice from recorded traffic. One process a command, as a user runs it.
#![cfg(feature = "cli")]

use std::process::{Command, Output};

use serde_json::Value;

/// A model of the sparse layers' smallest legal shape, in the program's own format.
fn model(dir: &std::path::Path) -> std::path::PathBuf {
    let path = dir.join("config.json");
    capstan::model::make::make_model(&capstan::config::ModelShape::nano(), 3, dir, |_| ()).expect("a model is written");
    path
}

fn capstan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_capstan")).args(args).env("RUST_LOG", "warn").output().expect("the program runs")
}

fn json(args: &[&str]) -> Value {
    let output = capstan(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("--json prints JSON")
}

#[test]
fn devices_tests_what_it_finds() {
    let devices = json(&["devices", "--self-test", "--device", "cpu", "--json"]);
    let cpu = &devices["devices"][0];
    assert_eq!((&cpu["device"], &cpu["self_test"]["passed"]), (&Value::from("cpu"), &Value::from(true)), "{cpu}");
    assert_eq!(cpu["self_test"]["report"]["checks"].as_array().unwrap().len(), 5);
    assert_eq!(cpu["self_test"]["graph_cost"]["node_bytes"], 0);
    let text = capstan(&["devices", "--self-test", "--device", "cpu"]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("long_chain"), "{text:?}");
    // Without a test none is run; the null device has nothing to test.
    assert!(json(&["devices", "--device", "cpu", "--json"])["devices"][0]["self_test"].is_null());
    assert!(json(&["devices", "--self-test", "--device", "null", "--json"])["devices"][0]["self_test"].is_null());
}

#[test]
fn traffic_that_was_served_proposes_a_ladder_that_serves_it_without_padding() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let model = model.to_str().unwrap();
    let run = ["run", "--device", "cpu", "--requests", "24", "--arrivals", "3", "--max-num-seqs", "16", "--json"];
    let served = json(&run);
    let rows = served["metrics"]["batch_rows"].as_array().unwrap();
    let steps: u64 = rows.iter().map(|pair| pair[1].as_u64().unwrap()).sum();
    assert_eq!(Some(steps), served["metrics"]["decode_steps"].as_u64());
    let file = dir.path().join("traffic.json");
    std::fs::write(&file, served.to_string()).unwrap();
    let plan = ["plan", "--device", "cpu", "--model", model, "--max-num-seqs", "16", "--batch-histogram", file.to_str().unwrap()];
    let planned = json(&[&plan[..], &["--json"]].concat());
    let ladders = planned["ladder_advice"]["ladders"].as_array().unwrap();
    let (default, best) = (&ladders[0], ladders.last().unwrap());
    // The default's figure is what the run itself counted. Graphs cost nothing on the CPU, so the best pads nothing.
    assert_eq!(default["pad_rows"], served["metrics"]["pad_rows"]);
    assert_eq!((&best["pad_rows"], &best["eager_steps"]), (&Value::from(0), &Value::from(0)));
    let sizes: Vec<String> = best["sizes"].as_array().unwrap().iter().map(Value::to_string).collect();
    let sizes = sizes.join(",");
    let again = json(&[&run[..], &["--capture-sizes", &sizes]].concat());
    assert_eq!(
        (&again["metrics"]["pad_rows"], &again["metrics"]["batch_rows"]),
        (&Value::from(0), &served["metrics"]["batch_rows"])
    );
    // The table ends with the flag to pass.
    let text = String::from_utf8(capstan(&plan).stdout).unwrap();
    assert!(text.trim_end().ends_with(&format!("--capture-sizes {sizes}")), "{text}");
}

#[test]
fn a_budget_leaves_room_for_the_graphs_of_the_device_that_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let model = model.to_str().unwrap();
    let blocks = |more: &[&str]| {
        let plan = ["plan", "--model", model, "--max-num-seqs", "64", "--capture-sizes", "1,8,64", "--memory", "48MiB", "--json"];
        let planned = json(&[&plan[..], more].concat());
        (planned["cache"]["blocks"].as_u64().unwrap(), planned["limits"]["graph_bytes"].as_u64().unwrap())
    };
    let (cpu, hip, cuda) = (blocks(&["--device", "cpu"]), blocks(&["--device", "hip"]), blocks(&["--device", "cuda"]));
    assert_eq!(cpu.1, 0);
    assert!(hip.1 > 4 << 20 && hip.1 > cuda.1 && cuda.1 > 128 << 10, "{hip:?} {cuda:?}");
    assert!(hip.0 < cuda.0 && cuda.0 < cpu.0, "{cpu:?} {cuda:?} {hip:?}");
    assert_eq!(blocks(&["--device", "hip", "--graph-memory", "0"]), cpu);
    assert_eq!(blocks(&["--device", "cpu", "--graph-memory", "8MiB"]).1, 8 << 20);
}

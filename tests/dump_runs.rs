//! What `capstan dump` adds when nodes run: times, a trace, contents of buffers.
#![cfg(feature = "cli")]

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use capstan::chain::MsaChains;
use capstan::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use capstan::dump::{Diff, Dump, Verdict};
use capstan::hal;
use capstan::measure::{Probe, timing};
use capstan::runtime::Executor;
use safetensors::SafeTensors;
use serde_json::Value;

fn capstan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_capstan")).arg("dump").args(args).output().unwrap()
}

fn ok(args: &[&str]) -> String {
    let output = capstan(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn timing_adds_a_device_section_and_nothing_else() {
    for chain in ["msa", "m3"] {
        let args = ["--device", "cpu", "--chain", chain, "--rows", "2", "--kv-len", "40"];
        let plain = Dump::read(&ok(&[&args[..], &["--format", "json"]].concat()), "plain").unwrap();
        let timed = Dump::read(&ok(&[&args[..], &["--format", "json", "--timing", "--steps", "3"]].concat()), "timed").unwrap();
        let device = timed.device.as_ref().expect("times were asked for");
        assert_eq!((device.platform.as_str(), device.nodes.len()), ("cpu", timed.nodes.len()));
        assert!(device.nodes.iter().all(|time| time.us >= 0.0 && time.bytes > 0), "{:?}", device.nodes);
        assert!(device.nodes.iter().map(|time| time.us).sum::<f64>() > 1.0);
        assert!(plain.device.is_none());
        assert!(matches!(Diff::of(&plain, &timed).verdict(), Verdict::SameBut(_)));
        // The text has the times, too.
        let publish = timed.nodes.iter().position(|node| node.label == "publish").unwrap();
        let text = ok(&[&args[..], &["--timing", "--steps", "1"]].concat());
        let line = text.lines().nth(publish + 1).unwrap();
        assert!(line.contains(" publish ") && line.contains(" time=") && line.contains("GB/s"), "{line}");
        assert!(!ok(&args).contains(" time="));
    }
}

#[test]
fn a_trace_has_the_replay_and_each_node_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    let dump = ok(&["--device", "cpu", "--rows", "4", "--trace", path(&file), "--steps", "2", "--format", "json"]);
    let dump = Dump::read(&dump, "dump").unwrap();
    assert!(dump.device.is_none(), "a trace alone leaves the dump as it is");
    let trace: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let spans = |tid: u64| -> Vec<(String, f64, f64)> {
        let events = trace["traceEvents"].as_array().unwrap().iter();
        let events = events.filter(|event| event["ph"] == "X" && event["tid"] == tid);
        let number = |event: &Value, key: &str| event[key].as_f64().unwrap();
        events.map(|event| (event["name"].as_str().unwrap().into(), number(event, "ts"), number(event, "dur"))).collect()
    };
    let labels: Vec<String> = dump.nodes.iter().map(|node| node.label.clone()).collect();
    let nodes = spans(3);
    assert_eq!(nodes.iter().map(|span| span.0.clone()).collect::<Vec<_>>(), labels);
    for pair in nodes.windows(2) {
        assert!(pair[1].1 >= pair[0].1 + pair[0].2 - 1e-6, "{pair:?}: one stream runs one node at a time");
    }
    let (host, replay) = (spans(1), spans(2));
    assert!(host.len() == 1 && replay.len() == 1 && host[0].2 > 0.0 && replay[0].2 > 0.0, "{host:?} {replay:?}");
}

#[test]
fn tensors_are_what_an_eager_run_has_after_the_same_node() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tensors.safetensors");
    let wanted = "attention.q@layer0.norm_rope_insert,attention.q@layer0.attend,attention.q@layer1.norm_rope_insert,\
                  attention.out@layer1.attend,layer0.kv_cache@embed";
    let limits = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--cache-blocks", "40"];
    let args = ["--device", "cpu", "--rows", "3", "--kv-len", "70", "--seed", "5", "--tensors", wanted, "--out", path(&file)];
    ok(&[&args[..], &limits].concat());
    let bytes = std::fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let data = |name: &str| tensors.tensor(name).unwrap().data();
    assert_eq!(tensors.len(), 5);
    assert_eq!(data("attention.q@layer0.norm_rope_insert"), data("attention.q@layer0.attend"), "attend only reads it");
    assert_ne!(data("attention.q@layer0.norm_rope_insert"), data("attention.q@layer1.norm_rope_insert"));

    let limits = Limits {
        max_model_len: 256,
        max_num_seqs: 4,
        max_num_batched_tokens: 32,
        capture: CaptureSizes::List(vec![3]),
        cache: CacheBudget::Blocks(40),
        ..Limits::default()
    };
    let chains = MsaChains::new(&ModelShape::nano(), &limits, 5).unwrap();
    let mut eager = Executor::new(&hal::open("cpu").unwrap(), Arc::new(chains)).unwrap();
    let probe = Probe::open(&mut eager, 3, 70).unwrap();
    timing::prefill(&mut eager, probe.batch(), 69, 5).unwrap();
    let mut seen = 0;
    let look = |executor: &Executor, op: &capstan::chain::Op| {
        for buffer in ["attention.q", "attention.out"] {
            if let Ok(tensor) = tensors.tensor(&format!("{buffer}@{}", op.label)) {
                let mut found = vec![0; tensor.data().len()];
                executor.arena().read(executor.arena().plan().find(buffer).unwrap(), 0, &mut found)?;
                assert!(found == tensor.data() && found.iter().any(|&byte| byte != 0), "{buffer}@{}", op.label);
                assert_eq!(tensor.shape()[0], 3);
                seen += 1;
            }
        }
        Ok(())
    };
    eager.decode_observed(probe.batch(), look).unwrap();
    assert_eq!(seen, 4);
}

#[test]
fn wrong_names_and_devices_are_refused() {
    for (args, code, says) in [
        (&["--device", "cpu", "--tensors", "attention.q", "--out", "x"][..], 2, "BUFFER@NODE"),
        (&["--device", "cpu", "--tensors", "attention.q@embed"], 2, "--out"),
        (&["--device", "cpu", "--tensors", "attention.z@embed", "--out", "x"], 2, "no buffer attention.z"),
        (&["--device", "cpu", "--tensors", "attention.q@embet", "--out", "x"], 2, "no node embet"),
        (&["--device", "null", "--timing"], 1, "nothing to time"),
        (&["--device", "cpu", "--timing", "--kv-len", "100000"], 2, "at most"),
    ] {
        let output = capstan(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && error.contains(says), "{args:?}: {:?} {error}", output.status.code());
    }
}

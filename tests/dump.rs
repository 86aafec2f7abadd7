//! Dumps of real graphs, compared: two capture sizes, two ranks, two limits, and damaged in one place.

use std::collections::BTreeSet;
use std::sync::Arc;

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use capstan::dump::{Cause, ChangeKind, DeviceSection, Diff, Dump, DumpValue, Verdict};
use capstan::hal;
use capstan::model::M3Chains;
use capstan::runtime::Executor;

fn limits() -> Limits {
    Limits {
        max_model_len: 512,
        max_num_seqs: 64,
        max_num_batched_tokens: 64,
        capture: CaptureSizes::List(vec![1, 8, 9, 64]),
        cache: CacheBudget::Blocks(128),
        ..Limits::default()
    }
}

/// Dumps of all capture sizes of one chain, smallest first.
fn dumps(chain: &str, limits: &Limits) -> Vec<Dump> {
    let shape = ModelShape::nano();
    let chains: Arc<dyn StepChains> = match chain {
        "msa" => Arc::new(MsaChains::new(&shape, limits, 0).unwrap()),
        _ => Arc::new(M3Chains::without_weights(&shape, limits).unwrap()),
    };
    let mut executor = Executor::new(&hal::open("null").unwrap(), chains).unwrap();
    executor.capture(|_| ()).unwrap();
    executor.graphs().iter().map(|graph| Dump::of(graph).unwrap()).collect()
}

fn same_but(cause: Cause) -> Verdict {
    Verdict::SameBut(BTreeSet::from([cause]))
}

#[test]
fn a_dump_comes_back_from_its_json() {
    for chain in ["msa", "m3"] {
        for dump in dumps(chain, &limits()) {
            let back = Dump::read(&dump.json(), "dump.json").unwrap();
            assert_eq!(back, dump);
            assert_eq!(Diff::of(&dump, &back).verdict(), Verdict::Equal);
        }
    }
    let dump = &dumps("msa", &limits())[0];
    for (json, says) in [
        ("{}".to_string(), "dump.json: no dump"),
        (dump.json().replacen("\"schema\": 1", "\"schema\": 7", 1), "schema 7"),
        (dump.json().replacen("\"grid\"", "\"grit\"", 1), "missing field"),
    ] {
        let error = Dump::read(&json, "dump.json").unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn capture_sizes_of_one_executor_are_the_same_but_for_rows() {
    for chain in ["msa", "m3"] {
        let dumps = dumps(chain, &limits());
        for a in &dumps {
            for b in dumps.iter().filter(|b| b.rows != a.rows) {
                let diff = Diff::of(a, b);
                let wrong: Vec<_> = diff.changes.iter().filter(|change| change.cause != Some(Cause::Rows)).collect();
                assert!(wrong.is_empty(), "{chain} {} to {}: {wrong:?}", a.rows, b.rows);
                assert_eq!(diff.verdict(), same_but(Cause::Rows));
            }
        }
    }
}

#[test]
fn ranks_are_the_same_but_for_rank_and_other_limits_are_another_graph() {
    let of_rank = |rank| dumps("msa", &Limits { rank, world: 2, ..limits() }).remove(1);
    let diff = Diff::of(&of_rank(0), &of_rank(1));
    assert_eq!(diff.verdict(), same_but(Cause::Rank), "{:?}", diff.changes);
    // Rows and rank at once are two causes.
    let two = Diff::of(&of_rank(0), &dumps("msa", &Limits { rank: 1, world: 2, ..limits() })[0]);
    assert_eq!(two.verdict(), Verdict::SameBut(BTreeSet::from([Cause::Rows, Cause::Rank])));
    let longer = dumps("msa", &Limits { max_model_len: 1024, ..limits() }).remove(1);
    let diff = Diff::of(&dumps("msa", &limits())[1], &longer);
    assert_eq!(diff.verdict(), Verdict::Different);
    let has = |kind, at: &str| diff.changes.iter().any(|change| (change.kind, &*change.at) == (kind, at));
    assert!(has(ChangeKind::Key, "graph") && has(ChangeKind::Launch, "layer0.score"));
    assert!(has(ChangeKind::BufferResized, "step.block_table") && has(ChangeKind::BufferMoved, "attention.packed"));
}

#[test]
fn a_device_section_is_no_difference() {
    let plain = dumps("msa", &limits()).remove(1);
    let section = |driver: &str| DeviceSection {
        platform: "cpu".into(),
        name: "host".into(),
        arch: "x86_64".into(),
        driver: driver.into(),
        nodes: Vec::new(),
    };
    let with = |driver| Dump { device: Some(section(driver)), ..plain.clone() };
    assert_eq!(Diff::of(&plain, &with("1")).verdict(), same_but(Cause::Device));
    assert_eq!(Diff::of(&with("1"), &with("2")).verdict(), same_but(Cause::Device));
    assert_eq!(Diff::of(&with("2"), &with("2")).verdict(), Verdict::Equal);
}

fn argument<'a>(dump: &'a mut Dump, label: &str, field: &str) -> &'a mut DumpValue {
    let node = dump.nodes.iter_mut().find(|node| node.label == label).expect("the node is there");
    &mut node.args.iter_mut().find(|arg| arg.name == field).expect("the field is there").value
}

/// Each damage is one change between equal dumps, and a real one between two capture sizes too.
#[test]
fn damage_is_found_and_named() {
    type Damage = fn(&mut Dump);
    let damages: [(&str, &str, ChangeKind, Damage); 14] = [
        ("layer0.score", "score_width", ChangeKind::Argument, |dump| {
            *argument(dump, "layer0.score", "score_width") = DumpValue::Scalar { value: "16".into() };
        }),
        ("layer1.topk_emit", "rows", ChangeKind::Argument, |dump| {
            let rows = (dump.rows - 1).to_string();
            *argument(dump, "layer1.topk_emit", "rows") = DumpValue::Scalar { value: rows };
        }),
        ("layer1.attend", "k_scale", ChangeKind::Argument, |dump| {
            *argument(dump, "layer1.attend", "k_scale") = DumpValue::Scalar { value: "0.5".into() };
        }),
        ("layer0.attend", "kv_cache", ChangeKind::Argument, |dump| {
            let DumpValue::Pointer { buffer, .. } = argument(dump, "layer0.attend", "kv_cache") else { panic!() };
            *buffer = "layer1.kv_cache".into();
        }),
        ("layer0.attend", "q", ChangeKind::Argument, |dump| {
            let DumpValue::Pointer { offset, .. } = argument(dump, "layer0.attend", "q") else { panic!() };
            *offset += 64;
        }),
        ("layer0.attend", "q", ChangeKind::Argument, |dump| {
            *argument(dump, "layer0.attend", "q") = DumpValue::Null { buffer: () };
        }),
        ("layer1.attend", "grid", ChangeKind::Launch, |dump| at(dump, "layer1.attend").shape.grid[0] -= 1),
        ("layer1.attend", "workgroup", ChangeKind::Launch, |dump| at(dump, "layer1.attend").shape.workgroup[0] = 64),
        ("embed", "kernel", ChangeKind::Launch, |dump| at(dump, "embed").kernel = "embed2".into()),
        ("embed", "", ChangeKind::NodeGone, |dump| dump.nodes.retain(|node| node.label != "embed")),
        ("layer9.extra", "", ChangeKind::NodeAdded, |dump| {
            let mut node = dump.nodes[3].clone();
            node.label = "layer9.extra".into();
            dump.nodes.insert(4, node);
        }),
        ("embed", "", ChangeKind::EdgeGone, |dump| dump.edges.retain(|&edge| edge != (1, 2))),
        ("attention.q", "place", ChangeKind::BufferMoved, |dump| planned(dump).offset += 256),
        ("attention.q", "size", ChangeKind::BufferResized, |dump| planned(dump).bytes -= 4),
    ];
    let dumps = dumps("msa", &limits());
    let (one, eight) = (&dumps[0], &dumps[1]);
    for (label, field, kind, damage) in damages {
        let mut damaged = eight.clone();
        damage(&mut damaged);
        for other in [eight, one] {
            let diff = Diff::of(other, &damaged);
            assert_eq!(diff.verdict(), Verdict::Different, "{label}.{field} under {} rows", other.rows);
            let real: Vec<_> = diff.changes.iter().filter(|change| change.cause.is_none()).collect();
            let named = real.iter().any(|change| (&*change.at, &*change.field, change.kind) == (label, field, kind));
            assert!(named, "{label}.{field} under {} rows: {real:?}", other.rows);
            // A damaged node is told alone; one gone or added takes its edges along.
            assert!(real.iter().all(|change| change.kind == kind) || field.is_empty(), "{label}.{field}: {real:?}");
        }
    }
}

fn at<'a>(dump: &'a mut Dump, label: &str) -> &'a mut capstan::dump::DumpNode {
    dump.nodes.iter_mut().find(|node| node.label == label).expect("the node is there")
}

fn planned(dump: &mut Dump) -> &mut capstan::arena::PlannedBuffer {
    let buffer = dump.buffers.iter_mut().find(|buffer| buffer.planned.spec.name == "attention.q");
    &mut buffer.expect("the buffer is there").planned
}

/// The command, with its exit codes.
#[cfg(feature = "cli")]
#[test]
fn the_command_compares_files() {
    let dir = tempfile::tempdir().unwrap();
    let dumps = dumps("msa", &limits());
    let mut damaged = dumps[1].clone();
    at(&mut damaged, "layer1.attend").shape.grid[0] -= 1;
    for (name, dump) in [("1", &dumps[0]), ("8", &dumps[1]), ("damaged", &damaged)] {
        std::fs::write(dir.path().join(name), dump.json()).unwrap();
    }
    let diff = |a: &str, b: &str, json: bool| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_capstan"));
        command.arg("diff").args([a, b].map(|name| dir.path().join(name))).args(json.then_some("--json"));
        let output = command.output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(diff("8", "8", false).1, "equal\n");
    let rows = diff("1", "8", false);
    assert!(rows.0 == 0 && rows.1.ends_with("same but for rows\n"), "{}", rows.1);
    let (code, text, _) = diff("8", "damaged", false);
    assert!(code == 1 && text.contains("layer1.attend") && text.contains("7x2x1") && text.ends_with("different\n"), "{text}");
    let (code, text, _) = diff("8", "damaged", true);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &json["same"], &json["changes"][0]["kind"]), (1, &false.into(), &"launch".into()));
    let (code, _, error) = diff("8", "absent", false);
    assert!(code == 2 && error.contains("absent") && error.contains("help"), "{code}: {error}");
}

//! `capstan generate` as a user runs it, on the recorded checkpoint.
#![cfg(feature = "cli")]

mod oracle;

use std::path::PathBuf;
use std::process::{Command, Output};

use oracle::{Tensors, fixtures};
use serde_json::{Value, json};

/// A copy of the recorded checkpoint, with each of its prompts in a file and a tokenizer of its 256 tokens.
struct Model {
    dir: tempfile::TempDir,
    reference: Tensors,
}

impl Model {
    fn new() -> Option<Model> {
        let fixture = fixtures().join("m3-nano");
        if !fixture.is_dir() {
            println!("skipped: {} is not there", fixture.display());
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        for name in ["config.json", "model.safetensors"] {
            std::fs::write(dir.path().join(name), std::fs::read(fixture.join(name)).unwrap()).unwrap();
        }
        let model = Model { dir, reference: Tensors::file(&fixture.join("reference.safetensors")) };
        for prompt in 0..3 {
            let ids = model.ids(&format!("p{prompt}.input_ids"));
            std::fs::write(model.file(&format!("p{prompt}.json")), serde_json::to_string(&ids).unwrap()).unwrap();
        }
        Some(model)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn ids(&self, tensor: &str) -> Vec<i64> {
        self.reference.ints(tensor)
    }

    /// Words `t0` to `t255`, split at spaces.
    fn add_tokenizer(&self) {
        let vocab: serde_json::Map<_, _> = (0..256).map(|id| (format!("t{id}"), json!(id))).collect();
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "t0" }
        });
        std::fs::write(self.file("tokenizer.json"), tokenizer.to_string()).unwrap();
    }

    /// Runs in the model's directory.
    fn generate(&self, args: &[&str]) -> Output {
        let exact = ["--device", "cpu", "--kv-dtype", "f32", "--index-dtype", "f32"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_capstan"));
        command.current_dir(self.dir.path()).args(["generate", "--model", "."]).args(exact).args(args);
        command.env("RUST_LOG", "warn").output().expect("the program runs")
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.generate(&[args, &["--json"]].concat());
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("--json prints JSON")
    }
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn words(ids: &[i64]) -> String {
    ids.iter().map(|id| format!("t{id}")).collect::<Vec<_>>().join(" ")
}

const THREE: [&str; 4] = ["--prompt-ids", "p0.json", "p1.json", "p2.json"];

#[test]
fn recorded_prompts_give_the_recorded_tokens() {
    let Some(model) = Model::new() else { return };
    let report = model.json(&[&THREE[..], &["--max-new", "24", "--ignore-eos"]].concat());
    for (at, request) in report["requests"].as_array().unwrap().iter().enumerate() {
        assert_eq!(request["ids"], json!(model.ids(&format!("p{at}.greedy_ids"))), "prompt {at}");
        assert_eq!((&request["stop_reason"], &request["text"]), (&json!("length"), &Value::Null));
        assert!(request["first_token_seconds"].as_f64().unwrap() > 0.0, "{request}");
    }
    assert_eq!(report["tokens"], 72);
    // One prompt streams; its ids stand for text where there is no tokenizer.
    let one = model.generate(&["--prompt-ids", "p1.json", "--max-new", "24", "--ignore-eos"]);
    let ids: Vec<String> = model.ids("p1.greedy_ids").iter().map(i64::to_string).collect();
    assert_eq!(stdout(&one), ids.join(" ") + "\n", "{}", stderr(&one));
}

#[test]
fn text_goes_through_the_tokenizer() {
    let Some(model) = Model::new() else { return };
    model.add_tokenizer();
    let prompts = [words(&model.ids("p0.input_ids")), words(&model.ids("p1.input_ids"))];
    let greedy = [words(&model.ids("p0.greedy_ids")), words(&model.ids("p1.greedy_ids"))];
    let more = ["--max-new", "24", "--ignore-eos"];
    let one = model.generate(&[&["--prompt", prompts[0].as_str()], &more[..]].concat());
    assert_eq!(stdout(&one), greedy[0].clone() + "\n", "{}", stderr(&one));
    let two = ["--prompt", prompts[0].as_str(), "--prompt", prompts[1].as_str()];
    let both = model.generate(&[&two[..], &more[..]].concat());
    assert_eq!(stdout(&both), format!("prompt 1 (length): {}\nprompt 2 (length): {}\n", greedy[0], greedy[1]));
    let report = model.json(&[&two[..], &more[..]].concat());
    assert_eq!(report["requests"][1]["text"], json!(greedy[1]));
}

#[test]
fn sampled_tokens_repeat_and_do_not_depend_on_the_prompts_beside() {
    let Some(model) = Model::new() else { return };
    let sampled =
        ["--max-new", "24", "--ignore-eos", "--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01"];
    let ids = |args: &[&str], seed: &str, at: usize| {
        model.json(&[args, &sampled[..], &["--seed", seed]].concat())["requests"][at]["ids"].clone()
    };
    let alone = ids(&["--prompt-ids", "p2.json"], "7", 0);
    assert_eq!(alone, ids(&THREE, "7", 2));
    assert_ne!(alone, ids(&["--prompt-ids", "p2.json"], "8", 0));
    assert_ne!(alone, json!(model.ids("p2.greedy_ids")));
    // With one token to choose from, sampling is greedy.
    let one = model.json(&["--prompt-ids", "p2.json", "--max-new", "24", "--ignore-eos", "--temperature", "2", "--top-k", "1"]);
    assert_eq!(one["requests"][0]["ids"], json!(model.ids("p2.greedy_ids")));
}

#[test]
fn a_stop_token_is_the_last() {
    let Some(model) = Model::new() else { return };
    let greedy = model.ids("p0.greedy_ids");
    let stop = greedy[10];
    let len = 1 + greedy.iter().position(|&id| id == stop).unwrap();
    let one =
        &model.json(&["--prompt-ids", "p0.json", "--max-new", "24", "--ignore-eos", "--stop", &stop.to_string()])["requests"][0];
    assert_eq!((&one["ids"], &one["stop_reason"]), (&json!(greedy[..len]), &json!("stop")));
    // The end token of config.json ends a request unless it is ignored.
    let config = std::fs::read_to_string(model.file("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["eos_token_id"] = json!([255, stop]);
    std::fs::write(model.file("config.json"), config.to_string()).unwrap();
    let ended = &model.json(&["--prompt-ids", "p0.json", "--max-new", "24"])["requests"][0];
    assert_eq!((&ended["ids"], &ended["stop_reason"]), (&json!(greedy[..len]), &json!("stop")));
    assert_eq!(model.json(&["--prompt-ids", "p0.json", "--max-new", "24", "--ignore-eos"])["tokens"], 24);
}

#[test]
fn a_refused_prompt_is_named_and_the_others_are_served() {
    let Some(model) = Model::new() else { return };
    std::fs::write(model.file("bad.json"), "[1, 256]").unwrap();
    std::fs::write(model.file("empty.json"), "[]").unwrap();
    let mixed = ["--prompt-ids", "bad.json", "p0.json", "empty.json", "p2.json"];
    let output = model.generate(&[&mixed[..], &["--max-new", "24", "--max-model-len", "300", "--ignore-eos", "--json"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let requests = report["requests"].as_array().unwrap();
    assert_eq!(requests[1]["ids"], json!(model.ids("p0.greedy_ids")));
    let expected = [
        (0, "prompt 1 (bad.json): prompt token 256 is not in the vocabulary of 256"),
        (2, "prompt 3 (empty.json): a request needs a prompt"),
        (3, "prompt 4 (p2.json): the prompt has 333 tokens, max_model_len is 300"),
    ];
    for (at, message) in expected {
        assert!(requests[at]["error"].as_str().unwrap().starts_with(message), "{}", requests[at]);
        assert!(stderr(&output).contains(message), "{}", stderr(&output));
    }
}

#[test]
fn what_cannot_be_served_is_said_before_anything_runs() {
    let Some(model) = Model::new() else { return };
    std::fs::write(model.file("bad.json"), "[1, two]").unwrap();
    let cases: [(&[&str], i32, &str); 9] = [
        (&["--prompt", "t1"], 1, "pass token ids with --prompt-ids FILE"),
        (&["--prompt-ids", "none.json"], 1, "none.json: "),
        (&["--prompt-ids", "bad.json"], 1, "bad.json: two is no token id"),
        (&["--prompt-ids", "p2.json", "--max-model-len", "300"], 1, "the prompt has 333 tokens, max_model_len is 300"),
        (&["--prompt-ids", "p2.json", "--cache-blocks", "20"], 1, "the request may grow to 22 blocks, the whole cache has 20"),
        (&["--prompt-ids", "p0.json", "--stop", "256"], 2, "--stop 256: the model's vocabulary is 256 tokens"),
        (&["--prompt-ids", "p0.json", "--top-p", "0"], 2, "is no way to sample"),
        (&["--prompt-ids", "p0.json", "--max-model-len", "2000"], 2, "max_model_len = 2000"),
        (&[], 2, "--prompt"),
    ];
    for (args, code, message) in cases {
        let output = model.generate(&[args, &["--max-new", "8"]].concat());
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "");
    }
    std::fs::write(model.file("tokenizer.json"), "{}").unwrap();
    let output = model.generate(&["--prompt", "t1", "--max-new", "8"]);
    assert!(output.status.code() == Some(1) && stderr(&output).contains("tokenizer.json: "), "{}", stderr(&output));
}

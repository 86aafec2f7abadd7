//! Every key of a config.json: without it the error names it, or the model is the same.

mod oracle;

use std::path::Path;

use capstan::config::ModelShape;
use capstan::error::ErrorKind;
use capstan::model::Checkpoint;
use oracle::fixtures;
use serde_json::Value;

/// Keys a text decode step does not read, or whose absence has one meaning.
const NOT_NEEDED: [&str; 24] = [
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "hidden_act",
    "initializer_range",
    "model_type",
    "output_router_logits",
    "pad_token_id",
    "partial_rotary_factor",
    "rope_type",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sparse_disable_index_output",
    "sparse_disable_index_value",
    "sparse_init_block",
    "sparse_score_type",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "use_sparse_attention",
    "num_mtp_modules",
];

/// Paths of every value that is no object.
fn keys(value: &Value, at: &str, into: &mut Vec<String>) {
    for (key, value) in value.as_object().unwrap() {
        let path = format!("{at}/{key}");
        if value.is_object() { keys(value, &path, into) } else { into.push(path) }
    }
}

fn write(dir: &Path, config: &Value) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn each_needed_key_is_named_when_it_is_missing_or_no_value() {
    for fixture in ["m3-nano", "m3-nano-published", "m3-tiny", "minimax-m3"] {
        let file = fixtures().join(fixture).join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let shape = ModelShape::read(&file).unwrap();
        let (dir, mut needed) = (tempfile::tempdir().unwrap(), 0);
        // Two keys say how many channels rotate: one will do.
        if let Some(partial) = config.pointer("/rope_parameters/partial_rotary_factor").cloned() {
            let rotary = config.as_object_mut().unwrap().remove("rotary_dim").unwrap();
            write(dir.path(), &config);
            assert_eq!(ModelShape::read(dir.path()).unwrap(), shape, "{fixture} with {partial}");
            config["rope_parameters"].as_object_mut().unwrap().remove("partial_rotary_factor");
            config["rotary_dim"] = rotary;
        }
        let mut all = Vec::new();
        keys(&config, "", &mut all);
        for path in all {
            let (parent, key) = path.rsplit_once('/').unwrap();
            let mut without = config.clone();
            without.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(key);
            write(dir.path(), &without);
            let read = ModelShape::read(dir.path());
            if NOT_NEEDED.contains(&key) {
                let eos = |shape: ModelShape| ModelShape { eos_tokens: Vec::new(), ..shape };
                assert_eq!(eos(read.unwrap()), eos(shape.clone()), "{fixture} without {path}");
                continue;
            }
            needed += 1;
            // Without its value, and with one of another type.
            let mut wrong = config.clone();
            *wrong.pointer_mut(&path).unwrap() = Value::from("x");
            write(dir.path(), &wrong);
            for (error, what) in [(read, "missing"), (ModelShape::read(dir.path()), "x")] {
                let error = error.expect_err(&format!("{fixture}, {path}: {what}"));
                let named = error.message().contains("config.json: ") && error.message().contains(key);
                assert!(error.kind() == ErrorKind::Config && named && error.help_line().is_some(), "{path} {what}: {error}");
            }
        }
        assert!(needed >= 25, "{fixture}: {needed} needed keys");
    }
}

#[test]
fn a_checkpoint_without_a_config_or_with_a_broken_one_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    for text in [None, Some("{"), Some("[]"), Some("{}"), Some("{\"text_config\": 3}")] {
        if let Some(text) = text {
            std::fs::write(dir.path().join("config.json"), text).unwrap();
        }
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Input | ErrorKind::Config), "{error}");
        assert!(error.message().contains("config.json"), "{text:?}: {error}");
    }
}

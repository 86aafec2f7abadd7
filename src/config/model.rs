//! A model's shape, read from a Hugging Face `config.json` in either naming, or from TOML.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};

/// Dimensions of a MiniMax-M3-architecture text model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelShape {
    /// Channels of the residual stream.
    pub hidden: u32,
    /// Vocabulary.
    pub vocab: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Rotating channels of a head.
    pub rotary_dim: u32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Epsilon of every norm.
    pub eps: f32,
    /// Longest position the model was made for.
    pub max_position_embeddings: u32,
    /// Index heads of a sparse layer.
    pub index_heads: u32,
    /// Channels of an index head.
    pub index_dim: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Blocks selected a row and head.
    pub topk_blocks: u32,
    /// Blocks forced at the start.
    pub init_blocks: u32,
    /// Blocks forced at the end.
    pub local_blocks: u32,
    /// Per layer: sparse attention (true) or dense.
    pub sparse_attention: Vec<bool>,
    /// Per layer: mixture of experts (true) or dense MLP.
    pub moe: Vec<bool>,
    /// Width of a dense layer's MLP.
    pub dense_ffn: u32,
    /// Width of one expert.
    pub expert_ffn: u32,
    /// Width of the shared expert; 0 if there is none.
    pub shared_ffn: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Experts a token uses.
    pub experts_per_token: u32,
    /// Factor on the routed experts' sum.
    pub routed_scaling_factor: f32,
    /// Alpha of SwiGLU-OAI.
    pub swiglu_alpha: f32,
    /// Limit of SwiGLU-OAI.
    pub swiglu_limit: f32,
    /// Tokens that end a sequence.
    pub eos_tokens: Vec<u32>,
    /// True if lm_head is the embedding.
    pub tie_word_embeddings: bool,
}

impl ModelShape {
    /// Reads a directory's `config.json`, a `.json` or a `.toml` file.
    ///
    /// Errors name the file and the key: missing, of the wrong type, contradictory, or asking for what is not supported.
    pub fn read(path: &Path) -> Result<ModelShape> {
        let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let text = std::fs::read_to_string(&file).map_err(|error| {
            Error::input(format!("{}: {error}", file.display()))
                .help("pass a model directory with a config.json, or a .json or .toml file")
        })?;
        let shape = if file.extension().is_some_and(|ext| ext == "toml") {
            toml::from_str(&text).map_err(|error| Error::config(format!("{}: {}", file.display(), error.message())))?
        } else {
            Reader::new(&file, &text)?.shape()?
        };
        shape.validate().map_err(|error| {
            Error::config(format!("{}: {}", file.display(), error.message())).help(error.help_line().unwrap_or("").to_string())
        })?;
        Ok(shape)
    }

    /// Layers.
    pub fn layers(&self) -> u32 {
        self.sparse_attention.len() as u32
    }

    /// The published MiniMax-M3 text model (msa-spec section 0.1).
    pub fn minimax_m3() -> ModelShape {
        let late = |from: usize, layers: usize| (0..layers).map(|layer| layer >= from).collect();
        ModelShape {
            hidden: 6144,
            vocab: 200_064,
            q_heads: 64,
            kv_heads: 4,
            head_dim: 128,
            rotary_dim: 64,
            rope_theta: 5e6,
            eps: 1e-6,
            max_position_embeddings: 1_048_576,
            index_heads: 4,
            index_dim: 128,
            block_size: 128,
            topk_blocks: 16,
            init_blocks: 0,
            local_blocks: 1,
            sparse_attention: late(3, 60),
            moe: late(3, 60),
            dense_ffn: 12288,
            expert_ffn: 3072,
            shared_ffn: 3072,
            experts: 128,
            experts_per_token: 4,
            routed_scaling_factor: 2.0,
            swiglu_alpha: 1.702,
            swiglu_limit: 7.0,
            eos_tokens: vec![200_020],
            tie_word_embeddings: false,
        }
    }

    /// A shape for tests and the demo: 3 layers of 64 channels, blocks of 16 tokens, 4 of them selected.
    pub fn nano() -> ModelShape {
        ModelShape {
            hidden: 64,
            vocab: 256,
            q_heads: 4,
            kv_heads: 2,
            head_dim: 32,
            rotary_dim: 16,
            max_position_embeddings: 1024,
            index_heads: 2,
            index_dim: 32,
            block_size: 16,
            topk_blocks: 4,
            sparse_attention: vec![false, true, true],
            moe: vec![false, true, true],
            dense_ffn: 96,
            expert_ffn: 32,
            shared_ffn: 32,
            experts: 4,
            experts_per_token: 2,
            eos_tokens: vec![1],
            ..ModelShape::minimax_m3()
        }
    }

    /// Checks the dimensions against each other.
    pub fn validate(&self) -> Result<()> {
        let fail = |message: String, help: &str| Err(Error::config(message).help(help));
        for (key, value) in [
            ("hidden_size", self.hidden),
            ("vocab_size", self.vocab),
            ("num_attention_heads", self.q_heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("num_hidden_layers", self.layers()),
        ] {
            if value == 0 || value > 1 << 24 {
                return fail(format!("{key} = {value}: expected 1 to {}", 1 << 24), "a dimension is missing or overflows");
            }
        }
        if self.sparse_attention.len() != self.moe.len() {
            return fail(
                format!("{} layers have an attention kind, {} an MLP kind", self.sparse_attention.len(), self.moe.len()),
                "both lists need one entry a layer",
            );
        }
        if !self.q_heads.is_multiple_of(self.kv_heads) {
            return fail(
                format!("{} query heads do not divide over {} KV heads", self.q_heads, self.kv_heads),
                "query heads are a multiple of KV heads",
            );
        }
        if self.rotary_dim > self.head_dim || !self.rotary_dim.is_multiple_of(2) {
            return fail(
                format!("rotary_dim = {} in heads of {}", self.rotary_dim, self.head_dim),
                "expected an even number up to head_dim",
            );
        }
        if !self.head_dim.is_multiple_of(16) {
            return fail(
                format!("head_dim = {}: pages hold channels in groups of 16 bytes", self.head_dim),
                "expected a multiple of 16",
            );
        }
        if !self.block_size.is_multiple_of(16) || self.block_size == 0 || self.block_size > 4096 {
            return fail(
                format!("block_size = {}: a block is whole pages of 16 tokens", self.block_size),
                "expected a multiple of 16 up to 4096",
            );
        }
        if self.sparse_attention.contains(&true) {
            if self.index_heads == 0 || self.index_dim == 0 || self.topk_blocks == 0 {
                return fail(
                    format!(
                        "sparse layers with {} index heads of {} channels, top {}",
                        self.index_heads, self.index_dim, self.topk_blocks
                    ),
                    "all three must be at least 1",
                );
            }
            if !self.kv_heads.is_multiple_of(self.index_heads) {
                return fail(
                    format!("{} KV heads over {} index heads", self.kv_heads, self.index_heads),
                    "KV heads are a multiple of index heads",
                );
            }
            if self.rotary_dim > self.index_dim {
                return fail(
                    format!("rotary_dim = {} in index heads of {}", self.rotary_dim, self.index_dim),
                    "expected at most index_dim",
                );
            }
        }
        if self.moe.contains(&true)
            && (self.experts == 0 || self.experts_per_token == 0 || self.experts_per_token > self.experts || self.experts > 1024)
        {
            return fail(
                format!("{} of {} experts a token", self.experts_per_token, self.experts),
                "expected 1 <= experts a token <= experts <= 1024",
            );
        }
        Ok(())
    }
}

/// Looks keys up in a config.json, under either naming.
struct Reader {
    file: PathBuf,
    text: Value,
}

impl Reader {
    fn new(file: &Path, text: &str) -> Result<Reader> {
        let value: Value = serde_json::from_str(text)
            .map_err(|error| Error::input(format!("{}: {error}", file.display())).help("this is no JSON"))?;
        // The published config nests the text model; the re-saved one is flat.
        let text = value.get("text_config").cloned().unwrap_or(value);
        if !text.is_object() {
            return Err(Error::input(format!("{}: text_config is no object", file.display())));
        }
        Ok(Reader { file: file.to_path_buf(), text })
    }

    /// The error for what stands at `paths`, or does not: names the file, the key under the naming in use, and what was expected.
    fn wrong(&self, paths: &[&str], expected: &str) -> Error {
        let file = self.file.display();
        match self.locate(paths) {
            Some((path, value)) => {
                Error::config(format!("{file}: {path} = {value}: expected {expected}")).help(format!("change {path}"))
            }
            None => Error::config(format!("{file}: {} is missing: expected {expected}", paths.join(" or ")))
                .help("add the key; a MiniMax-M3 config.json has it"),
        }
    }

    /// The first of `paths` (dotted) that is there and not null.
    fn locate<'a>(&self, paths: &[&'a str]) -> Option<(&'a str, &Value)> {
        let at = |path: &str| path.split('.').try_fold(&self.text, |at, key| at.get(key)).filter(|value| !value.is_null());
        paths.iter().find_map(|&path| Some((path, at(path)?)))
    }

    fn find(&self, paths: &[&str]) -> Option<&Value> {
        self.locate(paths).map(|(_, value)| value)
    }

    fn u32(&self, paths: &[&str]) -> Result<u32> {
        let value = self.find(paths).and_then(Value::as_u64).and_then(|value| u32::try_from(value).ok());
        value.ok_or_else(|| self.wrong(paths, "a whole number below 2^32"))
    }

    fn u32_or(&self, paths: &[&str], default: u32) -> Result<u32> {
        if self.find(paths).is_none() { Ok(default) } else { self.u32(paths) }
    }

    fn f64(&self, paths: &[&str]) -> Result<f64> {
        self.find(paths).and_then(Value::as_f64).ok_or_else(|| self.wrong(paths, "a number"))
    }

    /// Per-layer flags: numbers (0 or not) or names compared with `set`.
    fn flags(&self, paths: &[&str], set: &str, unset: &str, layers: usize) -> Result<Vec<bool>> {
        let list =
            self.find(paths).and_then(Value::as_array).ok_or_else(|| self.wrong(paths, "a list with one entry a layer"))?;
        if list.len() != layers {
            let path = self.locate(paths).map_or(paths[0], |(path, _)| path);
            let message = format!("{}: {path} has {} entries for {layers} layers", self.file.display(), list.len());
            return Err(Error::config(message).help("the list needs one entry for each of num_hidden_layers"));
        }
        list.iter()
            .map(|entry| match entry {
                Value::Number(number) => Ok(number.as_f64() != Some(0.0)),
                Value::String(name) if name == set => Ok(true),
                Value::String(name) if name == unset => Ok(false),
                other => Err(self.wrong(paths, &format!("0, 1, \"{set}\" or \"{unset}\", found {other}"))),
            })
            .collect()
    }

    fn shape(&self) -> Result<ModelShape> {
        self.refuse_unsupported()?;
        let layers = self.u32(&["num_hidden_layers"])?;
        if layers == 0 || layers > 4096 {
            return Err(self.wrong(&["num_hidden_layers"], "1 to 4096"));
        }
        let layers = layers as usize;
        let head_dim = self.u32(&["head_dim"])?;
        let sparse_attention = self.flags(
            &["sparse_attention_config.sparse_attention_freq", "layer_types"],
            "minimax_m3_sparse",
            "full_attention",
            layers,
        )?;
        let moe = self.flags(&["moe_layer_freq", "mlp_layer_types"], "sparse", "dense", layers)?;
        let sparse = |inner: &str, flat: &str| self.u32(&[flat, &format!("sparse_attention_config.{inner}")]);
        Ok(ModelShape {
            hidden: self.u32(&["hidden_size"])?,
            vocab: self.u32(&["vocab_size"])?,
            q_heads: self.u32(&["num_attention_heads"])?,
            kv_heads: self.u32(&["num_key_value_heads"])?,
            head_dim,
            rotary_dim: self.rotary_dim(head_dim)?,
            rope_theta: self.f64(&["rope_theta", "rope_parameters.rope_theta"])?,
            eps: self.f64(&["rms_norm_eps"])? as f32,
            max_position_embeddings: self.u32(&["max_position_embeddings"])?,
            index_heads: sparse("sparse_num_index_heads", "index_n_heads")?,
            index_dim: sparse("sparse_index_dim", "index_head_dim")?,
            block_size: sparse("sparse_block_size", "index_block_size")?,
            topk_blocks: sparse("sparse_topk_blocks", "index_topk_blocks")?,
            init_blocks: self.u32_or(&["index_init_blocks", "sparse_attention_config.sparse_init_block"], 0)?,
            local_blocks: sparse("sparse_local_block", "index_local_blocks")?,
            sparse_attention,
            moe,
            dense_ffn: self.u32(&["dense_intermediate_size"])?,
            expert_ffn: self.u32(&["intermediate_size"])?,
            shared_ffn: self.u32(&["shared_intermediate_size"])?,
            experts: self.u32(&["num_local_experts"])?,
            experts_per_token: self.u32(&["num_experts_per_tok"])?,
            routed_scaling_factor: self.f64(&["routed_scaling_factor"])? as f32,
            swiglu_alpha: self.f64(&["swiglu_alpha"])? as f32,
            swiglu_limit: self.f64(&["swiglu_limit"])? as f32,
            eos_tokens: self.eos_tokens()?,
            tie_word_embeddings: self.find(&["tie_word_embeddings"]).and_then(Value::as_bool).unwrap_or(false),
        })
    }

    /// Either key says it; a config with neither would rotate another number of channels than the model was trained with.
    fn rotary_dim(&self, head_dim: u32) -> Result<u32> {
        const PARTIAL: [&str; 2] = ["rope_parameters.partial_rotary_factor", "partial_rotary_factor"];
        if self.find(&["rotary_dim"]).is_none() && self.find(&PARTIAL).is_some() {
            return Ok((f64::from(head_dim) * self.f64(&PARTIAL)?) as u32);
        }
        self.u32(&["rotary_dim"])
    }

    fn eos_tokens(&self) -> Result<Vec<u32>> {
        let bad = || self.wrong(&["eos_token_id"], "a token id or a list of them");
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(bad);
        match self.find(&["eos_token_id"]) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(id).collect(),
            Some(one) => Ok(vec![id(one)?]),
        }
    }

    /// Options that would change results and have no kernel here.
    fn refuse_unsupported(&self) -> Result<()> {
        let refuse = |key: &str, found: &Value, expected: &str| {
            Err(Error::config(format!("{}: {key} = {found} is not supported, expected {expected}", self.file.display()))
                .help("this model needs kernels Capstan does not have"))
        };
        if let Some(kind) = self.find(&["sparse_attention_config.sparse_score_type", "index_score_type"])
            && kind.as_str() != Some("max")
        {
            return refuse("sparse_score_type", kind, "\"max\"");
        }
        if let Some(kind) = self.find(&["rope_parameters.rope_type", "rope_scaling.rope_type", "rope_scaling.type"])
            && kind.as_str() != Some("default")
        {
            return refuse("rope_type", kind, "\"default\"");
        }
        if let Some(act) = self.find(&["hidden_act"])
            && !matches!(act.as_str(), Some("swigluoai" | "silu"))
        {
            // Re-saved configs say silu: the gate is SwiGLU-OAI under either name.
            return refuse("hidden_act", act, "\"swigluoai\" or \"silu\"");
        }
        for (key, plain) in [("attention_bias", false), ("sparse_attention_config.use_sparse_attention", true)] {
            if let Some(found) = self.find(&[key])
                && found.as_bool() != Some(plain)
            {
                return refuse(key, found, if plain { "true" } else { "false" });
            }
        }
        for key in ["sparse_attention_config.sparse_disable_index_value", "sparse_attention_config.sparse_disable_index_output"] {
            // A list has one flag a layer; where each says "disabled" there is nothing to compute.
            let enabled = |flag: &Value| flag.as_bool() == Some(false) || flag.as_i64() == Some(0);
            if let Some(value) = self.find(&[key])
                && value.as_array().map_or_else(|| enabled(value), |list| list.iter().any(enabled))
            {
                return refuse(key, value, "index value and output projections disabled");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixtures() -> PathBuf {
        std::env::var_os("CAPSTAN_FIXTURES")
            .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures"), PathBuf::from)
    }

    fn fixture(name: &str) -> ModelShape {
        ModelShape::read(&fixtures().join(name)).unwrap()
    }

    #[test]
    fn both_namings_give_the_same_shape() {
        assert_eq!(fixture("m3-nano"), fixture("m3-nano-published"));
        assert_eq!(fixture("m3-nano"), ModelShape::nano());
        assert_eq!(fixture("minimax-m3"), ModelShape::minimax_m3());
        let tiny = fixture("m3-tiny");
        assert_eq!((tiny.layers(), tiny.block_size, tiny.rotary_dim), (4, 128, 64));
    }

    #[test]
    fn errors_name_file_and_key() {
        let dir = tempfile::tempdir().unwrap();
        let nano = std::fs::read_to_string(fixtures().join("m3-nano/config.json")).unwrap();
        let cases = [
            (nano.replace("\"hidden_size\"", "\"hidden\""), "hidden_size"),
            (nano.replace("\"head_dim\": 32", "\"head_dim\": \"wide\""), "head_dim"),
            (nano.replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4"), "entries for 4 layers"),
            (nano.replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3"), "3 KV heads"),
            (nano.replace("\"rope_type\": \"default\"", "\"rope_type\": \"yarn\""), "rope_type"),
            (nano.replace("minimax_m3_sparse", "linear"), "layer_types"),
            (nano.replace("\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\""), "hidden_act"),
            ("{".to_string(), "config.json"),
        ];
        for (text, key) in cases {
            let file = dir.path().join("config.json");
            std::fs::write(&file, text).unwrap();
            let error = ModelShape::read(dir.path()).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("config.json"), "{key}: {error}");
        }
        assert!(ModelShape::read(&dir.path().join("none")).is_err());
        let published = fixtures().join("m3-nano-published/config.json");
        let published: Value = serde_json::from_str(&std::fs::read_to_string(published).unwrap()).unwrap();
        for (key, value) in [
            ("sparse_score_type", serde_json::json!("sum")),
            ("use_sparse_attention", serde_json::json!(false)),
            ("sparse_disable_index_value", serde_json::json!([1, 0, 1])),
            ("sparse_topk_blocks", serde_json::json!(null)),
            ("sparse_attention_freq", serde_json::json!([0, 1])),
        ] {
            let mut config = published.clone();
            config["text_config"]["sparse_attention_config"][key] = value;
            std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
            let error = ModelShape::read(dir.path()).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("config.json"), "{key}: {error}");
        }
    }

    #[test]
    fn toml_of_the_same_fields_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nano.toml");
        std::fs::write(&file, toml::to_string(&ModelShape::nano()).unwrap()).unwrap();
        assert_eq!(ModelShape::read(&file).unwrap(), ModelShape::nano());
        std::fs::write(&file, toml::to_string(&ModelShape::nano()).unwrap().replace("q_heads", "heads")).unwrap();
        let error = ModelShape::read(&file).unwrap_err().to_string();
        assert!(error.contains("nano.toml") && error.contains("heads"), "{error}");
    }
}

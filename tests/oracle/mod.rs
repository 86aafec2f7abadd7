//! A slow, plain forward pass of a MiniMax-M3 text model in f64, straight from a checkpoint: nothing of the crate is used, so
//! that it can be held against it.

#![allow(dead_code, clippy::allow_attributes, reason = "each test that includes this uses a part of it")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::Value;

/// The directory of the fixtures.
pub fn fixtures() -> PathBuf {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures");
    std::env::var_os("CAPSTAN_FIXTURES").map_or_else(beside, PathBuf::from)
}

/// All tensors of a checkpoint or of a file of recorded values, as f64, under the re-saved names.
pub struct Tensors(HashMap<String, (Vec<usize>, Vec<f64>)>);

impl Tensors {
    /// Every `model*.safetensors` of a directory.
    pub fn checkpoint(dir: &Path) -> Tensors {
        let mut all = HashMap::new();
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name.starts_with("model") && name.ends_with(".safetensors") {
                all.extend(Tensors::file(&path).0);
            }
        }
        Tensors(all)
    }

    /// One file.
    pub fn file(path: &Path) -> Tensors {
        let bytes = std::fs::read(path).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let read = |name: String| {
            let view = tensors.tensor(&name).unwrap();
            let data = view.data();
            let values = match view.dtype() {
                Dtype::BF16 => {
                    data.chunks(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16).into()).collect()
                }
                Dtype::F32 => data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
                Dtype::I32 => data.chunks(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
                other => panic!("{name}: {other:?}"),
            };
            (name.clone(), (view.shape().to_vec(), values))
        };
        Tensors(tensors.names().into_iter().map(|name| read(name.to_string())).collect())
    }

    /// Names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// A tensor's shape.
    pub fn shape(&self, name: &str) -> &[usize] {
        &self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}")).0
    }

    /// A tensor's values.
    pub fn get(&self, name: &str) -> &[f64] {
        &self.0.get(name).unwrap_or_else(|| panic!("no tensor {name}")).1
    }

    /// A tensor of whole numbers.
    pub fn ints(&self, name: &str) -> Vec<i64> {
        self.get(name).iter().map(|&x| x as i64).collect()
    }

    /// True if there is such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

struct Layer {
    sparse: bool,
    moe: bool,
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    index_keys: Vec<Vec<f64>>,
}

/// What one row did in one layer.
#[derive(Clone, Default)]
pub struct LayerTrace {
    /// Output of attention before its projection.
    pub attention: Vec<f64>,
    /// Selected blocks by index head, in order of score; empty on a dense layer.
    pub blocks: Vec<Vec<usize>>,
    /// Chosen experts; empty on a dense MLP.
    pub experts: Vec<usize>,
    /// Residual stream after the layer.
    pub residual: Vec<f64>,
}

/// What one row did.
pub struct RowTrace {
    /// By layer.
    pub layers: Vec<LayerTrace>,
    /// Logits.
    pub logits: Vec<f64>,
}

/// One sequence of a model.
pub struct Oracle {
    tensors: Tensors,
    published: bool,
    layers: Vec<Layer>,
    pub hidden: usize,
    pub vocab: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rotary_dim: usize,
    theta: f64,
    eps: f64,
    index_heads: usize,
    index_dim: usize,
    block_size: usize,
    topk: usize,
    init_blocks: usize,
    local_blocks: usize,
    experts: usize,
    experts_per_token: usize,
    scaling: f64,
    alpha: f64,
    limit: f64,
}

impl Oracle {
    /// Opens a checkpoint.
    pub fn open(dir: &Path) -> Oracle {
        let config: Value = serde_json::from_str(&std::fs::read_to_string(dir.join("config.json")).unwrap()).unwrap();
        let text = config.get("text_config").unwrap_or(&config);
        let nested = text.get("sparse_attention_config").cloned().unwrap_or(Value::Null);
        let number = |flat: &str, inner: &str| {
            let value = text.get(flat).or_else(|| nested.get(inner)).or_else(|| text.get("rope_parameters")?.get(flat));
            value.and_then(Value::as_f64)
        };
        let int = |flat: &str, inner: &str| number(flat, inner).unwrap_or_else(|| panic!("no {flat}")) as usize;
        let flags = |flat: &str, name: &str, freq: Option<&Value>| -> Vec<bool> {
            match text.get(flat) {
                Some(list) => list.as_array().unwrap().iter().map(|entry| entry == name).collect(),
                None => freq.unwrap().as_array().unwrap().iter().map(|flag| flag.as_i64() != Some(0)).collect(),
            }
        };
        let sparse = flags("layer_types", "minimax_m3_sparse", nested.get("sparse_attention_freq"));
        let moe = flags("mlp_layer_types", "sparse", text.get("moe_layer_freq"));
        let layer = |(sparse, moe)| Layer { sparse, moe, keys: vec![], values: vec![], index_keys: vec![] };
        let tensors = Tensors::checkpoint(dir);
        let published = tensors.names().any(|name| name.starts_with("language_model."));
        Oracle {
            published,
            layers: sparse.into_iter().zip(moe).map(layer).collect(),
            hidden: int("hidden_size", ""),
            vocab: int("vocab_size", ""),
            q_heads: int("num_attention_heads", ""),
            kv_heads: int("num_key_value_heads", ""),
            head_dim: int("head_dim", ""),
            rotary_dim: int("rotary_dim", ""),
            theta: number("rope_theta", "").unwrap(),
            eps: number("rms_norm_eps", "").unwrap(),
            index_heads: int("index_n_heads", "sparse_num_index_heads"),
            index_dim: int("index_head_dim", "sparse_index_dim"),
            block_size: int("index_block_size", "sparse_block_size"),
            topk: int("index_topk_blocks", "sparse_topk_blocks"),
            init_blocks: number("index_init_blocks", "sparse_init_block").unwrap_or(0.0) as usize,
            local_blocks: number("index_local_blocks", "sparse_local_block").unwrap_or(1.0) as usize,
            experts: int("num_local_experts", ""),
            experts_per_token: int("num_experts_per_tok", ""),
            scaling: number("routed_scaling_factor", "").unwrap(),
            alpha: number("swiglu_alpha", "").unwrap(),
            limit: number("swiglu_limit", "").unwrap(),
            tensors,
        }
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        for layer in &mut self.layers {
            layer.keys.clear();
            layer.values.clear();
            layer.index_keys.clear();
        }
    }

    /// Feeds one token.
    pub fn step(&mut self, token: usize) -> RowTrace {
        let mut residual = self.tensor("model.embed_tokens.weight")[token * self.hidden..][..self.hidden].to_vec();
        let mut layers = Vec::new();
        for layer in 0..self.layers.len() {
            let mut trace = LayerTrace::default();
            let x = self.norm(&residual, &format!("model.layers.{layer}.input_layernorm.weight"));
            trace.attention = self.attend(layer, &x, &mut trace.blocks);
            let out = self.linear(&trace.attention, &format!("model.layers.{layer}.self_attn.o_proj.weight"));
            add(&mut residual, &out);
            let x = self.norm(&residual, &format!("model.layers.{layer}.post_attention_layernorm.weight"));
            let out = if self.layers[layer].moe {
                self.moe(layer, &x, &mut trace.experts)
            } else {
                self.mlp(&x, &format!("model.layers.{layer}.mlp"))
            };
            add(&mut residual, &out);
            trace.residual = residual.clone();
            layers.push(trace);
        }
        let x = self.norm(&residual, "model.norm.weight");
        RowTrace { layers, logits: self.linear(&x, "lm_head.weight") }
    }

    /// Feeds a prompt, then its own greedy tokens; gives the traces of the last prompt row and of each generated token but the
    /// last.
    pub fn greedy(&mut self, prompt: &[i64], new: usize) -> (Vec<usize>, Vec<RowTrace>) {
        let mut last = None;
        for &token in prompt {
            last = Some(self.step(token as usize));
        }
        let (mut tokens, mut traces) = (Vec::new(), vec![last.expect("a prompt has a token")]);
        while tokens.len() < new {
            tokens.push(argmax(&traces.last().unwrap().logits));
            if tokens.len() < new {
                traces.push(self.step(*tokens.last().unwrap()));
            }
        }
        (tokens, traces)
    }

    /// A tensor by its re-saved name, wherever the checkpoint keeps it.
    fn tensor(&self, name: &str) -> &[f64] {
        if !self.published {
            return self.tensors.get(name);
        }
        let layer: usize = name.split('.').nth(2).and_then(|word| word.parse().ok()).unwrap_or(0);
        let mut name = format!("language_model.{name}").replace("self_attn.indexer.", "self_attn.index_");
        if self.layers[layer].moe {
            name = name.replace(".mlp.gate.e_score", ".mlp.e_score").replace(".mlp.", ".block_sparse_moe.");
        }
        self.tensors.get(&name)
    }

    /// W x.
    fn linear(&self, x: &[f64], name: &str) -> Vec<f64> {
        product(self.tensor(name), x)
    }

    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + self.eps).sqrt();
        x.iter().zip(self.tensor(name)).map(|(x, w)| x * scale * (1.0 + w)).collect()
    }

    /// Norm of each head, then rotation of its first channels.
    fn heads(&self, x: &[f64], dim: usize, norm: &str, position: usize) -> Vec<f64> {
        let half = self.rotary_dim / 2;
        let mut out = Vec::new();
        for head in x.chunks(dim) {
            let mut head = self.norm(head, norm);
            for i in 0..half {
                let angle = position as f64 * self.theta.powf(-2.0 * i as f64 / self.rotary_dim as f64);
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + half] = b * angle.cos() + a * angle.sin();
            }
            out.extend(head);
        }
        out
    }

    fn attend(&mut self, layer: usize, x: &[f64], blocks: &mut Vec<Vec<usize>>) -> Vec<f64> {
        let at = |name: &str| format!("model.layers.{layer}.self_attn.{name}.weight");
        let position = self.layers[layer].keys.len();
        let q = self.heads(&self.linear(x, &at("q_proj")), self.head_dim, &at("q_norm"), position);
        let k = self.heads(&self.linear(x, &at("k_proj")), self.head_dim, &at("k_norm"), position);
        let v = self.linear(x, &at("v_proj"));
        self.layers[layer].keys.push(k);
        self.layers[layer].values.push(v);
        if self.layers[layer].sparse {
            let q = self.linear(x, &at("indexer.q_proj"));
            let q = self.heads(&q, self.index_dim, &at("indexer.q_norm"), position);
            let k = self.linear(x, &at("indexer.k_proj"));
            let k = self.heads(&k, self.index_dim, &at("indexer.k_norm"), position);
            self.layers[layer].index_keys.push(k);
            *blocks = q.chunks(self.index_dim).map(|q| self.select(layer, q)).collect();
        }
        let mut out = Vec::new();
        for (head, q) in q.chunks(self.head_dim).enumerate() {
            let kv_head = head / (self.q_heads / self.kv_heads);
            let index_head = kv_head / (self.kv_heads / self.index_heads);
            let seen = |token: &usize| blocks.is_empty() || blocks[index_head].contains(&(token / self.block_size));
            let tokens: Vec<usize> = (0..=position).filter(seen).collect();
            let of = |rows: &[Vec<f64>], token: usize| rows[token][kv_head * self.head_dim..][..self.head_dim].to_vec();
            let scale = (self.head_dim as f64).powf(-0.5);
            let scores: Vec<f64> = tokens.iter().map(|&t| scale * dot(q, &of(&self.layers[layer].keys, t))).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let mut mixed = vec![0.0; self.head_dim];
            for (weight, &token) in weights.iter().zip(&tokens) {
                for (mixed, v) in mixed.iter_mut().zip(of(&self.layers[layer].values, token)) {
                    *mixed += weight / sum * v;
                }
            }
            out.extend(mixed);
        }
        out
    }

    /// The best blocks of one index head: largest dot product in the block, forced blocks first, ties to the higher block.
    fn select(&self, layer: usize, q: &[f64]) -> Vec<usize> {
        let keys = &self.layers[layer].index_keys;
        let count = keys.len().div_ceil(self.block_size);
        let score = |block: usize| {
            if block + self.local_blocks >= count {
                return 1e29;
            }
            if block < self.init_blocks {
                return 1e30;
            }
            keys.iter().skip(block * self.block_size).take(self.block_size).map(|k| dot(q, k)).fold(f64::NEG_INFINITY, f64::max)
        };
        let mut order: Vec<(f64, usize)> = (0..count).map(|block| (score(block), block)).collect();
        order.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        order.into_iter().take(self.topk).map(|(_, block)| block).collect()
    }

    fn gate(&self, gate: &[f64], up: &[f64]) -> Vec<f64> {
        let one = |(&gate, &up): (&f64, &f64)| {
            let (gate, up) = (gate.min(self.limit), up.clamp(-self.limit, self.limit));
            (up + 1.0) * gate / (1.0 + (-self.alpha * gate).exp())
        };
        gate.iter().zip(up).map(one).collect()
    }

    fn mlp(&self, x: &[f64], at: &str) -> Vec<f64> {
        let (gate, up) = if self.published {
            (self.linear(x, &format!("{at}.gate_proj.weight")), self.linear(x, &format!("{at}.up_proj.weight")))
        } else {
            let both = self.linear(x, &format!("{at}.gate_up_proj.weight"));
            let (gate, up) = both.split_at(both.len() / 2);
            (gate.to_vec(), up.to_vec())
        };
        self.linear(&self.gate(&gate, &up), &format!("{at}.down_proj.weight"))
    }

    fn moe(&self, layer: usize, x: &[f64], chosen: &mut Vec<usize>) -> Vec<f64> {
        let at = format!("model.layers.{layer}.mlp");
        let logits = self.linear(x, &format!("{at}.gate.weight"));
        let scores: Vec<f64> = logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
        let bias = self.tensor(&format!("{at}.gate.e_score_correction_bias"));
        let mut order: Vec<usize> = (0..self.experts).collect();
        order.sort_by(|&a, &b| (scores[b] + bias[b]).total_cmp(&(scores[a] + bias[a])).then(a.cmp(&b)));
        *chosen = order[..self.experts_per_token].to_vec();
        let sum: f64 = chosen.iter().map(|&expert| scores[expert]).sum();
        let mut out = self.mlp(x, &format!("{at}.shared_experts"));
        for &expert in &*chosen {
            let mixed: Vec<f64> = self.expert(&at, expert, x).iter().map(|y| y * scores[expert] / sum * self.scaling).collect();
            add(&mut out, &mixed);
        }
        out
    }

    fn expert(&self, at: &str, expert: usize, x: &[f64]) -> Vec<f64> {
        if self.published {
            let w = |which: &str| format!("{at}.experts.{expert}.{which}.weight");
            return self.linear(&self.gate(&self.linear(x, &w("w1")), &self.linear(x, &w("w3"))), &w("w2"));
        }
        let part = |name: &str| {
            let all = self.tensor(&format!("{at}.experts.{name}"));
            let one = all.len() / self.experts;
            &all[expert * one..][..one]
        };
        let both = product(part("gate_up_proj"), x);
        let (gate, up) = both.split_at(both.len() / 2);
        product(part("down_proj"), &self.gate(gate, up))
    }
}

fn product(weight: &[f64], x: &[f64]) -> Vec<f64> {
    weight.chunks(x.len()).map(|row| dot(row, x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], x: &[f64]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
}

/// The largest value's place, the first among equals.
pub fn argmax(x: &[f64]) -> usize {
    (0..x.len()).reduce(|best, i| if x[i] > x[best] { i } else { best }).expect("not empty")
}

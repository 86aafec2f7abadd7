//! Random checkpoints of the M3 architecture, as transformers saves and loads them; streamed to disk.
//!
//! Weights are drawn with deviation 1/sqrt(k), so that activations, selections and logits stay of a size where errors show.
//! The same shape and seed give the same bytes on every machine.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::bf16;
use serde_json::json;

use super::weights::{LayerWeight, Naming, Weight, WeightSpec, weights};
use crate::config::ModelShape;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::random::Random;

/// Elements drawn at a time.
const PIECE: usize = 64 * 1024;

/// Names that [`named_shape`] knows.
pub const SHAPES: [&str; 3] = ["nano", "tiny", "m3-slice"];

/// A shape by name: `nano` (3 layers, blocks of 16 tokens), `tiny` (4 layers with MiniMax-M3's heads, blocks and selection)
/// or `m3-slice` (two layers of the full width, 8 experts and a small vocabulary; 2 GB).
///
/// Errors: an unknown name.
pub fn named_shape(name: &str) -> Result<ModelShape> {
    match name {
        "nano" => Ok(ModelShape::nano()),
        "tiny" => Ok(ModelShape {
            hidden: 256,
            vocab: 1024,
            q_heads: 8,
            kv_heads: 2,
            max_position_embeddings: 8192,
            index_heads: 2,
            sparse_attention: vec![false, true, true, true],
            moe: vec![false, true, true, true],
            dense_ffn: 512,
            expert_ffn: 128,
            shared_ffn: 128,
            experts: 8,
            experts_per_token: 2,
            eos_tokens: vec![1],
            ..ModelShape::minimax_m3()
        }),
        "m3-slice" => Ok(ModelShape {
            vocab: 8192,
            sparse_attention: vec![false, true],
            moe: vec![false, true],
            experts: 8,
            max_position_embeddings: 131_072,
            eos_tokens: vec![1],
            ..ModelShape::minimax_m3()
        }),
        other => Err(Error::config(format!("shape {other} is unknown")).help(format!("use one of {}", SHAPES.join(", ")))),
    }
}

/// Writes `config.json` and `model.safetensors` of a random model into `dir`, which is made if need be; gives the bytes of
/// weights written. `progress` hears the bytes done after every piece.
///
/// Errors: a shape that contradicts itself, a directory that already holds a model, anything the disk refuses.
pub fn make_model(shape: &ModelShape, seed: u64, dir: &Path, mut progress: impl FnMut(u64)) -> Result<u64> {
    shape.validate()?;
    let failed = |error: std::io::Error| Error::input(format!("{}: {error}", dir.display()));
    std::fs::create_dir_all(dir).map_err(failed)?;
    let file = dir.join("model.safetensors");
    if file.exists() || dir.join("config.json").exists() {
        return Err(Error::input(format!("{}: holds a model already", dir.display())).help("name another directory"));
    }
    let config = serde_json::to_string_pretty(&config(shape)).expect("invariant: plain values serialise");
    std::fs::write(dir.join("config.json"), config + "\n").map_err(failed)?;
    let mut out = BufWriter::with_capacity(1 << 20, File::create(&file).map_err(failed)?);
    let specs = weights(shape, Naming::Resaved);
    out.write_all(&header(&specs)).map_err(failed)?;
    let (mut random, mut done) = (Random::new(seed), 0);
    for spec in &specs {
        // Parts of a fused buffer follow each other; each has the deviation of the whole.
        for source in &spec.sources {
            let deviation = deviation(spec.weight, &source.shape);
            let mut left = source.shape.iter().product::<u64>() as usize;
            while left > 0 {
                let piece = left.min(PIECE);
                let bytes = draw(&mut random, piece, deviation, stored(spec.weight));
                out.write_all(&bytes).map_err(failed)?;
                (left, done) = (left - piece, done + bytes.len() as u64);
                progress(done);
            }
        }
    }
    out.flush().map_err(failed)?;
    Ok(done)
}

/// How transformers stores a weight: all in bf16 but the router's correction bias.
fn stored(weight: Weight) -> DType {
    if matches!(weight, Weight::Layer(_, LayerWeight::RouterBias)) { DType::F32 } else { DType::Bf16 }
}

fn deviation(weight: Weight, shape: &[u64]) -> f32 {
    match (weight, shape) {
        (Weight::Layer(_, LayerWeight::RouterBias), _) => 0.03,
        (_, [_]) => 0.1,
        (_, [.., k]) => (*k as f32).powf(-0.5),
        (_, []) => 0.0,
    }
}

/// `count` numbers of mean 0, as bytes.
fn draw(random: &mut Random, count: usize, deviation: f32, dtype: DType) -> Vec<u8> {
    // The sum of four 16-bit uniforms is close to normal: mean 2 * 65535, deviation 65536 / sqrt(3).
    let scale = deviation * 3f32.sqrt() / 65536.0;
    let mut one = || {
        let bits = random.next_u64();
        let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u32 & 0xffff).sum();
        (sum as f32 - 131_070.0) * scale
    };
    match dtype {
        DType::F32 => (0..count).flat_map(|_| one().to_le_bytes()).collect(),
        _ => (0..count).flat_map(|_| bf16::from_f32(one()).to_le_bytes()).collect(),
    }
}

/// The safetensors header: its length, then names, types, shapes and offsets, padded to 8 bytes.
fn header(specs: &[WeightSpec]) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut start = 0;
    for spec in specs {
        let dtype = stored(spec.weight);
        let name = if dtype == DType::F32 { "F32" } else { "BF16" };
        for source in &spec.sources {
            let end = start + source.shape.iter().product::<u64>() * dtype.bytes();
            entries.insert(source.tensor.clone(), json!({"dtype": name, "shape": source.shape, "data_offsets": [start, end]}));
            start = end;
        }
    }
    let mut text = serde_json::to_vec(&entries).expect("invariant: plain values serialise");
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// The flat config.json of a text model.
fn config(shape: &ModelShape) -> serde_json::Value {
    let names = |flags: &[bool], set: &str, unset: &str| -> Vec<String> {
        flags.iter().map(|&flag| if flag { set } else { unset }.to_string()).collect()
    };
    let eos = match shape.eos_tokens[..] {
        [] => json!(null),
        [one] => json!(one),
        ref several => json!(several),
    };
    // Numbers go through their shortest decimal form: as f64 an f32 would show digits that are not there.
    let short = |x: f32| x.to_string().parse::<f64>().expect("invariant: a float's own text parses");
    json!({
        "architectures": ["MiniMaxM3VLForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dense_intermediate_size": shape.dense_ffn,
        "eos_token_id": eos,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "index_block_size": shape.block_size,
        "index_head_dim": shape.index_dim,
        "index_local_blocks": shape.local_blocks,
        "index_n_heads": shape.index_heads,
        "index_topk_blocks": shape.topk_blocks,
        "initializer_range": 0.02,
        "intermediate_size": shape.expert_ffn,
        "layer_types": names(&shape.sparse_attention, "minimax_m3_sparse", "full_attention"),
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_layer_types": names(&shape.moe, "sparse", "dense"),
        "model_type": "minimax_m3_vl_text",
        "num_attention_heads": shape.q_heads,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers(),
        "num_key_value_heads": shape.kv_heads,
        "num_local_experts": shape.experts,
        "output_router_logits": false,
        "pad_token_id": null,
        "rms_norm_eps": short(shape.eps),
        "rope_parameters": {
            "partial_rotary_factor": f64::from(shape.rotary_dim) / f64::from(shape.head_dim),
            "rope_theta": shape.rope_theta,
            "rope_type": "default"
        },
        "rotary_dim": shape.rotary_dim,
        "routed_scaling_factor": short(shape.routed_scaling_factor),
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "shared_intermediate_size": shape.shared_ffn,
        "swiglu_alpha": short(shape.swiglu_alpha),
        "swiglu_limit": short(shape.swiglu_limit),
        "tie_word_embeddings": shape.tie_word_embeddings,
        "use_cache": true,
        "vocab_size": shape.vocab
    })
}

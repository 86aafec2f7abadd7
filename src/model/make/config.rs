//! The config.json of a random model, as transformers saves it.

use serde_json::json;

use crate::config::ModelShape;

/// The flat config.json of a text model.
pub(super) fn config(shape: &ModelShape) -> serde_json::Value {
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

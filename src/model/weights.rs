//! The weights of a MiniMax-M3 text model: what each buffer holds, and which tensors of a checkpoint it is packed from.
//!
//! Pure: from a shape to a list. Two namings exist, as transformers saves the text model and as the model is published; the
//! packed buffers are the same. Projections that read the same rows are fused by stacking their rows: q | k | v | index_q |
//! index_k (`msa-spec` section 2.1), gate | up.

use std::fmt;

use crate::config::ModelShape;

/// Which weight of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Weight {
    /// [vocab, hidden] token embeddings.
    Embed,
    /// \[hidden\] norm before `lm_head`.
    FinalNorm,
    /// [vocab, hidden]; absent where the embeddings are tied.
    LmHead,
    /// A layer's.
    Layer(u32, LayerWeight),
}

/// Which weight of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerWeight {
    /// \[hidden\] norm before attention.
    InputNorm,
    /// [packed_width, hidden] fused projection.
    Qkv,
    /// \[head_dim\] norm of q.
    QNorm,
    /// \[head_dim\] norm of k.
    KNorm,
    /// \[index_dim\] norm of index_q.
    IndexQNorm,
    /// \[index_dim\] norm of index_k.
    IndexKNorm,
    /// [hidden, q_heads * head_dim] output projection.
    Output,
    /// \[hidden\] norm before the MLP.
    PostNorm,
    /// [2 * dense_ffn, hidden] gate then up of a dense layer.
    GateUp,
    /// [hidden, dense_ffn].
    Down,
    /// [experts, hidden] router.
    Router,
    /// \[experts\] score correction bias.
    RouterBias,
    /// [experts, 2 * expert_ffn, hidden] gate then up of each expert.
    ExpertsGateUp,
    /// [experts, hidden, expert_ffn].
    ExpertsDown,
    /// [2 * shared_ffn, hidden] gate then up of the shared expert.
    SharedGateUp,
    /// [hidden, shared_ffn].
    SharedDown,
}

impl Weight {
    /// True where kernels take f32 whatever is stored: norms and the router's bias, which are small.
    pub fn is_f32(self) -> bool {
        use LayerWeight::*;
        match self {
            Weight::FinalNorm => true,
            Weight::Embed | Weight::LmHead => false,
            Weight::Layer(_, weight) => {
                matches!(weight, InputNorm | QNorm | KNorm | IndexQNorm | IndexKNorm | PostNorm | RouterBias)
            }
        }
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use LayerWeight::*;
        let (layer, weight) = match self {
            Weight::Embed => return f.write_str("embed"),
            Weight::FinalNorm => return f.write_str("final_norm"),
            Weight::LmHead => return f.write_str("lm_head"),
            Weight::Layer(layer, weight) => (layer, weight),
        };
        let name = match weight {
            InputNorm => "input_norm",
            Qkv => "qkv",
            QNorm => "q_norm",
            KNorm => "k_norm",
            IndexQNorm => "index_q_norm",
            IndexKNorm => "index_k_norm",
            Output => "output",
            PostNorm => "post_norm",
            GateUp => "gate_up",
            Down => "down",
            Router => "router",
            RouterBias => "router_bias",
            ExpertsGateUp => "experts_gate_up",
            ExpertsDown => "experts_down",
            SharedGateUp => "shared_gate_up",
            SharedDown => "shared_down",
        };
        write!(f, "layer{layer}.{name}")
    }
}

/// A checkpoint's way to name tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// As transformers saves the text model: `model.layers.0.mlp.experts.gate_up_proj`.
    Resaved,
    /// As the model is published: `language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight`.
    Published,
}

/// A weight's buffer: its shape, and the tensors stacked into it, first rows first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightSpec {
    /// Which.
    pub weight: Weight,
    /// [..] dimensions of the buffer.
    pub shape: Vec<u64>,
    /// Tensors in the order they follow each other in the buffer.
    pub sources: Vec<Source>,
}

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Its name.
    pub tensor: String,
    /// Its shape.
    pub shape: Vec<u64>,
}

impl WeightSpec {
    /// Elements of the buffer.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// Every weight of a model of `shape`, with its tensors under `naming`.
pub fn weights(shape: &ModelShape, naming: Naming) -> Vec<WeightSpec> {
    let mut list = List { shape, naming, specs: Vec::new() };
    let (vocab, hidden) = (u64::from(shape.vocab), u64::from(shape.hidden));
    list.plain(Weight::Embed, "model.embed_tokens.weight", &[vocab, hidden]);
    for layer in 0..shape.layers() {
        list.attention(layer);
        if shape.moe[layer as usize] { list.experts(layer) } else { list.dense(layer) }
    }
    list.plain(Weight::FinalNorm, "model.norm.weight", &[hidden]);
    if !shape.tie_word_embeddings {
        list.plain(Weight::LmHead, "lm_head.weight", &[vocab, hidden]);
    }
    list.specs
}

struct List<'a> {
    shape: &'a ModelShape,
    naming: Naming,
    specs: Vec<WeightSpec>,
}

impl List<'_> {
    fn prefixed(&self, tensor: &str) -> String {
        match self.naming {
            Naming::Resaved => tensor.to_string(),
            Naming::Published => format!("language_model.{tensor}"),
        }
    }

    /// The name of this naming.
    fn pick<'n>(&self, resaved: &'n str, published: &'n str) -> &'n str {
        if self.naming == Naming::Resaved { resaved } else { published }
    }

    fn push(&mut self, weight: Weight, shape: &[u64], sources: Vec<(String, Vec<u64>)>) {
        let sources = sources.into_iter().map(|(tensor, shape)| Source { tensor: self.prefixed(&tensor), shape }).collect();
        self.specs.push(WeightSpec { weight, shape: shape.to_vec(), sources });
    }

    /// A buffer that is one tensor.
    fn plain(&mut self, weight: Weight, tensor: &str, shape: &[u64]) {
        self.push(weight, shape, vec![(tensor.to_string(), shape.to_vec())]);
    }

    fn attention(&mut self, layer: u32) {
        use LayerWeight::*;
        let shape = self.shape;
        let [hidden, head_dim, index_dim] = [shape.hidden, shape.head_dim, shape.index_dim].map(u64::from);
        let [q, kv] = [shape.q_heads, shape.kv_heads].map(|heads| u64::from(heads) * head_dim);
        let at = |name: &str| format!("model.layers.{layer}.{name}");
        let weight = |weight| Weight::Layer(layer, weight);
        self.plain(weight(InputNorm), &at("input_layernorm.weight"), &[hidden]);
        let mut projections = vec![
            (at("self_attn.q_proj.weight"), vec![q, hidden]),
            (at("self_attn.k_proj.weight"), vec![kv, hidden]),
            (at("self_attn.v_proj.weight"), vec![kv, hidden]),
        ];
        let sparse = shape.sparse_attention[layer as usize];
        let index = |what: &str| at(&format!("self_attn.{}{what}.weight", self.pick("indexer.", "index_")));
        let index_norms = [(IndexQNorm, index("q_norm")), (IndexKNorm, index("k_norm"))];
        if sparse {
            let index_q = u64::from(shape.index_heads) * index_dim;
            projections.push((index("q_proj"), vec![index_q, hidden]));
            projections.push((index("k_proj"), vec![index_dim, hidden]));
        }
        let packed = projections.iter().map(|(_, shape)| shape[0]).sum();
        self.push(weight(Qkv), &[packed, hidden], projections);
        self.plain(weight(QNorm), &at("self_attn.q_norm.weight"), &[head_dim]);
        self.plain(weight(KNorm), &at("self_attn.k_norm.weight"), &[head_dim]);
        for (norm, tensor) in index_norms.into_iter().filter(|_| sparse) {
            self.plain(weight(norm), &tensor, &[index_dim]);
        }
        self.plain(weight(Output), &at("self_attn.o_proj.weight"), &[hidden, q]);
        self.plain(weight(PostNorm), &at("post_attention_layernorm.weight"), &[hidden]);
    }

    fn dense(&mut self, layer: u32) {
        let at = format!("model.layers.{layer}.mlp");
        self.mlp(layer, &at, self.shape.dense_ffn, LayerWeight::GateUp, LayerWeight::Down);
    }

    /// Gate, up and down of one MLP; transformers saves gate and up as one tensor.
    fn mlp(&mut self, layer: u32, at: &str, ffn: u32, gate_up: LayerWeight, down: LayerWeight) {
        let (hidden, ffn) = (u64::from(self.shape.hidden), u64::from(ffn));
        let sources = match self.naming {
            Naming::Resaved => vec![(format!("{at}.gate_up_proj.weight"), vec![2 * ffn, hidden])],
            Naming::Published => ["gate", "up"].map(|which| (format!("{at}.{which}_proj.weight"), vec![ffn, hidden])).to_vec(),
        };
        self.push(Weight::Layer(layer, gate_up), &[2 * ffn, hidden], sources);
        self.plain(Weight::Layer(layer, down), &format!("{at}.down_proj.weight"), &[hidden, ffn]);
    }

    fn experts(&mut self, layer: u32) {
        use LayerWeight::*;
        let shape = self.shape;
        let [hidden, ffn, experts] = [shape.hidden, shape.expert_ffn, shape.experts].map(u64::from);
        let at = format!("model.layers.{layer}.{}", self.pick("mlp", "block_sparse_moe"));
        let weight = |weight| Weight::Layer(layer, weight);
        self.plain(weight(Router), &format!("{at}.gate.weight"), &[experts, hidden]);
        let bias = format!("{at}.{}", self.pick("gate.e_score_correction_bias", "e_score_correction_bias"));
        self.plain(weight(RouterBias), &bias, &[experts]);
        let (gate_up, down) = ([experts, 2 * ffn, hidden], [experts, hidden, ffn]);
        match self.naming {
            Naming::Resaved => {
                self.plain(weight(ExpertsGateUp), &format!("{at}.experts.gate_up_proj"), &gate_up);
                self.plain(weight(ExpertsDown), &format!("{at}.experts.down_proj"), &down);
            }
            Naming::Published => {
                // w1 is the gate, w3 the up and w2 the down projection.
                let of = |expert: u64, which: &str, rows: u64, columns: u64| {
                    (format!("{at}.experts.{expert}.{which}.weight"), vec![rows, columns])
                };
                let gates_ups = (0..experts).flat_map(|e| [of(e, "w1", ffn, hidden), of(e, "w3", ffn, hidden)]).collect();
                let downs = (0..experts).map(|e| of(e, "w2", hidden, ffn)).collect();
                self.push(weight(ExpertsGateUp), &gate_up, gates_ups);
                self.push(weight(ExpertsDown), &down, downs);
            }
        }
        if shape.shared_ffn > 0 {
            self.mlp(layer, &format!("{at}.shared_experts"), shape.shared_ffn, SharedGateUp, SharedDown);
        }
    }
}

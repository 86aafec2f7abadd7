//! Safetensors shards of a model that is not there yet: which tensor goes where, headers and the index.

use serde_json::{Value, json};

use crate::dtype::DType;
use crate::model::weights::{LayerWeight, Source, Weight, WeightSpec};

/// A tensor to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor<'a> {
    pub(super) weight: Weight,
    pub(super) source: &'a Source,
}

impl Tensor<'_> {
    /// How transformers stores it: all in bf16 but the router's correction bias.
    pub(super) fn dtype(&self) -> DType {
        if matches!(self.weight, Weight::Layer(_, LayerWeight::RouterBias)) { DType::F32 } else { DType::Bf16 }
    }

    pub(super) fn elements(&self) -> u64 {
        self.source.shape.iter().product()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.elements() * self.dtype().bytes()
    }
}

/// The tensors of each file, in order: a file ends where the next tensor would take it past `shard_bytes`; a tensor larger than
/// that is alone in its file.
pub(super) fn shards(specs: &[WeightSpec], shard_bytes: u64) -> Vec<Vec<Tensor<'_>>> {
    let mut shards: Vec<Vec<Tensor<'_>>> = Vec::new();
    let mut filled = u64::MAX;
    // Parts of a fused buffer are tensors of their own.
    for tensor in specs.iter().flat_map(|spec| spec.sources.iter().map(|source| Tensor { weight: spec.weight, source })) {
        match shards.last_mut() {
            Some(last) if filled.saturating_add(tensor.bytes()) <= shard_bytes => last.push(tensor),
            _ => {
                filled = 0;
                shards.push(vec![tensor]);
            }
        }
        filled += tensor.bytes();
    }
    shards
}

/// Name of file `at` of `count`.
pub(super) fn name(at: usize, count: usize) -> String {
    match count {
        1 => "model.safetensors".into(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", at + 1),
    }
}

/// The index that a checkpoint of several shards has.
pub(super) fn index(shards: &[Vec<Tensor<'_>>]) -> Value {
    let size: u64 = shards.iter().flatten().map(Tensor::bytes).sum();
    let mut map = serde_json::Map::new();
    for (at, shard) in shards.iter().enumerate() {
        map.extend(shard.iter().map(|tensor| (tensor.source.tensor.clone(), json!(name(at, shards.len())))));
    }
    json!({ "metadata": { "total_size": size }, "weight_map": map })
}

/// The safetensors header: its length, then names, types, shapes and offsets, padded to 8 bytes.
pub(super) fn header(tensors: &[Tensor<'_>]) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut start = 0;
    for tensor in tensors {
        let name = if tensor.dtype() == DType::F32 { "F32" } else { "BF16" };
        let end = start + tensor.bytes();
        let entry = json!({"dtype": name, "shape": tensor.source.shape, "data_offsets": [start, end]});
        entries.insert(tensor.source.tensor.clone(), entry);
        start = end;
    }
    let mut text = serde_json::to_vec(&entries).expect("invariant: plain values serialise");
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

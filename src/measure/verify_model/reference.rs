//! What was recorded of a checkpoint: `reference.safetensors`, every tensor of it read and checked.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use crate::config::ModelShape;
use crate::error::{Error, Result};

/// What was recorded.
pub(super) struct Reference {
    pub(super) prompts: Vec<Prompt>,
}

pub(super) struct Prompt {
    pub(super) name: String,
    pub(super) input: Vec<i32>,
    pub(super) greedy: Vec<i32>,
    /// [steps, vocab].
    pub(super) logits: Vec<f32>,
    /// By layer: [1, heads, width] of the last prompt row.
    pub(super) prefill_blocks: BTreeMap<u32, Blocks>,
    /// By layer: [steps, heads, width] of the steps that consumed each greedy token.
    pub(super) decode_blocks: BTreeMap<u32, Blocks>,
}

pub(super) struct Blocks {
    ids: Vec<i32>,
    pub(super) heads: usize,
    width: usize,
}

impl Blocks {
    pub(super) fn row(&self, row: usize, head: usize) -> BTreeSet<i32> {
        let ids = &self.ids[(row * self.heads + head) * self.width..][..self.width];
        ids.iter().copied().filter(|&id| id >= 0).collect()
    }

    pub(super) fn rows(&self) -> usize {
        self.ids.len() / (self.heads * self.width)
    }
}

impl Prompt {
    /// Steps to run: one a greedy token, and one more if its blocks were recorded.
    pub(super) fn steps(&self) -> usize {
        let consumed = self.decode_blocks.values().map(Blocks::rows).max().unwrap_or(0);
        self.greedy.len().max(consumed + 1)
    }
}

impl Reference {
    /// Reads `dir/reference.safetensors`, recorded of a model of `shape`.
    ///
    /// Errors name the file and the tensor: missing, unknown, of a wrong type or shape, or with ids the model does not have.
    pub(super) fn read(dir: &Path, shape: &ModelShape) -> Result<Reference> {
        let file = dir.join("reference.safetensors");
        let bytes = std::fs::read(&file).map_err(|error| bad(&file, &error.to_string()))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| bad(&file, &error.to_string()))?;
        let mut reader = Reader { file, tensors, shape, read: BTreeSet::new() };
        let mut prompts = Vec::new();
        while reader.tensors.tensor(&format!("p{}.input_ids", prompts.len())).is_ok() {
            prompts.push(reader.prompt(format!("p{}", prompts.len()))?);
        }
        if prompts.is_empty() {
            return Err(reader.bad("there is no tensor p0.input_ids"));
        }
        // What would not be compared must not look as if it had been.
        let unknown = reader.tensors.names().into_iter().filter(|name| !reader.read.contains(*name));
        if let Some(name) = unknown.min() {
            return Err(reader.bad(&format!("unknown tensor {name}")));
        }
        Ok(Reference { prompts })
    }
}

fn bad(file: &Path, what: &str) -> Error {
    Error::input(format!("{}: {what}", file.display()))
        .help("pass a checkpoint directory with the reference.safetensors recorded of it")
}

/// A file being read, and what of it has been.
struct Reader<'a> {
    file: PathBuf,
    tensors: SafeTensors<'a>,
    shape: &'a ModelShape,
    read: BTreeSet<String>,
}

impl<'a> Reader<'a> {
    fn bad(&self, what: &str) -> Error {
        bad(&self.file, what)
    }

    fn tensor(&mut self, name: &str) -> Result<TensorView<'a>> {
        self.read.insert(name.into());
        self.tensors.tensor(name).map_err(|_| self.bad(&format!("there is no tensor {name}")))
    }

    fn prompt(&mut self, name: String) -> Result<Prompt> {
        let input = self.tokens(&format!("{name}.input_ids"))?;
        let greedy = self.tokens(&format!("{name}.greedy_ids"))?;
        let longest = input.len() + greedy.len();
        if longest > self.shape.max_position_embeddings as usize {
            return Err(self.bad(&format!("prompt {name} grows to {longest} tokens, past the model's positions")));
        }
        let logits = self.tensor(&format!("{name}.logits"))?;
        let expected = [greedy.len(), self.shape.vocab as usize];
        if logits.dtype() != Dtype::F32 || logits.shape() != expected {
            let found = (logits.dtype(), logits.shape());
            return Err(self.bad(&format!("tensor {name}.logits is {found:?}, expected F32 {expected:?}")));
        }
        Ok(Prompt {
            logits: bytemuck::pod_collect_to_vec(logits.data()),
            prefill_blocks: self.blocks(&format!("{name}.prefill_last_blocks.layer"), 1)?,
            decode_blocks: self.blocks(&format!("{name}.decode_blocks.layer"), greedy.len())?,
            input,
            greedy,
            name,
        })
    }

    /// At least one token id of the model.
    fn tokens(&mut self, name: &str) -> Result<Vec<i32>> {
        let (ids, shape) = self.ints(name)?;
        if ids.is_empty() || shape.len() != 1 {
            return Err(self.bad(&format!("tensor {name} has shape {shape:?}, expected a list of token ids")));
        }
        match ids.iter().find(|&&id| id < 0 || id as u32 >= self.shape.vocab) {
            Some(id) => Err(self.bad(&format!("tensor {name}: {id} is not in the vocabulary of {}", self.shape.vocab))),
            None => Ok(ids),
        }
    }

    fn ints(&mut self, name: &str) -> Result<(Vec<i32>, Vec<usize>)> {
        let tensor = self.tensor(name)?;
        let values = match tensor.dtype() {
            Dtype::I32 => bytemuck::pod_collect_to_vec(tensor.data()),
            Dtype::I64 => bytemuck::pod_collect_to_vec::<u8, i64>(tensor.data())
                .into_iter()
                .map(|value| i32::try_from(value).map_err(|_| self.bad(&format!("tensor {name}: {value} is no id"))))
                .collect::<Result<_>>()?,
            other => return Err(self.bad(&format!("tensor {name} holds {other:?}, expected I32 or I64"))),
        };
        Ok((values, tensor.shape().to_vec()))
    }

    /// Selected blocks by sparse layer, of at most `rows` rows.
    fn blocks(&mut self, prefix: &str, rows: usize) -> Result<BTreeMap<u32, Blocks>> {
        let mut layers = BTreeMap::new();
        for layer in 0..self.shape.layers() {
            let name = format!("{prefix}{layer}");
            if !self.shape.sparse_attention[layer as usize] || self.tensors.tensor(&name).is_err() {
                continue;
            }
            let (ids, shape) = self.ints(&name)?;
            let heads = self.shape.index_heads as usize;
            // Rows may be left out where there is one.
            let (found_rows, width) = match shape[..] {
                [found, width] if found == heads => (1, width),
                [found_rows, found, width] if found == heads => (found_rows, width),
                _ => return Err(self.bad(&format!("tensor {name} has shape {shape:?}, expected {heads} index heads and blocks"))),
            };
            if width == 0 || found_rows == 0 || found_rows > rows {
                return Err(self.bad(&format!("tensor {name} has shape {shape:?}, expected 1 to {rows} rows of blocks")));
            }
            layers.insert(layer, Blocks { ids, heads, width });
        }
        Ok(layers)
    }
}

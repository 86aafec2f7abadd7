//! A checkpoint directory: `config.json` and safetensors shards, memory-mapped.
//!
//! [`Checkpoint::open`] proves that every tensor the model needs is there with the right shape and type and that nothing else
//! is but what is known to be beside a text model (vision and multi-token-prediction weights). After that a
//! [`PackedWeight`] streams straight from the map into its buffer: the model is never held in memory a second time.

#![expect(unsafe_code, reason = "maps files into memory")]

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use half::bf16;
use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde::Deserialize;

use super::weights::{Naming, Weight, WeightSpec, weights};
use crate::config::ModelShape;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Elements converted at a time where a stored type is widened.
const CONVERT_ELEMENTS: usize = 16 * 1024;

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    shape: ModelShape,
    naming: Naming,
    shards: Vec<Shard>,
    weights: Vec<PackedWeight>,
}

/// A mapped file.
#[derive(Debug)]
struct Shard {
    file: PathBuf,
    map: Mmap,
}

/// Where a tensor is.
#[derive(Clone, Debug)]
struct Located {
    shard: usize,
    start: usize,
    bytes: usize,
    shape: Vec<u64>,
    dtype: Dtype,
}

/// A weight's buffer and the parts of the files it is packed from.
#[derive(Clone, Debug)]
pub struct PackedWeight {
    /// Which.
    pub weight: Weight,
    /// [..] dimensions of the buffer.
    pub shape: Vec<u64>,
    /// Element type of the buffer: f32 for norms and biases and where a part is stored so, else bf16.
    pub dtype: DType,
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    shard: usize,
    start: usize,
    bytes: usize,
    dtype: DType,
}

impl Checkpoint {
    /// Opens a directory.
    ///
    /// Errors name the file and, where there is one, the tensor: a missing or truncated shard, a missing or unknown tensor, a
    /// wrong shape or type, a config that is no MiniMax-M3 text model.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        let shape = ModelShape::read(dir)?;
        let index = Index::read(dir)?;
        let (shards, tensors) = map_shards(dir, &index)?;
        let naming = match tensors.keys().any(|name| name.starts_with("language_model.")) {
            true => Naming::Published,
            false => Naming::Resaved,
        };
        let mut checkpoint = Checkpoint { dir: dir.to_path_buf(), shape, naming, shards, weights: Vec::new() };
        checkpoint.weights = checkpoint.resolve(tensors)?;
        Ok(checkpoint)
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The model's shape.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// How its tensors are named.
    pub fn naming(&self) -> Naming {
        self.naming
    }

    /// Every weight, in the order of the layers.
    pub fn weights(&self) -> &[PackedWeight] {
        &self.weights
    }

    /// Streams one weight: `sink` gets pieces of its buffer in order, each with its byte offset.
    ///
    /// Errors: whatever `sink` returns.
    pub fn stream(&self, weight: &PackedWeight, mut sink: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let mut offset = 0;
        for part in &weight.parts {
            let bytes = &self.shards[part.shard].map[part.start..part.start + part.bytes];
            if part.dtype == weight.dtype {
                sink(offset, bytes)?;
                offset += bytes.len() as u64;
                continue;
            }
            // The one conversion there is: bf16 to f32, exact.
            for piece in bytes.chunks(2 * CONVERT_ELEMENTS) {
                let wide: Vec<f32> = piece.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
                sink(offset, bytemuck::cast_slice(&wide))?;
                offset += 4 * wide.len() as u64;
            }
        }
        Ok(())
    }

    /// Finds every tensor the model needs; what is left over must be known to be none of ours.
    fn resolve(&self, mut tensors: BTreeMap<String, Located>) -> Result<Vec<PackedWeight>> {
        let specs = weights(&self.shape, self.naming);
        let packed = specs.into_iter().map(|spec| self.pack(spec, &mut tensors)).collect::<Result<Vec<_>>>()?;
        if let Some((name, at)) = tensors.iter().find(|(name, _)| !is_beside_the_text_model(name)) {
            return Err(Error::input(format!("{}: unknown tensor {name}", self.file(at).display())).help(
                "config.json describes a model without it: the two do not belong together, or it is another architecture",
            ));
        }
        Ok(packed)
    }

    fn pack(&self, spec: WeightSpec, tensors: &mut BTreeMap<String, Located>) -> Result<PackedWeight> {
        let mut parts = Vec::with_capacity(spec.sources.len());
        for source in &spec.sources {
            let Some(found) = tensors.remove(&source.tensor) else {
                return Err(Error::input(format!("{}: tensor {} is missing", self.dir.display(), source.tensor))
                    .help("the checkpoint is incomplete, or its config.json is another model's"));
            };
            let at = || format!("{}: tensor {}", self.file(&found).display(), source.tensor);
            if found.shape != source.shape {
                return Err(Error::input(format!("{} has shape {:?}, expected {:?}", at(), found.shape, source.shape))
                    .help("config.json says what is expected: the two do not belong together"));
            }
            let dtype = match found.dtype {
                Dtype::BF16 => DType::Bf16,
                Dtype::F32 => DType::F32,
                other => {
                    return Err(Error::input(format!("{} has type {other:?}, expected BF16 or F32", at()))
                        .help("save the checkpoint in bfloat16 or float32"));
                }
            };
            parts.push(Part { shard: found.shard, start: found.start, bytes: found.bytes, dtype });
        }
        let wide = spec.weight.is_f32() || parts.iter().any(|part| part.dtype == DType::F32);
        let dtype = if wide { DType::F32 } else { DType::Bf16 };
        Ok(PackedWeight { weight: spec.weight, shape: spec.shape, dtype, parts })
    }

    fn file(&self, at: &Located) -> &Path {
        &self.shards[at.shard].file
    }
}

/// True for tensors of the parts of a published model that a text decode step does not run.
fn is_beside_the_text_model(name: &str) -> bool {
    const PARTS: [&str; 5] = ["mtp", "vision", "visual", "multi_modal_projector", "patch_merge"];
    name.split('.').any(|word| PARTS.iter().any(|part| word.starts_with(part)))
}

/// Maps every shard and lists its tensors.
fn map_shards(dir: &Path, index: &Index) -> Result<(Vec<Shard>, BTreeMap<String, Located>)> {
    let (mut shards, mut tensors) = (Vec::new(), BTreeMap::new());
    for name in index.files() {
        let file = dir.join(&name);
        let map = map(&file)?;
        let malformed = |error: &dyn std::fmt::Display| {
            Error::input(format!("{}: {error}", file.display()))
                .help("the file is truncated or no safetensors file: fetch it again")
        };
        let (header, metadata) = SafeTensors::read_metadata(&map).map_err(|error| malformed(&error))?;
        for (tensor, info) in metadata.tensors() {
            if index.file_of(&tensor).is_some_and(|expected| expected != name) {
                return Err(malformed(&format!("tensor {tensor} is here, but {} says otherwise", Index::FILE)));
            }
            let located = Located {
                shard: shards.len(),
                start: 8 + header + info.data_offsets.0,
                bytes: info.data_offsets.1 - info.data_offsets.0,
                shape: info.shape.iter().map(|&dim| dim as u64).collect(),
                dtype: info.dtype,
            };
            if tensors.insert(tensor.clone(), located).is_some() {
                return Err(malformed(&format!("tensor {tensor} is in two shards")));
            }
        }
        shards.push(Shard { file, map });
    }
    if let Some((tensor, file)) = index.weight_map.iter().find(|(tensor, _)| !tensors.contains_key(*tensor)) {
        return Err(Error::input(format!("{}: tensor {tensor} is missing", dir.join(file).display()))
            .help(format!("{} says that it is in this shard", Index::FILE)));
    }
    Ok((shards, tensors))
}

fn map(path: &Path) -> Result<Mmap> {
    let failed = |error: std::io::Error| {
        Error::input(format!("{}: {error}", path.display())).help("a shard of the checkpoint is missing or cannot be read")
    };
    let file = File::open(path).map_err(failed)?;
    // SAFETY: the map is read-only and private to this process; as with every mapped file, whoever truncates it while it is
    // in use ends the process. Its bytes are only ever copied or read as plain numbers.
    unsafe { Mmap::map(&file) }.map_err(failed)
}

/// Which file holds which tensor.
#[derive(Debug, Default, Deserialize)]
struct Index {
    #[serde(default)]
    weight_map: BTreeMap<String, String>,
}

impl Index {
    const FILE: &str = "model.safetensors.index.json";
    const SINGLE: &str = "model.safetensors";

    /// Reads the index; without one the checkpoint is a single file.
    fn read(dir: &Path) -> Result<Index> {
        let file = dir.join(Index::FILE);
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Index::default()),
            Err(error) => return Err(Error::input(format!("{}: {error}", file.display())).help("make the index readable")),
        };
        let index: Index = serde_json::from_str(&text).map_err(|error| {
            Error::input(format!("{}: {error}", file.display())).help("expected {\"weight_map\": {tensor: file}}")
        })?;
        let outside = |name: &&String| Path::new(name).components().count() != 1 || name.contains("..");
        if let Some(name) = index.weight_map.values().find(outside) {
            return Err(Error::input(format!("{}: shard {name} is not a file of this directory", file.display()))
                .help("shards lie beside their index: name them without a folder"));
        }
        if index.weight_map.is_empty() {
            return Err(Error::input(format!("{}: weight_map is empty", file.display())).help("expected one entry a tensor"));
        }
        Ok(index)
    }

    /// Every shard once.
    fn files(&self) -> Vec<String> {
        let mut files: Vec<String> = self.weight_map.values().cloned().collect();
        files.sort();
        files.dedup();
        if files.is_empty() { vec![Index::SINGLE.to_string()] } else { files }
    }

    fn file_of(&self, tensor: &str) -> Option<&str> {
        self.weight_map.get(tensor).map(String::as_str)
    }
}

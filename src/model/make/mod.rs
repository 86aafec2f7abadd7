//! Random checkpoints of the M3 architecture, as transformers saves and loads them; streamed to disk.
//!
//! Weights are drawn with deviation 1/sqrt(k), so that activations, selections and logits stay of a size where errors show.
//! The same shape and seed give the same tensors on every machine. Never more than
//! `PIECE` elements a core are in memory.

mod config;
mod files;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::bf16;

use self::files::Tensor;
use super::weights::{LayerWeight, Naming, Weight, WeightSpec, weights};
use crate::config::{ByteCount, ModelShape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::random::Random;

/// Elements that a core draws at a time.
const PIECE: usize = 256 * 1024;

/// Size a shard does not grow past, bytes, if its tensors let it: as transformers' own default.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// Names that [`named_shape`] knows.
pub const SHAPES: [&str; 3] = ["nano", "tiny", "m3-slice"];

/// A shape by name: `nano` (3 layers, blocks of 16 tokens), `tiny` (4 layers with MiniMax-M3's heads, blocks and selection)
/// or `m3-slice` (two dense layers of MiniMax-M3 and two sparse ones with all 128 experts, at full width; 33 GiB).
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
            sparse_attention: vec![false, false, true, true],
            moe: vec![false, false, true, true],
            ..ModelShape::minimax_m3()
        }),
        other => Err(Error::config(format!("shape {other} is unknown")).help(format!("use one of {}", SHAPES.join(", ")))),
    }
}

/// Bytes of a random model's weights.
pub fn model_bytes(shape: &ModelShape) -> u64 {
    bytes(&weights(shape, Naming::Resaved))
}

fn bytes(specs: &[WeightSpec]) -> u64 {
    files::shards(specs, u64::MAX).iter().flatten().map(Tensor::bytes).sum()
}

/// [`make_model_in_shards`] of [`SHARD_BYTES`].
pub fn make_model(shape: &ModelShape, seed: u64, dir: &Path, progress: impl FnMut(u64)) -> Result<u64> {
    make_model_in_shards(shape, seed, dir, SHARD_BYTES, progress)
}

/// Writes `config.json` and safetensors files of a random model into `dir`, which is made if need be; gives the bytes of
/// weights written. Several files, and their index, where one would grow past `shard_bytes`.
/// `progress` hears the bytes done after every piece.
///
/// Errors: a shape that contradicts itself, a directory that already holds a model, a disk without the room, anything else it
/// refuses.
pub fn make_model_in_shards(
    shape: &ModelShape,
    seed: u64,
    dir: &Path,
    shard_bytes: u64,
    mut progress: impl FnMut(u64),
) -> Result<u64> {
    shape.validate()?;
    let failed = |error: std::io::Error| Error::input(format!("{}: {error}", dir.display()));
    std::fs::create_dir_all(dir).map_err(failed)?;
    let specs = weights(shape, Naming::Resaved);
    let shards = files::shards(&specs, shard_bytes);
    let index = dir.join("model.safetensors.index.json");
    if [dir.join("config.json"), dir.join(files::name(0, shards.len())), index.clone()].iter().any(|file| file.exists()) {
        return Err(Error::input(format!("{}: holds a model already", dir.display())).help("name another directory"));
    }
    room_for(bytes(&specs), dir)?;
    let json = |value: &serde_json::Value| format!("{value:#}\n");
    std::fs::write(dir.join("config.json"), json(&config::config(shape))).map_err(failed)?;
    if shards.len() > 1 {
        std::fs::write(index, json(&files::index(&shards))).map_err(failed)?;
    }
    let (mut random, mut done) = (Random::new(seed), 0);
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let mut pieces = vec![Vec::with_capacity(4 * PIECE); cores];
    for (at, shard) in shards.iter().enumerate() {
        let file = File::create(dir.join(files::name(at, shards.len()))).map_err(failed)?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(&files::header(shard)).map_err(failed)?;
        for tensor in shard {
            let deviation = deviation(tensor.weight, &tensor.source.shape);
            let mut left = tensor.elements();
            while left > 0 {
                let count = left.min((pieces.len() * PIECE) as u64);
                draw_pieces(&random, count as usize, deviation, tensor.dtype(), &mut pieces);
                for piece in &pieces {
                    out.write_all(piece).map_err(failed)?;
                    done += piece.len() as u64;
                }
                (left, random) = (left - count, random.after(count));
                progress(done);
            }
        }
        out.flush().map_err(failed)?;
    }
    Ok(done)
}

/// A disk that fills up after minutes is found full before the first byte.
fn room_for(bytes: u64, dir: &Path) -> Result<()> {
    let disk = rustix::fs::statvfs(dir).map_err(|error| Error::input(format!("{}: {error}", dir.display())))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < bytes {
        return Err(Error::input(format!(
            "{}: the model takes {}, the disk has {} left",
            dir.display(),
            ByteCount(bytes),
            ByteCount(free)
        ))
        .help("name a directory on another disk"));
    }
    Ok(())
}

fn deviation(weight: Weight, shape: &[u64]) -> f32 {
    match (weight, shape) {
        (Weight::Layer(_, LayerWeight::RouterBias), _) => 0.03,
        (_, [_]) => 0.1,
        (_, [.., k]) => (*k as f32).powf(-0.5),
        (_, []) => 0.0,
    }
}

/// Draws `count` numbers of mean 0, a piece a core; pieces that are not needed end up empty. An element is a draw, so the bytes
/// do not depend on the cores.
fn draw_pieces(random: &Random, count: usize, deviation: f32, dtype: DType, pieces: &mut [Vec<u8>]) {
    let mut parts = pieces.iter_mut().enumerate().map(|(at, piece)| {
        let start = (at * PIECE).min(count);
        (random.after(start as u64), (count - start).min(PIECE), piece)
    });
    let Some((random, len, first)) = parts.next() else { return };
    if count <= PIECE {
        parts.for_each(|(_, _, piece)| piece.clear());
        return draw(random, len, deviation, dtype, first);
    }
    std::thread::scope(|scope| {
        for (random, len, piece) in parts {
            scope.spawn(move || draw(random, len, deviation, dtype, piece));
        }
        draw(random, len, deviation, dtype, first);
    });
}

/// Fills `out` with the bytes of `count` numbers of mean 0.
fn draw(mut random: Random, count: usize, deviation: f32, dtype: DType, out: &mut Vec<u8>) {
    // The sum of four 16-bit uniforms is close to normal: mean 2 * 65535, deviation 65536 / sqrt(3).
    let scale = deviation * 3f32.sqrt() / 65536.0;
    let mut one = || {
        let bits = random.next_u64();
        let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u32 & 0xffff).sum();
        (sum as f32 - 131_070.0) * scale
    };
    out.clear();
    match dtype {
        DType::F32 => (0..count).for_each(|_| out.extend(one().to_le_bytes())),
        _ => (0..count).for_each(|_| out.extend(bf16::from_f32(one()).to_le_bytes())),
    }
}

//! Limits: the host values every plan, capture and check comes from.

use serde::{Deserialize, Serialize};

use super::ModelShape;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Which capture sizes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CaptureSizes {
    /// The policy's list up to its own maximum.
    Default,
    /// The policy's list up to this maximum, rows.
    Max(u32),
    /// These, rows.
    List(Vec<u32>),
}

/// How many cache blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheBudget {
    /// This many.
    Blocks(u32),
    /// What is left of this many bytes of device memory after everything else.
    Bytes(u64),
}

/// The limits of an executor. Every field is a host value fixed before the first step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Longest sequence, tokens.
    pub max_model_len: u32,
    /// Sequences open at once.
    pub max_num_seqs: u32,
    /// Tokens of one prefill step.
    pub max_num_batched_tokens: u32,
    /// Draft tokens verified with each decode token: a decode row group has one more row than this.
    pub num_speculative_tokens: u32,
    /// Capture sizes.
    pub capture: CaptureSizes,
    /// Ranks of the indexer's context-parallel group.
    pub world: u32,
    /// This rank.
    pub rank: u32,
    /// Longest wait of a device for another rank, milliseconds; then the step is an error on every rank.
    pub peer_timeout_ms: u32,
    /// Cache blocks.
    pub cache: CacheBudget,
    /// Device memory that captured graphs will take, bytes: a budget in bytes leaves it alone. An estimate, from
    /// `capture::cost`, or what a capture on that device took.
    pub graph_bytes: u64,
    /// Element type of the KV cache: f32, bf16 or fp8_e4m3.
    pub kv_dtype: DType,
    /// Element type of the index-key cache: f32, bf16 or fp8_e4m3.
    pub index_dtype: DType,
    /// Steps in flight.
    pub ring_slots: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            max_model_len: 8192,
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            num_speculative_tokens: 0,
            capture: CaptureSizes::Default,
            world: 1,
            rank: 0,
            peer_timeout_ms: 900,
            cache: CacheBudget::Blocks(4096),
            graph_bytes: 0,
            kv_dtype: DType::Bf16,
            index_dtype: DType::F8E4M3,
            ring_slots: 4,
        }
    }
}

impl Limits {
    /// Checks every value on its own and against the others; the error names the key, its value and what would do.
    pub fn validate(&self) -> Result<()> {
        let in_range = |key: &str, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Error::config(format!("{key} = {value}: expected {low} to {high}")).help(format!("set {key} within that range")))
        };
        in_range("max_model_len", self.max_model_len, 1, 1 << 24)?;
        in_range("max_num_seqs", self.max_num_seqs, 1, 1 << 16)?;
        in_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)?;
        in_range("num_speculative_tokens", self.num_speculative_tokens, 0, 15)?;
        in_range("world", self.world, 1, 8)?;
        in_range("peer_timeout_ms", self.peer_timeout_ms, 1, 600_000)?;
        in_range("ring_slots", self.ring_slots, 1, 64)?;
        if self.rank >= self.world {
            return Err(
                Error::config(format!("rank = {}: expected below world = {}", self.rank, self.world)).help("ranks count from 0")
            );
        }
        for (key, dtype) in [("kv_dtype", self.kv_dtype), ("index_dtype", self.index_dtype)] {
            if !matches!(dtype, DType::F32 | DType::Bf16 | DType::F8E4M3) {
                return Err(Error::config(format!("{key} = {dtype}: no cache holds that type")).help("use f32, bf16 or fp8_e4m3"));
            }
        }
        let decode_rows = self.max_num_seqs * (1 + self.num_speculative_tokens);
        if self.max_num_batched_tokens < decode_rows {
            let (tokens, seqs) = (self.max_num_batched_tokens, self.max_num_seqs);
            return Err(Error::config(format!(
                "max_num_batched_tokens = {tokens}: expected at least {decode_rows}, the rows of a decode step of all max_num_seqs = {seqs}"
            ))
            .help(format!("raise max_num_batched_tokens to {decode_rows}, or lower max_num_seqs to {}", (tokens / (decode_rows / seqs)).max(1))));
        }
        if let CacheBudget::Blocks(0) = self.cache {
            return Err(Error::config("cache_blocks = 0: no sequence could hold a token").help("set at least one block"));
        }
        if let CacheBudget::Bytes(0) = self.cache {
            return Err(Error::config("memory = 0: expected bytes of device memory").help("set memory, or cache_blocks instead"));
        }
        if let CaptureSizes::Max(0) = self.capture {
            return Err(
                Error::config("capture_sizes = max=0: no size would be captured").help("set at least 1 + num_speculative_tokens")
            );
        }
        Ok(())
    }

    /// Checks the limits against a model: its longest position, heads that must divide over the ranks, and page ids that must
    /// fit 32 bits. [`ModelShape::validate`] has passed.
    pub fn validate_for(&self, shape: &ModelShape) -> Result<()> {
        let world = self.world;
        if self.max_model_len > shape.max_position_embeddings {
            let (len, most) = (self.max_model_len, shape.max_position_embeddings);
            return Err(Error::config(format!(
                "max_model_len = {len}: the model has {most} positions (max_position_embeddings)"
            ))
            .help(format!("lower max_model_len to {most}")));
        }
        if !shape.q_heads.is_multiple_of(world) {
            return Err(Error::config(format!(
                "world = {world}: {} query heads do not divide over that many ranks",
                shape.q_heads
            ))
            .help("use a world size that divides the heads"));
        }
        for (heads, kind) in [(shape.kv_heads, "KV"), (shape.index_heads, "index")] {
            let replicated = heads > 0 && world.is_multiple_of(heads);
            if heads > 0 && !heads.is_multiple_of(world) && !replicated {
                return Err(Error::config(format!(
                    "world = {world}: {heads} {kind} heads neither divide over nor repeat evenly on the ranks"
                ))
                .help("use a world size that divides the heads or is a multiple of them"));
            }
        }
        let (kv_heads, index_heads) = ((shape.kv_heads / world).max(1), (shape.index_heads / world).max(1));
        if !kv_heads.is_multiple_of(index_heads) {
            return Err(Error::config(format!("world = {world}: a rank has {kv_heads} KV heads but {index_heads} index heads"))
                .help("use a world size at which each index head serves whole KV heads"));
        }
        if let CacheBudget::Blocks(blocks) = self.cache {
            // Each block owns 2 * block_size / 16 page ids a KV head, and ids are i32.
            let ids = u64::from(shape.block_size / 8) * u64::from(kv_heads);
            let most = (i32::MAX as u64 / ids.max(1)).min(u64::from(u32::MAX));
            if u64::from(blocks) > most {
                return Err(Error::config(format!("cache_blocks = {blocks}: page ids past {most} blocks do not fit 32 bits"))
                    .help(format!("lower cache_blocks to {most}")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_values_name_their_key() {
        let bad = [
            ("max_model_len", Limits { max_model_len: 0, ..Limits::default() }),
            ("max_num_seqs", Limits { max_num_seqs: 0, ..Limits::default() }),
            ("max_num_batched_tokens", Limits { max_num_batched_tokens: u32::MAX, ..Limits::default() }),
            ("num_speculative_tokens", Limits { num_speculative_tokens: 16, ..Limits::default() }),
            ("world", Limits { world: 9, ..Limits::default() }),
            ("rank", Limits { rank: 1, ..Limits::default() }),
            ("peer_timeout_ms", Limits { peer_timeout_ms: 0, ..Limits::default() }),
            ("kv_dtype", Limits { kv_dtype: DType::I32, ..Limits::default() }),
            ("cache_blocks", Limits { cache: CacheBudget::Blocks(0), ..Limits::default() }),
            ("memory", Limits { cache: CacheBudget::Bytes(0), ..Limits::default() }),
            ("capture_sizes", Limits { capture: CaptureSizes::Max(0), ..Limits::default() }),
            ("ring_slots", Limits { ring_slots: 0, ..Limits::default() }),
            ("max_num_batched_tokens", Limits { max_num_batched_tokens: 255, ..Limits::default() }),
            ("max_num_batched_tokens", Limits { num_speculative_tokens: 3, max_num_batched_tokens: 1023, ..Limits::default() }),
        ];
        for (key, limits) in bad {
            let error = limits.validate().unwrap_err();
            assert!(error.to_string().contains(key) && error.help_line().is_some(), "{error}");
        }
        Limits::default().validate().unwrap();
    }

    #[test]
    fn limits_that_do_not_suit_the_model_name_their_key() {
        let m3 = ModelShape::minimax_m3();
        let bad = [
            ("max_model_len", Limits { max_model_len: (1 << 20) + 1, ..Limits::default() }, m3.clone()),
            ("world = 3", Limits { world: 3, ..Limits::default() }, m3.clone()),
            (
                "KV heads",
                Limits { world: 4, ..Limits::default() },
                ModelShape { kv_heads: 6, index_heads: 6, q_heads: 96, ..m3.clone() },
            ),
            ("index heads", Limits { world: 2, ..Limits::default() }, ModelShape { kv_heads: 2, index_heads: 4, ..m3.clone() }),
            ("cache_blocks", Limits { cache: CacheBudget::Blocks(u32::MAX), ..Limits::default() }, m3.clone()),
        ];
        for (key, limits, shape) in bad {
            let error = limits.validate_for(&shape).unwrap_err();
            assert!(error.to_string().contains(key) && error.help_line().is_some(), "{error}");
        }
        for world in [1, 2, 4, 8] {
            Limits { world, max_model_len: 1 << 20, ..Limits::default() }.validate_for(&m3).unwrap();
        }
    }
}

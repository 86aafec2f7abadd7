//! Limits: the host values every plan, capture and check comes from.

use std::path::Path;

use serde::{Deserialize, Serialize};

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
    /// Cache blocks.
    pub cache: CacheBudget,
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
            cache: CacheBudget::Blocks(4096),
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
        if let CacheBudget::Blocks(0) = self.cache {
            return Err(Error::config("cache_blocks = 0: no sequence could hold a token").help("set at least one block"));
        }
        if let CaptureSizes::Max(0) = self.capture {
            return Err(Error::config("capture = 0: no size would be captured").help("set at least 1 + num_speculative_tokens"));
        }
        Ok(())
    }

    /// Reads limits from a TOML file; keys that are missing keep their defaults.
    pub fn from_toml(path: &Path) -> Result<Limits> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::input(format!("{}: {error}", path.display())))?;
        toml::from_str(&text).map_err(|error| {
            Error::config(format!("{}: {}", path.display(), error.message()))
                .help("the keys are the fields of Limits, see `capstan plan --help`")
        })
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
            ("kv_dtype", Limits { kv_dtype: DType::I32, ..Limits::default() }),
            ("cache_blocks", Limits { cache: CacheBudget::Blocks(0), ..Limits::default() }),
            ("ring_slots", Limits { ring_slots: 0, ..Limits::default() }),
        ];
        for (key, limits) in bad {
            let error = limits.validate().unwrap_err();
            assert!(error.to_string().contains(key) && error.help_line().is_some(), "{error}");
        }
        Limits::default().validate().unwrap();
    }
}

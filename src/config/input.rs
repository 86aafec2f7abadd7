//! Limits as a user gives them: flags of the command line and keys of a TOML file, by the same names.
//!
//! Everything is optional here; [`LimitsInput::resolve`] fills the gaps from the model and checks the whole. Errors name the
//! key, its value and what was expected; an unknown key is an error that names the nearest known one.

use std::path::Path;
use std::str::FromStr;

use serde::Serialize;
use toml::{Table, Value};

use super::{CacheBudget, CaptureSizes, Limits, ModelShape};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Longest sequence assumed where neither the user nor the model says less, tokens.
const MAX_MODEL_LEN_DEFAULT: u32 = 8192;

/// Limits that were given; `None` where they were not.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct LimitsInput {
    /// Longest sequence [default: 8192, or what the model allows]
    #[cfg_attr(feature = "cli", arg(long, value_name = "TOKENS"))]
    pub max_model_len: Option<u32>,
    /// Sequences open at once [default: 256]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    pub max_num_seqs: Option<u32>,
    /// Tokens of one prefill step [default: 8192, and at least one decode step of every sequence]
    #[cfg_attr(feature = "cli", arg(long, value_name = "TOKENS"))]
    pub max_num_batched_tokens: Option<u32>,
    /// Draft tokens verified with each decode token [default: 0]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    pub num_speculative_tokens: Option<u32>,
    /// Row counts to capture: a list such as 1,2,4,8; max=N for the default list up to N; default
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZES", value_parser = CaptureSizes::from_str))]
    pub capture_sizes: Option<CaptureSizes>,
    /// Ranks that share the model [default: 1]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    pub world: Option<u32>,
    /// This rank, from 0 [default: 0]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    pub rank: Option<u32>,
    /// Longest wait for another rank, milliseconds [default: 900]
    #[cfg_attr(feature = "cli", arg(long, value_name = "MS"))]
    pub peer_timeout_ms: Option<u32>,
    /// Cache blocks [default: one longest sequence and two blocks for each other]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    pub cache_blocks: Option<u32>,
    /// Device memory for everything, such as 200GiB; without --cache-blocks what is left becomes cache blocks
    #[cfg_attr(feature = "cli", arg(long, value_name = "BYTES", value_parser = ByteCount::from_str))]
    pub memory: Option<ByteCount>,
    /// Part of --memory kept for captured graphs [default: an estimate for the device]
    #[cfg_attr(feature = "cli", arg(long, value_name = "BYTES", value_parser = ByteCount::from_str))]
    pub graph_memory: Option<ByteCount>,
    /// Element type of the KV cache: f32, bf16 or fp8_e4m3 [default: bf16]
    #[cfg_attr(feature = "cli", arg(long, value_name = "TYPE", value_parser = cache_dtype))]
    pub kv_dtype: Option<DType>,
    /// Element type of the index-key cache: f32, bf16 or fp8_e4m3 [default: fp8_e4m3]
    #[cfg_attr(feature = "cli", arg(long, value_name = "TYPE", value_parser = cache_dtype))]
    pub index_dtype: Option<DType>,
    /// Steps that may be in flight [default: 4]
    #[cfg_attr(feature = "cli", arg(long, value_name = "N"))]
    pub ring_slots: Option<u32>,
}

/// Every key of a TOML file; each is a flag too, with dashes.
pub const KEYS: [&str; 14] = [
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_speculative_tokens",
    "capture_sizes",
    "world",
    "rank",
    "peer_timeout_ms",
    "cache_blocks",
    "memory",
    "graph_memory",
    "kv_dtype",
    "index_dtype",
    "ring_slots",
];

impl LimitsInput {
    /// Reads a TOML file of the keys in [`KEYS`].
    ///
    /// Errors: the file is not there or no TOML; a key is unknown or its value of the wrong type.
    pub fn read(file: &Path) -> Result<LimitsInput> {
        let text = std::fs::read_to_string(file).map_err(|error| {
            Error::input(format!("{}: {error}", file.display())).help("pass a TOML file such as `max_model_len = 8192`")
        })?;
        LimitsInput::from_toml(&text).map_err(|error| {
            let located = Error::new(error.kind(), format!("{}: {}", file.display(), error.message()));
            located.help(error.help_line().unwrap_or("see `capstan plan --help` for the keys").to_string())
        })
    }

    /// Reads TOML text.
    pub fn from_toml(text: &str) -> Result<LimitsInput> {
        let table: Table = toml::from_str(text)
            .map_err(|error| Error::config(format!("not TOML: {}", error.message())).help("write one `key = value` a line"))?;
        if let Some(key) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(Error::config(format!("{key}: there is no such key")).help(nearest(key)));
        }
        Ok(LimitsInput {
            max_model_len: whole(&table, "max_model_len")?,
            max_num_seqs: whole(&table, "max_num_seqs")?,
            max_num_batched_tokens: whole(&table, "max_num_batched_tokens")?,
            num_speculative_tokens: whole(&table, "num_speculative_tokens")?,
            capture_sizes: table.get("capture_sizes").map(capture_sizes).transpose()?,
            world: whole(&table, "world")?,
            rank: whole(&table, "rank")?,
            peer_timeout_ms: whole(&table, "peer_timeout_ms")?,
            cache_blocks: whole(&table, "cache_blocks")?,
            memory: bytes(&table, "memory")?,
            graph_memory: bytes(&table, "graph_memory")?,
            kv_dtype: dtype(&table, "kv_dtype")?,
            index_dtype: dtype(&table, "index_dtype")?,
            ring_slots: whole(&table, "ring_slots")?,
        })
    }

    /// These, and where one is not given the other's: flags before a file.
    pub fn or(self, other: LimitsInput) -> LimitsInput {
        LimitsInput {
            max_model_len: self.max_model_len.or(other.max_model_len),
            max_num_seqs: self.max_num_seqs.or(other.max_num_seqs),
            max_num_batched_tokens: self.max_num_batched_tokens.or(other.max_num_batched_tokens),
            num_speculative_tokens: self.num_speculative_tokens.or(other.num_speculative_tokens),
            capture_sizes: self.capture_sizes.or(other.capture_sizes),
            world: self.world.or(other.world),
            rank: self.rank.or(other.rank),
            peer_timeout_ms: self.peer_timeout_ms.or(other.peer_timeout_ms),
            cache_blocks: self.cache_blocks.or(other.cache_blocks),
            memory: self.memory.or(other.memory),
            graph_memory: self.graph_memory.or(other.graph_memory),
            kv_dtype: self.kv_dtype.or(other.kv_dtype),
            index_dtype: self.index_dtype.or(other.index_dtype),
            ring_slots: self.ring_slots.or(other.ring_slots),
        }
    }

    /// Fills what was not given, from the model and the other limits, and checks the whole.
    ///
    /// With both `cache_blocks` and `memory` the blocks are taken as given; whoever plans holds the plan against the memory.
    pub fn resolve(&self, shape: &ModelShape) -> Result<Limits> {
        let default = Limits::default();
        let max_model_len = self.max_model_len.unwrap_or(MAX_MODEL_LEN_DEFAULT.min(shape.max_position_embeddings));
        let max_num_seqs = self.max_num_seqs.unwrap_or(default.max_num_seqs);
        let num_speculative_tokens = self.num_speculative_tokens.unwrap_or(0);
        let decode_rows = max_num_seqs.saturating_mul(num_speculative_tokens.saturating_add(1));
        let limits = Limits {
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens.unwrap_or(default.max_num_batched_tokens.max(decode_rows)),
            num_speculative_tokens,
            capture: self.capture_sizes.clone().unwrap_or(CaptureSizes::Default),
            world: self.world.unwrap_or(1),
            rank: self.rank.unwrap_or(0),
            peer_timeout_ms: self.peer_timeout_ms.unwrap_or(default.peer_timeout_ms),
            cache: match (self.cache_blocks, self.memory) {
                (Some(blocks), _) => CacheBudget::Blocks(blocks),
                (None, Some(memory)) => CacheBudget::Bytes(memory.0),
                (None, None) => CacheBudget::Blocks(default_blocks(max_model_len, max_num_seqs, shape.block_size)),
            },
            graph_bytes: self.graph_memory.map_or(0, |bytes| bytes.0),
            kv_dtype: self.kv_dtype.unwrap_or(default.kv_dtype),
            index_dtype: self.index_dtype.unwrap_or(default.index_dtype),
            ring_slots: self.ring_slots.unwrap_or(default.ring_slots),
        };
        limits.validate()?;
        limits.validate_for(shape)?;
        Ok(limits)
    }
}

/// Blocks of one longest sequence and two for each other, at most those of all longest sequences.
fn default_blocks(max_model_len: u32, max_num_seqs: u32, block_size: u32) -> u32 {
    let longest = max_model_len.div_ceil(block_size.max(1));
    let others = max_num_seqs.saturating_sub(1).saturating_mul(2);
    longest.saturating_add(others).min(longest.saturating_mul(max_num_seqs)).max(1)
}

fn nearest(key: &str) -> String {
    let plain = key.replace('-', "_");
    let best = KEYS.iter().max_by(|a, b| strsim::jaro_winkler(a, &plain).total_cmp(&strsim::jaro_winkler(b, &plain)));
    let best = best.expect("invariant: there are keys");
    format!("did you mean {best}? The keys are {}", KEYS.join(", "))
}

fn wrong(key: &str, found: &Value, expected: &str) -> Error {
    Error::config(format!("{key} = {found}: expected {expected}")).help(format!("change {key}"))
}

fn whole(table: &Table, key: &str) -> Result<Option<u32>> {
    let Some(value) = table.get(key) else { return Ok(None) };
    let number = value.as_integer().and_then(|number| u32::try_from(number).ok());
    number.map(Some).ok_or_else(|| wrong(key, value, "a whole number from 0 to 4294967295"))
}

fn dtype(table: &Table, key: &str) -> Result<Option<DType>> {
    let Some(value) = table.get(key) else { return Ok(None) };
    let text = value.as_str().ok_or_else(|| wrong(key, value, "\"f32\", \"bf16\" or \"fp8_e4m3\""))?;
    cache_dtype(text).map(Some).map_err(|expected| wrong(key, value, &expected))
}

fn bytes(table: &Table, key: &str) -> Result<Option<ByteCount>> {
    let Some(value) = table.get(key) else { return Ok(None) };
    let bytes = value.as_integer().and_then(|bytes| u64::try_from(bytes).ok()).map(ByteCount);
    let parsed = bytes.or_else(|| value.as_str().and_then(|text| text.parse().ok()));
    parsed.map(Some).ok_or_else(|| wrong(key, value, "bytes, or a text such as \"200GiB\""))
}

fn capture_sizes(value: &Value) -> Result<CaptureSizes> {
    let expected = || wrong("capture_sizes", value, "a list such as [1, 2, 4], \"max=N\" or \"default\"");
    match value {
        Value::String(text) => text.parse().map_err(|_| expected()),
        Value::Array(sizes) => {
            let size = |size: &Value| size.as_integer().and_then(|size| u32::try_from(size).ok()).ok_or_else(expected);
            sizes.iter().map(size).collect::<Result<_>>().map(CaptureSizes::List)
        }
        _ => Err(expected()),
    }
}

/// The element types a cache may have, by name; `fp8` is short for `fp8_e4m3`.
fn cache_dtype(text: &str) -> Result<DType, String> {
    match text {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::Bf16),
        "fp8" | "fp8_e4m3" => Ok(DType::F8E4M3),
        _ => Err("f32, bf16 or fp8_e4m3".into()),
    }
}

impl FromStr for CaptureSizes {
    type Err = String;

    /// `default`, `max=N`, or sizes with commas between.
    fn from_str(text: &str) -> Result<CaptureSizes, String> {
        let expected = || format!("{text}: expected sizes such as 1,2,4, max=N or default");
        if text == "default" {
            return Ok(CaptureSizes::Default);
        }
        if let Some(max) = text.strip_prefix("max=") {
            return max.parse().map(CaptureSizes::Max).map_err(|_| expected());
        }
        let sizes: Result<Vec<u32>, _> = text.split(',').map(|size| size.trim().parse()).collect();
        sizes.map(CaptureSizes::List).map_err(|_| expected())
    }
}

/// A number of bytes; reads and shows binary units (`1.5GiB`, `200G`, `4096`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ByteCount(pub u64);

const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

impl FromStr for ByteCount {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteCount, String> {
        let expected = || format!("{text}: expected bytes such as 4096, 1.5GiB or 200G");
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = (text[..split].trim(), text[split..].trim().to_ascii_lowercase());
        let power = UNITS.iter().position(|name| {
            let name = name.to_ascii_lowercase();
            // `k`, `kb` and `kib` are all 1024: memory is never sold in thousands.
            unit == name || (name.len() == 3 && (unit == name[..1] || unit == format!("{}b", &name[..1])))
        });
        let power = if unit.is_empty() { 0 } else { power.ok_or_else(expected)? };
        let scale = 1u64 << (10 * power);
        let bytes = match number.parse::<u64>() {
            Ok(whole) => whole.checked_mul(scale),
            Err(_) => {
                number.parse::<f64>().ok().map(|part| part * scale as f64).filter(|&bytes| bytes < 1e18).map(|bytes| bytes as u64)
            }
        };
        bytes.map(ByteCount).ok_or_else(expected)
    }
}

impl std::fmt::Display for ByteCount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let power = (self.0.max(1).ilog2() / 10).min(5);
        let text = match power {
            0 => format!("{} B", self.0),
            _ => format!("{:.1} {}", self.0 as f64 / (1u64 << (10 * power)) as f64, UNITS[power as usize]),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_fills_what_flags_leave_open() {
        let file = LimitsInput::from_toml(
            "max_model_len = 512\nmax_num_seqs = 8\ncapture_sizes = [1, 2]\nmemory = \"1.5GiB\"\nkv_dtype = \"fp8\"\nrank = 0",
        )
        .unwrap();
        let flags =
            LimitsInput { max_num_seqs: Some(16), capture_sizes: Some("max=12".parse().unwrap()), ..LimitsInput::default() };
        let limits = flags.or(file).resolve(&ModelShape::nano()).unwrap();
        assert_eq!((limits.max_model_len, limits.max_num_seqs), (512, 16));
        assert_eq!((limits.capture, limits.kv_dtype), (CaptureSizes::Max(12), DType::F8E4M3));
        assert_eq!(limits.cache, CacheBudget::Bytes(3 << 29));
    }

    #[test]
    fn gaps_follow_the_model_and_the_other_limits() {
        let limits = LimitsInput::default().resolve(&ModelShape::nano()).unwrap();
        assert_eq!((limits.max_model_len, limits.cache), (1024, CacheBudget::Blocks(64 + 2 * 255)));
        let many = LimitsInput { max_num_seqs: Some(4096), num_speculative_tokens: Some(3), ..LimitsInput::default() };
        assert_eq!(many.resolve(&ModelShape::nano()).unwrap().max_num_batched_tokens, 4 * 4096);
        let one = LimitsInput { max_num_seqs: Some(1), ..LimitsInput::default() };
        assert_eq!(one.resolve(&ModelShape::nano()).unwrap().cache, CacheBudget::Blocks(64));
    }

    #[test]
    fn bad_files_name_the_key_and_what_was_expected() {
        let cases = [
            ("max_model_length = 1", "max_model_length", "did you mean max_model_len?"),
            ("max-num-seq = 1", "max-num-seq", "did you mean max_num_seqs?"),
            ("max_num_seqs = \"many\"", "max_num_seqs = \"many\"", "change max_num_seqs"),
            ("max_num_seqs = -1", "whole number", "max_num_seqs"),
            ("max_model_len = 4294967296", "max_model_len = 4294967296", "max_model_len"),
            ("ring_slots = 1.5", "ring_slots = 1.5", "ring_slots"),
            ("kv_dtype = \"int4\"", "f32, bf16 or fp8_e4m3", "kv_dtype"),
            ("index_dtype = 8", "index_dtype = 8", "index_dtype"),
            ("memory = \"lots\"", "memory", "memory"),
            ("capture_sizes = [1, \"two\"]", "capture_sizes", "capture_sizes"),
            ("capture_sizes = \"max=\"", "capture_sizes", "capture_sizes"),
            ("world 4", "not TOML", "key = value"),
        ];
        for (text, message, help) in cases {
            let error = LimitsInput::from_toml(text).unwrap_err();
            assert!(error.message().contains(message), "{text}: {error}");
            assert!(error.help_line().unwrap().contains(help), "{text}: {error}");
            assert_eq!(error.kind(), crate::error::ErrorKind::Config);
        }
    }

    #[test]
    fn byte_counts_read_and_show_units() {
        for (text, bytes) in
            [("4096", 4096), ("1k", 1024), ("200G", 200 << 30), ("1.5GiB", 3 << 29), ("2 mb", 2 << 20), ("7B", 7)]
        {
            assert_eq!(text.parse(), Ok(ByteCount(bytes)), "{text}");
        }
        for text in ["", "G", "1.2.3", "-1", "5 parsecs", "99999999999999999999", "999999PiB"] {
            assert!(text.parse::<ByteCount>().is_err(), "{text}");
        }
        assert_eq!(ByteCount(1536).to_string(), "1.5 KiB");
        assert_eq!(ByteCount(12).to_string(), "12 B");
    }
}

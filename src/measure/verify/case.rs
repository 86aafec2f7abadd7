//! A recorded case of the sparse-attention chain: what went in and what a public implementation computed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::{Dtype, SafeTensors};

use crate::dtype::DType;
use crate::error::{Error, Result};

/// Which pass the rows belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Uniform decode rows, `query_len` a sequence.
    Decode {
        /// Rows a sequence.
        query_len: u32,
    },
    /// Ragged prefill rows: prefix sums of the rows of each sequence, [sequences + 1].
    Prefill {
        /// First row of each sequence, and the number of rows.
        starts: Vec<u32>,
    },
}

/// The attend's part of a case.
#[derive(Clone, Debug)]
pub struct Attend {
    /// [rows, kv_heads * group, head_dim].
    pub query: Vec<f32>,
    /// [rows, kv_heads * group, head_dim], what was recorded.
    pub output: Vec<f32>,
    /// Recorded [cache_blocks, kv_heads, block_size, K and V of head_dim], bf16 bits.
    pub kv_cache: Vec<u16>,
    /// Blocks of the KV cache.
    pub cache_blocks: u32,
    /// Channels of a head.
    pub head_dim: u32,
}

/// Tensors of a file, checked against each other.
#[derive(Clone, Debug)]
pub struct Case {
    /// The file.
    pub file: PathBuf,
    /// Decode or prefill.
    pub rows: Rows,
    /// Index heads, and KV heads.
    pub heads: u32,
    /// Query heads a KV head.
    pub group: u32,
    /// Blocks selected.
    pub topk: u32,
    /// Blocks forced at the start.
    pub init_blocks: u32,
    /// Blocks forced at the end.
    pub local_blocks: u32,
    /// Longest sequence the case was recorded for.
    pub max_seq_len: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Channels of an index head.
    pub index_dim: u32,
    /// Element type of index queries and keys.
    pub index_dtype: DType,
    /// [rows, heads, index_dim].
    pub index_query: Vec<u8>,
    /// [index_blocks, block_size, index_dim].
    pub index_cache: Vec<u8>,
    /// Blocks of the index cache.
    pub index_blocks: u32,
    /// \[sequences\] KV lengths.
    pub seq_lens: Vec<i32>,
    /// [sequences, table_width] of the index cache.
    pub block_table: Vec<i32>,
    /// [sequences, table_width] of the KV cache; that of the index cache where none was recorded.
    pub attend_block_table: Vec<i32>,
    /// Columns of the tables.
    pub table_width: u32,
    /// Recorded [heads, rows, width] and the width.
    pub score: Option<(Vec<f32>, u32)>,
    /// Recorded [heads, rows, topk].
    pub topk_idx: Vec<i32>,
    /// Recorded [rows * heads, pages] and the pages.
    pub page_table: Option<(Vec<i32>, u32)>,
    /// Recorded [rows * heads].
    pub page_len: Option<Vec<i32>>,
    /// Recorded attention.
    pub attend: Option<Attend>,
}

impl Case {
    /// Reads a file.
    ///
    /// Errors name the file and the tensor or key: not there, truncated, foreign, missing, of another type or shape.
    pub fn read(path: &Path) -> Result<Case> {
        let reader = |error: &dyn std::fmt::Display| {
            Error::input(format!("{}: {error}", path.display())).help("pass a .safetensors file of a recorded indexer case")
        };
        let bytes = std::fs::read(path).map_err(|error| reader(&error))?;
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| reader(&error))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| reader(&error))?;
        let keys = metadata.metadata().clone().unwrap_or_default();
        Source { path, keys, tensors }.case()
    }

    /// Sequences.
    pub fn sequences(&self) -> u32 {
        self.seq_lens.len() as u32
    }

    /// Rows.
    pub fn row_count(&self) -> u32 {
        match &self.rows {
            Rows::Decode { query_len } => self.sequences() * query_len,
            Rows::Prefill { starts } => starts.last().copied().unwrap_or(0),
        }
    }

    /// Per row: its sequence, and the tokens it may see (0 for none).
    pub fn causal(&self) -> Vec<(u32, i32)> {
        let mut rows = Vec::with_capacity(self.row_count() as usize);
        for (sequence, &len) in self.seq_lens.iter().enumerate() {
            let count = match &self.rows {
                Rows::Decode { query_len } => *query_len,
                Rows::Prefill { starts } => starts[sequence + 1] - starts[sequence],
            };
            rows.extend((0..count as i32).map(|at| (sequence as u32, (len - count as i32 + at + 1).max(0))));
        }
        rows
    }
}

/// An open file.
struct Source<'a> {
    path: &'a Path,
    keys: HashMap<String, String>,
    tensors: SafeTensors<'a>,
}

impl Source<'_> {
    fn case(&self) -> Result<Case> {
        let (heads, topk) = (self.number("heads")?, self.number("topk")?);
        let (index_query, query_shape, index_dtype) = self.index("index_query", 3)?;
        let (index_cache, cache_shape, cache_dtype) = self.index("index_cache", 3)?;
        if cache_dtype != index_dtype || cache_shape[2] != query_shape[2] || query_shape[1] != heads {
            return Err(self.wrong(
                "index_query",
                format!("{index_dtype} {query_shape:?} beside an index_cache {cache_dtype} {cache_shape:?} of {heads} heads"),
            ));
        }
        let [index_blocks, block_size, index_dim] = [cache_shape[0], cache_shape[1], cache_shape[2]];
        let (seq_lens, shape) = self.ints("seq_lens", 1)?;
        let sequences = shape[0];
        let rows = match self.key("kind")? {
            "decode" => Rows::Decode { query_len: self.number("query_len")? },
            "prefill" => Rows::Prefill { starts: self.starts(sequences)? },
            other => return Err(self.bad(format!("kind {other:?}: expected decode or prefill"))),
        };
        let (block_table, shape) = self.ints("block_table", 2)?;
        let table_width = shape[1];
        self.expect("block_table", &shape, &[sequences, table_width])?;
        let attend_block_table = match self.has("attend_block_table") {
            true => {
                let (table, shape) = self.ints("attend_block_table", 2)?;
                self.expect("attend_block_table", &shape, &[sequences, table_width])?;
                table
            }
            false => block_table.clone(),
        };
        let (topk_idx, shape) = self.ints("topk_idx", 3)?;
        let mut case = Case {
            file: self.path.to_path_buf(),
            rows,
            heads,
            group: self.number("gqa_group").unwrap_or(1),
            topk,
            init_blocks: self.number("init_blocks")?,
            local_blocks: self.number("local_blocks")?,
            max_seq_len: self.number("max_seq_len")?,
            block_size,
            index_dim,
            index_dtype,
            index_query,
            index_cache,
            index_blocks,
            seq_lens,
            block_table,
            attend_block_table,
            table_width,
            score: None,
            topk_idx,
            page_table: None,
            page_len: None,
            attend: None,
        };
        let row_count = case.row_count();
        self.expect("index_query", &query_shape, &[row_count, heads, index_dim])?;
        self.expect("topk_idx", &shape, &[heads, row_count, topk])?;
        self.outputs(&mut case)?;
        self.bounds(&case)?;
        Ok(case)
    }

    /// What not every file has.
    fn outputs(&self, case: &mut Case) -> Result<()> {
        let (rows, heads) = (case.row_count(), case.heads);
        if self.has("score") {
            let (bytes, shape) = self.tensor("score", 3, &[Dtype::F32])?;
            self.expect("score", &shape, &[heads, rows, shape[2]])?;
            case.score = Some((bytemuck::pod_collect_to_vec(bytes), shape[2]));
        }
        if self.has("sparse_block_table") {
            let (table, shape) = self.ints("sparse_block_table", 2)?;
            self.expect("sparse_block_table", &shape, &[rows * heads, shape[1]])?;
            case.page_table = Some((table, shape[1]));
        }
        if self.has("sparse_context_lens") {
            let (lens, shape) = self.ints("sparse_context_lens", 1)?;
            self.expect("sparse_context_lens", &shape, &[rows * heads])?;
            case.page_len = Some(lens);
        }
        if self.has("attend_output") {
            let (kv_cache, shape) = self.halves("kv_cache", 4)?;
            let (cache_blocks, head_dim) = (shape[0], shape[3] / 2);
            self.expect("kv_cache", &shape, &[cache_blocks, heads, case.block_size, 2 * head_dim])?;
            let widen = |name| -> Result<Vec<f32>> {
                let (bits, shape) = self.halves(name, 3)?;
                self.expect(name, &shape, &[rows, heads * case.group, head_dim])?;
                Ok(bits.into_iter().map(|bits| bf16::from_bits(bits).to_f32()).collect())
            };
            let (query, output) = (widen("attend_query")?, widen("attend_output")?);
            case.attend = Some(Attend { query, output, kv_cache, cache_blocks, head_dim });
        }
        Ok(())
    }

    /// Lengths must fit the tables and their blocks the caches: the chain would refuse nothing, and read nothing either.
    fn bounds(&self, case: &Case) -> Result<()> {
        let tables = [
            ("block_table", &case.block_table, case.index_blocks),
            ("attend_block_table", &case.attend_block_table, case.attend.as_ref().map_or(u32::MAX, |attend| attend.cache_blocks)),
        ];
        for (sequence, &len) in case.seq_lens.iter().enumerate() {
            if len < 0 || len as u32 > case.max_seq_len || len as u32 > case.table_width * case.block_size {
                return Err(
                    self.wrong("seq_lens", format!("sequence {sequence} has {len} tokens, max_seq_len is {}", case.max_seq_len))
                );
            }
            let blocks = (len as u32).div_ceil(case.block_size) as usize;
            for (name, table, cache_blocks) in tables {
                let row = &table[sequence * case.table_width as usize..][..blocks];
                if let Some(at) = row.iter().position(|&block| block < 0 || block as u32 >= cache_blocks) {
                    return Err(
                        self.wrong(name, format!("[{sequence}, {at}] is block {}, the cache has {cache_blocks}", row[at]))
                    );
                }
            }
        }
        Ok(())
    }

    fn starts(&self, sequences: u32) -> Result<Vec<u32>> {
        let (starts, shape) = self.ints("cu_seqlens_q", 1)?;
        self.expect("cu_seqlens_q", &shape, &[sequences + 1])?;
        if starts[0] != 0 || starts.windows(2).any(|pair| pair[1] < pair[0]) {
            return Err(self.wrong("cu_seqlens_q", format!("{starts:?} are no prefix sums")));
        }
        Ok(starts.into_iter().map(|start| start as u32).collect())
    }

    fn index(&self, name: &str, rank: usize) -> Result<(Vec<u8>, Vec<u32>, DType)> {
        let (bytes, shape) = self.tensor(name, rank, &[Dtype::U8, Dtype::F8_E4M3, Dtype::BF16, Dtype::F32])?;
        let dtype = match self.tensors.tensor(name).map(|tensor| tensor.dtype()) {
            Ok(Dtype::F32) => DType::F32,
            Ok(Dtype::BF16) => DType::Bf16,
            _ => DType::F8E4M3,
        };
        Ok((bytes.to_vec(), shape, dtype))
    }

    fn ints(&self, name: &str, rank: usize) -> Result<(Vec<i32>, Vec<u32>)> {
        let (bytes, shape) = self.tensor(name, rank, &[Dtype::I32])?;
        Ok((bytemuck::pod_collect_to_vec(bytes), shape))
    }

    fn halves(&self, name: &str, rank: usize) -> Result<(Vec<u16>, Vec<u32>)> {
        let (bytes, shape) = self.tensor(name, rank, &[Dtype::I16, Dtype::U16, Dtype::BF16])?;
        Ok((bytemuck::pod_collect_to_vec(bytes), shape))
    }

    fn tensor(&self, name: &str, rank: usize, dtypes: &[Dtype]) -> Result<(&[u8], Vec<u32>)> {
        let tensor = self.tensors.tensor(name).map_err(|_| self.bad(format!("there is no tensor {name}")))?;
        let shape: Option<Vec<u32>> = tensor.shape().iter().map(|&dim| u32::try_from(dim).ok()).collect();
        let Some(shape) = shape.filter(|shape| shape.len() == rank && shape.iter().all(|&dim| dim > 0)) else {
            return Err(self.wrong(name, format!("has shape {:?}, expected {rank} dimensions above zero", tensor.shape())));
        };
        if !dtypes.contains(&tensor.dtype()) {
            return Err(self.wrong(name, format!("holds {:?}, expected one of {dtypes:?}", tensor.dtype())));
        }
        Ok((tensor.data(), shape))
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_ok()
    }

    fn key(&self, key: &str) -> Result<&str> {
        self.keys.get(key).map(String::as_str).ok_or_else(|| self.bad(format!("its metadata has no key {key}")))
    }

    fn number(&self, key: &str) -> Result<u32> {
        let text = self.key(key)?;
        text.parse().map_err(|_| self.bad(format!("metadata {key} = {text:?} is no whole number")))
    }

    fn expect(&self, name: &str, found: &[u32], expected: &[u32]) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        Err(self.wrong(name, format!("has shape {found:?}, expected {expected:?}")))
    }

    fn wrong(&self, name: &str, what: String) -> Error {
        self.bad(format!("tensor {name}: {what}"))
    }

    fn bad(&self, what: String) -> Error {
        Error::input(format!("{}: {what}", self.path.display())).help("pass a .safetensors file of a recorded indexer case")
    }
}

//! Gates: which implementation runs, and why not the other, as data a caller can print.
//!
//! Each gate looks at host values in the order of msa-spec section 1 and gives the first reason that refused, or all of them.
//! A refusal is never an error: the general kernel, or one rank, takes over.

use std::fmt;

use serde::Serialize;

use crate::config::{Limits, ModelShape};
use crate::dtype::DType;
use crate::planning::AttentionDims;

/// Longest context in blocks that the contract-shaped indexer takes, sharded or not.
pub const CONTRACT_BLOCKS_MAX: u32 = 8192;
/// (query token, index head) pairs one score tile carries.
pub const SCORE_PAIRS_MAX: u32 = 16;
/// Candidates one wave merges.
pub const CANDIDATES_MAX: u32 = 64;

/// Why a gate refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case", tag = "reason")]
pub enum Refusal {
    /// The index cache is not fp8.
    IndexCacheType {
        /// What it is.
        dtype: DType,
    },
    /// Selected blocks.
    Topk {
        /// What the model has.
        topk: u32,
    },
    /// Tokens of a block.
    BlockSize {
        /// What the model has.
        block_size: u32,
    },
    /// Channels of an index head.
    IndexDim {
        /// What the model has.
        index_dim: u32,
    },
    /// Blocks of `max_model_len`.
    Context {
        /// How many.
        blocks: u32,
    },
    /// (query token, index head) pairs of a sequence.
    ScorePairs {
        /// How many.
        pairs: u32,
    },
    /// There is one rank.
    OneRank,
    /// Index heads do not divide over the ranks.
    HeadsOverRanks {
        /// Index heads.
        heads: u32,
        /// Ranks.
        world: u32,
    },
    /// Candidates of all ranks for one row and head.
    Candidates {
        /// How many.
        candidates: u32,
    },
    /// Owned index heads and KV heads of a rank differ.
    HeadsNotPaired {
        /// Index heads a rank owns.
        owned: u32,
        /// KV heads a rank holds.
        kv_heads: u32,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::IndexCacheType { dtype } => write!(f, "the index cache holds {dtype}, the contract needs fp8_e4m3"),
            Refusal::Topk { topk } => write!(f, "{topk} blocks are selected, the contract selects 16"),
            Refusal::BlockSize { block_size } => write!(f, "a block has {block_size} tokens, the contract has 128"),
            Refusal::IndexDim { index_dim } => write!(f, "an index head has {index_dim} channels, the contract has 128"),
            Refusal::Context { blocks } => {
                write!(f, "max_model_len is {blocks} blocks, the contract covers {CONTRACT_BLOCKS_MAX}")
            }
            Refusal::ScorePairs { pairs } => {
                write!(f, "{pairs} (query token, index head) pairs a sequence, a score tile carries {SCORE_PAIRS_MAX}")
            }
            Refusal::OneRank => f.write_str("there is one rank"),
            Refusal::HeadsOverRanks { heads, world } => write!(f, "{heads} index heads do not divide over {world} ranks"),
            Refusal::Candidates { candidates } => {
                write!(f, "{candidates} candidates a row and head, one wave merges {CANDIDATES_MAX}")
            }
            Refusal::HeadsNotPaired { owned, kv_heads } => {
                write!(f, "a rank owns {owned} index heads and holds {kv_heads} KV heads, they must pair up")
            }
        }
    }
}

/// Which score kernel runs for decode rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Indexer {
    /// The kernel made for the M3 contract.
    Contract,
    /// The kernel for any shape, and every reason against the other.
    General(Vec<Refusal>),
}

/// Chooses the score kernel (msa-spec section 1, unsharded gate).
pub fn indexer(dims: &AttentionDims, limits: &Limits, query_len: u32) -> Indexer {
    let blocks = limits.max_model_len.div_ceil(dims.block_size);
    let pairs = dims.scored_heads * query_len;
    let checks = [
        (limits.index_dtype != DType::F8E4M3, Refusal::IndexCacheType { dtype: limits.index_dtype }),
        (dims.topk != 16, Refusal::Topk { topk: dims.topk }),
        (dims.block_size != 128, Refusal::BlockSize { block_size: dims.block_size }),
        (dims.index_dim != 128, Refusal::IndexDim { index_dim: dims.index_dim }),
        (blocks > CONTRACT_BLOCKS_MAX, Refusal::Context { blocks }),
        (pairs > SCORE_PAIRS_MAX, Refusal::ScorePairs { pairs }),
    ];
    let refusals: Vec<Refusal> = checks.into_iter().filter(|(refused, _)| *refused).map(|(_, refusal)| refusal).collect();
    if refusals.is_empty() { Indexer::Contract } else { Indexer::General(refusals) }
}

/// What the ranks of a context-parallel group hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharing {
    /// Each its share of the heads, as tensor parallelism has it.
    Heads,
    /// All of the model.
    Replicated,
}

/// Every reason against context-parallel scoring (msa-spec section 1, extra gate); empty if it can run.
pub fn context_parallel(shape: &ModelShape, limits: &Limits, sharing: Sharing) -> Vec<Refusal> {
    let Limits { world, num_speculative_tokens, .. } = *limits;
    if world == 1 {
        return vec![Refusal::OneRank];
    }
    let heads = shape.index_heads;
    let (owned, kv_heads) = ((heads / world).max(1), (shape.kv_heads / world).max(1));
    let pairs = heads * (1 + num_speculative_tokens);
    let candidates = world * shape.topk_blocks;
    let blocks = limits.max_model_len.div_ceil(shape.block_size);
    let split = sharing == Sharing::Heads;
    let checks = [
        (split && (!heads.is_multiple_of(world) || world > heads), Refusal::HeadsOverRanks { heads, world }),
        (pairs > SCORE_PAIRS_MAX, Refusal::ScorePairs { pairs }),
        (candidates > CANDIDATES_MAX, Refusal::Candidates { candidates }),
        (split && owned != kv_heads, Refusal::HeadsNotPaired { owned, kv_heads }),
        (blocks > CONTRACT_BLOCKS_MAX, Refusal::Context { blocks }),
    ];
    checks.into_iter().filter(|(refused, _)| *refused).map(|(_, refusal)| refusal).collect()
}

/// The same for a rank of several: empty as well where there is one rank, which has nothing to fall back from.
pub fn parallel_refused(shape: &ModelShape, limits: &Limits, sharing: Sharing) -> Vec<Refusal> {
    if limits.world == 1 { Vec::new() } else { context_parallel(shape, limits, sharing) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_contract_and_its_refusals() {
        let shape = ModelShape::minimax_m3();
        let limits = Limits { max_model_len: 1 << 20, ..Limits::default() };
        let dims = AttentionDims::new(&shape, &limits);
        assert_eq!(indexer(&dims, &limits, 4), Indexer::Contract);
        assert_eq!(indexer(&dims, &limits, 5), Indexer::General(vec![Refusal::ScorePairs { pairs: 20 }]));
        let long = Limits { max_model_len: (1 << 20) + 1, index_dtype: DType::Bf16, ..Limits::default() };
        let Indexer::General(refusals) = indexer(&dims, &long, 1) else { panic!("refused") };
        assert_eq!(refusals, [Refusal::IndexCacheType { dtype: DType::Bf16 }, Refusal::Context { blocks: 8193 }]);
    }

    #[test]
    fn context_parallel_runs_on_two_and_four_ranks() {
        let shape = ModelShape::minimax_m3();
        let with = |world, speculative| {
            let limits = Limits { world, num_speculative_tokens: speculative, ..Limits::default() };
            context_parallel(&shape, &limits, Sharing::Heads)
        };
        assert_eq!(with(1, 0), [Refusal::OneRank]);
        assert!(with(2, 0).is_empty() && with(4, 3).is_empty());
        assert_eq!(with(4, 4), [Refusal::ScorePairs { pairs: 20 }]);
        assert_eq!(with(8, 0), [Refusal::HeadsOverRanks { heads: 4, world: 8 }, Refusal::Candidates { candidates: 128 }]);
        let few = ModelShape { topk_blocks: 8, ..shape.clone() };
        let limits = Limits { world: 8, ..Limits::default() };
        assert!(context_parallel(&few, &limits, Sharing::Replicated).is_empty(), "whole models need no heads to share");
    }
}

//! The MiniMax-M3 sparse-attention chain on its own: a stack of sparse attention layers without the matrix products between.
//!
//! Rows come from a table by token id (`embed` gathers the packed row [q | k | v | index_q | index_k]); each layer norms,
//! rotates and caches them with its own norm weights, scores, selects and attends; the last layer's output is sampled as if it
//! were logits. So one token per row drives the whole chain, tokens can be fed back on the device, and a server's decode loop
//! can be measured on the attention alone.

use super::{Chain, GraphKey, Order, StepBuffers, StepChains, StepLayout, pointer};
use crate::arena::{Arena, ArenaPlan, BufferId, Sealed};
use crate::config::{Limits, ModelShape};
use crate::error::Result;
use crate::kernels::msa::{AttendSparseArgs, NormRopeInsertArgs, ScoreDecodeArgs, ScorePrefillArgs, TopkEmitArgs};
use crate::kernels::step::{EmbedArgs, SampleArgs};
use crate::kernels::{KernelSpec, Ptr, registry};
use crate::planning::MsaPlan;

/// Workgroups a score launch aims at over all sequences: enough to fill a large device several times.
const SCORE_WORKGROUPS: u32 = 1024;
/// Blocks a score workgroup should have at least, at the bound.
const SCORE_BLOCKS: u32 = 4;
/// Rows of a prefill score tile.
const SCORE_TILE_ROWS: u32 = 16;

/// The chain family `msa`.
#[derive(Debug)]
pub struct MsaChains {
    plan: MsaPlan,
    seed: u64,
}

impl MsaChains {
    /// Plans the chain; weights will be drawn from `seed`.
    pub fn new(shape: &ModelShape, limits: &Limits, seed: u64) -> Result<MsaChains> {
        Ok(MsaChains { plan: MsaPlan::new(shape, limits)?, seed })
    }
}

//! Whole plans: from limits and a model's shape to every persistent buffer. Pure; needs no device.
//!
//! [`MsaPlan`] is the sparse-attention chain alone. A model adds its weights and activations to the same groups of buffers
//! ([`AttentionBuffers`], [`StepBuffers`](crate::chain::StepBuffers)).

mod attention;
mod budget;
mod msa;
mod peers;

pub use attention::{AttentionBuffers, AttentionDims, LayerBuffers, score_width};
pub use budget::{cache_blocks, check_fit, device_bytes};
pub use msa::{MsaPlan, step_layout};
pub use peers::PeerBuffers;

use crate::arena::{BufferId, BufferSpec, PlanBuilder, Purpose};
use crate::dtype::DType;
use crate::hal::MemoryKind;

/// Adds a buffer of device memory.
pub fn device_buffer(
    plan: &mut PlanBuilder,
    name: String,
    dtype: DType,
    shape: &[u32],
    formula: &str,
    purpose: Purpose,
    reason: &str,
) -> BufferId {
    plan.add(BufferSpec {
        name,
        dtype,
        shape: shape.iter().map(|&dim| u64::from(dim)).collect(),
        formula: formula.into(),
        memory: MemoryKind::Device,
        purpose,
        reason: reason.into(),
    })
}

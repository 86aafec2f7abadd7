//! The plan of the sparse-attention chain alone.

use super::{AttentionBuffers, AttentionDims, PeerBuffers, cache_blocks, check_fit, device_buffer};
use crate::arena::{ArenaPlan, BufferId, PlanBuilder, Purpose};
use crate::chain::{StepBuffers, StepLayout};
use crate::config::{Limits, ModelShape, max_capture_rows};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Block-table updates a step carries beside one for each sequence.
const SPARE_UPDATES: u32 = 64;

/// Every buffer of the sparse-attention chain.
#[derive(Clone, Debug)]
pub struct MsaPlan {
    /// The limits it was made from.
    pub limits: Limits,
    /// The shape it was made from.
    pub shape: ModelShape,
    /// This rank's dimensions.
    pub dims: AttentionDims,
    /// Capacities of the step buffers.
    pub layout: StepLayout,
    /// Step metadata.
    pub step: StepBuffers,
    /// Attention; the model's dense layers are left out.
    pub attention: AttentionBuffers,
    /// What the ranks exchange, under context parallelism.
    pub peers: Option<PeerBuffers>,
    /// [vocab, packed_width] bf16 rows by token id.
    pub table: BufferId,
    /// [sequences, vocab] the last rows of a prefill, sampled as logits.
    pub last_rows_out: BufferId,
    /// \[sequences\] the last row of each sequence of a prefill.
    pub last_row: BufferId,
    /// Rows of `table`, and channels of the output sampled as logits.
    pub vocab: u32,
    /// All of it, laid out.
    pub arena: ArenaPlan,
}

impl MsaPlan {
    /// Plans the sparse layers of `shape` under `limits`.
    ///
    /// Errors: limits or a shape out of range, sizes that overflow, a budget that does not hold everything but the cache.
    pub fn new(shape: &ModelShape, limits: &Limits) -> Result<MsaPlan> {
        limits.validate()?;
        shape.validate()?;
        limits.validate_for(shape)?;
        if !shape.sparse_attention.contains(&true) {
            return Err(Error::config("no layer of the model has sparse attention: there is no such chain to plan")
                .help("use a model whose sparse_attention_freq or layer_types names sparse layers"));
        }
        let blocks =
            cache_blocks(limits, shape.block_size, |limits, blocks| Ok(Self::with_blocks(shape, limits, blocks)?.arena))?;
        Self::with_blocks(shape, limits, blocks)
    }

    /// Refuses the plan if it does not fit `bytes` of device memory; says which limit to lower to what.
    pub fn check_fit(&self, bytes: u64) -> Result<()> {
        let plan = |limits: &Limits, blocks| Ok(Self::with_blocks(&self.shape, limits, blocks)?.arena);
        check_fit(&self.limits, self.shape.block_size, bytes, plan)
    }

    fn with_blocks(shape: &ModelShape, limits: &Limits, cache_blocks: u32) -> Result<MsaPlan> {
        let dims = AttentionDims::new(shape, limits);
        let sparse: Vec<bool> = shape.sparse_attention.iter().copied().filter(|&sparse| sparse).collect();
        let layout = step_layout(shape, limits, cache_blocks)?;
        let rows = layout.row_capacity;
        let mut plan = PlanBuilder::default();
        let step = StepBuffers::plan(&layout, &mut plan);
        let attention = AttentionBuffers::plan(&dims, limits, rows, cache_blocks, &sparse, &mut plan);
        let peers = PeerBuffers::plan(&dims, limits, &mut plan);
        let vocab = dims.q_heads * dims.head_dim;
        let width = dims.packed_width(true);
        let (f32, i32) = (DType::F32, DType::I32);
        let table = device_buffer(
            &mut plan,
            "msa.table".into(),
            DType::Bf16,
            &[vocab, width],
            "[vocab, packed_width]",
            Purpose::Weights,
            "packed row of each token, in place of the projection",
        );
        let last_rows_out = device_buffer(
            &mut plan,
            "msa.last_rows_out".into(),
            f32,
            &[layout.sequence_capacity, vocab],
            "[sequence_capacity, q_heads * head_dim]",
            Purpose::Activations,
            "output of each prefilled sequence's last row",
        );
        let last_row = device_buffer(
            &mut plan,
            "msa.last_row".into(),
            i32,
            &[layout.sequence_capacity],
            "[sequence_capacity]",
            Purpose::Metadata,
            "last row of each prefilled sequence",
        );
        let arena = plan.finish()?;
        Ok(MsaPlan {
            limits: limits.clone(),
            shape: shape.clone(),
            dims,
            layout,
            step,
            attention,
            peers,
            table,
            last_rows_out,
            last_row,
            vocab,
            arena,
        })
    }
}

/// Capacities of the step buffers of any chain: rows for the largest prefill step and the largest capture size.
pub fn step_layout(shape: &ModelShape, limits: &Limits, cache_blocks: u32) -> Result<StepLayout> {
    let sequence_capacity = limits.max_num_seqs;
    Ok(StepLayout {
        ring_slots: limits.ring_slots,
        sequence_capacity,
        row_capacity: limits.max_num_batched_tokens.max(max_capture_rows(limits)),
        update_capacity: limits.max_num_seqs + SPARE_UPDATES,
        slots: limits.max_num_seqs,
        table_width: limits.max_model_len.div_ceil(shape.block_size),
        block_size: shape.block_size,
        cache_blocks,
    })
}

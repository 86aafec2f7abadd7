//! Runs a recorded case: its buffers, its inputs, and the chain's own score, selection and attend ops over them; alone, or as
//! one rank of several, which holds its share of the heads.

use std::ops::Range;
use std::sync::Arc;

use super::case::{Case, Rows};
use super::{Mode, UNTOUCHED};
use crate::arena::{Arena, BufferId, PlanBuilder, Purpose, Sealed};
use crate::capture::{CapturedGraph, Modules, launch_all, lower};
use crate::chain::attention::{AttentionChain, Metadata};
use crate::chain::{Chain, GraphKey, StepBuffers, StepLayout, agree};
use crate::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::gates::{Refusal, Sharing, parallel_refused};
use crate::hal::{Device, Stream};
use crate::kernels::msa::PAGE_TOKENS;
use crate::kernels::registry;
use crate::kernels::step::StepState;
use crate::peers::{Group, connect};
use crate::planning::{AttentionBuffers, AttentionDims, PeerBuffers, device_buffer, step_layout};
use crate::runtime::peer_error;

/// Value of integer outputs before a run: no kernel writes it.
const UNWRITTEN: i32 = -77;
/// Bytes of an element of the KV cache cases are recorded with: bf16.
const KV_BYTES: usize = 2;

/// A case on a device.
pub(super) struct Bench {
    arena: Arc<Arena<Sealed>>,
    modules: Arc<Modules>,
    stream: Arc<dyn Stream>,
    chain: Chain,
    key: GraphKey,
    layout: StepLayout,
    step: StepBuffers,
    index_block_table: BufferId,
    buffers: AttentionBuffers,
    dims: AttentionDims,
    rank: usize,
    rows: usize,
}

impl Bench {
    /// Plans and allocates a case's buffers and builds its chain.
    pub(super) fn new(device: &Arc<dyn Device>, case: &Case) -> Result<Bench> {
        Bench::build(device, case, limits(case), None)
    }

    /// The same as a rank of `group`, whose ranks wait `timeout_ms` for each other; for cases that [`refused`] does not name.
    pub(super) fn join(device: &Arc<dyn Device>, case: &Case, group: &dyn Group, timeout_ms: u32) -> Result<Bench> {
        Bench::build(device, case, limits_of_rank(case, group, timeout_ms), Some(group))
    }

    fn build(device: &Arc<dyn Device>, case: &Case, limits: Limits, group: Option<&dyn Group>) -> Result<Bench> {
        if !device.info().executes {
            return Err(
                Error::unavailable("this device records and runs nothing: there is nothing to compare").help("use --device cpu")
            );
        }
        let shape = shape(case);
        limits.validate()?;
        shape.validate()?;
        let dims = AttentionDims::new(&shape, &limits);
        let cache_blocks = blocks(case);
        let layout = step_layout(&shape, &limits, cache_blocks)?;
        let mut plan = PlanBuilder::default();
        let step = StepBuffers::plan(&layout, &mut plan);
        let buffers = AttentionBuffers::plan(&dims, &limits, layout.row_capacity, cache_blocks, &[true], &mut plan);
        let peers = PeerBuffers::plan(&dims, &limits, &mut plan);
        let index_block_table = device_buffer(
            &mut plan,
            "verify.index_block_table".into(),
            DType::I32,
            &[layout.slots, layout.table_width],
            "[sequences, table_width]",
            Purpose::Metadata,
            "recorded cases have a table for each cache",
        );
        let mut arena = Arena::allocate(device, plan.finish()?)?.seal()?;
        if let (Some(peers), Some(group)) = (&peers, group) {
            connect(&mut arena, peers, group)?;
        }
        let arena = Arc::new(arena);
        let exchange = if peers.is_some() { registry::peers() } else { &[] };
        let modules = Arc::new(Modules::load(&**device, &[registry::all(), exchange].concat())?);
        let rows = case.row_count();
        let metadata = match case.rows {
            Rows::Decode { query_len } => {
                Metadata::Decode { sequences: case.sequences(), query_len, kv_len_max: case.max_seq_len }
            }
            Rows::Prefill { .. } => Metadata::Prefill { rows },
        };
        let attention = AttentionChain {
            dims: &dims,
            shape: &shape,
            limits: &limits,
            layout: &layout,
            step: &step,
            buffers: &buffers,
            peers: peers.as_ref(),
        };
        let Limits { rank, world, .. } = limits;
        let key = GraphKey { query_len: 1, sequences: rows, kv_len_max: case.max_seq_len, rank, world };
        let index_step = StepBuffers { block_table: index_block_table, ..step };
        let mut chain = Chain::new("verify");
        if let Some(peers) = &peers {
            agree(&mut chain, peers, &step, &limits, &GraphKey { sequences: case.sequences(), ..key });
        }
        AttentionChain { step: &index_step, ..attention }.score(&mut chain, 0, metadata);
        attention.select(&mut chain, 0, metadata);
        if case.attend.is_some() {
            attention.attend(&mut chain, 0, rows);
        }
        let stream = device.create_stream()?;
        let (rank, rows) = (rank as usize, rows as usize);
        Ok(Bench { arena, modules, stream, chain, key, layout, step, index_block_table, buffers, dims, rank, rows })
    }

    /// Writes the inputs, marks the outputs, and runs the chain.
    pub(super) fn run(&self, case: &Case, mode: Mode) -> Result<()> {
        self.mark()?;
        self.inputs(case)?;
        match mode {
            Mode::Eager => launch_all(&*self.stream, &self.chain, &lower(&self.chain, &self.arena, &self.modules)?)?,
            Mode::Replayed => {
                let graph = CapturedGraph::capture(self.key, self.chain.clone(), &self.arena, &self.modules, &*self.stream)?;
                graph.replay(&*self.stream)?;
                self.stream.synchronize()?;
            }
        }
        self.stream.synchronize()?;
        let [state]: [StepState; 1] = self.read(self.step.state, 0, 1)?.try_into().expect("invariant: one was read");
        peer_error(state.error, state.error_detail).map_or(Ok(()), Err)
    }

    fn mark(&self) -> Result<()> {
        let fill = |buffer: BufferId, word: [u8; 4]| {
            let bytes = self.arena.plan().buffer(buffer).bytes as usize;
            self.arena.write(buffer, 0, &word.repeat(bytes / 4))
        };
        fill(self.buffers.score, UNTOUCHED.to_le_bytes())?;
        fill(self.buffers.out, f32::NAN.to_le_bytes())?;
        fill(self.step.state, [0; 4])?;
        [self.buffers.topk_idx, self.buffers.page_table, self.buffers.page_len]
            .into_iter()
            .try_for_each(|buffer| fill(buffer, UNWRITTEN.to_le_bytes()))
    }

    fn inputs(&self, case: &Case) -> Result<()> {
        let layer = &self.buffers.layers[0];
        let index_cache = layer.index_cache.expect("invariant: the layer is sparse");
        self.arena.write(self.buffers.index_q, 0, &case.index_query)?;
        self.arena.write(index_cache, 0, &case.index_cache)?;
        self.table(self.index_block_table, case, &case.block_table)?;
        self.table(self.step.block_table, case, &case.attend_block_table)?;
        let slots: Vec<i32> = (0..case.sequences() as i32).collect();
        self.ints(self.step.seq_slot, &slots)?;
        self.ints(self.step.seq_len, &case.seq_lens)?;
        let (row_slot, row_len): (Vec<i32>, Vec<i32>) =
            case.causal().into_iter().map(|(sequence, len)| (sequence as i32, len)).unzip();
        self.ints(self.step.row_slot, &row_slot)?;
        self.ints(self.step.row_len, &row_len)?;
        if let Some(attend) = &case.attend {
            let (block_size, head_dim) = (case.block_size as usize, attend.head_dim as usize);
            let query = share(&attend.query, case.heads as usize, self.heads(), case.group as usize * head_dim);
            self.arena.write(self.buffers.q, 0, bytemuck::cast_slice(&query))?;
            let recorded = share(&attend.kv_cache, case.heads as usize, self.heads(), block_size * 2 * head_dim);
            let pages = interleave(&recorded, self.heads().len(), block_size, head_dim);
            self.arena.write(layer.kv_cache, 0, bytemuck::cast_slice(&pages))?;
        }
        Ok(())
    }

    /// A recorded table, cut or filled to the plan's width. Places past a sequence's length stay poisoned: nothing may read them.
    fn table(&self, buffer: BufferId, case: &Case, table: &[i32]) -> Result<()> {
        let (from, to) = (case.table_width as usize, self.layout.table_width as usize);
        let mut rows = vec![i32::MIN; self.layout.slots as usize * to];
        for (row, recorded) in rows.chunks_mut(to).zip(table.chunks(from)) {
            let shared = from.min(to);
            row[..shared].copy_from_slice(&recorded[..shared]);
        }
        self.ints(buffer, &rows)
    }

    fn ints(&self, buffer: BufferId, values: &[i32]) -> Result<()> {
        self.arena.write(buffer, 0, bytemuck::cast_slice(values))
    }

    /// The KV heads, and index heads, that are this rank's.
    pub(super) fn heads(&self) -> Range<usize> {
        let own = self.dims.kv_heads as usize;
        self.rank * own..(self.rank + 1) * own
    }

    /// [heads, rows, width] of the scores, and the width.
    pub(super) fn score(&self) -> Result<(Vec<f32>, usize)> {
        let width = self.dims.score_width as usize;
        Ok((self.planes(self.buffers.score, width)?, width))
    }

    /// [heads, rows, topk].
    pub(super) fn topk_idx(&self) -> Result<Vec<i32>> {
        self.planes(self.buffers.topk_idx, self.dims.topk as usize)
    }

    /// [rows * heads, pages].
    pub(super) fn page_table(&self) -> Result<Vec<i32>> {
        self.read(self.buffers.page_table, 0, self.rows * self.dims.kv_heads as usize * self.dims.table_pages() as usize)
    }

    /// [rows * heads].
    pub(super) fn page_len(&self) -> Result<Vec<i32>> {
        self.read(self.buffers.page_len, 0, self.rows * self.dims.kv_heads as usize)
    }

    /// [rows, q_heads, head_dim].
    pub(super) fn out(&self) -> Result<Vec<f32>> {
        self.read(self.buffers.out, 0, self.rows * (self.dims.q_heads * self.dims.head_dim) as usize)
    }

    /// The case's rows of each head's plane.
    fn planes<T: bytemuck::Pod>(&self, buffer: BufferId, width: usize) -> Result<Vec<T>> {
        let plane = self.layout.row_capacity as usize * width;
        let mut all = Vec::with_capacity(self.dims.index_heads as usize * self.rows * width);
        for head in 0..self.dims.index_heads as usize {
            all.extend(self.read::<T>(buffer, head * plane, self.rows * width)?);
        }
        Ok(all)
    }

    fn read<T: bytemuck::Pod>(&self, buffer: BufferId, first: usize, count: usize) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); count];
        self.arena.read(buffer, (first * size_of::<T>()) as u64, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

/// Why the ranks of `group` cannot share a case; empty if they can.
pub(super) fn refused(case: &Case, group: &dyn Group) -> Vec<Refusal> {
    parallel_refused(&shape(case), &limits_of_rank(case, group, Limits::default().peer_timeout_ms), Sharing::Heads)
}

/// [.., heads, width]: the heads of `own` alone.
pub(super) fn share<T: Copy>(values: &[T], heads: usize, own: Range<usize>, width: usize) -> Vec<T> {
    values.chunks(heads * width).flat_map(|all| &all[own.start * width..own.end * width]).copied().collect()
}

/// Blocks of either cache.
fn blocks(case: &Case) -> u32 {
    case.attend.as_ref().map_or(0, |attend| attend.cache_blocks).max(case.index_blocks)
}

/// One sparse layer of the case's heads.
fn shape(case: &Case) -> ModelShape {
    let head_dim = case.attend.as_ref().map_or(case.index_dim, |attend| attend.head_dim);
    ModelShape {
        q_heads: case.heads * case.group,
        kv_heads: case.heads,
        head_dim,
        rotary_dim: 0,
        index_heads: case.heads,
        index_dim: case.index_dim,
        block_size: case.block_size,
        topk_blocks: case.topk,
        init_blocks: case.init_blocks,
        local_blocks: case.local_blocks,
        sparse_attention: vec![true],
        moe: vec![false],
        ..ModelShape::minimax_m3()
    }
}

/// Limits that hold exactly the case.
fn limits(case: &Case) -> Limits {
    let rows = case.row_count().max(1);
    let query_len = match case.rows {
        Rows::Decode { query_len } => query_len,
        Rows::Prefill { .. } => 1,
    };
    Limits {
        max_model_len: case.max_seq_len,
        max_num_seqs: case.sequences(),
        max_num_batched_tokens: rows.max(case.sequences() * query_len),
        num_speculative_tokens: query_len - 1,
        capture: CaptureSizes::List(vec![case.sequences() * query_len]),
        cache: CacheBudget::Blocks(blocks(case)),
        kv_dtype: DType::Bf16,
        index_dtype: case.index_dtype,
        ..Limits::default()
    }
}

fn limits_of_rank(case: &Case, group: &dyn Group, peer_timeout_ms: u32) -> Limits {
    Limits { rank: group.rank(), world: group.world(), peer_timeout_ms, ..limits(case) }
}

/// [blocks, heads, block_size, K and V of head_dim] to pages of 16 tokens (see [`kernels::msa`](crate::kernels::msa)).
fn interleave(recorded: &[u16], heads: usize, block_size: usize, head_dim: usize) -> Vec<u16> {
    let (page, x) = (PAGE_TOKENS as usize, 16 / KV_BYTES);
    let side = block_size * heads * head_dim;
    let mut pages = vec![0; recorded.len()];
    for (at, token) in recorded.chunks_exact(2 * head_dim).enumerate() {
        let (block, head, t) = (at / block_size / heads, at / block_size % heads, at % block_size);
        let start = block * 2 * side + (t / page * heads + head) * page * head_dim;
        let t = t % page;
        for d in 0..head_dim {
            pages[start + (d / x * page + t) * x + d % x] = token[d];
            pages[start + side + (t / x * head_dim + d) * x + t % x] = token[head_dim + d];
        }
    }
    pages
}

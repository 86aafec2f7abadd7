//! The MiniMax-M3 sparse-attention chain on its own: a stack of sparse attention layers without the matrix products between.
//!
//! Rows come from a table by token id (`embed` gathers the packed row [q | k | v | index_q | index_k]); each layer norms,
//! rotates and caches them with its own norm weights, scores, selects and attends; the last layer's output is sampled as if it
//! were logits. So one token a row drives the whole chain, tokens can be fed back on the device, and a server's decode loop can
//! be measured on the attention alone.

use std::ops::Range;

use super::attention::{AttentionChain, Metadata};
use super::{Chain, GraphKey, StepBuffers, StepChains, StepLayout, agree, pointer};
use crate::arena::{Arena, ArenaPlan, Sealed};
use crate::config::{Limits, ModelShape};
use crate::dtype::DType;
use crate::error::Result;
use crate::gates::{Refusal, Sharing, parallel_refused};
use crate::kernels::m3::SelectLastArgs;
use crate::kernels::step::{EmbedArgs, SampleArgs};
use crate::kernels::{KernelSpec, Ptr, registry};
use crate::planning::{MsaPlan, PeerBuffers};
use crate::random::Random;

/// The chain family `msa`.
#[derive(Debug)]
pub struct MsaChains {
    plan: MsaPlan,
    seed: u64,
}

impl MsaChains {
    /// Plans the sparse layers of `shape`; the table and the norms will be drawn from `seed`.
    pub fn new(shape: &ModelShape, limits: &Limits, seed: u64) -> Result<MsaChains> {
        Ok(MsaChains { plan: MsaPlan::new(shape, limits)?, seed })
    }

    /// The plan.
    pub fn msa_plan(&self) -> &MsaPlan {
        &self.plan
    }

    fn attention(&self) -> AttentionChain<'_> {
        AttentionChain {
            dims: &self.plan.dims,
            shape: &self.plan.shape,
            limits: &self.plan.limits,
            layout: &self.plan.layout,
            step: &self.plan.step,
            buffers: &self.plan.attention,
            peers: self.plan.peers.as_ref(),
        }
    }

    /// This rank's parts of a packed row of one rank alone, and the channels of such a row.
    fn parts(&self) -> (Vec<Range<usize>>, usize) {
        let MsaPlan { dims, limits, shape, .. } = &self.plan;
        let mut parts = Vec::with_capacity(5);
        let mut start = 0;
        let mut part = |heads: u32, own: u32, dim: u32| {
            let first = if own == heads { 0 } else { limits.rank * heads / limits.world };
            parts.push(start + (first * dim) as usize..start + ((first + own) * dim) as usize);
            start += (heads * dim) as usize;
        };
        part(shape.q_heads, dims.q_heads, dims.head_dim);
        part(shape.kv_heads, dims.kv_heads, dims.head_dim);
        part(shape.kv_heads, dims.kv_heads, dims.head_dim);
        part(shape.index_heads, dims.scored_heads, dims.index_dim);
        part(1, 1, dims.index_dim);
        (parts, start)
    }

    fn embed(&self, chain: &mut Chain, rows: u32) {
        let args = EmbedArgs {
            tokens: pointer(self.plan.step.tokens),
            row_len: pointer(self.plan.step.row_len),
            table: pointer(self.plan.table),
            out: pointer(self.plan.attention.packed),
            rows,
            width: self.plan.dims.packed_width(true),
            vocab: self.plan.vocab,
            table_dtype: DType::Bf16.code(),
        };
        chain.push("embed", None, &registry::EMBED, [rows, 1, 1], &args);
    }

    fn layers(&self, chain: &mut Chain, metadata: Metadata) {
        for layer in 0..self.plan.attention.layers.len() {
            self.attention().push_layer(chain, layer as u32, metadata);
        }
    }

    fn sample(&self, chain: &mut Chain, logits: Ptr, rows: u32, step_rows: u32, sequences: u32, rows_index: Option<Ptr>) {
        let step = &self.plan.step;
        let args = SampleArgs {
            logits,
            rows_index: rows_index.unwrap_or(Ptr::NULL),
            row_seq: pointer(step.row_seq),
            row_slot: pointer(step.row_slot),
            row_len: pointer(step.row_len),
            records: pointer(step.records),
            out: pointer(step.sampled),
            last_token: pointer(step.last_token),
            rows,
            vocab: self.plan.vocab,
            step_rows,
            sequences,
            slots: self.plan.layout.slots,
            indexed: u32::from(rows_index.is_some()),
        };
        chain.push("sample", None, &registry::SAMPLE, [rows, 1, 1], &args);
    }

    /// Gathers the output of each sequence's last row.
    fn last_rows(&self, chain: &mut Chain, sequences: u32, rows: u32) {
        let select = SelectLastArgs {
            cu_seqlens: pointer(self.plan.step.cu_seqlens),
            rows_index: pointer(self.plan.last_row),
            sequences,
            reserved: 0,
        };
        chain.push("select_last", None, &registry::SELECT_LAST, [1, 1, 1], &select);
        let gather = EmbedArgs {
            tokens: pointer(self.plan.last_row),
            row_len: pointer(self.plan.step.seq_len),
            table: pointer(self.plan.attention.out),
            out: pointer(self.plan.last_rows_out),
            rows: sequences,
            width: self.plan.vocab,
            vocab: rows,
            table_dtype: DType::F32.code(),
        };
        chain.push("gather_last", None, &registry::EMBED, [sequences, 1, 1], &gather);
    }
}

impl StepChains for MsaChains {
    fn name(&self) -> &str {
        "msa"
    }

    fn limits(&self) -> &Limits {
        &self.plan.limits
    }

    fn plan(&self) -> &ArenaPlan {
        &self.plan.arena
    }

    fn step(&self) -> &StepBuffers {
        &self.plan.step
    }

    fn step_layout(&self) -> &StepLayout {
        &self.plan.layout
    }

    fn vocab(&self) -> u32 {
        self.plan.vocab
    }

    fn kernels(&self) -> Vec<&'static KernelSpec> {
        let peers = if self.plan.peers.is_some() { registry::peers() } else { &[] };
        [registry::all(), peers].concat()
    }

    fn peers(&self) -> Option<&PeerBuffers> {
        self.plan.peers.as_ref()
    }

    fn parallel_refused(&self) -> Vec<Refusal> {
        parallel_refused(&self.plan.shape, &self.plan.limits, Sharing::Heads)
    }

    fn decode(&self, key: &GraphKey) -> Chain {
        let (sequences, rows) = (key.sequences, key.rows());
        let mut chain = Chain::new("msa.decode");
        self.plan.step.ingest(&self.plan.layout, &mut chain, sequences, rows, key.query_len);
        if let Some(peers) = &self.plan.peers {
            agree(&mut chain, peers, &self.plan.step, &self.plan.limits, key);
        }
        self.embed(&mut chain, rows);
        self.layers(&mut chain, Metadata::Decode { sequences, query_len: key.query_len, kv_len_max: key.kv_len_max });
        self.sample(&mut chain, pointer(self.plan.attention.out), rows, rows, sequences, None);
        self.plan.step.publish(&self.plan.layout, &mut chain, rows);
        chain
    }

    fn prefill(&self, sequences: u32, rows: u32) -> Chain {
        let mut chain = Chain::new("msa.prefill");
        self.plan.step.ingest(&self.plan.layout, &mut chain, sequences, rows, 0);
        self.embed(&mut chain, rows);
        self.layers(&mut chain, Metadata::Prefill { rows });
        self.last_rows(&mut chain, sequences, rows);
        self.sample(&mut chain, pointer(self.plan.last_rows_out), sequences, rows, sequences, Some(pointer(self.plan.last_row)));
        self.plan.step.publish(&self.plan.layout, &mut chain, sequences);
        chain
    }

    fn initialise(&self, arena: &Arena<Sealed>) -> Result<()> {
        if !arena.device().info().executes {
            return Ok(());
        }
        self.attention().write_cos_sin(arena)?;
        let mut random = Random::new(self.seed);
        for layer in &self.plan.attention.layers {
            for (norm, dim) in layer.norms(&self.plan.dims) {
                let weight: Vec<f32> = (0..dim).map(|_| (random.normal() * 0.1) as f32).collect();
                arena.write(norm, 0, bytemuck::cast_slice(&weight))?;
            }
        }
        // Ranks draw the same whole rows and keep their own heads.
        let (parts, whole) = self.parts();
        let mut row = vec![half::bf16::ZERO; whole];
        let mut own = Vec::new();
        let width = self.plan.dims.packed_width(true) as usize;
        for token in 0..self.plan.vocab {
            row.fill_with(|| half::bf16::from_f64(random.normal()));
            own.clear();
            parts.iter().for_each(|part| own.extend_from_slice(&row[part.clone()]));
            arena.write(self.plan.table, u64::from(token) * width as u64 * 2, bytemuck::cast_slice(&own))?;
        }
        Ok(())
    }
}

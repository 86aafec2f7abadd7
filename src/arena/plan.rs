//! The plan of an arena: names to offsets, no device.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::hal::MemoryKind;

/// A buffer's number in its plan; what symbolic pointers of a chain hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct BufferId(pub u32);

/// What a buffer is for; plans sum by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Model weights and tables.
    Weights,
    /// KV cache blocks.
    KvCache,
    /// Index-key cache blocks.
    IndexCache,
    /// Per-step metadata and block tables.
    Metadata,
    /// Activations of one step.
    Activations,
    /// Scores, selections and page tables.
    Selection,
    /// Pinned rings between host and device.
    Rings,
    /// Candidate exchange between ranks.
    Exchange,
    /// Workspaces of libraries.
    Workspace,
}

/// A buffer as a chain asks for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BufferSpec {
    /// Unique name, dotted: `layer3.kv_cache`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, innermost last.
    pub shape: Vec<u64>,
    /// The shape in terms of limits, e.g. `[max_num_seqs, ceil(max_model_len / block_size)]`.
    pub formula: String,
    /// Where it lives.
    pub memory: MemoryKind,
    /// What it is for.
    pub purpose: Purpose,
    /// Why it exists, one sentence.
    pub reason: String,
}

impl BufferSpec {
    /// Size in bytes; `None` if it overflows 64 bits.
    pub fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.bytes(), |bytes, &dim| bytes.checked_mul(dim))
    }
}

/// A buffer with its place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedBuffer {
    /// What was asked for.
    #[serde(flatten)]
    pub spec: BufferSpec,
    /// Byte offset in the slab of its memory kind.
    pub offset: u64,
    /// Size.
    pub bytes: u64,
}

/// One driver allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SlabPlan {
    /// Memory kind.
    pub memory: MemoryKind,
    /// Size, guard bands included.
    pub bytes: u64,
}

/// Every persistent buffer with its offset, and the slabs that hold them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ArenaPlan {
    /// Indexed by [`BufferId`].
    pub buffers: Vec<PlannedBuffer>,
    /// At most one a memory kind.
    pub slabs: Vec<SlabPlan>,
    /// Buffers of other ranks' peer slabs, and whose: opened after the seal, not allocated here.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub imports: BTreeMap<BufferId, u32>,
}

/// Alignment of every buffer and size of the guard band before the first, between any two and after the last.
pub const ALIGNMENT_BYTES: u64 = 256;
/// Granule of the peer slab: exports to other processes are whole pages (msa-spec section 5.7).
pub const PEER_PAGE_BYTES: u64 = 4096;
/// Bytes of a guard band at least: the gap to the next buffer's alignment comes on top.
pub const GUARD_BYTES: u64 = 256;

impl ArenaPlan {
    /// The buffer behind an id.
    pub fn buffer(&self, id: BufferId) -> &PlannedBuffer {
        &self.buffers[id.0 as usize]
    }

    /// Finds a buffer by name.
    pub fn find(&self, name: &str) -> Option<BufferId> {
        self.buffers.iter().position(|buffer| buffer.spec.name == name).map(|at| BufferId(at as u32))
    }

    /// The buffers of this arena's own slabs.
    pub fn own(&self) -> impl Iterator<Item = &PlannedBuffer> {
        let own = |(at, buffer)| (!self.imports.contains_key(&BufferId(at as u32))).then_some(buffer);
        self.buffers.iter().enumerate().filter_map(own)
    }

    /// Bytes of the own buffers of each purpose, largest first; guard bands are in no purpose.
    pub fn by_purpose(&self) -> Vec<(Purpose, u64)> {
        let mut sums = BTreeMap::new();
        for buffer in self.own() {
            *sums.entry(buffer.spec.purpose).or_default() += buffer.bytes;
        }
        let mut sums: Vec<(Purpose, u64)> = sums.into_iter().collect();
        sums.sort_by_key(|&(_, bytes)| Reverse(bytes));
        sums
    }

    /// Bytes of all slabs.
    pub fn total_bytes(&self) -> u64 {
        self.slabs.iter().map(|slab| slab.bytes).sum()
    }
}

/// Collects buffers; [`PlanBuilder::finish`] lays them out in the order they came.
#[derive(Debug, Default)]
pub struct PlanBuilder {
    specs: Vec<BufferSpec>,
    names: HashSet<String>,
    // (buffer, rank, the own buffer it lies like)
    imports: Vec<(BufferId, u32, BufferId)>,
}

impl PlanBuilder {
    /// Adds a buffer. Panics if the name is taken: names are chosen by chains, not by users.
    pub fn add(&mut self, spec: BufferSpec) -> BufferId {
        assert!(self.names.insert(spec.name.clone()), "buffer {} is planned twice", spec.name);
        self.specs.push(spec);
        BufferId(self.specs.len() as u32 - 1)
    }

    /// Adds the counterpart of `own`, a buffer in peer memory, in the arena of another rank. Every rank plans the same peer slab, so
    /// it lies there at the same offset; its name is `peer1/NAME`.
    pub fn import(&mut self, rank: u32, own: BufferId) -> BufferId {
        let spec = &self.specs[own.0 as usize];
        assert_eq!(spec.memory, MemoryKind::Peer, "buffer {} is not visible to peers", spec.name);
        let name = format!("peer{rank}/{}", spec.name);
        let id = self.add(BufferSpec { name, ..spec.clone() });
        self.imports.push((id, rank, own));
        id
    }

    /// Lays the buffers out: one slab a memory kind, a guard band before the first buffer, between any two and after the last.
    ///
    /// Errors: a size that overflows 64 bits, named.
    pub fn finish(self) -> Result<ArenaPlan> {
        let imports = self.imports.iter().map(|&(id, rank, _)| (id, rank)).collect();
        let mut plan = ArenaPlan { imports, ..ArenaPlan::default() };
        for (at, spec) in self.specs.into_iter().enumerate() {
            if let Some((.., own)) = self.imports.iter().find(|(id, ..)| id.0 as usize == at) {
                let PlannedBuffer { offset, bytes, .. } = plan.buffers[own.0 as usize];
                plan.buffers.push(PlannedBuffer { spec, offset, bytes });
                continue;
            }
            let overflow = || {
                Error::config(format!("buffer {} {} does not fit 64 bits", spec.name, spec.formula))
                    .help("lower the limits its shape is made of")
            };
            let bytes = spec.bytes().ok_or_else(overflow)?;
            let at = plan.slabs.iter().position(|slab| slab.memory == spec.memory).unwrap_or_else(|| {
                plan.slabs.push(SlabPlan { memory: spec.memory, bytes: GUARD_BYTES });
                plan.slabs.len() - 1
            });
            let slab = &mut plan.slabs[at];
            let offset = slab.bytes;
            let padded = bytes.checked_next_multiple_of(ALIGNMENT_BYTES).and_then(|bytes| bytes.checked_add(GUARD_BYTES));
            slab.bytes = padded.and_then(|bytes| offset.checked_add(bytes)).ok_or_else(overflow)?;
            plan.buffers.push(PlannedBuffer { spec, offset, bytes });
        }
        for slab in plan.slabs.iter_mut().filter(|slab| slab.memory == MemoryKind::Peer) {
            slab.bytes = slab
                .bytes
                .checked_next_multiple_of(PEER_PAGE_BYTES)
                .ok_or_else(|| Error::config("the peer slab does not fit 64 bits").help("lower max_num_seqs"))?;
        }
        Ok(plan)
    }

    /// What was added so far.
    pub fn specs(&self) -> &[BufferSpec] {
        &self.specs
    }
}

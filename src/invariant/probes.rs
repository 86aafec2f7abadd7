//! Small arenas and chains of the `probe` kernel, whose results are known in closed form.

use std::sync::Arc;

use crate::arena::{Arena, ArenaPlan, BufferId, BufferSpec, PlanBuilder, Purpose, Sealed};
use crate::capture::{CapturedGraph, Modules};
use crate::chain::{Chain, GraphKey, WORKGROUP};
use crate::dtype::DType;
use crate::error::Result;
use crate::hal::{Device, MemoryKind, Stream};
use crate::kernels::probe::ProbeArgs;
use crate::kernels::{Ptr, registry};

/// Words of every probe buffer: two workgroups, the second not full.
pub(super) const WORDS: usize = 300;

/// The map x -> x * mul + add modulo 2^32. With an odd `mul` it loses nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Map {
    pub mul: u32,
    pub add: u32,
}

impl Map {
    pub const IDENTITY: Map = Map { mul: 1, add: 0 };

    pub fn apply(self, x: u32) -> u32 {
        x.wrapping_mul(self.mul).wrapping_add(self.add)
    }

    /// First `self`, then `next`, as one map.
    pub fn then(self, next: Map) -> Map {
        Map { mul: self.mul.wrapping_mul(next.mul), add: next.apply(self.add) }
    }
}

/// The input of round `round`: no word repeats in a buffer or in the round before.
pub(super) fn input(round: u32) -> Vec<u32> {
    (0..WORDS as u32)
        .map(|at| (round.wrapping_mul(WORDS as u32).wrapping_add(at)).wrapping_mul(0x9e37_79b1) ^ 0x5bd1_e995)
        .collect()
}

/// A sealed arena of buffers of [`WORDS`] words, the stream and the loaded kernel.
pub(super) struct Probes {
    pub arena: Arc<Arena<Sealed>>,
    pub modules: Arc<Modules>,
    pub stream: Arc<dyn Stream>,
}

impl Probes {
    /// `device_buffers` buffers in device memory, then `pinned_buffers` in pinned memory.
    pub fn new(device: &Arc<dyn Device>, device_buffers: u32, pinned_buffers: u32) -> Result<Probes> {
        let arena = Arena::allocate(device, plan(device_buffers, pinned_buffers)?)?.seal()?;
        let modules = Arc::new(Modules::load(&**device, &[&registry::PROBE])?);
        Ok(Probes { arena: Arc::new(arena), modules, stream: device.create_stream()? })
    }

    /// Records `steps` of (source, map, destination), straight.
    pub fn capture(&self, name: &str, steps: impl IntoIterator<Item = (BufferId, Map, BufferId)>) -> Result<CapturedGraph> {
        let mut chain = Chain::new(name);
        for (at, (src, map, dst)) in steps.into_iter().enumerate() {
            let pointer = |buffer: BufferId| Ptr::symbol(buffer.0, 0);
            let args =
                ProbeArgs { dst: pointer(dst), src: pointer(src), count: WORDS as u32, mul: map.mul, add: map.add, reserved: 0 };
            let grid = [(WORDS as u32).div_ceil(WORKGROUP), 1, 1];
            chain.push(format!("{name}.{at}"), None, &registry::PROBE, grid, &args);
        }
        // A key is for lookups in a ladder; these graphs are in none.
        let key = GraphKey { query_len: 1, sequences: 1, kv_len_max: 1, rank: 0, world: 1 };
        CapturedGraph::capture(key, chain, &self.arena, &self.modules, &*self.stream)
    }

    /// Copies words into a buffer and waits.
    pub fn write(&self, buffer: BufferId, words: &[u32]) -> Result<()> {
        self.arena.write(buffer, 0, bytemuck::cast_slice(words))
    }

    /// Waits for the stream, then copies a buffer out.
    pub fn read(&self, buffer: BufferId) -> Result<Vec<u32>> {
        self.stream.synchronize()?;
        let mut words = vec![0u32; WORDS];
        self.arena.read(buffer, 0, bytemuck::cast_slice_mut(&mut words))?;
        Ok(words)
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        // The arena may go with this value; a test that stopped half way may have replays queued.
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "the self-test's stream did not finish");
        }
    }
}

fn plan(device_buffers: u32, pinned_buffers: u32) -> Result<ArenaPlan> {
    let mut plan = PlanBuilder::default();
    let kinds = [(MemoryKind::Device, "device", device_buffers), (MemoryKind::Pinned, "pinned", pinned_buffers)];
    for (memory, name, count) in kinds {
        for at in 0..count {
            plan.add(BufferSpec {
                name: format!("{name}.{at}"),
                dtype: DType::U32,
                shape: vec![WORDS as u64],
                formula: "[words]".into(),
                memory,
                purpose: Purpose::Workspace,
                reason: "input and output of probe launches".into(),
            });
        }
    }
    plan.finish()
}

//! Chains with a mistake: a correct family of chains whose every decode chain is edited, and whose plan and kernels may be, too.

use std::fmt;
use std::sync::Arc;

use capstan::arena::plan::GUARD_BYTES;
use capstan::arena::{Arena, ArenaPlan, BufferId, BufferSpec, PlannedBuffer, Purpose, Sealed};
use capstan::chain::{Chain, GraphKey, Op, StepBuffers, StepChains, StepLayout};
use capstan::config::Limits;
use capstan::hal::{LaunchShape, MemoryKind};
use capstan::kernels::{KernelArgs, KernelSpec};
use capstan::{DType, Result};

type Edit = Box<dyn Fn(&mut Chain, &GraphKey) + Send + Sync>;

/// A family of chains with a mistake in it.
pub struct Damaged {
    inner: Arc<dyn StepChains>,
    plan: ArenaPlan,
    kernels: Vec<&'static KernelSpec>,
    edits: Vec<Edit>,
}

impl Damaged {
    /// `inner` with every decode chain passed through `edit`.
    pub fn new(inner: Arc<dyn StepChains>, edit: impl Fn(&mut Chain, &GraphKey) + Send + Sync + 'static) -> Damaged {
        Damaged { plan: inner.plan().clone(), kernels: inner.kernels(), edits: vec![Box::new(edit)], inner }
    }

    /// Edits every decode chain once more.
    pub fn then(mut self, edit: impl Fn(&mut Chain, &GraphKey) + Send + Sync + 'static) -> Damaged {
        self.edits.push(Box::new(edit));
        self
    }

    /// Declares another kernel.
    pub fn kernel(mut self, kernel: &'static KernelSpec) -> Damaged {
        self.kernels.push(kernel);
        self
    }

    /// Edits the plan.
    pub fn plan(mut self, edit: impl FnOnce(&mut ArenaPlan)) -> Damaged {
        edit(&mut self.plan);
        self
    }
}

impl fmt::Debug for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Damaged").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl StepChains for Damaged {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }
    fn plan(&self) -> &ArenaPlan {
        &self.plan
    }
    fn step(&self) -> &StepBuffers {
        self.inner.step()
    }
    fn step_layout(&self) -> &StepLayout {
        self.inner.step_layout()
    }
    fn vocab(&self) -> u32 {
        self.inner.vocab()
    }
    fn kernels(&self) -> Vec<&'static KernelSpec> {
        self.kernels.clone()
    }
    fn decode(&self, key: &GraphKey) -> Chain {
        let mut chain = self.inner.decode(key);
        self.edits.iter().for_each(|edit| edit(&mut chain, key));
        chain
    }
    fn prefill(&self, sequences: u32, rows: u32) -> Chain {
        self.inner.prefill(sequences, rows)
    }
    fn initialise(&self, arena: &Arena<Sealed>) -> Result<()> {
        self.inner.initialise(arena)
    }
}

/// Plans one more f32 buffer at the end of the device slab; gives its number.
pub fn add_buffer(plan: &mut ArenaPlan, name: &str, elements: u64, purpose: Purpose) -> BufferId {
    let slab = plan.slabs.iter_mut().find(|slab| slab.memory == MemoryKind::Device).unwrap();
    let bytes = elements * 4;
    let offset = slab.bytes.next_multiple_of(256);
    slab.bytes = offset + bytes.next_multiple_of(256) + GUARD_BYTES;
    let spec = BufferSpec {
        name: name.into(),
        dtype: DType::F32,
        shape: vec![elements],
        formula: "[elements]".into(),
        memory: MemoryKind::Device,
        purpose,
        reason: "belongs to a kernel of the test".into(),
    };
    plan.buffers.push(PlannedBuffer { spec, offset, bytes });
    BufferId(plan.buffers.len() as u32 - 1)
}

/// Edits the argument struct of the op called `label`.
pub fn edit<A: KernelArgs>(chain: &mut Chain, label: &str, change: impl FnOnce(&mut A)) {
    let op = op(chain, label);
    let mut args: A = bytemuck::pod_read_unaligned(&op.args);
    change(&mut args);
    op.args.copy_from_slice(bytemuck::bytes_of(&args));
}

/// The op called `label`.
pub fn op<'a>(chain: &'a mut Chain, label: &str) -> &'a mut Op {
    chain.ops.iter_mut().find(|op| op.label == label).unwrap_or_else(|| panic!("no op {label}"))
}

/// Puts an op behind `ingest`.
pub fn insert<A: KernelArgs>(chain: &mut Chain, label: &str, kernel: &'static KernelSpec, args: &A) {
    let op = Op {
        label: label.into(),
        layer: None,
        kernel,
        shape: LaunchShape { grid: [1, 1, 1], workgroup: [1, 1, 1], lds_bytes: 0 },
        args: bytemuck::bytes_of(args).iter().copied().collect(),
    };
    chain.ops.insert(1, op);
}

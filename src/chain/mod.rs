//! Chains as data: the ordered ops of a decode step or a prefill, with symbolic pointers. No device in here.
//!
//! A chain is built once per graph key, lowered against an arena's addresses, and then either launched op by op (eager) or
//! recorded. What reads and writes what follows from the argument structs' layouts.

pub mod attention;
mod exchange;
mod family;
mod msa;
mod step;

pub use exchange::agree;
pub use family::{GraphKey, StepChains};
pub use msa::MsaChains;
pub use step::{StepBuffers, StepLayout, pointer};

use bytemuck::bytes_of;
use smallvec::SmallVec;

use crate::hal::LaunchShape;
use crate::kernels::{KernelArgs, KernelSpec};

/// Lanes of a workgroup, unless an op says otherwise: four waves of 64, eight of 32.
pub const WORKGROUP: u32 = 256;

/// One launch of a kernel.
#[derive(Clone, Debug)]
pub struct Op {
    /// Unique in its chain: `layer3.score`.
    pub label: String,
    /// The layer it belongs to; dumps fold layers that look alike.
    pub layer: Option<u32>,
    /// The kernel.
    pub kernel: &'static KernelSpec,
    /// Grid and workgroup.
    pub shape: LaunchShape,
    /// The argument struct, pointers symbolic.
    pub args: SmallVec<[u8; 256]>,
}

/// How the ops of a chain are ordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Each after the one before: the default, and what HIP is fastest at.
    Straight,
    /// These dependencies (before, after) and no others.
    Edges(Vec<(u32, u32)>),
}

/// The ordered ops of a step.
#[derive(Clone, Debug)]
pub struct Chain {
    /// Name in dumps: `msa.decode`.
    pub name: String,
    /// The ops.
    pub ops: Vec<Op>,
    /// Their order.
    pub order: Order,
}

impl Chain {
    /// An empty straight chain.
    pub fn new(name: impl Into<String>) -> Chain {
        Chain { name: name.into(), ops: Vec::new(), order: Order::Straight }
    }

    /// Appends a launch of `grid` workgroups of [`WORKGROUP`] lanes without dynamic LDS. Panics if `A` is not the kernel's argument
    /// struct or a dimension is zero: that is a bug of the chain.
    pub fn push<A: KernelArgs>(
        &mut self,
        label: impl Into<String>,
        layer: Option<u32>,
        kernel: &'static KernelSpec,
        grid: [u32; 3],
        args: &A,
    ) {
        self.push_shaped(label, layer, kernel, LaunchShape { grid, workgroup: [WORKGROUP, 1, 1], lds_bytes: 0 }, args);
    }

    /// Appends a launch of any shape.
    pub fn push_shaped<A: KernelArgs>(
        &mut self,
        label: impl Into<String>,
        layer: Option<u32>,
        kernel: &'static KernelSpec,
        shape: LaunchShape,
        args: &A,
    ) {
        let label = label.into();
        assert_eq!(kernel.args.name, A::LAYOUT.name, "{label}: {} does not take these arguments", kernel.symbol);
        let dims = shape.grid.iter().chain(&shape.workgroup);
        assert!(dims.clone().all(|&dim| dim > 0), "{label}: empty launch {shape:?}");
        self.ops.push(Op { label, layer, kernel, shape, args: SmallVec::from_slice(bytes_of(args)) });
    }
}

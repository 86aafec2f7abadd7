//! Chains as data: the ordered ops of a decode step or a prefill, with symbolic pointers. No device in here.
//!
//! A chain is built once per graph key, lowered against an arena's addresses, and then either launched op by op (eager) or
//! recorded. What reads and writes what follows from the argument structs' layouts.

pub mod attention;
mod family;
mod msa;
mod step;

pub use family::{GraphKey, StepChains};
pub use msa::MsaChains;
pub use step::{StepBuffers, StepLayout, pointer};

use bytemuck::bytes_of;
use smallvec::SmallVec;

use crate::hal::LaunchShape;
use crate::kernels::{KernelArgs, KernelSpec};

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

    /// Appends a launch. Panics if `A` is not the kernel's argument struct or a dimension is zero: that is a bug of the chain.
    pub fn push<A: KernelArgs>(
        &mut self,
        label: impl Into<String>,
        layer: Option<u32>,
        kernel: &'static KernelSpec,
        grid: [u32; 3],
        workgroup: u32,
        lds_bytes: u32,
        args: &A,
    ) {
        let label = label.into();
        assert_eq!(kernel.args.name, A::LAYOUT.name, "{label}: {} does not take these arguments", kernel.symbol);
        assert!(grid.iter().all(|&dim| dim > 0) && workgroup > 0, "{label}: empty launch {grid:?}");
        let shape = LaunchShape { grid, workgroup: [workgroup, 1, 1], lds_bytes };
        self.ops.push(Op { label, layer, kernel, shape, args: SmallVec::from_slice(bytes_of(args)) });
    }
}

//! A correct setup to damage: nano chains on the CPU device behind a liar, one capture size, sequences with cached tokens.

use std::sync::Arc;

use capstan::arena::BufferId;
use capstan::chain::StepChains;
use capstan::config::{CaptureSizes, Limits};
use capstan::hal::{self, Device, KernelNode, Node, NodeId};
use capstan::kernels::{Ptr, registry};
use capstan::runtime::{Executor, Sampling, SequenceId, SequenceStep};
use capstan::{Error, Result};

use super::damaged::Damaged;
use super::liar::{Liar, Lies};
use crate::serving;

/// Rows of the one capture size.
pub const ROWS: u32 = 4;

/// One way to damage the setup.
pub struct Fault {
    /// What is done to it.
    pub name: &'static str,
    /// Invariant, or kind of error, that must catch it.
    pub caught_by: &'static str,
    /// What the message must name.
    pub names: &'static [&'static str],
    /// Does it; gives what caught it.
    pub run: fn() -> Result<()>,
}

pub fn limits() -> Limits {
    Limits { max_num_seqs: ROWS, max_num_batched_tokens: 64, capture: CaptureSizes::List(vec![ROWS]), ..serving::limits() }
}

/// The undamaged chains: 12 nodes.
pub fn msa() -> Arc<dyn StepChains> {
    serving::msa(&limits())
}

/// An executor on a liar, and its sequences.
pub struct Rig {
    pub liar: Liar,
    pub executor: Executor,
    pub sequences: Vec<(SequenceId, u32)>,
    next_block: u32,
}

impl Rig {
    pub fn new(chains: Arc<dyn StepChains>) -> Result<Rig> {
        Rig::on("cpu", chains)
    }

    /// On another device.
    pub fn on(device: &str, chains: Arc<dyn StepChains>) -> Result<Rig> {
        let liar = Liar::new(hal::open(device)?);
        let device: Arc<dyn Device> = Arc::new(liar.clone());
        Ok(Rig { executor: Executor::new(&device, chains)?, liar, sequences: Vec::new(), next_block: 9 })
    }

    /// Captured, with one sequence of 20 tokens.
    pub fn captured(chains: Arc<dyn StepChains>) -> Result<Rig> {
        let mut rig = Rig::new(chains)?;
        rig.executor.capture(|_| ())?;
        rig.open(20)?;
        Ok(rig)
    }

    /// The same of chains with a mistake.
    pub fn of(damaged: Damaged) -> Result<Rig> {
        Rig::captured(Arc::new(damaged))
    }

    /// Opens a sequence whose first `kv_len` tokens are cached.
    pub fn open(&mut self, kv_len: u32) -> Result<usize> {
        let id = self.executor.open_sequence()?;
        let block_size = self.executor.chains().step_layout().block_size;
        let blocks: Vec<u32> = (0..kv_len.div_ceil(block_size) + 1).map(|at| self.next_block + at).collect();
        self.next_block += blocks.len() as u32;
        self.executor.grant_blocks(id, &blocks)?;
        self.executor.assume_cached(id, kv_len)?;
        self.sequences.push((id, kv_len));
        Ok(self.sequences.len() - 1)
    }

    /// One decode step of all sequences, waited for.
    pub fn decode(&mut self) -> Result<Vec<i32>> {
        let batch: Vec<SequenceStep<'_>> = self
            .sequences
            .iter_mut()
            .map(|(id, len)| {
                *len += 1;
                SequenceStep { sequence: *id, tokens: &[5], kv_len: *len, sampling: Sampling::GREEDY }
            })
            .collect();
        let ticket = self.executor.decode(&batch)?;
        Ok(self.executor.wait(ticket)?.tokens.to_vec())
    }

    /// Tells these lies and audits.
    pub fn audit_under(self, lies: Lies) -> Result<()> {
        self.liar.lie(lies);
        self.executor.audit()
    }

    /// A buffer by name.
    pub fn buffer(&self, name: &str) -> BufferId {
        self.executor.arena().plan().find(name).unwrap_or_else(|| panic!("no buffer {name}"))
    }

    /// Address of a buffer by name.
    pub fn address(&self, name: &str) -> u64 {
        self.executor.arena().ptr(self.buffer(name)).0
    }

    /// Size of a buffer by name.
    pub fn bytes(&self, name: &str) -> u64 {
        self.executor.arena().plan().buffer(self.buffer(name)).bytes
    }
}

/// Captures, then audits while node `at` reads back changed.
pub fn audit_with(at: u32, change: impl Fn(&Rig, &mut KernelNode) + Send + Sync + 'static) -> Result<()> {
    let rig = Rig::captured(msa())?;
    // The change is made once, against the true node, so that the lie holds no reference to the rig.
    let Node::Kernel(mut lie) = rig.executor.graphs().iter().next().unwrap().graph().node(NodeId(at))? else {
        return Err(Error::state("not a kernel"));
    };
    change(&rig, &mut lie);
    rig.audit_under(Lies {
        node: Some(Arc::new(move |truth, id| if id.0 == at { Ok(Node::Kernel(lie.clone())) } else { truth.node(id) })),
        ..Lies::default()
    })
}

/// Points a field somewhere else.
pub fn point(node: &mut KernelNode, field: &str, address: u64) {
    let kernel = registry::find(&node.symbol).unwrap();
    kernel.args.field(field).unwrap_or_else(|| panic!("no field {field}")).set_pointer(&mut node.args, Ptr(address));
}

/// Where a field points.
pub fn pointer(node: &KernelNode, field: &str) -> u64 {
    registry::find(&node.symbol).unwrap().args.field(field).unwrap().pointer(&node.args).0
}

/// Changes a 32-bit scalar.
pub fn scalar(node: &mut KernelNode, field: &str, change: impl Fn(u32) -> u32) {
    let at = registry::find(&node.symbol).unwrap().args.field(field).unwrap_or_else(|| panic!("no field {field}")).offset;
    let value: u32 = bytemuck::pod_read_unaligned(&node.args[at..at + 4]);
    node.args[at..at + 4].copy_from_slice(&change(value).to_ne_bytes());
}

//! Dumps: a captured graph in names and offsets, the same for every device and run.
//!
//! [`Dump::of`] reads every node back from the device's graph and turns each pointer into buffer + offset through the arena's
//! ledger. A dump holds no address, time or path, so that two can be compared and one can be kept (`graphs/`). Writers: a line
//! a node ([`Dump::text`]), JSON ([`Dump::json`], `docs/dump-schema.md`), DOT ([`Dump::dot`]), a page for a
//! browser ([`Dump::html`]). [`Dump::trace`] and [`tensors`] write what nodes took and left behind.

mod diff;
mod dot;
mod html;
pub mod tensors;
mod text;
pub mod trace;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::arena::{ArenaPlan, PlannedBuffer};
use crate::capture::CapturedGraph;
use crate::chain::GraphKey;
use crate::error::{Error, Result};
use crate::hal::{DevicePtr, LaunchShape, Node, NodeId};
use crate::kernels::{Access, FieldKind, Ptr};

pub use diff::{Cause, Change, ChangeKind, Diff, Verdict};

/// Version of the JSON schema; it changes when a key does.
pub const SCHEMA: u32 = 1;

/// A captured graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dump {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The chain it was recorded from.
    pub chain: String,
    /// Every host value that shaped it.
    pub key: GraphKey,
    /// Rows it pads to.
    pub rows: u32,
    /// The buffers its nodes touch, in the order of the plan.
    pub buffers: Vec<DumpBuffer>,
    /// Its nodes, in recording order.
    pub nodes: Vec<DumpNode>,
    /// Node numbers (before, after).
    pub edges: Vec<(u32, u32)>,
    /// What depends on the device and the run; absent unless it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceSection>,
}

/// The device a graph was measured on: the one part of a dump that differs between devices and runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceSection {
    /// The API it speaks.
    pub platform: String,
    /// Its name.
    pub name: String,
    /// Target of its compiler.
    pub arch: String,
    /// Version of its driver.
    pub driver: String,
    /// One a node.
    pub nodes: Vec<NodeTime>,
}

/// What one node took, launched alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeTime {
    /// Median time, microseconds.
    pub us: f64,
    /// Bytes it declares to read and write: an upper bound of what it moves, from its extents.
    pub bytes: u64,
}

/// A buffer of the plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DumpBuffer {
    /// Its number in the plan: what [`DumpValue::Pointer`] names.
    pub id: u32,
    /// Name, type, shape, place and reason.
    #[serde(flatten)]
    pub planned: PlannedBuffer,
}

/// A kernel node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DumpNode {
    /// The chain's name for it.
    pub label: String,
    /// The layer it belongs to.
    pub layer: Option<u32>,
    /// Its kernel.
    pub kernel: String,
    /// Grid, workgroup and LDS.
    #[serde(flatten)]
    pub shape: LaunchShape,
    /// Its arguments, in the order of the struct.
    pub args: Vec<DumpArg>,
}

/// A field of a node's argument struct.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DumpArg {
    /// The field.
    pub name: Cow<'static, str>,
    /// What it holds.
    #[serde(flatten)]
    pub value: DumpValue,
}

/// What a field holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DumpValue {
    /// A pointer into a buffer.
    Pointer {
        /// The buffer's name.
        buffer: String,
        /// Byte offset in it.
        offset: u64,
        /// Bytes the kernel declares behind it.
        extent: u64,
        /// What the kernel does there.
        access: Access,
    },
    /// A pointer that is not used.
    Null {
        /// Always null.
        buffer: (),
    },
    /// A number.
    Scalar {
        /// As text, in full precision.
        value: String,
    },
}

impl Dump {
    /// Reads a graph back from its device.
    ///
    /// Errors: a node that is no declared kernel, or a pointer into no buffer (ADDR-1): such a graph is not dumped but audited.
    pub fn of(graph: &CapturedGraph) -> Result<Dump> {
        let recorded = graph.graph();
        let mut nodes = Vec::new();
        let mut touched = vec![false; graph.arena().plan().buffers.len()];
        for at in 0..recorded.node_count()? as u32 {
            let label = graph.chain().ops.get(at as usize);
            match recorded.node(NodeId(at))? {
                Node::Kernel(node) => {
                    let op = label.ok_or_else(|| undeclared(at, &node.symbol))?;
                    let kernel = graph.modules().kernel(node.function).ok_or_else(|| undeclared(at, &node.symbol))?;
                    let args = kernel.args.fields.iter().map(|field| {
                        let value = match field.kind {
                            FieldKind::Pointer { access, .. } => {
                                let (pointer, extent) = (field.pointer(&node.args), field.extent_bytes(&node.args));
                                pointer_value(graph, pointer, extent, access, &mut touched).ok_or_else(|| {
                                    Error::invariant("ADDR-1", format!("{}.{}: points into no buffer", op.label, field.name))
                                        .help("capture again; the audit of the graph says more")
                                })?
                            }
                            FieldKind::Scalar(_) => {
                                DumpValue::Scalar { value: field.scalar_text(&node.args).unwrap_or_default() }
                            }
                        };
                        Ok(DumpArg { name: field.name.into(), value })
                    });
                    nodes.push(DumpNode {
                        label: op.label.to_string(),
                        layer: op.layer,
                        kernel: kernel.symbol.to_string(),
                        shape: node.shape,
                        args: args.collect::<Result<_>>()?,
                    });
                }
                other => return Err(undeclared(at, &format!("{other:?}"))),
            }
        }
        let edges = recorded.edges()?.into_iter().map(|(before, after)| (before.0, after.0)).collect();
        let buffers = buffers(graph.arena().plan(), &touched);
        let (chain, key) = (graph.chain().name.to_string(), *graph.key());
        Ok(Dump { schema: SCHEMA, chain, key, rows: key.rows(), buffers, nodes, edges, device: None })
    }

    /// Reads a dump back from its JSON; `name` is what messages call it.
    ///
    /// Errors: no JSON of [`SCHEMA`].
    pub fn read(json: &str, name: &str) -> Result<Dump> {
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        let wrong = |why: String| {
            Error::input(format!("{name}: {why}")).help("write dumps with capstan dump --format json, both with this version")
        };
        let version: Version = serde_json::from_str(json).map_err(|error| wrong(format!("no dump: {error}")))?;
        if version.schema != SCHEMA {
            return Err(wrong(format!("schema {}, this version reads {SCHEMA}", version.schema)));
        }
        serde_json::from_str(json).map_err(|error| wrong(error.to_string()))
    }

    /// JSON, indented.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("invariant: a dump has string keys")
    }
}

fn undeclared(at: u32, what: &str) -> Error {
    Error::invariant("CAP-2", format!("node {at} is {what}, which is no op of the chain"))
        .help("dump graphs of straight chains of declared kernels")
}

fn pointer_value(graph: &CapturedGraph, pointer: Ptr, extent: u64, access: Access, touched: &mut [bool]) -> Option<DumpValue> {
    if pointer == Ptr::NULL {
        return (extent == 0).then_some(DumpValue::Null { buffer: () });
    }
    let (id, offset) = graph.arena().ledger().resolve(DevicePtr(pointer.0), extent)?;
    touched[id.0 as usize] = true;
    let buffer = graph.arena().plan().buffer(id).spec.name.to_string();
    Some(DumpValue::Pointer { buffer, offset, extent, access })
}

fn buffers(plan: &ArenaPlan, touched: &[bool]) -> Vec<DumpBuffer> {
    let used = plan.buffers.iter().enumerate().filter(|&(id, _)| touched[id]);
    used.map(|(id, planned)| DumpBuffer { id: id as u32, planned: planned.clone() }).collect()
}

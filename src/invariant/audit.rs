//! The audit of one graph: every pointer of every node, every launch, every edge, read back from the device.
//!
//! Second check site of ADDR-1 to ADDR-4, CAP-1 and CAP-2 (the first is at lowering and capture); RACE-1 is in
//! [`race`](super::race). Works for any declared kernel, a user's like the crate's own; code nobody declared is refused.

use super::coverage::covered;
use super::nodes::{ReadBack, buffer_name, launch_shape, place, value};
use super::race::{Reach, Touch, races};
use super::{Finding, Report};
use crate::arena::{Arena, Sealed};
use crate::capture::{CapturedGraph, Launch, Modules};
use crate::chain::{Chain, Op, Order};
use crate::hal::{DevicePtr, Graph, KernelNode, NodeId};
use crate::kernels::{Field, FieldKind, KernelSpec, Ptr};

/// What a graph is held against.
#[derive(Clone, Copy, Debug)]
pub struct Audit<'a> {
    /// The device's graph.
    pub graph: &'a dyn Graph,
    /// The chain it was recorded from.
    pub chain: &'a Chain,
    /// The lowered chain.
    pub launches: &'a [Launch],
    /// The declared kernels.
    pub modules: &'a Modules,
    /// The memory it may touch.
    pub arena: &'a Arena<Sealed>,
}

/// Audits a captured graph; the report is about its key.
pub fn audit(graph: &CapturedGraph) -> Report {
    let mut report = Report::new(format!("graph {}", graph.key()));
    let audit = Audit {
        graph: &**graph.graph(),
        chain: graph.chain(),
        launches: graph.launches(),
        modules: graph.modules(),
        arena: graph.arena(),
    };
    audit.run(&mut report);
    if let Err(error) = graph.check_fingerprint() {
        let help = "a buffer moved or was freed after capture: capture again, and find who touched the sealed arena";
        report.push(Finding::new("ADDR-2", "the ledger of the capture", error.message(), help));
    }
    report
}

impl Audit<'_> {
    /// Runs every check and adds what it finds.
    pub fn run(&self, report: &mut Report) {
        let Some(read) = ReadBack::of(self.graph, report) else { return };
        let mut touches = Vec::with_capacity(read.kernels.len() * 8);
        for (at, (id, node)) in read.kernels.iter().enumerate() {
            self.pointers(at, *id, node, &mut touches, report);
        }
        self.recorded(&read, report);
        let Some(reach) = Reach::of(read.count, &read.edges) else {
            let help = "do not replay this graph; report the device and driver version";
            report.push(Finding::new("CAP-2", "edges that lead forward", "edges that run in a circle or to no node", help));
            return;
        };
        self.edges(&read, &reach, report);
        covered(&touches, |at| self.label(&read, at), self.arena, report);
        if !read.is_line() {
            races(&touches, &reach, |at| self.label(&read, at), self.arena, report);
        }
    }

    /// ADDR-1: each pointer, with the extent its kernel declares, lies inside one buffer.
    fn pointers(&self, at: usize, id: NodeId, node: &KernelNode, touches: &mut Vec<Touch>, report: &mut Report) {
        let label = self.chain.ops.get(at).map_or("", |op| &*op.label);
        let Some(kernel) = self.modules.kernel(node.function).filter(|kernel| kernel.args.bytes == node.args.len()) else {
            let found = format!("kernel {} with {} bytes of arguments", node.symbol, node.args.len());
            let help = "list the kernel's KernelSpec among the chain's kernels(), so that its arguments are declared and checked";
            report.push(Finding::new("ADDR-1", "a declared kernel", found, help).at(id.0, label));
            return;
        };
        for field in kernel.args.pointers() {
            let (pointer, extent) = (field.pointer(&node.args), field.extent_bytes(&node.args));
            if pointer == Ptr::NULL && extent == 0 {
                continue;
            }
            match self.arena.ledger().resolve(DevicePtr(pointer.0), extent) {
                Some((buffer, offset)) => {
                    if let FieldKind::Pointer { access, .. } = field.kind
                        && extent > 0
                    {
                        touches.push(Touch { node: id, field: field.name, access, buffer, from: offset, to: offset + extent });
                    }
                }
                None => report.push(self.outside(pointer, extent).at(id.0, label).field(field.name)),
            }
        }
    }

    fn outside(&self, pointer: Ptr, extent: u64) -> Finding {
        let help =
            "the node points at memory that is not its buffer: it was moved, freed, or the extent is not this capture size's";
        let expected = format!("{extent} bytes inside one buffer");
        let Some((buffer, offset)) = self.arena.ledger().resolve(DevicePtr(pointer.0), 0) else {
            return Finding::new("ADDR-1", expected, place(self.arena, pointer), help);
        };
        let planned = self.arena.plan().buffer(buffer);
        let found = format!("{} bytes from offset {offset} on", planned.bytes - offset);
        Finding::new("ADDR-1", expected, found, help).buffer(&*planned.spec.name)
    }

    /// CAP-2 and ADDR-4: the kernels are the chain's ops, one to one, launch shapes and arguments included.
    fn recorded(&self, read: &ReadBack, report: &mut Report) {
        let help = "do not replay this graph; report the device and driver version";
        for ((op, launch), (id, node)) in self.chain.ops.iter().zip(self.launches).zip(&read.kernels) {
            if node.function != launch.function || node.symbol != op.kernel.symbol {
                let (expected, found) = (format!("kernel {}", op.kernel.symbol), format!("kernel {}", node.symbol));
                report.push(Finding::new("CAP-2", expected, found, help).at(id.0, &op.label));
                // Behind a node too many or too few, nothing lines up: the first is the culprit.
                break;
            }
            if node.shape != launch.shape {
                let (expected, found) = (launch_shape(&launch.shape), launch_shape(&node.shape));
                report.push(Finding::new("CAP-2", expected, found, help).at(id.0, &op.label));
            }
            if node.args != launch.args.as_slice() {
                self.arguments(*id, op, launch, node, report);
            }
        }
        if read.kernels.len() != self.launches.len() {
            let (expected, found) = (format!("{} kernels", self.launches.len()), format!("{} kernels", read.kernels.len()));
            report.push(Finding::new("CAP-2", expected, found, help));
        }
    }

    fn arguments(&self, id: NodeId, op: &Op, launch: &Launch, node: &KernelNode, report: &mut Report) {
        let help = "the driver holds another value than was recorded: do not replay this graph";
        if node.args.len() != launch.args.len() {
            let (expected, found) = (format!("{} bytes", launch.args.len()), format!("{} bytes", node.args.len()));
            report.push(Finding::new("ADDR-4", expected, found, help).at(id.0, &op.label));
            return;
        }
        for field in differing(op.kernel, &launch.args, &node.args) {
            let (expected, found) = (value(self.arena, field, &launch.args), value(self.arena, field, &node.args));
            let mut finding = Finding::new("ADDR-4", expected, found, help).at(id.0, &op.label).field(field.name);
            if matches!(field.kind, FieldKind::Pointer { .. }) {
                finding.buffer = buffer_name(self.arena, self.arena.ledger(), field.pointer(&launch.args));
            }
            report.push(finding);
        }
    }

    /// CAP-2: a straight chain is a line, a chain with branches has every order it asked for.
    fn edges(&self, read: &ReadBack, reach: &Reach, report: &mut Report) {
        let help = "the graph orders its nodes in another way than the chain: do not replay it";
        match &self.chain.order {
            Order::Straight => {
                if !read.is_line() {
                    let expected = format!("a line of {} nodes", self.launches.len());
                    let found = format!("{} nodes with {} edges that are no line", read.count, read.edges.len());
                    report.push(Finding::new("CAP-2", expected, found, help));
                }
            }
            Order::Edges(edges) => {
                for &(before, after) in edges {
                    let (Some((from, _)), Some((to, _))) = (read.kernels.get(before as usize), read.kernels.get(after as usize))
                    else {
                        continue;
                    };
                    if !reach.ordered(*from, *to) {
                        let label = &*self.chain.ops[after as usize].label;
                        let expected = format!("an edge from {}", self.chain.ops[before as usize].label);
                        report.push(Finding::new("CAP-2", expected, "none", help).at(to.0, label));
                    }
                }
            }
        }
    }

    fn label(&self, read: &ReadBack, id: NodeId) -> String {
        let at = read.kernels.iter().position(|(other, _)| *other == id);
        at.and_then(|at| self.chain.ops.get(at)).map_or_else(String::new, |op| op.label.clone())
    }
}

/// The fields in which two argument structs of one kernel differ.
pub(super) fn differing<'a>(kernel: &'a KernelSpec, a: &'a [u8], b: &'a [u8]) -> impl Iterator<Item = &'static Field> + 'a {
    let fields = kernel.args.fields;
    (0..fields.len())
        .map(move |at| (&fields[at], fields.get(at + 1).map_or(kernel.args.bytes, |next| next.offset)))
        .filter_map(move |(field, end)| (a.get(field.offset..end) != b.get(field.offset..end)).then_some(field))
}

//! Nodes and edges: aligned by label, then compared field by field.

use std::collections::HashSet;

use similar::{Algorithm, DiffOp, capture_diff_slices};

use super::rows::Follows;
use super::{Cause, Causes, Change, ChangeKind};
use crate::dump::text::value;
use crate::dump::{Dump, DumpArg, DumpNode, DumpValue};

pub(super) fn compare(a: &Dump, b: &Dump, may: &Causes, changes: &mut Vec<Change>) {
    let mut follows = may.rows.map(Follows::new);
    let pairs = align(a, b);
    for pair in &pairs {
        match pair {
            (Some(old), Some(new)) => {
                let mut fields = Fields { at: &old.label, kernel: &old.kernel, may, follows: &mut follows, changes };
                fields.node(old, new);
            }
            (Some(old), None) => changes.push(whole(ChangeKind::NodeGone, old)),
            (None, Some(new)) => changes.push(whole(ChangeKind::NodeAdded, new)),
            (None, None) => {}
        }
    }
    edges(a, b, changes);
}

type Pair<'a> = (Option<&'a DumpNode>, Option<&'a DumpNode>);

fn align<'a>(a: &'a Dump, b: &'a Dump) -> Vec<Pair<'a>> {
    let labels = |dump: &'a Dump| dump.nodes.iter().map(|node| &*node.label).collect::<Vec<&str>>();
    let mut pairs = Vec::new();
    for op in capture_diff_slices(Algorithm::Myers, &labels(a), &labels(b)) {
        let (old, new) = (a.nodes[op.old_range()].iter(), b.nodes[op.new_range()].iter());
        match op {
            DiffOp::Equal { .. } => pairs.extend(old.zip(new).map(|(old, new)| (Some(old), Some(new)))),
            _ => {
                pairs.extend(old.map(|old| (Some(old), None)));
                pairs.extend(new.map(|new| (None, Some(new))));
            }
        }
    }
    pairs
}

fn whole(kind: ChangeKind, node: &DumpNode) -> Change {
    let kernel = node.kernel.clone();
    let (a, b) = if kind == ChangeKind::NodeGone { (kernel, String::new()) } else { (String::new(), kernel) };
    Change { kind, at: node.label.clone(), field: String::new(), a, b, cause: None }
}

/// What a field's two numbers have to do with the keys.
enum Why {
    /// Nothing: they have to be equal.
    Open,
    /// They follow what differs, if they differ.
    Follows(Cause),
    /// They should follow the rows and do not.
    Astray,
}

/// The fields of one aligned pair.
struct Fields<'a, 'b> {
    at: &'a str,
    kernel: &'a str,
    may: &'b Causes,
    follows: &'b mut Option<Follows<'a>>,
    changes: &'b mut Vec<Change>,
}

impl Fields<'_, '_> {
    fn node(&mut self, old: &DumpNode, new: &DumpNode) {
        if old.kernel != new.kernel {
            self.push(ChangeKind::Launch, "kernel", old.kernel.clone(), new.kernel.clone(), None);
        }
        if old.layer != new.layer {
            self.push(ChangeKind::Launch, "layer", format!("{:?}", old.layer), format!("{:?}", new.layer), None);
        }
        let shapes = [("grid", old.shape.grid, new.shape.grid), ("workgroup", old.shape.workgroup, new.shape.workgroup)];
        for (field, was, is) in shapes {
            // Lanes of a workgroup follow nothing.
            let why = if field == "grid" { self.numbers(field, &was.map(u64::from), &is.map(u64::from)) } else { Why::Open };
            let [was, is] = [was, is].map(|[x, y, z]| format!("{x}x{y}x{z}"));
            self.changed(ChangeKind::Launch, field, was, is, why);
        }
        let lds = [old, new].map(|node| node.shape.lds_bytes);
        let why = self.numbers("lds", &[lds[0].into()], &[lds[1].into()]);
        self.changed(ChangeKind::Launch, "lds", lds[0].to_string(), lds[1].to_string(), why);
        for pair in pair_args(&old.args, &new.args) {
            self.argument(pair);
        }
    }

    fn argument(&mut self, (old, new): (Option<&DumpArg>, Option<&DumpArg>)) {
        let text = |arg: Option<&DumpArg>| arg.map_or(String::new(), |arg| value(&arg.value));
        let name = old.or(new).map_or("", |arg| &arg.name).to_string();
        let why = match (old.map(|arg| &arg.value), new.map(|arg| &arg.value)) {
            (Some(DumpValue::Scalar { value: was }), Some(DumpValue::Scalar { value: is })) => {
                let rank = |(a, b): (u32, u32)| name == "rank" && *was == a.to_string() && *is == b.to_string();
                match (was.parse(), is.parse()) {
                    _ if self.may.ranks.is_some_and(rank) => Why::Follows(Cause::Rank),
                    (Ok(a), Ok(b)) => self.numbers(&name, &[a], &[b]),
                    _ => Why::Open,
                }
            }
            (
                Some(DumpValue::Pointer { buffer: was, offset: from, extent: a, access: does }),
                Some(DumpValue::Pointer { buffer: is, offset: to, extent: b, access: now }),
            ) if (from, does) == (to, now) && was == is => self.numbers(&name, &[*a], &[*b]),
            (
                Some(DumpValue::Pointer { buffer: was, offset: from, extent: a, access: does }),
                Some(DumpValue::Pointer { buffer: is, offset: to, extent: b, access: now }),
            ) if (from, does) == (to, now) && self.may.renamed(was).as_ref() == Some(is) => {
                match self.numbers(&name, &[*a], &[*b]) {
                    Why::Astray => Why::Astray,
                    _ if a != b && self.may.rows.is_none() => Why::Open,
                    _ => Why::Follows(Cause::Rank),
                }
            }
            _ => Why::Open,
        };
        self.changed(ChangeKind::Argument, &name, text(old), text(new), why);
    }

    /// Whether the rows explain every number.
    fn numbers(&mut self, field: &str, a: &[u64], b: &[u64]) -> Why {
        let Some(follows) = self.follows else { return Why::Open };
        // Each is shown even if one before was not allowed: what they agree on is remembered.
        let all = a.iter().zip(b).enumerate().map(|(axis, (&a, &b))| {
            let name = if axis == 0 { field.to_string() } else { format!("{field}.{axis}") };
            follows.allows(self.kernel, &name, a, b)
        });
        if all.fold(true, |all, one| all & one) { Why::Follows(Cause::Rows) } else { Why::Astray }
    }

    /// A field that differs, or that should differ and does not.
    fn changed(&mut self, kind: ChangeKind, field: &str, a: String, b: String, why: Why) {
        match why {
            Why::Astray => self.push(kind, field, a, b, None),
            _ if a == b => {}
            Why::Open => self.push(kind, field, a, b, None),
            Why::Follows(cause) => self.push(kind, field, a, b, Some(cause)),
        }
    }

    fn push(&mut self, kind: ChangeKind, field: &str, a: String, b: String, cause: Option<Cause>) {
        self.changes.push(Change { kind, at: self.at.into(), field: field.into(), a, b, cause });
    }
}

/// Arguments by name, in the order of the first; what only the second has comes last.
fn pair_args<'a>(a: &'a [DumpArg], b: &'a [DumpArg]) -> Vec<(Option<&'a DumpArg>, Option<&'a DumpArg>)> {
    let find = |args: &'a [DumpArg], name: &str| args.iter().find(|arg| arg.name == name);
    let of_a = a.iter().map(|old| (Some(old), find(b, &old.name)));
    of_a.chain(b.iter().filter(|new| find(a, &new.name).is_none()).map(|new| (None, Some(new)))).collect()
}

fn edges(a: &Dump, b: &Dump, changes: &mut Vec<Change>) {
    let named = |dump: &Dump| -> Vec<(String, String)> {
        let label = |at: u32| dump.nodes.get(at as usize).map_or_else(|| format!("node {at}"), |node| node.label.clone());
        dump.edges.iter().map(|&(before, after)| (label(before), label(after))).collect()
    };
    let (old, new) = (named(a), named(b));
    let mut only = |kind, from: &[(String, String)], other: &[(String, String)]| {
        let other: HashSet<_> = other.iter().collect();
        for (before, after) in from.iter().filter(|edge| !other.contains(edge)) {
            let (at, text) = (before.clone(), format!("-> {after}"));
            let (a, b) = if kind == ChangeKind::EdgeGone { (text, String::new()) } else { (String::new(), text) };
            changes.push(Change { kind, at, field: String::new(), a, b, cause: None });
        }
    };
    only(ChangeKind::EdgeGone, &old, &new);
    only(ChangeKind::EdgeAdded, &new, &old);
}

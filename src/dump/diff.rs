//! Compares two dumps: nodes, launch shapes, arguments, buffers.
//!
//! Nodes are aligned by their labels (longest common subsequence), then compared field by field. A change is *explained* where
//! the keys differ in rows or rank alone and the numbers follow; anything else is a real difference. Numbers that follow the
//! rows grow with them, at most in proportion (`ceil` and padding to whole tiles allowed), `rows` and `sequences` exactly in
//! proportion; and where two nodes of one kernel agree on a field in one dump, they agree on it in the other.

mod buffers;
mod nodes;
mod rows;

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use super::{DeviceSection, Dump};

/// What may differ between two dumps without a difference in what they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The capture size.
    Rows,
    /// The rank in a group of the same size.
    Rank,
    /// Device and times.
    Device,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cause::Rows => "rows",
            Cause::Rank => "rank",
            Cause::Device => "the device section",
        })
    }
}

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// A host value that shaped the capture.
    Key,
    /// A node only the second has.
    NodeAdded,
    /// A node only the first has.
    NodeGone,
    /// Another kernel, grid, workgroup or LDS.
    Launch,
    /// Another argument.
    Argument,
    /// An edge only the second has.
    EdgeAdded,
    /// An edge only the first has.
    EdgeGone,
    /// A buffer only the second touches.
    BufferAdded,
    /// A buffer only the first touches.
    BufferGone,
    /// Another place in the slab.
    BufferMoved,
    /// Another size, type or shape.
    BufferResized,
    /// Another device, driver or time.
    Device,
}

impl fmt::Display for ChangeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ChangeKind::Key => "key",
            ChangeKind::NodeAdded => "node added",
            ChangeKind::NodeGone => "node gone",
            ChangeKind::Launch => "launch shape",
            ChangeKind::Argument => "argument",
            ChangeKind::EdgeAdded => "edge added",
            ChangeKind::EdgeGone => "edge gone",
            ChangeKind::BufferAdded => "buffer added",
            ChangeKind::BufferGone => "buffer gone",
            ChangeKind::BufferMoved => "buffer moved",
            ChangeKind::BufferResized => "buffer resized",
            ChangeKind::Device => "device",
        })
    }
}

/// One change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// What changed.
    pub kind: ChangeKind,
    /// The node's label or the buffer's name.
    pub at: String,
    /// The field, where one changed.
    pub field: String,
    /// In the first dump; empty where it is not there.
    pub a: String,
    /// In the second.
    pub b: String,
    /// Why this is no real difference; `None` if it is one.
    pub cause: Option<Cause>,
}

/// Every change between two dumps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Diff {
    /// In the order of the first dump: key, nodes, edges, buffers, device.
    pub changes: Vec<Change>,
}

/// How two dumps compare.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// In nothing.
    Equal,
    /// Only in what these explain.
    SameBut(BTreeSet<Cause>),
    /// In earnest.
    Different,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Equal => f.write_str("equal"),
            Verdict::Different => f.write_str("different"),
            Verdict::SameBut(causes) => {
                let causes: Vec<String> = causes.iter().map(Cause::to_string).collect();
                write!(f, "same but for {}", causes.join(" and "))
            }
        }
    }
}

impl Diff {
    /// Compares `a` with `b`.
    pub fn of(a: &Dump, b: &Dump) -> Diff {
        let mut changes = key(a, b);
        let may = Causes::of(a, b);
        nodes::compare(a, b, &may, &mut changes);
        buffers::compare(a, b, &may, &mut changes);
        device(a.device.as_ref(), b.device.as_ref(), &mut changes);
        Diff { changes }
    }

    /// What all changes come to.
    pub fn verdict(&self) -> Verdict {
        match self.changes.iter().map(|change| change.cause).collect::<Option<BTreeSet<Cause>>>() {
            None => Verdict::Different,
            Some(causes) if causes.is_empty() => Verdict::Equal,
            Some(causes) => Verdict::SameBut(causes),
        }
    }
}

/// What the keys allow to differ.
struct Causes {
    /// Rows of both, where they differ.
    rows: Option<(u32, u32)>,
    /// Ranks of both, where they differ.
    ranks: Option<(u32, u32)>,
}

impl Causes {
    fn of(a: &Dump, b: &Dump) -> Causes {
        let differ = |a: u32, b: u32| (a != b).then_some((a, b));
        Causes { rows: differ(a.key.rows(), b.key.rows()), ranks: differ(a.key.rank, b.key.rank) }
    }

    /// The same from the second to the first.
    fn back(&self) -> Causes {
        Causes { rows: self.rows.map(|(a, b)| (b, a)), ranks: self.ranks.map(|(a, b)| (b, a)) }
    }

    /// The name that rank `b` has for what rank `a` calls `name`, if the ranks differ and so do the names: each calls its own
    /// buffer `words` and the other's `peer1/words`.
    fn renamed(&self, name: &str) -> Option<String> {
        let (a, b) = self.ranks?;
        let other = match name.strip_prefix(&format!("peer{b}/")) {
            Some(own) => own.to_string(),
            None if name.contains('/') => return None,
            None => format!("peer{a}/{name}"),
        };
        Some(other)
    }
}

fn key(a: &Dump, b: &Dump) -> Vec<Change> {
    let (key_a, key_b) = (&a.key, &b.key);
    let fields = [
        ("chain", a.chain.clone(), b.chain.clone(), None),
        ("query_len", key_a.query_len.to_string(), key_b.query_len.to_string(), None),
        ("sequences", key_a.sequences.to_string(), key_b.sequences.to_string(), Some(Cause::Rows)),
        ("kv_len_max", key_a.kv_len_max.to_string(), key_b.kv_len_max.to_string(), None),
        ("rank", key_a.rank.to_string(), key_b.rank.to_string(), Some(Cause::Rank)),
        ("world", key_a.world.to_string(), key_b.world.to_string(), None),
        // What the file says of itself: equal to the key unless it was edited.
        ("rows", a.rows.to_string(), b.rows.to_string(), Some(Cause::Rows).filter(|_| is_sound(a) && is_sound(b))),
    ];
    let changed = fields.into_iter().filter(|(_, a, b, _)| a != b);
    let change = |(field, a, b, cause): (&str, String, String, _)| Change {
        kind: ChangeKind::Key,
        at: "graph".into(),
        field: field.into(),
        a,
        b,
        cause,
    };
    changed.map(change).collect()
}

fn is_sound(dump: &Dump) -> bool {
    dump.rows == dump.key.rows()
}

fn device(a: Option<&DeviceSection>, b: Option<&DeviceSection>, changes: &mut Vec<Change>) {
    if a == b {
        return;
    }
    let text = |section: Option<&DeviceSection>| match section {
        None => ["none", "", "", "", ""].map(String::from),
        Some(device) => {
            let total: f64 = device.nodes.iter().map(|node| node.us).sum();
            let us = if device.nodes.is_empty() { String::new() } else { format!("{total:.1} us in all nodes") };
            [device.platform.clone(), device.name.clone(), device.arch.clone(), device.driver.clone(), us]
        }
    };
    for ((field, a), b) in ["platform", "name", "arch", "driver", "time"].into_iter().zip(text(a)).zip(text(b)) {
        if a != b {
            let (kind, cause) = (ChangeKind::Device, Some(Cause::Device));
            changes.push(Change { kind, at: "device".into(), field: field.into(), a, b, cause });
        }
    }
    if changes.last().is_none_or(|change| change.kind != ChangeKind::Device) {
        let (a, b) = ("times of nodes".into(), "other times".into());
        changes.push(Change {
            kind: ChangeKind::Device,
            at: "device".into(),
            field: "nodes".into(),
            a,
            b,
            cause: Some(Cause::Device),
        });
    }
}

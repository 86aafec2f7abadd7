//! Buffers, by name. Two graphs of one executor share an arena, so every difference here is a real one.

use std::collections::HashMap;

use super::{Change, ChangeKind};
use crate::dump::{Dump, DumpBuffer};

pub(super) fn compare(a: &Dump, b: &Dump, changes: &mut Vec<Change>) {
    let in_b: HashMap<&str, &DumpBuffer> = b.buffers.iter().map(|buffer| (&*buffer.planned.spec.name, buffer)).collect();
    let in_a: HashMap<&str, &DumpBuffer> = a.buffers.iter().map(|buffer| (&*buffer.planned.spec.name, buffer)).collect();
    let mut push = |kind, at: &str, field: &str, a: String, b: String| {
        changes.push(Change { kind, at: at.into(), field: field.into(), a, b, cause: None });
    };
    for old in &a.buffers {
        let name = &*old.planned.spec.name;
        let Some(new) = in_b.get(name) else {
            push(ChangeKind::BufferGone, name, "", size(old), String::new());
            continue;
        };
        let (was, is) = (&old.planned, &new.planned);
        if size(old) != size(new) {
            push(ChangeKind::BufferResized, name, "size", size(old), size(new));
        }
        if (was.spec.memory, was.offset) != (is.spec.memory, is.offset) {
            push(ChangeKind::BufferMoved, name, "place", place(old), place(new));
        }
        if was.spec.formula != is.spec.formula {
            push(ChangeKind::BufferResized, name, "formula", was.spec.formula.clone(), is.spec.formula.clone());
        }
        if was.spec.purpose != is.spec.purpose {
            let [was, is] = [was, is].map(|planned| format!("{:?}", planned.spec.purpose));
            push(ChangeKind::BufferResized, name, "purpose", was, is);
        }
    }
    for new in b.buffers.iter().filter(|new| !in_a.contains_key(&*new.planned.spec.name)) {
        push(ChangeKind::BufferAdded, &new.planned.spec.name, "", String::new(), size(new));
    }
}

fn size(buffer: &DumpBuffer) -> String {
    let spec = &buffer.planned.spec;
    format!("{:?} {:?}, {} bytes", spec.dtype, spec.shape, buffer.planned.bytes).to_lowercase()
}

fn place(buffer: &DumpBuffer) -> String {
    format!("{:?}+{}", buffer.planned.spec.memory, buffer.planned.offset).to_lowercase()
}

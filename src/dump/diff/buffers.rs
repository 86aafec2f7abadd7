//! Buffers, by name. Two graphs of one executor share an arena, so every difference here is a real one, but for the names that
//! two ranks have for each other's.

use std::collections::HashMap;

use super::{Cause, Causes, Change, ChangeKind};
use crate::dump::{Dump, DumpBuffer};

pub(super) fn compare(a: &Dump, b: &Dump, may: &Causes, changes: &mut Vec<Change>) {
    let in_b: HashMap<&str, &DumpBuffer> = b.buffers.iter().map(|buffer| (&*buffer.planned.spec.name, buffer)).collect();
    let in_a: HashMap<&str, &DumpBuffer> = a.buffers.iter().map(|buffer| (&*buffer.planned.spec.name, buffer)).collect();
    let mut push = |kind, at: &str, field: &str, a: String, b: String, cause| {
        changes.push(Change { kind, at: at.into(), field: field.into(), a, b, cause });
    };
    // A buffer that only one rank touches is explained by the other rank's name for it.
    let twin = |buffer: &DumpBuffer, name: Option<String>, others: &HashMap<&str, &DumpBuffer>| {
        let other = others.get(name?.as_str())?;
        (size(other) == size(buffer)).then_some(Cause::Rank)
    };
    for old in &a.buffers {
        let name = &*old.planned.spec.name;
        let Some(new) = in_b.get(name) else {
            push(ChangeKind::BufferGone, name, "", size(old), String::new(), twin(old, may.renamed(name), &in_b));
            continue;
        };
        let (was, is) = (&old.planned, &new.planned);
        if size(old) != size(new) {
            push(ChangeKind::BufferResized, name, "size", size(old), size(new), None);
        }
        if (was.spec.memory, was.offset) != (is.spec.memory, is.offset) {
            push(ChangeKind::BufferMoved, name, "place", place(old), place(new), None);
        }
        if was.spec.formula != is.spec.formula {
            push(ChangeKind::BufferResized, name, "formula", was.spec.formula.clone(), is.spec.formula.clone(), None);
        }
        if was.spec.purpose != is.spec.purpose {
            let [was, is] = [was, is].map(|planned| format!("{:?}", planned.spec.purpose));
            push(ChangeKind::BufferResized, name, "purpose", was, is, None);
        }
    }
    let back = may.back();
    for new in b.buffers.iter().filter(|new| !in_a.contains_key(&*new.planned.spec.name)) {
        let name = &*new.planned.spec.name;
        push(ChangeKind::BufferAdded, name, "", String::new(), size(new), twin(new, back.renamed(name), &in_a));
    }
}

fn size(buffer: &DumpBuffer) -> String {
    let spec = &buffer.planned.spec;
    format!("{:?} {:?}, {} bytes", spec.dtype, spec.shape, buffer.planned.bytes).to_lowercase()
}

fn place(buffer: &DumpBuffer) -> String {
    format!("{:?}+{}", buffer.planned.spec.memory, buffer.planned.offset).to_lowercase()
}

//! One self-contained page: the graph with layers folded, a map of the memory with lifetimes, search. It loads nothing.
//!
//! The data is a compact JSON (numbers for names: a graph of 1,000 nodes stays far below a megabyte); style and scripts are the
//! files of `html/`, plain CSS and JavaScript.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::{Dump, DumpNode, DumpValue};
use crate::error::{Error, Result};
use crate::kernels::Access;

const PAGE: &str = include_str!("html/page.html");
const STYLE: &str = include_str!("html/style.css");
/// In the order they run: state and lookups, then what draws, then what listens.
const SCRIPTS: [&str; 5] = [
    include_str!("html/model.js"),
    include_str!("html/graph.js"),
    include_str!("html/map.js"),
    include_str!("html/detail.js"),
    include_str!("html/page.js"),
];

impl Dump {
    /// The graph as a page for a browser.
    ///
    /// Errors: a node points into a buffer that the dump does not list.
    pub fn html(&self) -> Result<String> {
        let data = self.page_data()?.to_string();
        // Inside a script element only `<` could end it.
        let data = data.replace('<', "\\u003c");
        let title = escape(&format!("{} {}", self.chain, self.key));
        let mut page = PAGE.replace("{{title}}", &title).replace("{{style}}", STYLE).replace("{{script}}", &SCRIPTS.join("\n"));
        // Last, so that no name of a buffer is taken for a placeholder.
        let at = page.find("{{data}}").expect("invariant: the page has a place for the data");
        page.replace_range(at..at + "{{data}}".len(), &data);
        Ok(page)
    }

    fn page_data(&self) -> Result<Value> {
        let buffers: HashMap<&str, usize> =
            self.buffers.iter().enumerate().map(|(at, buffer)| (&*buffer.planned.spec.name, at)).collect();
        let mut kernels = Kernels::default();
        let nodes = self.nodes.iter().map(|node| node_data(node, &buffers, &mut kernels)).collect::<Result<Vec<_>>>()?;
        let straight = self.edges.iter().copied().eq((1..self.nodes.len() as u32).map(|after| (after - 1, after)));
        let buffers = self.buffers.iter().map(|buffer| {
            let (planned, spec) = (&buffer.planned, &buffer.planned.spec);
            let place = json!([spec.memory, planned.offset, planned.bytes]);
            json!([spec.name, spec.dtype, spec.shape, spec.formula, spec.purpose, spec.reason, place])
        });
        Ok(json!({
            "chain": self.chain,
            "key": self.key,
            "rows": self.rows,
            "buffers": buffers.collect::<Vec<_>>(),
            "kernels": kernels.list,
            "nodes": nodes,
            // A line needs no list.
            "edges": if straight { Value::Null } else { json!(self.edges) },
            "device": self.device,
        }))
    }
}

/// Kernels with the names of their fields, each once.
#[derive(Default)]
struct Kernels<'a> {
    list: Vec<Value>,
    known: HashMap<(&'a str, Vec<&'a str>), usize>,
}

/// `[label, layer, kernel, [grid, workgroup, lds], arguments]`; an argument is a text, null, or `[buffer, offset, extent, access]`
/// with access 1 to read, 2 to write, 3 for both.
fn node_data<'a>(node: &'a DumpNode, buffers: &HashMap<&str, usize>, kernels: &mut Kernels<'a>) -> Result<Value> {
    let fields: Vec<&str> = node.args.iter().map(|arg| &*arg.name).collect();
    let next = kernels.list.len();
    let kernel = *kernels.known.entry((&node.kernel, fields)).or_insert_with_key(|(symbol, fields)| {
        kernels.list.push(json!([symbol, fields]));
        next
    });
    let args = node.args.iter().map(|arg| match &arg.value {
        DumpValue::Scalar { value } => Ok(json!(value)),
        DumpValue::Null { .. } => Ok(Value::Null),
        DumpValue::Pointer { buffer, offset, extent, access } => {
            let Some(at) = buffers.get(&**buffer) else {
                return Err(Error::input(format!("{}.{}: no buffer {buffer:?} in this dump", node.label, arg.name))
                    .help("dump the graph again: the file was edited or cut off"));
            };
            let access = match access {
                Access::Read => 1,
                Access::Write => 2,
                Access::ReadWrite => 3,
            };
            Ok(json!([at, offset, extent, access]))
        }
    });
    let shape = json!([node.shape.grid, node.shape.workgroup, node.shape.lds_bytes]);
    Ok(json!([node.label, node.layer, kernel, shape, args.collect::<Result<Vec<_>>>()?]))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

//! The graph in the language of Graphviz: a box a node, layers as clusters.

use std::fmt::Write;

use super::Dump;

impl Dump {
    /// The graph as DOT.
    pub fn dot(&self) -> String {
        let mut out = String::new();
        let mut line = |text: std::fmt::Arguments<'_>| writeln!(out, "{text}").expect("invariant: a string takes all");
        line(format_args!("digraph \"{} {}\" {{", self.chain, self.key));
        line(format_args!("  node [shape=box, fontname=monospace];"));
        let mut open = None;
        for (at, node) in self.nodes.iter().enumerate() {
            if node.layer != open {
                if open.is_some() {
                    line(format_args!("  }}"));
                }
                if let Some(layer) = node.layer {
                    line(format_args!("  subgraph cluster_{at}_layer{layer} {{ label=\"layer {layer}\";"));
                }
                open = node.layer;
            }
            let [x, y, z] = node.shape.grid;
            line(format_args!("  n{at} [label=\"{}\\n{} {x}x{y}x{z}\"];", node.label, node.kernel));
        }
        if open.is_some() {
            line(format_args!("  }}"));
        }
        for (before, after) in &self.edges {
            line(format_args!("  n{before} -> n{after};"));
        }
        line(format_args!("}}"));
        out
    }
}

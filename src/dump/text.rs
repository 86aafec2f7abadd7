//! A line a node: kernel, launch shape, each argument as name=buffer+offset or value.

use std::fmt::Write;

use super::{Dump, DumpValue};

impl Dump {
    /// The graph as text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |text: std::fmt::Arguments<'_>| writeln!(out, "{text}").expect("invariant: a string takes all");
        line(format_args!("graph {} {}, {} nodes", self.chain, self.key, self.nodes.len()));
        for (at, node) in self.nodes.iter().enumerate() {
            let [x, y, z] = node.shape.grid;
            let [wx, wy, wz] = node.shape.workgroup;
            let time = self.device.as_ref().and_then(|device| device.nodes.get(at)).map_or_else(String::new, |time| {
                format!(" time={:.2}us declared={:.2}GB/s", time.us, time.bytes as f64 / time.us.max(1e-3) / 1e3)
            });
            let args: Vec<String> = node.args.iter().map(|arg| format!("{}={}", arg.name, value(&arg.value))).collect();
            line(format_args!(
                "{at:>4} {} {} grid={x}x{y}x{z} workgroup={wx}x{wy}x{wz} lds={}{time} {}",
                node.label,
                node.kernel,
                node.shape.lds_bytes,
                args.join(" ")
            ));
        }
        out
    }
}

/// A field's value in words: `buffer+offset[extent]access`, `null` or the number.
pub(super) fn value(value: &DumpValue) -> String {
    match value {
        DumpValue::Pointer { buffer, offset, extent, access } => {
            let sign = match (access.reads(), access.writes()) {
                (true, true) => "rw",
                (_, true) => "w",
                _ => "r",
            };
            format!("{buffer}+{offset}[{extent}]{sign}")
        }
        DumpValue::Null { .. } => "null".into(),
        DumpValue::Scalar { value } => value.clone(),
    }
}

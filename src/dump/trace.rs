//! Chrome's trace format (Perfetto reads it): one replay, and the same step node by node.

use serde_json::{Value, json};

use super::{Dump, DumpValue};

/// What a trace shows. Microseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Times {
    /// Host time of the decode call.
    pub submit_us: f64,
    /// Device time of the replayed graph.
    pub replay_us: f64,
    /// Start and duration of each node, launched one by one.
    pub nodes: Vec<(f64, f64)>,
}

impl Dump {
    /// A trace of one replay. A driver does not tell when the nodes inside a graph ran, so they stand on a track of their own,
    /// as they ran one by one.
    ///
    /// # Panics
    /// If `times` are not of this graph's nodes.
    pub fn trace(&self, times: &Times) -> String {
        assert_eq!(times.nodes.len(), self.nodes.len(), "one span a node");
        let track =
            |tid: u32, name: &str| json!({ "ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": { "name": name } });
        let span = |tid: u32, name: &str, ts: f64, us: f64, args: Value| json!({ "ph": "X", "pid": 1, "tid": tid, "name": name, "ts": ts, "dur": us, "args": args });
        let graph = format!("{} {}", self.chain, self.key);
        let mut events = vec![
            json!({ "ph": "M", "pid": 1, "name": "process_name", "args": { "name": graph } }),
            track(1, "host"),
            track(2, "device, replay"),
            track(3, "device, node by node"),
            span(1, "decode", 0.0, times.submit_us, json!({})),
            span(2, "replay", 0.0, times.replay_us, json!({ "nodes": self.nodes.len() })),
        ];
        for (node, &(start, us)) in self.nodes.iter().zip(&times.nodes) {
            let args = json!({
                "kernel": node.kernel, "layer": node.layer, "grid": node.shape.grid, "workgroup": node.shape.workgroup,
                "bytes": node.declared_bytes(),
            });
            events.push(span(3, &node.label, start, us, args));
        }
        json!({ "displayTimeUnit": "ns", "traceEvents": events }).to_string()
    }
}

impl super::DumpNode {
    /// Bytes the node declares to read and write: each extent once, twice where it reads and writes.
    pub fn declared_bytes(&self) -> u64 {
        let bytes = |value: &DumpValue| match value {
            DumpValue::Pointer { extent, access, .. } => extent * (u64::from(access.reads()) + u64::from(access.writes())),
            DumpValue::Null { .. } | DumpValue::Scalar { .. } => 0,
        };
        self.args.iter().map(|arg| bytes(&arg.value)).sum()
    }
}

//! Public reports of graph runtimes that gave wrong results without an error, and the symptom each is known by.
//!
//! A self-test that fails names the report whose symptom it saw, so that a user can look up versions and workarounds. It is a
//! hint, not a diagnosis: another fault may show the same way.

use serde::Serialize;

/// A public report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct KnownIssue {
    /// Repository and number: `ROCm/hip#3887`.
    pub id: &'static str,
    /// What was seen, and where.
    pub symptom: &'static str,
}

macro_rules! issues {
    ($($(#[$doc:meta])* $NAME:ident = $id:literal, $symptom:literal;)*) => {$(
        $(#[$doc])*
        pub const $NAME: KnownIssue = KnownIssue { id: $id, symptom: $symptom };
    )*};
}

issues! {
    /// Late nodes of a long graph.
    STALE_PAST_200_NODES = "ROCm/hip#3887", "stale pointers in graphs of more than about 200 nodes (gfx1201)";
    /// A buffer written just before the launch.
    STALE_BEFORE_LAUNCH = "ROCm/hip#3902", "a buffer written just before the graph launch is read stale (gfx950)";
    /// Replays that are wrong now and then.
    CORRUPT_REPLAY = "ROCm/clr#279", "replay corrupted in one process of five (gfx942, ROCm 7.2.0 to 7.2.3)";
    /// Addresses of the recorded graph.
    UNSTABLE_ADDRESSES = "ROCm/clr#280", "addresses of captured pool memory are not stable";
    /// Nodes that are missing from a graph.
    SWALLOWED_ERRORS = "ROCm/pytorch#3323", "errors during capture are swallowed";
    /// Memory that a graph keeps.
    GRAPH_MEMORY = "ROCm/rocm-systems#10257", "about 4 MiB of device memory a graph stay inside the runtime";
}

//! The closed list of invariants: id and promise. `ARCHITECTURE.md` holds one row for each; a test compares the two.

/// One promise the runtime keeps, checked in two places at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Invariant {
    /// Its name in errors, reports, comments and documents.
    pub id: &'static str,
    /// What holds, in one sentence.
    pub promise: &'static str,
}

macro_rules! invariants {
    ($($id:literal: $promise:literal;)*) => {
        /// Every invariant there is, in the order of `ARCHITECTURE.md`.
        pub static ALL: &[Invariant] = &[$(Invariant { id: $id, promise: $promise }),*];
    };
}

invariants! {
    "SEAL-1": "Nothing is allocated or freed after the seal.";
    "ADDR-1": "Every pointer of every node lies inside one ledger entry, with the extent its kernel declares for this capture size.";
    "ADDR-2": "The ledger's fingerprint at replay equals capture's, and what the host wrote before a launch is what the device reads.";
    "ADDR-3": "Live buffers overlap only if they are declared aliases.";
    "ADDR-4": "What the driver says a node holds equals what was recorded.";
    "CAP-1": "No memory node, no host synchronisation and no foreign stream in the capture window.";
    "CAP-2": "The recorded nodes and edges are the lowered chain.";
    "BAKE-1": "Capturing one key with two different dummy batches yields the same nodes, byte for byte.";
    "RACE-1": "Two nodes that touch one range, one of them writing, are ordered by the graph's edges.";
    "GUARD-1": "The guard bands between buffers keep their pattern.";
    "PAD-1": "Every per-row array is written to the full capture size.";
    "PAD-2": "Pad rows touch nothing: no cache page, no live row.";
    "PAD-3": "Live rows equal the unpadded eager result.";
    "KEY-1": "The key of a graph holds every host value that shaped the capture.";
    "PAGE-1": "No cache block belongs to two sequences, and the device's block table is the host's.";
    "RANK-1": "Ranks agree about what they run before they exchange.";
    "GEN-1": "No candidate of an older generation is ever accepted.";
}

/// The invariant of an id; `None` if there is none.
pub fn find(id: &str) -> Option<&'static Invariant> {
    ALL.iter().find(|invariant| invariant.id == id)
}

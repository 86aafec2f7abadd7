//! What differs between versions of the runtime: numbers of node kinds, a flag, where the properties name the architecture.
//!
//! Read off the headers of every release from 5.0 to 6.2 (github.com/ROCm/HIP) and of 7.12 (github.com/ROCm/rocm-systems).

use std::ffi::c_uint;
use std::fmt;

/// A runtime's version as `hipRuntimeGetVersion` gives it: major x 10^7 + minor x 10^5 + patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub i32);

impl Version {
    /// The first version with `hipStreamBeginCapture` and node queries that this device is written for.
    pub const OLDEST: Version = Version::new(5, 2);
    /// The first with uncached device memory.
    pub const UNCACHED: Version = Version::new(5, 5);

    const fn new(major: i32, minor: i32) -> Version {
        Version(major * 10_000_000 + minor * 100_000)
    }

    /// What a node of the number that the runtime gives is.
    pub fn node_kind(self, number: i32) -> NodeKind {
        // Before 5.3 the kinds count from 1; allocations came with 5.5 and moved what stood behind them.
        let number = if self < Version::new(5, 3) { number - 1 } else { number };
        match number {
            0 => NodeKind::Kernel,
            1 => NodeKind::Copy,
            2 => NodeKind::Fill,
            3 => NodeKind::Other("host function"),
            4 => NodeKind::Other("child graph"),
            5 => NodeKind::Empty,
            6 => NodeKind::Other("event wait"),
            7 => NodeKind::Other("event record"),
            8 if self < Version::new(5, 3) => NodeKind::Copy,
            8 | 9 if self >= Version::new(5, 3) => NodeKind::Other("semaphore"),
            10 if self >= Version::new(5, 5) => NodeKind::Other("allocation"),
            11 if self >= Version::new(5, 5) => NodeKind::Other("free"),
            9..=13 => NodeKind::Other("copy of a symbol"),
            14 => NodeKind::Other("batch of memory operations"),
            _ => NodeKind::Other("kind that this version does not know"),
        }
    }

    /// `hipIpcMemLazyEnablePeerAccess`, the one flag that opening a handle takes.
    pub fn lazy_peer_access(self) -> c_uint {
        c_uint::from(self >= Version::new(6, 0))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HIP runtime {}.{}.{}", self.0 / 10_000_000, self.0 / 100_000 % 100, self.0 % 100_000)
    }
}

/// What a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeKind {
    Kernel,
    Copy,
    Fill,
    Empty,
    Other(&'static str),
}

/// Room for the properties of any version: the largest known layout takes 1,472 bytes.
pub(super) const PROPERTIES_BYTES: usize = 4096;
/// Where `gcnArchName` is in `hipDeviceProp_tR0600`.
pub(super) const ARCH_R0600: usize = 1160;
/// Where it is in the layout before 6.0.
pub(super) const ARCH_LEGACY: usize = 396;
/// Its size.
pub(super) const ARCH_BYTES: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_told_by_the_version() {
        let (old, middle, new) = (Version(50_221_153), Version(50_422_804), Version(71_260_430));
        assert_eq!([old.node_kind(1), old.node_kind(2), old.node_kind(9)], [NodeKind::Kernel, NodeKind::Copy, NodeKind::Copy]);
        assert_eq!([middle.node_kind(0), middle.node_kind(2)], [NodeKind::Kernel, NodeKind::Fill]);
        assert_eq!(
            (middle.node_kind(10), new.node_kind(10)),
            (NodeKind::Other("copy of a symbol"), NodeKind::Other("allocation"))
        );
        assert_eq!((old.lazy_peer_access(), new.lazy_peer_access()), (0, 1));
        assert_eq!(old.to_string(), "HIP runtime 5.2.21153");
        assert!(old >= Version::OLDEST && old < Version::UNCACHED);
    }
}

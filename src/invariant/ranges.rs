//! What the ops of a chain declare to read and write, as ranges of buffers.

use crate::arena::BufferId;
use crate::chain::Chain;
use crate::dtype::DType;
use crate::kernels::{Access, FieldKind, Ptr};

/// A range that one op touches through one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRange {
    /// Index of the op in its chain.
    pub op: usize,
    /// The field.
    pub field: &'static str,
    /// What the kernel does there.
    pub access: Access,
    /// The buffer.
    pub buffer: BufferId,
    /// First byte in the buffer.
    pub offset: u64,
    /// Size.
    pub bytes: u64,
    /// Element type.
    pub dtype: DType,
}

impl NodeRange {
    /// True if both touch one byte.
    pub fn overlaps(&self, other: &NodeRange) -> bool {
        self.buffer == other.buffer && self.offset < other.offset + other.bytes && other.offset < self.offset + self.bytes
    }
}

/// The ranges of all ops of a chain whose access is `wanted`, op by op.
pub fn ranges(chain: &Chain, wanted: impl Fn(Access) -> bool) -> Vec<NodeRange> {
    let mut found = Vec::new();
    for (at, op) in chain.ops.iter().enumerate() {
        for field in op.kernel.args.pointers() {
            let FieldKind::Pointer { access, dtype, .. } = field.kind else { continue };
            let (bytes, pointer) = (field.extent_bytes(&op.args), field.pointer(&op.args));
            if bytes == 0 || !wanted(access) || pointer == Ptr::NULL {
                continue;
            }
            let (buffer, offset) = pointer.as_symbol().expect("invariant: ADDR-1, lowering refuses other pointers");
            let (buffer, dtype) = (BufferId(buffer), dtype(&op.args));
            found.push(NodeRange { op: at, field: field.name, access, buffer, offset, bytes, dtype });
        }
    }
    found
}

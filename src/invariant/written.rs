//! PAD-1 by poison: what a kernel declares to write is overwritten with a pattern first; none of it may be left behind.
//!
//! An element counts as unwritten if it still holds the pattern: NaN with every bit set for floats, a number that no id,
//! length or index has for integers. Raw bytes are looked at eight at a time.

use std::collections::HashMap;

use super::{Finding, Report};
use crate::arena::{Arena, BufferId, Sealed};
use crate::capture::CapturedGraph;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::{Access, FieldKind, Ptr};

/// Bytes read back at once.
const PIECE_BYTES: u64 = 1 << 20;

/// A range that one node writes whole, by its kernel's declaration.
#[derive(Clone, Debug)]
pub struct Output {
    /// Index of the op in its chain.
    pub op: usize,
    /// The field.
    pub field: &'static str,
    /// The buffer.
    pub buffer: BufferId,
    /// First byte in the buffer.
    pub offset: u64,
    /// Size.
    pub bytes: u64,
    /// Element type.
    pub dtype: DType,
}

impl Output {
    /// Byte of the pattern.
    fn pattern(&self) -> u8 {
        match self.dtype {
            DType::F32 | DType::Bf16 | DType::F8E4M3 => 0xff,
            DType::I32 | DType::U32 | DType::U64 | DType::U8 => 0xc3,
        }
    }

    /// Bytes that are unwritten together or not at all.
    fn granule(&self) -> u64 {
        if self.dtype == DType::U8 { 8 } else { self.dtype.bytes() }
    }

    fn overlaps(&self, other: &Output) -> bool {
        self.buffer == other.buffer && self.offset < other.offset + other.bytes && other.offset < self.offset + self.bytes
    }
}

/// What each op of a graph writes whole, op by op.
pub fn outputs(graph: &CapturedGraph) -> Vec<Output> {
    touched(graph, |access| access == Access::Write)
}

/// The outputs that may be poisoned before a replay: no op up to their own reads what they held.
pub fn outputs_of_replay(graph: &CapturedGraph) -> Vec<Output> {
    let mut reads: HashMap<BufferId, Vec<Output>> = HashMap::new();
    for read in touched(graph, Access::reads) {
        reads.entry(read.buffer).or_default().push(read);
    }
    let mut outputs = outputs(graph);
    outputs.retain(|output| {
        let reads = reads.get(&output.buffer).map_or(&[][..], Vec::as_slice);
        !reads.iter().take_while(|read| read.op <= output.op).any(|read| output.overlaps(read))
    });
    outputs
}

fn touched(graph: &CapturedGraph, wanted: impl Fn(Access) -> bool) -> Vec<Output> {
    let mut found = Vec::new();
    for (at, op) in graph.chain().ops.iter().enumerate() {
        for field in op.kernel.args.pointers() {
            let FieldKind::Pointer { access, dtype, .. } = field.kind else { continue };
            let (bytes, pointer) = (field.extent_bytes(&op.args), field.pointer(&op.args));
            if bytes == 0 || !wanted(access) || pointer == Ptr::NULL {
                continue;
            }
            let (buffer, offset) = pointer.as_symbol().expect("invariant: ADDR-1, lowering refuses other pointers");
            let (buffer, dtype) = (BufferId(buffer), dtype(&op.args));
            found.push(Output { op: at, field: field.name, buffer, offset, bytes, dtype });
        }
    }
    found
}

/// Fills outputs with the pattern. The device must be idle.
pub fn poison(arena: &Arena<Sealed>, outputs: &[Output]) -> Result<()> {
    outputs.iter().try_for_each(|output| arena.fill(output.buffer, output.offset, output.bytes, output.pattern()))
}

/// Adds a finding for each output that still holds the pattern somewhere. The device must be idle.
pub fn unwritten(graph: &CapturedGraph, outputs: &[Output], report: &mut Report) {
    for output in outputs {
        match first_unwritten(graph.arena(), output) {
            Ok(None) => {}
            Ok(Some((element, count))) => report.push(finding(graph, output, element, count)),
            Err(error) => report.query_failed("PAD-1", "reading an output back", &error),
        }
    }
}

/// The first unwritten element and how many there are.
fn first_unwritten(arena: &Arena<Sealed>, output: &Output) -> Result<Option<(u64, u64)>> {
    let (granule, pattern) = (output.granule(), output.pattern());
    let mut bytes = vec![0; output.bytes.min(PIECE_BYTES) as usize];
    let (mut first, mut count) = (None, 0);
    for from in (0..output.bytes).step_by(PIECE_BYTES as usize) {
        let piece = &mut bytes[..(output.bytes - from).min(PIECE_BYTES) as usize];
        arena.read(output.buffer, output.offset + from, piece)?;
        for (at, chunk) in piece.chunks(granule as usize).enumerate() {
            if chunk.iter().all(|&byte| byte == pattern) {
                first.get_or_insert((from + at as u64 * granule) / output.dtype.bytes());
                count += granule / output.dtype.bytes();
            }
        }
    }
    Ok(first.map(|first| (first, count)))
}

fn finding(graph: &CapturedGraph, output: &Output, element: u64, count: u64) -> Finding {
    let help = "the kernel must write every element it declares as written, pad rows included (zeros): see its argument struct";
    let elements = output.bytes / output.dtype.bytes();
    let found = format!("{count} left unwritten, the first is number {element}");
    Finding::new("PAD-1", format!("{elements} {} elements written", output.dtype), found, help)
        .at(output.op as u32, &graph.chain().ops[output.op].label)
        .field(output.field)
        .buffer(&*graph.arena().plan().buffer(output.buffer).spec.name)
}

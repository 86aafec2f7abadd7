//! PAD-1 by poison: what a kernel declares to write is overwritten with a pattern first; none of it may be left behind.
//!
//! An element counts as unwritten if it still holds the pattern: NaN with every bit set for floats, a number that no id,
//! length or index has for integers. Raw bytes are looked at eight at a time.

use std::collections::HashMap;

use super::ranges::{NodeRange, ranges};
use super::{Finding, Report};
use crate::arena::{Arena, BufferId, Sealed};
use crate::capture::CapturedGraph;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::Access;

/// Bytes read back at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Byte of the pattern.
fn pattern(output: &NodeRange) -> u8 {
    match output.dtype {
        DType::F32 | DType::Bf16 | DType::F8E4M3 => 0xff,
        DType::I32 | DType::U32 | DType::U64 | DType::U8 => 0xc3,
    }
}

/// Bytes that are unwritten together or not at all.
fn granule(output: &NodeRange) -> u64 {
    if output.dtype == DType::U8 { 8 } else { output.dtype.bytes() }
}

/// What each op of a graph writes whole, op by op.
pub fn outputs(graph: &CapturedGraph) -> Vec<NodeRange> {
    ranges(graph.chain(), |access| access == Access::Write)
}

/// The outputs that may be poisoned before a replay: no op up to their own reads what they held.
pub fn outputs_of_replay(graph: &CapturedGraph) -> Vec<NodeRange> {
    let mut reads: HashMap<BufferId, Vec<NodeRange>> = HashMap::new();
    for read in ranges(graph.chain(), Access::reads) {
        reads.entry(read.buffer).or_default().push(read);
    }
    let mut outputs = outputs(graph);
    outputs.retain(|output| {
        let reads = reads.get(&output.buffer).map_or(&[][..], Vec::as_slice);
        !reads.iter().take_while(|read| read.op <= output.op).any(|read| output.overlaps(read))
    });
    outputs
}

/// Fills outputs with the pattern. The device must be idle.
pub fn poison(arena: &Arena<Sealed>, outputs: &[NodeRange]) -> Result<()> {
    outputs.iter().try_for_each(|output| arena.fill(output.buffer, output.offset, output.bytes, pattern(output)))
}

/// Adds a finding for each output that still holds the pattern somewhere. The device must be idle.
pub fn unwritten(graph: &CapturedGraph, outputs: &[NodeRange], report: &mut Report) {
    for output in outputs {
        match first_unwritten(graph.arena(), output) {
            Ok(None) => {}
            Ok(Some((element, count))) => report.push(finding(graph, output, element, count)),
            Err(error) => report.query_failed("PAD-1", "reading an output back", &error),
        }
    }
}

/// The first unwritten element and how many there are.
fn first_unwritten(arena: &Arena<Sealed>, output: &NodeRange) -> Result<Option<(u64, u64)>> {
    let (granule, pattern) = (granule(output), pattern(output));
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

fn finding(graph: &CapturedGraph, output: &NodeRange, element: u64, count: u64) -> Finding {
    let help = "the kernel must write every element it declares as written, pad rows included (zeros): see its argument struct";
    let elements = output.bytes / output.dtype.bytes();
    let found = format!("{count} left unwritten, the first is number {element}");
    Finding::new("PAD-1", format!("{elements} {} elements written", output.dtype), found, help)
        .at(output.op as u32, &graph.chain().ops[output.op].label)
        .field(output.field)
        .buffer(&*graph.arena().plan().buffer(output.buffer).spec.name)
}

//! Lowering: a chain's symbolic pointers become addresses of a sealed arena.

use smallvec::SmallVec;

use super::Modules;
use crate::arena::{Arena, BufferId, Sealed};
use crate::chain::{Chain, Op};
use crate::error::{Error, Result};
use crate::hal::{FunctionHandle, LaunchShape};
use crate::kernels::Ptr;

/// One launch, ready for a stream.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The loaded kernel.
    pub function: FunctionHandle,
    /// Grid and workgroup.
    pub shape: LaunchShape,
    /// Argument struct with device addresses.
    pub args: SmallVec<[u8; 256]>,
}

/// Lowers every op of `chain`.
///
/// First check of ADDR-1: each pointer, with the extent its kernel declares, lies inside one buffer; an unused pointer
/// (extent 0) may be null. Errors name op, field and buffer.
pub fn lower(chain: &Chain, arena: &Arena<Sealed>, modules: &Modules) -> Result<Vec<Launch>> {
    chain.ops.iter().map(|op| lower_op(op, arena, modules)).collect()
}

fn lower_op(op: &Op, arena: &Arena<Sealed>, modules: &Modules) -> Result<Launch> {
    if op.args.len() != op.kernel.args.bytes {
        let (found, declared) = (op.args.len(), op.kernel.args.bytes);
        let what = format!("{}: {found} bytes of arguments, kernel {} declares {declared}", op.label, op.kernel.symbol);
        return Err(
            Error::invariant("ADDR-1", what).help("fill the kernel's own argument struct: a field is missing or too many")
        );
    }
    let mut args = op.args.clone();
    for field in op.kernel.args.pointers() {
        let extent = field.extent_bytes(&op.args);
        let pointer = field.pointer(&op.args);
        let bad = |what: String| {
            Error::invariant("ADDR-1", format!("{}.{}: {what}", op.label, field.name))
                .help("the chain and the plan disagree about this buffer's size")
        };
        let Some((buffer, offset)) = pointer.as_symbol() else {
            if pointer == Ptr::NULL && extent == 0 {
                continue;
            }
            return Err(bad(format!("{pointer:?} is no symbol, {extent} bytes expected behind it")));
        };
        let id = BufferId(buffer);
        let Some(planned) = arena.plan().buffers.get(buffer as usize) else {
            return Err(bad(format!("buffer number {buffer} is not in the plan")));
        };
        if offset.checked_add(extent).is_none_or(|end| end > planned.bytes) {
            return Err(bad(format!(
                "{extent} bytes from offset {offset} do not fit buffer {} of {} bytes",
                planned.spec.name, planned.bytes
            )));
        }
        field.set_pointer(&mut args, Ptr(arena.ptr(id).add(offset).0));
    }
    Ok(Launch { function: modules.function(op.kernel)?, shape: op.shape, args })
}

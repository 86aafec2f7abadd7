//! `probe`.

use super::view::Bound;
use crate::hal::Workgroup;
use crate::kernels::probe::ProbeArgs;

/// Maps the elements of one workgroup.
pub fn probe(args: &Bound<'_, ProbeArgs>, workgroup: &mut Workgroup<'_>) {
    let lanes = workgroup.shape.workgroup[0] as usize;
    let start = workgroup.id[0] as usize * lanes;
    let end = (args.count as usize).min(start.saturating_add(lanes));
    let src = args.read::<u32>(|a| &a.src);
    let mut dst = args.write::<u32>(|a| &a.dst);
    // Element by element: the two ranges may be one.
    for at in start..end {
        dst.set(at, src.get(at).wrapping_mul(args.mul).wrapping_add(args.add));
    }
}

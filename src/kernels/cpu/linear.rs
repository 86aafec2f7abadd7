//! `linear`: out (+)= x W^T.

use half::bf16;

use super::dots::{Dots, ROWS_MAX, Weight};
use super::view::Bound;
use crate::dtype::DType;
use crate::hal::Workgroup;
use crate::kernels::m3::LinearArgs;

/// One tile.
pub fn linear(args: &Bound<'_, LinearArgs>, workgroup: &mut Workgroup<'_>) {
    match DType::from_code(args.weight_dtype) {
        DType::F32 => tile::<f32>(args, workgroup.id),
        DType::Bf16 => tile::<bf16>(args, workgroup.id),
        other => panic!("linear takes no {other} weights"),
    }
}

fn tile<W: Weight>(args: &Bound<'_, LinearArgs>, id: [u32; 3]) {
    let [n, k, x_stride, out_stride] = [args.n, args.k, args.x_stride, args.out_stride].map(|dim| dim as usize);
    let first_col = id[0] as usize * args.tile_cols as usize;
    let columns = (args.tile_cols as usize).min(n.saturating_sub(first_col));
    let first_row = id[1] as usize * args.tile_rows as usize;
    let end_row = (first_row + args.tile_rows as usize).min(args.rows as usize);
    if columns == 0 || first_row >= end_row {
        return;
    }
    let (x, row_len) = (args.read::<f32>(|a| &a.x), args.read::<i32>(|a| &a.row_len));
    let weight = args.read::<W>(|a| &a.weight).slice(first_col * k, columns * k);
    let mut out = args.write::<f32>(|a| &a.out);
    let accumulate = args.accumulate != 0;
    let (mut xs, mut at, mut filled) = ([&[][..]; ROWS_MAX], [0; ROWS_MAX], 0);
    for row in first_row..end_row {
        let to = row * out_stride + first_col;
        if row_len.get(row) > 0 {
            (xs[filled], at[filled]) = (x.slice(row * x_stride, k), to);
            filled += 1;
        } else if !accumulate {
            out.slice_mut(to, columns).fill(0.0);
        }
        if filled == ROWS_MAX || (row + 1 == end_row && filled > 0) {
            Dots { weight, x: &xs[..filled], at: &at[..filled], out: &mut out, accumulate }.run();
            filled = 0;
        }
    }
}

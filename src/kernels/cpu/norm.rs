//! `rms_norm` and `select_last`.

use super::view::Bound;
use crate::hal::Workgroup;
use crate::kernels::m3::{RmsNormArgs, SelectLastArgs};

/// Norms one row.
pub fn rms_norm(args: &Bound<'_, RmsNormArgs>, workgroup: &mut Workgroup<'_>) {
    let (row, width) = (workgroup.id[0] as usize, args.width as usize);
    let mut out = args.write::<f32>(|a| &a.out);
    let out = out.slice_mut(row * width, width);
    let source = if args.indexed != 0 { args.read::<i32>(|a| &a.rows_index).get(row) } else { row as i32 };
    let row_len = args.read::<i32>(|a| &a.row_len);
    let Some(source) = usize::try_from(source).ok().filter(|&source| row_len.get(source) > 0) else { return out.fill(0.0) };
    let x = args.read::<f32>(|a| &a.x).slice(source * width, width);
    gemma_norm(x, args.read::<f32>(|a| &a.weight).slice(0, width), args.eps, out);
}

/// out = x * rsqrt(mean(x^2) + eps) * (1 + w). The sum of squares runs over 16 fixed lanes and a fixed tree.
fn gemma_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    const LANES: usize = 16;
    let mut lanes = [0.0f32; LANES];
    for x in x.chunks(LANES) {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane += x * x;
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    let scale = 1.0 / (lanes[0] / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * (1.0 + weight);
    }
}

/// Writes the whole list.
pub fn select_last(args: &Bound<'_, SelectLastArgs>, _workgroup: &mut Workgroup<'_>) {
    let ends = args.read::<i32>(|a| &a.cu_seqlens);
    let mut rows = args.write::<i32>(|a| &a.rows_index);
    for sequence in 0..args.sequences as usize {
        let (start, end) = (ends.get(sequence), ends.get(sequence + 1));
        rows.set(sequence, if end > start { end - 1 } else { -1 });
    }
}

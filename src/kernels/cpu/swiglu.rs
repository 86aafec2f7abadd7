//! `swiglu`: SwiGLU-OAI.

use super::simd::{LaneOp, Lanes, dispatch};
use super::view::Bound;
use crate::hal::Workgroup;
use crate::kernels::m3::SwigluArgs;

/// One row.
pub fn swiglu(args: &Bound<'_, SwigluArgs>, workgroup: &mut Workgroup<'_>) {
    let (row, width) = (workgroup.id[0] as usize, args.width as usize);
    let mut out = args.write::<f32>(|a| &a.out);
    let out = out.slice_mut(row * width, width);
    if args.read::<i32>(|a| &a.row_len).get(row / args.rows_a_len as usize) <= 0 {
        return out.fill(0.0);
    }
    let (gate, up) = args.read::<f32>(|a| &a.x).slice(row * 2 * width, 2 * width).split_at(width);
    dispatch(Gated { gate, up, alpha: args.alpha, limit: args.limit, out });
}

/// (up + 1) * gate * sigmoid(alpha * gate) of the clamped inputs.
struct Gated<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    alpha: f32,
    limit: f32,
    out: &'a mut [f32],
}

impl Gated<'_> {
    /// Eight channels. NaN in gives NaN out: `max` and the comparison below keep it.
    #[inline(always)]
    fn eight<L: Lanes>(gate: &[f32; 8], up: &[f32; 8], alpha: f32, limit: f32, out: &mut [f32; 8]) {
        let clamped = |x: &f32| if *x > limit { limit } else { *x };
        let gate: [f32; 8] = std::array::from_fn(|lane| clamped(&gate[lane]));
        let up: [f32; 8] = std::array::from_fn(|lane| clamped(&up[lane]));
        let (gate, up) = (L::load(&gate), L::splat(-limit).max(L::load(&up)));
        // sigmoid(x) = e^-|x| style: with z = e^-|alpha gate|, it is 1 / (1 + z) for x >= 0 and z / (1 + z) below.
        let (mut x, mut z, mut top) = ([0.0; 8], [0.0; 8], [0.0; 8]);
        gate.mul(L::splat(alpha)).store(&mut x);
        L::load(&x.map(|x| -x.abs())).exp().store(&mut z);
        gate.mul(L::splat(1.0).add(up)).store(&mut top);
        for lane in 0..8 {
            let numerator = if x[lane] < 0.0 { z[lane] } else { 1.0 };
            out[lane] = top[lane] * (numerator / (1.0 + z[lane]));
        }
    }
}

impl LaneOp for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (gates, gate_rest) = self.gate.as_chunks::<8>();
        let (ups, up_rest) = self.up.as_chunks::<8>();
        let (outs, out_rest) = self.out.as_chunks_mut::<8>();
        for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
            Self::eight::<L>(gate, up, self.alpha, self.limit, out);
        }
        let (mut gate, mut up, mut out) = ([0.0; 8], [0.0; 8], [0.0; 8]);
        gate[..gate_rest.len()].copy_from_slice(gate_rest);
        up[..up_rest.len()].copy_from_slice(up_rest);
        Self::eight::<L>(&gate, &up, self.alpha, self.limit, &mut out);
        out_rest.copy_from_slice(&out[..out_rest.len()]);
    }
}

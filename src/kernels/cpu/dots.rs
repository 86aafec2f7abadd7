//! Dot products of a few rows with many weight rows: the inner loops of `linear` and `moe_linear`.
//!
//! Up to four rows at a time meet a few weight rows in registers. How many changes how fast it is and nothing else: each
//! result is the same chain of fused multiply-adds over eight lanes of k and the same tree at the end.

#![expect(unsafe_code, reason = "vector loads without bounds checks in the innermost loop")]

use half::bf16;

use super::simd::{LaneOp, Lanes, dispatch};
use super::view::{Element, ViewMut};

/// Lanes of a vector.
const LANES: usize = 8;
/// Most rows of one [`Dots`].
pub(super) const ROWS_MAX: usize = 4;

/// An element type of weights.
pub(super) trait Weight: Element {
    /// Eight elements, widened.
    fn lanes<L: Lanes>(from: &[Self; LANES]) -> L;
}

impl Weight for f32 {
    #[inline(always)]
    fn lanes<L: Lanes>(from: &[f32; LANES]) -> L {
        L::load(from)
    }
}

impl Weight for bf16 {
    #[inline(always)]
    fn lanes<L: Lanes>(from: &[bf16; LANES]) -> L {
        L::from_bf16(from)
    }
}

/// out[at[r] + c] (+)= x[r] . weight[c].
pub(super) struct Dots<'a, 'b, W> {
    /// [columns, k], columns = weight.len() / k.
    pub weight: &'a [W],
    /// At most [`ROWS_MAX`] rows of k.
    pub x: &'a [&'a [f32]],
    /// Where each row's columns start in `out`.
    pub at: &'a [usize],
    /// The output.
    pub out: &'a mut ViewMut<'b, f32>,
    /// Add to what is there.
    pub accumulate: bool,
}

impl<W: Weight> Dots<'_, '_, W> {
    /// Runs on the best lanes of this CPU.
    pub(super) fn run(self) {
        dispatch(self);
    }

    /// Walks the columns `C` at a time, the rest one by one.
    #[inline(always)]
    fn columns_by<L: Lanes, const R: usize, const C: usize>(self) {
        let x: [&[f32]; R] = std::array::from_fn(|row| self.x[row]);
        let k = x[0].len();
        let columns = self.weight.len() / k;
        assert!(x.iter().all(|row| row.len() == k) && columns * k == self.weight.len(), "ragged tile");
        let whole = columns - columns % C;
        for column in (0..whole).step_by(C) {
            let sums = dots::<L, W, R, C>(&self.weight[column * k..][..C * k], &x);
            put(self.out, self.at, column, &sums, self.accumulate);
        }
        for column in whole..columns {
            let sums = dots::<L, W, R, 1>(&self.weight[column * k..][..k], &x);
            put(self.out, self.at, column, &sums, self.accumulate);
        }
    }
}

impl<W: Weight> LaneOp for Dots<'_, '_, W> {
    type Output = ();

    /// Chooses a register tile by the number of rows: twelve accumulators at most, eight at least to hide latency.
    #[inline(always)]
    fn run<L: Lanes>(self) {
        match self.x.len() {
            1 => self.columns_by::<L, 1, 8>(),
            2 => self.columns_by::<L, 2, 6>(),
            3 => self.columns_by::<L, 3, 4>(),
            4 => self.columns_by::<L, 4, 3>(),
            other => unreachable!("{other} rows in a tile of 1 to {ROWS_MAX}"),
        }
    }
}

#[inline(always)]
fn put<const R: usize, const C: usize>(
    out: &mut ViewMut<'_, f32>,
    at: &[usize],
    column: usize,
    sums: &[[f32; C]; R],
    accumulate: bool,
) {
    for (sums, at) in sums.iter().zip(at) {
        for (out, sum) in out.slice_mut(at + column, C).iter_mut().zip(sums) {
            *out = if accumulate { *out + sum } else { *sum };
        }
    }
}

/// R x C dot products; `weight` is [C, k], each row of `x` has k elements.
#[inline(always)]
fn dots<L: Lanes, W: Weight, const R: usize, const C: usize>(weight: &[W], x: &[&[f32]; R]) -> [[f32; C]; R] {
    let k = x[0].len();
    assert!(weight.len() == C * k && x.iter().all(|row| row.len() == k), "operands of a tile differ in k");
    let mut sums = [[L::splat(0.0); C]; R];
    let whole = k - k % LANES;
    for at in (0..whole).step_by(LANES) {
        let mut w = [L::splat(0.0); C];
        for (column, w) in w.iter_mut().enumerate() {
            // SAFETY: at + LANES <= k, and the weights are C rows of k (asserted above).
            *w = W::lanes(unsafe { &*weight.as_ptr().add(column * k + at).cast::<[W; LANES]>() });
        }
        for (x, sums) in x.iter().zip(&mut sums) {
            // SAFETY: at + LANES <= k, the length of each row (asserted above).
            let x = L::load(unsafe { &*x.as_ptr().add(at).cast::<[f32; LANES]>() });
            for (sum, &w) in sums.iter_mut().zip(&w) {
                *sum = x.mul_add(w, *sum);
            }
        }
    }
    if whole < k {
        let mut w = [L::splat(0.0); C];
        for (column, w) in w.iter_mut().enumerate() {
            *w = W::lanes(&padded(&weight[column * k + whole..][..k - whole]));
        }
        for (x, sums) in x.iter().zip(&mut sums) {
            let x = L::load(&padded(&x[whole..]));
            for (sum, &w) in sums.iter_mut().zip(&w) {
                *sum = x.mul_add(w, *sum);
            }
        }
    }
    reduce(&sums)
}

/// Fewer than eight elements, zeros behind them.
#[inline(always)]
fn padded<T: Element>(rest: &[T]) -> [T; LANES] {
    let mut all = [T::zeroed(); LANES];
    all[..rest.len()].copy_from_slice(rest);
    all
}

/// The tree over the lanes of every sum, four at a time.
#[inline(always)]
fn reduce<L: Lanes, const R: usize, const C: usize>(sums: &[[L; C]; R]) -> [[f32; C]; R] {
    let mut out = [[0.0; C]; R];
    for from in (0..R * C).step_by(4) {
        let at = |i: usize| (from + i).min(R * C - 1);
        let four = L::sum4(std::array::from_fn(|i| sums[at(i) / C][at(i) % C]));
        for (i, sum) in four.into_iter().enumerate().take(R * C - from) {
            out[(from + i) / C][(from + i) % C] = sum;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::simd::Portable;
    use super::super::tests::Rng;
    use super::super::view::bind;
    use super::*;
    use crate::kernels::m3::MoeCombineArgs;
    use crate::kernels::{KernelArgs, Ptr};

    /// AVX2 and plain arrays give the same bits.
    #[test]
    fn both_kinds_of_lanes_give_the_same_bits() {
        let mut rng = Rng::seeded("dots");
        for _ in 0..40 {
            let (rows, columns, k) = (1 + rng.below(4), 1 + rng.below(20), 1 + rng.below(100));
            let x: Vec<f32> = (0..rows * k).map(|_| rng.normal()).collect();
            let weight: Vec<bf16> = (0..columns * k).map(|_| bf16::from_f32(rng.normal())).collect();
            let x: Vec<&[f32]> = x.chunks(k).collect();
            let at: Vec<usize> = (0..rows).map(|row| row * columns).collect();
            let bits = |portable: bool| {
                let mut out = vec![0.5f32; rows * columns];
                // Any struct with an f32 output gives a view of it.
                let args = MoeCombineArgs {
                    residual: Ptr(out.as_mut_ptr() as u64),
                    rows: rows as u32,
                    width: columns as u32,
                    ..Default::default()
                };
                assert_eq!(MoeCombineArgs::LAYOUT.bytes, bytemuck::bytes_of(&args).len());
                // SAFETY: the one pointer that is followed is that of `out`, with its extent.
                let args = unsafe { bind::<MoeCombineArgs>(bytemuck::bytes_of(&args)) };
                let mut view = args.write::<f32>(|a| &a.residual);
                let dots = Dots { weight: &weight[..], x: &x, at: &at, out: &mut view, accumulate: true };
                if portable {
                    LaneOp::run::<Portable>(dots)
                } else {
                    dots.run()
                }
                out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            assert_eq!(bits(true), bits(false));
        }
    }
}

//! Each op of `m3` against plain f64 loops on random shapes, and against itself for independence of the batch.

#![expect(unsafe_code, reason = "launches ops on buffers of the test")]

use bytemuck::{Pod, bytes_of};
use half::bf16;

use super::Rng;
use crate::DType;
use crate::hal::{LaunchShape, Workgroup};
use crate::kernels::m3::*;
use crate::kernels::registry::*;
use crate::kernels::{KernelArgs, KernelSpec, Ptr};

/// What the tests draw.
impl Rng {
    fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    /// Causal lengths, every third or so a pad.
    fn lens(&mut self, rows: usize) -> Vec<i32> {
        (0..rows).map(|_| if self.below(3) == 0 { 0 } else { 1 + self.below(50) as i32 }).collect()
    }
}

fn ptr<T>(slice: &[T]) -> Ptr {
    Ptr(slice.as_ptr() as u64)
}

fn ptr_mut<T>(slice: &mut [T]) -> Ptr {
    Ptr(slice.as_mut_ptr() as u64)
}

/// Runs every workgroup of a launch, last first: their order must not matter.
fn launch<A: KernelArgs>(spec: &KernelSpec, grid: [u32; 2], lds_bytes: u32, args: &A) {
    assert_eq!(spec.args.name, A::LAYOUT.name);
    let shape = LaunchShape { grid: [grid[0], grid[1], 1], workgroup: [256, 1, 1], lds_bytes };
    let mut lds = vec![0u64; lds_bytes.div_ceil(8) as usize];
    for y in (0..grid[1]).rev() {
        for x in (0..grid[0]).rev() {
            let lds = &mut bytemuck::cast_slice_mut(&mut lds)[..lds_bytes as usize];
            // SAFETY: the tests give pointers to live vectors of the declared extents.
            unsafe { (spec.cpu)(bytes_of(args), &mut Workgroup { id: [x, y, 0], shape, lds }) }
        }
    }
}

fn close(got: f32, want: f64, scale: f64, what: std::fmt::Arguments<'_>) {
    assert!((f64::from(got) - want).abs() <= scale * 2e-6 + 1e-30, "{what}: got {got}, expected {want} (scale {scale})");
}

#[derive(Clone)]
struct Linear<'a, W> {
    x: &'a [f32],
    weight: &'a [W],
    len: &'a [i32],
    n: usize,
    k: usize,
    x_stride: usize,
    dtype: DType,
}

impl<W: Pod> Linear<'_, W> {
    /// Runs on `out`, [rows, n].
    fn run(&self, out: &mut [f32], accumulate: bool, tile_cols: usize, tile_rows: usize) {
        let rows = self.len.len();
        let args = LinearArgs {
            x: ptr(self.x),
            weight: ptr(self.weight),
            row_len: ptr(self.len),
            out: ptr_mut(out),
            rows: rows as u32,
            n: self.n as u32,
            k: self.k as u32,
            x_stride: self.x_stride as u32,
            out_stride: self.n as u32,
            weight_dtype: self.dtype.code(),
            accumulate: accumulate.into(),
            tile_cols: tile_cols as u32,
            tile_rows: tile_rows as u32,
            reserved: 0,
        };
        launch(&LINEAR, [self.n.div_ceil(tile_cols) as u32, rows.div_ceil(tile_rows) as u32], 0, &args);
    }
}

/// Random products against f64, pads included.
#[test]
fn linear_matches_f64() {
    let mut random = Rng::seeded("linear_matches_f64");
    for case in 0..40 {
        let (rows, n, k) = (random.between(1, 70), random.between(1, 90), random.between(1, 200));
        let x_stride = k + random.below(5);
        let x = random.floats(rows * x_stride);
        let wide = random.floats(n * k);
        let narrow: Vec<bf16> = wide.iter().map(|&w| bf16::from_f32(w)).collect();
        let before = random.floats(rows * n);
        let len = random.lens(rows);
        let (tile_cols, tile_rows) = (random.between(1, 100), random.between(1, 80));
        for (half, accumulate) in [(false, false), (true, false), (false, true), (true, true)] {
            let mut out = before.clone();
            let weight = |at: usize| if half { narrow[at].to_f64() } else { f64::from(wide[at]) };
            if half {
                let linear = Linear { x: &x, weight: &narrow, len: &len, n, k, x_stride, dtype: DType::Bf16 };
                linear.run(&mut out, accumulate, tile_cols, tile_rows);
            } else {
                let linear = Linear { x: &x, weight: &wide, len: &len, n, k, x_stride, dtype: DType::F32 };
                linear.run(&mut out, accumulate, tile_cols, tile_rows);
            }
            for (row, &len) in len.iter().enumerate() {
                for column in 0..n {
                    let at = row * n + column;
                    let base = if accumulate { f64::from(before[at]) } else { 0.0 };
                    let products = (0..k).map(|i| f64::from(x[row * x_stride + i]) * weight(column * k + i));
                    let products: Vec<f64> = if len > 0 { products.collect() } else { vec![] };
                    let scale = base.abs() + products.iter().map(|p| p.abs()).sum::<f64>();
                    close(out[at], base + products.iter().sum::<f64>(), scale, format_args!("case {case} [{row}, {column}]"));
                }
            }
        }
    }
}

/// A row's bits are the same alone, among others, and under any tiling.
#[test]
fn linear_is_independent_of_the_batch() {
    let mut random = Rng::seeded("linear_is_independent_of_the_batch");
    for _ in 0..12 {
        let (rows, n, k) = (random.between(2, 70), random.between(1, 80), random.between(1, 150));
        let x = random.floats(rows * k);
        let weight: Vec<bf16> = random.floats(n * k).into_iter().map(bf16::from_f32).collect();
        let len = random.lens(rows);
        let all = Linear { x: &x, weight: &weight, len: &len, n, k, x_stride: k, dtype: DType::Bf16 };
        let mut together = vec![f32::NAN; rows * n];
        all.run(&mut together, false, 64, 64);
        let mut tiled = vec![f32::NAN; rows * n];
        all.run(&mut tiled, false, random.between(1, 30), random.between(1, 9));
        assert_eq!(bits(&together), bits(&tiled));
        for row in 0..rows {
            let mut alone = vec![f32::NAN; n];
            Linear { x: &x[row * k..][..k], len: &len[row..][..1], ..all.clone() }.run(&mut alone, false, 24, 1);
            assert_eq!(bits(&alone), bits(&together[row * n..][..n]), "row {row}");
        }
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn rms_norm_matches_f64() {
    let mut random = Rng::seeded("rms_norm_matches_f64");
    for indexed in [false, true, true, false] {
        let (x_rows, width) = (random.between(1, 40), random.between(1, 100));
        let rows = if indexed { random.between(1, 9) } else { x_rows };
        let (x, weight, len) = (random.floats(x_rows * width), random.floats(width), random.lens(x_rows));
        let index: Vec<i32> = (0..rows).map(|_| random.below(x_rows + 1) as i32 - 1).collect();
        let mut out = vec![f32::NAN; rows * width];
        let args = RmsNormArgs {
            x: ptr(&x),
            rows_index: if indexed { ptr(&index) } else { Ptr::NULL },
            row_len: ptr(&len),
            weight: ptr(&weight),
            out: ptr_mut(&mut out),
            rows: rows as u32,
            x_rows: x_rows as u32,
            width: width as u32,
            indexed: indexed.into(),
            eps: 1e-6,
            reserved: 0,
        };
        launch(&RMS_NORM, [rows as u32, 1], 0, &args);
        for row in 0..rows {
            let source = if indexed { index[row] } else { row as i32 };
            let live = source >= 0 && len[source as usize] > 0;
            let x: Vec<f64> = match live {
                true => x[source as usize * width..][..width].iter().map(|&x| x.into()).collect(),
                false => vec![0.0; width],
            };
            let scale = (x.iter().map(|x| x * x).sum::<f64>() / width as f64 + 1e-6).sqrt().recip();
            for c in 0..width {
                let want = x[c] * scale * (1.0 + f64::from(weight[c]));
                close(out[row * width + c], want, want.abs(), format_args!("[{row}, {c}]"));
            }
        }
    }
}

#[test]
fn select_last_skips_empty_sequences() {
    let cu_seqlens = [0, 3, 3, 4, 9, 9];
    let mut rows = [0; 5];
    let args = SelectLastArgs { cu_seqlens: ptr(&cu_seqlens), rows_index: ptr_mut(&mut rows), sequences: 5, reserved: 0 };
    launch(&SELECT_LAST, [1, 1], 0, &args);
    assert_eq!(rows, [2, -1, 3, 8, -1]);
}

fn route(logits: &[f32], bias: &[f32], len: &[i32], topk: usize, scale: f32) -> (Vec<i32>, Vec<f32>) {
    let rows = len.len();
    let (mut ids, mut weights) = (vec![-7; rows * topk], vec![f32::NAN; rows * topk]);
    let args = RouteArgs {
        logits: ptr(logits),
        bias: ptr(bias),
        row_len: ptr(len),
        ids: ptr_mut(&mut ids),
        weights: ptr_mut(&mut weights),
        rows: rows as u32,
        experts: bias.len() as u32,
        topk: topk as u32,
        scale,
    };
    launch(&ROUTE, [rows as u32, 1], 0, &args);
    (ids, weights)
}

#[test]
fn route_matches_a_sort() {
    let mut random = Rng::seeded("route_matches_a_sort");
    for _ in 0..20 {
        let (rows, experts) = (random.between(1, 70), random.between(1, 40));
        let topk = random.between(1, experts.min(8));
        let (logits, bias, len) = (random.floats(rows * experts), random.floats(experts), random.lens(rows));
        let (ids, weights) = route(&logits, &bias, &len, topk, 2.0);
        for row in 0..rows {
            let (ids, weights) = (&ids[row * topk..][..topk], &weights[row * topk..][..topk]);
            if len[row] == 0 {
                assert!(ids.iter().all(|&id| id == -1) && weights.iter().all(|&w| w == 0.0));
                continue;
            }
            let sigmoid: Vec<f64> =
                logits[row * experts..][..experts].iter().map(|&x| 1.0 / (1.0 + (-f64::from(x)).exp())).collect();
            let mut order: Vec<usize> = (0..experts).collect();
            let score = |expert: usize| sigmoid[expert] + f64::from(bias[expert]);
            order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
            let sum: f64 = order[..topk].iter().map(|&e| sigmoid[e]).sum();
            for j in 0..topk {
                // Rounding may swap two that are equal in f32.
                let gap = (score(ids[j] as usize) - score(order[j])).abs();
                assert!(ids[j] as usize == order[j] || gap < 1e-6, "row {row}: {} for {}", ids[j], order[j]);
                close(weights[j], sigmoid[ids[j] as usize] / sum * 2.0, 1.0, format_args!("weight [{row}, {j}]"));
            }
        }
    }
}

#[test]
fn route_breaks_ties_low_and_nan_last() {
    let (ids, weights) = route(&[0.0, 1.0, 1.0, f32::NAN, 1.0, 0.0], &[0.0; 6], &[1], 4, 1.0);
    assert_eq!(ids, [1, 2, 4, 0]);
    assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    let (ids, _) = route(&[0.0, f32::NAN], &[0.0; 2], &[1], 2, 1.0);
    assert_eq!(ids, [0, 1]);
    // The bias moves the choice, not the weight.
    let (ids, weights) = route(&[3.0, -3.0], &[0.0, 5.0], &[1], 1, 2.0);
    assert_eq!((ids, weights), (vec![1], vec![2.0]));
}

/// Sorts, multiplies in the experts, combines; against a loop over rows in f64.
#[test]
fn experts_match_f64() {
    let mut random = Rng::seeded("experts_match_f64");
    for case in 0..25 {
        let (rows, experts) = (random.between(1, 70), random.between(1, 12));
        let topk = random.between(1, experts.min(4));
        let (n, k, tile_rows) = (random.between(1, 40), random.between(1, 60), random.between(1, 9));
        let len = random.lens(rows);
        let (ids, weights) = route(&random.floats(rows * experts), &random.floats(experts), &len, topk, 2.0);
        let pairs = rows * topk;
        let tiles_max = moe_tiles(pairs as u32, experts as u32, tile_rows as u32);
        let (mut list, mut tiles) = (vec![-7; pairs], vec![-7; tiles_max as usize * 4]);
        let sort = MoeSortArgs {
            ids: ptr(&ids),
            list: ptr_mut(&mut list),
            tiles: ptr_mut(&mut tiles),
            pairs: pairs as u32,
            experts: experts as u32,
            tile_rows: tile_rows as u32,
            tiles_max,
        };
        launch(&MOE_SORT, [1, 1], 4 * (experts as u32 + 1), &sort);

        let x = random.floats(rows * k);
        let weight: Vec<bf16> = random.floats(experts * n * k).into_iter().map(bf16::from_f32).collect();
        let mut out = vec![f32::NAN; pairs * n];
        let tile_cols = random.between(1, 50) as u32;
        let linear = MoeLinearArgs {
            x: ptr(&x),
            weight: ptr(&weight),
            list: ptr(&list),
            tiles: ptr(&tiles),
            out: ptr_mut(&mut out),
            pairs: pairs as u32,
            pairs_a_row: topk as u32,
            n: n as u32,
            k: k as u32,
            experts: experts as u32,
            tiles_max,
            tile_cols,
            weight_dtype: DType::Bf16.code(),
        };
        launch(&MOE_LINEAR, [(n as u32).div_ceil(tile_cols), tiles_max], 0, &linear);

        let before = random.floats(rows * n);
        let mut residual = before.clone();
        let combine = MoeCombineArgs {
            experts: ptr(&out),
            weights: ptr(&weights),
            row_len: ptr(&len),
            residual: ptr_mut(&mut residual),
            rows: rows as u32,
            topk: topk as u32,
            width: n as u32,
            reserved: 0,
        };
        launch(&MOE_COMBINE, [rows as u32, 1], 0, &combine);

        for row in 0..rows {
            for c in 0..n {
                let mut want = f64::from(before[row * n + c]);
                let mut scale = want.abs();
                for j in (0..topk).filter(|_| len[row] > 0) {
                    let base = (ids[row * topk + j] as usize * n + c) * k;
                    for i in 0..k {
                        let part = f64::from(weights[row * topk + j]) * f64::from(x[row * k + i]) * weight[base + i].to_f64();
                        (want, scale) = (want + part, scale + part.abs());
                    }
                }
                close(residual[row * n + c], want, scale, format_args!("case {case} [{row}, {c}]"));
            }
        }
        // The grouped product has the bits of a plain one with the expert's weights.
        for (pair, &id) in ids.iter().enumerate().filter(|&(_, &id)| id >= 0) {
            let mut alone = vec![f32::NAN; n];
            let weight = &weight[id as usize * n * k..][..n * k];
            let x = &x[pair / topk * k..][..k];
            Linear { x, weight, len: &[1], n, k, x_stride: k, dtype: DType::Bf16 }.run(&mut alone, false, 24, 1);
            assert_eq!(bits(&alone), bits(&out[pair * n..][..n]), "pair {pair}");
        }
    }
}

#[test]
fn moe_tiles_is_enough_and_never_more_than_pairs() {
    for pairs in 0..60u32 {
        for (experts, tile_rows) in [(1, 1), (3, 4), (8, 16), (128, 4), (5, 64)] {
            let tiles = moe_tiles(pairs, experts, tile_rows);
            // Worst case: all experts but one hit once, the rest on one expert.
            let hit = pairs.min(experts);
            let worst = hit.saturating_sub(1) + (pairs - hit.saturating_sub(1)).div_ceil(tile_rows);
            assert!(worst <= tiles && tiles <= pairs, "{pairs} {experts} {tile_rows}: {worst} {tiles}");
        }
    }
}

#[test]
fn swiglu_matches_f64_and_clamps() {
    let mut random = Rng::seeded("swiglu_matches_f64_and_clamps");
    for rows_a_len in [1, 3] {
        let (rows, width) = (random.between(1, 20) * rows_a_len, random.between(1, 70));
        let x: Vec<f32> = random.floats(rows * 2 * width).into_iter().map(|x| x * 6.0).collect();
        let len = random.lens(rows / rows_a_len);
        let mut out = vec![f32::NAN; rows * width];
        let args = SwigluArgs {
            x: ptr(&x),
            row_len: ptr(&len),
            out: ptr_mut(&mut out),
            rows: rows as u32,
            width: width as u32,
            rows_a_len: rows_a_len as u32,
            alpha: 1.702,
            limit: 7.0,
            reserved: 0,
        };
        launch(&SWIGLU, [rows as u32, 1], 0, &args);
        for row in 0..rows {
            for c in 0..width {
                let gate = f64::from(x[row * 2 * width + c]).min(7.0);
                let up = f64::from(x[row * 2 * width + width + c]).clamp(-7.0, 7.0);
                let want = (up + 1.0) * gate / (1.0 + (-f64::from(1.702f32) * gate).exp());
                let want = if len[row / rows_a_len] == 0 { 0.0 } else { want };
                close(out[row * width + c], want, want.abs() + (gate * 1e-1).abs(), format_args!("[{row}, {c}]"));
            }
        }
    }
}

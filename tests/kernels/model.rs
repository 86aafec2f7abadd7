//! Cases of the dense and mixture-of-experts kernels.

use capstan::DType;
use capstan::kernels::m3::{
    LinearArgs, MoeCombineArgs, MoeLinearArgs, MoeSortArgs, RmsNormArgs, RouteArgs, SelectLastArgs, SwigluArgs, moe_tiles,
};
use capstan::kernels::registry::{LINEAR, MOE_COMBINE, MOE_LINEAR, MOE_SORT, RMS_NORM, ROUTE, SELECT_LAST, SWIGLU};

use super::{Case, Compare, Draw};

pub fn cases(draw: &mut Draw) -> Vec<Case> {
    let mut all =
        vec![rms_norm(draw), rms_norm(draw), select_last(draw), route(draw), route(draw), swiglu(draw), moe_combine(draw)];
    all.extend((0..6).map(|_| linear(draw)));
    all.extend((0..3).flat_map(|_| experts(draw)));
    all
}

fn rms_norm(draw: &mut Draw) -> Case {
    let (x_rows, width) = (draw.between(1, 9), draw.of(&[1, 16, 77, 6144]));
    let indexed = u32::from(draw.chance(2));
    let rows = if indexed == 1 { draw.between(1, 9) } else { x_rows };
    let index: Vec<i32> = (0..rows).map(|_| draw.between(0, x_rows) as i32 - 1).collect();
    let args = RmsNormArgs { rows, x_rows, width, indexed, eps: 1e-6, ..Default::default() };
    let case = Case::new(format!("{args:?}"), &RMS_NORM, [rows, 1, 1], &args);
    let case = if indexed == 1 { case.with("rows_index", &index) } else { case };
    case.with("x", &draw.floats(x_rows * width))
        .with("row_len", &draw.lens(x_rows, 9))
        .with("weight", &draw.floats(width))
        .undefined("out", Compare::Exact)
}

fn select_last(draw: &mut Draw) -> Case {
    let sequences = draw.between(1, 600);
    let mut ends = vec![0i32];
    for _ in 0..sequences {
        let last = ends[ends.len() - 1];
        ends.push(last + draw.between(0, 3) as i32);
    }
    let args = SelectLastArgs { sequences, ..Default::default() };
    Case::new(format!("{args:?}"), &SELECT_LAST, [1, 1, 1], &args)
        .with("cu_seqlens", &ends)
        .undefined("rows_index", Compare::Exact)
}

fn linear(draw: &mut Draw) -> Case {
    let (rows, n, k) = (draw.of(&[1, 2, 3, 5, 8, 19, 70]), draw.between(1, 130), draw.of(&[1, 7, 8, 64, 136, 300, 512]));
    let (x_stride, out_stride) = (k + draw.between(0, 1) * 8, n + draw.between(0, 3));
    let dtype = draw.of(&[DType::F32, DType::Bf16]);
    let (tile_cols, tile_rows) = (draw.of(&[48, 48, 7, 100]), draw.of(&[64, 64, 1, 9, 300]));
    let args = LinearArgs {
        rows,
        n,
        k,
        x_stride,
        out_stride,
        weight_dtype: dtype.code(),
        accumulate: draw.between(0, 1),
        tile_cols,
        tile_rows,
        ..Default::default()
    };
    let out = draw.floats(rows * out_stride);
    Case::new(format!("{args:?}"), &LINEAR, [n.div_ceil(tile_cols), rows.div_ceil(tile_rows), 1], &args)
        .with("x", &draw.floats(rows * x_stride))
        .with("weight", &draw.cells(dtype, n * k, 1.0))
        .with("row_len", &draw.lens(rows, 9))
        .with("out", &out)
}

fn route(draw: &mut Draw) -> Case {
    let (rows, experts) = (draw.between(1, 9), draw.of(&[1, 8, 128, 300]));
    let topk = draw.between(1, experts.min(8));
    let mut logits = draw.floats(rows * experts);
    if draw.chance(2) {
        // Ties, and NaN last.
        logits.iter_mut().for_each(|x| *x = x.round());
        let at = draw.between(0, rows * experts - 1) as usize;
        logits[at] = f32::NAN;
    }
    let bias: Vec<f32> = (0..experts).map(|_| draw.normal().round() * 0.1).collect();
    let args = RouteArgs { rows, experts, topk, scale: 2.0, ..Default::default() };
    Case::new(format!("{args:?}"), &ROUTE, [rows, 1, 1], &args)
        .with("logits", &logits)
        .with("bias", &bias)
        .with("row_len", &draw.lens(rows, 9))
        .undefined("ids", Compare::Exact)
        .undefined("weights", Compare::Exact)
}

fn swiglu(draw: &mut Draw) -> Case {
    let rows_a_len = draw.of(&[1, 4]);
    let (rows, width) = (draw.between(1, 9) * rows_a_len, draw.between(1, 700));
    let mut x: Vec<f32> = draw.floats(rows * 2 * width).into_iter().map(|x| x * 6.0).collect();
    let at = draw.between(0, rows * 2 * width - 1) as usize;
    x[at] = f32::NAN;
    let args = SwigluArgs { rows, width, rows_a_len, alpha: 1.702, limit: 7.0, ..Default::default() };
    Case::new(format!("{args:?}"), &SWIGLU, [rows, 1, 1], &args)
        .with("x", &x)
        .with("row_len", &draw.lens(rows / rows_a_len, 9))
        .undefined("out", Compare::Exact)
}

/// The sort, and a product over what it gives.
fn experts(draw: &mut Draw) -> [Case; 2] {
    let (rows, experts) = (draw.between(1, 200), draw.of(&[1, 6, 128, 300]));
    let (topk, tile_rows) = (draw.between(1, experts.min(4)), draw.of(&[1, 5, 64]));
    let pairs = rows * topk;
    // Each row's experts differ; a pad has none.
    let ids: Vec<i32> = (0..rows)
        .flat_map(|_| if draw.chance(4) { vec![-1; topk as usize] } else { draw.permutation(experts)[..topk as usize].to_vec() })
        .collect();
    let tiles_max = moe_tiles(pairs, experts, tile_rows);
    let sort = MoeSortArgs { pairs, experts, tile_rows, tiles_max, ..Default::default() };
    let sort_case = Case::new(format!("{sort:?}"), &MOE_SORT, [1, 1, 1], &sort)
        .with("ids", &ids)
        .undefined("list", Compare::Exact)
        .undefined("tiles", Compare::Exact)
        .lds(4 * (experts + 1));

    let mut order: Vec<i32> = (0..pairs as i32).filter(|&pair| ids[pair as usize] >= 0).collect();
    order.sort_by_key(|&pair| (ids[pair as usize], pair));
    let mut tiles: Vec<[i32; 4]> = Vec::new();
    for (at, &pair) in order.iter().enumerate() {
        let expert = ids[pair as usize];
        match tiles.last_mut() {
            Some(tile) if tile[0] == expert && (tile[2] - tile[1]) < tile_rows as i32 => tile[2] += 1,
            _ => tiles.push([expert, at as i32, at as i32 + 1, 0]),
        }
    }
    tiles.resize(tiles_max as usize, [-1, 0, 0, 0]);
    order.resize(pairs as usize, -1);
    let (n, k, pairs_a_row) = (draw.between(1, 60), draw.of(&[8, 33, 200]), draw.of(&[1, topk]));
    let dtype = draw.of(&[DType::F32, DType::Bf16]);
    let args = MoeLinearArgs {
        pairs,
        pairs_a_row,
        n,
        k,
        experts,
        tiles_max,
        tile_cols: 48,
        weight_dtype: dtype.code(),
        ..Default::default()
    };
    let product = Case::new(format!("{args:?}"), &MOE_LINEAR, [n.div_ceil(48), tiles_max, 1], &args)
        .with("x", &draw.floats(pairs / pairs_a_row * k))
        .with("weight", &draw.cells(dtype, experts * n * k, 1.0))
        .with("list", &order)
        .with("tiles", tiles.as_flattened())
        .undefined("out", Compare::Exact);
    [sort_case, product]
}

fn moe_combine(draw: &mut Draw) -> Case {
    let (rows, topk, width) = (draw.between(1, 9), draw.between(1, 5), draw.between(1, 700));
    let args = MoeCombineArgs { rows, topk, width, ..Default::default() };
    Case::new(format!("{args:?}"), &MOE_COMBINE, [rows, 1, 1], &args)
        .with("experts", &draw.floats(rows * topk * width))
        .with("weights", &draw.floats(rows * topk))
        .with("row_len", &draw.lens(rows, 9))
        .with("residual", &draw.floats(rows * width))
}

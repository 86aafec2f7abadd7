//! The mixture of experts: `route`, `moe_sort`, `moe_linear`, `moe_combine`.

use half::bf16;

use super::dots::{Dots, ROWS_MAX, Weight};
use super::simd::exp;
use super::view::Bound;
use crate::dtype::DType;
use crate::hal::Workgroup;
use crate::kernels::m3::{MoeCombineArgs, MoeLinearArgs, MoeSortArgs, RouteArgs};

/// Chooses the experts of one row.
pub fn route(args: &Bound<'_, RouteArgs>, workgroup: &mut Workgroup<'_>) {
    let (row, experts, topk) = (workgroup.id[0] as usize, args.experts as usize, args.topk as usize);
    let (mut ids, mut weights) = (args.write::<i32>(|a| &a.ids), args.write::<f32>(|a| &a.weights));
    let (ids, weights) = (ids.slice_mut(row * topk, topk), weights.slice_mut(row * topk, topk));
    if args.read::<i32>(|a| &a.row_len).get(row) <= 0 {
        ids.fill(-1);
        weights.fill(0.0);
        return;
    }
    let logits = args.read::<f32>(|a| &a.logits).slice(row * experts, experts);
    choose(logits, args.read::<f32>(|a| &a.bias).slice(0, experts), args.scale, ids, weights);
}

/// `ids.len()` rounds of the largest sigmoid + bias that is not taken yet; an expert comes after all that beat it.
fn choose(logits: &[f32], bias: &[f32], scale: f32, ids: &mut [i32], weights: &mut [f32]) {
    // With z = e^-|x|: 1 / (1 + z) for x >= 0, z / (1 + z) below.
    let sigmoid = |x: f32| {
        let z = exp(-x.abs());
        (if x < 0.0 { z } else { 1.0 }) / (1.0 + z)
    };
    let rank = |expert: usize| {
        let score = sigmoid(logits[expert]) + bias[expert];
        if score.is_nan() { f32::NEG_INFINITY } else { score }
    };
    let mut sum = 0.0;
    for j in 0..ids.len() {
        let taken = &ids[..j];
        let best = (0..logits.len())
            .filter(|&expert| !taken.contains(&(expert as i32)))
            .map(|expert| (rank(expert), expert))
            .reduce(|best, next| if next.0 > best.0 { next } else { best })
            .expect("topk is at most the number of experts")
            .1;
        ids[j] = best as i32;
        weights[j] = sigmoid(logits[best]);
        sum += weights[j];
    }
    for weight in weights {
        *weight = *weight / sum * scale;
    }
}

/// A counting sort of the pairs by expert, cut into tiles.
pub fn moe_sort(args: &Bound<'_, MoeSortArgs>, workgroup: &mut Workgroup<'_>) {
    let (pairs, tiles) = (args.pairs as usize, args.tiles_max as usize * 4);
    let ends: &mut [u32] = bytemuck::cast_slice_mut(&mut workgroup.lds[..(args.experts as usize + 1) * 4]);
    sort(
        args.read::<i32>(|a| &a.ids).slice(0, pairs),
        args.tile_rows as usize,
        ends,
        args.write::<i32>(|a| &a.list).slice_mut(0, pairs),
        args.write::<i32>(|a| &a.tiles).slice_mut(0, tiles),
    );
}

/// `ends` has one entry more than there are experts: first counts, then running starts, at last the end of each run.
fn sort(ids: &[i32], tile_rows: usize, ends: &mut [u32], list: &mut [i32], tiles: &mut [i32]) {
    ends.fill(0);
    let experts = ends.len() - 1;
    let live = |id: i32| usize::try_from(id).ok().filter(|&id| id < experts);
    for id in ids.iter().filter_map(|&id| live(id)) {
        ends[id + 1] += 1;
    }
    for expert in 0..experts {
        ends[expert + 1] += ends[expert];
    }
    let total = ends[experts] as usize;
    list[total..].fill(-1);
    let mut tile = tiles.chunks_exact_mut(4);
    for expert in 0..experts {
        for first in (ends[expert]..ends[expert + 1]).step_by(tile_rows) {
            let end = (first + tile_rows as u32).min(ends[expert + 1]);
            let tile = tile.next().expect("moe_tiles bounds the number of tiles");
            tile.copy_from_slice(&[expert as i32, first as i32, end as i32, 0]);
        }
    }
    for tile in tile {
        tile.copy_from_slice(&[-1, 0, 0, 0]);
    }
    for (pair, &id) in ids.iter().enumerate() {
        if let Some(id) = live(id) {
            list[ends[id] as usize] = pair as i32;
            ends[id] += 1;
        }
    }
}

/// One tile of one expert.
pub fn moe_linear(args: &Bound<'_, MoeLinearArgs>, workgroup: &mut Workgroup<'_>) {
    match DType::from_code(args.weight_dtype) {
        DType::F32 => tile::<f32>(args, workgroup.id),
        DType::Bf16 => tile::<bf16>(args, workgroup.id),
        other => panic!("moe_linear takes no {other} weights"),
    }
}

fn tile<W: Weight>(args: &Bound<'_, MoeLinearArgs>, id: [u32; 3]) {
    let [n, k, pairs_a_row] = [args.n, args.k, args.pairs_a_row].map(|dim| dim as usize);
    let first_col = id[0] as usize * args.tile_cols as usize;
    let columns = (args.tile_cols as usize).min(n.saturating_sub(first_col));
    let tiles = args.read::<i32>(|a| &a.tiles);
    let [expert, first, end] = [0, 1, 2].map(|word| tiles.get(id[1] as usize * 4 + word));
    if expert < 0 || end <= first || columns == 0 {
        return;
    }
    let x = args.read::<f32>(|a| &a.x);
    let weight = args.read::<W>(|a| &a.weight).slice((expert as usize * n + first_col) * k, columns * k);
    let list = args.read::<i32>(|a| &a.list).slice(first as usize, (end - first) as usize);
    let mut out = args.write::<f32>(|a| &a.out);
    for pairs in list.chunks(ROWS_MAX) {
        let (mut xs, mut at) = ([&[][..]; ROWS_MAX], [0; ROWS_MAX]);
        for (i, &pair) in pairs.iter().enumerate() {
            let pair = pair as usize;
            (xs[i], at[i]) = (x.slice(pair / pairs_a_row * k, k), pair * n + first_col);
        }
        let (x, at) = (&xs[..pairs.len()], &at[..pairs.len()]);
        Dots { weight, x, at, out: &mut out, accumulate: false }.run();
    }
}

/// Adds the weighted outputs of one row's experts to its residual.
pub fn moe_combine(args: &Bound<'_, MoeCombineArgs>, workgroup: &mut Workgroup<'_>) {
    let (row, width, topk) = (workgroup.id[0] as usize, args.width as usize, args.topk as usize);
    if args.read::<i32>(|a| &a.row_len).get(row) <= 0 {
        return;
    }
    let experts = args.read::<f32>(|a| &a.experts).slice(row * topk * width, topk * width);
    let weights = args.read::<f32>(|a| &a.weights).slice(row * topk, topk);
    let mut residual = args.write::<f32>(|a| &a.residual);
    for (channel, residual) in residual.slice_mut(row * width, width).iter_mut().enumerate() {
        let mixed = weights.iter().enumerate().fold(0.0, |sum, (j, weight)| sum + weight * experts[j * width + channel]);
        *residual += mixed;
    }
}

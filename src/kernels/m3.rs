//! Argument structs of the dense and mixture-of-experts half of a MiniMax-M3 layer: norms, matrix products, router, SwiGLU-OAI.
//!
//! Activations are f32 everywhere; weights stay as stored (bf16 or f32, row-major [n, k]). Every result depends on its own row
//! and the weights alone, never on how many rows there are, which row it is, or how a launch is tiled: a product's sum runs
//! over fixed lanes of `k` and a fixed tree, so decode, prefill, padding and chunking give the same bits (PAD-3).
//!
//! Grids are tiles of output columns x tiles of rows, workgroup \[256\]; tile sizes are arguments, chosen by the chain. Rows
//! whose `row_len` is 0 are pads: they read as nothing and give zeros, or leave an accumulated output alone (PAD-2).

use super::args::product;
use crate::DType;
use crate::kernel_args;

/// Elements touched in `rows` rows of `width` elements that start `stride` apart.
const fn strided(rows: u32, width: u32, stride: u32) -> u64 {
    if rows == 0 { 0 } else { (rows as u64 - 1) * stride as u64 + width as u64 }
}

/// Tiles that [`MoeSortArgs`] needs at most for `pairs` (row, expert) pairs: every expert that is hit may end in a short tile.
pub const fn moe_tiles(pairs: u32, experts: u32, tile_rows: u32) -> u32 {
    let hit = if pairs < experts { pairs } else { experts };
    hit + (pairs - hit) / tile_rows
}

kernel_args! {
    /// `rms_norm`, grid \[rows\], workgroup \[256\]: Gemma RMSNorm, out = x * rsqrt(mean(x^2) + eps) * (1 + w) in f32.
    ///
    /// With `rows_index` row i normalises row `rows_index[i]` of x (a negative index is a pad); so a prefill step norms the
    /// last row of each sequence only.
    pub struct RmsNormArgs |a| {
        pointers {
            /// [x_rows, width].
            x: Read, F32, product([a.x_rows, a.width]);
            /// \[rows\] row of x, or null (extent 0) for the identity.
            rows_index: Read, I32, if a.indexed != 0 { u64::from(a.rows) } else { 0 };
            /// \[x_rows\] causal length of each row of x; 0 gives zeros.
            row_len: Read, I32, u64::from(a.x_rows);
            /// \[width\] Gemma weight.
            weight: Read, F32, u64::from(a.width);
            /// [rows, width].
            out: Write, F32, product([a.rows, a.width]);
        }
        scalars {
            /// Rows of `out`.
            rows: u32;
            /// Rows of `x`.
            x_rows: u32;
            /// Channels.
            width: u32;
            /// 1 if `rows_index` is given.
            indexed: u32;
            /// Epsilon.
            eps: f32;
            /// Zero.
            reserved: u32;
        }
    }
}

kernel_args! {
    /// `select_last`, grid \[1\], workgroup \[256\]: step row of the last token of each sequence, -1 for a sequence without rows.
    pub struct SelectLastArgs |a| {
        pointers {
            /// [sequences + 1] prefix sums of query lengths.
            cu_seqlens: Read, I32, u64::from(a.sequences) + 1;
            /// \[sequences\] step rows.
            rows_index: Write, I32, u64::from(a.sequences);
        }
        scalars {
            /// Sequences.
            sequences: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

kernel_args! {
    /// `linear`, grid [ceil(n / tile_cols), ceil(rows / tile_rows)], workgroup \[256\]: out = x W^T, or out += x W^T.
    ///
    /// The sum over k of one output element: lane l of 8 takes k = 8i + l in ascending i by fused multiply-add, then
    /// ((0+4)+(1+5))+((2+6)+(3+7)).
    pub struct LinearArgs |a| {
        pointers {
            /// [rows, k], rows `x_stride` apart.
            x: Read, F32, strided(a.rows, a.k, a.x_stride);
            /// [n, k] in `weight_dtype`.
            weight: Read, (DType::from_code(a.weight_dtype)), product([a.n, a.k]);
            /// \[rows\] causal length; pads (0) give zeros, or keep `out` when accumulating.
            row_len: Read, I32, u64::from(a.rows);
            /// [rows, n], rows `out_stride` apart.
            out: ReadWrite, F32, strided(a.rows, a.n, a.out_stride);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Output columns.
            n: u32;
            /// Inner dimension.
            k: u32;
            /// Elements between rows of x.
            x_stride: u32;
            /// Elements between rows of out.
            out_stride: u32;
            /// F32 or Bf16.
            weight_dtype: u32;
            /// 1 adds to `out` (a residual), 0 overwrites it.
            accumulate: u32;
            /// Columns of a tile.
            tile_cols: u32;
            /// Rows of a tile.
            tile_rows: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

kernel_args! {
    /// `route`, grid \[rows\], workgroup \[256\]: the sigmoid router. Experts are chosen by sigmoid(logit) + bias, largest first,
    /// ties to the lower id, NaN last; a chosen expert's weight is its sigmoid alone, divided by the sum over the chosen ones,
    /// times `scale`. Pads get ids -1 and weights 0.
    pub struct RouteArgs |a| {
        pointers {
            /// [rows, experts] router logits.
            logits: Read, F32, product([a.rows, a.experts]);
            /// \[experts\] score correction bias; moves the choice, never the weight.
            bias: Read, F32, u64::from(a.experts);
            /// \[rows\] causal length.
            row_len: Read, I32, u64::from(a.rows);
            /// [rows, topk] chosen experts in order of choice.
            ids: Write, I32, product([a.rows, a.topk]);
            /// [rows, topk] their weights.
            weights: Write, F32, product([a.rows, a.topk]);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Experts.
            experts: u32;
            /// Experts a row.
            topk: u32;
            /// `routed_scaling_factor`.
            scale: f32;
        }
    }
}

kernel_args! {
    /// `moe_sort`, grid \[1\], workgroup \[256\], LDS [experts + 1] u32: (row, j) pairs by expert. Pair p = row * topk + j; pairs
    /// of one expert stay in ascending order; pads (id < 0) are left out. Tiles cut each expert's run into `tile_rows`.
    pub struct MoeSortArgs |a| {
        pointers {
            /// \[pairs\] experts.
            ids: Read, I32, u64::from(a.pairs);
            /// \[pairs\] pair numbers sorted by expert; -1 past the live ones.
            list: Write, I32, u64::from(a.pairs);
            /// [tiles, 4] expert, first and end in `list`, 0; expert -1 past the live ones.
            tiles: Write, I32, product([a.tiles_max, 4]);
        }
        scalars {
            /// Rows x topk.
            pairs: u32;
            /// Experts.
            experts: u32;
            /// Pairs of a tile.
            tile_rows: u32;
            /// Tiles there is room for: [`moe_tiles`].
            tiles_max: u32;
        }
    }
}

kernel_args! {
    /// `moe_linear`, grid [ceil(n / tile_cols), tiles], workgroup \[256\]: out\[p\] = x[p / pairs_a_row] W[expert of p]^T for the
    /// pairs of each tile; same order of sums as `linear`. Pairs in no tile (pads) are left untouched.
    pub struct MoeLinearArgs |a| {
        pointers {
            /// [pairs / pairs_a_row, k].
            x: Read, F32, u64::from(a.pairs / a.pairs_a_row.max(1)) * u64::from(a.k);
            /// [experts, n, k] in `weight_dtype`.
            weight: Read, (DType::from_code(a.weight_dtype)), product([a.experts, a.n, a.k]);
            /// \[pairs\] pair numbers by expert.
            list: Read, I32, u64::from(a.pairs);
            /// [tiles, 4] from `moe_sort`.
            tiles: Read, I32, product([a.tiles_max, 4]);
            /// [pairs, n].
            out: ReadWrite, F32, product([a.pairs, a.n]);
        }
        scalars {
            /// Rows x topk.
            pairs: u32;
            /// Pairs that share a row of x: topk into the experts, 1 inside them.
            pairs_a_row: u32;
            /// Output columns.
            n: u32;
            /// Inner dimension.
            k: u32;
            /// Experts.
            experts: u32;
            /// Tiles there is room for.
            tiles_max: u32;
            /// Columns of a tile.
            tile_cols: u32;
            /// F32 or Bf16.
            weight_dtype: u32;
        }
    }
}

kernel_args! {
    /// `swiglu`, grid \[rows\], workgroup \[256\]: SwiGLU-OAI of [gate | up]: gate is clamped above at `limit`, up to +-`limit`;
    /// out = (up + 1) * gate * sigmoid(alpha * gate). Pads give zeros.
    pub struct SwigluArgs |a| {
        pointers {
            /// [rows, 2 * width], gate then up.
            x: Read, F32, product([a.rows, 2, a.width]);
            /// [rows / rows_a_len] causal length of the step row behind `rows_a_len` rows.
            row_len: Read, I32, u64::from(a.rows / a.rows_a_len.max(1));
            /// [rows, width].
            out: Write, F32, product([a.rows, a.width]);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Channels of out.
            width: u32;
            /// Rows that share a causal length: topk inside the experts, else 1.
            rows_a_len: u32;
            /// Slope of the sigmoid, 1.702.
            alpha: f32;
            /// Clamp, 7.
            limit: f32;
            /// Zero.
            reserved: u32;
        }
    }
}

kernel_args! {
    /// `moe_combine`, grid \[rows\], workgroup \[256\]: residual\[n\] += sum over j, ascending, of weights[n, j] * experts[n, j].
    pub struct MoeCombineArgs |a| {
        pointers {
            /// [rows, topk, width] outputs of the experts.
            experts: Read, F32, product([a.rows, a.topk, a.width]);
            /// [rows, topk].
            weights: Read, F32, product([a.rows, a.topk]);
            /// \[rows\] causal length; pads keep their residual.
            row_len: Read, I32, u64::from(a.rows);
            /// [rows, width].
            residual: ReadWrite, F32, product([a.rows, a.width]);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Experts a row.
            topk: u32;
            /// Channels.
            width: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

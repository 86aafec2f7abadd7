// linear: out (+)= x W^T; tiles of columns and rows as in src/kernels/cpu/linear.rs.
#include "dots.h"

template <class T> DEVICE void linear_tile(const LinearArgs& a, DotsLds& lds) {
    const u32 first_column = group(0) * a.tile_cols, first_row = group(1) * a.tile_rows;
    if (first_column >= a.n || first_row >= a.rows) return;
    const u32 columns = min_u32(a.tile_cols, a.n - first_column), end = min_u32(first_row + a.tile_rows, a.rows);
    const typename T::Raw* weight = typed<T>(a.weight) + (u64)first_column * a.k;
    u32 filled = 0;
    for (u32 row = first_row; row < end; row++) {
        float* out = a.out + (u64)row * a.out_stride + first_column;
        if (a.row_len[row] > 0) {
            if (lane() == 0) {
                lds.from[filled] = a.x + (u64)row * a.x_stride;
                lds.to[filled] = out;
            }
            filled++;
        } else if (a.accumulate == 0) {
            for (u32 c = lane(); c < columns; c += WORKGROUP) out[c] = 0.0f;
        }
        if (filled == DOTS_ROWS || (row + 1 == end && filled > 0)) {
            barrier();
            dots_pass<T>(weight, columns, a.k, filled, a.accumulate != 0, lds);
            filled = 0;
        }
    }
}

KERNEL void linear(const LinearArgs a) {
    LDS DotsLds lds;
    if (a.weight_dtype == DTYPE_BF16) linear_tile<Bf16>(a, lds);
    else if (a.weight_dtype == DTYPE_F32) linear_tile<F32>(a, lds);
}

// linear: out (+)= x W^T; tiles of columns and rows as in src/kernels/cpu/linear.rs.
#include "dots.h"

struct LinearLds {
    DotsLds dots;
    bool live[WORKGROUP];
};

template <class T> DEVICE void linear_tile(const LinearArgs& a, LinearLds& lds) {
    const u32 first_column = group(0) * a.tile_cols, first_row = group(1) * a.tile_rows;
    if (first_column >= a.n || first_row >= a.rows) return;
    const u32 columns = min_u32(a.tile_cols, a.n - first_column), end = min_u32(first_row + a.tile_rows, a.rows);
    const typename T::Raw* weight = typed<T>(a.weight) + (u64)first_column * a.k;
    u32 filled = 0;
    for (u32 row = first_row; row < end; row++) {
        const u32 seen = (row - first_row) % WORKGROUP;
        if (seen == 0) {
            barrier();
            lds.live[lane()] = row + lane() < end && a.row_len[row + lane()] > 0;
            barrier();
        }
        const u64 to = (u64)row * a.out_stride + first_column;
        if (lds.live[seen]) {
            if (lane() == 0) {
                lds.dots.from[filled] = (u64)row * a.x_stride;
                lds.dots.to[filled] = to;
            }
            filled++;
        } else if (a.accumulate == 0) {
            for (u32 c = lane(); c < columns; c += WORKGROUP) a.out[to + c] = 0.0f;
        }
        if (filled == DOTS_ROWS || (row + 1 == end && filled > 0)) {
            barrier();
            dots_pass<T>(weight, columns, a.k, filled, DotsRows{a.x, a.out, a.accumulate != 0}, lds.dots);
            filled = 0;
        }
    }
}

KERNEL void linear(const LinearArgs a) {
    LDS LinearLds lds;
    if (a.weight_dtype == DTYPE_BF16) linear_tile<Bf16>(a, lds);
    else if (a.weight_dtype == DTYPE_F32) linear_tile<F32>(a, lds);
}

// rms_norm and select_last; the sums run in the order of src/kernels/cpu/norm.rs.
#include "cell.h"

KERNEL void rms_norm(const RmsNormArgs a) {
    // Sums of squares run over this many fixed lanes.
    constexpr u32 LANES = 16;
    LDS float scale_lds;
    const u32 row = group(0), width = a.width;
    float* out = a.out + (u64)row * width;
    const i32 source = a.indexed != 0 ? a.rows_index[row] : (i32)row;
    if (source < 0 || a.row_len[source] <= 0) {
        for (u32 c = lane(); c < width; c += WORKGROUP) out[c] = 0.0f;
        return;
    }
    const float* x = a.x + (u64)source * width;
    // The row passes through LDS in parts, fetched by all lanes, added up by the first sixteen.
    constexpr u32 PART = 4096;
    LDS float part[PART];
    float sum = 0.0f;
    for (u32 first = 0; first < width; first += PART) {
        const u32 in_part = min_u32(width - first, PART);
        barrier();
        for (u32 c = lane(); c < in_part; c += WORKGROUP) part[c] = x[first + c];
        barrier();
        if (lane() < LANES) {
            UNROLL_BY(16) for (u32 c = lane(); c < in_part; c += LANES) sum += part[c] * part[c];
        }
    }
    // The tree: lane i takes lane i + 8, then + 4, + 2, + 1.
    UNROLL for (u32 step = LANES / 2; step > 0; step /= 2) sum += shuffle_xor(sum, step);
    if (lane() == 0) scale_lds = 1.0f / sqrt_exact(sum / (float)width + a.eps);
    barrier();
    const float scale = scale_lds;
    for (u32 c = lane(); c < width; c += WORKGROUP) out[c] = x[c] * scale * (1.0f + a.weight[c]);
}

KERNEL void select_last(const SelectLastArgs a) {
    for (u32 s = lane(); s < a.sequences; s += WORKGROUP) {
        const i32 start = a.cu_seqlens[s], end = a.cu_seqlens[s + 1];
        a.rows_index[s] = end > start ? end - 1 : -1;
    }
}

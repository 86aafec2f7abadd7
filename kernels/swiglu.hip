// swiglu: SwiGLU-OAI, the bits of src/kernels/cpu/swiglu.rs.
#include "cell.h"

KERNEL void swiglu(const SwigluArgs a) {
    const u32 row = group(0), width = a.width;
    const bool live = a.row_len[row / a.rows_a_len] > 0;
    const float* gates = a.x + (u64)row * 2 * width;
    float* out = a.out + (u64)row * width;
    for (u32 c = lane(); c < width; c += WORKGROUP) {
        float value = 0.0f;
        if (live) {
            float gate = gates[c], up = gates[width + c];
            // NaN stays: every comparison with it is false.
            gate = gate > a.limit ? a.limit : gate;
            up = up > a.limit ? a.limit : up;
            up = up < -a.limit ? -a.limit : up;
            // sigmoid(x) is 1 / (1 + z) for x >= 0 and z / (1 + z) below, with z = e^-|x|.
            const float x = gate * a.alpha, z = exp_portable(x < 0.0f ? x : -x);
            value = gate * (1.0f + up) * ((x < 0.0f ? z : 1.0f) / (1.0f + z));
        }
        out[c] = value;
    }
}

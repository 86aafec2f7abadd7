// norm_rope_insert: per-head norm, partial RoPE and the insert into both caches; the bits of src/kernels/cpu/norm_rope.rs.
#include "cell.h"

// Floats of a row that LDS holds at a time; a batch is as many whole heads as fit.
constexpr u32 HEADS_LDS = 8192;
constexpr u32 HEADS_BATCH = 128;

// One head of the packed row: where it is, and what becomes of it.
struct Head {
    u32 channel, dim;
    const float* weight;
};

// Heads in order: q, k, v, index_q, index_k. v has no weight: it is neither normed nor rotated.
DEVICE Head head_of(const NormRopeInsertArgs& a, u32 number) {
    const u32 mains = a.q_heads + 2 * a.kv_heads;
    if (number < mains) {
        const float* weight = number < a.q_heads ? a.q_norm : number < a.q_heads + a.kv_heads ? a.k_norm : nullptr;
        return Head{number * a.head_dim, a.head_dim, weight};
    }
    const u32 index = number - mains;
    return Head{mains * a.head_dim + index * a.index_dim, a.index_dim, index < a.index_heads ? a.index_q_norm : a.index_k_norm};
}

template <class T> DEVICE void put_index_q(const NormRopeInsertArgs& a, u64 at, float value) {
    typed<T>(a.index_q)[at] = T::encode(value);
}

// Section 2.3: the key passes through the model's bf16 before it is quantised.
template <class T> DEVICE void put_index_k(const NormRopeInsertArgs& a, u64 at, float value) {
    typed<T>(a.index_cache)[at] = T::encode(T::IS_F32 ? value : Bf16::decode(Bf16::encode(value)));
}

// Channel d of K or V of one head into its page.
template <class T> DEVICE void put_kv(const NormRopeInsertArgs& a, u32 block, u32 token, u32 head, u32 d, bool v, float value) {
    constexpr u32 x = per_chunk<T>, PAGE = 16;
    const u32 pages = a.block_size / PAGE, t = token % PAGE;
    const u64 page = (u64)block * 2 * pages + token / PAGE + (v ? pages : 0);
    const u32 inside = v ? (t / x) * a.head_dim * x + d * x + t % x : (d / x) * PAGE * x + t * x + d % x;
    typed<T>(a.kv_cache)[(page * a.kv_heads + head) * a.head_dim * PAGE + inside] = T::encode(value);
}

KERNEL void norm_rope_insert(const NormRopeInsertArgs a) {
    LDS float values[HEADS_LDS], scales[HEADS_BATCH];
    const u32 row = group(0);
    if (row >= a.rows) return;
    const u32 mains = a.q_heads + 2 * a.kv_heads, heads = mains + (a.index_heads > 0 ? a.index_heads + 1 : 0);
    const u32 position = (u32)(a.row_len[row] - 1);
    // A pad's position wraps around to the largest.
    if (position >= a.positions) {
        for (u32 c = lane(); c < a.q_heads * a.head_dim; c += WORKGROUP) a.q[(u64)row * a.q_heads * a.head_dim + c] = 0.0f;
        const u32 index = a.index_heads * a.index_dim;
        for (u32 c = lane(); c < index; c += WORKGROUP) {
            const u64 at = (u64)row * index + c;
            if (a.index_dtype == DTYPE_FP8_E4M3) typed<F8E4M3>(a.index_q)[at] = 0;
            else if (a.index_dtype == DTYPE_BF16) typed<Bf16>(a.index_q)[at] = 0;
            else typed<F32>(a.index_q)[at] = 0.0f;
        }
        return;
    }
    const i32 slot = a.row_slot[row];
    const u32 block_at = position / a.block_size, token = position % a.block_size;
    i32 block = -1;
    if (slot >= 0 && (u32)slot < a.slots && block_at < a.table_width) {
        block = a.block_table[(u64)slot * a.table_width + block_at];
        if (block < 0 || (u32)block >= a.cache_blocks) block = -1;
    }
    const float* packed = a.packed + (u64)row * a.packed_width;
    const float* angles = a.cos_sin + (u64)position * a.rotary_dim;
    const u32 half = a.rotary_dim / 2;
    // Heads lie one float further apart than they are long, so that lanes that walk one each use different banks.
    const u32 stride = max_u32(a.head_dim, a.index_heads > 0 ? a.index_dim : 0) + 1;
    const u32 batch = min_u32(HEADS_BATCH, HEADS_LDS / stride);
    for (u32 first = 0; first < heads; first += batch) {
        const u32 count = min_u32(batch, heads - first);
        barrier();
        for (u32 at = lane(); at < count * (stride - 1); at += WORKGROUP) {
            const u32 h = at / (stride - 1), d = at % (stride - 1);
            const Head head = head_of(a, first + h);
            if (d < head.dim) values[h * stride + d] = packed[head.channel + d];
        }
        barrier();
        // The sum of squares of a head runs over its channels in order, one lane a head.
        if (lane() < count) {
            const Head head = head_of(a, first + lane());
            const float* x = values + lane() * stride;
            float sum = 0.0f;
            UNROLL_BY(8) for (u32 d = 0; d < head.dim; d++) sum += x[d] * x[d];
            scales[lane()] = 1.0f / sqrt_exact(sum / (float)head.dim + a.eps);
        }
        barrier();
        for (u32 at = lane(); at < count * (stride - 1); at += WORKGROUP) {
            const u32 h = at / (stride - 1), d = at % (stride - 1);
            const Head head = head_of(a, first + h);
            if (d >= head.dim) continue;
            const float* x = values + h * stride;
            float value = x[d];
            if (head.weight != nullptr) {
                value = x[d] * scales[h] * (1.0f + head.weight[d]);
                if (d < 2 * half) {
                    const u32 other = d < half ? d + half : d - half, angle = d < half ? d : d - half;
                    const float pair = x[other] * scales[h] * (1.0f + head.weight[other]);
                    const float cos = angles[angle], sin = angles[half + angle];
                    value = d < half ? value * cos - pair * sin : value * cos + pair * sin;
                }
            }
            const u32 number = first + h;
            if (number < a.q_heads) {
                a.q[((u64)row * a.q_heads + number) * a.head_dim + d] = value;
            } else if (number < mains) {
                const bool v = number >= a.q_heads + a.kv_heads;
                const u32 kv_head = number - a.q_heads - (v ? a.kv_heads : 0);
                if (block >= 0) WITH_CELL(a.kv_dtype, T, put_kv<T>(a, (u32)block, token, kv_head, d, v, value));
            } else if (number < mains + a.index_heads) {
                const u64 to = ((u64)row * a.index_heads + number - mains) * a.index_dim + d;
                WITH_CELL(a.index_dtype, T, put_index_q<T>(a, to, value));
            } else if (block >= 0) {
                const u64 to = ((u64)block * a.block_size + token) * a.index_dim + d;
                WITH_CELL(a.index_dtype, T, put_index_k<T>(a, to, value));
            }
        }
    }
}

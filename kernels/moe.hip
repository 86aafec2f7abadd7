// The mixture of experts: route, moe_sort, moe_linear, moe_combine, as in src/kernels/cpu/moe.rs.
#include "dots.h"
#include "reduce.h"

DEVICE float sigmoid(float x) {
    const float z = exp_portable(x < 0.0f ? x : -x);
    return (x < 0.0f ? z : 1.0f) / (1.0f + z);
}

// A choice as an integer that orders like (score, lower id first); 0 is none.
DEVICE u64 choice(float score, u32 expert) {
    const u32 b = is_nan(score) ? 0xff800000u : bits(score + 0.0f);
    const u32 ordered = b >> 31 ? ~b : b | 0x80000000u;
    return (u64)ordered << 32 | (0xffffffffu - expert);
}

KERNEL void route(const RouteArgs a) {
    LDS u64 scratch[WORKGROUP / WAVE_LANES_LEAST];
    const u32 row = group(0);
    i32* ids = a.ids + (u64)row * a.topk;
    float* weights = a.weights + (u64)row * a.topk;
    if (a.row_len[row] <= 0) {
        for (u32 j = lane(); j < a.topk; j += WORKGROUP) {
            ids[j] = -1;
            weights[j] = 0.0f;
        }
        return;
    }
    const float* logits = a.logits + (u64)row * a.experts;
    u64 before = ~0ull;
    float sum = 0.0f;
    for (u32 j = 0; j < a.topk; j++) {
        u64 best = 0;
        for (u32 e = lane(); e < a.experts; e += WORKGROUP) {
            const u64 mine = choice(sigmoid(logits[e]) + a.bias[e], e);
            if (mine < before && mine > best) best = mine;
        }
        best = workgroup_reduce(best, scratch, Most());
        before = best;
        const u32 expert = 0xffffffffu - (u32)best;
        const float weight = sigmoid(logits[expert]);
        sum += weight;
        if (lane() == 0) {
            ids[j] = (i32)expert;
            weights[j] = weight;
        }
    }
    barrier();
    for (u32 j = lane(); j < a.topk; j += WORKGROUP) weights[j] = weights[j] / sum * a.scale;
}

// A counting sort in LDS: `ends` [experts + 1] first holds counts, then where each expert's run starts.
KERNEL void moe_sort(const MoeSortArgs a) {
    LDS_DYNAMIC(u32, ends);
    LDS u32 scan[WORKGROUP], part[WORKGROUP];
    auto live = [&](i32 id) { return id >= 0 && (u32)id < a.experts; };
    for (u32 e = lane(); e <= a.experts; e += WORKGROUP) ends[e] = 0;
    barrier();
    for (u32 p = lane(); p < a.pairs; p += WORKGROUP) {
        const i32 id = a.ids[p];
        if (live(id)) lds_add(&ends[id], 1u);
    }
    barrier();
    // Tiles and starts of each expert's run, by prefix sums.
    u32 pairs_before = 0, tiles_before = 0;
    for (u32 first = 0; first < a.experts; first += WORKGROUP) {
        const u32 e = first + lane();
        const u32 count = e < a.experts ? ends[e] : 0, tiles = ceil_div(count, a.tile_rows);
        u32 total, total_tiles;
        const u32 start = pairs_before + workgroup_scan(count, scan, total);
        const u32 tile = tiles_before + workgroup_scan(tiles, scan, total_tiles);
        if (e < a.experts) ends[e] = start;
        for (u32 t = 0; t < tiles && tile + t < a.tiles_max; t++) {
            i32* to = a.tiles + (u64)(tile + t) * 4;
            to[0] = (i32)e;
            to[1] = (i32)(start + t * a.tile_rows);
            to[2] = (i32)(start + min_u32((t + 1) * a.tile_rows, count));
            to[3] = 0;
        }
        pairs_before += total;
        tiles_before += total_tiles;
    }
    for (u32 t = tiles_before + lane(); t < a.tiles_max; t += WORKGROUP) {
        i32* to = a.tiles + (u64)t * 4;
        to[0] = -1;
        to[1] = to[2] = to[3] = 0;
    }
    for (u32 p = pairs_before + lane(); p < a.pairs; p += WORKGROUP) a.list[p] = -1;
    // Pairs of one expert stay in order: each part of the pairs is placed before the next, and within a part a lane counts
    // those of its expert before it.
    for (u32 first = 0; first < a.pairs; first += WORKGROUP) {
        const u32 p = first + lane();
        const i32 id = p < a.pairs ? a.ids[p] : -1;
        barrier();
        part[lane()] = (u32)id;
        barrier();
        u32 before = 0, all = 0;
        if (live(id)) {
            const u32 in_part = min_u32(a.pairs - first, WORKGROUP);
            for (u32 i = 0; i < in_part; i++) {
                const bool same = part[i] == (u32)id;
                before += same && i < lane();
                all += same;
            }
            a.list[ends[id] + before] = (i32)p;
        }
        barrier();
        if (live(id) && before == 0) ends[id] += all;
        barrier();
    }
}

template <class T> DEVICE void moe_tile(const MoeLinearArgs& a, DotsLds& lds) {
    const i32* tile = a.tiles + (u64)group(1) * 4;
    const i32 expert = tile[0], first = tile[1], end = tile[2];
    const u32 first_column = group(0) * a.tile_cols;
    if (expert < 0 || end <= first || first_column >= a.n) return;
    const u32 columns = min_u32(a.tile_cols, a.n - first_column);
    const typename T::Raw* weight = typed<T>(a.weight) + ((u64)expert * a.n + first_column) * a.k;
    for (i32 at = first; at < end; at += (i32)DOTS_ROWS) {
        const u32 rows = min_u32((u32)(end - at), DOTS_ROWS);
        barrier();
        if (lane() < rows) {
            const u32 pair = (u32)a.list[at + (i32)lane()];
            lds.from[lane()] = (u64)(pair / a.pairs_a_row) * a.k;
            lds.to[lane()] = (u64)pair * a.n + first_column;
        }
        barrier();
        dots_pass<T>(weight, columns, a.k, rows, DotsRows{a.x, a.out, false}, lds);
    }
}

KERNEL void moe_linear(const MoeLinearArgs a) {
    LDS DotsLds lds;
    if (a.weight_dtype == DTYPE_BF16) moe_tile<Bf16>(a, lds);
    else if (a.weight_dtype == DTYPE_F32) moe_tile<F32>(a, lds);
}

KERNEL void moe_combine(const MoeCombineArgs a) {
    const u32 row = group(0);
    if (a.row_len[row] <= 0) return;
    const float* experts = a.experts + (u64)row * a.topk * a.width;
    const float* weights = a.weights + (u64)row * a.topk;
    float* residual = a.residual + (u64)row * a.width;
    for (u32 c = lane(); c < a.width; c += WORKGROUP) {
        float mixed = 0.0f;
        for (u32 j = 0; j < a.topk; j++) mixed = mixed + weights[j] * experts[(u64)j * a.width + c];
        residual[c] += mixed;
    }
}

// The attend kernels: softmax attention over pages of 16 tokens (msa-spec section 6).
//
// `attend_exact` walks the pages in order and gives the bits of src/kernels/cpu/attend.rs, for every shape. `attend_matrix` is for BF16 and
// E4M3FN caches of 128 channels: its waves share the pages out among them and put their parts together at the end. What lies past the
// length is never used: a NaN there cannot reach a result, even as a factor of zero. Page ids outside the cache are skipped.
#include "attend_tile.h"
#include "cell.h"

constexpr u32 PAGE = 16, GROUP = 16;

// What of the geometry both kernels share.
struct Shape {
    u32 q_heads, kv_heads, head_dim, v_pages, row, kv_head, len;
    float scale, v_scale;
    DEVICE u32 shared() const { return q_heads / kv_heads; }
    DEVICE u64 start() const { return ((u64)row * q_heads + kv_head * shared()) * head_dim; }
};

// A page of the cache: its K page id, and the KV head that the id carries.
struct PageAt {
    bool known;
    u32 id, head;
};

// Sixteen query heads at a time, D channels (head_dim rounded up), page by page.
template <class T, u32 D, class F>
DEVICE void attend_exact(const Shape& s, const float* query, const void* cache, F page_at, float* out, float* lds) {
    constexpr u32 ROW = D + 4, PARTS = WORKGROUP / D, HEADS = GROUP / PARTS, CHUNKS = D * PAGE / per_chunk<T>;
    constexpr u32 MINE = (CHUNKS + WORKGROUP - 1) / WORKGROUP, x = per_chunk<T>;
    float* q = lds;                       // [GROUP][D]
    float* kv = q + GROUP * D;            // [PAGE][ROW], K and then V
    float* weights = kv + PAGE * ROW;     // [GROUP][PAGE]
    float* fades = weights + GROUP * PAGE;  // [GROUP]
    float* totals = fades + GROUP;
    const u32 dim = s.head_dim, chunks = dim * PAGE / x;
    const u32 pages = (s.len + PAGE - 1) / PAGE;
    for (u32 pass = 0; pass < s.shared(); pass += GROUP) {
        const u32 heads = min_u32(GROUP, s.shared() - pass);
        barrier();
        for (u32 at = lane(); at < GROUP * D; at += WORKGROUP) {
            const u32 h = at / D, d = at % D;
            q[at] = h < heads && d < dim ? query[(u64)(pass + h) * dim + d] * s.scale : 0.0f;
        }
        for (u32 at = lane(); at < PAGE * ROW; at += WORKGROUP) kv[at] = 0.0f;
        // Scores: lane 16h + t. Sums: lane part * D + d has channel d of HEADS heads.
        const u32 h = lane() / PAGE, t = lane() % PAGE, part = lane() / D, d = lane() % D;
        float most = -infinity(), total = 0.0f, sums[HEADS];
        UNROLL for (u32 j = 0; j < HEADS; j++) sums[j] = 0.0f;
        for (u32 page = 0; page < pages; page++) {
            const PageAt at = page_at(page);
            if (!at.known) continue;
            const u32 tokens = min_u32(s.len - page * PAGE, PAGE);
            const Chunk* k_page = (const Chunk*)(typed<T>(cache) + ((u64)at.id * s.kv_heads + at.head) * dim * PAGE);
            const Chunk* v_page = (const Chunk*)(typed<T>(cache) + ((u64)(at.id + s.v_pages) * s.kv_heads + at.head) * dim * PAGE);
            Chunk k[MINE], v[MINE];
            UNROLL for (u32 i = 0; i < MINE; i++) {
                const u32 c = lane() + i * WORKGROUP;
                if (c < chunks) k[i] = k_page[c], v[i] = v_page[c];
            }
            barrier();
            UNROLL for (u32 i = 0; i < MINE; i++) {
                const u32 c = lane() + i * WORKGROUP;
                if (c < chunks) T::widen(k[i], kv + c % PAGE * ROW + c / PAGE * x);
            }
            barrier();
            float lanes[8], score;
            UNROLL for (u32 l = 0; l < 8; l++) lanes[l] = 0.0f;
            UNROLL_BY(4) for (u32 c = 0; c < D; c += 8) {
                UNROLL for (u32 l = 0; l < 8; l++) lanes[l] = fused(q[h * D + c + l], kv[t * ROW + c + l], lanes[l]);
            }
            score = t < tokens ? tree8(lanes) : -infinity();
            float next = is_nan(score) ? -infinity() : score;
            UNROLL for (u32 mask = 1; mask < PAGE; mask *= 2) next = max_num(next, shuffle_xor(next, mask));
            next = max_num(next, most);
            const float weight = t < tokens ? exp_portable(score - next) : 0.0f;
            // (low + high), then the tree over eight lanes.
            float sum = weight + shuffle_xor(weight, 8);
            sum += shuffle_xor(sum, 4);
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            const float fade = exp_portable(most - next);
            total = fused(total, fade, sum + 0.0f);
            most = next;
            weights[h * PAGE + t] = weight;
            if (t == 0) fades[h] = fade;
            barrier();
            UNROLL for (u32 i = 0; i < MINE; i++) {
                const u32 c = lane() + i * WORKGROUP;
                if (c < chunks) {
                    float values[x];
                    T::widen(v[i], values);
                    UNROLL for (u32 j = 0; j < x; j++) kv[(c / dim * x + j) * ROW + c % dim] = values[j];
                }
            }
            barrier();
            UNROLL for (u32 j = 0; j < HEADS; j++) sums[j] = sums[j] * fades[part * HEADS + j];
            for (u32 token = 0; token < tokens; token++) {
                const float value = kv[token * ROW + d];
                UNROLL for (u32 j = 0; j < HEADS; j++) sums[j] = fused(weights[(part * HEADS + j) * PAGE + token], value, sums[j]);
            }
        }
        barrier();
        if (t == 0) totals[h] = total;
        barrier();
        UNROLL for (u32 j = 0; j < HEADS; j++) {
            const u32 head = part * HEADS + j;
            // No page was found: zeros, as for length 0.
            const float share = totals[head] == 0.0f ? 0.0f : s.v_scale / totals[head];
            if (head < heads && d < dim) out[(u64)(pass + head) * dim + d] = sums[j] * share;
        }
    }
}

constexpr u32 EXACT_LDS = GROUP * 256 + PAGE * (256 + 4) + GROUP * PAGE + 2 * GROUP;

#if BF16_MATRIX != BF16_MATRIX_NONE

constexpr bool HAS_MATRIX = true;

// Sixteen query heads at a time, 128 channels; wave w takes pages w, w + waves, and so on.
template <class T, class F>
DEVICE void attend_matrix(const Shape& s, const float* query, const void* cache, F page_at, float* out, float* lds) {
    constexpr u32 DIM = 128, WAVES = WORKGROUP / WAVE_LANES_LEAST;
    float* sums = lds;                     // [GROUP][DIM]
    float* most = sums + GROUP * DIM;      // [WAVES][GROUP]
    float* total = most + WAVES * GROUP;   // [WAVES][GROUP]
    const u32 pages = (s.len + PAGE - 1) / PAGE;
    for (u32 pass = 0; pass < s.shared(); pass += GROUP) {
        const u32 heads = min_u32(GROUP, s.shared() - pass);
        AttendTile<T> tile;
        tile.start(query + (u64)pass * DIM, heads, s.scale);
        PageAt next = wave() < pages ? page_at(wave()) : PageAt{false, 0, 0};
        for (u32 page = wave(); page < pages; page += waves()) {
            // The id of the page after is on its way while this one is worked on.
            const PageAt at = next;
            if (page + waves() < pages) next = page_at(page + waves());
            if (!at.known) continue;
            const typename T::Raw* k_page = typed<T>(cache) + ((u64)at.id * s.kv_heads + at.head) * DIM * PAGE;
            tile.page(k_page, k_page + (u64)s.v_pages * s.kv_heads * DIM * PAGE, min_u32(s.len - page * PAGE, PAGE));
        }
        tile.finish();
        barrier();
        tile.heads([&](u32 head, float m, float t) {
            most[wave() * GROUP + head] = m;
            total[wave() * GROUP + head] = t;
        });
        for (u32 at = lane(); at < GROUP * DIM; at += WORKGROUP) sums[at] = 0.0f;
        barrier();
        // Waves add to the sums one after another, so that the order is always the same.
        for (u32 w = 0; w < waves(); w++) {
            if (wave() == w) {
                tile.each([&](u32 head, u32 channel, float sum) {
                    float all = -infinity();
                    for (u32 other = 0; other < waves(); other++) all = max_num(all, most[other * GROUP + head]);
                    // A wave without a page has nothing to add.
                    const float fade = total[w * GROUP + head] == 0.0f ? 0.0f : exp_portable(most[w * GROUP + head] - all);
                    sums[head * DIM + channel] += sum * fade;
                });
            }
            barrier();
        }
        for (u32 at = lane(); at < heads * DIM; at += WORKGROUP) {
            const u32 head = at / DIM;
            float all = -infinity(), weight = 0.0f;
            for (u32 w = 0; w < waves(); w++) all = max_num(all, most[w * GROUP + head]);
            for (u32 w = 0; w < waves(); w++) {
                const float t = total[w * GROUP + head];
                weight += t == 0.0f ? 0.0f : t * exp_portable(most[w * GROUP + head] - all);
            }
            // No page was found: zeros, as for length 0.
            out[(u64)pass * DIM + at] = weight == 0.0f ? 0.0f : sums[at] * (s.v_scale / weight);
        }
    }
}

#else

constexpr bool HAS_MATRIX = false;

template <class T, class F>
DEVICE void attend_matrix(const Shape&, const float*, const void*, F, float*, float*) {}

#endif

template <class F> DEVICE void attend(const Shape& s, u32 dtype, const float* q, const void* cache, F page_at, float* all, float* lds) {
    const float* query = q + s.start();
    float* out = all + s.start();
    if (s.len == 0) {
        for (u32 c = lane(); c < s.shared() * s.head_dim; c += WORKGROUP) out[c] = 0.0f;
        return;
    }
    if (HAS_MATRIX && s.head_dim == 128 && dtype != DTYPE_F32) {
        if (dtype == DTYPE_BF16) attend_matrix<Bf16>(s, query, cache, page_at, out, lds);
        else if (dtype == DTYPE_FP8_E4M3) attend_matrix<F8E4M3>(s, query, cache, page_at, out, lds);
        return;
    }
    WITH_CELL(dtype, T, {
        if (s.head_dim <= 32) attend_exact<T, 32>(s, query, cache, page_at, out, lds);
        else if (s.head_dim <= 64) attend_exact<T, 64>(s, query, cache, page_at, out, lds);
        else if (s.head_dim <= 128) attend_exact<T, 128>(s, query, cache, page_at, out, lds);
        else if (s.head_dim <= 256) attend_exact<T, 256>(s, query, cache, page_at, out, lds);
    });
}

KERNEL void attend_sparse(const AttendSparseArgs a) {
    alignas(16) LDS float lds[EXACT_LDS];
    const u32 row = group(0), kv_head = group(1);
    if (row >= a.rows || kv_head >= a.kv_heads) return;
    const u64 at = (u64)row * a.kv_heads + kv_head;
    const i32* table = a.page_table + at * a.table_pages;
    const u32 half = a.block_size / PAGE;
    const i32 len = a.page_len[at];
    const Shape s = {
        a.q_heads, a.kv_heads, a.head_dim, half, row, kv_head,
        len > 0 ? min_u32((u32)len, a.table_pages * PAGE) : 0,
        a.scale * a.k_scale, a.v_scale,
    };
    // An id folds the KV head in: page * kv_heads + head.
    auto page_at = [&](u32 page) {
        const i32 id = table[page];
        const u32 k_page = (u32)id / a.kv_heads;
        const bool known = id >= 0 && k_page % (2 * half) < half && k_page / (2 * half) < a.cache_blocks;
        return PageAt{known, k_page, (u32)id % a.kv_heads};
    };
    attend(s, a.kv_dtype, a.q, a.kv_cache, page_at, a.out, lds);
}

KERNEL void attend_dense(const AttendDenseArgs a) {
    alignas(16) LDS float lds[EXACT_LDS];
    const u32 row = group(0), kv_head = group(1);
    if (row >= a.rows || kv_head >= a.kv_heads) return;
    const u32 half = a.block_size / PAGE;
    const i32 len = a.row_len[row], slot = a.row_slot[row];
    const bool known = slot >= 0 && (u32)slot < a.slots && len > 0;
    const i32* table = a.block_table + (u64)(known ? (u32)slot : 0) * a.table_width;
    const Shape s = {
        a.q_heads, a.kv_heads, a.head_dim, half, row, kv_head,
        known ? min_u32((u32)len, a.table_width * a.block_size) : 0,
        a.scale, 1.0f,
    };
    auto page_at = [&](u32 page) {
        const i32 id = table[page / half];
        return PageAt{id >= 0 && (u32)id < a.cache_blocks, (u32)id * 2 * half + page % half, kv_head};
    };
    attend(s, a.kv_dtype, a.q, a.kv_cache, page_at, a.out, lds);
}

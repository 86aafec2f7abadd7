// What topk_emit and topk_exchange share: selecting the best blocks of a row of scores, and the page table an attend reads.
// Results are those of src/kernels/cpu/topk.rs.
//
// A pass selects up to 16 blocks without sorting. Four lanes share a strip of the row; the sixteenth largest of the strips' maxima
// is a lower bound of the sixteenth largest key, and only sixteen strips can hold keys above it, so few candidates are left
// and each finds its place by counting those above it. A row too long for the candidate buffer takes one maximum at a time.
#pragma once
#include "cell.h"
#include "reduce.h"

constexpr u32 PASS = 16;
constexpr u32 STRIPS = WORKGROUP / 4;
constexpr u32 CANDIDATES = 2048;

// Descending keys are descending scores; NaN counts as minus infinity, +0 comes before -0, the higher block wins a tie. No key
// is 0.
DEVICE u64 key(float score, u32 block) {
    const u32 b = is_nan(score) ? 0xff800000u : bits(score);
    return (u64)(b >> 31 ? ~b : b | 0x80000000u) << 32 | block;
}

struct SelectLds {
    alignas(16) u64 candidates[CANDIDATES];
    u64 strips[STRIPS];
    u64 scratch[WORKGROUP / WAVE_LANES_LEAST];
    u64 bound;
    u32 count;
};

// The blocks of the `want` <= PASS largest keys below `below`, largest first, then -1; gives the smallest key selected (0 if
// fewer were there).
DEVICE u64 select(const float* score, u32 blocks, u64 below, u32 want, i32* to, SelectLds& lds) {
    if (lane() < want) to[lane()] = -1;
    // The lane that finds a place writes over the -1.
    barrier();
    if (ceil_div(blocks, WORKGROUP) * 4 * PASS > CANDIDATES) {
        u32 found = 0;
        for (; found < want; found++) {
            u64 best = 0;
            for (u32 b = lane(); b < blocks; b += WORKGROUP) {
                const u64 mine = key(score[b], b);
                if (mine < below && mine > best) best = mine;
            }
            best = workgroup_reduce(best, lds.scratch, Most());
            if (best == 0) break;
            if (lane() == 0) to[found] = (i32)(u32)best;
            below = best;
        }
        return found == want ? below : 0;
    }
    barrier();
    if (lane() == 0) lds.count = 0, lds.bound = 0;
    if (blocks > STRIPS) {
        u64 most = 0;
        for (u32 b = lane(); b < blocks; b += WORKGROUP) {
            const u64 mine = key(score[b], b);
            if (mine < below && mine > most) most = mine;
        }
        for (u32 mask = 1; mask < 4; mask *= 2) {
            const u64 other = shuffle_xor(most, mask);
            most = other > most ? other : most;
        }
        if (lane() % 4 == 0) lds.strips[lane() / 4] = most;
        barrier();
        if (lane() < STRIPS) {
            // Strips hold different keys, but for those that hold none.
            const u64 mine = lds.strips[lane()];
            u32 above = 0;
            UNROLL_BY(16) for (u32 s = 0; s < STRIPS; s++) above += lds.strips[s] > mine;
            if (mine != 0 && above == PASS - 1) lds.bound = mine;
        }
    }
    barrier();
    const u64 bound = lds.bound;
    for (u32 b = lane(); b < blocks; b += WORKGROUP) {
        const u64 mine = key(score[b], b);
        if (mine < below && mine >= bound) lds.candidates[lds_add(&lds.count, 1u)] = mine;
    }
    barrier();
    const u32 count = lds.count;
    for (u32 c = lane(); c < count; c += WORKGROUP) {
        const u64 mine = lds.candidates[c];
        u32 above = 0;
        for (u32 other = 0; other < count; other++) above += lds.candidates[other] > mine;
        if (above < want) to[above] = (i32)(u32)mine;
        if (above == want - 1) lds.bound = mine;
    }
    barrier();
    return count >= want ? lds.bound : 0;
}

// The cache block of a sequence's block; -1 if the table holds none there.
template <class Args> DEVICE i32 cache_block(const Args& a, i32 slot, u32 block) {
    if (slot < 0 || (u32)slot >= a.slots || block >= a.table_width) return -1;
    const i32 id = a.block_table[(u64)slot * a.table_width + block];
    return id >= 0 && (u32)id < a.cache_blocks ? id : -1;
}

// Emission (msa-spec 4.3) of a head among `heads`: full blocks in score order, then the sequence's own block. `selected` was written
// before a barrier; `scan` has WORKGROUP entries of LDS.
template <class Args>
DEVICE void emit(const Args& a, u32 heads, u32 row, u32 head, u32 len, const i32* selected, u32* scan, SelectLds& lds) {
    const u32 pages = a.block_size / 16, own = len > 0 ? (len - 1) / a.block_size : 0;
    const u32 width = a.topk * pages, shared = a.kv_heads / heads;
    const i32 slot = len > 0 ? a.row_slot[row] : 0;
    u32 full = 0;
    bool tail = false;
    for (u32 first = 0; first < a.topk; first += WORKGROUP) {
        const u32 at = first + lane();
        const i32 block = at < a.topk ? selected[at] : -1;
        u32 in_part, tails;
        const u32 before = full + workgroup_scan(block >= 0 && (u32)block < own, scan, in_part);
        workgroup_scan(len > 0 && block >= 0 && (u32)block == own, scan, tails);
        if (block >= 0 && (u32)block < own) lds.candidates[before] = (u64)(u32)cache_block(a, slot, (u32)block);
        full += in_part;
        tail = tail || tails > 0;
    }
    if (tail && lane() == 0) lds.candidates[full] = (u64)(u32)cache_block(a, slot, own);
    barrier();
    const u32 emitted = full + (tail ? 1 : 0);
    for (u32 k = head * shared; k < (head + 1) * shared; k++) {
        i32* out = a.page_table + ((u64)row * a.kv_heads + k) * width;
        for (u32 at = lane(); at < width; at += WORKGROUP) {
            i32 id = 0;
            if (at / pages < emitted) {
                const i32 block = (i32)(u32)lds.candidates[at / pages];
                // The attend skips -1: a table entry that is no cache block is never followed.
                id = block < 0 ? -1 : (2 * (i32)pages * block + (i32)(at % pages)) * (i32)a.kv_heads + (i32)k;
            }
            out[at] = id;
        }
        if (lane() == 0) {
            const u32 tokens = tail ? full * a.block_size + len - own * a.block_size : min_u32(full * a.block_size, len);
            a.page_len[(u64)row * a.kv_heads + k] = (i32)tokens;
        }
    }
}

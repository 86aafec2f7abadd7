// Dot products of rows of f32 with weight rows: the inner loop of linear and moe_linear.
//
// Each result is what src/kernels/cpu/dots.rs computes, bit for bit: lane l of 8 takes k = 8i + l in ascending i by fused multiply-add,
// then the tree of `tree8`. How many rows share a pass over the weights changes nothing. Weights pass through LDS once a
// pass, in parts of `PART` channels, fetched 16 bytes a lane while the part before is in use.
#pragma once
#include "cell.h"

// Columns of a pass: 32 groups of 8 lanes, two columns each.
constexpr u32 DOTS_COLUMNS = 64;
// Channels of a part, and how far apart the eight lanes' strips of it lie in LDS (padded against bank conflicts).
constexpr u32 DOTS_PART = 128;
constexpr u32 DOTS_STRIP = DOTS_PART / 8 + 4;
// Rows of a pass at most.
constexpr u32 DOTS_ROWS = 8;

struct DotsLds {
    alignas(16) float weight[DOTS_COLUMNS * 8 * DOTS_STRIP];
    alignas(16) float x[DOTS_ROWS * 8 * DOTS_STRIP];
    // Where each row of a pass is read in `x` and written in `out`, in elements.
    u64 from[DOTS_ROWS];
    u64 to[DOTS_ROWS];
};

// Eight channels from `at` of a row of k; zeros past the end.
template <class T> DEVICE void eight(const typename T::Raw* row, u32 at, u32 k, bool whole_chunks, float* to) {
    if (whole_chunks && at + 8 <= k) {
        constexpr u32 CHUNKS = 8 / per_chunk<T>;
        UNROLL for (u32 i = 0; i < CHUNKS; i++) T::widen(((const Chunk*)(row + at))[i], to + i * per_chunk<T>);
    } else {
        UNROLL for (u32 i = 0; i < 8; i++) to[i] = at + i < k ? T::decode(row[at + i]) : 0.0f;
    }
}

// The rows and the output that `DotsLds::from` and `to` point into, and whether to add to the output.
struct DotsRows {
    const float* x;
    float* out;
    bool accumulate;
};

// out[to[r] + c] (+)= x[from[r]..] . weight[c] for `rows` <= R rows and `columns` <= DOTS_COLUMNS columns.
template <class T, u32 R>
DEVICE void dots(const typename T::Raw* weight, u32 columns, u32 k, u32 rows, const DotsRows& all, DotsLds& lds) {
    constexpr u32 GROUPS = DOTS_PART / 8;
    constexpr u32 WEIGHTS = DOTS_COLUMNS * GROUPS / WORKGROUP;
    const u32 strip = lane() % 8, column = lane() / 8;
    const bool whole = k % 8 == 0;
    float sums[2][R];
    UNROLL for (u32 r = 0; r < R; r++) sums[0][r] = sums[1][r] = 0.0f;
    float ahead[WEIGHTS][8], x_ahead[8];
    const u32 x_row = lane() / GROUPS, group_at = lane() % GROUPS * 8;
    auto fetch = [&](u32 part) {
        UNROLL for (u32 i = 0; i < WEIGHTS; i++) {
            const u32 c = lane() / GROUPS + i * (WORKGROUP / GROUPS);
            if (c < columns) eight<T>(weight + (u64)c * k, part + group_at, k, whole, ahead[i]);
        }
        if (x_row < R) eight<F32>(all.x + lds.from[min_u32(x_row, rows - 1)], part + group_at, k, whole, x_ahead);
    };
    fetch(0);
    for (u32 part = 0; part < k; part += DOTS_PART) {
        barrier();
        UNROLL for (u32 i = 0; i < WEIGHTS; i++) {
            const u32 c = lane() / GROUPS + i * (WORKGROUP / GROUPS);
            if (c < columns) {
                UNROLL for (u32 j = 0; j < 8; j++) lds.weight[(c * 8 + j) * DOTS_STRIP + group_at / 8] = ahead[i][j];
            }
        }
        if (x_row < R) {
            UNROLL for (u32 j = 0; j < 8; j++) lds.x[(x_row * 8 + j) * DOTS_STRIP + group_at / 8] = x_ahead[j];
        }
        barrier();
        if (part + DOTS_PART < k) fetch(part + DOTS_PART);
        UNROLL_BY(2) for (u32 i = 0; i < GROUPS; i += 4) {
            const Chunk w0 = *(const Chunk*)&lds.weight[(column * 8 + strip) * DOTS_STRIP + i];
            const Chunk w1 = *(const Chunk*)&lds.weight[((column + 32) * 8 + strip) * DOTS_STRIP + i];
            UNROLL for (u32 r = 0; r < R; r++) {
                const Chunk x = *(const Chunk*)&lds.x[(r * 8 + strip) * DOTS_STRIP + i];
                UNROLL for (u32 j = 0; j < 4; j++) {
                    sums[0][r] = fused(from_bits(x.word[j]), from_bits(w0.word[j]), sums[0][r]);
                    sums[1][r] = fused(from_bits(x.word[j]), from_bits(w1.word[j]), sums[1][r]);
                }
            }
        }
    }
    UNROLL for (u32 half = 0; half < 2; half++) {
        UNROLL for (u32 r = 0; r < R; r++) {
            float sum = sums[half][r];
            sum += shuffle_xor(sum, 4);
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            const u32 c = column + half * 32;
            if (strip == 0 && r < rows && c < columns) {
                float* to = all.out + lds.to[r] + c;
                *to = all.accumulate ? *to + (sum + 0.0f) : sum + 0.0f;
            }
        }
    }
}

// A pass over `rows` <= DOTS_ROWS rows that `lds.from` and `lds.to` name, any number of columns.
template <class T>
DEVICE void dots_pass(const typename T::Raw* weight, u32 columns, u32 k, u32 rows, const DotsRows& all, DotsLds& lds) {
    for (u32 first = 0; first < columns; first += DOTS_COLUMNS) {
        const typename T::Raw* part = weight + (u64)first * k;
        const u32 in_part = min_u32(columns - first, DOTS_COLUMNS);
        if (rows == 1) dots<T, 1>(part, in_part, k, rows, all, lds);
        else if (rows == 2) dots<T, 2>(part, in_part, k, rows, all, lds);
        else if (rows <= 4) dots<T, 4>(part, in_part, k, rows, all, lds);
        else dots<T, 8>(part, in_part, k, rows, all, lds);
        barrier();
        if (lane() < rows) lds.to[lane()] += DOTS_COLUMNS;
        barrier();
    }
}

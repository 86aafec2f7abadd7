// The matrix tile of the score kernels: largest dot products of 16 keys with up to 16 queries of 128 E4M3FN channels.
//
// A tile is one wave's. Each lane keeps the best of `SLOTS` pairs (`pair(slot)`) over the tokens it has seen; `reduce` makes it the
// best over all tokens of the wave. Channels may be dealt to the instruction's k in any order, as long as keys and queries use
// the same one: each lane takes 16 bytes at a time.
#pragma once
#include "platform.h"

#if FP8_MATRIX == FP8_MATRIX_MMA_M16N8K32

// Keys are the rows of A, queries the columns of B: lane 4g + t holds keys g and g + 8, and of the result the pairs 2t and 2t + 1 of
// each half.
struct Fp8Tile {
    static constexpr u32 TOKENS = 16, PAIRS = 16, SLOTS = 4;
    // Tiles whose keys are on their way at once.
    static constexpr u32 AHEAD = 2;
    u32 queries[2][8];
    float best[SLOTS];
    bool both;

    template <class F> DEVICE void query(F row, u32 pairs) {
        const u32 g = lane_in_wave() / 4, t = lane_in_wave() % 4;
        both = pairs > 8;
        UNROLL for (u32 half = 0; half < 2; half++) {
            const u8* from = row(half * 8 + g);
            UNROLL for (u32 i = 0; i < 2; i++) {
                Chunk chunk = {};
                if (from != nullptr) chunk = *(const Chunk*)(from + i * 64 + t * 16);
                UNROLL for (u32 w = 0; w < 4; w++) queries[half][i * 4 + w] = chunk.word[w];
            }
        }
    }
    DEVICE u32 pair(u32 slot) const { return slot / 2 * 8 + lane_in_wave() % 4 * 2 + slot % 2; }
    DEVICE bool owner() const { return lane_in_wave() < 4; }
    DEVICE void start() {
        UNROLL for (u32 s = 0; s < SLOTS; s++) best[s] = -infinity();
    }
    // Tiles `first`..`end` of a block of keys [128, 128]; slot s sees the block's first `visible[s]` tokens.
    DEVICE void tiles(const u8* keys, u32 first, u32 end, const u32 (&visible)[SLOTS]) {
        const u32 g = lane_in_wave() / 4, t = lane_in_wave() % 4;
        for (u32 at = first; at < end; at += AHEAD) {
            Chunk low[AHEAD][2], high[AHEAD][2];
            UNROLL for (u32 n = 0; n < AHEAD; n++) {
                // Past the end the last tile is read again, which changes no maximum.
                const u8* tile = keys + min_u32(at + n, end - 1) * (TOKENS * 128) + g * 128 + t * 16;
                UNROLL for (u32 i = 0; i < 2; i++) {
                    low[n][i] = *(const Chunk*)(tile + i * 64);
                    high[n][i] = *(const Chunk*)(tile + 8 * 128 + i * 64);
                }
            }
            UNROLL for (u32 n = 0; n < AHEAD; n++) {
                const u32 token = min_u32(at + n, end - 1) * TOKENS + g;
                take(low[n], high[n], 0, token, visible);
                if (both) take(low[n], high[n], 1, token, visible);
            }
        }
    }
    DEVICE void take(const Chunk (&low)[2], const Chunk (&high)[2], u32 half, u32 token, const u32 (&visible)[SLOTS]) {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        UNROLL for (u32 k = 0; k < 4; k++) {
            const u32 i = k / 2, w = k % 2 * 2;
            mma_fp8(sums, low[i].word[w], high[i].word[w], low[i].word[w + 1], high[i].word[w + 1], queries[half][i * 4 + w],
                    queries[half][i * 4 + w + 1]);
        }
        UNROLL for (u32 j = 0; j < 2; j++) {
            const u32 s = half * 2 + j;
            if (token < visible[s]) best[s] = max_num(best[s], sums[j]);
            if (token + 8 < visible[s]) best[s] = max_num(best[s], sums[2 + j]);
        }
    }
    DEVICE void reduce() {
        UNROLL for (u32 s = 0; s < SLOTS; s++) {
            UNROLL for (u32 mask = 4; mask < 32; mask *= 2) best[s] = max_num(best[s], shuffle_xor(best[s], mask));
        }
    }
};

#elif FP8_MATRIX == FP8_MATRIX_MFMA_16X16X128

// Keys are the rows of A, queries the columns of B: lane 16q + r holds 32 channels of key r and of query r, and of the result
// pair r of keys 4q..4q + 3.
struct Fp8Tile {
    static constexpr u32 TOKENS = 16, PAIRS = 16, SLOTS = 1;
    static constexpr u32 AHEAD = 4;
    Fp8Operand queries;
    float best[SLOTS];

    template <class F> DEVICE void query(F row, u32) {
        const u32 r = lane_in_wave() % 16, q = lane_in_wave() / 16;
        const u8* from = row(r);
        Chunk chunks[2] = {};
        if (from != nullptr) {
            chunks[0] = *(const Chunk*)(from + q * 16);
            chunks[1] = *(const Chunk*)(from + 64 + q * 16);
        }
        queries = fp8_operand(chunks[0].word, chunks[1].word);
    }
    DEVICE u32 pair(u32) const { return lane_in_wave() % 16; }
    DEVICE bool owner() const { return lane_in_wave() < 16; }
    DEVICE void start() { best[0] = -infinity(); }
    DEVICE void tiles(const u8* keys, u32 first, u32 end, const u32 (&visible)[SLOTS]) {
        const u32 r = lane_in_wave() % 16, q = lane_in_wave() / 16;
        for (u32 at = first; at < end; at += AHEAD) {
            Chunk chunks[AHEAD][2];
            UNROLL for (u32 n = 0; n < AHEAD; n++) {
                // Past the end the last tile is read again, which changes no maximum.
                const u8* tile = keys + min_u32(at + n, end - 1) * (TOKENS * 128) + r * 128 + q * 16;
                chunks[n][0] = *(const Chunk*)tile;
                chunks[n][1] = *(const Chunk*)(tile + 64);
            }
            UNROLL for (u32 n = 0; n < AHEAD; n++) {
                float sums[4];
                mfma_fp8(sums, fp8_operand(chunks[n][0].word, chunks[n][1].word), queries);
                const u32 token = min_u32(at + n, end - 1) * TOKENS + q * 4;
                UNROLL for (u32 j = 0; j < 4; j++) {
                    if (token + j < visible[0]) best[0] = max_num(best[0], sums[j]);
                }
            }
        }
    }
    DEVICE void reduce() {
        for (u32 mask = 16; mask < wave_lanes(); mask *= 2) best[0] = max_num(best[0], shuffle_xor(best[0], mask));
    }
};

#endif

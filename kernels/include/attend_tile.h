// The matrix tile of the attend kernels: one wave's softmax of 16 query heads over pages of 16 tokens, 128 channels, BF16 or E4M3FN.
//
// Queries and weights, f32, are split into a BF16 and the BF16 of what is left, so that a product keeps about 16 bits of
// either; keys and values are exact in BF16. Channels are dealt to the instruction's k in the order in which lanes hold them in 16-byte
// chunks, tokens four in a row to each of four lanes: keys, values and weights all follow it. A wave's result depends on its
// pages alone, in their order.
#pragma once
#include "cell.h"

#if BF16_MATRIX != BF16_MATRIX_NONE

// Products of 4 channels a lane that make up 128, and words that hold a lane's keys of one token or its values of one page.
constexpr u32 ATTEND_STEPS = 8;

template <class T> struct Quads;

// How lanes hold keys: 16-byte chunk `part + 4i` of a token, for part 0 to 3.
template <> struct Quads<Bf16> {
    static constexpr u32 CHUNKS = 4, VALUE_WORDS = 2;
    // First of the four channels of a step.
    DEVICE static u32 channel(u32 part, u32 step) { return (part + step / 2 * 4) * 8 + step % 2 * 4; }
    DEVICE static void keys(const Chunk* chunks, u32 step, u32 (&to)[2]) {
        to[0] = chunks[step / 2].word[step % 2 * 2];
        to[1] = chunks[step / 2].word[step % 2 * 2 + 1];
    }
    // Four tokens of a channel from 4 * part on.
    DEVICE static void load(const u16* page, u32 channel, u32 part, u32 (&to)[2]) {
        const u64 both = *(const u64*)(page + part / 2 * (128 * 8) + channel * 8 + part % 2 * 4);
        to[0] = (u32)both;
        to[1] = (u32)(both >> 32);
    }
    DEVICE static void values(const u32 (&from)[2], u32 (&to)[2]) {
        to[0] = from[0];
        to[1] = from[1];
    }
};

template <> struct Quads<F8E4M3> {
    static constexpr u32 CHUNKS = 2, VALUE_WORDS = 1;
    DEVICE static u32 channel(u32 part, u32 step) { return (part + step / 4 * 4) * 16 + step % 4 * 4; }
    DEVICE static void keys(const Chunk* chunks, u32 step, u32 (&to)[2]) { bf16_of_fp8(chunks[step / 4].word[step % 4], to); }
    DEVICE static void load(const u8* page, u32 channel, u32 part, u32 (&to)[1]) {
        to[0] = *(const u32*)(page + channel * 16 + part * 4);
    }
    DEVICE static void values(const u32 (&from)[1], u32 (&to)[2]) { bf16_of_fp8(from[0], to); }
};

DEVICE u32 pack_bf16(float low, float high) { return (u32)Bf16::encode(low) | (u32)Bf16::encode(high) << 16; }
// What two values lose as BF16, again as BF16.
DEVICE u32 pack_bf16_rest(float low, float high, u32 packed) {
    return pack_bf16(low - from_bits(packed << 16), high - from_bits(packed & 0xffff0000u));
}
// Zeros for the tokens of a quad from `tokens` on.
DEVICE void mask_quad(u32 (&quad)[2], u32 first, u32 tokens) {
    UNROLL for (u32 i = 0; i < 2; i++) {
        const u32 token = first + 2 * i;
        quad[i] = token + 1 < tokens ? quad[i] : token < tokens ? quad[i] & 0xffffu : 0;
    }
}

#if BF16_MATRIX == BF16_MATRIX_MMA_M16N8K16

// Heads are the rows: lane 4g + t holds heads g and g + 8. Column n of half h of the scores is token 4 (n / 2) + 2h + n % 2 of the
// page, so that a lane's weights are those of tokens 4t to 4t + 3.
template <class T> struct AttendTile {
    static constexpr u32 BLOCKS = 16;
    u32 query[ATTEND_STEPS][4], rest[ATTEND_STEPS][4];
    float sums[BLOCKS][4], most[2], total[2];

    DEVICE static u32 g() { return lane_in_wave() / 4; }
    DEVICE static u32 t() { return lane_in_wave() % 4; }

    // `from`: [heads, 128] f32.
    DEVICE void start(const float* from, u32 heads, float scale) {
        UNROLL for (u32 s = 0; s < ATTEND_STEPS; s++) {
            const u32 channel = Quads<T>::channel(t(), s);
            UNROLL for (u32 i = 0; i < 4; i++) {
                // Registers: head g, g + 8 for the first two channels, then for the next two.
                const u32 head = g() + i % 2 * 8, c = channel + i / 2 * 2;
                const float low = head < heads ? from[head * 128 + c] * scale : 0.0f;
                const float high = head < heads ? from[head * 128 + c + 1] * scale : 0.0f;
                query[s][i] = pack_bf16(low, high);
                rest[s][i] = pack_bf16_rest(low, high, query[s][i]);
            }
        }
        UNROLL for (u32 b = 0; b < BLOCKS; b++) {
            UNROLL for (u32 i = 0; i < 4; i++) sums[b][i] = 0.0f;
        }
        most[0] = most[1] = -infinity();
        total[0] = total[1] = 0.0f;
    }

    // The first `tokens` tokens of a page.
    DEVICE void page(const typename T::Raw* k_page, const typename T::Raw* v_page, u32 tokens) {
        constexpr u32 CHUNKS = Quads<T>::CHUNKS;
        Chunk keys[2][CHUNKS];
        u32 values[BLOCKS][Quads<T>::VALUE_WORDS];
        UNROLL for (u32 h = 0; h < 2; h++) {
            const u32 token = g() / 2 * 4 + 2 * h + g() % 2;
            UNROLL for (u32 i = 0; i < CHUNKS; i++) keys[h][i] = ((const Chunk*)k_page)[(t() + 4 * i) * 16 + token];
        }
        UNROLL for (u32 b = 0; b < BLOCKS; b++) Quads<T>::load(v_page, b * 8 + g(), t(), values[b]);
        float scores[2][4];
        UNROLL for (u32 h = 0; h < 2; h++) {
            UNROLL for (u32 i = 0; i < 4; i++) scores[h][i] = 0.0f;
            UNROLL for (u32 s = 0; s < ATTEND_STEPS; s++) {
                u32 quad[2];
                Quads<T>::keys(keys[h], s, quad);
                mma_bf16(scores[h], rest[s], quad);
                mma_bf16(scores[h], query[s], quad);
            }
            UNROLL for (u32 i = 0; i < 4; i++) {
                if (4 * t() + 2 * h + i % 2 >= tokens) scores[h][i] = -infinity();
            }
        }
        u32 weights[4], weights_rest[4];
        float fade[2];
        UNROLL for (u32 head = 0; head < 2; head++) {
            float next = most[head];
            UNROLL for (u32 i = 0; i < 4; i++) next = max_num(next, scores[i / 2][head * 2 + i % 2]);
            next = max_num(next, shuffle_xor(next, 1));
            next = max_num(next, shuffle_xor(next, 2));
            fade[head] = exp_portable(most[head] - next);
            most[head] = next;
            float sum = 0.0f;
            UNROLL for (u32 h = 0; h < 2; h++) {
                float w[2];
                UNROLL for (u32 i = 0; i < 2; i++) {
                    w[i] = 4 * t() + 2 * h + i < tokens ? exp_portable(scores[h][head * 2 + i] - next) : 0.0f;
                    sum += w[i];
                }
                weights[h * 2 + head] = pack_bf16(w[0], w[1]);
                weights_rest[h * 2 + head] = pack_bf16_rest(w[0], w[1], weights[h * 2 + head]);
            }
            total[head] = fused(total[head], fade[head], sum);
        }
        UNROLL for (u32 b = 0; b < BLOCKS; b++) {
            UNROLL for (u32 i = 0; i < 4; i++) sums[b][i] *= fade[i / 2];
            u32 quad[2];
            Quads<T>::values(values[b], quad);
            if (tokens < 16) mask_quad(quad, 4 * t(), tokens);
            mma_bf16(sums[b], weights_rest, quad);
            mma_bf16(sums[b], weights, quad);
        }
    }

    // Sums over the lanes of a head, each of which has seen its own tokens.
    DEVICE void finish() {
        UNROLL for (u32 head = 0; head < 2; head++) {
            total[head] += shuffle_xor(total[head], 1);
            total[head] += shuffle_xor(total[head], 2);
        }
    }
    // Calls put(head, most, total) for each head once in a wave.
    template <class F> DEVICE void heads(F put) const {
        if (t() == 0) {
            UNROLL for (u32 head = 0; head < 2; head++) put(g() + head * 8, most[head], total[head]);
        }
    }
    // Calls put(head, channel, sum) for everything this lane holds.
    template <class F> DEVICE void each(F put) const {
        UNROLL for (u32 b = 0; b < BLOCKS; b++) {
            UNROLL for (u32 i = 0; i < 4; i++) put(g() + i / 2 * 8, b * 8 + t() * 2 + i % 2, sums[b][i]);
        }
    }
};

#else

// Heads are the columns: lane 16q + r holds head r. Row 4q + i of the scores is token 4q + i, which are the weights the lane
// needs for the second product.
template <class T> struct AttendTile {
    static constexpr u32 BLOCKS = 8;
    u32 query[ATTEND_STEPS][2], rest[ATTEND_STEPS][2];
    float sums[BLOCKS][4], most, total;

    DEVICE static u32 q() { return lane_in_wave() / 16; }
    DEVICE static u32 r() { return lane_in_wave() % 16; }

    DEVICE void start(const float* from, u32 heads, float scale) {
        UNROLL for (u32 s = 0; s < ATTEND_STEPS; s++) {
            const u32 channel = Quads<T>::channel(q(), s);
            UNROLL for (u32 i = 0; i < 2; i++) {
                const u32 c = channel + i * 2;
                const float low = r() < heads ? from[r() * 128 + c] * scale : 0.0f;
                const float high = r() < heads ? from[r() * 128 + c + 1] * scale : 0.0f;
                query[s][i] = pack_bf16(low, high);
                rest[s][i] = pack_bf16_rest(low, high, query[s][i]);
            }
        }
        UNROLL for (u32 b = 0; b < BLOCKS; b++) {
            UNROLL for (u32 i = 0; i < 4; i++) sums[b][i] = 0.0f;
        }
        most = -infinity();
        total = 0.0f;
    }

    DEVICE void page(const typename T::Raw* k_page, const typename T::Raw* v_page, u32 tokens) {
        constexpr u32 CHUNKS = Quads<T>::CHUNKS;
        Chunk keys[CHUNKS];
        u32 values[BLOCKS][Quads<T>::VALUE_WORDS];
        UNROLL for (u32 i = 0; i < CHUNKS; i++) keys[i] = ((const Chunk*)k_page)[(q() + 4 * i) * 16 + r()];
        UNROLL for (u32 b = 0; b < BLOCKS; b++) Quads<T>::load(v_page, b * 16 + r(), q(), values[b]);
        float scores[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        UNROLL for (u32 s = 0; s < ATTEND_STEPS; s++) {
            u32 quad[2];
            Quads<T>::keys(keys, s, quad);
            mfma_bf16(scores, quad, rest[s]);
            mfma_bf16(scores, quad, query[s]);
        }
        float next = most;
        UNROLL for (u32 i = 0; i < 4; i++) {
            if (4 * q() + i >= tokens) scores[i] = -infinity();
            next = max_num(next, scores[i]);
        }
        for (u32 mask = 16; mask < wave_lanes(); mask *= 2) next = max_num(next, shuffle_xor(next, mask));
        const float fade = exp_portable(most - next);
        most = next;
        float w[4], sum = 0.0f;
        UNROLL for (u32 i = 0; i < 4; i++) {
            w[i] = 4 * q() + i < tokens ? exp_portable(scores[i] - next) : 0.0f;
            sum += w[i];
        }
        total = fused(total, fade, sum);
        const u32 weights[2] = {pack_bf16(w[0], w[1]), pack_bf16(w[2], w[3])};
        const u32 weights_rest[2] = {pack_bf16_rest(w[0], w[1], weights[0]), pack_bf16_rest(w[2], w[3], weights[1])};
        UNROLL for (u32 b = 0; b < BLOCKS; b++) {
            UNROLL for (u32 i = 0; i < 4; i++) sums[b][i] *= fade;
            u32 quad[2];
            Quads<T>::values(values[b], quad);
            if (tokens < 16) mask_quad(quad, 4 * q(), tokens);
            mfma_bf16(sums[b], quad, weights_rest);
            mfma_bf16(sums[b], quad, weights);
        }
    }

    DEVICE void finish() {
        for (u32 mask = 16; mask < wave_lanes(); mask *= 2) total += shuffle_xor(total, mask);
    }
    template <class F> DEVICE void heads(F put) const {
        if (q() == 0) put(r(), most, total);
    }
    template <class F> DEVICE void each(F put) const {
        UNROLL for (u32 b = 0; b < BLOCKS; b++) {
            UNROLL for (u32 i = 0; i < 4; i++) put(r(), b * 16 + q() * 4 + i, sums[b][i]);
        }
    }
};

#endif

#endif

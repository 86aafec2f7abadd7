// The element types of caches and weights: F32, BF16, OCP E4M3FN, and how each becomes f32 and back.
//
// Mirrors src/kernels/cpu/{cell,fp8}.rs bit for bit.
#pragma once
#include "args.h"
#include "platform.h"

struct F32 {
    typedef float Raw;
    static constexpr u32 BYTES = 4;
    static constexpr bool IS_F32 = true;
    DEVICE static float decode(Raw x) { return x; }
    DEVICE static Raw encode(float x) { return x; }
    // Elements of a chunk as f32.
    DEVICE static void widen(const Chunk& from, float* to) {
        UNROLL for (u32 i = 0; i < 4; i++) to[i] = from_bits(from.word[i]);
    }
};

struct Bf16 {
    typedef u16 Raw;
    static constexpr u32 BYTES = 2;
    static constexpr bool IS_F32 = false;
    DEVICE static float decode(Raw x) { return from_bits((u32)x << 16); }
    // The nearest, ties to even; NaN stays NaN.
    DEVICE static Raw encode(float x) {
        u32 b = bits(x);
        if ((b & 0x7fffffffu) > 0x7f800000u) return (u16)(b >> 16 | 0x40u);
        return (u16)((b + 0x7fffu + (b >> 16 & 1u)) >> 16);
    }
    DEVICE static void widen(const Chunk& from, float* to) {
        UNROLL for (u32 i = 0; i < 4; i++) {
            to[2 * i] = from_bits(from.word[i] << 16);
            to[2 * i + 1] = from_bits(from.word[i] & 0xffff0000u);
        }
    }
};

struct F8E4M3 {
    typedef u8 Raw;
    static constexpr u32 BYTES = 1;
    static constexpr bool IS_F32 = false;
    DEVICE static float decode(Raw code) {
        u32 sign = ((u32)code & 0x80u) << 24, magnitude = (u32)code & 0x7fu;
        // Read as f32 bits the code is the value times 2^-120, subnormals included.
        float value = from_bits(sign | magnitude << 20) * from_bits((120u + 127u) << 23);
        return magnitude == 0x7fu ? from_bits(sign | 0x7fc00000u) : value;
    }
    // The nearest, ties to the even code, saturating at +-448; NaN stays NaN.
    DEVICE static Raw encode(float x) {
        u32 b = bits(x), sign = b >> 24 & 0x80u, magnitude = b & 0x7fffffffu, code;
        if (magnitude > 0x7f800000u) return (u8)(sign | 0x7fu);
        if (magnitude >= 0x43e00000u) return (u8)(sign | 0x7eu);
        if (magnitude < 0x3c800000u) {
            code = (u32)round_even(from_bits(magnitude) * 512.0f);
        } else {
            code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
        }
        return (u8)(sign | code);
    }
    // Two codes, the lower 16 bits.
    DEVICE static void pair(u32 codes, float& low, float& high) {
#if FP8_CONVERTS
        fp8_pair(codes, low, high);
#else
        low = decode((u8)codes);
        high = decode((u8)(codes >> 8));
#endif
    }
    DEVICE static void widen(const Chunk& from, float* to) {
        UNROLL for (u32 i = 0; i < 8; i++) pair(from.word[i / 2] >> (i % 2 * 16), to[2 * i], to[2 * i + 1]);
    }
};

// Four E4M3FN codes as BF16: the upper halves of their f32, which lose nothing of four significant bits.
DEVICE void bf16_of_fp8(u32 codes, u32 (&to)[2]) {
    UNROLL for (u32 i = 0; i < 2; i++) {
        float low, high;
        F8E4M3::pair(codes >> (16 * i), low, high);
        to[i] = upper_halves(bits(low), bits(high));
    }
}

// Elements of T in 16 bytes.
template <class T> constexpr u32 per_chunk = 16 / T::BYTES;

template <class T> DEVICE const typename T::Raw* typed(const void* at) { return (const typename T::Raw*)at; }
template <class T> DEVICE typename T::Raw* typed(void* at) { return (typename T::Raw*)at; }

// Calls run<T>(...) for the cell type of a dtype code; does nothing for a type no cache has.
#define WITH_CELL(code, T, ...)               \
    switch (code) {                           \
        case DTYPE_F32: {                     \
            typedef F32 T;                    \
            __VA_ARGS__;                      \
        } break;                              \
        case DTYPE_BF16: {                    \
            typedef Bf16 T;                   \
            __VA_ARGS__;                      \
        } break;                              \
        case DTYPE_FP8_E4M3: {                \
            typedef F8E4M3 T;                 \
            __VA_ARGS__;                      \
        } break;                              \
        default: break;                       \
    }

// e^x for x <= 0, the same bits as the CPU ops': 2^n e^r, r^7 Taylor series; below -87 it gives e^-87, NaN stays.
DEVICE float exp_portable(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = round_even(x * 1.44269504088896340736f);
    float r = fused(n, -0.6933594f, x);
    r = fused(n, 2.1219444e-4f, r);
    float y = 1.0f / 5040.0f;
    y = fused(y, r, 1.0f / 720.0f);
    y = fused(y, r, 1.0f / 120.0f);
    y = fused(y, r, 1.0f / 24.0f);
    y = fused(y, r, 1.0f / 6.0f);
    y = fused(y, r, 0.5f);
    y = fused(y, r, 1.0f);
    y = fused(y, r, 1.0f);
    return y * from_bits((u32)((i32)n + 127) << 23);
}

// ((x0+x4)+(x1+x5)) + ((x2+x6)+(x3+x7)) + 0: the tree of every sum over eight lanes.
DEVICE float tree8(const float* x) {
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])) + 0.0f;
}

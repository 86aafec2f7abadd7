// The one place that knows whose compiler this is.
//
// Everything else includes this file and names only what it defines: integer types, `KERNEL`, `DEVICE`, `LDS`, `OFFSET_OF`, the position of
// a lane (`lane()`, `wave_lanes()`, `group(dim)`, `groups(dim)`), barriers, shuffles, atomics, system-scope loads and stores,
// correctly rounded f32 arithmetic without contraction (a fused multiply-add is written `fused`), and the matrix tile of the
// score kernels. amd.h and nvidia.h define the same names in the same order.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// Lanes of a workgroup: every chain launches this many, in one dimension.
constexpr u32 WORKGROUP = 256;

// Matrix instructions.
//
// Which fp8 matrix instruction the architecture has: `FP8_MATRIX` is one of these.
#define FP8_MATRIX_NONE 0
#define FP8_MATRIX_MMA_M16N8K32 1
#define FP8_MATRIX_MFMA_16X16X128 2

// Which BF16 matrix instruction, likewise `BF16_MATRIX`.
#define BF16_MATRIX_NONE 0
#define BF16_MATRIX_MMA_M16N8K16 1
#define BF16_MATRIX_MFMA_16X16X16 2

#if defined(CAPSTAN_PLATFORM)
// A test's own platform.
#include CAPSTAN_PLATFORM
#elif defined(__AMDGCN__)
#include "amd.h"
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "nvidia.h"
#else
#error "neither AMD's nor NVIDIA's compiler"
#endif

// 16 bytes, the unit of memory accesses.
struct alignas(16) Chunk {
    u32 word[4];
};

DEVICE u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
DEVICE u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }
DEVICE u32 wave() { return lane() / wave_lanes(); }
DEVICE u32 waves() { return WORKGROUP / wave_lanes(); }
DEVICE u32 lane_in_wave() { return lane() & (wave_lanes() - 1); }

DEVICE u32 bits(float x) { return __builtin_bit_cast(u32, x); }
DEVICE float from_bits(u32 x) { return __builtin_bit_cast(float, x); }
DEVICE bool is_nan(float x) { return x != x; }
DEVICE float infinity() { return from_bits(0x7f800000u); }

// 64-bit values across lanes, as two halves.
DEVICE u64 shuffle_xor(u64 x, u32 mask) {
    return (u64)shuffle_xor((u32)(x >> 32), mask) << 32 | shuffle_xor((u32)x, mask);
}
DEVICE float shuffle_xor(float x, u32 mask) { return from_bits(shuffle_xor(bits(x), mask)); }

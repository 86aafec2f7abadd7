// What platform.h promises, on AMD. Included by platform.h alone; nvidia.h mirrors it. Needs no HIP header and no device library.
#pragma once

#define KERNEL KERNEL_SHARING(1)
// A kernel of which `count` workgroups are to fit a compute unit together: its four SIMDs take a wave of each.
#define KERNEL_SHARING(count) \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 256), amdgpu_waves_per_eu(count)))
#define DEVICE __attribute__((device)) __attribute__((always_inline)) inline
#define LDS __attribute__((shared))
// LDS whose size the launch gives.
#define LDS_DYNAMIC(type, name) extern LDS type name[]
#define OFFSET_OF(Struct, field) __builtin_offsetof(Struct, field)
#define UNROLL _Pragma("unroll")
#define PRAGMA(text) _Pragma(#text)
#define UNROLL_BY(n) PRAGMA(unroll n)

// Fewest lanes a wave has on any device of this vendor; sizes arrays of one entry a wave.
constexpr u32 WAVE_LANES_LEAST = 32;

DEVICE u32 lane() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 wave_lanes() { return __builtin_amdgcn_wavefrontsize(); }
DEVICE u32 group(u32 dim) {
    return dim == 0 ? __builtin_amdgcn_workgroup_id_x() : dim == 1 ? __builtin_amdgcn_workgroup_id_y() : __builtin_amdgcn_workgroup_id_z();
}
// Code object 5: the implicit arguments start with the grid's workgroups in x, y, z.
DEVICE u32 groups(u32 dim) { return ((const __attribute__((address_space(4))) u32*)__builtin_amdgcn_implicitarg_ptr())[dim]; }

DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// What this lane wrote before is visible to the host and to peers before what it writes after.
DEVICE void fence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }

// The value of lane `from` of this wave.
DEVICE u32 shuffle(u32 x, u32 from) { return (u32)__builtin_amdgcn_ds_bpermute((i32)(from * 4), (i32)x); }
DEVICE u32 shuffle_xor(u32 x, u32 mask) { return shuffle(x, (lane() & (wave_lanes() - 1)) ^ mask); }

// On LDS.
DEVICE u32 lds_add(u32* at, u32 value) { return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); }
DEVICE void lds_add(u64* at, u64 value) { __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); }
DEVICE void lds_max(u32* at, u32 value) { __hip_atomic_fetch_max(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); }
DEVICE void lds_min(u32* at, u32 value) { __hip_atomic_fetch_min(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP); }

DEVICE u64 load_acquire_system(const u64* at) { return __hip_atomic_load(at, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE void store_release_system(u64* at, u64 value) { __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE u64 load_relaxed_system(const u64* at) { return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
DEVICE void store_relaxed_system(u64* at, u64 value) { __hip_atomic_store(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
// Stores a word if it holds `expected`; true if it did.
DEVICE bool exchange_system(u64* at, u64 expected, u64 value) {
    return __hip_atomic_compare_exchange_strong(at, &expected, value, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
// A clock that runs at one speed, whatever the device's own does: 100 MHz on gfx9.
DEVICE u64 nanoseconds() { return __builtin_amdgcn_s_memrealtime() * 10; }
// Gives other waves the issue slots while this one polls.
DEVICE void pause() { __builtin_amdgcn_s_sleep(1); }

DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float sqrt_exact(float x) { return __builtin_sqrtf(x); }
DEVICE float round_even(float x) { return __builtin_rintf(x); }
DEVICE double floor_f64(double x) { return __builtin_floor(x); }
DEVICE double ceil_f64(double x) { return __builtin_ceil(x); }
// The other operand if one is NaN.
DEVICE float max_num(float a, float b) { return __builtin_fmaxf(a, b); }

#if defined(__gfx950__) || defined(__gfx942__)
#define FP8_MATRIX FP8_MATRIX_MFMA_16X16X128
#else
#define FP8_MATRIX FP8_MATRIX_NONE
#endif

typedef float Floats4 __attribute__((ext_vector_type(4)));
typedef i32 Words8 __attribute__((ext_vector_type(8)));

// 32 E4M3FN channels of one row as the matrix instruction takes them.
struct Fp8Operand {
    Words8 words;
};

#if defined(__gfx950__)

DEVICE Fp8Operand fp8_operand(const u32* low, const u32* high) {
    return Fp8Operand{{(i32)low[0], (i32)low[1], (i32)low[2], (i32)low[3], (i32)high[0], (i32)high[1], (i32)high[2], (i32)high[3]}};
}
// sums = A [16, 128] B [128, 16]: the scaled f8f6f4 instruction with both formats E4M3 (0) and unit scales (E8M0 127, byte 0).
DEVICE void mfma_fp8(float (&sums)[4], const Fp8Operand& a, const Fp8Operand& b) {
    const Floats4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
    const Floats4 all = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a.words, b.words, zero, 0, 0, 0, 127, 0, 127);
    for (u32 i = 0; i < 4; i++) sums[i] = all[i];
}

#elif defined(__gfx942__)

// gfx942 has the FNUZ encoding: the same bits are half the value, 0x80 is NaN, and 0x7f and 0xff are numbers. So both NaN codes become
// 0x80, minus zero becomes zero, and the sum is scaled by four, all of which is exact.
DEVICE u32 to_fnuz(u32 x) {
    const u32 magnitude = x & 0x7f7f7f7fu;
    // 0x80 in each byte that holds NaN (all ones) and in each that holds a zero of either sign.
    const u32 nan = (magnitude + 0x01010101u) & 0x80808080u;
    const u32 zero = ~(magnitude + 0x7f7f7f7fu) & 0x80808080u;
    const u32 nan_bytes = (nan >> 7) * 0xffu;
    return ((x & ~zero) & ~nan_bytes) | nan;
}
DEVICE Fp8Operand fp8_operand(const u32* low, const u32* high) {
    return Fp8Operand{{(i32)to_fnuz(low[0]), (i32)to_fnuz(low[1]), (i32)to_fnuz(low[2]), (i32)to_fnuz(low[3]), (i32)to_fnuz(high[0]),
                       (i32)to_fnuz(high[1]), (i32)to_fnuz(high[2]), (i32)to_fnuz(high[3])}};
}
// sums = A [16, 128] B [128, 16] in four steps of 32 channels.
DEVICE void mfma_fp8(float (&sums)[4], const Fp8Operand& a, const Fp8Operand& b) {
    Floats4 all = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 k = 0; k < 4; k++) {
        const i64 from_a = (i64)((u64)(u32)a.words[2 * k] | (u64)(u32)a.words[2 * k + 1] << 32);
        const i64 from_b = (i64)((u64)(u32)b.words[2 * k] | (u64)(u32)b.words[2 * k + 1] << 32);
        all = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(from_a, from_b, all, 0, 0, 0);
    }
    for (u32 i = 0; i < 4; i++) sums[i] = all[i] * 4.0f;
}

#endif

#if defined(__gfx950__) || defined(__gfx942__) || defined(__gfx90a__)
#define BF16_MATRIX BF16_MATRIX_MFMA_16X16X16
typedef short Shorts4 __attribute__((ext_vector_type(4)));
// sums += A [16, 16] B [16, 16] of BF16.
DEVICE void mfma_bf16(float (&sums)[4], const u32 (&a)[2], const u32 (&b)[2]) {
    const u64 from_a = (u64)a[1] << 32 | a[0], from_b = (u64)b[1] << 32 | b[0];
    Floats4 all = {sums[0], sums[1], sums[2], sums[3]};
    all = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Shorts4, from_a), __builtin_bit_cast(Shorts4, from_b), all, 0, 0, 0);
    for (u32 i = 0; i < 4; i++) sums[i] = all[i];
}
#else
#define BF16_MATRIX BF16_MATRIX_NONE
#endif

// gfx942 converts its own encoding only.
#if defined(__gfx950__)
#define FP8_CONVERTS 1
typedef float Floats2 __attribute__((ext_vector_type(2)));
// Two E4M3FN codes, the lower 16 bits, as f32; NaN stays.
DEVICE void fp8_pair(u32 codes, float& low, float& high) {
    const Floats2 both = __builtin_amdgcn_cvt_pk_f32_fp8((i32)codes, false);
    low = both[0];
    high = both[1];
}
#else
#define FP8_CONVERTS 0
#endif
// The upper halves of two words, the first's below.
DEVICE u32 upper_halves(u32 low, u32 high) { return __builtin_amdgcn_perm(high, low, 0x07060302u); }

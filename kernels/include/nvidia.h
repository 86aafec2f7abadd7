// What platform.h promises, on NVIDIA. Included by platform.h alone; amd.h mirrors it.
#pragma once

#define KERNEL KERNEL_SHARING(1)
// A kernel of which `count` workgroups are to fit a compute unit together.
#define KERNEL_SHARING(count) extern "C" __global__ __launch_bounds__(256, count)
#define DEVICE __device__ __forceinline__
#define LDS __shared__
// LDS whose size the launch gives.
#define LDS_DYNAMIC(type, name) extern LDS type name[]
// NVRTC has no __builtin_offsetof; this is what its own offsetof is made of.
#define OFFSET_OF(Struct, field) __INTADDR__(&(((Struct *)0)->field))
#define UNROLL _Pragma("unroll")
#define PRAGMA(text) _Pragma(#text)
#define UNROLL_BY(n) PRAGMA(unroll n)

// Fewest lanes a wave has on any device of this vendor; sizes arrays of one entry a wave.
constexpr u32 WAVE_LANES_LEAST = 32;

DEVICE u32 lane() { return threadIdx.x; }
DEVICE u32 wave_lanes() { return warpSize; }
DEVICE u32 group(u32 dim) { return dim == 0 ? blockIdx.x : dim == 1 ? blockIdx.y : blockIdx.z; }
DEVICE u32 groups(u32 dim) { return dim == 0 ? gridDim.x : dim == 1 ? gridDim.y : gridDim.z; }

DEVICE void barrier() { __syncthreads(); }
// What this lane wrote before is visible to the host and to peers before what it writes after.
DEVICE void fence_system() { __threadfence_system(); }

DEVICE u32 shuffle_xor(u32 x, u32 mask) { return __shfl_xor_sync(~0u, x, mask); }
// The value of lane `from` of this wave.
DEVICE u32 shuffle(u32 x, u32 from) { return __shfl_sync(~0u, x, from); }

// On LDS.
DEVICE u32 lds_add(u32* at, u32 value) { return atomicAdd(at, value); }
DEVICE void lds_add(u64* at, u64 value) { atomicAdd(at, value); }
DEVICE void lds_max(u32* at, u32 value) { atomicMax(at, value); }
DEVICE void lds_min(u32* at, u32 value) { atomicMin(at, value); }

DEVICE u64 load_acquire_system(const u64* at) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
DEVICE void store_release_system(u64* at, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
DEVICE u64 load_relaxed_system(const u64* at) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
DEVICE void store_relaxed_system(u64* at, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// Stores a word if it holds `expected`; true if it did.
DEVICE bool exchange_system(u64* at, u64 expected, u64 value) { return atomicCAS_system(at, expected, value) == expected; }
// A clock that runs at one speed, whatever the device's own does.
DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
// Gives other waves the issue slots while this one polls.
DEVICE void pause() { __nanosleep(20); }

DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float sqrt_exact(float x) { return __fsqrt_rn(x); }
DEVICE float round_even(float x) { return rintf(x); }
DEVICE double floor_f64(double x) { return floor(x); }
DEVICE double ceil_f64(double x) { return ceil(x); }
// The other operand if one is NaN.
DEVICE float max_num(float a, float b) { return fmaxf(a, b); }

#if __CUDA_ARCH__ >= 890
#define FP8_MATRIX FP8_MATRIX_MMA_M16N8K32
// sums[0..4] += A [16, 32] B [32, 8] of E4M3FN: PTX ISA, mma.m16n8k32.
DEVICE void mma_fp8(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#else
#define FP8_MATRIX FP8_MATRIX_NONE
#endif

#if __CUDA_ARCH__ >= 800
#define BF16_MATRIX BF16_MATRIX_MMA_M16N8K16
// sums[0..4] += A [16, 16] B [16, 8] of BF16: PTX ISA, mma.m16n8k16.
DEVICE void mma_bf16(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#else
#define BF16_MATRIX BF16_MATRIX_NONE
#endif

#define FP8_CONVERTS (__CUDA_ARCH__ >= 890)
#if FP8_CONVERTS
// Two E4M3FN codes, the lower 16 bits, as f32; NaN stays.
DEVICE void fp8_pair(u32 codes, float& low, float& high) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(halves));
}
#endif
// The upper halves of two words, the first's below.
DEVICE u32 upper_halves(u32 low, u32 high) { return __byte_perm(low, high, 0x7632); }

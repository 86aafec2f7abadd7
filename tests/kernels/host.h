// A platform that runs the device sources on the host: what platform.h promises, a fiber a lane, one workgroup at a time.
//
// Lanes run one after another between two points where they must meet (barriers, shuffles), in an order that the seed shuffles, so
// a missing barrier shows as a result that changes with the seed. Lanes that meet at different lines, or never, are an
// error. Waves have HOST_WAVE lanes; 32 brings NVIDIA's shape of the fp8 matrix tile, 64 AMD's, both in plain arithmetic.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

#define KERNEL extern "C" __attribute__((visibility("default")))
#define KERNEL_SHARING(count) KERNEL
#define DEVICE inline
#define LDS static
#define LDS_DYNAMIC(type, name) static type* const name = (type*)host::lds
#define OFFSET_OF(Struct, field) __builtin_offsetof(Struct, field)
#define UNROLL
#define UNROLL_BY(n)

constexpr u32 WAVE_LANES_LEAST = 32;

namespace host {

constexpr u32 STACK = 256 << 10;

enum State : u8 { READY, MEETING, DONE };

struct Lane {
    ucontext_t context;
    State state;
    // Where it waits, and whether for its wave alone.
    u32 line;
    bool wave_only;
};

static Lane lanes[WORKGROUP];
static ucontext_t scheduler;
static u32 current, group_id[3], grid[3];
static u32 exchange[WORKGROUP][8];
alignas(64) static u8 lds[256 << 10];
static const char* error;
static void (*entry)();

inline void meet(u32 line, bool wave_only) {
    Lane& mine = lanes[current];
    mine.line = line;
    mine.wave_only = wave_only;
    mine.state = MEETING;
    swapcontext(&mine.context, &scheduler);
}

inline void run_lane() {
    entry();
    lanes[current].state = DONE;
}

// Runs one workgroup to its end.
inline void workgroup(u64& random) {
    static u8* stacks = (u8*)malloc((size_t)WORKGROUP * STACK);
    for (u32 l = 0; l < WORKGROUP; l++) {
        getcontext(&lanes[l].context);
        lanes[l].context.uc_stack.ss_sp = stacks + (size_t)l * STACK;
        lanes[l].context.uc_stack.ss_size = STACK;
        lanes[l].context.uc_link = &scheduler;
        makecontext(&lanes[l].context, run_lane, 0);
        lanes[l].state = READY;
    }
    for (;;) {
        // One turn for all that are ready, from a random lane on, up or down.
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        const u32 start = (u32)(random >> 40) % WORKGROUP, down = (u32)(random >> 33) & 1;
        bool ran = false;
        for (u32 i = 0; i < WORKGROUP; i++) {
            current = (start + (down ? WORKGROUP - i : i)) % WORKGROUP;
            if (lanes[current].state != READY) continue;
            ran = true;
            swapcontext(&scheduler, &lanes[current].context);
        }
        // Waves whose lanes all meet for the wave go on; the workgroup goes on when all of it meets.
        bool released = false, all_done = true, all_meet = true;
        for (u32 w = 0; w < WORKGROUP; w += HOST_WAVE) {
            u32 meeting = 0;
            bool same = true;
            for (u32 l = w; l < w + HOST_WAVE; l++) {
                const bool waits = lanes[l].state == MEETING && lanes[l].wave_only;
                meeting += waits;
                same = same && (!waits || lanes[l].line == lanes[w].line);
                all_done = all_done && lanes[l].state == DONE;
                all_meet = all_meet && (lanes[l].state == DONE || (lanes[l].state == MEETING && !lanes[l].wave_only));
            }
            if (meeting == HOST_WAVE && same) {
                for (u32 l = w; l < w + HOST_WAVE; l++) lanes[l].state = READY;
                released = true;
            }
        }
        if (all_done) return;
        if (all_meet) {
            u32 line = 0;
            for (u32 l = 0; l < WORKGROUP; l++) {
                if (lanes[l].state == DONE) continue;
                if (line != 0 && lanes[l].line != line) {
                    error = "lanes meet at different barriers";
                    return;
                }
                line = lanes[l].line;
            }
            for (u32 l = 0; l < WORKGROUP; l++) {
                if (lanes[l].state == MEETING) lanes[l].state = READY;
            }
            released = true;
        }
        if (!ran && !released) {
            error = "lanes wait for each other: a shuffle or barrier that not all of them reach";
            return;
        }
    }
}

template <u32 N> struct Bytes {
    char byte[N];
};
static const void* kernel;
static const void* arguments;
// Structs above 16 bytes travel on the stack, so any of the same size does.
template <u32 N> void call() { ((void (*)(Bytes<N>))kernel)(*(const Bytes<N>*)arguments); }

template <u32 N> inline void (*caller(u32 bytes))() {
    if constexpr (N == 0) return nullptr;
    else return bytes == N ? call<N> : caller<N - 8>(bytes);
}

}  // namespace host

// Runs a grid; null if all went well, else what went wrong.
extern "C" __attribute__((visibility("default"))) const char* host_launch(const void* kernel, const void* arguments, u32 bytes,
                                                                          const u32* grid, u64 seed) {
    host::kernel = kernel;
    host::arguments = arguments;
    host::entry = bytes > 16 ? host::caller<512>(bytes) : nullptr;
    host::error = nullptr;
    if (host::entry == nullptr) return "no argument struct of this size is known here";
    memcpy(host::grid, grid, sizeof host::grid);
    memset(host::lds, 0xa5, sizeof host::lds);
    for (u32 z = 0; z < grid[2]; z++) {
        for (u32 y = 0; y < grid[1]; y++) {
            for (u32 x = 0; x < grid[0]; x++) {
                host::group_id[0] = x;
                host::group_id[1] = y;
                host::group_id[2] = z;
                host::workgroup(seed);
                if (host::error != nullptr) return host::error;
            }
        }
    }
    return nullptr;
}

DEVICE u32 lane() { return host::current; }
constexpr DEVICE u32 wave_lanes() { return HOST_WAVE; }
DEVICE u32 group(u32 dim) { return host::group_id[dim]; }
DEVICE u32 groups(u32 dim) { return host::grid[dim]; }

DEVICE void barrier(u32 line = __builtin_LINE()) { host::meet(line, false); }
DEVICE void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

DEVICE u32 shuffle(u32 x, u32 from, u32 line = __builtin_LINE()) {
    const u32 first = host::current / HOST_WAVE * HOST_WAVE;
    host::exchange[host::current][0] = x;
    host::meet(line, true);
    const u32 result = host::exchange[first + from % HOST_WAVE][0];
    host::meet(line, true);
    return result;
}
DEVICE u32 shuffle_xor(u32 x, u32 mask, u32 line = __builtin_LINE()) { return shuffle(x, (lane() % HOST_WAVE) ^ mask, line); }

DEVICE u32 lds_add(u32* at, u32 value) {
    const u32 before = *at;
    *at += value;
    return before;
}
DEVICE void lds_add(u64* at, u64 value) { *at += value; }
DEVICE void lds_max(u32* at, u32 value) { *at = *at > value ? *at : value; }
DEVICE void lds_min(u32* at, u32 value) { *at = *at < value ? *at : value; }

DEVICE u64 load_acquire_system(const u64* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
DEVICE void store_release_system(u64* at, u64 value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
DEVICE u64 load_relaxed_system(const u64* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
DEVICE void store_relaxed_system(u64* at, u64 value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
DEVICE bool exchange_system(u64* at, u64 expected, u64 value) {
    return __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}
DEVICE u64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000000000ull + (u64)now.tv_nsec;
}
DEVICE void pause() {}

DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float sqrt_exact(float x) { return sqrtf(x); }
DEVICE float round_even(float x) { return rintf(x); }
DEVICE double floor_f64(double x) { return floor(x); }
DEVICE double ceil_f64(double x) { return ceil(x); }
DEVICE float max_num(float a, float b) { return fmaxf(a, b); }

namespace host {
// E4M3FN by its definition.
inline float fp8(u32 code) {
    const u32 e = code >> 3 & 15, m = code & 7;
    if ((code & 0x7f) == 0x7f) return NAN;
    const float value = e == 0 ? ldexpf((float)m, -9) : ldexpf((float)(8 + m), (int)e - 10);
    return code & 0x80 ? -value : value;
}
inline float fp8_of(const u32* words, u32 byte) { return fp8(words[byte / 4] >> (byte % 4 * 8) & 0xff); }
}  // namespace host

#define FP8_CONVERTS 0
DEVICE u32 upper_halves(u32 low, u32 high) { return low >> 16 | (high & 0xffff0000u); }

namespace host {
// Element k of a list of BF16 pairs.
inline float bf16_of(const u32* words, u32 k) {
    const u32 bits = k % 2 ? words[k / 2] & 0xffff0000u : words[k / 2] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
}  // namespace host

#if HOST_WAVE == 32
#define BF16_MATRIX BF16_MATRIX_MMA_M16N8K16
DEVICE void mma_bf16(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2], u32 line = __builtin_LINE()) {
    const u32 first = host::current / 32 * 32, l = host::current % 32;
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    memcpy(host::exchange[host::current], mine, sizeof mine);
    host::meet(line, true);
    for (u32 j = 0; j < 4; j++) {
        const u32 row = l / 4 + j / 2 * 8, column = l % 4 * 2 + j % 2;
        for (u32 k = 0; k < 16; k++) {
            const u32* x = host::exchange[first + row % 8 * 4 + k % 8 / 2];
            const u32* y = host::exchange[first + column * 4 + k % 8 / 2];
            sums[j] = fmaf(host::bf16_of(x + row / 8 + k / 8 * 2, k % 2), host::bf16_of(y + 4 + k / 8, k % 2), sums[j]);
        }
    }
    host::meet(line, true);
}
#define FP8_MATRIX FP8_MATRIX_MMA_M16N8K32
DEVICE void mma_fp8(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, u32 line = __builtin_LINE()) {
    const u32 first = host::current / 32 * 32, l = host::current % 32;
    const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(host::exchange[host::current], mine, sizeof mine);
    host::meet(line, true);
    for (u32 j = 0; j < 4; j++) {
        const u32 row = l / 4 + j / 2 * 8, column = l % 4 * 2 + j % 2;
        for (u32 k = 0; k < 32; k++) {
            const u32* a = host::exchange[first + row % 8 * 4 + k % 16 / 4];
            const u32* b = host::exchange[first + column * 4 + k % 16 / 4];
            sums[j] = fmaf(host::fp8_of(a + row / 8 + k / 16 * 2, k % 4), host::fp8_of(b + 4 + k / 16, k % 4), sums[j]);
        }
    }
    host::meet(line, true);
}
#else
#define BF16_MATRIX BF16_MATRIX_MFMA_16X16X16
DEVICE void mfma_bf16(float (&sums)[4], const u32 (&a)[2], const u32 (&b)[2], u32 line = __builtin_LINE()) {
    const u32 first = host::current / 64 * 64, l = host::current % 64;
    const u32 mine[4] = {a[0], a[1], b[0], b[1]};
    memcpy(host::exchange[host::current], mine, sizeof mine);
    host::meet(line, true);
    for (u32 j = 0; j < 4; j++) {
        for (u32 k = 0; k < 16; k++) {
            const u32* x = host::exchange[first + k / 4 * 16 + l / 16 * 4 + j];
            const u32* y = host::exchange[first + k / 4 * 16 + l % 16];
            sums[j] = fmaf(host::bf16_of(x, k % 4), host::bf16_of(y + 2, k % 4), sums[j]);
        }
    }
    host::meet(line, true);
}
#define FP8_MATRIX FP8_MATRIX_MFMA_16X16X128
struct Fp8Operand {
    u32 words[8];
};
DEVICE Fp8Operand fp8_operand(const u32* low, const u32* high) {
    return Fp8Operand{{low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]}};
}
DEVICE void mfma_fp8(float (&sums)[4], const Fp8Operand& a, const Fp8Operand& b, u32 line = __builtin_LINE()) {
    const u32 first = host::current / 64 * 64, l = host::current % 64;
    static u32 operands[WORKGROUP][2][8];
    memcpy(operands[host::current][0], a.words, 32);
    memcpy(operands[host::current][1], b.words, 32);
    host::meet(line, true);
    for (u32 j = 0; j < 4; j++) {
        const u32 row = l / 16 * 4 + j, column = l % 16;
        sums[j] = 0.0f;
        for (u32 k = 0; k < 128; k++) {
            const u32* x = operands[first + k / 32 * 16 + row][0];
            const u32* y = operands[first + k / 32 * 16 + column][1];
            sums[j] = fmaf(host::fp8_of(x, k % 32), host::fp8_of(y, k % 32), sums[j]);
        }
    }
    host::meet(line, true);
}
#endif

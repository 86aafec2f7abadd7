// Reductions and scans over a wave and over a workgroup. Every one needs all lanes of the workgroup (or wave) to call it.
#pragma once
#include "platform.h"

template <class T, class F> DEVICE T wave_reduce(T x, F combine) {
    for (u32 mask = wave_lanes() / 2; mask > 0; mask /= 2) x = combine(x, shuffle_xor(x, mask));
    return x;
}

// All lanes get the result. `scratch` has WORKGROUP / WAVE_LANES_LEAST entries of LDS; a barrier passes before and after its use.
template <class T, class F> DEVICE T workgroup_reduce(T x, T* scratch, F combine) {
    x = wave_reduce(x, combine);
    barrier();
    if (lane_in_wave() == 0) scratch[wave()] = x;
    barrier();
    T all = scratch[0];
    for (u32 w = 1; w < waves(); w++) all = combine(all, scratch[w]);
    return all;
}

struct Add {
    template <class T> DEVICE T operator()(T a, T b) const { return a + b; }
};
struct Most {
    template <class T> DEVICE T operator()(T a, T b) const { return a > b ? a : b; }
};
struct Least {
    template <class T> DEVICE T operator()(T a, T b) const { return a < b ? a : b; }
};

// Sum of the lanes before this one; `total` gets the sum of all. `scratch` has WORKGROUP entries of LDS.
DEVICE u32 workgroup_scan(u32 x, u32* scratch, u32& total) {
    barrier();
    scratch[lane()] = x;
    barrier();
    u32 sum = x;
    for (u32 step = 1; step < WORKGROUP; step *= 2) {
        u32 before = lane() >= step ? scratch[lane() - step] : 0;
        barrier();
        sum += before;
        scratch[lane()] = sum;
        barrier();
    }
    total = scratch[WORKGROUP - 1];
    return sum - x;
}

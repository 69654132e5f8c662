// The language of kernels for CPUs, one fiber a thread.
#pragma once
#include "runtime.h"

#include "arch/scalars.cuh"

#define threadIdx fiber_thread
#define blockIdx fiber_block
#define gridDim fiber_grid
#define blockDim fiber_threads

inline void __syncthreads() { fiber_meet_block(0); }
inline int __syncthreads_or(int vote) { return fiber_meet_block(vote != 0) != 0; }
inline int __syncthreads_and(int vote) { return fiber_meet_block(vote == 0) == 0; }

// Only full masks are in use.
inline void __syncwarp() {
    uint64_t all[32];
    fiber_meet_warp(0, all);
}
inline u32 __ballot_sync(u32, int vote) {
    uint64_t all[32];
    fiber_meet_warp(vote != 0, all);
    u32 votes = 0;
    for (u32 i = 0; i < 32; i++) votes |= (u32)all[i] << i;
    return votes;
}
inline int __any_sync(u32 mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(u32 mask, int vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
inline u32 __match_any_sync(u32, u32 value) {
    uint64_t all[32];
    fiber_meet_warp(value, all);
    u32 same = 0;
    for (u32 i = 0; i < 32; i++) same |= (u32)((u32)all[i] == value) << i;
    return same;
}
template <class T>
T __shfl_sync(u32, T value, int lane) {
    uint64_t bits = 0, all[32];
    memcpy(&bits, &value, sizeof(T));
    fiber_meet_warp(bits, all);
    memcpy(&value, &all[lane & 31], sizeof(T));
    return value;
}
template <class T>
T __shfl_up_sync(u32 mask, T value, unsigned distance) {
    const int lane = (int)(threadIdx.x % 32);
    return __shfl_sync(mask, value, lane >= (int)distance ? lane - (int)distance : lane);
}
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(u32 v) { return __builtin_ffs((int)v); }
inline int __clz(u32 v) { return v ? __builtin_clz(v) : 32; }

template <class T, class V>
T atomicAdd(T* p, V v) {
    const T old = *p;
    *p = old + (T)v;
    return old;
}
template <class T, class V>
T atomicSub(T* p, V v) {
    const T old = *p;
    *p = old - (T)v;
    return old;
}
inline u32 atomicMin(u32* p, u32 v) {
    const u32 old = *p;
    if (v < old) *p = v;
    return old;
}
inline u32 atomicOr(u32* p, u32 v) {
    const u32 old = *p;
    *p = old | v;
    return old;
}
inline void __threadfence_block() {}

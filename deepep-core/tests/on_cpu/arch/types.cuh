// The language of kernels for CPUs: a thread of a block is a thread of the process, and a block's barrier is one in memory.
#pragma once
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct alignas(16) Vec16 {
    u32 x, y, z, w;
};

#define DEVICE inline
#define __device__
#define __global__
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
    u32 x;
};
inline thread_local Index threadIdx, blockIdx, gridDim, blockDim;

// The barrier of a block, and a count of votes.
struct Block {
    std::barrier<> barrier;
    std::atomic<u32> votes{0};
    explicit Block(u32 threads) : barrier(threads) {}
};
inline thread_local Block* this_block;

inline void __syncthreads() { this_block->barrier.arrive_and_wait(); }
inline int __syncthreads_or(int vote) {
    if (vote) this_block->votes++;
    __syncthreads();
    const bool any = this_block->votes != 0;
    __syncthreads();
    if (threadIdx.x == 0) this_block->votes = 0;
    __syncthreads();
    return any;
}
inline int __syncthreads_and(int vote) { return !__syncthreads_or(!vote); }
// Blocks of one warp only.
inline void __syncwarp() { __syncthreads(); }
inline int __any_sync(u32, int vote) { return __syncthreads_or(vote); }

inline u64 atomicAdd(u64* p, u64 n) { return __atomic_fetch_add(p, n, __ATOMIC_RELAXED); }

inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

[[noreturn]] inline void fail(const char* what, u64 value) {
    printf("%s: %#llx\n", what, value);
    exit(1);
}

// The language of kernels for CPUs: a thread of a block is a thread of the process, and a block's barrier is one in memory.
#pragma once
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "arch/scalars.cuh"

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

[[noreturn]] inline void fail(const char* what, u64 value) {
    printf("%s: %#llx\n", what, value);
    exit(1);
}

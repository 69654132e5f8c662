// Fences, and the order between ordinary accesses and those of the bulk copy engine.
#pragma once
#include "arch/types.cuh"

namespace arch {

// Everything this thread has written or seen, before everything it writes afterwards, for every observer in the system.
DEVICE void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Ordinary accesses before, bulk copies after, for global memory. Unlike the fence for all state spaces it waits for no store that is under way.
DEVICE void fence_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The same for shared memory only.
DEVICE void fence_proxy_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barrier of a part of the block.
DEVICE void barrier_sync(u32 id, u32 threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace arch

// Marks of when something happens inside a kernel, for measurements. Nothing of them is compiled unless DEEPEP_TIMELINE is defined: the test that reads
// them defines it, and all points, in generated.cuh (src/backend/cuda/gpu_tests/timeline.rs). A mark is a store that nobody waits for.
//
// MARK: of the warp, the last time counts. MARK_FIRST: the first time counts, which a member MARK_STATE(name) keeps.
#pragma once
#include "generated.cuh"
#ifdef DEEPEP_TIMELINE
#include "arch/time.cuh"

// In front of the rank's heap.
DEVICE void mark(const Domain& d, u32 point) {
    if (threadIdx.x % 32 != 0) return;
    u64* all = (u64*)(d.heap[d.rank] - TIMELINE_BYTES);
    arch::stamp(all + (blockIdx.x * TIMELINE_WARPS + threadIdx.x / 32) * TIMELINE_POINTS + point);
}
#define MARK_IF(condition, domain, point) \
    do { \
        if (condition) mark(domain, point); \
    } while (0)
#define MARK(domain, point) mark(domain, point)
#define MARK_STATE(name) mutable bool name = true
#define MARK_FIRST(name, domain, point) \
    do { \
        if (name) mark(domain, point); \
        name = false; \
    } while (0)
#else
#define MARK_IF(condition, domain, point) ((void)0)
#define MARK(domain, point) ((void)0)
#define MARK_STATE(name) static_assert(true)
#define MARK_FIRST(name, domain, point) ((void)0)
#endif

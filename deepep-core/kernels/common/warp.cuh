// Votes and exchanges among the 32 lanes of a warp. All lanes take part in each.
#pragma once
#include "arch/types.cuh"

constexpr u32 ALL_LANES = 0xffffffffu;

namespace warp {

DEVICE u32 ballot(bool p) { return __ballot_sync(ALL_LANES, p); }
DEVICE bool any(bool p) { return __any_sync(ALL_LANES, p); }
DEVICE bool all(bool p) { return __all_sync(ALL_LANES, p); }
DEVICE u32 match(u32 v) { return __match_any_sync(ALL_LANES, v); }
DEVICE i32 get(i32 v, i32 lane) { return __shfl_sync(ALL_LANES, v, lane); }
DEVICE u32 get(u32 v, i32 lane) { return __shfl_sync(ALL_LANES, v, lane); }
DEVICE u64 get(u64 v, i32 lane) { return __shfl_sync(ALL_LANES, v, lane); }
DEVICE void sync() { __syncwarp(); }

// Lanes below this one.
DEVICE u32 below(i32 lane) { return (1u << lane) - 1; }

// Inclusive sum over lanes.
DEVICE i32 inclusive_sum(i32 v, i32 lane) {
#pragma unroll
    for (i32 d = 1; d < 32; d <<= 1) {
        const i32 other = __shfl_up_sync(ALL_LANES, v, d);
        if (lane >= d) v += other;
    }
    return v;
}

}  // namespace warp

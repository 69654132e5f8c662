// Parts of an output slot that every form of dispatch writes in the same way.
#pragma once
#include "arch/ld_st.cuh"
#include "generated.cuh"

DEVICE u32* scale_pack(const DispatchParams& p, u64 output, u32 row, u32 pack) {
    return (u32*)(output + p.out_scales) + (i64)row * p.out_scale_row_stride + (i64)pack * p.out_scale_pack_stride;
}

// Expanded, on request: zeroes the rows between the experts, of which `start` and `count` are first rows and numbers. By warps; `worker` of `workers` over
// the whole rank.
DEVICE void zero_gaps(const DispatchParams& p, u64 output, const i32* start, const i32* count, u32 lane, u32 worker, u32 workers) {
    const Vec16 zero = {0, 0, 0, 0};
    u32 turn = 0;
    for (u32 j = 0; j < p.local_experts; j++) {
        const i32 first = start[j] + count[j], end = start[j + 1];
        // Gap rows are dealt out in turn.
        for (i32 row = first + (i32)((worker + workers - turn) % workers); row < end; row += workers) {
            Vec16* to = (Vec16*)(output + p.rows + (u64)row * p.row_bytes);
            for (u32 i = lane; i < p.row_bytes / 16; i += 32) to[i] = zero;
            for (u32 k = lane; k < p.scale_packs; k += 32) *scale_pack(p, output, row, k) = 0;
            if (lane == 0 && p.weights) ((u32*)(output + p.row_weight))[row] = 0;
        }
        turn = (turn + (u32)(end - first)) % workers;
    }
}

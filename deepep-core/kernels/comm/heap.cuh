// Addresses in the ranks' heaps.
#pragma once
#include "arch/ld_st.cuh"
#include "generated.cuh"

DEVICE u64* cell64(const Domain& d, u32 rank, u64 offset) { return (u64*)(d.heap[rank] + offset); }
DEVICE u32* cell32(const Domain& d, u32 rank, u64 offset) { return (u32*)(d.heap[rank] + offset); }

// A cell whose value is valid in one epoch only.
DEVICE u64 pack_cell(u32 epoch, u32 value) { return (u64)epoch << 32 | value; }
DEVICE u32 cell_epoch(u64 cell) { return (u32)(cell >> 32); }

// Slot of rank s's contribution at rank r, if peers have slots.
DEVICE u32 rank_slot(u32 s, u32 r) { return s < r ? s : s - 1; }

// Epoch counter of a block for one operation: dispatch, combine or barrier.
DEVICE u32* epoch_counter(const Domain& d, u32 operation, u32 block) {
    return cell32(d, d.rank, d.epochs) + (operation - 1) * MAX_BLOCKS + block;
}

// The same for operations in packets, which have words of their own to say that they have begun.
constexpr u32 PACKETS_DISPATCH = 0, PACKETS_COMBINE = 1;
DEVICE u32* packet_counter(const Domain& d, u32 kind, u32 block) { return epoch_counter(d, OPERATION_BARRIER + 1 + kind, block); }

// At the end of a kernel, by all threads of each block: the counters of this block and, by block 0, of the blocks this grid does not have.
DEVICE void store_epoch(u32* counters, u32 epoch) {
    if (threadIdx.x == 0) counters[blockIdx.x] = epoch;
    if (blockIdx.x == 0)
        for (u32 b = gridDim.x + threadIdx.x; b < MAX_BLOCKS; b += blockDim.x) counters[b] = epoch;
}
DEVICE void store_epoch(const Domain& d, u32 operation, u32 epoch) { store_epoch(epoch_counter(d, operation, 0), epoch); }

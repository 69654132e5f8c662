// Whether all ranks make the same call: kind, element type and size, as one word.
//
// Who writes: block 0 of rank s, into its own cell on every rank (`calls[parity][s]`): the number of the call, and the word.
// Who waits: block 0 of every rank, for the cells of all others. In collectives this is done when the first values are on their way, which
//   come no earlier, so that it costs no time.
// Why cells are not overwritten early: a rank tells of call n + 2 when n + 1 has ended for it, for which it needed values of every rank of
//   n + 1; that rank had then ended n, the reader of this parity.
// Threads are counted from the end of the block, where they have the least to do.
#pragma once
#include "comm/wait.cuh"

struct Call {
    const CollectiveParams& p;
    const Domain& d;
    const u32 operation, number;

    DEVICE Call(const CollectiveParams& p, u32 operation)
        : p(p), d(p.domain), operation(operation), number(*cell32(d, d.rank, p.call_count) + 1) {}
    // The other rank that this thread is for, or RANKS.
    DEVICE u32 peer() const {
        const u32 r = blockDim.x - 1 - threadIdx.x;
        return blockIdx.x == 0 && r < RANKS && r != d.rank ? r : RANKS;
    }
    DEVICE u64* cell(u32 on, u32 from) const { return cell64(d, on, p.calls + ((number & 1) * RANKS + from) * CELL_LINE); }
    DEVICE void tell() const {
        if (peer() < RANKS) arch::st_release_sys(cell(peer(), d.rank), pack_cell(number, p.digest));
    }
    // Gives up if a rank calls something else, so that no thread of any rank goes on waiting.
    DEVICE bool agreed() const {
        const u32 r = peer();
        if (r >= RANKS) return true;
        u64 told = 0;
        const Place at = {operation, PHASE_STARTED, number, r, 0};
        if (!wait_until(d, at, number, [&](u64& seen) {
                told = arch::ld_acquire_sys(cell(d.rank, r));
                seen = cell_epoch(told);
                return seen == number;
            }))
            return false;
        if ((u32)told == p.digest) return true;
        give_up(d, {operation, PHASE_PARAMETERS, number, r, 0}, true, p.digest, (u32)told, 0);
        return false;
    }
    // At the end, by any thread of block 0 after all of them have asked.
    DEVICE void end() const {
        if (blockIdx.x == 0 && threadIdx.x == 0) *cell32(d, d.rank, p.call_count) = number;
    }
};

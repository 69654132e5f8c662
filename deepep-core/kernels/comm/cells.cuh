// Small collectives: values travel in cells that say themselves when they are there, so that nothing is waited for but the values.
//
// Who writes: rank s, into its own cells on every rank (`cells[parity][s]`); a cell is epoch << 32 | four bytes of the value.
// Who waits: every rank, for the cells of all others.
// Why cells are not overwritten early: the writer of epoch e + 2 has ended e + 1, for which it needed a cell of e + 1 from every rank, which
//   that rank wrote after its e, the reader of this parity, had ended. Every call has at least one cell for every rank.
#pragma once
#include "comm/call.cuh"
#include "comm/user.cuh"
#include "comm/wait.cuh"
#include "arch/multimem.cuh"

struct CellBlock {
    const CollectiveParams& p;
    const Domain& d;
    const Call call;
    u32 operation, epoch;

    DEVICE CellBlock(const CollectiveParams& p, u32 operation) : p(p), d(p.domain), call(p, operation), operation(operation) {
        epoch = *cell32(d, d.rank, p.epochs + 4 * blockIdx.x) + 1;
    }
    // False if some rank gave up earlier. For all threads.
    DEVICE bool start() const {
        if (__syncthreads_or(threadIdx.x == 0 && broken(d, operation, epoch))) return false;
        call.tell();
        return true;
    }
    DEVICE u64 offset(u32 from, u64 pair) const {
        return p.cells + (((u64)(epoch & 1) * RANKS + from) * p.cell_count + 2 * pair) * 8;
    }
    // Eight bytes for one rank.
    DEVICE void send(u32 to, u64 pair, u64 value) const {
        arch::st_relaxed_sys(cell64(d, to, offset(d.rank, pair)), pack_cell(epoch, (u32)value), pack_cell(epoch, (u32)(value >> 32)));
    }
    // Eight bytes for all other ranks.
    DEVICE void send_all(u64 pair, u64 value) const {
        if constexpr (MULTICAST) {
            using namespace arch;
            u64* at = (u64*)(p.multicast + offset(d.rank, pair));
            multimem_st<U64, Order::relaxed, Scope::sys>(at, pack_cell(epoch, (u32)value));
            multimem_st<U64, Order::relaxed, Scope::sys>(at + 1, pack_cell(epoch, (u32)(value >> 32)));
        } else {
#pragma unroll
            for (u32 r = 0; r < RANKS; r++)
                if (r != d.rank) send(r, pair, value);
        }
    }
    // Eight bytes from every other rank, in `low` and `high` by rank. False if one does not come.
    DEVICE bool receive(u64 pair, u32 (&low)[RANKS], u32 (&high)[RANKS]) const {
        u64 a[RANKS], b[RANKS];
        // All at once first: usually they are there, or come together.
#pragma unroll
        for (u32 s = 0; s < RANKS; s++)
            if (s != d.rank) arch::ld_relaxed_sys(cell64(d, d.rank, offset(s, pair)), a[s], b[s]);
        bool all = true;
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) {
            if (s == d.rank) continue;
            if (cell_epoch(a[s]) != epoch || cell_epoch(b[s]) != epoch) {
                const Place at = {operation, PHASE_CELLS, epoch, s, (u32)pair};
                all = all && wait_until(d, at, epoch, [&](u64& seen) {
                    arch::ld_relaxed_sys(cell64(d, d.rank, offset(s, pair)), a[s], b[s]);
                    seen = cell_epoch(a[s]) != epoch ? cell_epoch(a[s]) : cell_epoch(b[s]);
                    return seen == epoch;
                });
            }
            low[s] = (u32)a[s];
            high[s] = (u32)b[s];
        }
        return all;
    }
    // At the end, for all threads: this block's counter and, by block 0, those of the blocks that this grid does not have.
    DEVICE void end() const {
        if (threadIdx.x == 0) *cell32(d, d.rank, p.epochs + 4 * blockIdx.x) = epoch;
        call.end();
        if (blockIdx.x == 0)
            for (u32 b = gridDim.x + threadIdx.x; b < COLLECTIVE_BLOCKS; b += THREADS) *cell32(d, d.rank, p.epochs + 4 * b) = epoch;
    }
    // Calls `work(pair)` for this thread's pairs of cells of a value.
    template <class Work>
    DEVICE void each(u64 bytes, Work work) const {
        const u64 pairs = (bytes + 7) / 8;
        for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < pairs; i += (u64)gridDim.x * THREADS)
            if (!work(i)) break;
    }
};

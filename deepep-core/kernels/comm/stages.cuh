// Large collectives: the blocks take turns with the chunks of a tensor. Each moves its chunks through its own stages, four buffers of slots on
// every rank; a chunk fits into a slot.
//
// Block b of a rank meets block b of every other rank, and no other: flags[b][s] on a rank holds the number of the last step that rank s's
// block b has finished. Steps are counted over all calls, and a block's stages are always the same memory, whatever the grid.
//
// Between calls: a block's last step says that it reads nothing any more; a call begins by waiting for that step of every rank. So inside
//   a call nothing of an earlier one is in the way.
// Inside a call: each operation says why four buffers suffice.
#pragma once
#include "comm/call.cuh"
#include "comm/user.cuh"
#include "comm/wait.cuh"
#include "arch/multimem.cuh"

constexpr u32 BUFFERS = 4;
constexpr u32 SLOTS = RANKS > 2 ? RANKS : 2;
// Vectors that a thread has under way from each rank.
constexpr u32 DEPTH = RANKS <= 2 ? 8 : RANKS <= 4 ? 4 : 2;

struct Stages {
    const CollectiveParams& p;
    const Domain& d;
    const u64 bytes;
    u32 operation, step;

    // `bytes` are shared out among the blocks.
    DEVICE Stages(const CollectiveParams& p, u32 operation, u64 bytes)
        : p(p), d(p.domain), bytes(bytes), operation(operation) {
        step = *cell32(d, d.rank, p.steps + 4 * blockIdx.x);
    }
    // Made when it is needed: kept, it would cost registers in the loops.
    DEVICE Call call() const { return Call(p, operation); }
    // False if some rank gave up earlier, or is still in an earlier call and does not come out. For all threads.
    DEVICE bool start() const {
        if (__syncthreads_or(threadIdx.x == 0 && broken(d, operation, step + 1))) return false;
        call().tell();
        return wait(step);
    }
    // Chunks of this block.
    DEVICE u32 chunks() const {
        const u64 all = (bytes + p.chunk - 1) / p.chunk;
        return all > blockIdx.x ? (u32)((all - blockIdx.x + gridDim.x - 1) / gridDim.x) : 0;
    }
    DEVICE u64 start_of(u32 chunk) const { return ((u64)chunk * gridDim.x + blockIdx.x) * p.chunk; }
    DEVICE u32 length(u32 chunk) const {
        const u64 left = bytes - start_of(chunk);
        return left < p.chunk ? (u32)left : p.chunk;
    }
    // The last one may be a part of a vector.
    DEVICE u32 vectors(u32 chunk) const { return (length(chunk) + 15) / 16; }
    // Calls `work(how, begin, end)` for vectors of a chunk: fast for whole ones of tensors that are aligned, and carefully for the others.
    template <class Work>
    DEVICE void each(u32 chunk, u32 begin, u32 end, bool aligned, Work work) const {
        const u32 whole = aligned ? length(chunk) / 16 : 0, fast = end < whole ? end : whole;
        if (begin < fast) work(Fast{}, begin, fast);
        if (fast < end) work(Careful{}, begin < fast ? fast : begin, end);
    }
    DEVICE u64 offset(u32 chunk, u32 slot) const {
        return p.stages + ((u64)(blockIdx.x * BUFFERS + chunk % BUFFERS) * SLOTS + slot) * p.slice;
    }
    // A slot on a rank, and the same slot of all ranks.
    DEVICE Vec16* on(u32 rank, u32 chunk, u32 slot) const { return (Vec16*)(d.heap[rank] + offset(chunk, slot)); }
    DEVICE Vec16* on_all(u32 chunk, u32 slot) const { return (Vec16*)(p.multicast + offset(chunk, slot)); }

    DEVICE u64 flag(u32 from) const { return p.flags + blockIdx.x * CELL_LINE + 4 * from; }
    // What all threads of the block have done so far is done before the step.
    DEVICE void signal(u32 number) const {
        if constexpr (MULTICAST) arch::fence_alias();
        __syncthreads();
        if constexpr (MULTICAST) {
            using namespace arch;
            if (threadIdx.x == 0) multimem_st<U32, Order::release, Scope::sys>((void*)(p.multicast + flag(d.rank)), number);
        } else {
            if (threadIdx.x < RANKS && threadIdx.x != d.rank)
                arch::st_release_sys(cell32(d, threadIdx.x, flag(d.rank)), number);
        }
    }
    // Every rank has finished the step. For all threads; false for all if one does not.
    DEVICE bool wait(u32 number) const {
        // The first step of this call: what the ranks call comes with it, or before.
        bool there = number != step + 1 || call().agreed();
        if (threadIdx.x < RANKS && threadIdx.x != d.rank) {
            const Place at = {operation, PHASE_STAGE, number, threadIdx.x, blockIdx.x};
            there = there && wait_at_least(d, at, cell32(d, d.rank, flag(threadIdx.x)), number);
        }
        there = __syncthreads_and(there);
        if constexpr (MULTICAST) arch::fence_alias();
        return there;
    }
    // At the end of a call that has gone well: `number` is its last step, which is only said here.
    DEVICE void end(u32 number) const {
        signal(number);
        if (threadIdx.x == 0) *cell32(d, d.rank, p.steps + 4 * blockIdx.x) = number;
        call().end();
    }
    // The loop of operations with one step a chunk: `put(chunk)` fills stages, and when all ranks have done so `get(chunk)` reads them.
    //
    // Why four buffers suffice: a rank says step k + 1 (chunk k is put) before it reads chunk k − 1, hence after it has read chunk k − 2.
    // put(k) comes after the wait for step k − 1, so that every rank has read chunk k − 4, the last one in that buffer.
    template <class Put, class Get>
    DEVICE void run(Put put, Get get) const {
        const u32 n = chunks();
        if (n == 0 || !start()) return;
        for (u32 k = 0; k <= n; k++) {
            if (k < n) {
                put(k);
                signal(step + k + 1);
            }
            if (k == 0) continue;
            if (!wait(step + k)) return;
            get(k - 1);
        }
        end(step + n + 1);
    }
};

// Runs over vectors: MANY loads are under way before the first result is used; one, if care is needed.
template <u32 MOST, class How, class Load, class Use>
DEVICE void sweep(How, u32 begin, u32 end, Load load, Use use) {
    constexpr u32 MANY = How::value ? MOST : 1;
    for (u32 at = begin + threadIdx.x; at < end; at += MANY * THREADS) {
        decltype(load(at)) v[MANY];
#pragma unroll
        for (u32 u = 0; u < MANY; u++)
            if (at + u * THREADS < end) v[u] = load(at + u * THREADS);
#pragma unroll
        for (u32 u = 0; u < MANY; u++)
            if (at + u * THREADS < end) use(at + u * THREADS, v[u]);
    }
}

// One vector of every rank.
struct OfRanks {
    Vec16 v[RANKS];
};

// What a dispatch says about ids, counts and capacity: to the caller, to later operations, to the host.
#pragma once
#include "arch/ld_st.cuh"
#include "comm/wait.cuh"

// An id as the caller gives it.
#if INDEX_BITS == 64
typedef i64 Id;
typedef u64 UnsignedId;
#else
typedef i32 Id;
typedef u32 UnsignedId;
#endif

DEVICE i64 given_expert(const DispatchParams& p, u32 token, u32 k) {
    return ((const Id*)p.topk_idx)[(u64)token * p.lanes + k];
}
// An expert, −1, or −2 for an id that is out of range.
DEVICE i32 known_expert(const DispatchParams& p, i64 id) { return id == -1 ? -1 : (u64)id < p.experts ? (i32)id : -2; }
DEVICE i32 load_expert(const DispatchParams& p, u32 token, u32 k) { return known_expert(p, given_expert(p, token, k)); }

// Not inlined: rare.
__device__ __noinline__ void report_expert(const DispatchParams& p, u32 epoch, u32 kind, u32 token, u32 k) {
    // One record a kind and epoch is enough.
    const u32 me = p.domain.rank;
    if (arch::exchange_gpu(cell32(p.domain, me, p.domain.reported) + kind, epoch) == epoch) return;
    StatusRecord r = {};
    r.sequence = epoch;
    r.operation = OPERATION_DISPATCH;
    r.rank = me;
    r.block = blockIdx.x;
    r.index = token;
    r.lane = k;
    r.expected = p.experts;
    r.seen = (u64)given_expert(p, token, k);
    write_record(p.domain, kind, r);
}

// What this rank receives, or needed to receive if some rank's capacity is exceeded.
struct Received {
    u32 over;          // lowest rank over capacity; RANKS if none is
    i32 tokens, rows;  // of this rank, or of the rank over capacity
};

// By `threads` threads of one block, of which this is number `thread`: counts for the caller, for combine, and for the host if it waits for them.
// `start[0..local experts]`: first row of each local expert and the number of rows; `count(j)`: rows of expert j; `psum(r)`: tokens from ranks up to r.
// `psum_known`: these are in the handle already, and others may be reading them.
template <class Count, class Psum>
DEVICE void write_counts(const DispatchParams& p, u64 handle, u32 epoch, const Received& received, const i32* start, Count count,
                         Psum psum, u32 thread = threadIdx.x, u32 threads = THREADS, bool psum_known = false) {
    const u32 local = p.local_experts, tag = p.count_tag;
    const bool fits = received.over == RANKS;
    u64* host = (u64*)p.host_counts;
    // Other blocks have written their records before they told this one of their tokens: the host is to see those first.
    if (tag) arch::fence_sys();
    for (u32 j = thread; j <= local; j += threads) {
        ((i32*)(handle + p.expert_start))[j] = fits ? start[j] : 0;
        if (j == local) break;
        const i32 n = fits ? count(j) : 0;
        ((i32*)(handle + p.expert_count))[j] = n;
        if (p.stats && n) atomicAdd((i32*)p.stats + j, n);
        if (tag) arch::st_relaxed_sys(host + HOST_EXPERT_COUNT + j, pack_cell(tag, n));
    }
    if (thread < RANKS) {
        const i32 n = fits ? psum(thread) : 0;
        if (!psum_known) ((i32*)(handle + p.rank_psum))[thread] = n;
        if (tag) arch::st_relaxed_sys(host + HOST_RANK_PSUM + thread, pack_cell(tag, n));
    }
    if (thread != 0) return;
    const i32 values[4] = {fits ? received.tokens : 0, fits ? received.rows : 0, fits ? 0 : received.tokens, fits ? 0 : received.rows};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        ((i32*)(handle + p.counts))[i] = values[i];
        if (tag) arch::st_relaxed_sys(host + i, pack_cell(tag, values[i]));
    }
    if (fits) return;
    StatusRecord r = {};
    r.sequence = epoch;
    r.operation = OPERATION_DISPATCH;
    r.rank = p.domain.rank;
    r.peer = received.over;
    r.expected = p.row_capacity;
    r.seen = received.rows;
    r.expected_tokens = p.token_capacity;
    r.seen_tokens = received.tokens;
    write_record(p.domain, RECORD_CAPACITY, r);
}

// Bounded waits, and what happens when one gives up.
//
// A wait polls until it is satisfied, until the deadline, or until this rank's abort cell says that some rank gave up. The first thread
// of a rank to fail writes the abort record into the status block and tells all ranks, as does one that hit the deadline itself.
// Nothing traps: callers see `false`, stop starting work, let local copies end, and leave the kernel.
#pragma once
#include "arch/fence.cuh"
#include "arch/time.cuh"
#include "comm/heap.cuh"
#include "common/timeline.cuh"

// What is being waited for, for the record.
struct Place {
    u32 operation, phase, epoch, peer, index;
};

// Writes one record. The sequence word is 0 meanwhile, and is set last. It is in the host's memory before this thread goes on: a host that sees counts
// of the call sees its records.
DEVICE void write_record(const Domain& d, u32 kind, const StatusRecord& r) {
    StatusRecord* out = (StatusRecord*)(d.status + kind * STATUS_RECORD_BYTES);
    volatile u32* words = (volatile u32*)out;
    const u32* from = (const u32*)&r;
    words[0] = 0;
    arch::fence_sys();
#pragma unroll
    for (u32 i = 1; i < sizeof(StatusRecord) / 4; i++) words[i] = from[i];
    arch::fence_sys();
    words[0] = r.sequence;
    arch::fence_sys();
}

// Whether some rank gave up.
DEVICE bool aborted(const Domain& d) { return arch::ld_relaxed_sys(cell64(d, d.rank, d.abort)) != 0; }

// Reports a failed wait. `mine`: this thread hit the deadline; otherwise the abort cell was set by another. Whoever was first, each rank has told all
// others before its kernel ends: what it does afterwards with memory that they may still read, they hear of in time.
__device__ __noinline__ void give_up(const Domain& d, Place at, bool mine, u64 expected, u64 seen, u64 waited) {
    u64* own = cell64(d, d.rank, d.abort);
    u64 word = 1ull << 63 | (u64)(at.operation & 0x7f) << 56 | (u64)(at.phase & 0xff) << 48 | (u64)d.rank << 40 |
               (u64)(at.peer & 0xff) << 32 | at.epoch;
    if (mine) {
        const u64 before = arch::cas_sys(own, 0, word);
        if (before != 0) {
            word = before;
            mine = false;
        }
    } else {
        word = arch::ld_relaxed_sys(own);
    }
    u32* reported = cell32(d, d.rank, d.reported) + RECORD_ABORT;
    const bool first = arch::cas_gpu(reported, 0, 1) == 0;
    if (mine || first) {
        for (u32 r = 0; r < d.ranks; r++) {
            u64* other = cell64(d, r, d.abort);
            if (r != d.rank && (mine || arch::ld_relaxed_sys(other) == 0)) arch::st_relaxed_sys(other, word);
        }
        arch::fence_sys();
    }
    if (!first) return;
    StatusRecord r = {};
    r.sequence = at.epoch ? at.epoch : 1;
    r.operation = (u32)(word >> 56) & 0x7f;
    r.phase = (u32)(word >> 48) & 0xff;
    r.rank = (u32)(word >> 40) & 0xff;
    r.peer = (u32)(word >> 32) & 0xff;
    r.block = blockIdx.x;
    if (mine) {
        r.index = at.index;
        r.expected = expected;
        r.seen = seen;
        r.expected_tokens = waited;
    }
    write_record(d, RECORD_ABORT, r);
}

// At the start of a kernel, by one thread of each block: whether some rank gave up earlier. Then nothing is started, and the host of this
// rank learns of it, too.
// `gave_up`: what its abort cell said.
DEVICE bool broken(const Domain& d, u32 operation, u32 epoch, bool gave_up) {
    if (!gave_up) return false;
    give_up(d, {operation, 0, epoch, d.rank, 0}, false, 0, 0, 0);
    return true;
}
DEVICE bool broken(const Domain& d, u32 operation, u32 epoch) { return broken(d, operation, epoch, aborted(d)); }

// Polls `ready` until it is true. `ready(at, seen)` says what it saw, and may say in `at` what is missing, if it looks at several things at once.
template <class Ready>
DEVICE bool wait_for_all(const Domain& d, Place at, u64 expected, Ready ready) {
    u64 seen = 0, start = 0, waited = 0;
    bool late = false;
    // One place where `ready` is asked: kernels are large enough.
    for (u32 n = 0;; n++) {
        if (ready(at, seen)) return true;
        if (late) break;
        // Seldom: the clock and the cell are not for nothing.
        if (n % 32 != 31) continue;
        if (start == 0) start = arch::now_ns();
        if (aborted(d)) break;
        // Blocks of one rank wait for each other only because one of them waits for a peer. That one gives up first, so that the record
        // names the peer and not this rank.
        waited = arch::now_ns() - start;
        late = waited > d.timeout_ns + (at.peer == d.rank ? d.timeout_ns / 2 : 0);
    }
    give_up(d, at, late, expected, seen, late ? waited : 0);
    return false;
}

// After a failure: lets a local copy that is under way end. Nobody is told if it does not.
template <class Ended>
DEVICE bool let_end(const Domain& d, Ended ended) {
    const u64 start = arch::now_ns();
    while (!ended())
        if (arch::now_ns() - start > d.timeout_ns) return false;
    return true;
}

// Polls `ready` until it is true. `ready(seen)` stores what it saw.
template <class Ready>
DEVICE bool wait_until(const Domain& d, const Place& at, u64 expected, Ready ready) {
    return wait_for_all(d, at, expected, [&](Place&, u64& seen) { return ready(seen); });
}

// Waits for a flag that holds an epoch and never goes past it, then acquires.
DEVICE bool wait_equal(const Domain& d, const Place& at, const u32* flag) {
    return wait_until(d, at, at.epoch, [&](u64& seen) {
        const u32 v = arch::ld_acquire_sys(flag);
        seen = v;
        return v == at.epoch;
    });
}

// Waits for a flag that holds at least `epoch` (wrap-safe), then acquires.
DEVICE bool wait_at_least(const Domain& d, const Place& at, const u32* flag, u32 epoch) {
    return wait_until(d, at, epoch, [&](u64& seen) {
        const u32 v = arch::ld_acquire_sys(flag);
        seen = v;
        return (i32)(v - epoch) >= 0;
    });
}

// Rows that are read where the experts left them, on other ranks.
//
// Who writes: block 0 at its start, into the line of `started` on every peer: the word that says that the kernel has begun (release), and two that say where this
// rank's rows and weights lie. Each is valid with its epoch, so that none waits for the other's way over the link. Nobody writes the line again before this
// rank has read all (below). When every block of a rank has read all, the last one stores the epoch into `read[rank]` on every peer.
// Who waits: the announcer warp of each block for `started` of every peer, reducers for the announcer; block 0 at its end for `read` of every
// peer: until then x stays as it is.
#pragma once
#include "ops/combine/block.cuh"

// By the first R threads of block 0.
DEVICE void tell_sources(const Block& b) {
    b.begun().tell();
    if (threadIdx.x < RANKS && threadIdx.x != b.me) {
        u64* line = b.begun().cell(threadIdx.x, b.me, b.epoch);
        arch::st_relaxed_sys(line + 1, pack_cell(b.epoch, b.p.readable_x));
        arch::st_relaxed_sys(line + 2, pack_cell(b.epoch, b.p.readable_weights));
    }
}

// Address of what a word of rank r's line says. By one thread, after the word that says that the rank has begun.
DEVICE bool learn(const Block& b, u32 r, u32 number, u64& address) {
    const u64* word = b.begun().cell(b.me, r, b.epoch) + number;
    return wait_until(b.d, b.place(PHASE_STARTED, r, number), b.epoch, [&](u64& seen) {
        const u64 v = arch::ld_relaxed_sys(word);
        seen = cell_epoch(v);
        address = b.d.heap[r] + (v & 0xffffffffu) * READABLE_UNIT;
        return seen == b.epoch;
    });
}

// By the announcer warp. False after an abort.
DEVICE bool learn_sources(const Block& b) {
    const u32 r = b.lane;
    bool ok = true;
    if (r < RANKS && r != b.me) {
        Source& s = b.control.sources[r];
        ok = b.begun().compare(r);
        ok = ok && learn(b, r, 1, s.x) && learn(b, r, 2, s.weights);
    } else if (r == b.me) {
        b.control.sources[r] = {b.p.x, b.p.weights};
    }
    ok = warp::all(ok);
    warp::sync();
    if (ok && b.lane == 0) arch::st_release_cta_shared(&b.control.known, 1);
    return ok;
}

DEVICE bool sources_known(const Block& b) { return arch::ld_acquire_cta_shared(&b.control.known) != 0; }

// By a whole warp that reads, once: it has read all, or has given up.
DEVICE void end_reading(const Block& b, bool ok) {
    warp::sync();
    if (b.lane != 0) return;
    if (!ok) b.control.lost = 1;
    __threadfence_block();
    atomicSub(&b.control.reading, 1);
}

// By the announcer warp at its end: this rank's x stays until all have read it, and what this rank has read was x.
DEVICE void let_go(const Block& b) {
    // Those warps' waits end.
    while (arch::ld_acquire_cta_shared(&b.control.reading) != 0) arch::sleep_ns(20);
    if (b.control.lost) return;
    u32 last = 0;
    if (b.lane == 0) last = arch::add_acq_rel_gpu(b.ticket(TICKET_READ), 1) == gridDim.x - 1;
    const bool tells = warp::get(last, 0) != 0;
    // Orders the lanes behind the first one's acquire; exchanged registers do not.
    warp::sync();
    if (tells && b.lane < RANKS && b.lane != b.me) arch::st_release_sys(b.read_cell(b.lane, b.me), b.epoch);
    if (blockIdx.x == 0 && b.lane < RANKS && b.lane != b.me)
        wait_equal(b.d, b.place(PHASE_READING, b.lane, 0), b.read_cell(b.me, b.lane));
    warp::sync();
    // A rank that gave up has not waited, and its x may have changed under this block's loads: its word was here before that.
    if (b.lane == 0) broken(b.d, OPERATION_COMBINE, b.epoch);
}

// Flags for rows whose bulk stores have completed: one fence for many rows.
//
// A flag after a bulk store needs a release or fence at system scope, which takes microseconds. So row warps don't execute it: a
// thread whose stores have completed puts the flag's code into a mailbox of its own in shared memory (release at block scope) and goes
// on. While a link is full of rows a fence takes about 5 µs, and a mailbox is free again after it: a thread that hands in more often has several. One warp of the block empties all mailboxes (acquire), executes one system-scope fence for everything it found, and stores the
// flags. The chain bulk store → wait_group → release.cta → acquire.cta → fence.sys → flag orders the row before its flag for every
// rank, and also everything that was ordered before the row warp's hand-over, such as metadata written before a block barrier.
//
// A thread that has nothing else to do stores its last flag itself, with a release: the announcer may be in the middle of a fence, and would begin another
// one. Its own flags before are on their way to other ranks, and each fence waits for them, too.
//
// The announcer waits for no row warp, so that row warps can wait for it. (Before it starts it may wait for peers whose kernel a sender waits for anyway.)
#pragma once
#include "common/warp.cuh"
#include "comm/wait.cuh"

constexpr u32 EMPTY = 0xffffffffu;
constexpr u32 WARPS = THREADS / 32;
// A code names a rank and a cell.
constexpr u32 CODE_RANK_SHIFT = 28;

struct Mailboxes {
    u32 code[WARPS][32];
    u32 live;  // row warps that may still hand in
};

// Before a block barrier.
DEVICE void mailboxes_init(Mailboxes& m, u32 row_warps) {
    for (u32 i = threadIdx.x; i < WARPS * 32; i += THREADS) (&m.code[0][0])[i] = EMPTY;
    if (threadIdx.x == 0) m.live = row_warps;
}

// Hands in one flag, in mailbox `number` of the warp, which is this thread's; the caller's stores for it have completed. False if the announcer does not
// come, which only an abort explains.
DEVICE bool hand_in(const Domain& d, Mailboxes& m, const Place& at, u32 code, u32 number = threadIdx.x % 32) {
    u32* box = &m.code[threadIdx.x / 32][number];
    const bool free = wait_until(d, at, EMPTY, [&](u64& seen) {
        const u32 v = arch::ld_acquire_cta_shared(box);
        seen = v;
        return v == EMPTY;
    });
    if (free) arch::st_release_cta_shared(box, code);
    return free;
}

// Announces one flag without the announcer; the caller's stores for it have completed. `flags` as for `announce`.
template <class Flags>
DEVICE void announce_alone(u32 code, u32 epoch, Flags flags) {
    const u32 rank = code >> CODE_RANK_SHIFT, cell = code & ((1u << CODE_RANK_SHIFT) - 1);
    arch::st_release_sys(flags(rank) + cell, epoch);
}

// By one thread of a row warp, after the last hand-in of all its lanes and a warp barrier.
DEVICE void hand_in_done(Mailboxes& m) {
    __threadfence_block();
    atomicSub(&m.live, 1);
}

// The announcer warp. `store(warp, code)` stores a flag, relaxed: what row warp `warp` has handed in from the mailbox of this lane.
template <class Store>
DEVICE void announce(Mailboxes& m, u32 row_warps, Store store) {
    const u32 lane = threadIdx.x % 32;
    bool last = false;
    for (;;) {
        // Read before the mailboxes: if no row warp was left, nothing can be handed in after the look.
        if (!last) last = warp::all(arch::ld_acquire_cta_shared(&m.live) == 0);
        u32 found[WARPS];
        bool some = false;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            found[w] = w < row_warps ? arch::ld_acquire_cta_shared(&m.code[w][lane]) : EMPTY;
            some |= found[w] != EMPTY;
        }
        if (warp::any(some)) {
            arch::fence_sys();
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) {
                if (found[w] == EMPTY) continue;
                store(w, found[w]);
                arch::st_release_cta_shared(&m.code[w][lane], EMPTY);
            }
        } else if (last) {
            break;
        } else {
            arch::sleep_ns(20);
        }
    }
}
// `flags` maps a rank to the base of its flags, which become the epoch.
template <class Flags>
DEVICE void announce(Mailboxes& m, u32 row_warps, u32 epoch, Flags flags) {
    announce(m, row_warps, [&](u32, u32 code) {
        const u32 rank = code >> CODE_RANK_SHIFT, cell = code & ((1u << CODE_RANK_SHIFT) - 1);
        arch::st_relaxed_sys(flags(rank) + cell, epoch);
    });
}

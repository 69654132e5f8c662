// Dispatch: rows of this rank's tokens to the ranks of their experts, in one kernel. The protocol is docs/protocol.md, section 2.
//
// Blocks [0, senders) count, exchange counts, write tables and send; the others move rows inside the rank. Where there are enough of them (expanded, fresh), the
// first of those count and write tables instead, before they move rows. All blocks are resident at once (cooperative launch). Warps [0, row_warps) of a block
// carry rows; the others of a sending block are workers, who count and write tables. Then one of them announces rows (expanded) or says that they are there
// (plain), one waits for what comes from other ranks, and the others zero the gaps between experts.
//
// Who waits for whom: place, count → exchange (blocks of all ranks) → tables → sending → moving → end. Each waits only for what
// stands before it, so that ranks can't block each other; a rank that never comes ends every wait at its deadline (comm/wait.cuh).
//
// Order: a row is complete when its bulk group is (wait_group, not .read). Plain: row warps count themselves done, then one thread stores `done` with release
// at system scope. Expanded: the announcer's fence, or the release of a last flag (comm/announce.cuh). Peers' slots are written only after their place cell was
// acquired, which says that their earlier readers have ended; landing slots, of which there are two sets, before that.
#include "arch/launch.cuh"
#include "ops/dispatch/move.cuh"
#include "ops/dispatch/tables.cuh"

// Counts a warp of this block that has done its part.
DEVICE void count_warp(const Block& b, u32* counter) {
    warp::sync();
    if (b.lane == 0) arch::add_release_cta_shared(counter, 1);
}
// Waits until `warps` have, and acquires what they have done. By a whole warp.
DEVICE bool wait_warps(const Block& b, u32 phase, const u32* counter, u32 warps) {
    const bool ok = wait_until(b.d, b.place(phase, b.me, blockIdx.x), warps, [&](u64& seen) {
        seen = arch::ld_acquire_cta_shared(counter);
        // Rows take their time, and this warp shares its quarter of the multiprocessor with those that carry them.
        if (seen != warps) arch::sleep_ns(20);
        return seen == warps;
    });
    return warp::all(ok);
}

// Plain, by the closer, who has acquired what the workers have done: tells every peer that this block's rows have arrived. Nobody is told of rows that were
// not sent.
DEVICE void close_plain(const Block& b) {
    if (!wait_warps(b, PHASE_DONE, &b.control.sent, b.p.row_warps) || arch::ld_acquire_cta_shared(&b.control.unsent) != 0) return;
    if (b.lane < RANKS && b.lane != b.me) arch::st_release_sys(cell32(b.d, b.lane, b.d.done) + b.me * MAX_BLOCKS + blockIdx.x, b.epoch);
}

// Plain, by the watcher: waits for the blocks of all peers. Sending blocks share the waits.
DEVICE void watch_plain(const Block& b) {
    if (b.lane >= RANKS || b.lane == b.me) return;
    for (u32 c = blockIdx.x; c < b.control.senders[b.lane]; c += b.p.senders)
        if (!wait_equal(b.d, b.place(PHASE_DONE, b.lane, c), cell32(b.d, b.me, b.d.done) + b.lane * MAX_BLOCKS + c)) return;
}

// Named barriers, of a block's workers and of those who report; 0 is the whole block's.
constexpr u32 WORKER_BARRIER = 1, REPORT_BARRIER = 2;

// Plain, by the workers of block 0 but the closer: experts' tokens, from all blocks of all ranks, and what is said of them.
DEVICE void report_plain(const Block& b, u32 over) {
    if (sum_own_experts(b)) count_warp(b, &b.control.summed);
    // All of them come here, whether they could sum or not.
    arch::barrier_sync(REPORT_BARRIER, 32 * (b.workers() - 1));
    if (b.warp != WATCHER || arch::ld_acquire_cta_shared(&b.control.summed) != b.workers() - 1) return;
    scan_experts(b, b.me);
    warp::sync();
    tell_counts(b, over, b.lane, 32);
}

// By the closer: says in the chunk's cell that all workers have done their part.
DEVICE bool publish_tables(const Block& b, const u32* counter, bool told) {
    if (!wait_warps(b, PHASE_TABLES, counter, b.workers())) return false;
    if ((EXPANDED || !told) && b.lane == 0) arch::st_release_gpu(b.chunk_cell(b.part, told), pack_cell(b.epoch, 0));
    return true;
}

// A worker's tokens, and what it makes of them before there are positions.
struct Work {
    // Ids that are on their way. Not kept longer than it takes to look at them.
    struct Asked {
        Given given;
        Round round;
    };
    const TokenLanes lanes;
    const Share share;
    Counted counted;

    DEVICE Work(const Block& b) : lanes(b), share(b) {}
    DEVICE void ask(const Block& b, Asked& asked) const {
        if (EXPANDED) load_given_ids(b, lanes, share, 0, asked.given);
        else if (share.begin != share.end) load_round(b, lanes, share.begin, asked.round);
    }
    DEVICE void count(const Block& b, Asked& asked) {
        if (EXPANDED) {
            Items items;
            take_given_ids(b, lanes, share, 0, asked.given, items);
            count_experts(b, lanes, share, items);
        } else {
            count_ranks(b, lanes, share, asked.round, counted);
        }
        MARK(b.d, D_COUNTED);
    }
};

// What a worker does when positions are known: tables, and what other ranks are told. False if that ended early.
// `given`, and (expanded, cached) the weights in `items`: on their way.
DEVICE bool write_chunk(const Block& b, const Work& work, const Given& given, Items& items, u32 over) {
    const TokenLanes& lanes = work.lanes;
    const Share& share = work.share;
    if (b.cached()) {
        write_outputs(b, lanes, share, items);
    } else {
        // All that movers read of the counts.
        if (EXPANDED && b.tells()) write_prefix_sums(b, over, threadIdx.x - 32 * b.first_worker());
        i32 rows[AHEAD];
        if (EXPANDED) {
            take_given_ids(b, lanes, share, 0, given, items);
            write_tables(b, lanes, share, items, over, rows);
        } else {
            write_rows(b, lanes, share, work.counted, over);
        }
        // Before anything else is on its way to other ranks or to the host: the release would wait for it.
        count_warp(b, &b.control.tables);
        MARK(b.d, D_TABLES);
        const bool published = b.warp != CLOSER || publish_tables(b, &b.control.tables, false);
        if (!EXPANDED) {
            take_given_ids(b, lanes, share, 0, given, items);
            load_weights(b, lanes, share, 0, items);
            count_later(b, lanes, share, items, over);
            // All of them come here. What they counted is summed.
            arch::barrier_sync(WORKER_BARRIER, 32 * b.workers());
            publish_experts(b);
        }
        if (!published) return false;
        if (over == RANKS) tell_tables(b, lanes, share, items, rows);
    }
    count_warp(b, &b.control.told);
    MARK(b.d, D_TOLD);
    // Row warps announce nothing before, or (plain) the closer does not.
    if (b.warp == CLOSER && !publish_tables(b, &b.control.told, true)) return false;
    MARK_IF(b.warp == CLOSER, b.d, D_CLOSER);
    // By a warp that neither announces nor closes: rows don't wait for a fence behind which the host reads, nor for code that one block alone goes through.
    if (EXPANDED && !b.cached() && b.tells() && b.warp == WATCHER) tell_counts(b, over, b.lane, 32);
    return true;
}

// Expanded, by the announcer.
DEVICE void announce_rows(const Block& b) {
    announce(b.control.mail, b.p.row_warps, [&](u32 warp, u32 code) {
        const Flag flag(b, warp, b.lane, code);
        arch::st_relaxed_sys(flag.cell, flag.value);
    });
    MARK(b.d, D_ANNOUNCED);
}

// Expanded, by the workers of all blocks that know how many rows each expert has: zeroes the gaps behind them.
DEVICE void zero_chunk(const Block& b) {
    // In the handle, or what this block has summed itself.
    const i32* start = b.cached() ? b.mine<i32>(b.p.expert_start) : b.start();
    const i32* count = b.cached() ? b.mine<i32>(b.p.expert_count) : b.total() + b.me * b.p.local_experts;
    zero_gaps(b.p, b.control.output[b.me], start, count, b.lane, b.part * b.workers() + b.warp - b.first_worker(), b.p.senders * b.workers());
}

// What a worker of a sending block does when its tables are written, here or elsewhere.
DEVICE void attend(const Block& b, u32 over) {
    if (EXPANDED) {
        // A row's flag says that what its receiver is told of it has arrived, too.
        if (b.warp == b.p.row_warps && wait_tables(b, true)) {
            MARK(b.d, D_TOLD_KNOWN);
            announce_rows(b);
        }
    } else if (b.warp == CLOSER) {
        close_plain(b);
        MARK(b.d, D_ANNOUNCED);
    } else {
        if (b.tells() && !b.cached()) report_plain(b, over);
        if (b.warp == WATCHER) watch_plain(b);
        MARK_IF(b.warp == WATCHER, b.d, D_WATCHED);
    }
}

// By a block that sends or counts. Whether this warp has rows left to move afterwards; `moved`: how many it has.
DEVICE bool run_sender(const Block& b, const Work& work, u32& moved) {
    const bool carries = b.sends() && b.carries(), counts = b.counts() && !b.cached();
    i32 before = -1;  // plain: tokens before a first row, for the same rank
    if (counts) publish_counts(b);
    MARK(b.d, D_PUBLISHED);
    if (carries && !b.cached()) {
        Ring ring(b);
        // Plain: row warps find out how far down their first rows lie while others wait.
        if (!EXPANDED) before = Sender(b, ring).look_ahead();
        else if (!Sender(b, ring).land() && b.lane == 0) b.control.stuck = 1;
    }
    // Plain: twice through the same code. The first time nothing is known, and nothing is sent: the rows are waited for, and the instructions, which come from
    // memory, are there when it matters.
#pragma unroll 1
    for (bool known = EXPANDED || b.cached();; known = true) {
        u32 over = RANKS;
        i32 row = -1, flag = -1;  // of a first row, if its place is known here
        Given given;
        Items items;
        Ring ring(b);
        if (known) {
            bool ok;
            if (counts) {
                ok = exchange_counts(b);
                MARK(b.d, D_EXCHANGED);
                if (!carries) {
                    load_given_ids(b, work.lanes, work.share, 0, given);
                    if (EXPANDED) load_weights(b, work.lanes, work.share, 0, items);
                }
                if (EXPANDED) {
                    scan_ranks(b);
                    __syncthreads();
                }
                over = over_capacity(b);
                if (!EXPANDED && carries && over == RANKS) row = Sender(b, ring).first_row(before);
            } else {
                if (b.cached() && carries) Sender(b, ring).look_up_first(row, flag);
                if (b.cached() && !carries) load_weights(b, work.lanes, work.share, 0, items);
                ok = !__syncthreads_or(b.warp == CLOSER && !acquire_places(b));
            }
            if (EXPANDED) ok = ok && b.control.stuck == 0;
            MARK(b.d, D_STARTS);
            if (!carries) {
                const bool knows = counts || b.cached();
                if (!ok || (knows && !write_chunk(b, work, given, items, over))) return false;
                if (b.sends()) attend(b, over);
                if (EXPANDED && knows && b.p.zero_padding && over == RANKS) zero_chunk(b);
                return !b.sends() && b.carries();
            }
            if (!ok) {
                Sender(b, ring).resume(-1, -1);
                ring.drain(b);
                if (EXPANDED) arch::bulk_wait();
                return false;
            }
            arch::fence_proxy_global();
        }
        if (!carries) continue;
        Sender sender(b, ring);
        sender.resume(row, flag);
        const bool sent = sender.run(known);
        if (!known) continue;
        if (!EXPANDED) {
            if (!sent && b.lane == 0) arch::add_release_cta_shared(&b.control.unsent, 1);
            count_warp(b, &b.control.sent);
        }
        if (EXPANDED) moved = ring.head;
        return EXPANDED;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(128) u8 shared[];
    Block b(p, shared);
    if (p.domain.early) arch::launch_dependents();
    MARK(b.d, D_ENTRY);
    arch::wait_for_predecessor();
    MARK(b.d, D_START);

    // What all wait for is asked for first; then ids and first rows, which come meanwhile.
    const u32 before = arch::ld_relaxed_sys(epoch_counter(b.d, OPERATION_DISPATCH, blockIdx.x));
    const u64 gave_up = threadIdx.x == 0 ? arch::ld_relaxed_sys(cell64(b.d, b.me, b.d.abort)) : 0;
    const bool sends = b.sends(), meets = sends || b.counts(), counts = meets && b.works() && !b.cached();
    Work work(b);
    Work::Asked asked;
    if (counts) work.ask(b, asked);
    if (b.carries()) {
        Ring ring(b);
        ring.init(b.lane);
        if (sends) Sender(b, ring).prefetch();
    }
    b.epoch = before + 1;
    // Movers have nothing to do yet.
    if (blockIdx.x == gridDim.x - 1 && b.warp == 0) publish_place(b);
    if (threadIdx.x == 0) {
        b.control.tables = b.control.told = b.control.summed = b.control.sent = b.control.unsent = b.control.stuck = b.control.known = 0;
        b.control.output[b.me] = (u64)b.own_output<u8>(0);
    }
    if (threadIdx.x < MAX_RANKS) b.control.from[threadIdx.x] = 0;
    if (EXPANDED) {
        if (b.counts())
            for (u32 i = threadIdx.x; i < p.experts + RANKS; i += THREADS) b.base()[i] = b.total()[i] = 0;
    }
    if (EXPANDED) mailboxes_init(b.control.mail, p.row_warps);
    if (counts) work.count(b, asked);
    bool moves = false;
    u32 moved = 0;
    // A vote, not a word in shared memory: all threads of a block must find the same, and a fast warp must not change what a slow one still looks at.
    if (__syncthreads_or(gave_up != 0)) {
        if (threadIdx.x == 0) broken(b.d, OPERATION_DISPATCH, b.epoch, gave_up != 0);
        if (b.carries() && sends) {
            Ring ring(b);
            Sender(b, ring).resume(-1, -1);
            ring.drain(b);
        }
    } else {
        MARK(b.d, D_EPOCH);
        // The other parity's tickets belong to the next call. (Combine's among them are zeroed once more than they need be: no combine runs.)
        if (blockIdx.x == 0 && threadIdx.x < TICKET_KINDS)
            *(u32*)((u8*)b.ticket(threadIdx.x) + (b.parity() ? -1 : 1) * (i32)(TICKET_KINDS * CELL_LINE)) = 0;
        moves = meets ? run_sender(b, work, moved) : b.carries();
    }
    if (moves) {
        Ring ring(b, moved);
        Mover mover(b, ring);
        if (!meets) mover.prefetch();
        mover.run(!meets);
    }
    MARK(b.d, D_ROLE_END);
    __syncthreads();
    store_epoch(b.d, OPERATION_DISPATCH, b.epoch);
    MARK(b.d, D_END);
}

// Dispatch: rows of this rank's tokens to the ranks of their experts, in one kernel. The protocol is docs/protocol.md, section 2.
//
// Blocks [0, senders) count, exchange counts, write tables and send; the others move rows inside the rank. All blocks are resident at
// once (cooperative launch). Warps [0, row_warps) of a block carry rows; in the expanded layout the next warp of a sending
// block announces, and warps beyond zero the gaps between experts.
//
// Who waits for whom: count → partials (own blocks) → totals (all ranks) → tables → sending → moving → end. Each waits only for what
// stands before it, so that ranks can't block each other; a rank that never comes ends every wait at its deadline (comm/wait.cuh).
//
// Order: a row is complete when its bulk group is (wait_group, not .read). Plain: the block meets, then one thread stores `done` with release
// at system scope. Expanded: the announcer's fence (comm/announce.cuh). Peers' slots are written only after their place cell was
// acquired, which says that their earlier readers have ended.
#include "arch/launch.cuh"
#include "ops/dispatch/move.cuh"
#include "ops/dispatch/tables.cuh"

// Tells every peer that this block's rows have arrived, and waits for the blocks of all peers. Sending blocks share the waits.
DEVICE void finish_plain(const Block& b) {
    if (threadIdx.x < RANKS && threadIdx.x != b.me) {
        u32* done = cell32(b.d, threadIdx.x, b.d.done) + b.me * MAX_BLOCKS + blockIdx.x;
        arch::st_release_sys(done, b.epoch);
    }
    for (u32 i = threadIdx.x; i < RANKS * MAX_BLOCKS; i += THREADS) {
        const u32 s = i % RANKS, c = blockIdx.x + b.p.senders * (i / RANKS);
        if (s == b.me || c >= b.control.senders[s]) continue;
        wait_equal(b.d, b.place(PHASE_DONE, s, c), cell32(b.d, b.me, b.d.done) + s * MAX_BLOCKS + c);
    }
}

// Whether this warp has rows left to move afterwards.
DEVICE bool run_sender(const Block& b, Ring& ring, const TokenLanes& lanes, const Share& share, Items& items) {
    const bool carries = b.warp < b.p.row_warps;
    Sender sender(b, ring);

    if (carries) sender.prefetch();
    if (!b.cached()) {
        for (u32 i = threadIdx.x; i < WARPS * b.counts; i += THREADS) b.warp_counts[i] = 0;
        __syncthreads();
        count_tokens(b, lanes, share, items);
        __syncthreads();
        sum_blocks(b);
        if (b.warp == WARPS - 1) acquire_places(b);
        sum_ranks(b);
        __syncthreads();
        scan_experts(b);
    } else if (b.warp == WARPS - 1) {
        acquire_places(b);
    }
    __syncthreads();
    const bool failed = b.control.failed;
    if (!failed) {
        if (b.cached()) {
            write_outputs(b, lanes, share, items);
        } else {
            if (blockIdx.x == 0) write_counts(b);
            write_tables(b, lanes, share, items);
        }
    }
    __syncthreads();
    if (failed) {
        if (carries) ring.drain(b);
        return false;
    }
    // The release waits for tables that are on their way to peers: not in a warp that carries rows, if there is another.
    if (threadIdx.x == THREADS - 1) arch::st_release_gpu(b.chunk_cell(blockIdx.x), pack_cell(b.epoch, b.control.over));

    bool sent = true;
    if (carries) {
        arch::fence_proxy_global();
        sent = sender.run();
    } else {
        const bool announces = EXPANDED && b.warp == b.p.row_warps;
        if (announces) announce(b.control.mail, b.p.row_warps, b.epoch, [&](u32 r) { return cell32(b.d, r, b.d.ready); });
        const u32 idle = WARPS - b.p.row_warps;
        if (EXPANDED && b.p.zero_padding && wait_tables(b))
            zero_gaps(b.p, b.control.output[b.me], b.mine<i32>(b.p.expert_start), b.mine<i32>(b.p.expert_count), b.lane,
                      blockIdx.x * idle + b.warp - b.p.row_warps, b.p.senders * idle);
    }
    if (!EXPANDED) {
        // Nobody is told of rows that were not sent.
        if (__syncthreads_and(sent)) finish_plain(b);
    }
    return EXPANDED && carries;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_dispatch(const __grid_constant__ DispatchParams p) {
    extern __shared__ __align__(128) u8 shared[];
    Block b(p, shared);
    arch::launch_dependents();
    arch::wait_for_predecessor();

    // Ids and weights come while the epoch does.
    const bool sends = blockIdx.x < p.senders;
    const TokenLanes lanes(b.lane, p.lanes);
    const Share share(b);
    Items items;
    if (sends) load_items(b, lanes, share, items);
    b.epoch = *epoch_counter(b.d, OPERATION_DISPATCH, blockIdx.x) + 1;
    bool useless = false;
    if (threadIdx.x == 0) {
        useless = broken(b.d, OPERATION_DISPATCH, b.epoch);
        b.control.failed = useless;
        b.control.over = RANKS;
        b.control.output[b.me] = (u64)b.own_output<u8>(0);
    }
    mailboxes_init(b.control.mail, p.row_warps);
    if (threadIdx.x < WARPS * MAX_STAGES) {
        arch::mbarrier_init(&b.control.bars[0][0] + threadIdx.x);
        arch::mbarrier_init_done();
    }
    // Not `control.failed`: in a cached dispatch a fast warp may already have set it again when a slow one looks.
    if (!__syncthreads_or(useless)) {
        if (blockIdx.x == 0) {
            publish_place(b);
            // The other parity's tickets belong to the next call. (Combine's among them are zeroed once more than they need be: no combine runs.)
            if (threadIdx.x < TICKET_KINDS)
                *(u32*)((u8*)b.ticket(threadIdx.x) + (b.parity() ? -1 : 1) * (i32)(TICKET_KINDS * CELL_LINE)) = 0;
        }
        Ring ring(b);
        const bool moves = sends ? run_sender(b, ring, lanes, share, items) : b.warp < p.row_warps;
        if (moves) {
            Mover mover(b, ring);
            if (!sends) mover.prefetch();
            mover.run(!sends);
        }
    }
    __syncthreads();
    store_epoch(b.d, OPERATION_DISPATCH, b.epoch);
}

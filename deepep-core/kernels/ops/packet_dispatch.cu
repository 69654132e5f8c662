// Dispatch of a small batch, in one kernel without a barrier between the ranks. The protocol is docs/protocol.md, section 8.
//
// Who writes: a rank writes the ids of max_tokens tokens, given or not, to every rank, itself included, for each token that it has the weights as well, and the
//   row to every rank that needs it; all in packets (comm/packets.cuh). From the ids of all tokens every block that places rows knows every position. Results and tables are written by
//   their owner only.
// Who waits: every block that places rows for the ids of all tokens; the warps that place a row for its packets; one warp of all, at the end, for `begun`,
//   so that the next kernel may write. Nothing is sent after a wait, so that ranks can't block each other. All blocks are resident at once.
// What costs time is one thing after the other. So a warp has all that it reads on its way before it looks at any of it: epoch and ids. Rows are looked
//   for once the ids are there, and have time until positions are known.
#include "arch/launch.cuh"
#include "ops/packets/place.cuh"

// At most half of the registers of a multiprocessor: another dispatch starts early beside this one. Among more than two ranks only if sizes are constants.
constexpr u32 BESIDE = FIXED || RANKS <= 2 ? 2 : 1;
extern "C" __global__ void __launch_bounds__(THREADS, BESIDE) deepep_packet_dispatch(const __grid_constant__ PacketDispatchParams q) {
    extern __shared__ __align__(128) u8 shared[];
    if (q.call.domain.early) arch::launch_dependents();
    MARK(q.call.domain, PD_ENTRY);
    arch::wait_for_predecessor();
    MARK(q.call.domain, PD_START);
    Block b(q, shared);
    const bool last = b.warp == WARPS - 1;
    // Ids first: rows are not even loaded before ids are on their way, and still come before they are needed.
    Ids ids(b);
    if (last && b.places()) ids.load(b.block());
    const First first(b.d, PACKETS_DISPATCH);
    b.clear();
    __syncthreads();
    if (ids.some) ids.pack();
    b.packets.open(first.epoch());
    // The same for the whole warp: a peer may write the word at any time.
    bool ok = !warp::any(first.broken());
    MARK(b.d, PD_EPOCH);
    if (!ok && b.lane == 0) give_up(b.d, {OPERATION_DISPATCH, 0, b.packets.epoch, b.me, 0}, false, 0, 0, 0);
    if (ok && last) {
        if (b.clerk()) send_head(b);
#pragma unroll 1
        for (u32 item = b.block(); ids.some;) {
            ids.send();
            MARK(b.d, PD_SENT_IDS);
            ids.load(item += b.blocks());
            if (ids.some) ids.pack();
        }
    }
#pragma unroll 1
    for (u32 item = b.warp; ok && b.sends(); item += WARPS) {
        Outgoing out(b);
        out.load(item);
        if (!out.some) break;
        out.send();
        MARK_IF(item < WARPS, b.d, PD_SENT_FIRST);
        MARK(b.d, PD_SENT_LAST);
    }
    if (ok && b.clerk() && b.warp == WARPS - 2) b.begun().tell(b.lane);
    Incoming in(b);
#pragma unroll 1
    for (u32 item = b.warp; b.places(); item += WARPS) {
        in.set(item);
        if (item >= WARPS) {
            in.look();
        } else {
            if (ok && last) ok = compare_heads(b);
            if (ok) ok = read_lanes(b);
            MARK(b.d, PD_IDS);
            in.look();
            ok = __syncthreads_and(ok);
            MARK(b.d, PD_MET);
            if (ok) {
                if (EXPANDED || b.clerk()) count(b);
                MARK(b.d, PD_COUNTED);
                if (b.limited()) check_capacity(b);
                in.look();
            }
        }
        if (!ok || !in.some) break;
        ok = place(b, in);
        MARK_IF(item < WARPS, b.d, PD_PLACED_FIRST);
        MARK(b.d, PD_PLACED_LAST);
    }
    // What is written once comes last: nobody waits for it, and code that only one block runs is not in the way of others.
    const bool gaps = EXPANDED && b.p.zero_padding;
    if ((b.clerk() || (gaps && b.places())) && __syncthreads_and(ok)) {
        finish_starts(b);
        if (b.clerk() && !b.cached()) write_counts(b);
        if (gaps && b.over() == RANKS)
            zero_gaps(b.p, b.output(), b.start, b.counts, b.lane, b.block() * WARPS + b.warp, b.blocks() * WARPS);
    }
    if (ok && b.clerk() && b.warp == WARPS - 2) b.begun().compare_all();
    store_epoch(packet_counter(b.d, PACKETS_DISPATCH, 0), b.packets.epoch);
    MARK(b.d, PD_END);
}

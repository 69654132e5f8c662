// Combine of a small batch, in one kernel without a barrier between the ranks. The protocol is docs/protocol.md, section 8.
//
// Who writes: for each token that it has received from a peer a rank sums its rows and writes the sum in packets (comm/packets.cuh) to the peer,
//   and the weights of its lanes. Who waits: senders for `begun`; the warps that sum a token for its packets. Half of the warps send,
//   the others sum; nobody waits for those.
// What costs time is one thing after the other: epoch, permission and the numbers of the first rows are read at once. And code: it takes longer to come than to
//   run, so that who waits for sums has gone through what follows once before.
#include "arch/launch.cuh"
#include "ops/packets/back.cuh"

// By one warp of a block: the epoch, for all of them, and that the slots of peers may be written. False if a rank gave up or does not come.
DEVICE bool start(Back& b, u32& epoch) {
    const First first(b.d, PACKETS_COMBINE);
    Permission permission;
    permission.ask(b.begun());
    b.packets.open(first.epoch());
    if (b.lane == 0) epoch = b.packets.epoch;
    // The same for the whole warp: a peer may write the word at any time.
    if (!warp::any(first.broken())) return permission.wait(b.begun());
    if (b.lane == 0) give_up(b.d, {OPERATION_COMBINE, 0, b.packets.epoch, b.me, 0}, false, 0, 0, 0);
    return false;
}

// All registers of a multiprocessor: what a block has on its way at once is what bounds a batch of many tokens.
extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_packet_combine(const __grid_constant__ PacketCombineParams q) {
    extern __shared__ __align__(128) u8 shared[];
    if (q.call.domain.early) arch::launch_dependents();
    MARK(q.call.domain, PC_ENTRY);
    arch::wait_for_predecessor();
    MARK(q.call.domain, PC_START);
    Back b(q);
    const bool sends = b.warp < SENDERS;
    const u32 role = sends ? b.warp : b.warp - SENDERS;
    Returned returned(b);
    Result result(b);
    bool ok = true;
#pragma unroll 1
    for (Item item(role, sends ? SENDERS : REDUCERS);; item.next()) {
        if (sends) returned.load(item);
        else result.load(item);
        if (item.first()) {
            u32& epoch = *(u32*)shared;
            // Behind the numbers of rows: what is computed of the epoch must not be waited for before they are on their way.
            if (b.warp == 0) ok = start(b, epoch);
            ok = __syncthreads_and(ok);
            b.packets.open(epoch);
            MARK(b.d, PC_PERMITTED);
            store_epoch(packet_counter(b.d, PACKETS_COMBINE, 0), b.packets.epoch);
            if (ok && b.clerk() && b.warp == WARPS - 1) b.begun().tell(b.lane);
        }
        if (!ok || !(sends ? returned.some : result.some)) break;
        if (sends) returned.send();
#pragma unroll 1
        for (u32 turn = item.first() ? 0 : 1; !sends && ok && turn < 2; turn++) {
            b.live = turn == 1;
            ok = result.finish();
        }
        MARK_IF(sends && item.first(), b.d, PC_SENT_FIRST);
        MARK_IF(sends, b.d, PC_SENT_LAST);
        MARK_IF(!sends && item.first(), b.d, PC_WRITTEN_FIRST);
        MARK_IF(!sends, b.d, PC_WRITTEN_LAST);
    }
    if (SENDERS && ok && b.clerk() && b.warp == 0) b.begun().compare_all();
    MARK(b.d, PC_END);
}

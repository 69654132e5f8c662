// Combine of a small batch, in one kernel without a barrier between the ranks. The protocol is docs/protocol.md, section 8.
//
// Who writes: for each token that it has received from a peer a rank sums its rows and writes the sum in packets (comm/packets.cuh) to the peer,
//   and the weights of its lanes. Who waits: the warps that sum a token for its packets; and one of all, when it has nothing else
//   to do, for `begun`, so that the next kernel may write. Half of the blocks send, the others sum; nobody waits for those.
// What costs time is one thing after the other: epoch and the numbers of the first rows are read at once.
#include "arch/launch.cuh"
#include "ops/packets/back.cuh"

// All registers of a multiprocessor: what a block has on its way at once is what bounds a batch of many tokens.
extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_packet_combine(const __grid_constant__ PacketCombineParams q) {
    if (q.call.domain.early) arch::launch_dependents();
    MARK(q.call.domain, PC_ENTRY);
    arch::wait_for_predecessor();
    MARK(q.call.domain, PC_START);
    Back b(q);
    const Role role(b);
    const bool sends = role.sends;
    Returned returned(b);
    Result result(b);
    bool ok = true;
#pragma unroll 1
    for (Item item(role);; item.next()) {
        if (sends) returned.load(item);
        else result.load(item);
        if (item.first()) {
            // Behind the others: what is computed of the epoch must not be waited for before they are on their way.
            const First first(b.d, PACKETS_COMBINE);
            b.packets.open(first.epoch());
            // Every warp has read the epoch.
            ok = !__syncthreads_or(first.broken());
            MARK(b.d, PC_EPOCH);
            store_epoch(packet_counter(b.d, PACKETS_COMBINE, 0), b.packets.epoch);
            if (!ok && threadIdx.x == 0) give_up(b.d, {OPERATION_COMBINE, 0, b.packets.epoch, b.me, 0}, false, 0, 0, 0);
            if (ok && b.clerk() && b.warp == WARPS - 1) b.begun().tell(b.lane);
        }
        if (!ok || !(sends ? returned.some : result.some)) break;
        if (sends) returned.send();
        else ok = result.finish();
        MARK_IF(sends && item.first(), b.d, PC_SENT_FIRST);
        MARK_IF(sends, b.d, PC_SENT_LAST);
        MARK_IF(!sends && item.first(), b.d, PC_WRITTEN_FIRST);
        MARK_IF(!sends, b.d, PC_WRITTEN_LAST);
    }
    // By one that has only sent: others may wait for what does not come, if calls differ.
    if (RANKS > 1 && ok && blockIdx.x == 0 && b.warp == 0) b.begun().compare_all();
    MARK(b.d, PC_END);
}

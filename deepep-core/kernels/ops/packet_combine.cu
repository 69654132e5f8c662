// Combine of a small batch, in one kernel without a barrier between the ranks. The protocol is docs/protocol.md, section 8.
//
// Who writes: for each token that it has received from a peer a rank sums its rows and writes the sum in packets (comm/packets.cuh) to the peer,
//   and the weights of its lanes. Who waits: senders for `begun`; the warps that sum a token for its packets. Half of the warps send,
//   the others sum; nobody waits for those.
#include "arch/launch.cuh"
#include "ops/packets/back.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_packet_combine(const __grid_constant__ PacketCombineParams q) {
    arch::launch_dependents();
    arch::wait_for_predecessor();
    const Back b(q, *packet_counter(q.call.domain, PACKETS_COMBINE, blockIdx.x) + 1);
    // With one rank all warps sum.
    constexpr u32 SENDERS = RANKS > 1 ? WARPS / 2 : 0;
    if (!__syncthreads_or(threadIdx.x == 0 && broken(b.d, OPERATION_COMBINE, b.packets.epoch))) {
        if (blockIdx.x == 0) b.begun().tell();
        if (b.warp < SENDERS) {
            send_back(b, b.warp, SENDERS);
            if (blockIdx.x == 0 && b.warp == 0) b.begun().compare_all();
        } else {
            reduce_back(b, b.warp - SENDERS, WARPS - SENDERS);
        }
        __syncthreads();
        scrub_back(b);
    }
    store_epoch(packet_counter(b.d, PACKETS_COMBINE, 0), b.packets.epoch);
}

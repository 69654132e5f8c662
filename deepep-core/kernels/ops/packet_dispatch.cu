// Dispatch of a small batch, in one kernel without a barrier between the ranks. The protocol is docs/protocol.md, section 8.
//
// Who writes: for each of its tokens a rank writes ids and weights to every rank, itself included, and the row to every other rank that needs it; all in
//   packets (comm/packets.cuh). From the ids of all tokens every block knows every position. Results and tables are written by
//   their owner only.
// Who waits: senders for `begun`; every block for the ids of all tokens; the warps that place a row for its packets. Nothing is
//   sent after a wait for anything but `begun`, so that ranks can't block each other. All blocks are resident at once.
#include "arch/launch.cuh"
#include "ops/packets/place.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_packet_dispatch(const __grid_constant__ PacketDispatchParams q) {
    extern __shared__ __align__(128) u8 shared[];
    arch::launch_dependents();
    arch::wait_for_predecessor();
    u32* counter = packet_counter(q.call.domain, PACKETS_DISPATCH, blockIdx.x);
    Block b(q, shared, *counter + 1);

    for (u32 i = threadIdx.x; i < q.maps; i += THREADS) b.to_rank[i] = 0;
    for (u32 i = threadIdx.x; i < b.p.local_experts; i += THREADS) b.counts[i] = 0;
    if (threadIdx.x == 0) {
        b.control.failed = broken(b.d, OPERATION_DISPATCH, b.packets.epoch);
        b.control.over = RANKS;
    }
    __syncthreads();
    if (!b.control.failed) {
        if (blockIdx.x == 0) b.begun().tell();
        send(b);
        read_lanes(b);
        __syncthreads();
        count(b);
    }
    if (!b.control.failed) {
        if (blockIdx.x == 0 && !b.cached()) write_counts(b);
        place_rows(b);
        if (EXPANDED && b.p.zero_padding && b.control.over == RANKS)
            zero_gaps(b.p, b.output, b.start, b.counts, b.lane, blockIdx.x * WARPS + b.warp, gridDim.x * WARPS);
    }
    __syncthreads();
    if (!b.control.failed) scrub(b);
    store_epoch(packet_counter(b.d, PACKETS_DISPATCH, 0), b.packets.epoch);
}

// Combine: rows of received tokens back to the tokens' owners, summed there, in one kernel. The protocol is docs/protocol.md, section 3.
//
// Warps [0, row_warps) of a block send, the next one announces (comm/announce.cuh), the others reduce this rank's tokens as their rows
// arrive. All blocks are resident at once (cooperative launch). Senders wait for `started` of their peers (the announcer for them), reducers for senders; nobody
// waits for a reducer.
//
// With PULL reducers read rows where the experts left them (ops/combine/pull.cuh): all of them, and then nobody sends, or some. They wait
// for `started` of all peers, and at the end the announcers wait for the reducers of all ranks, who wait for nobody that waits for them.
//
// Order (a warp's last flags are released by itself): a row's bulk stores complete → a lane hands the flag in (release.cta) → the announcer acquires, fences at system scope, stores
// `arrived` → a reducer's lane acquires it → warp barrier → proxy fence → bulk loads.
#include "arch/launch.cuh"
#include "ops/combine/direct.cuh"
#include "ops/combine/reduce.cuh"
#include "ops/combine/send_sum.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_combine(const __grid_constant__ CombineParams p) {
    extern __shared__ __align__(128) u8 shared[];
    Block b(p, shared);
    if (p.domain.early) arch::launch_dependents();
    MARK(b.d, C_ENTRY);
    arch::wait_for_predecessor();
    MARK(b.d, C_START);

    const u32 senders = RANKS > 1 ? p.row_warps : 0, first_reducer = RANKS > 1 ? p.row_warps + 1 : 0;
    // Under way together with the epoch.
    Received received(b);
    b.epoch = *epoch_counter(b.d, OPERATION_COMBINE, blockIdx.x) + 1;
    if (threadIdx.x == 0) {
        b.control.failed = broken(b.d, OPERATION_COMBINE, b.epoch);
        b.control.known = b.control.permitted = b.control.lost = 0;
        b.control.reading = p.reducers;
    }
    mailboxes_init(b.control.mail, p.row_warps);
    if (threadIdx.x < WARPS * MAX_STAGES) {
        arch::mbarrier_init(&b.control.bars[0][0] + threadIdx.x);
        arch::mbarrier_init_done();
    }
    __syncthreads();
    MARK(b.d, C_EPOCH);
    if (!b.control.failed) {
        if (blockIdx.x == 0) {
            if constexpr (PULL) tell_sources(b);
            else b.begun().tell();
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) *b.ticket(TICKET_RETURN, 1) = *b.ticket(TICKET_SUM, 1) = *b.ticket(TICKET_READ, 1) = 0;
        __syncwarp();
        const u32 worker = blockIdx.x + gridDim.x * b.warp, reducers = p.reducers;
        if (b.warp < senders) {
            if constexpr (SUMS) {
                send_sums(b, received, worker, gridDim.x * senders);
            } else {
                Sender sender(b);
                sender.run(received, worker, gridDim.x * senders);
            }
        } else if (b.warp < first_reducer) {
            bool known = true;
            if constexpr (PULL) known = learn_sources(b);
            if (known && senders) permit(b);
            announce(b.control.mail, p.row_warps, b.epoch, [&](u32 r) { return b.arrived(r); });
            MARK(b.d, C_ANNOUNCED);
            if constexpr (PULL) {
                if (known) let_go(b);
            } else if (blockIdx.x == 0) {
                b.begun().compare_all();
            }
        } else if (b.warp < first_reducer + reducers) {
            const u32 number = b.warp - first_reducer, reducer = number * gridDim.x + blockIdx.x;
            if constexpr (DIRECT) {
                Direct(b, reducer, reducers * gridDim.x).run();
            } else {
                const u32 behind = SUMS ? senders * p.sender_batches * p.sender_batch_bytes : 0;
                Gather gather(b, behind + number * p.batches * p.batch_bytes, p.batches, p.batch_bytes);
                Reduction reduction(b, reducer, reducers * gridDim.x);
                const bool ok = gather.run(reduction);
                if (!ok) gather.drain();
                reduction.stop_reading(ok);
            }
            MARK(b.d, C_REDUCED);
        }
    }
    __syncthreads();
    store_epoch(b.d, OPERATION_COMBINE, b.epoch);
    MARK(b.d, C_END);
}

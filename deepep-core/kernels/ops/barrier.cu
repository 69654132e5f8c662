// Barrier of all ranks.
//
// Who writes: thread r stores `barrier[me]` = epoch into rank r's workspace, with release at system scope.
// Who waits: thread r waits until the own `barrier[r]` is at least the epoch. A rank may be one barrier ahead, never two: it needs this
//   rank's word of the next barrier first.
// Order: work that a rank enqueued before its barrier kernel has ended when that kernel starts, hence when any rank's ends.
#include "arch/launch.cuh"
#include "comm/wait.cuh"

extern "C" __global__ void __launch_bounds__(32, 1) deepep_barrier(const __grid_constant__ BarrierParams p) {
    const Domain& d = p.domain;
    if (p.domain.early) arch::launch_dependents();
    arch::wait_for_predecessor();
    const u32 r = threadIdx.x;
    const u32 epoch = *epoch_counter(d, OPERATION_BARRIER, 0) + 1;
    __syncwarp();
    if (r < RANKS && !broken(d, OPERATION_BARRIER, epoch)) {
        arch::st_release_sys((u32*)((u8*)cell32(d, r, d.barrier) + d.rank * CELL_LINE), epoch);
        const Place at = {OPERATION_BARRIER, PHASE_BARRIER, epoch, r, 0};
        wait_at_least(d, at, (const u32*)((const u8*)cell32(d, d.rank, d.barrier) + r * CELL_LINE), epoch);
    }
    __syncwarp();
    store_epoch(d, OPERATION_BARRIER, epoch);
}

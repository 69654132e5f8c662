// Barrier of all ranks over a word that one instruction changes on all of them.
//
// Who writes: rank r flips bit r of the word, on every rank at once, with release at system scope.
// Who waits: every rank, until each bit of its own copy has been flipped as often as there were barriers.
// Two words take turns, so that no bit is flipped again before all have seen it: a rank flips a word's bit in barrier e + 2, after e + 1 has
//   ended for it, which needs every rank to have come to e + 1, hence out of e.
#include "arch/launch.cuh"
#include "arch/multimem.cuh"
#include "comm/wait.cuh"

extern "C" __global__ void __launch_bounds__(32, 1) deepep_multimem_barrier(const __grid_constant__ MultimemBarrierParams p) {
    const Domain& d = p.domain;
    if (p.domain.early) arch::launch_dependents();
    arch::wait_for_predecessor();
    u32* const count = cell32(d, d.rank, p.count);
    const u32 epoch = *count + 1;
    const bool dead = __any_sync(0xffffffffu, threadIdx.x == 0 && broken(d, OPERATION_BARRIER, epoch));
    if (!dead) {
        using namespace arch;
        const u64 word = p.words + (epoch & 1) * CELL_LINE;
        fence_alias();
        if (threadIdx.x == 0) multimem_red_xor<Order::release, Scope::sys>((u32*)(p.multicast + word), 1u << d.rank);
        __syncwarp();
        // How often this word was in use, and so the value of each bit.
        const u32 value = (epoch / 2 + (epoch & 1)) & 1;
        if (threadIdx.x < RANKS) {
            const u32 r = threadIdx.x;
            const Place at = {OPERATION_BARRIER, PHASE_BARRIER, epoch, r, 0};
            wait_until(d, at, value, [&](u64& seen) {
                seen = ld_acquire_sys(cell32(d, d.rank, word)) >> r & 1;
                return seen == value;
            });
        }
        fence_alias();
    }
    __syncwarp();
    if (threadIdx.x == 0) *count = epoch;
}

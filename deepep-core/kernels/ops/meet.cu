// All ranks meet in a call: what each has enqueued before is done, for all of them, when this ends. Copies by copy engines stand between two
// of these.
#include "arch/launch.cuh"
#include "comm/call.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_meet(const __grid_constant__ CollectiveParams p) {
    if (p.domain.early) arch::launch_dependents();
    arch::wait_for_predecessor();
    const Call call(p, OPERATION_ALL_GATHER);
    const bool dead = __any_sync(0xffffffffu, threadIdx.x == 0 && broken(p.domain, OPERATION_ALL_GATHER, call.number));
    if (!dead) {
        call.tell();
        call.agreed();
    }
    __syncwarp();
    call.end();
}

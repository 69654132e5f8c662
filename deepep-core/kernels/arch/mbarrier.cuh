// Barriers in shared memory that bulk loads complete on.
#pragma once
#include "arch/ld_st.cuh"

namespace arch {

DEVICE void mbarrier_init(u64* bar) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(bar)) : "memory");
}
// After all inits of a thread: visible to the other threads of the block and to the copy engine.
DEVICE void mbarrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEVICE void mbarrier_expect(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
DEVICE bool mbarrier_try_wait(u64* bar, u32 parity) {
    u32 ok;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ok) : "r"(shared_address(bar)), "r"(parity) : "memory");
    return ok != 0;
}

}  // namespace arch

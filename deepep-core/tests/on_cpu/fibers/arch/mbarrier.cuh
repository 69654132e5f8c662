#pragma once
#include "arch/ld_st.cuh"

namespace arch {

inline void mbarrier_init(u64* bar) { fiber_barrier_init((uint64_t*)bar); }
inline void mbarrier_init_done() {}
inline void mbarrier_expect(u64* bar, u32 bytes) { fiber_barrier_expect((uint64_t*)bar, bytes); }
inline bool mbarrier_try_wait(u64* bar, u32 parity) { return fiber_barrier_try_wait((uint64_t*)bar, parity); }

}  // namespace arch

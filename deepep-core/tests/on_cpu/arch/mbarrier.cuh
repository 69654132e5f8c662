// A barrier counts its phases; a phase ends when what it expects has come.
#pragma once
#include "arch/ld_st.cuh"

namespace arch {

inline void mbarrier_init(u64* bar) { __atomic_store_n(bar, 0, __ATOMIC_RELEASE); }
inline void mbarrier_init_done() {}
// The low half: bytes that are expected; the high half: phases that have ended.
inline void mbarrier_expect(u64* bar, u32 bytes) { __atomic_fetch_add(bar, bytes, __ATOMIC_ACQ_REL); }
inline void mbarrier_arrived(u64* bar, u32 bytes) {
    const u64 left = __atomic_sub_fetch(bar, bytes, __ATOMIC_ACQ_REL);
    if ((u32)left == 0) __atomic_fetch_add(bar, 1ull << 32, __ATOMIC_ACQ_REL);
}
// Gives the processor away: there are more threads than processors.
inline bool mbarrier_try_wait(u64* bar, u32 parity) {
    const bool over = ((u32)(__atomic_load_n(bar, __ATOMIC_ACQUIRE) >> 32) & 1) != parity;
    if (!over) std::this_thread::yield();
    return over;
}

}  // namespace arch

#pragma once
#include "arch/types.cuh"

namespace arch {

inline void fence_proxy_shared() {}
inline void fence_sys() { std::atomic_thread_fence(std::memory_order_seq_cst); }

}  // namespace arch

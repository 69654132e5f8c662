#pragma once
#include "arch/types.cuh"

namespace arch {

inline void fence_sys() { fiber_yield(); }
inline void fence_proxy_global() {}
inline void fence_proxy_shared() {}

}  // namespace arch

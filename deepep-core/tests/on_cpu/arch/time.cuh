#pragma once
#include "arch/types.cuh"

namespace arch {

inline u64 now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

}  // namespace arch

#pragma once
#include "arch/types.cuh"

namespace arch {

// Waits ask for the time every now and then: there are more threads than processors, and others may have to come first.
inline u64 now_ns() {
    std::this_thread::yield();
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
inline void stamp(u64* at) { *at = now_ns(); }

}  // namespace arch

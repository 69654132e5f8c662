#pragma once
#include "arch/types.cuh"

namespace arch {

inline void launch_dependents() {}
inline void wait_for_predecessor() {}

}  // namespace arch

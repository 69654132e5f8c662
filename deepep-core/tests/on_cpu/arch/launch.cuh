#pragma once

namespace arch {

inline void launch_dependents() {}
inline void wait_for_predecessor() {}

}  // namespace arch

#pragma once

namespace arch {

inline void launch_dependents() {}
inline void wait_for_predecessor() {}
template <class Params>
void touch_arguments(const Params&) {}

}  // namespace arch

#pragma once

namespace arch {

inline void launch_dependents() {}
template <class Params>
inline void touch(const Params&) {}
inline void wait_for_predecessor() {}

}  // namespace arch

// A packet is read and written as a whole: nobody else runs in between.
#pragma once
#include "arch/ld_st.cuh"

namespace arch {

inline void st_packet(Vec16* p, const Vec16& v) { put(p, v); }
inline Vec16 ld_packet(const Vec16* p) { return seen(p); }

}  // namespace arch

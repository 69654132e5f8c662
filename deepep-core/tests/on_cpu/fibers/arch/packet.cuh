// A packet is read and written as a whole: nobody else runs in between.
#pragma once
#include "arch/ld_st.cuh"

namespace arch {

inline void st_packet(Vec16* p, const Vec16& v) {
    plain(p);
    fiber_yield();
    write_packet(p, v);
}
inline Vec16 ld_packet(const Vec16* p) {
    fiber_yield();
    plain(p);
    const Vec16 v = read_packet(p);
    fiber_saw(p, (u64)(v.x ^ v.y) << 32 | (v.z ^ v.w));
    return v;
}

}  // namespace arch

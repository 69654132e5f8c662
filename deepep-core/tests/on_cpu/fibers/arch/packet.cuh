// A packet is written and read as a whole, and is there some time after it was sent.
#pragma once
#include "arch/ld_st.cuh"

namespace arch {

inline void st_packet(Vec16* p, const Vec16& v) {
    plain(p);
    fiber_yield();
    fiber_send((FiberPacket*)p, FiberPacket{v.x, v.y, v.z, v.w});
}
inline Vec16 ld_packet(const Vec16* p) {
    fiber_yield();
    plain(p);
    fiber_arrive(p);
    const Vec16 v = read_packet(p);
    fiber_saw(p, (u64)(v.x ^ v.y) << 32 | (v.z ^ v.w));
    return v;
}

}  // namespace arch

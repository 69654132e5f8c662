// A packet is read and written as a whole: nobody else runs in between.
#pragma once
#include "arch/ld_st.cuh"

namespace arch {

// Aligned accesses of 16 bytes are single-copy atomic on x86 processors with AVX.
typedef u32 PacketVector __attribute__((vector_size(16), may_alias));

inline void st_packet(Vec16* p, const Vec16& v) {
    plain(p);
    fiber_yield();
    *(volatile PacketVector*)p = PacketVector{v.x, v.y, v.z, v.w};
}
inline Vec16 ld_packet(const Vec16* p) {
    fiber_yield();
    plain(p);
    const PacketVector v = *(const volatile PacketVector*)p;
    fiber_saw(p, (u64)(v[0] ^ v[1]) << 32 | (v[2] ^ v[3]));
    return {v[0], v[1], v[2], v[3]};
}

}  // namespace arch

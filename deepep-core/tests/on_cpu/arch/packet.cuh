// A packet is read and written as a whole.
#pragma once
#include "arch/ld_st.cuh"

namespace arch {

inline void st_packet(Vec16* p, const Vec16& v) {
    if ((u64)p % 16) fail("a misaligned packet", (u64)p);
    write_packet(p, v);
}
inline Vec16 ld_packet(const Vec16* p) {
    if ((u64)p % 16) fail("a misaligned packet", (u64)p);
    return read_packet(p);
}

}  // namespace arch

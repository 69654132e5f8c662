// Packets: 16 bytes that are written and read as a whole.
//
// Accesses of 128 bits with `.b128` are single-copy atomic, so that a reader that sees one word of a packet has seen all of them.
#pragma once
#include "arch/types.cuh"

namespace arch {

DEVICE void st_packet(Vec16* p, const Vec16& v) {
    const u64 low = (u64)v.y << 32 | v.x, high = (u64)v.w << 32 | v.z;
    asm volatile("{ .reg .b128 t; mov.b128 t, {%1, %2}; st.relaxed.sys.global.b128 [%0], t; }" ::"l"(p), "l"(low), "l"(high) : "memory");
}
DEVICE Vec16 ld_packet(const Vec16* p) {
    u64 low, high;
    asm volatile("{ .reg .b128 t; ld.relaxed.sys.global.b128 t, [%2]; mov.b128 {%0, %1}, t; }" : "=l"(low), "=l"(high) : "l"(p) : "memory");
    return {(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)};
}

}  // namespace arch

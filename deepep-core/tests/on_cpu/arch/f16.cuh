#pragma once
#include "arch/types.cuh"

namespace arch {

inline float f16_low(u32 pair) {
    _Float16 half;
    memcpy(&half, &pair, 2);
    return half;
}
inline float f16_high(u32 pair) { return f16_low(pair >> 16); }
inline u32 f16_pack(float low, float high) {
    const _Float16 halves[2] = {(_Float16)low, (_Float16)high};
    u32 pair;
    memcpy(&pair, halves, 4);
    return pair;
}

}  // namespace arch

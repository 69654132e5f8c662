#pragma once
#include "arch/types.cuh"

namespace arch {

inline float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
inline float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
inline u32 bf16_round(float value) {
    if (value != value) return 0x7fff;
    const u32 bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 bf16_pack(float low, float high) { return bf16_round(low) | bf16_round(high) << 16; }
inline u32 bf16_add(u32 a, u32 b) { return bf16_pack(bf16_low(a) + bf16_low(b), bf16_high(a) + bf16_high(b)); }

}  // namespace arch

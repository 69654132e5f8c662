// Conversions between pairs of BF16 in a word and FP32.
#pragma once
#include "arch/types.cuh"

namespace arch {

DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
// Round to nearest even; NaN becomes 0x7FFF.
DEVICE u32 bf16_pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Sums of two pairs, rounded to nearest even; NaN becomes 0x7FFF. The same bits as a sum in FP32 that is rounded afterwards.
DEVICE u32 bf16_add(u32 a, u32 b) {
    u32 pair;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

}  // namespace arch

// Conversions between pairs of FP16 in a word and FP32.
#pragma once
#include "arch/types.cuh"

namespace arch {

DEVICE float f16_low(u32 pair) {
    float v;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(v) : "r"(pair));
    return v;
}
DEVICE float f16_high(u32 pair) {
    float v;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }" : "=f"(v) : "r"(pair));
    return v;
}
// Round to nearest even.
DEVICE u32 f16_pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

}  // namespace arch

// Sums of BF16 rows: FP32, one term after the other, one rounding at the end.
#pragma once
#include "arch/bf16.cuh"

// Eight values of a row. Starts at −0, to which every term can be added without a change.
struct Sum {
    float v[8];
    DEVICE void clear() {
#pragma unroll
        for (u32 i = 0; i < 8; i++) v[i] = -0.f;
    }
    DEVICE void add(const Vec16& t) {
        const u32 w[4] = {t.x, t.y, t.z, t.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            v[2 * i] += arch::bf16_low(w[i]);
            v[2 * i + 1] += arch::bf16_high(w[i]);
        }
    }
    DEVICE Vec16 round() const {
        return {arch::bf16_pack(v[0], v[1]), arch::bf16_pack(v[2], v[3]), arch::bf16_pack(v[4], v[5]), arch::bf16_pack(v[6], v[7])};
    }
};

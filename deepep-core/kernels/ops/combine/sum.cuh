// Sums of BF16 rows: FP32, one term after the other, one rounding at the end.
#pragma once
#include "arch/bf16.cuh"
#include "common/warp.cuh"
#include "arch/ld_st.cuh"

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

DEVICE Vec16 minus_zero() { return {0x80008000u, 0x80008000u, 0x80008000u, 0x80008000u}; }

// Adds vectors `at`, `at` + 32, … (V of them, below `end`) of the rows that the lanes in `which` hold the addresses of, in ascending
// lane order. Rows that nobody writes during the kernel.
template <u32 V, u32 ROWS>
DEVICE void add_rows(Sum (&sum)[V], u64 address, u32 which, u32 at, u32 end) {
    while (which) {
        Vec16 t[ROWS][V];
#pragma unroll
        for (u32 u = 0; u < ROWS; u++) {
            const bool some = which != 0;
            const u32 from = some ? __ffs(which) - 1 : 0;
            const Vec16* row = (const Vec16*)warp::get(address, from);
            which &= which - 1;
#pragma unroll
            for (u32 j = 0; j < V; j++) {
                const u32 i = at + 32 * j;
                t[u][j] = some && i < end ? arch::ld_stream(row + i) : minus_zero();
            }
        }
#pragma unroll
        for (u32 u = 0; u < ROWS; u++)
#pragma unroll
            for (u32 j = 0; j < V; j++) sum[j].add(t[u][j]);
    }
}

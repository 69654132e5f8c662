// Accesses to a multicast address, done one rank after the other.
#pragma once
#include "arch/bf16.cuh"
#include "arch/elements.cuh"
#include "arch/f16.cuh"
#include "arch/ld_st.cuh"

// Addresses from here on stand for the same offset of every rank's heap. No memory is there.
constexpr u64 MULTICAST_BASE = 1ull << 60;
inline std::vector<u8*> heaps;

namespace arch {

inline u64 multicast_offset(const void* p, u64 bytes) {
    const u64 offset = (u64)p - MULTICAST_BASE;
    if (offset >= 1ull << 40 || offset % bytes) fail("no multicast address, or misaligned", (u64)p);
    return offset;
}

template <class E, Order O, Scope S>
void multimem_st(void* p, typename E::Value v) {
    const u64 offset = multicast_offset(p, sizeof(v));
    for (u8* heap : heaps) {
        if constexpr (sizeof(v) == 16) *(Vec16*)(heap + offset) = v;
        else __atomic_store_n((typename E::Value*)(heap + offset), v, __ATOMIC_RELEASE);
    }
}

template <class E, Order O, Scope S>
Vec16 multimem_ld_reduce_add(const void* p) {
    const u64 offset = multicast_offset(p, 16);
    float low[4] = {}, high[4] = {};
    for (u8* heap : heaps) {
        u32 words[4];
        memcpy(words, heap + offset, 16);
        for (int i = 0; i < 4; i++) {
            if constexpr (std::is_same_v<E, F32x4>) low[i] += __uint_as_float(words[i]);
            else if constexpr (std::is_same_v<E, BF16x8>) low[i] += bf16_low(words[i]), high[i] += bf16_high(words[i]);
            else low[i] += f16_low(words[i]), high[i] += f16_high(words[i]);
        }
    }
    u32 sums[4];
    for (int i = 0; i < 4; i++) {
        if constexpr (std::is_same_v<E, F32x4>) sums[i] = __float_as_uint(low[i]);
        else if constexpr (std::is_same_v<E, BF16x8>) sums[i] = bf16_pack(low[i], high[i]);
        else sums[i] = f16_pack(low[i], high[i]);
    }
    return {sums[0], sums[1], sums[2], sums[3]};
}

template <Order O, Scope S>
void multimem_red_xor(u32* p, u32 bits) {
    const u64 offset = multicast_offset(p, 4);
    for (u8* heap : heaps) __atomic_fetch_xor((u32*)(heap + offset), bits, __ATOMIC_RELEASE);
}

inline void fence_alias() { std::atomic_thread_fence(std::memory_order_seq_cst); }

}  // namespace arch

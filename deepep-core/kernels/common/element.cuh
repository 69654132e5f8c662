// What collectives add: 32-bit words of one FP32, or of two BF16 or FP16. Sums are kept in FP32, added one by one, and rounded once.
#pragma once
#include "arch/bf16.cuh"
#include "arch/f16.cuh"
#include "arch/multimem.cuh"
#include "generated.cuh"

// The sum of words at one place.
struct WordSum {
    float low, high;
    DEVICE explicit WordSum(u32 word) { read(word, low, high); }
    DEVICE void add(u32 word) {
        float l, h;
        read(word, l, h);
        low += l;
        high += h;
    }
    DEVICE u32 round() const {
        if constexpr (ELEMENT == ELEMENT_BF16) return arch::bf16_pack(low, high);
        if constexpr (ELEMENT == ELEMENT_F16) return arch::f16_pack(low, high);
        return __float_as_uint(low);
    }

private:
    DEVICE static void read(u32 word, float& low, float& high) {
        if constexpr (ELEMENT == ELEMENT_BF16) {
            low = arch::bf16_low(word);
            high = arch::bf16_high(word);
        } else if constexpr (ELEMENT == ELEMENT_F16) {
            low = arch::f16_low(word);
            high = arch::f16_high(word);
        } else {
            low = __uint_as_float(word);
            high = 0.f;
        }
    }
};

// The sum of 16-byte vectors.
struct VectorSum {
    WordSum x, y, z, w;
    DEVICE explicit VectorSum(const Vec16& v) : x(v.x), y(v.y), z(v.z), w(v.w) {}
    DEVICE void add(const Vec16& v) {
        x.add(v.x);
        y.add(v.y);
        z.add(v.z);
        w.add(v.w);
    }
    DEVICE Vec16 round() const { return {x.round(), y.round(), z.round(), w.round()}; }
};

// The same by the switches.
DEVICE Vec16 reduced(const void* multicast) {
    using arch::Order;
    using arch::Scope;
    if constexpr (ELEMENT == ELEMENT_BF16) return arch::multimem_ld_reduce_add<arch::BF16x8, Order::weak, Scope::none>(multicast);
    if constexpr (ELEMENT == ELEMENT_F16) return arch::multimem_ld_reduce_add<arch::F16x8, Order::weak, Scope::none>(multicast);
    return arch::multimem_ld_reduce_add<arch::F32x4, Order::weak, Scope::none>(multicast);
}
// Bits to every rank, of whatever type they are.
DEVICE void to_all(void* multicast, const Vec16& v) {
    arch::multimem_st<arch::F32x4, arch::Order::weak, arch::Scope::none>(multicast, v);
}

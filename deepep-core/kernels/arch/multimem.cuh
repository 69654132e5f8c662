// Accesses to a multicast address: one address behind which the same offset of every rank's memory lies. The switches do the work.
//
// multimem_ld_reduce_add reads all copies and returns their sum, multimem_st writes all, multimem_red_add adds to all. The element is a
// type: F32, F16x2, BF16x2, the 16-byte vectors F32x4, F16x8, BF16x8, and U32 and U64. Sums of 16-bit floats are kept in FP32 and
// rounded once; in which order the copies are added is not defined.
//
// Order and scope are template parameters, and what has no meaning does not compile: a load never releases, a store never
// acquires, a reduction does one or neither, and weak accesses have no scope.
//
// An address of the multicast object and the ordinary address of the same memory are aliases: between accesses through one and
// accesses through the other stands fence_alias(), beside the synchronisation that orders them.
#pragma once
#include "arch/types.cuh"

namespace arch {

enum class Order : u32 { weak, relaxed, acquire, release };
enum class Scope : u32 { none, gpu, sys };

struct F32 { using Value = float; };
struct F16x2 { using Value = u32; };
struct BF16x2 { using Value = u32; };
struct F32x4 { using Value = Vec16; };
struct F16x8 { using Value = Vec16; };
struct BF16x8 { using Value = Vec16; };
struct U32 { using Value = u32; };
struct U64 { using Value = u64; };

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

template <Order O, Scope S> constexpr bool scoped = (O == Order::weak) == (S == Scope::none);

// Runs ACCESS with the qualifiers of an order and scope as a string.
#define MULTIMEM_QUALIFIED(ACCESS)                                                           \
    if constexpr (O == Order::weak) { ACCESS(".weak"); }                                     \
    else if constexpr (O == Order::relaxed && S == Scope::gpu) { ACCESS(".relaxed.gpu"); }   \
    else if constexpr (O == Order::relaxed) { ACCESS(".relaxed.sys"); }                      \
    else if constexpr (O == Order::acquire && S == Scope::gpu) { ACCESS(".acquire.gpu"); }   \
    else if constexpr (O == Order::acquire) { ACCESS(".acquire.sys"); }                      \
    else if constexpr (S == Scope::gpu) { ACCESS(".release.gpu"); }                          \
    else { ACCESS(".release.sys"); }

template <class E, Order O, Scope S>
DEVICE typename E::Value multimem_ld_reduce_add(const void* p) {
    static_assert(O != Order::release, "a load does not release");
    static_assert(scoped<O, S>, "weak accesses have no scope, and all others have one");
    typename E::Value v;
#define SCALAR(q, type, constraint) \
    asm volatile("multimem.ld_reduce" q ".global.add" type " %0, [%1];" : constraint(v) : "l"(p) : "memory")
#define VECTOR(q, type)                                                                                    \
    asm volatile("multimem.ld_reduce" q ".global.add" type " {%0, %1, %2, %3}, [%4];"                      \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory")
#define FLOATS(q)                                                                                          \
    float a, b, c, d;                                                                                      \
    asm volatile("multimem.ld_reduce" q ".global.add.v4.f32 {%0, %1, %2, %3}, [%4];"                       \
                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(p) : "memory");                                \
    v = {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)}
#define ACCESS(q)                                                                        \
    if constexpr (same<E, F32>) SCALAR(q, ".f32", "=f");                                 \
    else if constexpr (same<E, F16x2>) SCALAR(q, ".acc::f32.f16x2", "=r");               \
    else if constexpr (same<E, BF16x2>) SCALAR(q, ".acc::f32.bf16x2", "=r");             \
    else if constexpr (same<E, F16x8>) VECTOR(q, ".acc::f32.v4.f16x2");                  \
    else if constexpr (same<E, BF16x8>) VECTOR(q, ".acc::f32.v4.bf16x2");                \
    else if constexpr (same<E, U32>) SCALAR(q, ".u32", "=r");                            \
    else if constexpr (same<E, U64>) SCALAR(q, ".u64", "=l");                            \
    else { static_assert(same<E, F32x4>, "no element of multimem_ld_reduce_add"); FLOATS(q); }
    MULTIMEM_QUALIFIED(ACCESS)
#undef ACCESS
#undef FLOATS
#undef VECTOR
#undef SCALAR
    return v;
}

template <class E, Order O, Scope S>
DEVICE void multimem_st(void* p, typename E::Value v) {
    static_assert(O != Order::acquire, "a store does not acquire");
    static_assert(scoped<O, S>, "weak accesses have no scope, and all others have one");
#define SCALAR(q, type, constraint) asm volatile("multimem.st" q ".global" type " [%0], %1;" ::"l"(p), constraint(v) : "memory")
#define VECTOR(q, type)                                                       \
    asm volatile("multimem.st" q ".global" type " [%0], {%1, %2, %3, %4};"    \
                 ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory")
#define FLOATS(q)                                                                                                        \
    asm volatile("multimem.st" q ".global.v4.f32 [%0], {%1, %2, %3, %4};"                                                \
                 ::"l"(p), "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)),              \
                 "f"(__uint_as_float(v.w)) : "memory")
#define ACCESS(q)                                                            \
    if constexpr (same<E, F32>) SCALAR(q, ".f32", "f");                      \
    else if constexpr (same<E, F16x2>) SCALAR(q, ".f16x2", "r");             \
    else if constexpr (same<E, BF16x2>) SCALAR(q, ".bf16x2", "r");           \
    else if constexpr (same<E, F16x8>) VECTOR(q, ".v4.f16x2");               \
    else if constexpr (same<E, BF16x8>) VECTOR(q, ".v4.bf16x2");             \
    else if constexpr (same<E, U32>) SCALAR(q, ".u32", "r");                 \
    else if constexpr (same<E, U64>) SCALAR(q, ".u64", "l");                 \
    else { static_assert(same<E, F32x4>, "no element of multimem_st"); FLOATS(q); }
    MULTIMEM_QUALIFIED(ACCESS)
#undef ACCESS
#undef FLOATS
#undef VECTOR
#undef SCALAR
}

template <class E, Order O, Scope S>
DEVICE void multimem_red_add(void* p, typename E::Value v) {
    static_assert(O == Order::relaxed || O == Order::release, "a reduction is relaxed or releases");
    static_assert(scoped<O, S>, "weak accesses have no scope, and all others have one");
#define SCALAR(q, type, constraint) asm volatile("multimem.red" q ".global.add" type " [%0], %1;" ::"l"(p), constraint(v) : "memory")
#define VECTOR(q, type)                                                          \
    asm volatile("multimem.red" q ".global.add" type " [%0], {%1, %2, %3, %4};"  \
                 ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory")
#define FLOATS(q)                                                                                                        \
    asm volatile("multimem.red" q ".global.add.v4.f32 [%0], {%1, %2, %3, %4};"                                           \
                 ::"l"(p), "f"(__uint_as_float(v.x)), "f"(__uint_as_float(v.y)), "f"(__uint_as_float(v.z)),              \
                 "f"(__uint_as_float(v.w)) : "memory")
#define ACCESS(q)                                                            \
    if constexpr (same<E, F32>) SCALAR(q, ".f32", "f");                      \
    else if constexpr (same<E, F16x2>) SCALAR(q, ".f16x2", "r");             \
    else if constexpr (same<E, BF16x2>) SCALAR(q, ".bf16x2", "r");           \
    else if constexpr (same<E, F16x8>) VECTOR(q, ".v4.f16x2");               \
    else if constexpr (same<E, BF16x8>) VECTOR(q, ".v4.bf16x2");             \
    else if constexpr (same<E, U32>) SCALAR(q, ".u32", "r");                 \
    else if constexpr (same<E, U64>) SCALAR(q, ".u64", "l");                 \
    else { static_assert(same<E, F32x4>, "no element of multimem_red_add"); FLOATS(q); }
    MULTIMEM_QUALIFIED(ACCESS)
#undef ACCESS
#undef FLOATS
#undef VECTOR
#undef SCALAR
}

// Flips bits of a word in every copy.
template <Order O, Scope S>
DEVICE void multimem_red_xor(u32* p, u32 bits) {
    static_assert(O == Order::relaxed || O == Order::release, "a reduction is relaxed or releases");
    static_assert(scoped<O, S>, "weak accesses have no scope, and all others have one");
#define ACCESS(q) asm volatile("multimem.red" q ".global.xor.b32 [%0], %1;" ::"l"(p), "r"(bits) : "memory")
    MULTIMEM_QUALIFIED(ACCESS)
#undef ACCESS
}
#undef MULTIMEM_QUALIFIED

// Between accesses through one address of some memory and accesses through another one.
DEVICE void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

}  // namespace arch

// Accesses as atomics of the same order; vectors must be aligned, as on a device.
#pragma once
#include "arch/types.cuh"

namespace arch {

inline u32 ld_acquire_sys(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u64 ld_acquire_sys(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u64 ld_relaxed_sys(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void ld_relaxed_sys(const u64* p, u64& a, u64& b) {
    if ((u64)p % 16) fail("a misaligned pair of words", (u64)p);
    a = ld_relaxed_sys(p);
    b = ld_relaxed_sys(p + 1);
}
inline void st_release_sys(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void st_release_sys(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void st_relaxed_sys(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void st_relaxed_sys(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void st_relaxed_sys(u64* p, u64 a, u64 b) {
    if ((u64)p % 16) fail("a misaligned pair of words", (u64)p);
    st_relaxed_sys(p, a);
    st_relaxed_sys(p + 1, b);
}
inline u64 cas_sys(u64* p, u64 expected, u64 desired) {
    __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
inline u32 cas_gpu(u32* p, u32 expected, u32 desired) {
    __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

template <class T>
T plain(const T* p) {
    if ((u64)p % sizeof(T)) fail("a misaligned access", (u64)p);
    return *p;
}
inline Vec16 ld_received(const Vec16* p) { return plain(p); }
inline u64 ld_received(const u64* p) { return plain(p); }
inline u32 ld_received(const u32* p) { return plain(p); }
inline void ld_stream(const u64* p, u32& low, u32& high) {
    const u64 v = plain(p);
    low = (u32)v;
    high = (u32)(v >> 32);
}
inline void st_stream(Vec16* p, Vec16 v) {
    plain(p);
    *p = v;
}

}  // namespace arch

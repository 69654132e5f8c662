// Accesses that other threads see let others run first. Vectors must be aligned, as on a device. Ranks may run in different threads of the machine:
// words are read and written as a whole, and read-modify-writes are the machine's.
#pragma once
#include "arch/types.cuh"

namespace arch {

template <class T>
T seen(const T* p) {
    fiber_yield();
    if ((u64)p % sizeof(T)) fiber_fail("a misaligned access", (u64)p);
    const T v = __atomic_load_n(p, __ATOMIC_ACQUIRE);
    fiber_saw(p, (u64)v);
    return v;
}
template <class T>
T plain(const T* p) {
    if ((u64)p % sizeof(T)) fiber_fail("a misaligned access", (u64)p);
    return *p;
}
template <class T>
void put(T* p, T v) {
    if ((u64)p % sizeof(T)) fiber_fail("a misaligned access", (u64)p);
    fiber_yield();
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

// Behind what this thread has sent.
template <class T>
void release(T* p, T v) {
    fiber_arrive(nullptr);
    put(p, v);
}

inline u32 ld_acquire_sys(const u32* p) { return seen(p); }
inline u64 ld_acquire_sys(const u64* p) { return seen(p); }
inline u64 ld_acquire_gpu(const u64* p) { return seen(p); }
inline u64 ld_relaxed_sys(const u64* p) { return seen(p); }
inline u32 ld_relaxed_sys(const u32* p) { return seen(p); }
inline u64 ld_relaxed_gpu(const u64* p) { return seen(p); }
// Two words, each for itself.
inline void ld_relaxed_sys(const u64* p, u64& a, u64& b) {
    if ((u64)p % 16) fiber_fail("a misaligned pair of words", (u64)p);
    a = seen(p);
    b = seen(p + 1);
}
inline void st_relaxed_sys(u64* p, u64 a, u64 b) {
    if ((u64)p % 16) fiber_fail("a misaligned pair of words", (u64)p);
    put(p, a);
    put(p + 1, b);
}
inline void st_release_sys(u32* p, u32 v) { release(p, v); }
inline void st_release_sys(u64* p, u64 v) { release(p, v); }
inline void st_release_gpu(u64* p, u64 v) { release(p, v); }
inline void st_relaxed_sys(u32* p, u32 v) { put(p, v); }
inline void st_relaxed_sys(u64* p, u64 v) { put(p, v); }
inline void st_relaxed_gpu(u64* p, u64 v) { put(p, v); }
template <class T>
T compare_and_swap(T* p, T expected, T desired) {
    seen(p);
    __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
}
inline u64 cas_sys(u64* p, u64 expected, u64 desired) { return compare_and_swap(p, expected, desired); }
inline u32 cas_gpu(u32* p, u32 expected, u32 desired) { return compare_and_swap(p, expected, desired); }
inline u32 exchange_gpu(u32* p, u32 v) {
    seen(p);
    return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL);
}
inline u32 add_gpu(u32* p, u32 v) {
    seen(p);
    return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
inline u32 add_acq_rel_gpu(u32* p, u32 v) {
    fiber_arrive(nullptr);
    return add_gpu(p, v);
}
inline u32 ld_acquire_cta_shared(const u32* p) { return seen(p); }
inline void st_release_cta_shared(u32* p, u32 v) { put(p, v); }
inline void add_release_cta_shared(u32* p, u32 v) {
    fiber_yield();
    *p += v;
}
inline Vec16 ld_stream(const Vec16* p) { return plain(p); }
inline u64 ld_stream(const u64* p) { return plain(p); }
inline void ld_stream(const u64* p, u32& low, u32& high) {
    const u64 v = plain(p);
    low = (u32)v;
    high = (u32)(v >> 32);
}
inline u32 ld_stream(const u32* p) { return plain(p); }
inline Vec16 ld_received(const Vec16* p) { return plain(p); }
inline u32 ld_received(const u32* p) { return plain(p); }
inline i32 ld_received(const i32* p) { return plain(p); }
inline u64 ld_received(const u64* p) { return plain(p); }
inline void st_stream(Vec16* p, Vec16 v) {
    plain(p);
    *p = v;
}

}  // namespace arch

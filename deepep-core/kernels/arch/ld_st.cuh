// Loads and stores with a scope and an order, and streaming accesses.
//
// Naming: ld_<order>_<scope>, st_<order>_<scope>. "Relaxed" accesses are single-copy atomic and carry no order of their own.
#pragma once
#include "arch/types.cuh"

namespace arch {

DEVICE u32 ld_acquire_sys(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 ld_acquire_sys(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 ld_acquire_gpu(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 ld_relaxed_sys(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 ld_relaxed_gpu(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u32 ld_relaxed_sys(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
// Two words at an address that is a multiple of 16; each is single-copy atomic, both together are not.
DEVICE void ld_relaxed_sys(const u64* p, u64& a, u64& b) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
DEVICE void st_relaxed_sys(u64* p, u64 a, u64 b) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
DEVICE void st_release_sys(u32* p, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void st_release_sys(u64* p, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE void st_release_gpu(u64* p, u64 v) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE void st_relaxed_sys(u32* p, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void st_relaxed_sys(u64* p, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE void st_relaxed_gpu(u64* p, u64 v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Compare and swap at system scope, relaxed; returns the old value.
DEVICE u64 cas_sys(u64* p, u64 expected, u64 desired) {
    u64 old;
    asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(old) : "l"(p), "l"(expected), "l"(desired) : "memory");
    return old;
}
DEVICE u32 cas_gpu(u32* p, u32 expected, u32 desired) {
    u32 old;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old) : "l"(p), "r"(expected), "r"(desired) : "memory");
    return old;
}
DEVICE u32 exchange_gpu(u32* p, u32 v) {
    u32 old;
    asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
DEVICE u32 add_gpu(u32* p, u32 v) {
    u32 old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}
DEVICE u32 add_acq_rel_gpu(u32* p, u32 v) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

// Shared memory, for hand-over between warps of a block.
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE u32 ld_acquire_cta_shared(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
    return v;
}
DEVICE void st_release_cta_shared(u32* p, u32 v) {
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}
// Counts up what this warp has done; who sees the sum by an acquire sees that, too.
DEVICE void add_release_cta_shared(u32* p, u32 v) {
    asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}

// Memory that nobody writes from the wait for the kernel before until this one ends.
//
// PTX promises this load for memory that nobody writes as long as the kernel lives, and a kernel that was launched early lives while the one before it still
// writes. There it rests on the hardware: nothing is loaded before that wait, and a multiprocessor has one L1 for these loads and ordinary ones, so that what the
// wait makes visible to the latter these see as well.
DEVICE Vec16 ld_stream(const Vec16* p) {
    Vec16 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE void ld_stream(const u64* p, u32& low, u32& high) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(p));
}
DEVICE u64 ld_stream(const u64* p) {
    u64 v;
    asm volatile("ld.global.nc.L1::no_allocate.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
DEVICE u32 ld_stream(const u32* p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// Memory that another thread has written in this kernel: an ordinary load, after the acquire that makes it visible. Not from L1,
// where an older value may lie.
DEVICE Vec16 ld_received(const Vec16* p) {
    Vec16 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE u32 ld_received(const u32* p) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE i32 ld_received(const i32* p) { return (i32)ld_received((const u32*)p); }
DEVICE u64 ld_received(const u64* p) {
    u64 v;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
// Results that this kernel does not read again.
DEVICE void st_stream(Vec16* p, Vec16 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

}  // namespace arch

// Multicast addresses, of which there are none here.
#pragma once
#include "arch/bf16.cuh"
#include "arch/elements.cuh"
#include "arch/f16.cuh"
#include "arch/ld_st.cuh"

namespace arch {

template <class E, Order O, Scope S>
void multimem_st(void* p, typename E::Value) { fiber_fail("a store to a multicast address", (u64)p); }
template <class E, Order O, Scope S>
Vec16 multimem_ld_reduce_add(const void* p) { fiber_fail("a load from a multicast address", (u64)p); }
template <class E, Order O, Scope S>
void multimem_red_add(void* p, typename E::Value) { fiber_fail("a reduction at a multicast address", (u64)p); }
inline void fence_alias() {}
template <Order O, Scope S>
void multimem_red_xor(u32* p, u32) { fiber_fail("a reduction at a multicast address", (u64)p); }

}  // namespace arch

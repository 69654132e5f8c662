// What accesses to a multicast address are qualified with: the types of elements, orders and scopes, as kernels name them.
#pragma once
#include "arch/types.cuh"

namespace arch {

enum class Order : u32 { weak, relaxed, acquire, release };
enum class Scope : u32 { none, gpu, sys };

struct F32x4 { using Value = Vec16; };
struct F16x8 { using Value = Vec16; };
struct BF16x8 { using Value = Vec16; };
struct U32 { using Value = u32; };
struct U64 { using Value = u64; };

}  // namespace arch

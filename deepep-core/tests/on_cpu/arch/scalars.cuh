// What the language of kernels for CPUs has whatever a thread is: numbers, and words that stand for nothing.
#pragma once
#include <cstring>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct alignas(16) Vec16 {
    u32 x, y, z, w;
};

#define DEVICE inline
#define __device__
#define __global__
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// A packet as a whole: aligned accesses of 16 bytes are single-copy atomic on x86 processors with AVX.
typedef u32 PacketVector __attribute__((vector_size(16), may_alias));
inline void write_packet(Vec16* p, const Vec16& v) { *(volatile PacketVector*)p = PacketVector{v.x, v.y, v.z, v.w}; }
inline Vec16 read_packet(const Vec16* p) {
    const PacketVector v = *(const volatile PacketVector*)p;
    return {v[0], v[1], v[2], v[3]};
}

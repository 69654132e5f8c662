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

// Integer names and the 16-byte vector that everything moves in.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct alignas(16) Vec16 {
    u32 x, y, z, w;
};

#define DEVICE __device__ __forceinline__

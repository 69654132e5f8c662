// The caller's tensors: any alignment, any length. Whole aligned vectors in one access, what is left byte by byte.
#pragma once
#include "arch/ld_st.cuh"

// Up to `bytes` bytes (at most 16) into a vector; the rest is zero.
DEVICE Vec16 load_bytes(const u8* from, u32 bytes) {
    u64 half[2] = {0, 0};
#pragma unroll
    for (u32 h = 0; h < 2; h++)
#pragma unroll 1
        for (u32 i = 0; i < 8 && 8 * h + i < bytes; i++) half[h] |= (u64) * (const volatile u8*)(from + 8 * h + i) << 8 * i;
    return {(u32)half[0], (u32)(half[0] >> 32), (u32)half[1], (u32)(half[1] >> 32)};
}
DEVICE void store_bytes(u8* to, const Vec16& v, u32 bytes) {
    const u64 half[2] = {(u64)v.y << 32 | v.x, (u64)v.w << 32 | v.z};
#pragma unroll
    for (u32 h = 0; h < 2; h++)
#pragma unroll 1
        for (u32 i = 0; i < 8 && 8 * h + i < bytes; i++) *(volatile u8*)(to + 8 * h + i) = (u8)(half[h] >> 8 * i);
}

// Whether an access is known to be aligned and inside: a parameter of code that is compiled for both.
struct Fast { static constexpr bool value = true; };
struct Careful { static constexpr bool value = false; };

// A tensor, or a part of one. Offsets are multiples of the access.
struct User {
    u8* at;
    u64 bytes;

    DEVICE User(u64 address, u64 bytes) : at((u8*)address), bytes(bytes) {}
    DEVICE bool aligned() const { return ((u64)at & 15) == 0; }
    template <class How>
    DEVICE Vec16 load16(How, u64 offset) const {
        if constexpr (How::value) return arch::ld_received((const Vec16*)(at + offset));
        else return load_bytes(at + offset, left(offset, 16));
    }
    template <class How>
    DEVICE void store16(How, u64 offset, const Vec16& v) const {
        if constexpr (How::value) arch::st_stream((Vec16*)(at + offset), v);
        else store_bytes(at + offset, v, left(offset, 16));
    }
    DEVICE u64 load8(u64 offset) const {
        if (whole8(offset)) return arch::ld_received((const u64*)(at + offset));
        const Vec16 v = load_bytes(at + offset, left(offset, 8));
        return (u64)v.y << 32 | v.x;
    }
    DEVICE void store8(u64 offset, u32 low, u32 high) const {
        if (whole8(offset)) *(u64*)(at + offset) = (u64)high << 32 | low;
        else store_bytes(at + offset, {low, high, 0, 0}, left(offset, 8));
    }

private:
    DEVICE u32 left(u64 offset, u32 access) const { return bytes - offset < access ? (u32)(bytes - offset) : access; }
    DEVICE bool whole8(u64 offset) const { return ((u64)at & 7) == 0 && bytes - offset >= 8; }
};

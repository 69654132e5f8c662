// Bytes in packets that say themselves when they are there: 14 bytes of payload and a tag of 16 bits, which changes with the epoch. Pure: what a packet
// means, who writes it and who waits is up to the includer. Packet k of piece g lies at k · groups + g. Tags and `zero` are read where they are needed.
#pragma once
#include "arch/packet.cuh"

DEVICE u32 packet_tag(u32 epoch) { return (1 + epoch % 65535u) << 16; }

// What a lane makes N packets of: 14 · N bytes of a row, N even; 3 · N words fill the packets, N / 2 words are split among two of them each.
template <u32 N>
struct Pieces {
    u32 w[7 * N / 2];

    DEVICE Vec16 packet(u32 k, u32 tag) const {
        const u32 rest = w[3 * N + k / 2];
        return {w[3 * k], w[3 * k + 1], w[3 * k + 2], (k & 1 ? rest >> 16 : rest & 0xffffu) | tag};
    }
    DEVICE void take(const Vec16 (&p)[N]) {
#pragma unroll
        for (u32 k = 0; k < N; k++) {
            w[3 * k] = p[k].x;
            w[3 * k + 1] = p[k].y;
            w[3 * k + 2] = p[k].z;
        }
#pragma unroll
        for (u32 k = 0; k < N; k += 2) w[3 * N + k / 2] = (p[k].w & 0xffffu) | p[k + 1].w << 16;
    }
    DEVICE void send(Vec16* to, u32 groups, u32 g, const u32& tag) const {
#pragma unroll
        for (u32 k = 0; k < N; k++) arch::st_packet(to + k * groups + g, packet(k, tag));
    }
};

// A packet of which not all words may be needed. The assembler would load only those, one after the other, and the packet would no longer say itself
// when it is there: so all of them have a part in the last one, as far as the assembler knows. `zero` is 0, and an argument of the kernel.
DEVICE Vec16 load_packet(const Vec16* from, const u32& zero) {
    Vec16 v = arch::ld_packet(from);
    v.w ^= (v.x ^ v.y ^ v.z) & zero;
    return v;
}
template <u32 N>
DEVICE void load_packets(const Vec16* from, u32 groups, u32 g, const u32& zero, Vec16 (&p)[N]) {
#pragma unroll
    for (u32 k = 0; k < N; k++) p[k] = load_packet(from + k * groups + g, zero);
}
// Whether all of them carry the tag.
template <u32 N>
DEVICE bool have_tag(const Vec16 (&p)[N], const u32& tag) {
    u32 other = 0;
#pragma unroll
    for (u32 k = 0; k < N; k++) other |= (p[k].w ^ tag) & 0xffff0000u;
    return other == 0;
}

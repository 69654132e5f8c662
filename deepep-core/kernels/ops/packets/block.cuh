// What the parts of a small dispatch share.
#pragma once
#include "comm/packets.cuh"
#include "ops/dispatch/output.cuh"
#include "ops/dispatch/report.cuh"

constexpr u32 WARPS = THREADS / 32;
constexpr u32 IDS_OF_PACKET = 6;

struct Control {
    u32 failed;             // a wait of this block gave up
    u32 over;               // lowest rank over capacity; RANKS if none is
    u32 tokens[MAX_RANKS];  // that each rank gives
    i32 sums[WARPS];        // of a scan
    i32 rows[MAX_RANKS];    // that each rank receives, if capacities matter
};
static_assert(sizeof(Control) <= PACKET_CONTROL_BYTES, "the host reserves too little shared memory");

// A token of any rank has a number, s · max_tokens + t, and a bit in maps. Unit u is one token of one rank; the units are dealt out to blocks.
struct Block {
    const PacketDispatchParams& q;
    const DispatchParams& p;
    const Domain& d;
    Packets packets;
    Control& control;
    u32* to_rank;    // [R][words]: tokens that go to a rank
    u32* of_expert;  // [experts][words]: tokens of an expert; local experts only, unless capacities matter
    i32* start;      // [EL + 1]: first row of each local expert
    i32* counts;     // [EL]
    u16* ids;        // [units of this block][lanes]
    u64 handle, output;
    u32 me, lane, warp;

    DEVICE Block(const PacketDispatchParams& params, u8* shared, u32 epoch)
        : q(params), p(params.call), d(params.call.domain), packets(d, params.area, epoch), control(*(Control*)shared),
          to_rank((u32*)(shared + PACKET_CONTROL_BYTES)), of_expert(to_rank + RANKS * params.words),
          start((i32*)(shared + params.start)), counts((i32*)(shared + params.counts)), ids((u16*)(shared + params.ids)),
          handle(d.heap[d.rank] + p.handles + (u64)(p.place >> 8 & 0xfff) * p.handle_stride),
          output(d.heap[d.rank] + p.outputs + (u64)(p.place & 0xff) * p.output_stride), me(d.rank), lane(threadIdx.x % 32),
          warp(threadIdx.x / 32) {}

    DEVICE bool cached() const { return p.topk_idx == 0; }
    DEVICE Begun begun() const { return packets.begun(PACKETS_DISPATCH, OPERATION_DISPATCH, p.call); }
    template <class T>
    DEVICE T* mine(u64 offset) const { return (T*)(handle + offset); }
    template <class T>
    DEVICE T* out(u64 offset) const { return (T*)(output + offset); }
    DEVICE Place place(u32 phase, u32 peer, u32 index) const { return {OPERATION_DISPATCH, phase, packets.epoch, peer, index}; }
    DEVICE u32 number(u32 s, u32 t) const { return s * p.max_tokens + t; }
    DEVICE u32 unit(u32 s, u32 t) const { return t * RANKS + (s + RANKS - me) % RANKS; }
    DEVICE u32 groups() const { return q.groups; }
};

// Rank of an expert.
DEVICE u32 rank_of(const DispatchParams& p, u32 expert) {
    u32 r = 0;
#pragma unroll
    for (u32 i = 1; i < RANKS; i++) r += expert >= i * p.local_experts;
    return r;
}

// Bits of a map below `end`.
DEVICE u32 bits_below(const u32* map, u32 end) {
    u32 n = 0;
    for (u32 i = 0; i < end / 32; i++) n += __popc(map[i]);
    if (end % 32) n += __popc(map[end / 32] & ((1u << end % 32) - 1));
    return n;
}
DEVICE bool bit(const u32* map, u32 at) { return map[at / 32] >> (at % 32) & 1; }

// Packets of a token's lanes: ids, two a word, then weights.
DEVICE u32 id_words(u32 lanes) { return (lanes + 1) / 2; }

// Word i of eight bytes of what travels for a token: its row, then its scale packs.
DEVICE u64 load_word(const Block& b, u32 token, u32 i) {
    const u32 words = b.p.row_bytes / 8;
    if (i < words) return arch::ld_stream((const u64*)(b.p.x + (u64)token * b.p.row_bytes) + i);
    const u32* scales = (const u32*)b.p.scales + (i64)token * b.p.scale_row_stride;
    const u32 pack = 2 * (i - words);
    u64 v = 0;
    if (pack < b.p.scale_packs) v = arch::ld_stream(scales + (i64)pack * b.p.scale_pack_stride);
    if (pack + 1 < b.p.scale_packs) v |= (u64)arch::ld_stream(scales + (i64)(pack + 1) * b.p.scale_pack_stride) << 32;
    return v;
}
DEVICE void store_word(const Block& b, u32 row, u32 i, u64 v) {
    const u32 words = b.p.row_bytes / 8;
    if (i < words) {
        *(b.out<u64>(b.p.rows + (u64)row * b.p.row_bytes) + i) = v;
        return;
    }
    const u32 pack = 2 * (i - words);
    if (pack < b.p.scale_packs) *scale_pack(b.p, b.output, row, pack) = (u32)v;
    if (pack + 1 < b.p.scale_packs) *scale_pack(b.p, b.output, row, pack + 1) = (u32)(v >> 32);
}
DEVICE void load_group(const Block& b, u32 token, u32 g, Group& group) {
#pragma unroll
    for (u32 j = 0; j < GROUP_WORDS; j++) group.v[j] = load_word(b, token, j * b.groups() + g);
}

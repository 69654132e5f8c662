// What a rank gives to all ranks, itself included, in a small dispatch.
#pragma once
#include "ops/packets/block.cuh"

// Ranks for which code is laid out side by side.
constexpr u32 AT_ONCE = RANKS <= 4 ? RANKS : 1;

// Digest of the call and number of tokens. By one warp.
DEVICE void send_head(const Block& b) {
    if (b.lane < RANKS) b.packets.send(b.packets.head(b.lane, b.me), b.p.call, b.p.tokens, 0);
}

// What a warp sends of an own token: a part of its row, or ids and weights.
struct Outgoing {
    const Block& b;
    u32 t = 0, part = 0, g = 0;
    u32 low = ALL_LANES, high = ALL_LANES;  // halves of the id of lane k, as given
    u32 weight = 0;
    Loading loading;
    bool some = false;

    DEVICE Outgoing(const Block& block) : b(block) {}
    // Looks up the block's item of this number. Nothing is waited for.
    DEVICE void load(u32 item) {
        const u32 all = b.parts() + 1, k = b.lane;
        t = blockIdx.x + gridDim.x * (item / all);
        part = item % all;
        some = t < b.p.tokens;
        if (!some) return;
        if (k < b.lanes()) load_id((u64)t * b.lanes() + k);
        if (part < b.parts()) {
            g = part * 32 + b.lane;
            if (g < b.groups()) loading.load(b, t, g);
        } else {
            weight = k < b.lanes() && b.p.weights ? arch::ld_stream((const u32*)b.p.weights + (u64)t * b.lanes() + k) : 0;
        }
    }
    DEVICE void send() const {
        if (part < b.parts()) send_row();
        else send_lanes();
    }

private:
    // In a cached dispatch, from the handle: 32 bits, all of them valid.
    DEVICE void load_id(u64 at) {
        const bool wide = INDEX_BITS == 64 && !b.cached();
        const u32* from = b.cached() ? b.mine<u32>(b.p.topk) + at : (const u32*)b.p.topk_idx + at * (INDEX_BITS / 32);
        low = arch::ld_stream(from);
        if (wide) high = arch::ld_stream(from + 1);
    }
    // An expert, −1, or −2 for an id that is out of range.
    DEVICE i32 expert() const {
        const bool narrow = INDEX_BITS == 32 || b.cached();
        if (low == ALL_LANES && (narrow || high == ALL_LANES)) return -1;
        return low < b.experts() && (narrow || high == 0) ? (i32)low : -2;
    }
    DEVICE void send_row() const {
        u32 needed = 0;
        const i32 e = expert(), there = e >= 0 ? (i32)rank_of(b, (u32)e) : -1;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            if (warp::any(there == (i32)r)) needed |= 1u << r;
        if (g >= b.groups()) return;
        Row row;
        loading.finish(b, row);
        // Peers first.
#pragma unroll AT_ONCE
        for (u32 i = 1; i <= RANKS; i++) {
            const u32 r = (b.me + i) % RANKS;
            if (needed >> r & 1) b.packets.send(b.packets.row(r, b.me, t), b.groups(), g, row);
        }
    }
    // Lane n makes packet n: ids first, then weights.
    DEVICE void send_lanes() const {
        const u32 e = (u32)valid_expert() & NO_ID, ids = id_packets(b.lanes()), count = ids + weight_packets(b.lanes());
        u32 id[IDS_OF_PACKET], w[WORDS_OF_PACKET];
        // Lanes beyond the last packet make one that is not sent.
#pragma unroll
        for (u32 i = 0; i < IDS_OF_PACKET; i++) id[i] = warp::get(e, (IDS_OF_PACKET * b.lane + i) % 32);
#pragma unroll
        for (u32 i = 0; i < WORDS_OF_PACKET; i++) w[i] = warp::get(weight, (WORDS_OF_PACKET * (b.lane - ids) + i) % 32);
        if (b.lane >= count) return;
        if (b.lane < ids) {
            w[0] = id[0] | id[1] << 12 | id[2] << 24;
            w[1] = id[2] >> 8 | id[3] << 4 | id[4] << 16 | id[5] << 28;
            w[2] = id[5] >> 4 | id[6] << 8 | id[7] << 20;
        }
#pragma unroll AT_ONCE
        for (u32 i = 1; i <= RANKS; i++) {
            const u32 r = (b.me + i) % RANKS;
            Vec16* to = b.lane < ids ? b.packets.ids(r, b.me, t) + b.lane * b.max_tokens() : b.packets.weights(r, b.me, t) + (b.lane - ids);
            b.packets.send(to, w[0], w[1], w[2]);
        }
    }
    // Id of lane k, invalid and repeated ones as −1.
    DEVICE i32 valid_expert() const {
        const i32 e = expert();
        const u32 k = b.lane, same = warp::match(e >= 0 ? (u32)e : 0x40000000u | k);
        if (e == -2) report_expert(b.p, b.packets.epoch, RECORD_BAD_EXPERT, t, k);
        const bool twice = e >= 0 && (same & warp::below(k));
        if (twice) report_expert(b.p, b.packets.epoch, RECORD_DUPLICATE_EXPERT, t, k);
        return e < 0 || twice ? -1 : e;
    }
};

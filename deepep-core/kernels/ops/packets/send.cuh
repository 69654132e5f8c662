// What a rank gives to all ranks, itself included, in a small dispatch.
#pragma once
#include "ops/packets/block.cuh"

// Ranks for which code is laid out side by side.
constexpr u32 AT_ONCE = RANKS <= 4 ? RANKS : 1;

// An id as it is given. In a cached dispatch, from the handle: 32 bits, all of them valid.
DEVICE void load_id(const Block& b, u64 at, u32& low, u32& high) {
    const bool wide = INDEX_BITS == 64 && !b.cached();
    const u32* from = b.cached() ? b.mine<u32>(b.p.topk) + at : (const u32*)b.p.topk_idx + at * (INDEX_BITS / 32);
    low = arch::ld_stream(from);
    if (wide) high = arch::ld_stream(from + 1);
}

// Digest of the call. By one warp.
DEVICE void send_head(const Block& b) {
    if (b.lane < RANKS && b.lane != b.me) b.packets.send(b.packets.head(b.lane, b.me), b.p.call, 0, 0);
}

// What a warp sends of the ids of some tokens, as many as it has lanes for: a packet for eight lanes, also of tokens that are not given. All positions follow
// from these packets, so that they leave first.
struct Ids {
    const Block& b;
    u32 t = 0, k = 0;                       // of this lane
    u32 low = ALL_LANES, high = ALL_LANES;  // halves of its id, as given
    u32 w[WORDS_OF_PACKET];                 // of the packet in which it is
    bool bad = false, twice = false;        // no id of an expert; that of a lane before
    bool some = false;

    DEVICE Ids(const Block& block) : b(block) {}
    // Looks up the item of this number, of all of the rank. Nothing is waited for.
    DEVICE void load(u32 item) {
        const u32 width = IDS_OF_PACKET * (id_packets(b.lanes()) > 2 ? 4 : id_packets(b.lanes())), tokens = 32 / width;
        t = item * tokens + b.lane / width;
        k = b.lane % width;
        some = item * tokens < b.max_tokens();
        low = high = ALL_LANES;
        if (t < b.p.tokens && k < b.lanes()) load_id(b, (u64)t * b.lanes() + k, low, high);
    }
    // Puts packets together, before anybody knows the epoch.
    DEVICE void pack() {
        const bool narrow = INDEX_BITS == 32 || b.cached(), none = low == ALL_LANES && (narrow || high == ALL_LANES);
        const bool valid = low < b.experts() && (narrow || high == 0);
        bad = !valid && !none;
        // The same id in two lanes of a token: the first one counts. (A match of all lanes takes longer.)
        const u32 e = valid ? low : NO_ID;
        twice = false;
#pragma unroll(FIXED && FIXED_LANES <= IDS_OF_PACKET ? IDS_OF_PACKET : 1)
        for (u32 d = 1; d < (b.lanes() < 32 ? b.lanes() : 32); d++) {
            const u32 other = warp::get(e, (b.lane - d) % 32);
            twice = twice || (valid && k >= d && other == e);
        }
        // The lanes of a packet put it together, each with its id where it belongs.
        const u32 at = k % IDS_OF_PACKET * ID_BITS;
        const u64 id = (u64)(valid && !twice ? low : NO_ID) << at % 32;
#pragma unroll
        for (u32 i = 0; i < WORDS_OF_PACKET; i++) w[i] = at / 32 == i ? (u32)id : at / 32 + 1 == i ? (u32)(id >> 32) : 0;
#pragma unroll
        for (u32 i = 0; i < WORDS_OF_PACKET; i++)
#pragma unroll
            for (u32 step = 1; step < IDS_OF_PACKET; step *= 2) w[i] |= warp::get(w[i], b.lane ^ step);
    }
    DEVICE void send() const {
        // Before anybody is told of the token: whoever sees counts is to see records.
        if (bad) report_expert(b.p, b.packets.epoch, RECORD_BAD_EXPERT, t, k);
        if (twice) report_expert(b.p, b.packets.epoch, RECORD_DUPLICATE_EXPERT, t, k);
        warp::sync();
        if (k % IDS_OF_PACKET || k >= b.lanes() || t >= b.max_tokens()) return;
        // Peers first.
#pragma unroll 1
        for (u32 i = 1; i <= RANKS; i++) {
            const u32 r = (b.me + i) % RANKS;
            b.packets.send(b.packets.ids(r, b.me, t) + k / IDS_OF_PACKET * b.max_tokens(), w[0], w[1], w[2]);
        }
    }
};

// What a warp sends of an own token: a part of its row, or its weights.
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
        t = blockIdx.x + b.q.senders * (item / all);
        part = item % all;
        some = t < b.p.tokens;
        if (!some) return;
        if (part < b.parts()) {
            if (k < b.lanes()) load_id(b, (u64)t * b.lanes() + k, low, high);
            g = part * 32 + b.lane;
            if (g < b.groups()) loading.load(b, t, g);
        } else {
            weight = k < b.lanes() && b.p.weights ? arch::ld_stream((const u32*)b.p.weights + (u64)t * b.lanes() + k) : 0;
        }
    }
    DEVICE void send() const {
        if (part < b.parts()) send_row();
        else send_weights();
    }

private:
    DEVICE void send_row() const {
        u32 needed = 0;
        const bool valid = low < b.experts() && (INDEX_BITS == 32 || b.cached() || high == 0);
        const i32 there = valid ? (i32)rank_of(b, low) : -1;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            if (warp::any(there == (i32)r)) needed |= 1u << r;
        if (g >= b.groups()) return;
        Row row;
        loading.finish(row);
        // Peers first.
#pragma unroll AT_ONCE
        for (u32 i = 1; i <= RANKS; i++) {
            const u32 r = (b.me + i) % RANKS;
            if (needed >> r & 1) b.packets.send(b.packets.row(r, b.me, t), b.groups(), g, row);
        }
    }
    // Lane n makes packet n.
    DEVICE void send_weights() const {
        u32 w[WORDS_OF_PACKET];
        // Lanes beyond the last packet make one that is not sent.
#pragma unroll
        for (u32 i = 0; i < WORDS_OF_PACKET; i++) w[i] = warp::get(weight, (WORDS_OF_PACKET * b.lane + i) % 32);
        if (b.lane >= weight_packets(b.lanes())) return;
#pragma unroll AT_ONCE
        for (u32 i = 1; i <= RANKS; i++) {
            const u32 r = (b.me + i) % RANKS;
            b.packets.send(b.packets.weights(r, b.me, t) + b.lane, w[0], w[1], w[2]);
        }
    }
};

// What a rank gives to all ranks, itself included, in a small dispatch.
#pragma once
#include "ops/packets/block.cuh"

// Ranks for which code is laid out side by side.
constexpr u32 AT_ONCE = RANKS <= 4 ? RANKS : 1;

// Digest of the call. By one warp.
DEVICE void send_head(const Block& b) {
    if (b.lane < RANKS && b.lane != b.me) b.packets.send(b.packets.head(b.lane, b.me), b.p.call, 0, 0);
}

// What a warp sends of the ids of 32 tokens, one a lane: one packet of each, also of tokens that are not given. All positions follow from these packets, so
// that they leave first, and few warps send all of them.
struct Ids {
    const Block& b;
    Loading& ids;  // as given
    u32 t = 0, packet = 0;
    bool some = false;

    DEVICE Ids(const Block& block, Loading& loading) : b(block), ids(loading) {}
    // Looks up the item of this number, of all of the rank. Nothing is waited for.
    DEVICE void load(u32 item) {
        const u32 packets = id_packets(b.lanes());
        packet = item % packets;
        t = item / packets * 32 + b.lane;
        some = item / packets * 32 < b.max_tokens();
#pragma unroll
        for (u32 k = 0; k < 2 * IDS_OF_PACKET; k++) ids.w[k] = ALL_LANES;
        if (t >= b.p.tokens) return;
        const u32 first = packet * IDS_OF_PACKET;
        // One branch for all of them: loads with opposite conditions into one register would wait for each other.
        if (wide()) {
            const u64* from = words() + first;
#pragma unroll
            for (u32 k = 0; k < IDS_OF_PACKET; k++)
                if (first + k < b.lanes()) arch::ld_stream(from + k, ids.w[2 * k], ids.w[2 * k + 1]);
        } else {
            const u32* from = halves() + first;
#pragma unroll
            for (u32 k = 0; k < IDS_OF_PACKET; k++)
                if (first + k < b.lanes()) ids.w[2 * k] = arch::ld_stream(from + k);
        }
    }
    DEVICE void send() const {
        u32 e[IDS_OF_PACKET], bad = 0, twice = 0;
#pragma unroll
        for (u32 k = 0; k < IDS_OF_PACKET; k++) {
            const u32 low = ids.w[2 * k], high = ids.w[2 * k + 1];
            e[k] = expert(low, high);
            if (e[k] == NO_ID && !(low == ALL_LANES && (!wide() || high == ALL_LANES))) bad |= 1u << k;
#pragma unroll
            for (u32 i = 0; i < k; i++)
                if (e[k] == e[i] && e[k] != NO_ID) twice |= 1u << k;
        }
        // The lanes before this packet, if there are any.
#pragma unroll 1
        for (u32 k0 = 0; k0 < packet * IDS_OF_PACKET; k0++) {
            u32 low = ALL_LANES, high = ALL_LANES;
            if (t >= b.p.tokens) break;
            if (wide()) arch::ld_stream(words() + k0, low, high);
            else low = arch::ld_stream(halves() + k0);
#pragma unroll
            for (u32 k = 0; k < IDS_OF_PACKET; k++)
                if (e[k] != NO_ID && e[k] == expert(low, high)) twice |= 1u << k;
        }
        // Before anybody is told of the token: whoever sees counts is to see records.
        if (bad | twice) report(bad, twice);
#pragma unroll
        for (u32 k = 0; k < IDS_OF_PACKET; k++) e[k] = twice >> k & 1 ? NO_ID : e[k];
        if (t >= b.max_tokens()) return;
        const u32 w0 = e[0] | e[1] << 12 | e[2] << 24;
        const u32 w1 = e[2] >> 8 | e[3] << 4 | e[4] << 16 | e[5] << 28;
        const u32 w2 = e[5] >> 4 | e[6] << 8 | e[7] << 20;
        // Peers first.
#pragma unroll AT_ONCE
        for (u32 i = 1; i <= RANKS; i++) {
            const u32 r = (b.me + i) % RANKS;
            b.packets.send(b.packets.ids(r, b.me, t) + packet * b.max_tokens(), w0, w1, w2);
        }
    }

private:
    // In a cached dispatch ids come from the handle: 32 bits, all of them valid.
    DEVICE bool wide() const { return INDEX_BITS == 64 && !b.cached(); }
    DEVICE u32 expert(u32 low, u32 high) const { return low < b.experts() && (!wide() || high == 0) ? low : NO_ID; }
    // The token's ids.
    DEVICE const u64* words() const { return (const u64*)b.p.topk_idx + (u64)t * b.lanes(); }
    DEVICE const u32* halves() const { return (b.cached() ? b.mine<u32>(b.p.topk) : (const u32*)b.p.topk_idx) + (u64)t * b.lanes(); }
    DEVICE void report(u32 bad, u32 twice) const {
#pragma unroll 1
        for (u32 k = 0; k < IDS_OF_PACKET; k++) {
            if (bad >> k & 1) report_expert(b.p, b.packets.epoch, RECORD_BAD_EXPERT, t, packet * IDS_OF_PACKET + k);
            if (twice >> k & 1) report_expert(b.p, b.packets.epoch, RECORD_DUPLICATE_EXPERT, t, packet * IDS_OF_PACKET + k);
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
        t = blockIdx.x + gridDim.x * (item / all);
        part = item % all;
        some = t < b.p.tokens;
        if (!some) return;
        if (part < b.parts()) {
            if (k < b.lanes()) load_id((u64)t * b.lanes() + k);
            g = part * 32 + b.lane;
            if (g < b.groups()) loading.load_row(b, t, g);
        } else {
            weight = k < b.lanes() && b.p.weights ? arch::ld_stream((const u32*)b.p.weights + (u64)t * b.lanes() + k) : 0;
        }
    }
    DEVICE void send() const {
        if (part < b.parts()) send_row();
        else send_weights();
    }

private:
    // In a cached dispatch, from the handle: 32 bits, all of them valid.
    DEVICE void load_id(u64 at) {
        const bool wide = INDEX_BITS == 64 && !b.cached();
        const u32* from = b.cached() ? b.mine<u32>(b.p.topk) + at : (const u32*)b.p.topk_idx + at * (INDEX_BITS / 32);
        low = arch::ld_stream(from);
        if (wide) high = arch::ld_stream(from + 1);
    }
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

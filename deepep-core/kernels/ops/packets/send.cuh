// What a rank gives to others in a small dispatch.
#pragma once
#include "ops/packets/block.cuh"

// By block 0: digest of the call and number of tokens, to every rank.
DEVICE void send_head(const Block& b) {
    if (threadIdx.x < RANKS) b.packets.send(b.packets.head(threadIdx.x, b.me), b.p.call, b.p.tokens, 0);
}

// Id of lane k of an own token, invalid ones as −1. Whole warp.
DEVICE i32 valid_expert(const Block& b, u32 t) {
    i32 e = -1;
    const u32 k = b.lane;
    if (k < b.p.lanes) e = b.cached() ? b.mine<i32>(b.p.topk)[(u64)t * b.p.lanes + k] : load_expert(b.p, t, k);
    const u32 same = warp::match(e >= 0 ? (u32)e : 0x40000000u | k);
    if (e == -2) report_expert(b.p, b.packets.epoch, RECORD_BAD_EXPERT, t, k);
    const bool twice = e >= 0 && (same & warp::below(k));
    if (twice) report_expert(b.p, b.packets.epoch, RECORD_DUPLICATE_EXPERT, t, k);
    return e < 0 || twice ? -1 : e;
}

// Ids and weights of a token in packets: lane n makes packet n. Whole warp.
DEVICE Vec16 lane_packet(const Block& b, u32 t) {
    u32 weight = 0;
    if (b.lane < b.p.lanes && b.p.weights) weight = ((const u32*)b.p.weights)[(u64)t * b.p.lanes + b.lane];
    const i32 e = valid_expert(b, t);
    const u32 ids = id_words(b.p.lanes);
    u32 w[3];
#pragma unroll
    for (u32 i = 0; i < 3; i++) {
        // Lanes beyond the last packet make one that is not sent.
        const u32 at = 3 * b.lane + i, low = (u32)warp::get(e, 2 * at % 32), high = (u32)warp::get(e, (2 * at + 1) % 32);
        const u32 value = warp::get(weight, (at - ids) % 32);
        w[i] = at < ids ? (low & 0xffffu) | high << 16 : value;
    }
    return {w[0], w[1], w[2], 0};
}

// Part of a row of an own token that one warp sends.
struct Part {
    u32 t, g;
    u32 needed;  // ranks that need the row
    Group group;

    DEVICE bool look_up(const Block& b, u32 item) {
        const u32 parts = (b.groups() + 31) / 32;
        t = blockIdx.x + gridDim.x * (item / parts);
        g = item % parts * 32 + b.lane;
        if (t >= b.p.tokens) return false;
        i32 e = -1;
        if (b.lane < b.p.lanes)
            e = b.cached() ? b.mine<i32>(b.p.topk)[(u64)t * b.p.lanes + b.lane] : load_expert(b.p, t, b.lane);
        if (g < b.groups()) load_group(b, t, g, group);
        needed = 0;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            if (warp::any(e >= 0 && rank_of(b.p, e) == r)) needed |= 1u << r;
        return true;
    }
    DEVICE void send(const Block& b) const {
        if (g >= b.groups()) return;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            if (r != b.me && needed >> r & 1) b.packets.send(b.packets.row(r, b.me, t), b.groups(), g, group);
    }
};

// By all warps: the block's own tokens. One warp sends ids and weights, one acquires the permission to write, the others send rows. What is sent
// first is loaded while the permission is on its way.
DEVICE void send(const Block& b) {
    constexpr u32 LANES = WARPS - 1, PERMISSION = WARPS - 2;
    const bool lanes = b.warp == LANES, carries = RANKS > 1 && b.warp < PERMISSION;
    u32 item = b.warp, t = blockIdx.x;
    Part part;
    Vec16 packet;
    bool ok = true, more = false;
    if (carries) more = part.look_up(b, item);
    if (b.warp == PERMISSION) ok = b.packets.may_write(b.begun());
    if (lanes && t < b.p.tokens) packet = lane_packet(b, t);
    ok = __syncthreads_and(ok);
    if (!ok) {
        if (threadIdx.x == 0) b.control.failed = 1;
        return;
    }
    if (blockIdx.x == 0) send_head(b);
    const u32 count = (id_words(b.p.lanes) + b.p.lanes + 2) / 3;
    while (lanes && t < b.p.tokens) {
        if (b.lane < count) {
#pragma unroll
            for (u32 r = 0; r < RANKS; r++) b.packets.send(b.packets.lanes(r, b.me, t) + b.lane, packet.x, packet.y, packet.z);
        }
        t += gridDim.x;
        if (t < b.p.tokens) packet = lane_packet(b, t);
    }
    while (more) {
        part.send(b);
        item += PERMISSION;
        more = part.look_up(b, item);
    }
}

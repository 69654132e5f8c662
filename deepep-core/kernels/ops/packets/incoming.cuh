// What a block places of what has come in a small dispatch.
#pragma once
#include "ops/packets/send.cuh"

// What a warp does for one unit: a part of its row, or its tables, ids and weights. Each lane waits for packets: four of its piece of the row, or the one
// with the weight of lane k.
struct Incoming {
    const Block& b;
    u32 turn = 0, part = 0, s = 0, t = 0;
    bool some = false, waits = false;  // this lane, if the token comes here
    u32 want = 0, mask = 0;            // packets are there if these bits of their last words are those of `want`
    const Vec16* from = nullptr;
    Vec16 p[ROW_PACKETS];

    DEVICE Incoming(const Block& block) : b(block) {}
    // The block's item of this number; `some` is false if there is none.
    DEVICE void set(u32 item) {
        const u32 all = b.parts() + 1;
        turn = item / all;
        part = item % all;
        const u32 unit = b.block() + b.blocks() * turn;
        some = unit < RANKS * b.max_tokens();
        s = (unit + b.me) % RANKS;
        t = unit / RANKS;
        const bool of_row = row();
        want = of_row ? b.packets.tag : b.packets.epoch;
        mask = of_row ? 0xffff0000u : ALL_LANES;
        waits = some && (of_row ? g() < b.groups() : b.lane < b.lanes() && b.p.weights != 0);
        from = of_row ? b.packets.row(b.me, s, t) + g() : b.packets.weights(b.me, s, t) + b.lane / WORDS_OF_PACKET;
#pragma unroll
        for (u32 k = 0; k < ROW_PACKETS; k++) p[k] = {0, 0, 0, ~want};
    }
    DEVICE u32 number() const { return b.number(s, t); }
    DEVICE bool row() const { return part < b.parts(); }
    DEVICE u32 g() const { return part * 32 + b.lane; }
    // Last word of a packet. All words have a part in it, as far as the assembler knows: it must not load those apart that nobody needs otherwise.
    DEVICE u32 last(u32 k) const { return p[k].w ^ ((p[k].x ^ p[k].y ^ p[k].z) & b.q.area.zero); }
    DEVICE bool there() const {
        u32 other = 0;
#pragma unroll
        for (u32 k = 1; k < ROW_PACKETS; k++) other |= last(k) ^ want;
        return (((row() ? other : 0) | (last(0) ^ want)) & mask) == 0;
    }
    // Loads what was not there when it was loaded before. Nothing is waited for but that, and nothing is done with what is loaded: the block meets meanwhile.
    DEVICE void look() {
        if (!waits || there()) return;
#pragma unroll
        for (u32 k = 0; k < ROW_PACKETS; k++)
            if (k == 0 || row()) p[k] = arch::ld_packet(from + k * b.groups());
    }
    // False after an abort.
    DEVICE bool wait() {
        if (!waits) return true;
        return wait_until(b.d, b.place(row() ? PHASE_ARRIVAL : PHASE_TOTALS, s, t), want & mask, [&](u64& seen) {
            if (there()) return true;
            seen = p[0].w & mask;
            look();
            return false;
        });
    }
    DEVICE u32 weight() const {
        const u32 word = b.lane % WORDS_OF_PACKET;
        return word == 0 ? p[0].x : word == 1 ? p[0].y : p[0].z;
    }
    // If it is this call's turn: the part of the row's slot that this warp has read, and its share of what rows of this size leave.
    DEVICE void scrub() const {
        if (t == b.packets.scrubbed())
            b.packets.scrub(b.packets.row(b.me, s, t), b.q.area.row_stride, 0, ROW_PACKETS, b.groups(), g(), part, b.parts());
    }
};

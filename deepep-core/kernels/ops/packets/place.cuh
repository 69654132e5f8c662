// Rows of a small dispatch to their places, and the tables of where they are.
#pragma once
#include "ops/packets/count.cuh"

// One unit, and what a warp knows of it: lane k speaks for top-k lane k.
struct Unit {
    const Block& b;
    u32 s, t, number;
    i32 expert, dest;  // −1 for none
    u32 here;          // lanes whose experts live here
    i32 row = -1;      // of this lane: −1 for lanes that live elsewhere

    DEVICE Unit(const Block& block, const Incoming& in) : b(block), s(in.s), t(in.t), number(in.number()) {
        const u32* words = b.ids + (in.turn * id_packets(b.lanes()) + b.lane / IDS_OF_PACKET) * WORDS_OF_PACKET;
        const u32 id = b.lane < b.lanes() ? id_of(words, b.lane % IDS_OF_PACKET) : NO_ID;
        expert = id >= b.experts() || b.over() != RANKS ? -1 : (i32)id;
        dest = expert < 0 ? -1 : (i32)rank_of(b, (u32)expert);
        here = warp::ballot(dest == (i32)b.me);
    }
    // Token index, if some lane lives here.
    DEVICE u32 index() const { return bits_below(b, b.to_rank + b.me * b.words(), 1, number); }
    // `index`: where it is needed.
    DEVICE void find(u32 index) {
        if (EXPANDED) {
            if (dest != (i32)b.me) return;
            const u32 local = (u32)expert - b.me * b.local_experts();
            row = rows_before(b, local) + b.start[local] + (i32)bits_below(b, map_of(b, b.all_experts() ? (u32)expert : local), b.maps(), number);
        } else if (dest == (i32)b.me) {
            row = (i32)index;
        }
    }
    // Tables of the handle.
    DEVICE void write_handle(u32 index) const {
        const u32 k = b.lane, lanes = b.lanes();
        if (k < lanes) b.mine<i32>(b.p.lane_place)[(u64)number * lanes + k] = row;
        if (here) {
            if (k == 0) b.mine<u64>(b.p.source)[index] = (u64)here << 32 | number;
            if (EXPANDED && k < lanes) b.mine<i32>(b.p.lane_row)[(u64)index * lanes + k] = row;
        }
        if (s != b.me || t >= b.p.tokens) return;
        const i32 first = warp::get(row, here ? __ffs(here) - 1 : 0);
        if (k < lanes) {
            b.mine<i32>(b.p.topk)[(u64)t * lanes + k] = expert;
            if (EXPANDED) b.mine<i32>(b.p.own_row)[(u64)t * lanes + k] = row;
        }
        if (k >= RANKS) return;
        const u32* map = b.to_rank + k * b.words();
        const bool goes = b.over() == RANKS && bit(map, number);
        const i32 at = goes ? (i32)bits_below(b, map, 1, number) : -1;
        b.mine<i32>(b.p.sent_row)[(u64)t * RANKS + k] = EXPANDED && k == b.me ? (here ? first : -1) : at;
        if (EXPANDED) b.mine<i32>(b.p.sent_index)[(u64)t * RANKS + k] = at;
    }
    // Ids of the output.
    DEVICE void write_ids(u32 index) const {
        if (EXPANDED || here == 0 || b.lane >= b.lanes()) return;
        const u64 at = (u64)index * b.lanes() + b.lane;
        const i32 local = dest == (i32)b.me ? expert - (i32)(b.me * b.local_experts()) : -1;
        b.out<Id>(b.p.lane_expert)[at] = (Id)local;
    }
    // Weight of lane k in the output.
    DEVICE void write_weight(u32 index, u32 weight) const {
        if (!EXPANDED || s != b.me) b.out<u32>(b.p.lane_weight)[(u64)index * b.lanes() + b.lane] = weight;
        if (EXPANDED && row >= 0) b.out<u32>(b.p.row_weight)[row] = weight;
    }
};

// One item of a warp, at which it has looked before. Whole warp; false after an abort.
DEVICE bool place(const Block& b, Incoming& in) {
    Unit unit(b, in);
    const u32 index = unit.here && !(EXPANDED && in.row()) ? unit.index() : 0;
    unit.find(index);
    if (unit.here && !warp::all(in.wait())) return false;
    if (in.row()) {
        MARK_IF(unit.here && in.turn * (b.parts() + 1) + in.part < WARPS, b.d, PD_ROW_FIRST);
        MARK_IF(unit.here, b.d, PD_ROW_LAST);
        Row row;
        row.take(in.p);
#pragma unroll 1
        for (u32 rest = unit.here; rest; rest = EXPANDED ? rest & (rest - 1) : 0) {
            const u32 to = (u32)warp::get(unit.row, __ffs(rest) - 1);
            if (in.waits) store_row(b, b.output(), to, in.g(), row);
        }
        // What is not here was not waited for. If it comes all the same, its packets carry this epoch's tag.
        in.scrub();
        return true;
    }
    if (!b.cached()) unit.write_handle(index);
    unit.write_ids(index);
    if (unit.here && in.waits) unit.write_weight(index, in.weight());
    return true;
}

// Rows of a small dispatch to their places, and the tables of where they are.
#pragma once
#include "ops/packets/count.cuh"

// One unit, and what a warp knows of it: lane k speaks for top-k lane k.
struct Unit {
    const Block& b;
    u32 s, t, number;
    i32 expert, dest;  // −1 for none
    u32 here;          // lanes whose experts live here
    u32 index;         // token index, if `here`
    i32 row;           // of this lane: −1 for lanes that live elsewhere

    DEVICE Unit(const Block& block, u32 unit, u32 n) : b(block), s((unit + b.me) % RANKS), t(unit / RANKS), number(b.number(s, t)), index(0), row(-1) {
        const u32 id = b.lane < b.p.lanes ? b.ids[n * b.p.lanes + b.lane] : 0xffffu;
        expert = id == 0xffffu || b.control.over != RANKS ? -1 : (i32)id;
        dest = expert < 0 ? -1 : (i32)rank_of(b.p, expert);
        here = warp::ballot(dest == (i32)b.me);
    }
    DEVICE void find() {
        if (here == 0) return;
        index = bits_below(b.to_rank + b.me * b.q.words, number);
        if (dest != (i32)b.me) return;
        row = (i32)index;
        if (EXPANDED) {
            const u32 e = expert - b.me * b.p.local_experts;
            row = b.start[e] + (i32)bits_below(b.of_expert + (b.q.all_experts ? (u32)expert : e) * b.q.words, number);
        }
    }
    // Tables of the handle.
    DEVICE void write_handle() const {
        const u32 k = b.lane, lanes = b.p.lanes;
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
        const u32* map = b.to_rank + k * b.q.words;
        const bool goes = b.control.over == RANKS && bit(map, number);
        const i32 at = goes ? (i32)bits_below(map, number) : -1;
        b.mine<i32>(b.p.sent_row)[(u64)t * RANKS + k] = EXPANDED && k == b.me ? (here ? first : -1) : at;
        if (EXPANDED) b.mine<i32>(b.p.sent_index)[(u64)t * RANKS + k] = at;
    }
    // Ids of the output.
    DEVICE void write_ids() const {
        if (EXPANDED || here == 0 || b.lane >= b.p.lanes) return;
        const u64 at = (u64)index * b.p.lanes + b.lane;
        const i32 local = dest == (i32)b.me ? expert - (i32)(b.me * b.p.local_experts) : -1;
#if INDEX_BITS == 64
        b.out<i64>(b.p.lane_expert)[at] = local;
#else
        b.out<i32>(b.p.lane_expert)[at] = local;
#endif
    }
    // Weights of the output. Whole warp; false after an abort.
    DEVICE bool write_weights() const {
        if (!b.p.weights || here == 0) return true;
        const u32 k = b.lane, lanes = b.p.lanes, word = id_words(lanes) + k;
        const u64 at = (u64)index * lanes + k;
        bool ok = true;
        if (k < lanes) {
            u32 weight;
            if (s == b.me) {
                weight = ((const u32*)b.p.weights)[(u64)t * lanes + k];
            } else {
                Vec16 v;
                ok = b.packets.receive(b.packets.lanes(b.me, s, t) + word / 3, b.place(PHASE_TOTALS, s, t), v);
                weight = word % 3 == 0 ? v.x : word % 3 == 1 ? v.y : v.z;
            }
            if (ok) {
                if (!EXPANDED || s != b.me) b.out<u32>(b.p.lane_weight)[at] = weight;
                if (EXPANDED && row >= 0) b.out<u32>(b.p.row_weight)[row] = weight;
            }
        }
        return warp::all(ok);
    }
};

// By all warps: the units of this block, a part of a row each.
DEVICE void place_rows(const Block& b) {
    const u32 groups = b.groups(), parts = (groups + 31) / 32;
    for (u32 item = b.warp;; item += WARPS) {
        const u32 n = item / parts, part = item % parts, number = blockIdx.x + gridDim.x * n;
        if (number >= RANKS * b.p.max_tokens) return;
        Unit unit(b, number, n);
        const u32 g = part * 32 + b.lane;
        const bool mine = unit.here && g < groups, own = unit.s == b.me;
        const Vec16* from = b.packets.row(b.me, own ? b.me + 1 : unit.s, unit.t);
        Group group;
        Vec16 p[GROUP_PACKETS];
        if (mine && own) load_group(b, unit.t, g, group);
        if (mine && !own) b.packets.load(from, groups, g, p);
        unit.find();
        if (part == 0) {
            if (!b.cached()) unit.write_handle();
            unit.write_ids();
        }
        bool ok = true;
        if (mine && !own) ok = b.packets.receive(from, groups, g, p, b.place(PHASE_ARRIVAL, unit.s, unit.t), group);
        ok = warp::all(ok);
        if (ok) {
            for (u32 rest = unit.here; rest; rest = EXPANDED ? rest & (rest - 1) : 0) {
                const u32 row = (u32)warp::get(unit.row, __ffs(rest) - 1);
                if (!mine) continue;
#pragma unroll
                for (u32 j = 0; j < GROUP_WORDS; j++) store_word(b, row, j * groups + g, group.v[j]);
            }
            if (part == 0) ok = unit.write_weights();
        }
        if (!ok) {
            b.control.failed = 1;
            return;
        }
    }
}

// By all threads, after a block barrier: one slot of each peer.
DEVICE void scrub(const Block& b) {
    const u32 t = b.packets.scrubbed();
    for (u32 s = 0; s < RANKS; s++)
        if (s != b.me && b.unit(s, t) % gridDim.x == blockIdx.x) b.packets.scrub(b.packets.row(b.me, s, t), b.q.area.row_stride);
}

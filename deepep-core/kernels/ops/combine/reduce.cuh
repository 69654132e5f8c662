// Sums of what came back, and of what never left.
#pragma once
#include "ops/combine/gather.cuh"

// The tokens of this rank that one warp sums (see Gather). Lane k speaks for top-k lane k of a token.
struct Reduction {
    static constexpr bool PARTIAL = EXPANDED && REDUCE_FIRST;
    struct Token {
        u32 t;
        i32 dest, own;  // rank of the lane's expert, −1 for none; row of the lane here, −1 for none
        bool remote;    // at this lane stands a contribution of another rank
    };

    const Block& b;
    u32 step;
    u32 ahead;         // token whose tables are being loaded
    i32 expert, own;   // of it
    Token coming, now;
    float weight;      // of the current token, loaded before its rows are summed and stored afterwards

    DEVICE Reduction(const Block& block, u32 worker, u32 workers)
        : b(block), step(workers), ahead(worker), expert(-1), own(-1), weight(0.f) {
        look_up();
    }
    DEVICE void look_up() {
        expert = own = -1;
        if (ahead >= b.p.tokens) return;
        const u64 at = (u64)ahead * b.p.lanes + b.lane;
        if (b.lane < b.p.lanes) {
            expert = b.handle<i32>(b.p.topk)[at];
            if (EXPANDED) own = b.handle<i32>(b.p.own_row)[at];
        }
        if (!EXPANDED) own = b.handle<i32>(b.p.sent_row)[(u64)ahead * RANKS + b.me];
    }
    DEVICE u32 cell(const Token& token) const {
        return b.cell(b.p.by_lane ? b.lane : rank_slot(token.dest, b.me), token.t);
    }

    DEVICE bool take(Terms& terms) {
        if (ahead >= b.p.tokens) return false;
        coming.t = ahead;
        coming.own = own;
        coming.dest = expert >= 0 ? expert / (i32)b.p.local_experts : -1;
        ahead += step;
        look_up();
        const u32 group = warp::match((u32)coming.dest);
        const u32 own_lanes = warp::ballot(coming.dest == (i32)b.me);
        const bool stands = coming.dest >= 0 && (!REDUCE_FIRST || group >> b.lane == 1);
        const u32 all = warp::ballot(stands);
        coming.remote = stands && coming.dest != (i32)b.me;
        const bool several = PARTIAL && __popc(own_lanes) > 1;
        u64 row = (u64)b.x_row(coming.own < 0 ? 0 : coming.own);
        if (coming.remote) row = b.receive_row(b.me, cell(coming));
        if (several) terms.set(b.lane, row, own_lanes, all & ~own_lanes, highest(own_lanes));
        else terms.set(b.lane, row, 0, all, 0);
        return true;
    }
    DEVICE bool ready(bool wait) const {
        bool ok = true;
        if (coming.remote) {
            const u32 at = cell(coming);
            const u32* flag = b.arrived(b.me) + at;
            ok = wait ? wait_equal(b.d, b.place(PHASE_ARRIVAL, coming.dest, at), flag) : arch::ld_acquire_sys(flag) == b.epoch;
        }
        ok = warp::all(ok);
        warp::sync();
        // The copy engine reads these rows, and not ahead of the flags.
        if (ok) arch::fence_proxy_global();
        return ok;
    }
    DEVICE void begin() {
        now = coming;
        weight = 0.f;
        if (!b.p.out_weights || b.lane >= b.p.lanes) return;
        if (now.dest == (i32)b.me)
            weight = ((const float*)b.p.weights)[EXPANDED ? (u64)now.own : (u64)now.own * b.p.lanes + b.lane];
    }
    DEVICE bool biased() const { return b.p.bias0 != 0; }
    DEVICE u32 biases(Sum (&sum)[VECTORS], u32 from, u32 end) const {
        u32 n = 0;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u64 bias = i ? b.p.bias1 : b.p.bias0;
            if (!bias) continue;
            n++;
            const u64 row = bias + (u64)now.t * b.p.row_bytes;
#pragma unroll
            for (u32 j = 0; j < VECTORS; j++) {
                const u32 at = from + (b.lane + 32 * j) * 16;
                if (at < end) sum[j].add(arch::ld_stream((const Vec16*)(row + at)));
            }
        }
        return n;
    }
    DEVICE bool put(u32 from, u32 end, const Vec16 (&v)[VECTORS]) const {
        u8* out = (u8*)(b.p.out + (u64)now.t * b.p.row_bytes);
#pragma unroll
        for (u32 j = 0; j < VECTORS; j++) {
            const u32 at = from + (b.lane + 32 * j) * 16;
            if (at < end) arch::st_stream((Vec16*)(out + at), v[j]);
        }
        return true;
    }
    DEVICE bool end() const {
        if (!b.p.out_weights || b.lane >= b.p.lanes) return true;
        const u64 at = (u64)now.t * b.p.lanes + b.lane;
        // Those of other ranks came with rows that have been waited for.
        const bool came = now.dest >= 0 && now.dest != (i32)b.me;
        ((float*)b.p.out_weights)[at] = came ? __uint_as_float(arch::ld_received((const u32*)b.receive_weights(b.me) + at)) : weight;
        return true;
    }
};

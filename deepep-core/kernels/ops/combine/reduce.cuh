// Sums of what came back, and of what never left.
#pragma once
#include "ops/combine/block.cuh"
#include "ops/combine/sum.cuh"

// One token of this rank. Lane k speaks for top-k lane k.
struct Token {
    const Block& b;
    u32 t;
    i32 dest, own;   // rank of the lane's expert, −1 for none; row of the lane here, −1 for none
    u32 own_lanes;   // lanes whose experts live here
    u32 terms;       // lanes at which a contribution stands
    u64 address;     // lane in `terms`: the contribution's row

    DEVICE Token(const Block& block, u32 token) : b(block), t(token), own(-1), address(0) {
        const u64 at = (u64)t * b.p.lanes + b.lane;
        i32 e = -1;
        if (b.lane < b.p.lanes) {
            e = b.handle<i32>(b.p.topk)[at];
            if (EXPANDED) own = b.handle<i32>(b.p.own_row)[at];
        }
        if (!EXPANDED) own = b.handle<i32>(b.p.sent_row)[(u64)t * RANKS + b.me];
        dest = e >= 0 ? e / (i32)b.p.local_experts : -1;
        const u32 group = warp::match((u32)dest);
        own_lanes = warp::ballot(dest == (i32)b.me);
        const bool stands = dest >= 0 && (!REDUCE_FIRST || group >> b.lane == 1);
        terms = warp::ballot(stands);
        if (!stands) return;
        if (dest != (i32)b.me) {
            const u32 slot = b.p.by_lane ? b.lane : rank_slot(dest, b.me);
            address = b.receive_row(b.me, b.cell(slot, t));
        } else {
            address = (u64)b.x_row(own < 0 ? 0 : own);
        }
    }
    // Contributions of other ranks have arrived. Whole warp.
    DEVICE bool wait() const {
        bool ok = true;
        if (terms >> b.lane & 1 && dest != (i32)b.me) {
            const u32 cell = b.cell(b.p.by_lane ? b.lane : rank_slot(dest, b.me), t);
            ok = wait_equal(b.d, b.place(PHASE_ARRIVAL, dest, cell), b.arrived(b.me) + cell);
        }
        ok = warp::all(ok);
        warp::sync();
        return ok;
    }
    DEVICE void write_weights() const {
        if (!b.p.out_weights || b.lane >= b.p.lanes) return;
        const u64 at = (u64)t * b.p.lanes + b.lane;
        float w = 0.f;
        if (dest == (i32)b.me) {
            w = ((const float*)b.p.weights)[EXPANDED ? (u64)own : (u64)own * b.p.lanes + b.lane];
        } else if (dest >= 0) {
            w = __uint_as_float(arch::ld_received((const u32*)b.receive_weights(b.me) + at));
        }
        ((float*)b.p.out_weights)[at] = w;
    }

    // Vectors at, at + 32, … (V of them, below `end`) of the result.
    template <u32 V>
    DEVICE void sum(u32 at, u32 end, u64 own_address) const {
        constexpr u32 BATCH = V > 2 ? 2 : 4;
        const bool several = EXPANDED && REDUCE_FIRST && __popc(own_lanes) > 1;
        const u32 partial_lane = several ? highest(own_lanes) : 32;
        Vec16 mine[V];
        if (several) {
            Sum rows[V];
#pragma unroll
            for (u32 j = 0; j < V; j++) rows[j].clear();
            add_rows<V, BATCH>(rows, own_address, own_lanes, at, end);
#pragma unroll
            for (u32 j = 0; j < V; j++) mine[j] = rows[j].round();
        }
        Sum sum[V];
#pragma unroll
        for (u32 j = 0; j < V; j++) sum[j].clear();
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
            const u64 bias = n ? b.p.bias1 : b.p.bias0;
            if (!bias) continue;
            const Vec16* row = (const Vec16*)(bias + (u64)t * b.p.row_bytes);
#pragma unroll
            for (u32 j = 0; j < V; j++)
                if (at + 32 * j < end) sum[j].add(arch::ld_stream(row + at + 32 * j));
        }
        const bool copy = !b.p.bias0 && __popc(terms) == 1;
        Vec16 copied[V];
        u32 which = terms;
        while (which) {
            Vec16 v[BATCH][V];
#pragma unroll
            for (u32 u = 0; u < BATCH; u++) {
                const bool some = which != 0;
                const u32 from = some ? __ffs(which) - 1 : 0;
                const Vec16* row = (const Vec16*)warp::get(address, from);
                which &= which - 1;
#pragma unroll
                for (u32 j = 0; j < V; j++) {
                    const u32 i = at + 32 * j;
                    v[u][j] = minus_zero();
                    if (some && from == partial_lane) v[u][j] = mine[j];
                    else if (some && i < end) v[u][j] = arch::ld_received(row + i);
                }
            }
#pragma unroll
            for (u32 j = 0; j < V; j++) copied[j] = v[0][j];
#pragma unroll
            for (u32 u = 0; u < BATCH; u++)
#pragma unroll
                for (u32 j = 0; j < V; j++) sum[j].add(v[u][j]);
        }
        const bool nothing = !b.p.bias0 && terms == 0;
        Vec16* out = (Vec16*)(b.p.out + (u64)t * b.p.row_bytes);
#pragma unroll
        for (u32 j = 0; j < V; j++) {
            if (at + 32 * j >= end) continue;
            Vec16 result = sum[j].round();
            if (copy) result = copied[j];
            if (nothing) result = {0, 0, 0, 0};
            arch::st_stream(out + at + 32 * j, result);
        }
    }
    DEVICE void write() const {
        constexpr u32 V = !EXPANDED && RANKS <= 2 ? 4 : 2;
        // Of each lane whose expert lives here, for the sum of several.
        const u64 own_address = (u64)b.x_row(own < 0 ? 0 : own);
        const u32 vectors = b.p.row_bytes / 16;
#pragma unroll 1
        for (u32 i = b.lane; i < (vectors + 31) / 32 * 32; i += 32 * V) sum<V>(i, vectors, own_address);
    }
};

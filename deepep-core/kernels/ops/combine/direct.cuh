// Sums of rows that were sent, or lie here, in the plain layout: through registers, by warps that do nothing else.
//
// A token goes in shares of `share_bytes`, each summed for itself by the warp whose turn it is: many warps then have the last tokens among them. What needs no
// flag, the own row, is loaded before the flag is waited for.
//
// The first flags come long after the start: own rows that were loaded at once would only stand in the way of the rows that are sent first.
//
// Who writes: the peers, into the receive area, before the flag. Who waits: each lane for the flag of its contribution (acquire), the others for the lanes by a
// warp barrier. The rows are read past L1.
#pragma once
#include "ops/combine/block.cuh"
#include "ops/combine/sum.cuh"

struct Direct {
    // Vectors of a lane that are loaded, summed and stored together: of two rows, and of more.
    static constexpr u32 MANY = 7, STEP = MANY * 32 * 16, FEW = 2;

    const Block& b;
    u32 unit, step, shares;  // number of the unit that is looked up next, distance to the one after it; shares of a token
    u32 t, share;            // that unit: its token, or `tokens`, and its share
    i32 expert, own;         // of it: expert of this lane, the token's row here
    MARK_STATE(none_arrived);
    MARK_STATE(none_summed);

    DEVICE Direct(const Block& block, u32 worker, u32 workers)
        : b(block), unit(worker), step(workers), shares((block.p.row_bytes + block.p.share_bytes - 1) / block.p.share_bytes), t(0), share(0),
          expert(-1), own(-1) {
        if (RANKS > 1) hold();
        look_up();
    }
    // Loads what the handle says of the next unit, for which nobody waits yet.
    DEVICE void look_up() {
        t = unit / shares;
        share = unit % shares;
        expert = own = -1;
        if (t >= b.p.tokens) {
            t = b.p.tokens;
            return;
        }
        unit += step;
        if (b.lane < b.p.lanes) expert = b.handle<i32>(b.p.topk)[(u64)t * b.p.lanes + b.lane];
        own = b.handle<i32>(b.p.sent_row)[(u64)t * RANKS + b.me];
    }

    DEVICE u32 byte(u32 at, u32 j) const { return at + (b.lane + 32 * j) * 16; }
    template <u32 N>
    DEVICE void load(Vec16 (&v)[N], u64 row, u32 at, u32 end) const {
#pragma unroll
        for (u32 j = 0; j < N; j++)
            if (byte(at, j) < end) v[j] = arch::ld_received((const Vec16*)(row + at + b.lane * 16) + 32 * j);
    }
    template <u32 N>
    DEVICE void store(const Vec16 (&v)[N], u64 row, u32 at, u32 end) const {
#pragma unroll
        for (u32 j = 0; j < N; j++)
            if (byte(at, j) < end) arch::st_stream((Vec16*)(row + at + b.lane * 16) + 32 * j, v[j]);
    }

    // Two rows at most, whose sum is rounded once; `first` has been loaded from `row`, if there is one.
    DEVICE void sum_two(Vec16 (&first)[MANY], bool some, u64 row, bool two, u64 second, u64 out, u32 at, u32 end) const {
#pragma unroll 1
        for (; at < end; at += STEP) {
            if (two) {
                Vec16 v[MANY];
                load(v, second, at, end);
#pragma unroll
                for (u32 j = 0; j < MANY; j++) {
                    if (byte(at, j) >= end) continue;
                    first[j] = {arch::bf16_add(first[j].x, v[j].x), arch::bf16_add(first[j].y, v[j].y),
                                arch::bf16_add(first[j].z, v[j].z), arch::bf16_add(first[j].w, v[j].w)};
                }
            }
            store(first, out, at, end);
            if (some && at + STEP < end) load(first, row, at + STEP, end);
        }
    }
    // Biases, and the rows of the lanes in `all`, one term after the other. Each lane has the address of its row.
    DEVICE void sum_all(u64 row, u32 all, u32 token, u64 out, u32 at, u32 end) const {
#pragma unroll 1
        for (; at < end; at += FEW * 32 * 16) {
            Sum sum[FEW];
#pragma unroll
            for (u32 j = 0; j < FEW; j++) sum[j].clear();
            const u64 of_token = (u64)token * b.p.row_bytes;
            u32 rest = all, bias = 0;
#pragma unroll 1
            for (;;) {
                u64 term = 0;
                for (; bias < 2 && !term; bias++) {
                    const u64 rows = bias ? b.p.bias1 : b.p.bias0;
                    if (rows) term = rows + of_token;
                }
                if (!term) {
                    if (!rest) break;
                    term = warp::get(row, __ffs(rest) - 1);
                    rest &= rest - 1;
                }
                Vec16 v[FEW];
                load(v, term, at, end);
#pragma unroll
                for (u32 j = 0; j < FEW; j++)
                    if (byte(at, j) < end) sum[j].add(v[j]);
            }
            Vec16 result[FEW];
#pragma unroll
            for (u32 j = 0; j < FEW; j++) result[j] = sum[j].round();
            store(result, out, at, end);
        }
    }

    // All rows of the token from other ranks are here. False after an abort.
    DEVICE bool wait(bool remote, i32 dest, u32 cell) const {
        bool ok = true;
        if (remote) ok = wait_equal(b.d, b.place(PHASE_ARRIVAL, dest, cell), b.arrived(b.me) + cell);
        ok = warp::all(ok);
        warp::sync();
#ifdef DEEPEP_TIMELINE
        if (ok && warp::any(remote)) {
            MARK_FIRST(none_arrived, b.d, C_ARRIVED_FIRST);
            MARK(b.d, C_ARRIVED_LAST);
        }
#endif
        return ok;
    }

    // While the senders look up and load their first rows. Nobody waits for a reducer.
    DEVICE void hold() const {
        constexpr u64 HOLD_NS = 4000;
        const u64 start = arch::now_ns();
        while (arch::now_ns() - start < HOLD_NS) arch::sleep_ns(100);
    }

    DEVICE bool run() {
        while (t < b.p.tokens) {
            const u32 token = t, begin = share * b.p.share_bytes, rest = b.p.row_bytes - begin;
            const u32 end = begin + (rest < b.p.share_bytes ? rest : b.p.share_bytes);
            const i32 here = own, dest = expert >= 0 ? expert / (i32)b.p.local_experts : -1;
            const bool weights = b.p.out_weights && share == 0 && b.lane < b.p.lanes;
            look_up();
            const u32 group = warp::match((u32)dest), all = warp::ballot(dest >= 0 && group >> b.lane == 1);
            const bool stands = all >> b.lane & 1, remote = stands && dest != (i32)b.me;
            const u32 others = warp::ballot(remote), cell = b.cell(b.p.by_lane ? b.lane : rank_slot(dest, b.me), token);
            const u64 own_row = (u64)b.x_row(here < 0 ? 0 : here), row = remote ? b.receive_row(b.me, cell) : own_row;
            // Two rows at most, whose sum is rounded once: the own one and another, or two others.
            const bool simple = !b.p.bias0 && __popc(all) <= 2;
            const bool has_own = all != others, second = has_own ? others != 0 : (others & (others - 1)) != 0;
            const u64 first_row = has_own ? own_row : warp::get(row, others ? __ffs(others) - 1 : 0);
            const u64 second_row = warp::get(row, others ? (i32)highest(others) : 0);
            Vec16 first[MANY];
#pragma unroll
            for (u32 j = 0; j < MANY; j++) first[j] = {0, 0, 0, 0};
            float weight = 0.f;
            if (weights && dest == (i32)b.me) weight = ((const float*)b.p.weights)[(u64)here * b.p.lanes + b.lane];
            if (simple && has_own) load(first, own_row, begin, end);
            if (!wait(remote, dest, cell)) return false;
            if (weights && dest >= 0 && dest != (i32)b.me)
                weight = __uint_as_float(arch::ld_received((const u32*)b.receive_weights(b.me) + (u64)token * b.p.lanes + b.lane));
            const u64 out = b.p.out + (u64)token * b.p.row_bytes;
            if (simple) {
                if (!has_own && all) load(first, first_row, begin, end);
                sum_two(first, all != 0, first_row, second, second_row, out, begin, end);
            } else {
                sum_all(row, all, token, out, begin, end);
            }
            if (weights) ((float*)b.p.out_weights)[(u64)token * b.p.lanes + b.lane] = weight;
            MARK_FIRST(none_summed, b.d, C_SUMMED_FIRST);
            MARK(b.d, C_SUMMED_LAST);
        }
        return true;
    }
};

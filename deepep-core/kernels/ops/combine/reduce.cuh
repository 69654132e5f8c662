// Sums of what came back, and of what never left.
#pragma once
#include "ops/combine/gather.cuh"
#include "ops/combine/pull.cuh"

// The tokens of this rank that one warp sums (see Gather). Lane k speaks for top-k lane k of a token.
//
// Tokens, or their parts, are shared out in turn. If all are pulled, or if there are sums, they can also go by ticket: multiprocessors get unequal shares of the
// link, and sums have unequal numbers of rows. Tokens that are pulled come behind those that are sent here: they need no flag, and keep the link at
// work while the last of the others are announced.
struct Reduction {
    static constexpr bool PARTIAL = SUMS, READS = PULL;
    struct Token {
        u32 t, part;
        i32 dest, row;  // rank of the lane's expert, −1 for none; row of the lane where it lies: here, or (pulled) there; −1 for none
        bool remote;    // at this lane stands a contribution of another rank
        bool pulled;
        DEVICE bool remote_pulled() const { return pulled && dest >= 0; }
    };

    const Block& b;
    u32 step;
    u32 visit;         // number of the token behind `ahead` (drawn: lane 0)
    u32 ahead, part;   // token whose tables are being loaded, or `tokens`; its part
    i32 expert, own;   // of it; READS: row of the token at the rank of the lane's number
    Token coming, now;
    float weight;      // of the current token, loaded before its rows are summed and stored afterwards
    bool weighed;      // that has been done
    bool reading;      // the end of it is still to be told
    MARK_STATE(none_arrived);
    MARK_STATE(none_summed);

    DEVICE Reduction(const Block& block, u32 worker, u32 workers)
        : b(block), step(workers), visit(worker), ahead(0), part(0), expert(-1), own(-1), weight(0.f), weighed(false), reading(READS) {
        look_up();
    }
    // Each warp's first token has its number.
    DEVICE bool drawn() const { return (PULL || SUMS) && b.p.drawn; }
    DEVICE void advance() {
        if (!drawn()) visit += step;
        else if (b.lane == 0) visit = step + arch::add_gpu(b.ticket(TICKET_SUM), 1);
    }
    // Those that are sent first.
    DEVICE u32 token(u32 number) const {
        if (!PULL) return number;
        constexpr u32 ALL = PULL_PARTS;
        const u32 some = b.p.pulled, others = ALL - some, n = b.p.tokens, rest = n % ALL;
        const u32 sent = n / ALL * others + (rest < others ? rest : others);
        if (number < sent) return number / others * ALL + number % others;
        return (number - sent) / some * ALL + others + (number - sent) % some;
    }
    DEVICE void look_up() {
        expert = own = -1;
        u32 number = drawn() ? warp::get(visit, 0) : visit;
        if (SUMS) {
            part = number % b.p.parts;
            number /= b.p.parts;
        }
        ahead = number < b.p.tokens ? token(number) : b.p.tokens;
        if (ahead >= b.p.tokens) return;
        advance();
        const u64 at = (u64)ahead * b.p.lanes + b.lane;
        if (b.lane < b.p.lanes) {
            expert = b.handle<i32>(b.p.topk)[at];
            if (EXPANDED) own = b.handle<i32>(b.p.own_row)[at];
        }
        const i32* sent = b.handle<i32>(b.p.sent_row) + (u64)ahead * RANKS;
        if (READS && b.lane < RANKS) own = sent[b.lane];
        if (!READS && !EXPANDED) own = sent[b.me];
    }
    DEVICE u32 cell(const Token& token) const {
        return b.cell(b.p.by_lane ? b.lane : rank_slot(token.dest, b.me), token.t);
    }

    DEVICE bool take(Terms& terms) {
        if (ahead >= b.p.tokens) return false;
        coming.t = ahead;
        coming.part = part;
        coming.pulled = b.pulled(ahead);
        coming.dest = expert >= 0 ? expert / (i32)b.p.local_experts : -1;
        coming.row = own;
        if (READS) coming.row = warp::get(own, coming.pulled && coming.dest >= 0 ? coming.dest : (i32)b.me);
        look_up();
        const u32 group = warp::match((u32)coming.dest);
        const u32 own_lanes = warp::ballot(coming.dest == (i32)b.me);
        const bool stands = coming.dest >= 0 && (!REDUCE_FIRST || group >> b.lane == 1);
        const u32 all = warp::ballot(stands);
        coming.remote = stands && coming.dest != (i32)b.me;
        const bool several = PARTIAL && __popc(own_lanes) > 1;
        u64 row = (u64)b.x_row(coming.row < 0 ? 0 : coming.row);
        if (coming.remote && !coming.pulled) row = b.receive_row(b.me, cell(coming));
        if (several) terms.set(b.lane, row, own_lanes, all & ~own_lanes, highest(own_lanes));
        else terms.set(b.lane, row, 0, all, 0);
        terms.begin = SUMS ? b.part_begin(coming.part) : 0;
        terms.end = SUMS ? b.part_begin(coming.part + 1) : b.p.row_bytes;
        return true;
    }
    // Where rows are pulled from is known only from the announcer's word on. The link is for rows that are sent first.
    DEVICE bool find(bool wait, Terms& terms) const {
        const auto now = [&] { return sources_known(b) && arch::ld_acquire_cta_shared(&b.control.mail.live) == 0; };
        bool ok = now();
        if (!ok && wait) ok = wait_until(b.d, b.place(PHASE_ANNOUNCER, b.me, b.warp), 1, [&](u64&) { return now(); });
        if (ok && coming.remote) terms.address = b.control.sources[coming.dest].x + (u64)coming.row * b.p.row_bytes;
        return ok;
    }
    DEVICE bool ready(bool wait, Terms& terms) const {
        bool ok = true;
        if (READS && coming.pulled) {
            ok = find(wait, terms);
        } else if (coming.remote) {
            const u32 at = b.flag(cell(coming), coming.part);
            const u32* flag = b.arrived(b.me) + at;
            ok = wait ? wait_equal(b.d, b.place(PHASE_ARRIVAL, coming.dest, at), flag) : arch::ld_acquire_sys(flag) == b.epoch;
        }
        ok = warp::all(ok);
        warp::sync();
#ifdef DEEPEP_TIMELINE
        if (ok && warp::any(coming.remote)) {
            MARK_FIRST(none_arrived, b.d, C_ARRIVED_FIRST);
            MARK(b.d, C_ARRIVED_LAST);
        }
#endif
        // The copy engine reads these rows, and not ahead of the flags.
        if (ok) arch::fence_proxy_global();
        return ok;
    }
    DEVICE void begin() {
        now = coming;
        weight = 0.f;
        weighed = false;
        weigh(!READS || sources_known(b));
    }
    // Of this lane, in the first part of a token.
    DEVICE bool weights() const { return b.p.out_weights && b.lane < b.p.lanes && !(SUMS && now.part); }
    // Weights that lie here, or where rows are pulled from. Others come with the rows.
    DEVICE void weigh(bool known) {
        if (weighed || !weights()) return;
        if (now.dest == (i32)b.me) {
            weight = ((const float*)b.p.weights)[EXPANDED ? (u64)now.row : (u64)now.row * b.p.lanes + b.lane];
        } else if (READS && now.remote_pulled()) {
            if (!known) return;
            const u32* from = (const u32*)b.control.sources[now.dest].weights;
            weight = __uint_as_float(arch::ld_relaxed_sys(from + (u64)now.row * b.p.lanes + b.lane));
        }
        weighed = true;
    }
    // A rank whose rows and weights are here may write them again. Weights of the last token are not, before they are stored.
    DEVICE void loaded() {
        if (!b.p.out_weights) stop_reading(true);
    }
    DEVICE void stop_reading(bool ok) {
        if (reading) end_reading(b, ok);
        reading = false;
    }
    DEVICE bool biased() const { return b.p.bias0 != 0; }
    DEVICE void biases(Sum (&sum)[VECTORS], u32 from, u32 end) const {
#pragma unroll 1
        for (u32 i = 0; i < 2; i++) {
            const u64 bias = i ? b.p.bias1 : b.p.bias0;
            if (!bias) continue;
            const u64 row = bias + (u64)now.t * b.p.row_bytes;
#pragma unroll
            for (u32 j = 0; j < VECTORS; j++) {
                const u32 at = from + (b.lane + 32 * j) * 16;
                if (at < end) sum[j].add(arch::ld_stream((const Vec16*)(row + at)));
            }
        }
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
    DEVICE bool end() {
        MARK_FIRST(none_summed, b.d, C_SUMMED_FIRST);
        MARK(b.d, C_SUMMED_LAST);
        if (!weights()) return true;
        weigh(true);
        const u64 at = (u64)now.t * b.p.lanes + b.lane;
        // Those of other ranks came with rows that have been waited for.
        const bool came = now.dest >= 0 && now.dest != (i32)b.me && !now.pulled;
        ((float*)b.p.out_weights)[at] = came ? __uint_as_float(arch::ld_received((const u32*)b.receive_weights(b.me) + at)) : weight;
        return true;
    }
};

// Rows inside a rank: own rows to their places, and in the expanded layout rows that landed here before their places were known, and the other places of rows
// that came in.
#pragma once
#include "ops/dispatch/send.cuh"

// A row warp of a block that does not send, or (expanded) of one that is done sending.
struct Mover {
    static constexpr u32 ROWS = (MAX_TOPK + STAGE_LANES - 1) / STAGE_LANES;

    const Block& b;
    Ring& ring;
    i32 token;        // of the stage that this lane shares: an own token, or −1 for a row that came in
    i32 rows[ROWS];   // rows to store: those of the top-k lanes `lane % 8` + 8 i
    i32 from;         // lane-uniform in the stage: where a row that came in lies, the row of its first place or −1 − number where it landed
    u32 own_ticket, in_ticket;  // lane 0: drawn ahead
    bool more_own, more_in;
    i32 index;                  // of the row that is to come in next, −1: not known yet
    u32 source;                 // where it comes from
    i32 place;                  // lane k: its row there, and its weight, if they are asked for
    u32 weight;
    bool asked;
    u32 heard;                  // ranks of which a row has come in, a bit each
    u32 received, base, visits;  // lane s: tokens from rank s, and first token index
    MARK_STATE(none_stored);
    MARK_STATE(none_in);

    DEVICE Mover(const Block& block, Ring& r)
        : b(block), ring(r), token(-1), from(-1), own_ticket(0), in_ticket(0), more_own(true), more_in(EXPANDED), index(-1),
          source(0), place(-1), weight(0), asked(false), heard(0),
          received(0), base(0), visits(0) {
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) rows[i] = -1;
    }
    DEVICE bool owns(u32 s) const { return b.lane / STAGE_LANES == s; }
    DEVICE u32 lane_in_stage() const { return b.lane % STAGE_LANES; }

    DEVICE void draw_own() {
        if (b.lane == 0) own_ticket = arch::add_gpu(b.ticket(TICKET_OWN), 1);
    }
    DEVICE void draw_in() {
        if (b.lane == 0) in_ticket = arch::add_gpu(b.ticket(TICKET_INCOMING), 1);
    }
    DEVICE void load_own(u32 t) {
        if (b.lane == 0) ring.load(b, source_row(b, t), source_scales(b, t));
        if (owns(ring.next_stage())) token = (i32)t;
        ring.head++;
    }
    // Where the own token of this lane's stage goes. Stages together if they can be: one look-up waits for the one before.
    DEVICE void look_up(bool mine) {
        if (!mine) return;
        if (EXPANDED) {
            const i32* own = b.mine<i32>(b.p.own_row) + (u64)token * b.p.lanes;
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) {
                const u32 k = lane_in_stage() + i * STAGE_LANES;
                rows[i] = k < b.p.lanes ? arch::ld_received(own + k) : -1;
            }
        } else {
            rows[0] = lane_in_stage() == 0 ? arch::ld_received(b.mine<i32>(b.p.sent_row) + (u64)token * RANKS + b.me) : -1;
        }
    }
    // Next own token; −1 at the end. They are walked as senders walk them, so that a row is read from memory once and from the cache the second time.
    // Warp-uniform.
    DEVICE i32 next_own() {
        const u32 parts = b.p.own_parts;
        for (;;) {
            const u32 q = warp::get(own_ticket, 0);
            if (q / parts > b.p.tokens / parts) return -1;
            u32 token;
            draw_own();
            if (b.walk(q, parts, token)) return (i32)token;
        }
    }
    // Own rows that can be loaded before any position is known.
    DEVICE void prefetch() {
        draw_own();
        while (ring.room() && more_own) {
            const i32 t = next_own();
            if (t < 0) more_own = false;
            else load_own((u32)t);
        }
    }
    // Received tokens of each rank, from the counts in the handle.
    DEVICE void read_counts() {
        const i32* psum = b.mine<i32>(b.p.rank_psum);
        i32 upto = 0, before = 0;
        if (b.lane < RANKS) {
            upto = arch::ld_received(psum + b.lane);
            before = b.lane ? arch::ld_received(psum + b.lane - 1) : 0;
        }
        received = upto - before;
        base = before;
        u32 most = 0;
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) {
            const u32 n = warp::get(received, s);
            if (s != b.me && n > most) most = n;
        }
        const u32 parts = b.p.senders;
        visits = (most + parts - 1) / parts * parts * (RANKS - 1);
    }
    // Token index of visit v (−1 if that visit is empty), and its source. Visits alternate over sources and walk the parts of a source side by side, as
    // its blocks send them.
    DEVICE i32 visited(u32 v) {
        constexpr u32 PEERS = RANKS > 1 ? RANKS - 1 : 1;
        const u32 si = v % PEERS, q = v / PEERS, parts = b.p.senders, part = q % parts, at = q / parts;
        source = si + (si >= b.me);
        const u32 n = warp::get(received, source), first = warp::get(base, source);
        const u32 low = n * part / parts, high = n * (part + 1) / parts;
        return at < high - low ? (i32)(first + low + at) : -1;
    }
    // Where a rank's row number `slot` landed, as `from` has it.
    DEVICE i32 landed(u32 rank, u32 slot) const { return -1 - (i32)(rank * b.p.landing_slots + slot); }
    DEVICE const u8* landing(i32 at) const {
        const u32 number = (u32)(-1 - at), rank = number / b.p.landing_slots;
        return b.landing(b.me, rank, number - rank * b.p.landing_slots);
    }
    // A row that came in, and its first scale pack.
    DEVICE const u8* row_at(i32 at) const {
        return at < 0 ? landing(at) : (const u8*)(b.control.output[b.me] + b.p.rows + (u64)at * b.p.row_bytes);
    }
    DEVICE const u32* scales_at(i32 at) const {
        return at < 0 ? (const u32*)(landing(at) + b.p.row_bytes) : scale_pack(b.p, b.control.output[b.me], at, 0);
    }
    // Starts to load a row that came in, whose flag was acquired by this lane, or by a lane it has met since.
    DEVICE void load_in(i32 at) {
        if (b.lane == 0) {
            // The copy engine must not read ahead of the flag.
            arch::fence_proxy_global();
            ring.load(b, row_at(at), (const u8*)scales_at(at));
        }
        ring.head++;
    }
    // Copies scales that can't travel in bulk, for the rows of stage s.
    DEVICE void copy_scales(u32 s, i32 t) {
        const u64 output = b.control.output[b.me];
        const i32 at = warp::get(from, s * STAGE_LANES);
        const u32* given = t >= 0 ? (const u32*)source_scales(b, t) : scales_at(at);
        const i64 stride = t >= 0 ? b.p.scale_pack_stride : at < 0 ? 1 : b.p.out_scale_pack_stride;
        // Constant indices only: `rows` must stay in registers.
#pragma unroll
        for (u32 i = 0; i < (EXPANDED ? ROWS : 1); i++) {
#pragma unroll 1
            for (u32 j = 0; j < STAGE_LANES; j++) {
                const i32 row = warp::get(rows[i], s * STAGE_LANES + j);
                if (row < 0) continue;
                for (u32 p = b.lane; p < b.p.scale_packs; p += 32) {
                    const u32* one = given + (i64)p * stride;
                    const u32 v = t >= 0 ? arch::ld_stream(one) : arch::ld_received(one);
                    *scale_pack(b.p, output, row, p) = v;
                }
            }
        }
    }
    // Asks where the next row belongs, and for its weights, of lanes that live elsewhere, too.
    DEVICE void ask() {
        const u64 at = (u64)index * b.p.lanes + b.lane;
        place = -1;
        if (b.lane < b.p.lanes) {
            place = arch::ld_received(b.mine<i32>(b.p.lane_row) + at);
            if (b.p.weights) weight = arch::ld_received((const u32*)b.own_output<u32>(b.p.lane_weight) + at);
        }
    }
    // The next row to come in. Who has seen a flag of its rank may ask what it is told of it before the row itself is here: that rank had told of all its tokens
    // before its first flag.
    DEVICE void expect(u32 visit) {
        index = visited(visit);
        asked = index >= 0 && (heard >> source & 1);
        if (asked) ask();
        if (index < 0) draw_in();
    }
    // It has come: it landed in `slot` − 1, or lies in its first place (0). Writes its weights; starts to load it if it has other places.
    DEVICE void take_in(u32 slot) {
        MARK_FIRST(none_in, b.d, D_IN_FIRST);
        MARK(b.d, D_IN_LAST);
        heard |= 1u << source;
        if (!asked) ask();
        index = -1;
        i32 row = place;
        if (row >= 0 && b.p.weights) b.own_output<u32>(b.p.row_weight)[row] = weight;
        const u32 valid = warp::ballot(row >= 0), first = __ffs(valid) - 1, s = ring.next_stage();
        if (slot == 0 && __popc(valid) < 2) return;
        const i32 lies = slot == 0 ? warp::get(row, first) : landed(source, slot - 1);
        if (slot == 0 && b.lane == first) row = -1;
        i32 mine[ROWS];
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) mine[i] = warp::get(row, lane_in_stage() + i * STAGE_LANES);
        if (owns(s)) {
            arch::bulk_wait_read();
            token = -1;
            from = lies;
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) rows[i] = mine[i];
        }
        warp::sync();
        load_in(lies);
    }
    // Waits for a flag of a row. What it says, for all lanes.
    DEVICE bool wait_flag(u32 rank, u32 cell, u64& flag) {
        bool came = true;
        if (b.lane == 0)
            came = wait_until(b.d, b.place(PHASE_ARRIVAL, rank, cell), b.epoch, [&](u64& seen) {
                flag = arch::ld_acquire_sys(cell64(b.d, b.me, b.d.ready) + cell);
                seen = cell_epoch(flag);
                return seen == b.epoch;
            });
        flag = warp::get(flag, 0);
        came = warp::all(came);
        warp::sync();
        return came;
    }
    DEVICE bool store_oldest() {
        const u32 s = ring.tail % ring.count;
        const i32 t = warp::get(token, s * STAGE_LANES);
        if (b.p.scale_packs && !b.p.scales_in_bulk) copy_scales(s, t);
        if (!warp::all(ring.wait(b))) return false;
        if (owns(s)) {
#pragma unroll
            for (u32 i = 0; i < ROWS; i++)
                if (rows[i] >= 0) store_stage(b, ring.at(s), b.control.output[b.me], rows[i], b.p.keep_own != 0);
            arch::bulk_commit();
        }
        MARK_FIRST(none_stored, b.d, D_MOVED_FIRST);
        MARK(b.d, D_MOVED_LAST);
        ring.tail++;
        return true;
    }

    // `prefetched`: prefetch() was called, and tables of this rank's blocks may not be complete yet. Those that are read here a cached dispatch has
    // from an earlier one.
    DEVICE void run(bool prefetched) {
        bool ok = b.cached() || wait_tables_together(b);
        MARK(b.d, D_MOVE_START);
        if (ok) {
            if (prefetched)
                look_up(b.lane / STAGE_LANES < ring.head);
            else
                draw_own();
            if (EXPANDED) {
                read_counts();
                draw_in();
            }
        }
        while (ok) {
            if ((more_own || more_in) && ring.room()) {
                if (more_in) {
                    const u32 v = warp::get(in_ticket, 0);
                    if (v >= visits) {
                        more_in = false;
                        continue;
                    }
                    if (index < 0) {
                        expect(v);
                        if (index < 0) continue;
                    }
                    u64 flag = 0;
                    if (b.lane == 0) flag = arch::ld_acquire_sys(cell64(b.d, b.me, b.d.ready) + index);
                    flag = warp::get(flag, 0);
                    warp::sync();
                    if (cell_epoch(flag) != b.epoch && !more_own && ring.head == ring.tail) {
                        ok = wait_flag(source, index, flag);
                        if (!ok) continue;
                    }
                    if (cell_epoch(flag) == b.epoch) {
                        draw_in();
                        take_in((u32)flag);
                        continue;
                    }
                }
                if (more_own) {
                    const i32 t = next_own();
                    if (t < 0) {
                        more_own = false;
                        MARK(b.d, D_OWN_END);
                        continue;
                    }
                    const u32 s = ring.next_stage();
                    if (owns(s)) arch::bulk_wait_read();
                    warp::sync();
                    load_own((u32)t);
                    look_up(owns(s));
                    continue;
                }
            }
            if (ring.tail == ring.head) {
                if (!more_own && !more_in) break;
                continue;
            }
            ok = store_oldest();
        }
        ring.drain(b);
        arch::bulk_wait();
        MARK(b.d, D_MOVE_END);
    }
};

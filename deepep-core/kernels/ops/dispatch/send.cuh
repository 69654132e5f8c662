// Phase 4 of a sending block: rows to their destinations.
#pragma once
#include "ops/dispatch/count.cuh"

// Waits until every sending block of this rank has written its tables, or (`told`) has told other ranks of its tokens. Whole warp. In a cached dispatch
// the tables are an earlier one's, and not waited for.
DEVICE bool wait_tables(const Block& b, bool told = false) {
    bool ok = true;
    for (u32 c = b.lane; c < b.p.senders; c += 32)
        ok &= wait_until(b.d, b.place(PHASE_TABLES, b.me, c), b.epoch, [&](u64& seen) {
            seen = cell_epoch(arch::ld_acquire_gpu(b.chunk_cell(c, told)));
            return seen == b.epoch;
        });
    ok = warp::all(ok);
    warp::sync();
    return ok;
}

// Copies the scales of a token pack by pack to each destination that has a row. Lane `first_lane` + r of the warp holds rank r's row.
DEVICE void copy_scales(const Block& b, u32 token, i32 row, u32 first_lane) {
    const u32* from = (const u32*)source_scales(b, token);
    constexpr u32 BATCH = 4;
#pragma unroll 1
    for (u32 first = 0; first < b.p.scale_packs; first += 32 * BATCH) {
        const u32 p0 = first + b.lane;
        u32 v[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 pack = p0 + 32 * i;
            v[i] = pack < b.p.scale_packs ? arch::ld_stream(from + (i64)pack * b.p.scale_pack_stride) : 0;
        }
#pragma unroll 1
        for (u32 r = 0; r < RANKS; r++) {
            const i32 to = warp::get(row, first_lane + r);
            if (to < 0) continue;
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                const u32 pack = p0 + 32 * i;
                if (pack < b.p.scale_packs) *scale_pack(b.p, b.control.output[r], to, pack) = v[i];
            }
        }
    }
    warp::sync();
}

// A row warp of a sending block. The fixed part of the chunk is shared out among its row warps; the rest of all chunks is drawn. The first rows, one a
// stage, are loaded and sent before there are tables.
struct Sender {
    const Block& b;
    Ring& ring;
    u32 t0, n;          // the chunk
    u32 fixed, taken;   // fixed tokens of this warp, and how many were taken
    u32 ticket;         // lane 0: a ticket drawn ahead
    bool told;          // all blocks are known to have told other ranks of their tokens
    i32 token, row, index;  // of the stage that this lane shares; row and index at rank `lane % 8`
    MARK_STATE(unmarked);

    DEVICE Sender(const Block& block, Ring& r) : b(block), ring(r), taken(0), ticket(0), told(false), token(-1), row(-1), index(-1) {
        t0 = b.chunk(b.part);
        n = b.chunk_size(b.part);
        const u32 shared_out = b.fixed(n), w = b.p.row_warps;
        // Expanded rows of the own rank are the movers' work.
        const bool nothing = EXPANDED && RANKS == 1;
        fixed = !nothing && b.warp < shared_out ? (shared_out - b.warp + w - 1) / w : 0;
    }
    DEVICE u32 first_token(u32 i) const { return t0 + b.warp + b.p.row_warps * i; }
    // Before positions are known: loads as many rows as there are stages. What is left of it is in shared memory; `resume` takes it up.
    DEVICE void prefetch() {
        for (u32 i = 0; i < first_rows(); i++) {
            const u32 t = first_token(i);
            if (b.lane == 0) ring.load(b, source_row(b, t), source_scales(b, t));
            ring.head++;
        }
        ring.head = 0;
    }
    DEVICE u32 first_rows() const { return fixed < ring.count ? fixed : ring.count; }
    // The token in this lane's stage, or −1.
    DEVICE i32 first_token_here() const {
        const u32 s = b.lane / STAGE_LANES;
        return s < first_rows() ? (i32)first_token(s) : -1;
    }
    DEVICE void resume(i32 first_row, i32 first_index) {
        taken = ring.head = first_rows();
        token = first_token_here();
        row = first_row;
        index = first_index;
    }
    DEVICE bool owns(u32 s) const { return b.lane / STAGE_LANES == s; }
    DEVICE u32 rank() const { return b.lane % STAGE_LANES; }

    DEVICE void load(u32 t) {
        if (b.lane == 0) ring.load(b, source_row(b, t), source_scales(b, t));
        if (owns(ring.next_stage())) token = (i32)t;
        ring.head++;
    }
    // Whether rows go from here to the rank of this lane.
    DEVICE bool sends() const {
        const u32 r = rank();
        return r < RANKS && !(r == b.me && (EXPANDED || gridDim.x > b.p.senders));
    }
    // What is known before the exchange of where the first row in this lane's stage goes; and its row and index, from that and the block's base.
    DEVICE FirstPlace look_ahead() const {
        const i32 t = first_token_here();
        return first_place(b, t >= 0 && sends() ? t - t0 : EMPTY, rank());
    }
    DEVICE void place_first(const FirstPlace& place, i32& first_row, i32& first_index) const {
        if (place.index < 0) return;
        first_row = first_index = b.base()[b.p.experts + rank()] + place.index;
        if (EXPANDED) first_row = b.base()[place.row >> 16] + (i32)(place.row & 0xffff);
    }
    // The same in a cached dispatch, from the handle.
    DEVICE void look_up_first(i32& first_row, i32& first_index) {
        token = first_token_here();
        if (token < 0) return;
        look_up(b.lane / STAGE_LANES);
        first_row = row;
        first_index = index;
    }
    // Row and index of the token in stage s.
    DEVICE void look_up(u32 s) {
        if (!owns(s)) return;
        row = index = -1;
        if (!sends()) return;
        const u32 r = rank();
        row = arch::ld_received(b.mine<i32>(b.p.sent_row) + (u64)token * RANKS + r);
        if (EXPANDED) index = arch::ld_received(b.mine<i32>(b.p.sent_index) + (u64)token * RANKS + r);
    }
    // Next token of this warp; −1 at the end. Warp-uniform.
    DEVICE i32 next() {
        if (taken < fixed) return (i32)first_token(taken++);
        if (b.p.drawn == 0 || (EXPANDED && RANKS == 1)) return -1;
        const u32 senders = b.p.senders, largest = b.p.chunk_tokens + 1, longest = largest - b.fixed(largest);
        for (;;) {
            const u32 q = warp::get(ticket, 0);
            if (q / senders >= longest) return -1;
            draw();
            const u32 c = q % senders, first = b.chunk(c), size = b.chunk_size(c);
            const u32 at = b.fixed(size) + q / senders;
            if (at < size) return (i32)(first + at);
        }
    }
    DEVICE void draw() {
        if (b.lane == 0) ticket = arch::add_gpu(b.ticket(TICKET_SEND), 1);
    }
    // The stores of stage s have completed: hands the flag in. Owner lanes.
    DEVICE bool publish() {
        const bool ok = index < 0 || hand_in(b.d, b.control.mail, b.place(PHASE_ANNOUNCER, b.me, b.warp), rank() << CODE_RANK_SHIFT | index);
        index = -1;
        return ok;
    }

    // Hands the oldest row on. False if its load does not end.
    DEVICE bool send_oldest() {
        const u32 s = ring.tail % ring.count, first = s * STAGE_LANES;
        if (b.p.scale_packs && !b.p.scales_in_bulk) copy_scales(b, warp::get(token, first), row, first);
        if (!warp::all(ring.wait(b))) return false;
        if (owns(s)) {
            if (row >= 0) store_stage(b, ring.at(s), b.control.output[rank()], row, true);
            arch::bulk_commit();
        }
        ring.tail++;
        MARK_IF(ring.tail == 1, b.d, D_SENT_FIRST);
        MARK(b.d, D_SENT_LAST);
        return true;
    }
    // Expanded: a row's flag says that what its receiver is told of it has arrived, too.
    DEVICE bool may_publish() {
        told = told || wait_tables(b, true);
        MARK_FIRST(unmarked, b.d, D_TOLD_KNOWN);
        return told;
    }
    // Stage s may be loaded again: its stores have read it (plain), or have completed, and its flag is handed in (expanded).
    DEVICE bool free_stage(u32 s) {
        if (ring.head < ring.count) return true;
        bool ok = !EXPANDED || may_publish();
        if (!ok) return false;
        if (owns(s)) {
            if (EXPANDED) {
                arch::bulk_wait();
                ok = publish();
            } else {
                arch::bulk_wait_read();
            }
        }
        return warp::all(ok);
    }

    // False if not everything was sent. Not `known`: the first rows have no places yet, and nothing comes behind them.
    DEVICE bool run(bool known) {
        bool ok = true, first = true, more = true;
        if (known && b.p.drawn) draw();
        while (ok) {
            if (first && ring.tail == ring.head) {
                if (!known) break;
                // Tables say where later rows go, unless the handle does.
                first = false;
                ok = b.cached() || wait_tables(b);
                MARK(b.d, D_TABLES_KNOWN);
                continue;
            }
            if (!first && more && ring.room() && ring.head - ring.tail < b.p.ahead) {
                const i32 t = next();
                if (t < 0) {
                    more = false;
                    continue;
                }
                const u32 s = ring.next_stage();
                ok = free_stage(s);
                if (!ok) continue;
                load(t);
                look_up(s);
                continue;
            }
            if (ring.tail == ring.head) break;
            ok = send_oldest();
        }
        if (!known) return ok;
        ring.drain(b);
        if (EXPANDED) {
            ok = ok && may_publish();
            // In the order in which they were sent: what has arrived is not kept waiting for what has not.
            for (u32 i = 0; i < ring.count; i++) {
                if (owns((ring.head + i) % ring.count)) {
                    arch::bulk_wait();
                    if (ok && i + 1 < ring.count) publish();
                    else if (ok && index >= 0) announce_alone(rank() << CODE_RANK_SHIFT | index, b.epoch, [&](u32 r) { return cell32(b.d, r, b.d.ready); });
                }
                warp::sync();
            }
            if (b.lane == 0) hand_in_done(b.control.mail);
        } else {
            arch::bulk_wait();
        }
        MARK(b.d, D_SEND_END);
        return ok;
    }
};

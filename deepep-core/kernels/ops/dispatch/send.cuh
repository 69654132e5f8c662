// Phase 4 of a sending block: rows to their destinations.
#pragma once
#include "ops/dispatch/block.cuh"

// Waits until every sending block of this rank has written its tables. Whole warp.
DEVICE bool wait_tables(const Block& b) {
    bool ok = true;
    for (u32 c = b.lane; c < b.p.senders; c += 32)
        ok &= wait_until(b.d, b.place(PHASE_TABLES, b.me, c), b.epoch, [&](u64& seen) {
            seen = cell_epoch(arch::ld_acquire_gpu(b.chunk_cell(c)));
            return seen == b.epoch;
        });
    ok = warp::all(ok);
    warp::sync();
    return ok;
}

// Copies the scales of a token pack by pack to each destination that has a row. Lane `first_lane` + r of the warp holds rank r's row.
DEVICE void copy_scales(const Block& b, u32 token, i32 row, u32 first_lane) {
    const u32* from = (const u32*)source_scales(b, token);
    i32 rows[RANKS];
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) rows[r] = warp::get(row, first_lane + r);
    constexpr u32 BATCH = 4;
    for (u32 p0 = b.lane; p0 < b.p.scale_packs; p0 += 32 * BATCH) {
        u32 v[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            const u32 pack = p0 + 32 * i;
            v[i] = pack < b.p.scale_packs ? arch::ld_stream(from + (i64)pack * b.p.scale_pack_stride) : 0;
        }
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            if (rows[r] < 0) continue;
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                const u32 pack = p0 + 32 * i;
                if (pack < b.p.scale_packs) *scale_pack(b.p, b.control.output[r], rows[r], pack) = v[i];
            }
        }
    }
    warp::sync();
}

// A row warp of a sending block. The fixed part of the chunk is shared out among its row warps; the rest of all chunks is drawn.
struct Sender {
    const Block& b;
    Ring& ring;
    u32 t0, n;          // the chunk
    u32 fixed, taken;   // fixed tokens of this warp, and how many were taken
    u32 ticket;         // lane 0: a ticket drawn ahead
    bool tables;        // other blocks' tables are known to be complete
    i32 token, row, index;  // of the stage that this lane shares; row and index at rank `lane % 8`

    DEVICE Sender(const Block& block, Ring& r) : b(block), ring(r), taken(0), ticket(0), tables(false), token(-1), row(-1), index(-1) {
        t0 = b.chunk(blockIdx.x);
        n = b.chunk(blockIdx.x + 1) - t0;
        const u32 shared_out = n - n * b.p.drawn / 8, w = b.p.row_warps;
        // Expanded rows of the own rank are the movers' work.
        const bool nothing = EXPANDED && RANKS == 1;
        fixed = !nothing && b.warp < shared_out ? (shared_out - b.warp + w - 1) / w : 0;
    }
    DEVICE bool owns(u32 s) const { return b.lane / STAGE_LANES == s; }
    DEVICE u32 rank() const { return b.lane % STAGE_LANES; }

    DEVICE void load(u32 t) {
        if (b.lane == 0) ring.load(b, source_row(b, t), source_scales(b, t));
        if (owns(ring.next_stage())) token = (i32)t;
        ring.head++;
    }
    // Before positions are known: as many rows as there are stages.
    DEVICE void prefetch() {
        while (ring.room() && taken < fixed) load(t0 + b.warp + b.p.row_warps * taken++);
    }
    // Row and index of the token in stage s.
    DEVICE void look_up(u32 s) {
        if (!owns(s)) return;
        row = index = -1;
        const u32 r = rank();
        if (r >= RANKS || (r == b.me && (EXPANDED || gridDim.x > b.p.senders))) return;
        row = arch::ld_received(b.mine<i32>(b.p.sent_row) + (u64)token * RANKS + r);
        if (EXPANDED) index = arch::ld_received(b.mine<i32>(b.p.sent_index) + (u64)token * RANKS + r);
    }
    // Next token of this warp; −1 at the end, −2 if tables never came. Warp-uniform.
    DEVICE i32 next() {
        if (taken < fixed) return (i32)(t0 + b.warp + b.p.row_warps * taken++);
        if (b.p.drawn == 0 || (EXPANDED && RANKS == 1)) return -1;
        if (!tables) {
            if (!wait_tables(b)) return -2;
            tables = true;
        }
        const u32 senders = b.p.senders, longest = (b.p.tokens / senders + 1) * b.p.drawn / 8;
        for (;;) {
            const u32 q = warp::get(ticket, 0);
            if (q / senders >= longest) return -1;
            draw();
            const u32 c = q % senders, first = b.chunk(c), size = b.chunk(c + 1) - first;
            const u32 at = size - size * b.p.drawn / 8 + q / senders;
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

    // False if not everything was sent.
    DEVICE bool run() {
        bool more = true, ok = true;
        for (u32 s = 0; s < ring.head; s++) look_up(s);
        if (b.p.drawn) draw();
        while (ok) {
            if (more && ring.room()) {
                const i32 t = next();
                if (t < 0) {
                    more = false;
                    ok = t == -1;
                    continue;
                }
                const u32 s = ring.next_stage();
                if (ring.head >= ring.count) {
                    bool mine = true;
                    if (owns(s)) {
                        if (EXPANDED) {
                            arch::bulk_wait();
                            mine = publish();
                        } else {
                            arch::bulk_wait_read();
                        }
                    }
                    if (!warp::all(mine)) {
                        ok = false;
                        continue;
                    }
                }
                load(t);
                look_up(s);
                continue;
            }
            if (ring.tail == ring.head) break;
            const u32 s = ring.tail % ring.count, first = s * STAGE_LANES;
            if (b.p.scale_packs && !b.p.scales_in_bulk) copy_scales(b, warp::get(token, first), row, first);
            if (!warp::all(ring.wait(b))) {
                ok = false;
                continue;
            }
            if (owns(s)) {
                if (row >= 0) store_stage(b, ring.at(s), b.control.output[rank()], row);
                arch::bulk_commit();
            }
            ring.tail++;
        }
        ring.drain(b);
        arch::bulk_wait();
        if (EXPANDED) {
            if (ok) publish();
            warp::sync();
            if (b.lane == 0) hand_in_done(b.control.mail);
        }
        return ok;
    }
};

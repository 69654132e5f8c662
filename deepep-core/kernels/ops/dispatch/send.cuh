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

// The same for tables, by the row warps of a block. One warp looks for all of them: they would read the same few lines all at once.
DEVICE bool wait_tables_together(const Block& b) {
    if (b.warp == 0 && arch::ld_acquire_cta_shared(&b.control.known) == 0) {
        const bool ok = wait_tables(b);
        // It was 0. An addition, since tools that look for races in shared memory follow no plain store that others wait for.
        if (b.lane == 0) arch::add_release_cta_shared(&b.control.known, ok ? TABLES_THERE : TABLES_MISSING);
        // Should this warp ask again, all its lanes see it.
        warp::sync();
        return ok;
    }
    u32 known = 0;
    const bool ok = wait_until(b.d, b.place(PHASE_TABLES, b.me, blockIdx.x), TABLES_THERE, [&](u64& seen) {
        seen = known = arch::ld_acquire_cta_shared(&b.control.known);
        if (known == 0) arch::sleep_ns(20);
        return known != 0;
    });
    return warp::all(ok && known == TABLES_THERE);
}

// Copies the scales of a token pack by pack. `to`: lane `first_lane` + r of the warp has the place of the first pack on rank r, or 0.
DEVICE void copy_scales(const Block& b, u32 token, u32* to, i64 stride, u32 first_lane) {
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
            u32* const place = (u32*)warp::get((u64)to, first_lane + r);
            if (place == nullptr) continue;
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                const u32 pack = p0 + 32 * i;
                if (pack < b.p.scale_packs) place[(i64)pack * stride] = v[i];
            }
        }
    }
    warp::sync();
}

// A row warp of a sending block. The fixed part of the chunk is shared out among its row warps; the rest of all chunks is drawn. The first rows, one a
// stage, are loaded before anything is known, and sent before there are tables; in the expanded layout before their places are known: they land on the other
// ranks, who put them into their places.
struct Sender {
    const Block& b;
    Ring& ring;
    u32 t0, n;          // the chunk
    u32 fixed, taken;   // fixed tokens of this warp, and how many were taken
    u32 ticket;         // lane 0: a ticket drawn ahead
    i32 token, row, flag;  // of the stage that this lane shares; row at rank `lane % 8`, and what its flag says there (see Flag); −1: nothing

    DEVICE Sender(const Block& block, Ring& r) : b(block), ring(r), taken(0), ticket(0), token(-1), row(-1), flag(-1) {
        t0 = b.chunk(b.part);
        n = b.chunk_size(b.part);
        const u32 shared_out = b.fixed(n), w = b.p.row_warps;
        // Expanded rows of the own rank are the movers' work.
        const bool nothing = EXPANDED && RANKS == 1;
        fixed = !nothing && b.warp < shared_out ? (shared_out - b.warp + w - 1) / w : 0;
    }
    DEVICE u32 first_token(u32 i) const { return t0 + b.warp + b.p.row_warps * i; }
    // Before anything is known: loads as many rows as there are stages. They stay in shared memory; `resume` takes them up.
    DEVICE void prefetch() {
        for (u32 i = 0; i < first_rows(); i++) {
            const u32 t = first_token(i);
            if (b.lane == 0) ring.load(b, source_row(b, t), source_scales(b, t));
            ring.head++;
        }
        ring.head = 0;
    }
    DEVICE u32 first_rows() const { return fixed < ring.count ? fixed : ring.count; }
    // The first token in this lane's stage, or −1.
    DEVICE i32 first_token_here() const {
        const u32 s = b.lane / STAGE_LANES;
        return s < first_rows() ? (i32)first_token(s) : -1;
    }
    DEVICE bool lands(u32 t) const { return t - t0 < b.p.landed; }
    // Expanded, when it is known which ranks tokens go to: sends those of the first rows that may land. No permission is needed, see docs/protocol.md. False if
    // a load does not end.
    DEVICE bool land() {
        arch::fence_proxy_global();
        const u32 r = rank();
        bool ok = true;
        for (ring.tail = 0; ok && ring.tail < first_rows() && lands(first_token(ring.tail)); ring.tail++) {
            const u32 t = first_token(ring.tail), slot = t - t0;
            const bool goes = owns(ring.tail) && r < RANKS && r != b.me && (b.first_ranks()[slot] >> r & 1);
            if (b.p.scale_packs && !b.p.scales_in_bulk)
                copy_scales(b, t, goes ? (u32*)(landing(r, slot) + b.p.row_bytes) : nullptr, 1, ring.tail * STAGE_LANES);
            ok = warp::all(ring.wait(b));
            if (ok && goes) arch::bulk_store(landing(r, slot), ring.at(ring.tail), ring.row_bytes(b));
            if (owns(ring.tail)) arch::bulk_commit();
            MARK_IF(ring.tail == 0, b.d, D_LANDED_FIRST);
        }
        ring.tail = 0;
        return ok;
    }
    DEVICE u8* landing(u32 r, u32 slot) const { return b.landing(r, b.me, b.part * b.p.landed + slot); }
    // Takes up the first rows, and what is known of their places.
    DEVICE void resume(i32 first_row, i32 first_flag) {
        taken = ring.head = first_rows();
        token = first_token_here();
        row = first_row;
        flag = first_flag;
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
    // Place of the first row in this lane's stage. In a cached dispatch the handle has it, and it is asked for before peers' slots are known.
    DEVICE void look_up_first(i32& first_row, i32& first_flag) {
        resume(-1, -1);
        if (token >= 0) look_up(b.lane / STAGE_LANES);
        first_row = row;
        first_flag = flag;
    }
    // Plain, fresh: what is known before the exchange; and the row, from that and the block's base.
    DEVICE i32 look_ahead() const {
        const i32 t = first_token_here();
        return first_place(b, t >= 0 && sends() ? t - t0 : EMPTY, rank());
    }
    DEVICE i32 first_row(i32 before) const { return before < 0 ? -1 : b.base()[b.p.experts + rank()] + before; }
    // Expanded, fresh: tables say so. A row that has landed is on its way, and its flag says where it belongs.
    DEVICE void place_first() {
        look_up_first(row, flag);
        if (token < 0 || !lands((u32)token) || !sends() || rank() == b.me) return;
        if (flag >= 0) flag |= (i32)LANDED;
        row = -1;
    }
    // Row and flag of the token in stage s.
    DEVICE void look_up(u32 s) {
        if (!owns(s)) return;
        row = flag = -1;
        if (!sends()) return;
        const u32 r = rank();
        row = arch::ld_received(b.mine<i32>(b.p.sent_row) + (u64)token * RANKS + r);
        if (EXPANDED) flag = arch::ld_received(b.mine<i32>(b.p.sent_index) + (u64)token * RANKS + r);
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
    DEVICE u32 code() const { return rank() << CODE_RANK_SHIFT | (u32)flag; }
    // The stores of this lane's stage have completed: hands the flag in.
    DEVICE bool publish() {
        const bool ok = hand_in(b.d, b.control.mail, b.place(PHASE_ANNOUNCER, b.me, b.warp), code());
        flag = -1;
        return ok;
    }

    // Hands the oldest row on. False if its load does not end.
    DEVICE bool send_oldest() {
        const u32 s = ring.tail % ring.count, first = s * STAGE_LANES;
        if (b.p.scale_packs && !b.p.scales_in_bulk) {
            u32* const to = row >= 0 ? scale_pack(b.p, b.control.output[rank()], row, 0) : nullptr;
            copy_scales(b, warp::get(token, first), to, b.p.out_scale_pack_stride, first);
        }
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
    // Stage s may be loaded again: its stores have read it. If its row has a flag, they have completed, and the flag is handed in.
    DEVICE bool free_stage(u32 s) {
        if (ring.head < ring.count) return true;
        bool ok = true;
        if (owns(s)) {
            if (EXPANDED && flag >= 0) {
                arch::bulk_wait();
                ok = publish();
            } else {
                arch::bulk_wait_read();
            }
        }
        return warp::all(ok);
    }

    // Tables say where rows go, unless the handle does. Plain: later rows, expanded: the first ones, too.
    DEVICE bool wait_for_places() {
        bool ok = b.cached() || (EXPANDED ? wait_tables_together(b) : wait_tables(b));
        if (EXPANDED && ok && !b.cached()) place_first();
        MARK(b.d, D_TABLES_KNOWN);
        return ok;
    }
    // False if not everything was sent. Plain, not `known`: the first rows have no places yet, and nothing comes behind them.
    DEVICE bool run(bool known) {
        bool ok = true, first = true, more = true;
        if (known && b.p.drawn) draw();
        while (ok) {
            if (first && (EXPANDED || ring.tail == ring.head)) {
                if (!known) break;
                first = false;
                ok = wait_for_places();
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
        if (!EXPANDED) {
            arch::bulk_wait();
            MARK(b.d, D_SEND_END);
            return ok;
        }
        // A row's flag says that what its receiver is told of it has arrived, too. The announcer knows; here are the last flags of this warp.
        ok = ok && wait_tables(b, true);
        // In the order in which they were sent: what has arrived is not kept waiting for what has not.
        for (u32 i = 0; i < ring.count; i++) {
            if (owns((ring.head + i) % ring.count)) {
                arch::bulk_wait();
                if (ok && flag >= 0) {
                    if (i + 1 < ring.count) {
                        publish();
                    } else {
                        const Flag last(b, b.warp, b.lane, code());
                        arch::st_release_sys(last.cell, last.value);
                    }
                }
            }
            warp::sync();
        }
        if (b.lane == 0) hand_in_done(b.control.mail);
        MARK(b.d, D_SEND_END);
        return ok;
    }
};

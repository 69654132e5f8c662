// Rows to the owners of their tokens, as they are.
#pragma once
#include "ops/combine/block.cuh"

// Received tokens that one warp sends back. Visits alternate over peers, each in ascending token order, starting with another peer on
// every rank. Rows that are sent as they are go by ticket, since multiprocessors get very unequal shares of the link. Sums go by ticket if there are so
// many that those drawn ahead are few: they take unequal times, having unequal numbers of rows.
// What this rank has received from rank s, in lane s.
struct Received {
    u32 base, end;  // token indices

    // Whole warp. Nobody waits for it here.
    DEVICE explicit Received(const Block& b) : base(0), end(0) {
        if (b.lane >= RANKS) return;
        const i32* psum = b.handle<i32>(b.p.rank_psum);
        end = psum[b.lane];
        if (b.lane) base = psum[b.lane - 1];
    }
};

struct Worklist {
    static constexpr u32 PEERS = RANKS > 1 ? RANKS - 1 : 1;

    const Block& b;
    u32 received, base;  // lane s: tokens from rank s, and first token index
    u32 visits, step;
    u32 visit;           // the next one (drawn: lane 0)
    bool some;           // a token is being looked up:
    i32 index;           // its token index here, its rank, its entry in the handle
    u32 peer, part;
    u64 source;

    DEVICE Worklist(const Block& block, const Received& all, u32 worker, u32 workers)
        : b(block), received(all.end - all.base), base(all.base), visits(0), step(workers), visit(worker), some(false), index(-1), peer(0),
          part(0), source(0) {
        u32 most = 0;
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) {
            const u32 n = warp::get(received, s);
            if (s != b.me && n > most) most = n;
        }
        visits = most * PEERS * (SUMS ? b.p.parts : 1);
        look_up();
    }
    DEVICE bool drawn() const { return !SUMS || b.p.drawn; }
    // Each warp's first visit has its number: the first row need not wait for a ticket.
    DEVICE void advance() {
        if (!drawn()) visit += step;
        else if (b.lane == 0) visit = step + arch::add_gpu(b.ticket(TICKET_RETURN), 1);
    }
    DEVICE void look_up() {
        for (some = false; !some;) {
            u32 v = drawn() ? warp::get(visit, 0) : visit;
            if (v >= visits) return;
            advance();
            if (SUMS) {
                part = v % b.p.parts;
                v /= b.p.parts;
            }
            const u32 at = v / PEERS;
            peer = (b.me + 1 + v % PEERS) % RANKS;
            index = (i32)(warp::get(base, peer) + at);
            some = at < warp::get(received, peer);
        }
        source = b.handle<u64>(b.p.source)[index];
    }
};

// A token that goes back.
struct Returned {
    u32 peer, token, lanes, part;
    i32 index;

    // Takes the next token of a list, whose entry was loaded while the one before was at work. Whole warp.
    DEVICE bool take(Worklist& list) {
        do {
            if (!list.some) return false;
            peer = list.peer;
            index = list.index;
            part = list.part;
            token = (u32)list.source - peer * list.b.p.max_tokens;
            lanes = (u32)(list.source >> 32);
            list.look_up();
        } while (list.b.pulled(token));
        return true;
    }
};

// By the announcer warp, before anything else: no row goes to a peer that may still read the set.
DEVICE void permit(const Block& b) {
    bool ok = true;
    u64 word;
    if (b.lane < RANKS && b.lane != b.me) ok = b.begun().wait(b.lane, b.epoch - b.p.sets + 1, word);
    ok = warp::all(ok);
    warp::sync();
    if (ok && b.lane == 0) arch::st_release_cta_shared(&b.control.permitted, 1);
}
// Before a sender warp's first store. Rows may be loaded before. False after an abort.
DEVICE bool wait_permitted(const Block& b) {
    const bool ok = warp::all(wait_until(b.d, b.place(PHASE_ANNOUNCER, b.me, b.warp), 1,
                                         [&](u64&) { return arch::ld_acquire_cta_shared(&b.control.permitted) != 0; }));
    MARK(b.d, C_PERMITTED);
    arch::fence_proxy_global();
    return ok;
}

// Weights go back beside the rows: loaded with one token and stored with the next, so that nobody waits for them, and stored before any flag
// of their token is handed in. Whole warp.
struct Weights {
    const Block& b;
    float* to;
    float weight;

    DEVICE explicit Weights(const Block& block) : b(block), to(nullptr), weight(0.f) {}
    DEVICE void flush() {
        if (to) *to = weight;
        to = nullptr;
        warp::sync();
    }
    // `lanes`: whose weights go; `from`: where that of this lane lies.
    DEVICE void take(u32 peer, u32 token, u32 lanes, u64 from) {
        flush();
        if (!b.p.weights || !(lanes >> b.lane & 1)) return;
        weight = ((const float*)b.p.weights)[from];
        to = b.receive_weights(peer) + (u64)token * b.p.lanes + b.lane;
    }
};

// A sender warp. Stage s of its ring belongs to lane s, which issues the stage's load and store and waits for them.
//
// A stage is loaded again as soon as its store has read it, and the flag of a row is handed in one turn of the ring later, when its store
// has completed: the link is never waited for between two rows. The stage that is loaded next is not the one that was stored last.
struct Sender {
    const Block& b;
    u8* stage;
    u64* bars;
    u32 head, tail, count;  // rows put into stages, rows stored; number of stages
    bool loading;           // of the stage that this lane owns: a bulk load was started and not stored yet
    u32 phase;              // parity of that load
    u32 code, flag;         // flags of the row that is in the stage, and of the last row stored from it that was not handed in
    u32 box;                // mailbox of that flag; this lane has each MAX_STAGES-th of the warp's
    Weights weights;

    DEVICE Sender(const Block& block)
        : b(block), stage(block.stages + (u64)block.warp * block.p.stages * block.p.stage_bytes),
          bars(block.control.bars[block.warp]), head(0), tail(0), count(block.p.stages), loading(false), phase(0),
          code(EMPTY), flag(EMPTY), box(block.lane), weights(block) {}

    DEVICE u8* at(u32 s) const { return stage + (u64)s * b.p.stage_bytes; }

    // By one lane: the row of the flag that it keeps is complete.
    DEVICE bool publish() {
        if (flag == EMPTY) return true;
        const bool ok = hand_in(b.d, b.control.mail, b.place(PHASE_ANNOUNCER, b.me, b.warp), flag, box);
        box = (box + MAX_STAGES) % 32;
        flag = EMPTY;
        return ok;
    }
    // Lane s: the row in its stage was loaded; stores it.
    DEVICE bool store_oldest() {
        const u32 s = tail++ % count;
        bool ok = true;
        if (b.lane == s) {
            ok = wait_until(b.d, b.place(PHASE_LOCAL_COPY, b.me, s), 1,
                            [&](u64&) { return arch::mbarrier_try_wait(bars + s, phase); });
            // After an abort the load is still under way, and is waited for at the end.
            if (ok) {
                phase ^= 1;
                loading = false;
                const u32 rank = code >> CODE_RANK_SHIFT, cell = code & ((1u << CODE_RANK_SHIFT) - 1);
                arch::bulk_store((void*)b.receive_row(rank, cell), at(s), b.p.row_bytes);
                arch::bulk_commit();
            }
        }
        MARK_IF(tail == 1, b.d, C_SENT_FIRST);
        MARK(b.d, C_SENT_LAST);
        return warp::all(ok);
    }
    // After store_oldest: the row that was stored from the same stage before has completed, too; announces it. `next`: the row that was stored.
    DEVICE bool settle(u32 next) {
        bool ok = true;
        if (b.lane == (tail - 1) % count) {
            arch::bulk_wait_but(1);
            ok = publish();
            flag = next;
        }
        return warp::all(ok);
    }
    DEVICE bool send_row(const u8* row, u32 peer, u32 cell) {
        const bool full = head - tail == (count > 1 ? count - 1 : 1);
        if (full && !store_oldest()) return false;
        const u32 stored = code, s = head++ % count;
        if (b.lane == s) {
            arch::bulk_wait_read();
            arch::mbarrier_expect(bars + s, b.p.row_bytes);
            arch::bulk_load(at(s), row, b.p.row_bytes, bars + s);
            loading = true;
            code = peer << CODE_RANK_SHIFT | cell;
        }
        return !full || settle(stored);
    }
    DEVICE bool send_token(const Returned& r) {
        const u32 peer = r.peer, token = r.token, lanes = r.lanes;
        const i32 index = r.index;
        if (!EXPANDED) {
            weights.take(peer, token, lanes, (u64)index * b.p.lanes + b.lane);
            return send_row(b.x_row(index), peer, b.cell(b.p.by_lane ? highest(lanes) : rank_slot(b.me, peer), token));
        }
        i32 row = -1;
        if (lanes >> b.lane & 1) row = b.handle<i32>(b.p.lane_row)[(u64)index * b.p.lanes + b.lane];
        weights.take(peer, token, lanes, row < 0 ? 0 : row);
        for (u32 rest = lanes; rest; rest &= rest - 1) {
            const u32 k = __ffs(rest) - 1;
            if (!send_row(b.x_row(warp::get(row, k)), peer, b.cell(k, token))) return false;
            weights.flush();
        }
        return true;
    }

    DEVICE void run(const Received& received, u32 worker, u32 workers) {
        Worklist list(b, received, worker, workers);
        Returned next;
        // In the plain layout a first token is a row that is loaded and not stored: it is under way during the wait.
        bool ok = true;
        if (!EXPANDED && next.take(list)) ok = send_token(next);
        ok = ok && wait_permitted(b);
        while (ok && next.take(list)) ok = send_token(next);
        while (ok && tail != head) ok = store_oldest() && settle(code);
        if (ok) weights.flush();
        if (loading) let_end(b.d, [&] { return arch::mbarrier_try_wait(bars + b.lane, phase); });
        // The oldest row first: each is announced when it has arrived, not when all have.
        for (u32 i = 0; i < count; i++) {
            if (b.lane == (tail + i) % count) {
                arch::bulk_wait();
                if (ok && flag != EMPTY) announce_alone(flag, b.epoch, [&](u32 r) { return b.arrived(r); });
            }
            warp::sync();
        }
        if (b.lane == 0) hand_in_done(b.control.mail);
        MARK(b.d, C_SEND_END);
    }
};

// Rows to the owners of their tokens.
#pragma once
#include "ops/combine/block.cuh"
#include "ops/combine/sum.cuh"

// Received tokens that one warp sends back. Visits alternate over peers, each in ascending token order, starting with another peer on
// every rank; 32 are looked up at a time.
struct Worklist {
    static constexpr u32 PEERS = RANKS > 1 ? RANKS - 1 : 1;

    const Block& b;
    u32 received, base;     // lane s: tokens from rank s, and first token index
    u32 visit, step, visits;
    u32 left;               // lanes whose visit is still to be taken
    i32 index;              // lane: token index, peer, token at the peer, its lanes here
    u32 peer, token, lanes;

    DEVICE Worklist(const Block& block, u32 worker, u32 workers)
        : b(block), received(0), base(0), step(workers), visits(0), left(0), index(-1), peer(0), token(0), lanes(0) {
        const i32* psum = b.handle<i32>(b.p.rank_psum);
        if (b.lane < RANKS) {
            base = b.lane ? psum[b.lane - 1] : 0;
            received = psum[b.lane] - base;
        }
        u32 most = 0;
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) {
            const u32 n = warp::get(received, s);
            if (s != b.me && n > most) most = n;
        }
        visits = most * PEERS;
        visit = worker + b.lane * workers;
    }
    DEVICE void look_up() {
        const u32 at = visit / PEERS;
        peer = (b.me + 1 + visit % PEERS) % RANKS;
        const u32 n = warp::get(received, peer), first = warp::get(base, peer);
        index = visit < visits && at < n ? (i32)(first + at) : -1;
        if (index >= 0) {
            const u64 source = b.handle<u64>(b.p.source)[index];
            token = (u32)source - peer * b.p.max_tokens;
            lanes = (u32)(source >> 32);
        }
        left = warp::ballot(index >= 0);
        visit += 32 * step;
    }
    // Lane of the next token, or 32 at the end. Whole warp.
    DEVICE u32 next() {
        while (left == 0) {
            if (warp::get(visit, 0) >= visits) return 32;
            look_up();
        }
        const u32 k = __ffs(left) - 1;
        left &= left - 1;
        return k;
    }
};

// A sender warp. Stage s of its ring belongs to lane s, which issues the stage's load and store and waits for them.
struct Sender {
    const Block& b;
    u8* stage;
    u64* bars;
    u32 head, tail, count;  // rows put into stages, rows stored; number of stages
    bool loading;           // of the stage that this lane owns: a bulk load was started and not stored yet
    u32 phase;              // parity of that load
    u32 code;               // flag of the row that is in the stage
    bool stored;            // its store was started, the flag not handed in
    float* weight_at;       // a weight of the last token that is still to be stored
    float weight;

    DEVICE Sender(const Block& block)
        : b(block), stage(block.stages + (u64)block.warp * block.p.stages * block.p.stage_bytes),
          bars(block.control.bars[block.warp]), head(0), tail(0), count(block.p.stages), loading(false), phase(0),
          code(EMPTY), stored(false), weight_at(nullptr), weight(0.f) {}

    DEVICE u8* at(u32 s) const { return stage + (u64)s * b.p.stage_bytes; }

    // Weights are loaded with one token and stored with the next, so that nobody waits for them. They are stored before any flag of their
    // token is handed in.
    DEVICE void flush_weight() {
        if (weight_at) *weight_at = weight;
        weight_at = nullptr;
        warp::sync();
    }
    DEVICE void send_weight(u32 peer, u32 token, u32 lanes, u64 from) {
        if (!b.p.weights || !(lanes >> b.lane & 1)) return;
        weight = ((const float*)b.p.weights)[from];
        weight_at = b.receive_weights(peer) + (u64)token * b.p.lanes + b.lane;
    }
    DEVICE void store(u32 s) {
        arch::bulk_store((void*)b.receive_row(code >> CODE_RANK_SHIFT, code & ((1u << CODE_RANK_SHIFT) - 1)), at(s), b.p.row_bytes);
        arch::bulk_commit();
        stored = true;
    }
    // Lane s: the row in its stage was loaded; stores it.
    DEVICE bool store_oldest() {
        const u32 s = tail++ % count;
        bool ok = true;
        if (b.lane == s && loading) {
            ok = wait_until(b.d, b.place(PHASE_LOCAL_COPY, b.me, s), 1,
                            [&](u64&) { return arch::mbarrier_try_wait(bars + s, phase); });
            phase ^= 1;
            loading = false;
            if (ok) store(s);
        }
        return warp::all(ok);
    }
    // A stage whose row has left and is announced.
    DEVICE bool take_stage(u32& s) {
        if (head - tail == count && !store_oldest()) return false;
        s = head++ % count;
        bool ok = true;
        if (b.lane == s && stored) {
            arch::bulk_wait();
            stored = false;
            ok = hand_in(b.d, b.control.mail, b.place(PHASE_ANNOUNCER, b.me, b.warp), code);
        }
        return warp::all(ok);
    }
    DEVICE bool send_row(const u8* row, u32 peer, u32 cell) {
        u32 s;
        if (!take_stage(s)) return false;
        if (b.lane == s) {
            arch::mbarrier_expect(bars + s, b.p.row_bytes);
            arch::bulk_load(at(s), row, b.p.row_bytes, bars + s);
            loading = true;
            code = peer << CODE_RANK_SHIFT | cell;
        }
        return true;
    }
    // The sum of the rows whose numbers the lanes in `which` hold.
    DEVICE bool send_sum(i32 row, u32 which, u32 peer, u32 cell) {
        constexpr u32 V = 2;
        u32 s;
        if (!take_stage(s)) return false;
        const u64 address = (u64)b.x_row(row < 0 ? 0 : row);
        const u32 vectors = b.p.row_bytes / 16;
        Vec16* to = (Vec16*)at(s);
#pragma unroll 1
        for (u32 i = b.lane; i < (vectors + 31) / 32 * 32; i += 32 * V) {
            Sum sum[V];
#pragma unroll
            for (u32 j = 0; j < V; j++) sum[j].clear();
            add_rows<V, 4>(sum, address, which, i, vectors);
#pragma unroll
            for (u32 j = 0; j < V; j++)
                if (i + 32 * j < vectors) to[i + 32 * j] = sum[j].round();
        }
        // What lanes wrote, before the copy engine reads it.
        arch::fence_proxy_shared();
        warp::sync();
        if (b.lane == s) {
            code = peer << CODE_RANK_SHIFT | cell;
            store(s);
        }
        return true;
    }
    DEVICE bool send_token(u32 peer, u32 token, u32 lanes, i32 index) {
        const u32 shared = b.cell(b.p.by_lane ? highest(lanes) : rank_slot(b.me, peer), token);
        if (!EXPANDED) {
            send_weight(peer, token, lanes, (u64)index * b.p.lanes + b.lane);
            return send_row(b.x_row(index), peer, shared);
        }
        i32 row = -1;
        if (lanes >> b.lane & 1) row = b.handle<i32>(b.p.lane_row)[(u64)index * b.p.lanes + b.lane];
        send_weight(peer, token, lanes, row < 0 ? 0 : row);
        if (REDUCE_FIRST && __popc(lanes) > 1) return send_sum(row, lanes, peer, shared);
        for (u32 rest = lanes; rest; rest &= rest - 1) {
            const u32 k = __ffs(rest) - 1;
            if (!send_row(b.x_row(warp::get(row, k)), peer, REDUCE_FIRST ? shared : b.cell(k, token))) return false;
            flush_weight();
        }
        return true;
    }

    DEVICE void run(u32 worker, u32 workers) {
        bool ok = true;
        if (b.lane < RANKS && b.lane != b.me) {
            const u32* started = (const u32*)((const u8*)cell32(b.d, b.me, b.d.started) + b.lane * CELL_LINE);
            ok = wait_at_least(b.d, b.place(PHASE_STARTED, b.lane, 0), started, b.epoch - b.p.sets + 1);
        }
        ok = warp::all(ok);
        warp::sync();
        arch::fence_proxy();
        if (ok) {
            Worklist list(b, worker, workers);
            for (u32 k; ok && (k = list.next()) < 32;) {
                const u32 peer = warp::get(list.peer, k), token = warp::get(list.token, k), lanes = warp::get(list.lanes, k);
                const i32 index = warp::get(list.index, k);
                flush_weight();
                ok = send_token(peer, token, lanes, index);
            }
        }
        while (ok && tail != head) ok = store_oldest();
        flush_weight();
        if (loading) {  // after a failure: let the load end
            const u64 start = arch::now_ns();
            while (!arch::mbarrier_try_wait(bars + b.lane, phase) && arch::now_ns() - start <= b.d.timeout_ns) {
            }
        }
        arch::bulk_wait();
        if (ok && stored) hand_in(b.d, b.control.mail, b.place(PHASE_ANNOUNCER, b.me, b.warp), code);
        warp::sync();
        if (b.lane == 0) hand_in_done(b.control.mail);
    }
};

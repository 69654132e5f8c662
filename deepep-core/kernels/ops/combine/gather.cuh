// Sums of rows that lie anywhere, by one warp. The rows come in pieces by bulk loads into a ring in shared memory, several pieces ahead
// of the sum, also those of the next result: the warp waits for memory once, not once a piece.
//
// Who writes a piece of the ring: the copy engine, after the lane that starts the load has met all lanes that read the piece before
// (warp barrier) and executed a proxy fence. Who waits: all lanes, at the batch's barrier. A batch is a piece of one to `limit` rows.
//
// In the plain layout a batch has all rows of a result, and pieces are as large as fits. In the others a result may have more rows than fit, and
// the sum of a piece stays in registers from batch to batch.
#pragma once
#include "ops/combine/block.cuh"
#include "ops/combine/sum.cuh"

// Vectors of a lane that are summed at the same time.
constexpr u32 VECTORS = 4;
constexpr u32 SUM_BYTES = VECTORS * 32 * 16;
static_assert(!EXPANDED || PIECE_BYTES == SUM_BYTES, "the sum of a piece stays in registers");

// The rows of one result, in the order in which they are added. If there are several rows of the own rank whose sum is rounded for itself,
// they come first: it is a term of the result like the rows behind them, with `before` of these in front of it.
struct Terms {
    u64 address;  // a row of this lane
    i32 at;       // its number, or −1
    u32 partial;  // rows of the partial sum, or 0
    u32 rows;     // all rows
    u32 before;
    u32 begin, end;  // bytes of the rows that are summed; SUMS only, otherwise all

    // `own`: lanes whose rows make up the partial sum. `others`: lanes whose rows are terms. `stands`: lane of the partial sum.
    DEVICE void set(u32 lane, u64 row, u32 own, u32 others, u32 stands) {
        address = row;
        partial = __popc(own);
        rows = partial + __popc(others);
        before = __popc(others & warp::below(stands));
        begin = 0;
        at = own >> lane & 1      ? (i32)__popc(own & warp::below(lane))
             : others >> lane & 1 ? (i32)(partial + __popc(others & warp::below(lane)))
                                  : -1;
    }
    DEVICE u32 terms() const { return rows - partial + (partial != 0); }
};

// Walk: what is summed, and what becomes of it. Its functions are called by whole warps.
//   static constexpr bool PARTIAL: whether there are partial sums. READS: whether it is to be told when all has been loaded.
//   void loaded(): the last rows of the last result have arrived; not called if that result has none.
//   bool take(Terms&): the next result, or false at the end.
//   bool ready(bool wait, Terms&): all rows of that result are there, and its terms say where; if `wait`, false only after an abort.
//   void begin(): that result becomes the current one.
//   bool biased(): whether there are biases.
//   u32 biases(Sum (&)[VECTORS], u32 from, u32 end): adds biases to a cleared sum, bytes `from` to `end` of the row; how many.
//   bool put(u32 from, u32 end, const Vec16 (&)[VECTORS]): these bytes of the current result.
//   bool end(): of the current result.
struct Gather {
    const Block& b;
    u8* pieces;
    u64* bars;
    u32 size;              // of a piece
    u32 count, limit;      // pieces of the ring, and most rows of a batch
    u32 head, used;        // first free piece; pieces that are loading or loaded
    u32 started, ended;    // batches
    Terms next;            // the result whose rows are being loaded
    u32 from, first;       // its next batch: byte and row
    bool ahead, more;      // it is not the current one; there may be one behind it
    bool there;            // its rows from other ranks have arrived

    // The ring of `count` pieces lies `offset` bytes behind the start of the rings.
    DEVICE Gather(const Block& block, u32 offset, u32 count)
        : b(block), pieces(block.stages + block.p.rings + offset), bars(block.control.bars[block.warp]),
          size(EXPANDED ? PIECE_BYTES : block.p.piece_bytes), count(count), limit(EXPANDED ? count / 2 : RANKS), head(0), used(0), started(0),
          ended(0), from(0), first(0), ahead(false), more(true), there(false) {
        next.rows = 0;
    }

    DEVICE u32 batch(const Terms& t, u32 row) const { return t.rows - row < limit ? t.rows - row : limit; }
    DEVICE u32 end_of(const Terms& t) const { return SUMS ? t.end : b.p.row_bytes; }
    DEVICE u32 bytes(u32 byte) const { return b.p.row_bytes - byte < size ? b.p.row_bytes - byte : size; }

    // Loads as much as there is room for, up to the end of the result behind the current one. False after an abort.
    template <class Walk>
    DEVICE bool fill(Walk& walk) {
        for (;;) {
            if (next.rows == 0 || from >= end_of(next)) {
                if (ahead || !more) return true;
                more = walk.take(next);
                if (!more) {
                    next.rows = 0;
                    return true;
                }
                ahead = true;
                from = next.begin;
                first = 0;
                there = walk.ready(false, next);
                continue;
            }
            const u32 n = batch(next, first);
            if (used + n > count || started - ended == MAX_STAGES) return true;
            // Rows of a partial sum are this rank's own and need not be waited for.
            if (!there && first + n > next.partial) {
                if (started != ended) return true;
                if (!walk.ready(true, next)) return false;
                there = true;
            }
            u64* bar = bars + started % MAX_STAGES;
            const u32 length = bytes(from), at = (u32)next.at - first;
            if (b.lane == 0) arch::mbarrier_expect(bar, n * length);
            warp::sync();
            if (at < n) {
                u32 piece = head + at;
                if (piece >= count) piece -= count;
                arch::fence_proxy_shared();
                arch::bulk_load(pieces + piece * size, (const void*)(next.address + from), length, bar);
            }
            head += n;
            if (head >= count) head -= count;
            used += n;
            started++;
            first += n;
            if (first == next.rows) {
                first = 0;
                from += size;
            }
        }
    }
    // The oldest batch has arrived.
    DEVICE bool wait() const {
        const u32 s = ended % MAX_STAGES, phase = ended / MAX_STAGES & 1;
        return warp::all(wait_until(b.d, b.place(PHASE_LOCAL_COPY, b.me, s), 1,
                                    [&](u64&) { return arch::mbarrier_try_wait(bars + s, phase); }));
    }
    // After an abort: lets loads that are under way end.
    DEVICE void drain() {
        for (; ended != started; ended++)
            if (!let_end(b.d, [&] { return arch::mbarrier_try_wait(bars + ended % MAX_STAGES, ended / MAX_STAGES & 1); })) return;
    }

    DEVICE const Vec16* row(u32 slot) const { return (const Vec16*)(pieces + slot * size) + b.lane; }
    DEVICE void next_slot(u32& slot) const {
        if (++slot == count) slot = 0;
    }
    DEVICE u32 oldest_slot() const {
        const u32 slot = head + count - used;
        return slot >= count ? slot - count : slot;
    }
    // All lanes have read the oldest batch, of n rows: its pieces may be overwritten from now on.
    DEVICE void release(u32 n) {
        warp::sync();
        used -= n;
        ended++;
    }

    // One piece of the current result, from a batch of all its rows.
    template <class Walk>
    DEVICE bool piece_at_once(Walk& walk, const Terms& now, u32 at) {
        if (now.rows && (!fill(walk) || !wait())) return false;
        if constexpr (Walk::READS) {
            if (!more && started == ended + 1) walk.loaded();
        }
        const u32 first_slot = oldest_slot(), end = at + bytes(at);
        u32 second_slot = first_slot;
        next_slot(second_slot);
        const bool pair = now.rows == 2 && !walk.biased();
#pragma unroll 1
        for (u32 from = 0; from < end - at; from += SUM_BYTES) {
            Vec16 result[VECTORS];
            // Behind the end of a piece another one may be loading.
            const auto inside = [&](u32 j) { return at + from + (b.lane + 32 * j) * 16 < end; };
            if (pair) {
                const Vec16 *a = row(first_slot) + from / 16, *c = row(second_slot) + from / 16;
#pragma unroll
                for (u32 j = 0; j < VECTORS; j++) {
                    if (!inside(j)) continue;
                    const Vec16 v = a[32 * j], w = c[32 * j];
                    result[j] = {arch::bf16_add(v.x, w.x), arch::bf16_add(v.y, w.y), arch::bf16_add(v.z, w.z), arch::bf16_add(v.w, w.w)};
                }
            } else {
                Sum sum[VECTORS];
#pragma unroll
                for (u32 j = 0; j < VECTORS; j++) {
                    sum[j].clear();
                    result[j] = {0, 0, 0, 0};
                }
                const u32 biases = walk.biases(sum, at + from, end);
                u32 slot = first_slot;
#pragma unroll 1
                for (u32 i = 0; i < now.rows; i++) {
#pragma unroll
                    for (u32 j = 0; j < VECTORS; j++) {
                        if (!inside(j)) continue;
                        result[j] = row(slot)[from / 16 + 32 * j];
                        sum[j].add(result[j]);
                    }
                    next_slot(slot);
                }
                // One term and no bias: its bits. No term at all: +0.
                if (biases != 0 || now.rows > 1) {
#pragma unroll
                    for (u32 j = 0; j < VECTORS; j++) result[j] = sum[j].round();
                }
            }
            if (!walk.put(at + from, end, result)) return false;
        }
        if (now.rows) release(now.rows);
        return true;
    }

    // One piece of the current result, batch by batch.
    template <class Walk>
    DEVICE bool piece(Walk& walk, const Terms& now, u32 at) {
        const bool several = Walk::PARTIAL && now.partial != 0;
        const u32 end = at + bytes(at);
        Sum sum[VECTORS];
        Vec16 kept[VECTORS];  // the partial sum, or the last row
        u32 biases = 0, n = 0, left = 0, slot = 0;
#pragma unroll
        for (u32 j = 0; j < VECTORS; j++) {
            sum[j].clear();
            kept[j] = {0, 0, 0, 0};
        }
        if (!several) biases = walk.biases(sum, at, end);
        const auto end_partial = [&] {
#pragma unroll
            for (u32 j = 0; j < VECTORS; j++) {
                kept[j] = sum[j].round();
                sum[j].clear();
            }
            biases = walk.biases(sum, at, end);
        };
        const auto add_partial = [&] {
#pragma unroll
            for (u32 j = 0; j < VECTORS; j++) sum[j].add(kept[j]);
        };
#pragma unroll 1
        for (u32 i = 0; i < now.rows; i++) {
            if (left == 0) {
                if (!fill(walk) || !wait()) return false;
                left = n = batch(now, i);
                slot = oldest_slot();
            }
            if constexpr (Walk::PARTIAL) {
                if (several && i == now.partial) end_partial();
                if (several && i == now.partial + now.before) add_partial();
            }
#pragma unroll
            for (u32 j = 0; j < VECTORS; j++) {
                const Vec16 v = row(slot)[32 * j];
                sum[j].add(v);
                if (!several) kept[j] = v;
            }
            next_slot(slot);
            if (--left == 0) release(n);
        }
        if constexpr (Walk::PARTIAL) {
            if (several && now.rows == now.partial) end_partial();
            if (several && now.rows == now.partial + now.before) add_partial();
        }
        // One term and no bias: its bits. No term at all: +0.
        const bool copy = biases == 0 && now.terms() <= 1;
        Vec16 result[VECTORS];
#pragma unroll
        for (u32 j = 0; j < VECTORS; j++) result[j] = copy ? kept[j] : sum[j].round();
        return walk.put(at, end, result);
    }

    template <class Walk>
    DEVICE bool run(Walk& walk) {
        for (;;) {
            if (!fill(walk)) return false;
            if (!ahead) return true;
            ahead = false;
            const Terms now = next;
            walk.begin();
#pragma unroll 1
            for (u32 at = now.begin; at < end_of(now); at += size) {
                bool ok;
                if constexpr (EXPANDED) ok = piece(walk, now, at);
                else ok = piece_at_once(walk, now, at);
                if (!ok) return false;
            }
            if (!walk.end()) return false;
        }
    }
};

// Sums of rows that lie anywhere, by one warp. The rows come by bulk loads into a ring in shared memory, ahead of the sum, also those of the
// next result: the warp waits for memory once, not once a piece.
//
// A batch is a piece of every row of one result. Batches are equally large: the fewer rows, the longer their pieces. So there are few batches, and the ring is full of
// loads, whatever the number of rows.
//
// Who writes a batch's memory: the copy engine, after the lane that starts the load has met all lanes that read the batch before
// (warp barrier) and executed a proxy fence. Who waits: all lanes, at the batch's barrier.
#pragma once
#include "ops/combine/block.cuh"
#include "ops/combine/sum.cuh"

// Vectors of a lane that are summed at the same time.
constexpr u32 VECTORS = 4;
constexpr u32 SUM_BYTES = VECTORS * 32 * 16;
static_assert(PIECE_BYTES == SUM_BYTES, "a summed piece goes into one slot");
// Pieces are multiples of this, of as many rows as a result can have: of BATCH_STEP, if a batch then has all of them.
constexpr u32 PIECE_STEP = 128, BATCH_STEP = 512;

// The rows of one result, in the order in which they are added. If there are several rows of the own rank whose sum is rounded for itself,
// they come first: it is a term of the result like the rows behind them, with `before` of these in front of it.
struct Terms {
    u64 address;  // a row of this lane
    i32 at;       // its number, or −1
    u32 partial;  // rows of the partial sum, or 0
    u32 rows;     // all rows
    u32 before;
    u32 begin, end;  // bytes of the rows that are summed
    u32 length;      // of a row's pieces

    // `own`: lanes whose rows make up the partial sum. `others`: lanes whose rows are terms. `stands`: lane of the partial sum.
    DEVICE void set(u32 lane, u64 row, u32 own, u32 others, u32 stands) {
        address = row;
        partial = __popc(own);
        rows = partial + __popc(others);
        before = __popc(others & warp::below(stands));
        at = own >> lane & 1      ? (i32)__popc(own & warp::below(lane))
             : others >> lane & 1 ? (i32)(partial + __popc(others & warp::below(lane)))
                                  : -1;
    }
    // `bytes`: of a batch.
    DEVICE void divide(u32 bytes) {
        const u32 all = end - begin, most = rows ? bytes / rows : all;
        const u32 step = most < BATCH_STEP ? PIECE_STEP : BATCH_STEP, whole = most / step * step;
        // Equally long ones.
        length = most >= all ? all : ((all + (all + whole - 1) / whole - 1) / ((all + whole - 1) / whole) + step - 1) / step * step;
    }
    DEVICE u32 piece(u32 at) const { return end - at < length ? end - at : length; }
};

// Walk: what is summed, and what becomes of it. Its functions are called by whole warps.
//   static constexpr bool PARTIAL: whether there are partial sums. READS: whether it is to be told when all has been loaded.
//   void loaded(): the last rows of the last result have arrived; not called if that result has none.
//   bool take(Terms&): the next result, or false at the end.
//   bool ready(bool wait, Terms&): all rows of that result are there, and its terms say where; if `wait`, false only after an abort.
//   void begin(): that result becomes the current one.
//   bool biased(): whether there are biases.
//   void biases(Sum (&)[VECTORS], u32 from, u32 end): adds biases to a cleared sum, bytes `from` to `end` of the row, if there are any.
//   bool put(u32 from, u32 end, const Vec16 (&)[VECTORS]): these bytes of the current result, up to SUM_BYTES.
//   bool end(): of the current result.
struct Gather {
    const Block& b;
    u8* ring;
    u64* bars;
    u32 bytes, count;          // of a batch; batches in the ring
    u32 loads, sums;           // place of the next batch to be loaded, and of the oldest one
    u32 started, ended;        // batches
    Terms next;                // the result whose rows are being loaded
    u32 from;                  // its next batch
    bool some;                 // there is one
    bool ahead, more;          // it is not the current one; there may be one behind it
    bool there;                // its rows from other ranks have arrived

    // The ring lies `offset` bytes behind the start of the rings.
    DEVICE Gather(const Block& block, u32 offset, u32 count, u32 bytes)
        : b(block), ring(block.stages + block.p.rings + offset), bars(block.control.bars[block.warp]), bytes(bytes), count(count), loads(0),
          sums(0), started(0), ended(0), from(0), some(false), ahead(false), more(true), there(false) {}

    DEVICE void next_place(u32& place) const {
        if (++place == count) place = 0;
    }
    // Loads as much as there is room for, up to the end of the result behind the current one. False after an abort.
    template <class Walk>
    DEVICE bool fill(Walk& walk) {
        for (;;) {
            if (!some || next.rows == 0 || from >= next.end) {
                if (ahead || !more) return true;
                some = more = walk.take(next);
                if (!more) return true;
                next.divide(bytes);
                ahead = true;
                from = next.begin;
                there = walk.ready(false, next);
                continue;
            }
            if (started - ended == count) return true;
            if (!there) {
                if (started != ended) return true;
                if (!walk.ready(true, next)) return false;
                there = true;
            }
            u64* bar = bars + started % MAX_STAGES;
            const u32 length = next.piece(from);
            if (b.lane == 0) arch::mbarrier_expect(bar, next.rows * length);
            warp::sync();
            if (next.at >= 0) {
                arch::fence_proxy_shared();
                arch::bulk_load(ring + loads * bytes + next.at * next.length, (const void*)(next.address + from), length, bar);
            }
            next_place(loads);
            started++;
            from += next.length;
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

    // The pieces at byte `at` of the current result.
    template <class Walk>
    DEVICE bool piece(Walk& walk, const Terms& now, u32 at) {
        if (now.rows && !wait()) return false;
        if constexpr (Walk::READS) {
            if (!more && started == ended + 1) walk.loaded();
        }
        const u32 all = now.piece(at);
        const bool biased = walk.biased(), several = Walk::PARTIAL && now.partial != 0;
#pragma unroll 1
        for (u32 from = 0; from < all; from += SUM_BYTES) {
            // Of this lane, in each row; what lies behind a piece is another one's, which may be loading.
            const u8* here = ring + sums * bytes + from + b.lane * 16;
            const u32 left = all - from, end = at + from + (left < SUM_BYTES ? left : SUM_BYTES);
            const auto inside = [&](u32 j) { return b.lane * 16 + 512 * j < left; };
            Vec16 result[VECTORS];
#pragma unroll
            for (u32 j = 0; j < VECTORS; j++) result[j] = {0, 0, 0, 0};
            if (now.rows <= 2 && !biased && !several) {
                // One term: its bits. No term at all: +0.
#pragma unroll
                for (u32 j = 0; j < VECTORS; j++)
                    if (now.rows != 0 && inside(j)) result[j] = *(const Vec16*)(here + 512 * j);
#pragma unroll
                for (u32 j = 0; j < VECTORS; j++) {
                    if (now.rows != 2 || !inside(j)) continue;
                    const Vec16 v = result[j], w = *(const Vec16*)(here + now.length + 512 * j);
                    result[j] = {arch::bf16_add(v.x, w.x), arch::bf16_add(v.y, w.y), arch::bf16_add(v.z, w.z), arch::bf16_add(v.w, w.w)};
                }
            } else {
                Sum sum[VECTORS];
                Vec16 v[VECTORS];
#pragma unroll
                for (u32 j = 0; j < VECTORS; j++) {
                    sum[j].clear();
                    v[j] = {0, 0, 0, 0};
                }
#pragma unroll 1
                for (u32 i = 0;; i++, here += now.length) {
                    if (i == now.partial) {
                        if (several) {
#pragma unroll
                            for (u32 j = 0; j < VECTORS; j++) {
                                result[j] = sum[j].round();
                                sum[j].clear();
                            }
                        }
                        if (biased) walk.biases(sum, at + from, end);
                    }
                    if (several && i == now.partial + now.before) {
#pragma unroll
                        for (u32 j = 0; j < VECTORS; j++) sum[j].add(result[j]);
                    }
                    if (i == now.rows) break;
                    // All loads are under way before the first sum. What is not inside is not used.
#pragma unroll
                    for (u32 j = 0; j < VECTORS; j++)
                        if (inside(j)) v[j] = *(const Vec16*)(here + 512 * j);
#pragma unroll
                    for (u32 j = 0; j < VECTORS; j++) sum[j].add(v[j]);
                }
#pragma unroll
                for (u32 j = 0; j < VECTORS; j++) result[j] = sum[j].round();
            }
            if (!walk.put(at + from, end, result)) return false;
        }
        // All lanes have read the batch: it may be overwritten from now on.
        if (now.rows) {
            warp::sync();
            next_place(sums);
            ended++;
        }
        return true;
    }

    template <class Walk>
    DEVICE bool run(Walk& walk) {
        Terms now;
        u32 at = 0;
        bool open = false;
        now.rows = now.end = now.length = 0;
        // One place where there are loads: kernels are large enough.
#pragma unroll 1
        for (;;) {
            if (!fill(walk)) return false;
            if (!open) {
                if (!ahead) return true;
                ahead = false;
                now = next;
                at = now.begin;
                open = true;
                walk.begin();
                // The result behind it is loaded meanwhile.
                continue;
            }
            if (at < now.end && !piece(walk, now, at)) return false;
            at += now.length;
            if (at < now.end) continue;
            if (!walk.end()) return false;
            open = false;
        }
    }
};

// All-reduce: every rank gets the sum of the values of all.
//
// Sums are in FP32 and in ascending rank order, with one rounding at the end, so that every rank has the same bits; with multicast the
// switches add, in an order of their own. Three ways:
// * in cells, for small values: everybody sends everything to everybody (one-shot);
// * one-shot through stages: everybody reads everything from everybody. Best for two ranks at every size;
// * two-shot through stages: each rank sums one part and gives it to all. Every byte crosses a rank's link twice, however many ranks there are.
#include "arch/launch.cuh"
#include "comm/cells.cuh"
#include "comm/stages.cuh"
#include "common/element.cuh"

DEVICE void by_cells(const CollectiveParams& p) {
    const CellBlock b(p, OPERATION_ALL_REDUCE);
    if (!b.start()) return;
    const u32 me = b.d.rank;
    const User in(p.input, p.bytes), out(p.output, p.bytes);
    b.each(p.bytes, [&](u64 i) {
        b.send_all(i, in.load8(8 * i));
        return true;
    });
    if (!b.call.agreed()) return;
    b.each(p.bytes, [&](u64 i) {
        u32 low[RANKS], high[RANKS];
        const u64 mine = in.load8(8 * i);
        if (!b.receive(i, low, high)) return false;
        WordSum first(0 == me ? (u32)mine : low[0]), second(0 == me ? (u32)(mine >> 32) : high[0]);
#pragma unroll
        for (u32 s = 1; s < RANKS; s++) {
            first.add(s == me ? (u32)mine : low[s]);
            second.add(s == me ? (u32)(mine >> 32) : high[s]);
        }
        out.store8(8 * i, first.round(), second.round());
        return true;
    });
    b.end();
}

// Vector `i` of a chunk, summed over all ranks, in parts that can be waited for together.
struct Terms {
    Vec16 v[MULTICAST ? 1 : RANKS];
    DEVICE Vec16 sum() const {
        if constexpr (MULTICAST) return v[0];
        VectorSum sum(v[0]);
#pragma unroll
        for (u32 s = 1; s < (MULTICAST ? 1 : RANKS); s++) sum.add(v[s]);
        return sum.round();
    }
};
DEVICE Terms terms(const Stages& b, u32 chunk, u32 i) {
    Terms t;
    if constexpr (MULTICAST) {
        t.v[0] = reduced(b.on_all(chunk, 0) + i);
    } else {
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) t.v[s] = arch::ld_received(b.on(s, chunk, 0) + i);
    }
    return t;
}
constexpr u32 TERMS_DEPTH = MULTICAST ? 8 : DEPTH / 2;

DEVICE void put_in(const Stages& b, const User& in, u32 k) {
    const u64 start = b.start_of(k);
    Vec16* to = b.on(b.d.rank, k, 0);
    b.each(k, 0, b.vectors(k), in.aligned(), [&](auto how, u32 begin, u32 end) {
        const auto load = [&](u32 i) { return in.load16(how, start + 16ull * i); };
        sweep<8>(how, begin, end, load, [&](u32 i, const Vec16& v) { to[i] = v; });
    });
}

DEVICE void one_shot(const CollectiveParams& p) {
    const Stages b(p, OPERATION_ALL_REDUCE, p.bytes);
    const User in(p.input, p.bytes), out(p.output, p.bytes);
    const auto get = [&](u32 k) {
        const u64 start = b.start_of(k);
        b.each(k, 0, b.vectors(k), out.aligned(), [&](auto how, u32 begin, u32 end) {
            sweep<TERMS_DEPTH>(how, begin, end, [&](u32 i) { return terms(b, k, i); },
                               [&](u32 i, const Terms& t) { out.store16(how, start + 16ull * i, t.sum()); });
        });
    };
    b.run([&](u32 k) { put_in(b, in, k); }, get);
}

// Slot 0 of a stage holds a rank's values, slot 1 the sums: part r of a chunk is rank r's to sum.
//
// Step k + 1 says: chunk k is put in, and the own part of chunk k − 1 is summed and given to all. The last step says that nothing is read
// any more. Why four buffers suffice: put(k) comes after the wait for step k, before which every rank has summed chunk k − 2, and copied out
// chunk k − 4. sum(k − 1), which writes into the other ranks' slot 1, comes after the same wait: they have copied out chunk k − 4, and the
// buffer's last sums were of chunk k − 5.
DEVICE void two_shot(const CollectiveParams& p) {
    const Stages b(p, OPERATION_ALL_REDUCE, p.bytes);
    const u32 me = b.d.rank;
    const User in(p.input, p.bytes), out(p.output, p.bytes);
    const u32 n = b.chunks();
    if (n == 0 || !b.start()) return;
    const auto part = [&](u32 k) { return (b.vectors(k) + RANKS - 1) / RANKS; };
    const auto until = [&](u32 k, u32 r) {
        const u32 end = part(k) * (r + 1), all = b.vectors(k);
        return end < all ? end : all;
    };
    const auto sum = [&](u32 k) {
        const u64 start = b.start_of(k);
        b.each(k, part(k) * me, until(k, me), out.aligned(), [&](auto how, u32 begin, u32 end) {
            sweep<TERMS_DEPTH>(how, begin, end, [&](u32 i) { return terms(b, k, i); }, [&](u32 i, const Terms& t) {
                const Vec16 v = t.sum();
                if constexpr (MULTICAST) {
                    to_all(b.on_all(k, 1) + i, v);
                } else {
#pragma unroll
                    for (u32 r = 0; r < RANKS; r++)
                        if (r != me) b.on(r, k, 1)[i] = v;
                }
                out.store16(how, start + 16ull * i, v);
            });
        });
    };
    const auto copy_out = [&](u32 k) {
        const u64 start = b.start_of(k);
        const Vec16* from = b.on(me, k, 1);
        // All but the own part.
        const u32 mine = part(k) * me, all = b.vectors(k);
        const u32 first[2] = {0, until(k, me)}, last[2] = {mine < all ? mine : all, all};
#pragma unroll 1
        for (u32 side = 0; side < 2; side++)
            b.each(k, side ? first[1] : first[0], side ? last[1] : last[0], out.aligned(), [&](auto how, u32 begin, u32 end) {
                const auto load = [&](u32 i) { return arch::ld_received(from + i); };
                sweep<4>(how, begin, end, load, [&](u32 i, const Vec16& v) { out.store16(how, start + 16ull * i, v); });
            });
    };
    for (u32 k = 0; k <= n + 1; k++) {
        if (k > 0 && !b.wait(b.step + k)) return;
        if (k > 0 && k <= n) sum(k - 1);
        if (k < n) put_in(b, in, k);
        if (k <= n) b.signal(b.step + k + 1);
        if (k > 1) copy_out(k - 2);
    }
    b.end(b.step + n + 2);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_all_reduce(const __grid_constant__ CollectiveParams p) {
    if (p.domain.early) arch::launch_dependents();
    arch::wait_for_predecessor();
    if constexpr (CELLS) by_cells(p);
    else if constexpr (TWO_SHOT) two_shot(p);
    else one_shot(p);
}

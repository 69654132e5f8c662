// Reduce-scatter: every rank has values for all ranks, in rank order, and gets the sum of those for it.
//
// Sums are in FP32 and in ascending rank order, with one rounding at the end; with multicast the switches add, in an order of their own.
// Small values travel in cells, large ones through stages: slot d of a rank's stage holds what it has for rank d, and d reads that slot of all.
#include "arch/launch.cuh"
#include "comm/cells.cuh"
#include "comm/stages.cuh"
#include "common/element.cuh"

DEVICE User part(const CollectiveParams& p, u32 rank) { return User(p.input + rank * p.bytes, p.bytes); }

DEVICE void by_cells(const CollectiveParams& p) {
    const CellBlock b(p, OPERATION_REDUCE_SCATTER);
    if (!b.start()) return;
    const u32 me = b.d.rank;
    const User out(p.output, p.bytes);
    b.each(p.bytes, [&](u64 i) {
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            if (r != me) b.send(r, i, part(p, r).load8(8 * i));
        return true;
    });
    if (!b.call.agreed()) return;
    b.each(p.bytes, [&](u64 i) {
        u32 low[RANKS], high[RANKS];
        const u64 mine = part(p, me).load8(8 * i);
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

DEVICE void by_stages(const CollectiveParams& p) {
    const Stages b(p, OPERATION_REDUCE_SCATTER, p.bytes);
    const u32 me = b.d.rank;
    const User out(p.output, p.bytes), own = part(p, me);
    const auto put = [&](u32 k) {
        const u64 start = b.start_of(k);
        for (u32 r = 0; r < RANKS; r++) {
            // The switches need this rank's own values, too.
            if (!MULTICAST && r == me) continue;
            const User in = part(p, r);
            Vec16* to = b.on(me, k, r);
            b.each(k, 0, b.vectors(k), in.aligned(), [&](auto how, u32 begin, u32 end) {
                const auto load = [&](u32 i) { return in.load16(how, start + 16ull * i); };
                sweep<8>(how, begin, end, load, [&](u32 i, const Vec16& v) { to[i] = v; });
            });
        }
    };
    const auto get = [&](u32 k) {
        const u64 start = b.start_of(k);
        b.each(k, 0, b.vectors(k), own.aligned() && out.aligned(), [&](auto how, u32 begin, u32 end) {
            if constexpr (MULTICAST) {
                const auto load = [&](u32 i) { return reduced(b.on_all(k, me) + i); };
                sweep<8>(how, begin, end, load, [&](u32 i, const Vec16& v) { out.store16(how, start + 16ull * i, v); });
            } else {
                const auto load = [&](u32 i) {
                    OfRanks all;
#pragma unroll
                    for (u32 s = 0; s < RANKS; s++)
                        all.v[s] = s == me ? own.load16(how, start + 16ull * i) : arch::ld_received(b.on(s, k, me) + i);
                    return all;
                };
                sweep<DEPTH / 2>(how, begin, end, load, [&](u32 i, const OfRanks& all) {
                    VectorSum sum(all.v[0]);
#pragma unroll
                    for (u32 s = 1; s < RANKS; s++) sum.add(all.v[s]);
                    out.store16(how, start + 16ull * i, sum.round());
                });
            }
        });
    };
    b.run(put, get);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_reduce_scatter(const __grid_constant__ CollectiveParams p) {
    if (p.domain.early) arch::launch_dependents();
    arch::wait_for_predecessor();
    if constexpr (CELLS) by_cells(p);
    else by_stages(p);
}

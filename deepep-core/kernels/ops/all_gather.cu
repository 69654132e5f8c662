// All-gather: every rank gets the values of all, in rank order.
//
// Small values travel in cells (comm/cells.cuh), large ones through stages (comm/stages.cuh): each rank puts its chunk into a stage, and the
// others fetch it from there. With multicast one store puts it into the stages of all ranks, and each reads its own.
#include "arch/launch.cuh"
#include "comm/cells.cuh"
#include "comm/stages.cuh"
#include "common/element.cuh"

DEVICE void by_cells(const CollectiveParams& p) {
    const CellBlock b(p, OPERATION_ALL_GATHER);
    if (!b.start()) return;
    const u32 me = b.d.rank;
    const User in(p.input, p.bytes);
    b.each(p.bytes, [&](u64 i) {
        const u64 v = in.load8(8 * i);
        b.send_all(i, v);
        User(p.output + me * p.bytes, p.bytes).store8(8 * i, (u32)v, (u32)(v >> 32));
        return true;
    });
    if (!b.call.agreed()) return;
    b.each(p.bytes, [&](u64 i) {
        u32 low[RANKS], high[RANKS];
        if (!b.receive(i, low, high)) return false;
#pragma unroll
        for (u32 s = 0; s < RANKS; s++)
            if (s != me) User(p.output + s * p.bytes, p.bytes).store8(8 * i, low[s], high[s]);
        return true;
    });
    b.end();
}

DEVICE void by_stages(const CollectiveParams& p) {
    const Stages b(p, OPERATION_ALL_GATHER, p.bytes);
    const u32 me = b.d.rank;
    const User in(p.input, p.bytes), own(p.output + me * p.bytes, p.bytes);
    const auto put = [&](u32 k) {
        const u64 start = b.start_of(k);
        b.each(k, 0, b.vectors(k), in.aligned() && own.aligned(), [&](auto how, u32 begin, u32 end) {
            const auto load = [&](u32 i) { return in.load16(how, start + 16ull * i); };
            sweep<DEPTH>(how, begin, end, load, [&](u32 i, const Vec16& v) {
                if constexpr (MULTICAST) to_all(b.on_all(k, me) + i, v);
                else b.on(me, k, 0)[i] = v;
                own.store16(how, start + 16ull * i, v);
            });
        });
    };
    const auto get = [&](u32 k) {
        const u64 start = b.start_of(k);
        for (u32 j = 1; j < RANKS; j++) {
            // Everybody starts with another rank.
            const u32 s = (me + j) % RANKS;
            const Vec16* from = MULTICAST ? b.on(me, k, s) : b.on(s, k, 0);
            const User out(p.output + s * p.bytes, p.bytes);
            b.each(k, 0, b.vectors(k), out.aligned(), [&](auto how, u32 begin, u32 end) {
                const auto load = [&](u32 i) { return arch::ld_received(from + i); };
                sweep<8>(how, begin, end, load, [&](u32 i, const Vec16& v) { out.store16(how, start + 16ull * i, v); });
            });
        }
    };
    b.run(put, get);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) deepep_all_gather(const __grid_constant__ CollectiveParams p) {
    if (p.domain.early) arch::launch_dependents();
    arch::wait_for_predecessor();
    if constexpr (CELLS) by_cells(p);
    else by_stages(p);
}

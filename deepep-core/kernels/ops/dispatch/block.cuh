// What the parts of the dispatch kernel share: the block's shared memory, the lanes of a token, the ring of stages.
#pragma once
#include "arch/bulk.cuh"
#include "comm/announce.cuh"
#include "ops/dispatch/output.cuh"

// A stage belongs to eight lanes of its warp. They issue its stores, one destination (or top-k lane) each, so that the bulk groups of
// a stage can be awaited without waiting for the others.
constexpr u32 STAGE_LANES = 8;
constexpr u32 MAX_STAGES = 32 / STAGE_LANES;
// Steps of a warp whose ids and weights are loaded before the first use.
constexpr u32 AHEAD = EXPANDED ? 4 : 8;

struct Control {
    u64 bars[WARPS][MAX_STAGES];
    u64 output[MAX_RANKS];  // this call's output slot of each rank
    u64 handle[MAX_RANKS];  // and handle slot
    u32 senders[MAX_RANKS];
    i32 tokens[MAX_RANKS];  // what each rank is about to receive
    i32 rows[MAX_RANKS];
    u32 failed;             // a wait of this block gave up
    u32 over;               // lowest rank over capacity; RANKS if none is
    Mailboxes mail;
};
static_assert(sizeof(Control) <= DISPATCH_CONTROL_BYTES, "the host reserves too little shared memory");

struct Block {
    const DispatchParams& p;
    const Domain& d;
    u8* stages;
    Control& control;
    i32* base;         // [E + R] first row or token index of this block's tokens, per expert and rank
    i32* total;        // [E + R] counts of all ranks
    i32* start;        // [EL + 1] first row of each local expert
    u16* warp_counts;  // [WARPS][E + R] counts of each warp, then of the warps before it
    u32 epoch, me, lane, warp, counts;

    DEVICE Block(const DispatchParams& params, u8* shared)
        : p(params), d(params.domain), stages(shared), control(*(Control*)(shared + params.control)),
          base((i32*)(shared + params.base)), total((i32*)(shared + params.total)), start((i32*)(shared + params.start)),
          warp_counts((u16*)(shared + params.warp_counts)), epoch(0), me(params.domain.rank), lane(threadIdx.x % 32),
          warp(threadIdx.x / 32), counts(params.experts + RANKS) {}

    DEVICE bool cached() const { return p.topk_idx == 0; }
    DEVICE u32 parity() const { return epoch & 1; }
    // First token of a sending block's chunk.
    DEVICE u32 chunk(u32 block) const { return (u32)((u64)p.tokens * block / p.senders); }
    // Totals of rank s for this call, in rank r's workspace.
    DEVICE u64* totals(u32 r, u32 s) const {
        return cell64(d, r, d.totals) + (u64)(parity() * RANKS + s) * d.cells;
    }
    DEVICE u64* partials(u32 block) const { return cell64(d, me, d.partials) + (u64)block * d.cells; }
    DEVICE u64* chunk_cell(u32 block) const { return cell64(d, me, d.chunks) + block; }
    DEVICE u32* ticket(u32 kind) const {
        return (u32*)((u8*)cell32(d, me, d.tickets) + (u64)(parity() * TICKET_KINDS + kind) * CELL_LINE);
    }
    DEVICE Place place(u32 phase, u32 peer, u32 index) const {
        return {OPERATION_DISPATCH, phase, epoch, peer, index};
    }
    // This rank's handle slot.
    template <class T>
    DEVICE T* mine(u64 offset) const {
        return (T*)(d.heap[me] + p.handles + (u64)(p.place >> 8 & 0xfff) * p.handle_stride + offset);
    }
    // This rank's output slot.
    template <class T>
    DEVICE T* own_output(u64 offset) const {
        return (T*)(d.heap[me] + p.outputs + (u64)(p.place & 0xff) * p.output_stride + offset);
    }
};

// The lanes of a warp hold the top-k lanes of 32 / K tokens at a time.
struct TokenLanes {
    u32 per_step, group, k, first, mask;
    bool active;
    DEVICE TokenLanes(u32 lane, u32 topk) {
        per_step = 32 / topk;
        group = lane / topk;
        k = lane - group * topk;
        first = group * topk;
        active = group < per_step;
        mask = active ? (ALL_LANES >> (32 - topk)) << first : 0;
    }
};

// The ring of stages of a row warp. Stage i holds the rows i, i + S, …; `head` rows were loaded, `tail` were handed on.
struct Ring {
    u32 head = 0, tail = 0;
    u8* stage;
    u64* bars;
    u32 count, bytes;

    DEVICE Ring(const Block& b)
        : stage(b.stages + (u64)b.warp * b.p.stages * b.p.stage_bytes), bars(b.control.bars[b.warp]), count(b.p.stages),
          bytes(b.p.stage_bytes) {}
    DEVICE bool room() const { return head - tail < count; }
    DEVICE u32 next_stage() const { return head % count; }
    DEVICE u8* at(u32 s) const { return stage + (u64)s * bytes; }

    // By one lane: starts the load of a row (and its scales) into the next stage.
    DEVICE void load(const Block& b, const u8* row, const u8* scales) {
        const u32 s = next_stage(), extra = b.p.scales_in_bulk ? b.p.scale_packs * 4 : 0;
        arch::mbarrier_expect(bars + s, b.p.row_bytes + extra);
        arch::bulk_load(at(s), row, b.p.row_bytes, bars + s);
        if (extra) arch::bulk_load(at(s) + b.p.row_bytes, scales, extra, bars + s);
    }
    // The oldest row has arrived. Local copies end by themselves; the deadline only guards against a broken device.
    DEVICE bool wait(const Block& b) const {
        const u32 s = tail % count, phase = tail / count & 1;
        return wait_until(b.d, b.place(PHASE_LOCAL_COPY, b.me, s), 1,
                          [&](u64&) { return arch::mbarrier_try_wait(bars + s, phase); });
    }
    // Ends without handing rows on: lets loads that are under way end.
    DEVICE void drain(const Block& b) {
        for (; tail != head; tail++) {
            const u64 start = arch::now_ns();
            while (!arch::mbarrier_try_wait(bars + tail % count, tail / count & 1))
                if (arch::now_ns() - start > b.d.timeout_ns) return;
        }
    }
};

DEVICE const u8* source_row(const Block& b, u32 token) { return (const u8*)b.p.x + (u64)token * b.p.row_bytes; }
DEVICE const u8* source_scales(const Block& b, u32 token) {
    return (const u8*)b.p.scales + (i64)token * b.p.scale_row_stride * 4;
}

// By one lane: stores a stage to a row of an output slot.
DEVICE void store_stage(const Block& b, const u8* stage, u64 output, u32 row) {
    arch::bulk_store((void*)(output + b.p.rows + (u64)row * b.p.row_bytes), stage, b.p.row_bytes);
    if (b.p.scales_in_bulk) {
        const u32 bytes = b.p.scale_packs * 4;
        arch::bulk_store((void*)(output + b.p.out_scales + (u64)row * bytes), stage + b.p.row_bytes, bytes);
    }
}

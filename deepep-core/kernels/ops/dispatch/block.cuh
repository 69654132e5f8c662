// What the parts of the dispatch kernel share: the block's shared memory, who does what in it, the ring of stages.
#pragma once
#include "arch/bulk.cuh"
#include "comm/announce.cuh"
#include "ops/dispatch/output.cuh"

// A stage belongs to eight lanes of its warp. They issue its stores, one destination (or top-k lane) each, so that the bulk groups of
// a stage can be awaited without waiting for the others.
constexpr u32 STAGE_LANES = 8;
constexpr u32 MAX_STAGES = 32 / STAGE_LANES;

// The last two workers of a block have duties of their own. The closer acquires places, publishes the block's tables and says (plain) that
// its rows are there; the watcher waits for what comes from other ranks. Nobody waits for the watcher.
constexpr u32 CLOSER = WARPS - 1, WATCHER = WARPS - 2;
constexpr u32 LEAST_WORKERS = 4;
// Tokens of a chunk that are among its first, at most: one for each stage.
constexpr u32 MOST_FIRST_TOKENS = (WARPS - LEAST_WORKERS) * MAX_STAGES;

constexpr u32 TABLES_THERE = 1, TABLES_MISSING = 2;

struct Control {
    u64 bars[WARPS][MAX_STAGES];
    u64 output[MAX_RANKS];  // this call's output slot of each rank
    u64 handle[MAX_RANKS];  // and handle slot
    u32 senders[MAX_RANKS];
    i32 rows[MAX_RANKS];    // what each rank is about to receive
    u32 from[MAX_RANKS];    // what this rank is about to receive from each rank (the block of the first chunk)
    u32 to_rank[WARPS][MAX_RANKS];  // tokens for each rank that a worker counted
    u32 before[MAX_RANKS][WARPS];   // those of the workers before it
    u32 tables;             // workers that have written this rank's tables
    u32 told;               // workers that have told other ranks of their tokens
    u32 summed;             // workers (of the block of the first chunk) that have summed experts' tokens
    u32 sent;               // row warps whose stores are complete
    u32 unsent;             // row warps that could not send everything
    u32 stuck;              // whether a row warp's first rows did not come
    u32 known;              // what became of the wait for tables: 0 until it has ended, then TABLES_THERE or not
    Mailboxes mail;
};
static_assert(sizeof(Control) <= DISPATCH_CONTROL_BYTES, "the host reserves too little shared memory");

struct Block {
    const DispatchParams& p;
    const Domain& d;
    u8* const shared;
    Control& control;
    u32 epoch, me, lane, warp;
    u32 part;  // the chunk that this block sends or counts

    DEVICE Block(const DispatchParams& params, u8* memory)
        : p(params), d(params.domain), shared(memory), control(*(Control*)(memory + params.control)), epoch(0), me(params.domain.rank),
          lane(threadIdx.x % 32), warp(threadIdx.x / 32), part(blockIdx.x - (blockIdx.x < params.senders ? 0 : params.counters)) {}

    // [E + R] first row or token index of this block's tokens, per expert and rank.
    DEVICE i32* base() const { return (i32*)(shared + p.base); }
    // [E + R] counts of all ranks.
    DEVICE i32* total() const { return (i32*)(shared + p.total); }
    // [EL + 1] first row of each local expert.
    DEVICE i32* start() const { return (i32*)(shared + p.start); }
    // [WARPS][2 · pairs] tokens for each expert that a worker counted; then those of the workers before it.
    DEVICE u16* counted(u32 worker) const { return (u16*)(shared + p.worker_counts) + worker * 2 * pairs(); }
    // Of the first tokens of the chunk, one for each stage: the ranks that each goes to, a bit each.
    DEVICE u8* first_ranks() const { return shared + p.first_tokens; }
    DEVICE u32 first_tokens() const { return p.row_warps * p.stages; }
    // Experts in twos.
    DEVICE u32 pairs() const { return (p.experts + 1) / 2; }
    DEVICE bool cached() const { return p.topk_idx == 0; }
    DEVICE u32 parity() const { return epoch & 1; }
    // Blocks that send rows to other ranks, and those that count and write tables: the same, or others (expanded).
    DEVICE bool sends() const { return blockIdx.x < p.senders; }
    DEVICE bool counts() const { return blockIdx.x - p.counters < p.senders; }
    // One block says for all what the rank receives.
    DEVICE bool tells() const { return counts() && part == 0; }
    // Warps [0, row_warps) carry rows, the others are workers. A block that counts and does not send has workers only, until its tables are written.
    DEVICE bool carries() const { return warp < p.row_warps; }
    DEVICE u32 first_worker() const { return EXPANDED && !sends() ? 0 : p.row_warps; }
    DEVICE bool works() const { return warp >= first_worker(); }
    DEVICE u32 workers() const { return WARPS - first_worker(); }
    // First token and tokens of a chunk.
    DEVICE u32 chunk(u32 c) const { return p.chunk_tokens * c + (c < p.chunk_rest ? c : p.chunk_rest); }
    DEVICE u32 chunk_size(u32 c) const { return p.chunk_tokens + (c < p.chunk_rest); }
    // Token number q when all chunks are walked side by side, as senders walk theirs, or (one part) in order; false if there is none.
    DEVICE bool walk(u32 q, u32 parts, u32& token) const {
        const u32 c = q % parts, at = q / parts;
        token = (parts == 1 ? 0 : chunk(c)) + at;
        return at < (parts == 1 ? p.tokens : chunk_size(c));
    }
    // Tokens of a chunk that its own block sends: at least one for each stage.
    DEVICE u32 fixed(u32 tokens) const {
        const u32 first = p.row_warps * p.stages, rest = tokens - tokens * p.drawn / 8;
        return rest > first ? rest : first < tokens ? first : tokens;
    }
    // Totals of rank s for this call, in rank r's workspace.
    DEVICE u64* totals(u32 r, u32 s) const {
        return cell64(d, r, d.totals) + (u64)(parity() * RANKS + s) * d.cells;
    }
    // Counts of rank s's block, in rank r's workspace.
    DEVICE u64* counts(u32 r, u32 s, u32 block) const {
        return cell64(d, r, d.counts) + (u64)((parity() * RANKS + s) * MAX_SENDERS + block) * d.count_cells;
    }
    // Where a row of rank s lands on rank r, if it is sent before its place is known; its scales are behind it, one pack after the other.
    DEVICE u8* landing(u32 r, u32 s, u32 slot) const {
        const u32 source = parity() * (RANKS - 1) + rank_slot(s, r);
        return (u8*)(d.heap[r] + p.landing) + ((u64)source * p.landing_slots + slot) * p.landing_stride;
    }
    // The tables of a chunk are written; and (`told`) what other ranks are told.
    DEVICE u64* chunk_cell(u32 block, bool told) const { return cell64(d, me, d.chunks) + (told ? MAX_SENDERS : 0) + block; }
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

// The ring of stages of a row warp. Stage i holds the rows i, i + S, …; `head` rows were loaded, `tail` were handed on.
struct Ring {
    u32 head, tail;
    u8* stage;
    u64* bars;
    u32 count, bytes;

    // `moved`: rows that went through it before.
    DEVICE Ring(const Block& b, u32 moved = 0)
        : head(moved), tail(moved), stage(b.shared + (u64)b.warp * b.p.stages * b.p.stage_bytes), bars(b.control.bars[b.warp]), count(b.p.stages),
          bytes(b.p.stage_bytes) {}
    DEVICE bool room() const { return head - tail < count; }
    // By the warp, before its first load.
    DEVICE void init(u32 lane) const {
        if (lane < count) {
            arch::mbarrier_init(bars + lane);
            arch::mbarrier_init_done();
        }
        warp::sync();
    }
    DEVICE u32 next_stage() const { return head % count; }
    DEVICE u8* at(u32 s) const { return stage + (u64)s * bytes; }

    // Of a row with the scales that travel with it.
    DEVICE u32 row_bytes(const Block& b) const { return b.p.row_bytes + (b.p.scales_in_bulk ? b.p.scale_packs * 4 : 0); }

    // By one lane: starts the load of a row (and its scales) into the next stage.
    DEVICE void load(const Block& b, const u8* row, const u8* scales) {
        const u32 s = next_stage(), extra = row_bytes(b) - b.p.row_bytes;
        arch::mbarrier_expect(bars + s, row_bytes(b));
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
        for (; tail != head; tail++)
            if (!let_end(b.d, [&] { return arch::mbarrier_try_wait(bars + tail % count, tail / count & 1); })) return;
    }
};

// Sending blocks of a rank, from its place cell.
DEVICE u32 place_senders(u32 place) { return place >> 20; }

// Expanded: the flag of a row, as a row warp hands it in: the rank and the row's token index, with LANDED if it is not in its first place but has landed.
constexpr u32 LANDED = 1u << (CODE_RANK_SHIFT - 1);
struct Flag {
    u64* cell;
    u64 value;  // epoch << 32, and 0, or landing slot + 1
    // `warp`, `lane`: whose row it is.
    DEVICE Flag(const Block& b, u32 warp, u32 lane, u32 code) {
        const u32 slot = b.part * b.p.landed + warp + b.p.row_warps * (lane / STAGE_LANES);
        cell = cell64(b.d, code >> CODE_RANK_SHIFT, b.d.ready) + (code & (LANDED - 1));
        value = pack_cell(b.epoch, code & LANDED ? slot + 1 : 0);
    }
};

DEVICE const u8* source_row(const Block& b, u32 token) { return (const u8*)b.p.x + (u64)token * b.p.row_bytes; }
DEVICE const u8* source_scales(const Block& b, u32 token) {
    return (const u8*)b.p.scales + (i64)token * b.p.scale_row_stride * 4;
}

// By one lane: stores a stage to a row of an output slot. `keep`: somebody may read it soon.
DEVICE void store_stage(const Block& b, const u8* stage, u64 output, u32 row, bool keep) {
    void* to = (void*)(output + b.p.rows + (u64)row * b.p.row_bytes);
    if (keep) arch::bulk_store(to, stage, b.p.row_bytes);
    else arch::bulk_store_evict_first(to, stage, b.p.row_bytes);
    if (b.p.scales_in_bulk) {
        const u32 bytes = b.p.scale_packs * 4;
        arch::bulk_store((void*)(output + b.p.out_scales + (u64)row * bytes), stage + b.p.row_bytes, bytes);
    }
}

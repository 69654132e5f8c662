// Phase 1: what a block counts in its chunk, and what it tells other ranks of it.
#pragma once
#include "ops/dispatch/tokens.cuh"

// Reports an id that can't be, or that a lower lane has, and makes it −1. `same`: lanes of the warp with the same id.
DEVICE void check_id(const Block& b, const TokenLanes& l, u32 token, u32 same, i32& e) {
    const bool twice = comes_twice(l, same, e);
    if (e == -2 || twice) report_expert(b.p, b.epoch, e == -2 ? RECORD_BAD_EXPERT : RECORD_DUPLICATE_EXPERT, token, l.k);
    if (e < 0 || twice) e = -1;
}

// Counts experts in words of two. The order of threads does not matter.
DEVICE void count_expert(u16* counted, i32 e) {
    if (e >= 0) atomicAdd((u32*)counted + e / 2, 1u << 16 * (e % 2));
}
DEVICE void zero_counted(const Block& b, u16* counted) {
    for (u32 i = b.lane; i < b.pairs(); i += 32) ((u32*)counted)[i] = 0;
    warp::sync();
}

// What a worker of the plain layout knows of its tokens before there are positions.
struct Counted {
    static constexpr u32 ROUNDS = 32 / MAX_RANKS;
    u32 ranks = 0;  // of this lane's tokens of the first rounds, MAX_RANKS bits each
};

// Plain: a worker counts its tokens by destination. `round`: the first, on its way.
DEVICE void count_ranks(const Block& b, const TokenLanes& l, const Share& share, Round& round, Counted& counted) {
    const u32 t0 = b.chunk(b.part), tokens = round_tokens(l);
    u32 to_rank = 0;  // lane r: tokens for rank r
    u32 i = 0;
#pragma unroll 1
    for (u32 begin = share.begin; begin < share.end; begin += tokens, i++) {
        if (i > 0) load_round(b, l, begin, round);
        const u32 n = share.end - begin, ranks = ranks_of(b, l, round, n < tokens ? n : tokens), in_chunk = begin + b.lane - t0;
        if (b.lane < n && b.lane < tokens && in_chunk < b.first_tokens()) b.first_ranks()[in_chunk] = (u8)ranks;
        if (i < Counted::ROUNDS) counted.ranks |= ranks << MAX_RANKS * i;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            const u32 all = __popc(warp::ballot(ranks >> r & 1));
            if (b.lane == r) to_rank += all;
        }
    }
    if (b.lane < RANKS) b.control.to_rank[b.warp][b.lane] = to_rank;
}

// Expanded: a worker counts its tokens by destination and expert, and reports ids that can't be: whoever hears of the counts may tell the host. Where another
// block does so, it only looks at what goes where.
DEVICE void count_experts(const Block& b, const TokenLanes& l, const Share& share, Items& items) {
    u16* counted = b.counted(b.warp);
    const bool counts = b.counts();
    if (counts) zero_counted(b, counted);
    const u32 t0 = b.chunk(b.part);
    u32 to_rank = 0;  // lane r: tokens for rank r
    each_step(l, share, [&](u32 t, bool in, u32 i) {
        i32 e = given_id(b, l, share, items, t, in, i);
        const u32 same = same_expert(e, b.lane);
        // Seldom. Not in a call that some rank has left: nothing is started then.
        if (counts && warp::any(e == -2 || comes_twice(l, same, e)) && !aborted(b.d)) check_id(b, l, t, same, e);
        if (e < 0 || comes_twice(l, same, e)) e = -1;
        if (counts) count_expert(counted, e);
        const i32 dest = rank_of(b, e);
        u32 ranks = 0;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            u32 group;
            const u32 firsts = first_to(l, dest, r, b.lane, group);
            ranks |= (group != 0) << r;
            if (b.lane == r) to_rank += __popc(firsts);
        }
        const u32 in_chunk = t - t0;
        if (!in || in_chunk >= b.first_tokens()) return;
        if (l.k == 0) b.first_ranks()[in_chunk] = (u8)ranks;
    });
    if (counts && b.lane < RANKS) b.control.to_rank[b.warp][b.lane] = to_rank;
}

// Plain, when positions are known: a worker counts its tokens by expert, and writes the ids that are valid; none of them, if a rank receives too much.
DEVICE void count_later(const Block& b, const TokenLanes& l, const Share& share, Items& items, u32 over) {
    u16* counted = b.counted(b.warp);
    zero_counted(b, counted);
    each_step(l, share, [&](u32 t, bool in, u32 i) {
        i32 e = given_id(b, l, share, items, t, in, i);
        const u32 same = same_expert(e, b.lane);
        check_id(b, l, t, same, e);
        keep_id(b, l, items, t, in, i, e, over == RANKS ? e : -1);
        count_expert(counted, e);
    });
}

// Sums what the workers counted of a pair of experts, and leaves with each the sum of those before it. Two experts at once: a chunk's counts have 16 bits.
// `tell(sum)` comes first.
template <class Tell>
DEVICE void sum_pair(const Block& b, u32 pair, Tell tell) {
    const u32 first = b.first_worker();
    u32 v[WARPS], sum = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
        v[w] = w < first ? 0 : ((u32*)b.counted(w))[pair];
        sum += v[w];
    }
    tell(sum);
    sum = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
        if (w >= first) ((u32*)b.counted(w))[pair] = sum;
        sum += v[w];
    }
}

// Tells all ranks what they need for positions. Behind a block barrier.
DEVICE void publish_counts(const Block& b) {
    if (b.warp < RANKS) {
        const bool worker = b.lane >= b.first_worker() && b.lane < WARPS;
        const i32 mine = worker ? (i32)b.control.to_rank[b.lane][b.warp] : 0, upto = warp::inclusive_sum(mine, b.lane), all = warp::get(upto, 31);
        if (b.lane < RANKS) arch::st_relaxed_sys(b.counts(b.lane, b.me, b.part) + b.warp, pack_cell(b.epoch, all));
        if (worker) b.control.before[b.warp][b.lane] = upto - mine;
    }
    if (!EXPANDED) return;
    // From the last thread on: the first warps have told of ranks.
    for (u32 i = THREADS - 1 - threadIdx.x; i < b.pairs(); i += THREADS)
        sum_pair(b, i, [&](u32 sum) {
#pragma unroll
            for (u32 r = 0; r < RANKS; r++) arch::st_relaxed_sys(b.counts(r, b.me, b.part) + COUNT_PAIRS + i, pack_cell(b.epoch, sum));
        });
}

// Plain, by the workers: tells the experts' ranks how many tokens go to each.
DEVICE void publish_experts(const Block& b) {
    for (u32 i = threadIdx.x - 32 * b.p.row_warps; i < b.pairs(); i += 32 * b.workers())
        sum_pair(b, i, [&](u32 sum) {
            // Both experts of a pair, who may live on different ranks. The last one may not exist.
            const u32 r = 2 * i / b.p.local_experts, other = (2 * i + 1) / b.p.local_experts;
            arch::st_relaxed_sys(b.counts(r, b.me, b.part) + COUNT_PAIRS + i, pack_cell(b.epoch, sum));
            if (other != r && other < RANKS) arch::st_relaxed_sys(b.counts(other, b.me, b.part) + COUNT_PAIRS + i, pack_cell(b.epoch, sum));
        });
}

// Plain: where the first row of a lane's stage goes, as far as this block knows it: tokens for the same rank before it in the chunk; −1: nowhere. By a warp,
// whose lanes ask for token `in_chunk` of the first ones and rank r; EMPTY for none. The workers have met.
DEVICE i32 first_place(const Block& b, u32 in_chunk, u32 r) {
    i32 index = -1;
    const u32 low = b.first_ranks()[b.lane], high = b.lane < MOST_FIRST_TOKENS - 32 ? b.first_ranks()[32 + b.lane] : 0;
#pragma unroll
    for (u32 i = 0; i < RANKS; i++) {
        const u64 goes = (u64)warp::ballot(high >> i & 1) << 32 | warp::ballot(low >> i & 1);
        if (i != r || in_chunk == EMPTY || !(goes >> in_chunk & 1)) continue;
        const u64 before = goes & (((u64)1 << in_chunk) - 1);
        index = __popc((u32)before) + __popc((u32)(before >> 32));
    }
    return index;
}

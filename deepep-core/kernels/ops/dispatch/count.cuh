// Phase 1: what a block counts in its chunk, and what it tells other ranks of it.
#pragma once
#include "ops/dispatch/tokens.cuh"

// Which of the first rows goes where, as far as its worker knows: worker << 16 | tokens before it in the worker's share; EMPTY if it does not go
// there. Expanded, second word: expert << 16 | tokens for this expert before it in the share.
constexpr u32 FIRST_WORDS = EXPANDED ? 2 : 1;
DEVICE u32* first_row_of(const Block& b, u32 in_chunk, u32 r) { return b.first_rows() + (in_chunk * RANKS + r) * FIRST_WORDS; }

// Reports an id that can't be, or that a lower lane has, and makes it −1. `same`: lanes of the warp with the same id.
DEVICE void check_id(const Block& b, const TokenLanes& l, u32 token, u32 same, i32& e) {
    if (e == -2) report_expert(b.p, b.epoch, RECORD_BAD_EXPERT, token, l.k);
    const bool twice = e >= 0 && (same & l.mask() & warp::below(b.lane));
    if (twice) report_expert(b.p, b.epoch, RECORD_DUPLICATE_EXPERT, token, l.k);
    if (e < 0 || twice) e = -1;
}

// Counts a step's lanes by expert. Returns how many lanes with the same expert were counted before this one.
DEVICE u32 count_experts(const Block& b, u16* counted, u32 same, i32 e) {
    same &= warp::ballot(e >= 0);
    const u32 below = __popc(same & warp::below(b.lane));
    u32 before = 0;
    if (e >= 0) before = counted[e] + below;
    warp::sync();
    if (e >= 0 && below == 0) counted[e] += __popc(same);
    warp::sync();
    return before;
}

// Plain: a worker counts its tokens by destination.
DEVICE void count_ranks(const Block& b, const TokenLanes& l, const Share& share, Items& items) {
    const u32 t0 = b.chunk(blockIdx.x), first = b.p.row_warps * b.p.stages;
    u32 to_rank = 0;  // lane r: tokens for rank r
    each_steps(b, l, share, items, [&](const Steps& steps) {
        // Few tokens of a chunk are among the first.
        if (steps.begin - t0 < first) {
#pragma unroll
            for (u32 r = 0; r < RANKS; r++)
                steps.each_index(l, r, warp::get(to_rank, r), [&](u32 t, bool in, u32 group, i32 index) {
                    if (in && l.k == 0 && t - t0 < first) *first_row_of(b, t - t0, r) = group ? b.warp << 16 | (u32)index : EMPTY;
                });
        }
        to_rank += steps.number(b.lane);
    });
    if (b.lane < RANKS) b.control.to_rank[b.warp][b.lane] = to_rank;
}

// A worker counts its tokens by destination, and in the expanded layout by expert.
DEVICE void count_tokens(const Block& b, const TokenLanes& l, const Share& share, Items& items) {
    u16* counted = b.counted(b.warp);
    for (u32 i = b.lane; i < b.pairs(); i += 32) ((u32*)counted)[i] = 0;
    warp::sync();
    if (!EXPANDED) return count_ranks(b, l, share, items);
    const u32 t0 = b.chunk(blockIdx.x), first = b.p.row_warps * b.p.stages;
    u32 to_rank = 0;  // lane r: tokens for rank r
    each_step(l, share, [&](u32 t, bool in, u32 i) {
        i32 e = given_id(b, l, share, items, t, in, i);
        const u32 same = same_expert(e, b.lane);
        check_id(b, l, t, same, e);
        keep_id(b, l, items, t, in, i, e, e);
        const u32 before = count_experts(b, counted, same, e);
        const i32 dest = rank_of(b, e);
        const bool any_first = warp::any(in && t - t0 < first);
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            u32 group;
            const u32 firsts = first_to(l, dest, r, b.lane, group);
            if (any_first) {
                const u32 index = warp::get(to_rank, r) + __popc(firsts & warp::below(l.first()));
                const u32 place = warp::get((u32)e << 16 | before, group ? __ffs(group) - 1 : 0);
                if (in && l.k == 0 && t - t0 < first) {
                    u32* at = first_row_of(b, t - t0, r);
                    at[0] = group ? b.warp << 16 | index : EMPTY;
                    at[FIRST_WORDS - 1] = place;
                }
            }
            if (b.lane == r) to_rank += __popc(firsts);
        }
    });
    if (b.lane < RANKS) b.control.to_rank[b.warp][b.lane] = to_rank;
}

// Plain, when positions are known: a worker counts its tokens by expert, and writes the ids that are valid; none of them, if a rank receives too much.
DEVICE void count_later(const Block& b, const TokenLanes& l, const Share& share, Items& items, u32 over) {
    u16* counted = b.counted(b.warp);
    each_step(l, share, [&](u32 t, bool in, u32 i) {
        i32 e = given_id(b, l, share, items, t, in, i);
        const u32 same = same_expert(e, b.lane);
        check_id(b, l, t, same, e);
        keep_id(b, l, items, t, in, i, e, over == RANKS ? e : -1);
        count_experts(b, counted, same, e);
    });
}

// Sums what the workers counted at `at(w)`, and leaves with each the sum of those before it.
template <class At>
DEVICE u32 sum_workers(const Block& b, At at) {
    u32 v[WARPS], sum = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) v[w] = w < b.p.row_warps ? 0 : *at(w);
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
        if (w >= b.p.row_warps) *at(w) = sum;
        sum += v[w];
    }
    return sum;
}
// Two experts at once: a chunk's counts have 16 bits.
DEVICE u32 sum_pair(const Block& b, u32 pair) {
    return sum_workers(b, [&](u32 w) { return (u32*)b.counted(w) + pair; });
}

// Tells all ranks what they need for positions.
DEVICE void publish_counts(const Block& b) {
    for (u32 i = threadIdx.x; i < RANKS + (EXPANDED ? b.pairs() : 0); i += THREADS) {
        const u32 sum = i < RANKS ? sum_workers(b, [&](u32 w) { return &b.control.to_rank[w][i]; }) : sum_pair(b, i - RANKS);
        const u32 cell = i < RANKS ? i : COUNT_PAIRS + i - RANKS;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) arch::st_relaxed_sys(b.counts(r, b.me, blockIdx.x) + cell, pack_cell(b.epoch, sum));
    }
}

// Plain, by the workers: tells the experts' ranks how many tokens go to each.
DEVICE void publish_experts(const Block& b) {
    for (u32 i = threadIdx.x - 32 * b.p.row_warps; i < b.pairs(); i += 32 * b.workers()) {
        const u64 cell = pack_cell(b.epoch, sum_pair(b, i));
        // Both experts of a pair, who may live on different ranks. The last one may not exist.
        const u32 r = 2 * i / b.p.local_experts, other = (2 * i + 1) / b.p.local_experts;
        arch::st_relaxed_sys(b.counts(r, b.me, blockIdx.x) + COUNT_PAIRS + i, cell);
        if (other != r && other < RANKS) arch::st_relaxed_sys(b.counts(other, b.me, blockIdx.x) + COUNT_PAIRS + i, cell);
    }
}

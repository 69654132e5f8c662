// Phase 3 of a sending block: what receivers and later operations must know of each token.
#pragma once
#include "ops/dispatch/count.cuh"

// The part that belongs to an output slot: weights, and in the plain layout the receiver's expert ids. Lane k of the token's group.
DEVICE void write_output(const Block& b, u32 r, u32 index, u32 k, i32 expert, i32 dest, float weight) {
    const u64 at = (u64)index * b.p.lanes + k;
    const u64 output = b.control.output[r];
    if (b.p.weights) ((float*)(output + b.p.lane_weight))[at] = weight;
    if (!EXPANDED) {
        const i32 local = dest == (i32)r ? expert - (i32)(r * b.p.local_experts) : -1;
#if INDEX_BITS == 64
        ((i64*)(output + b.p.lane_expert))[at] = local;
#else
        ((i32*)(output + b.p.lane_expert))[at] = local;
#endif
    }
}

// Expanded: the weight of a row that stays here. Rows from other ranks get theirs when they are duplicated.
DEVICE void write_own_weight(const Block& b, i32 row, float weight) {
    if (EXPANDED && row >= 0 && b.p.weights) ((float*)(b.control.output[b.me] + b.p.row_weight))[row] = weight;
}

// A fresh dispatch: computes rows from the counts.
DEVICE void write_tables(const Block& b, const TokenLanes& l, const Share& share, const Items& items) {
    u16* seen = b.warp_counts + b.warp * b.counts;
    i32* topk = b.mine<i32>(b.p.topk);
    i32* sent_row = b.mine<i32>(b.p.sent_row);
    i32* sent_index = b.mine<i32>(b.p.sent_index);
    i32* own_row = b.mine<i32>(b.p.own_row);
    const bool over = b.control.over != RANKS;
    // Lane r: token index at rank r of the next token of this warp.
    i32 next = 0;
    if (b.lane < RANKS) next = b.base[b.p.experts + b.lane] + seen[b.p.experts + b.lane];
    u32 step = 0;
#pragma unroll 1
    for (u32 t0 = share.begin; t0 < share.end; t0 += l.per_step, step++) {
        const u32 t = t0 + l.group;
        const bool in = l.active && t < share.end;
        const u64 at = (u64)t * b.p.lanes + l.k;
        i32 e = -1;
        float weight = 0.f;
        if (step < AHEAD) {
            e = select(items.expert, step);
            weight = select(items.weight, step);
        } else if (in) {
            e = topk[at];
            weight = load_weight(b, t, l.k);
        }
        if (over) {
            e = -1;
            if (in) topk[at] = -1;
        }
        const i32 dest = e >= 0 ? e / (i32)b.p.local_experts : -1;
        i32 row = -1;
        if (EXPANDED) {
            const u32 same = same_expert(e, b.lane);
            if (e >= 0) row = b.base[e] + seen[e] + __popc(same & warp::below(b.lane));
            warp::sync();
            if (e >= 0 && (same & warp::below(b.lane)) == 0) seen[e] += __popc(same);
            warp::sync();
            const i32 own = dest == (i32)b.me ? row : -1;
            if (in) own_row[at] = own;
            write_own_weight(b, own, weight);
        }
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            u32 group;
            const u32 firsts = first_to(l, dest, r, b.lane, group);
            const i32 index = warp::get(next, r) + __popc(firsts & warp::below(l.first));
            if (b.lane == r) next += __popc(firsts);
            i32 first_row = index;
            if (EXPANDED) first_row = warp::get(row, group ? __ffs(group) - 1 : 0);
            if (!in) continue;
            if (group) {
                write_output(b, r, index, l.k, e, dest, weight);
                const u64 handle = b.control.handle[r];
                if (EXPANDED) ((i32*)(handle + b.p.lane_row))[(u64)index * b.p.lanes + l.k] = dest == (i32)r ? row : -1;
                if (l.k == 0) {
                    const u32 lanes = group >> l.first, id = b.me * b.p.max_tokens + t;
                    ((u64*)(handle + b.p.source))[index] = (u64)lanes << 32 | id;
                }
            }
            if (l.k == 0) {
                sent_row[(u64)t * RANKS + r] = group ? first_row : -1;
                if (EXPANDED) sent_index[(u64)t * RANKS + r] = group ? index : -1;
            }
        }
    }
}

// A cached dispatch: positions are in the handle, only the output slot is new.
DEVICE void write_outputs(const Block& b, const TokenLanes& l, const Share& share, const Items& items) {
    const i32* topk = b.mine<i32>(b.p.topk);
    const i32* index_of = b.mine<i32>(EXPANDED ? b.p.sent_index : b.p.sent_row);
    const i32* own_row = b.mine<i32>(b.p.own_row);
    u32 step = 0;
#pragma unroll 1
    for (u32 t0 = share.begin; t0 < share.end; t0 += l.per_step, step++) {
        const u32 t = t0 + l.group;
        const bool in = l.active && t < share.end;
        if (!in) continue;
        const u64 at = (u64)t * b.p.lanes + l.k;
        const i32 e = topk[at];
        const float weight = step < AHEAD ? select(items.weight, step) : load_weight(b, t, l.k);
        const i32 dest = e >= 0 ? e / (i32)b.p.local_experts : -1;
        if (EXPANDED) write_own_weight(b, own_row[at], weight);
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            const i32 index = index_of[(u64)t * RANKS + r];
            if (index >= 0) write_output(b, r, index, l.k, e, dest, weight);
        }
    }
}

// Phase 3, by the workers of a block that counts: what receivers and later operations must know of each token.
#pragma once
#include "ops/dispatch/exchange.cuh"

// The part that belongs to an output slot: weights, and in the plain layout the receiver's expert ids. Lane k of the token's group.
DEVICE void write_output(const Block& b, u32 r, u32 index, u32 k, i32 expert, i32 dest, float weight) {
    const u64 at = (u64)index * b.p.lanes + k;
    const u64 output = b.control.output[r];
    if (b.p.weights) ((float*)(output + b.p.lane_weight))[at] = weight;
    if (!EXPANDED) {
        const i32 local = dest == (i32)r ? expert - (i32)(r * b.p.local_experts) : -1;
        ((Id*)(output + b.p.lane_expert))[at] = local;
    }
}

// Expanded: the weight of a row that stays here. Rows from other ranks get theirs when they are duplicated.
DEVICE void write_own_weight(const Block& b, i32 row, float weight) {
    if (EXPANDED && row >= 0 && b.p.weights) ((float*)(b.control.output[b.me] + b.p.row_weight))[row] = weight;
}

// Walks the ranks with the lanes of a step: `each(r, group, index)`, group being the lanes of this lane's token that go to rank r, index the token's there.
// Lane r of `next`: token index at rank r of the next token.
template <class Each>
DEVICE void each_rank(const Block& b, const TokenLanes& l, i32 dest, i32& next, Each each) {
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) {
        u32 group;
        const u32 firsts = first_to(l, dest, r, b.lane, group);
        const i32 index = warp::get(next, r) + __popc(firsts & warp::below(l.first()));
        if (b.lane == r) next += __popc(firsts);
        each(r, group, index);
    }
}
// What lane r starts with.
DEVICE i32 first_index(const Block& b) { return b.lane < RANKS ? b.base()[b.p.experts + b.lane] + b.control.before[b.lane][b.warp] : 0; }

// Tells rank r of a token. By the lanes of the token.
DEVICE void tell_rank(const Block& b, const TokenLanes& l, u32 r, u32 group, i32 index, u32 t, i32 e, i32 dest, i32 row, float weight) {
    write_output(b, r, index, l.k, e, dest, weight);
    const u64 handle = b.control.handle[r];
    if (EXPANDED) ((i32*)(handle + b.p.lane_row))[(u64)index * b.p.lanes + l.k] = dest == (i32)r ? row : -1;
    if (l.k == 0) {
        const u32 lanes = group >> l.first(), id = b.me * b.p.max_tokens + t;
        ((u64*)(handle + b.p.source))[index] = (u64)lanes << 32 | id;
    }
}

// Plain, from what was counted: where tokens go.
DEVICE void write_rows(const Block& b, const TokenLanes& l, const Share& share, const Counted& counted, u32 over) {
    i32* sent_row = b.mine<i32>(b.p.sent_row);
    const u32 tokens = round_tokens(l);
    i32 next = first_index(b);
    u32 i = 0;
#pragma unroll 1
    for (u32 begin = share.begin; begin < share.end; begin += tokens, i++) {
        const u32 n = share.end - begin, t = begin + b.lane;
        u32 ranks = counted.ranks >> MAX_RANKS * (i % Counted::ROUNDS);
        if (i >= Counted::ROUNDS) {
            Round round;
            load_round(b, l, begin, round);
            ranks = ranks_of(b, l, round, n < tokens ? n : tokens);
        }
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            const bool goes = ranks >> r & 1;
            const u32 all = warp::ballot(goes);
            const i32 index = warp::get(next, r) + __popc(all & warp::below(b.lane));
            if (b.lane < n && b.lane < tokens) sent_row[(u64)t * RANKS + r] = goes && over == RANKS ? index : -1;
            if (b.lane == r) next += __popc(all);
        }
    }
}

// Expanded, a fresh dispatch: this rank's own tables, from the counts. Other warps wait for them, so that what other ranks are told comes afterwards, in tell_tables; but
// for steps beyond AHEAD, whose rows are not kept. Changes what the worker counted by expert.
DEVICE void write_tables(const Block& b, const TokenLanes& l, const Share& share, Items& items, u32 over, i32 (&rows)[AHEAD]) {
    u16* seen = b.counted(b.warp);
    i32* topk = b.mine<i32>(b.p.topk);
    i32* sent_row = b.mine<i32>(b.p.sent_row);
    i32* sent_index = b.mine<i32>(b.p.sent_index);
    i32* own_row = b.mine<i32>(b.p.own_row);
    i32 next = first_index(b);
    each_step(l, share, [&](u32 t, bool in, u32 i) {
        const u64 at = (u64)t * b.p.lanes + l.k;
        const bool tell = i >= AHEAD;
        u32 same;
        i32 e = valid_id(b, l, share, items, t, in, i, same);
        const float weight = tell ? weight_of(b, l, share, items, t, in, i) : 0.f;
        if (over != RANKS) e = -1;
        if (in) topk[at] = e;
        const i32 dest = rank_of(b, e);
        i32 row = -1;
        if (e >= 0) row = b.base()[e] + seen[e] + __popc(same & warp::below(b.lane));
        warp::sync();
        if (e >= 0 && (same & warp::below(b.lane)) == 0) seen[e] += __popc(same);
        warp::sync();
        const i32 own = dest == (i32)b.me ? row : -1;
        if (in) own_row[at] = own;
        if (tell) write_own_weight(b, own, weight);
#pragma unroll
        for (u32 j = 0; j < AHEAD; j++)
            if (i == j) rows[j] = row;
        each_rank(b, l, dest, next, [&](u32 r, u32 group, i32 index) {
            const i32 first_row = warp::get(row, group ? __ffs(group) - 1 : 0);
            if (!in) return;
            if (tell && group) tell_rank(b, l, r, group, index, t, e, dest, row, weight);
            if (l.k == 0) {
                sent_row[(u64)t * RANKS + r] = group ? first_row : -1;
                sent_index[(u64)t * RANKS + r] = group ? index : -1;
            }
        });
    });
}
// And what other ranks are told, this one like the others.
DEVICE void tell_tables(const Block& b, const TokenLanes& l, const Share& share, Items& items, const i32 (&rows)[AHEAD]) {
    if (EXPANDED && share.end - share.begin > AHEAD * l.per_step) {
        load_ids(b, l, share, 0, items);
        load_weights(b, l, share, 0, items);
    }
    i32 next = first_index(b);
    each_step(l, share, [&](u32 t, bool in, u32 i) {
        if (EXPANDED && i >= AHEAD) return;
        u32 same;
        const i32 e = EXPANDED ? valid_id(b, l, share, items, t, in, i, same) : kept_id(b, l, items, t, in, i);
        const float weight = weight_of(b, l, share, items, t, in, i);
        const i32 dest = rank_of(b, e), row = EXPANDED ? select(rows, i) : -1;
        write_own_weight(b, dest == (i32)b.me ? row : -1, weight);
        each_rank(b, l, dest, next, [&](u32 r, u32 group, i32 index) {
            if (in && group) tell_rank(b, l, r, group, index, t, e, dest, row, weight);
        });
    });
}

// A cached dispatch: positions are in the handle, only the output slot is new.
DEVICE void write_outputs(const Block& b, const TokenLanes& l, const Share& share, Items& items) {
    const i32* index_of = b.mine<i32>(EXPANDED ? b.p.sent_index : b.p.sent_row);
    const i32* own_row = b.mine<i32>(b.p.own_row);
    each_step(l, share, [&](u32 t, bool in, u32 i) {
        if (!in) return;
        const u64 at = (u64)t * b.p.lanes + l.k;
        const i32 e = load_valid(b, t, l.k);
        const float weight = weight_of(b, l, share, items, t, in, i);
        const i32 dest = rank_of(b, e);
        if (EXPANDED) write_own_weight(b, own_row[at], weight);
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            const i32 index = index_of[(u64)t * RANKS + r];
            if (index >= 0) write_output(b, r, index, l.k, e, dest, weight);
        }
    });
}

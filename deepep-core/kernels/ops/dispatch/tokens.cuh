// How a worker walks the tokens of its share: several at a time, their ids and weights loaded ahead.
#pragma once
#include "ops/dispatch/block.cuh"
#include "ops/dispatch/report.cuh"

// Steps of a worker whose ids and weights are loaded together; later steps, of which a usual call has none, are loaded in the same way (expanded) or one by one.
constexpr u32 AHEAD = EXPANDED ? 4 : RANKS <= 4 ? 16 : 8;

// The lanes of a warp hold the top-k lanes of 32 / K tokens at a time.
struct TokenLanes {
    u32 lane, topk, per_step, group, k;
    DEVICE TokenLanes(const Block& b) : lane(b.lane), topk(b.p.lanes), per_step(b.p.step_tokens) {
        group = lane * b.p.step_inverse >> 16;
        k = lane - group * topk;
    }
    DEVICE bool active() const { return group < per_step; }
    // The first lane of this lane's token, and all of them.
    DEVICE u32 first() const { return lane - k; }
    DEVICE u32 mask() const { return active() ? (ALL_LANES >> (32 - topk)) << first() : 0; }
};

// The tokens of one worker: of its chunk, or of the first ones of the chunk where another block counts.
struct Share {
    u32 begin, end;
    DEVICE Share(const Block& b) {
        const u32 t0 = b.chunk(b.part), w = b.warp - b.first_worker();
        u32 n = b.chunk_size(b.part), each = b.p.worker_tokens;
        if (EXPANDED && !b.counts()) {
            n = n < b.first_tokens() ? n : b.first_tokens();
            each = b.p.first_share;
        }
        begin = t0 + (w * each < n ? w * each : n);
        end = t0 + ((w + 1) * each < n ? (w + 1) * each : n);
    }
};

// Rank of an expert; −1 for none. Compared with all ranks' first ones: a division takes longer.
DEVICE i32 rank_of(const Block& b, i32 expert) {
    i32 r = expert >= 0 ? 0 : -1;
#pragma unroll
    for (u32 i = 1; i < RANKS; i++) r += expert >= (i32)(i * b.p.local_experts);
    return r;
}

// Ids of AHEAD steps on their way, as they are given: nothing may be done with them before all else is on its way.
struct Given {
    Id id[AHEAD];
};
// Ids and weights of AHEAD steps. An id is an expert, −1, or −2 for one that is out of range.
struct Items {
    i32 expert[AHEAD];
    float weight[AHEAD];
};

DEVICE float load_weight(const Block& b, u32 token, u32 k) {
    return b.p.weights ? ((const float*)b.p.weights)[(u64)token * b.p.lanes + k] : 0.f;
}

// An id that this warp has checked, or that an earlier dispatch has.
DEVICE i32 load_valid(const Block& b, u32 token, u32 k) { return b.mine<i32>(b.p.topk)[(u64)token * b.p.lanes + k]; }

template <class T>
DEVICE T select(const T (&values)[AHEAD], u32 i) {
    T v = values[0];
#pragma unroll
    for (u32 j = 1; j < AHEAD; j++)
        if (i == j) v = values[j];
    return v;
}

// Where this lane's value of step i lies in a `[tokens][K]` tensor. Steps that the share does not have name its last token: loads without a condition
// are all under way together, others wait for each other.
DEVICE u64 ahead_at(const Block& b, const TokenLanes& l, const Share& share, u32 i) {
    const u32 t = share.begin + i * l.per_step + l.group;
    return (u64)(t < share.end ? t : share.end - 1) * b.p.lanes + l.k;
}
// Whether that step has a token for this lane.
DEVICE bool ahead_in(const TokenLanes& l, const Share& share, u32 i) {
    return l.active() && share.begin + i * l.per_step + l.group < share.end;
}
DEVICE void load_given_ids(const Block& b, const TokenLanes& l, const Share& share, u32 from, Given& given) {
    if (share.begin == share.end) return;
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) given.id[i] = (Id)arch::ld_stream((const UnsignedId*)b.p.topk_idx + ahead_at(b, l, share, from + i));
}
// Those of steps that the share does not have are −1.
DEVICE void take_given_ids(const Block& b, const TokenLanes& l, const Share& share, u32 from, const Given& given, Items& items) {
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) items.expert[i] = ahead_in(l, share, from + i) ? known_expert(b.p, given.id[i]) : -1;
}
DEVICE void load_ids(const Block& b, const TokenLanes& l, const Share& share, u32 from, Items& items) {
    Given given;
    load_given_ids(b, l, share, from, given);
    take_given_ids(b, l, share, from, given, items);
}
// Of steps that the share does not have, nobody uses them.
DEVICE void load_weights(const Block& b, const TokenLanes& l, const Share& share, u32 from, Items& items) {
    if (!b.p.weights || share.begin == share.end) return;
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        items.weight[i] = __uint_as_float(arch::ld_stream((const u32*)b.p.weights + ahead_at(b, l, share, from + i)));
}

// Calls `step(token, in, number)` for all lanes of each step.
template <class Step>
DEVICE void each_step(const TokenLanes& l, const Share& share, Step step) {
    u32 i = 0;
#pragma unroll 1
    for (u32 t0 = share.begin; t0 < share.end; t0 += l.per_step, i++) {
        const u32 t = t0 + l.group;
        step(t, l.active() && t < share.end, i);
    }
}
// Whether the steps from i on have to be loaded: not the first ones, which were.
DEVICE bool reload(u32 i) { return EXPANDED && i > 0 && i % AHEAD == 0; }
// The id of a step as it was given; `keep_id` changes it in the plain layout.
DEVICE i32 given_id(const Block& b, const TokenLanes& l, const Share& share, Items& items, u32 t, bool in, u32 i) {
    if (reload(i)) load_ids(b, l, share, i, items);
    if (EXPANDED) return select(items.expert, i % AHEAD);
    return i < AHEAD ? select(items.expert, i) : in ? load_expert(b.p, t, l.k) : -1;
}
// `kept`: what the handle says of it.
DEVICE void keep_id(const Block& b, const TokenLanes& l, Items& items, u32 t, bool in, u32 i, i32 e, i32 kept) {
    if (!EXPANDED) {
#pragma unroll
        for (u32 j = 0; j < AHEAD; j++)
            if (i == j) items.expert[j] = e;
    }
    if (in) b.mine<i32>(b.p.topk)[(u64)t * b.p.lanes + l.k] = kept;
}
// Plain: the id as it was kept.
DEVICE i32 kept_id(const Block& b, const TokenLanes& l, Items& items, u32 t, bool in, u32 i) {
    return i < AHEAD ? select(items.expert, i) : in ? load_valid(b, t, l.k) : -1;
}
DEVICE float weight_of(const Block& b, const TokenLanes& l, const Share& share, Items& items, u32 t, bool in, u32 i) {
    if (reload(i)) load_weights(b, l, share, i, items);
    if (EXPANDED) return select(items.weight, i % AHEAD);
    return i < AHEAD ? select(items.weight, i) : in ? load_weight(b, t, l.k) : 0.f;
}

// Lanes of the warp with the same expert. None has an id that is no expert, or is −1.
DEVICE u32 same_expert(i32 expert, u32 lane) { return warp::match(expert >= 0 ? (u32)expert : 0x40000000u | lane); }

// Whether a lower lane of the token has this id.
DEVICE bool comes_twice(const TokenLanes& l, u32 same, i32 e) { return e >= 0 && (same & l.mask() & warp::below(l.lane)); }
// Expanded: an id as it is given, or −1 if it can't be or a lower lane of the token has it. `same`: lanes with this expert.
DEVICE i32 valid_id(const Block& b, const TokenLanes& l, const Share& share, Items& items, u32 t, bool in, u32 i, u32& same) {
    const i32 e = given_id(b, l, share, items, t, in, i);
    same = same_expert(e, b.lane);
    const bool valid = e >= 0 && !comes_twice(l, same, e);
    same &= warp::ballot(valid);
    return valid ? e : -1;
}

// Lanes of the warp that go to rank r with a token that no lower lane of the token sends there.
DEVICE u32 first_to(const TokenLanes& l, i32 dest, u32 r, u32 lane, u32& group) {
    const u32 all = warp::ballot(dest == (i32)r);
    group = all & l.mask();
    return warp::ballot(dest == (i32)r && (group & warp::below(lane)) == 0);
}

// Plain, before there are positions: the ranks that tokens go to, a bit each. Ids lie in the lanes as above, in the steps of a round of up to 32 tokens; what is
// found of token number i is lane i's.
constexpr u32 ROUND_STEPS = 8;
struct Round {
    Id id[ROUND_STEPS];
};
DEVICE u32 round_tokens(const TokenLanes& l) { return l.per_step * ROUND_STEPS < 32 ? l.per_step * ROUND_STEPS : 32; }
// Ids behind the last one are those of the last one, as in `ahead_at`.
DEVICE void load_round(const Block& b, const TokenLanes& l, u32 token, Round& round) {
    const u32 last = b.p.tokens * b.p.lanes - 1, step = l.per_step * b.p.lanes;
    u32 at = token * b.p.lanes + b.lane;
#pragma unroll
    for (u32 j = 0; j < ROUND_STEPS; j++, at += step)
        round.id[j] = (Id)arch::ld_stream((const UnsignedId*)b.p.topk_idx + (at < last ? at : last));
}
// Of a round of `tokens` tokens.
DEVICE u32 ranks_of(const Block& b, const TokenLanes& l, const Round& round, u32 tokens) {
    const u32 mask = ALL_LANES >> (32 - b.p.lanes);
    u32 place = b.lane, of_token[RANKS] = {};  // place: of this lane's token in the step
#pragma unroll
    for (u32 j = 0; j < ROUND_STEPS; j++, place -= l.per_step) {
        const u32 e = (u64)(i64)round.id[j] < b.p.experts ? (u32)round.id[j] : EMPTY, shift = place * b.p.lanes & 31;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            const u32 lanes = warp::ballot(e - r * b.p.local_experts < b.p.local_experts);
            if (place < l.per_step) of_token[r] = lanes >> shift & mask;
        }
    }
    u32 ranks = 0;
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) ranks |= (of_token[r] != 0) << r;
    return b.lane < tokens ? ranks : 0;
}

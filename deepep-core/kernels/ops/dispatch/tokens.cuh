// How a worker walks the tokens of its share: several at a time, their ids and weights loaded ahead.
#pragma once
#include "ops/dispatch/block.cuh"
#include "ops/dispatch/report.cuh"

// Steps of a worker whose ids and weights are loaded together. In the expanded layout they are loaded again when they are used again, since the exchange
// needs the registers, and later steps in the same way; in the plain layout they are held, and later steps, of which a usual call has none, loaded one by one.
constexpr u32 AHEAD = EXPANDED ? 4 : 16;

// The lanes of a warp hold the top-k lanes of 32 / K tokens at a time.
struct TokenLanes {
    u32 lane, topk, per_step, group, k;
    DEVICE TokenLanes(u32 lane, u32 topk) : lane(lane), topk(topk) {
        per_step = 32 / topk;
        group = lane / topk;
        k = lane - group * topk;
    }
    DEVICE bool active() const { return group < per_step; }
    // The first lane of this lane's token, and all of them.
    DEVICE u32 first() const { return lane - k; }
    DEVICE u32 mask() const { return active() ? (ALL_LANES >> (32 - topk)) << first() : 0; }
};

// The tokens of one worker.
struct Share {
    u32 begin, end;
    DEVICE Share(const Block& b) {
        const u32 t0 = b.chunk(blockIdx.x), n = b.chunk(blockIdx.x + 1) - t0, w = b.warp - b.p.row_warps;
        begin = t0 + n * w / b.workers();
        end = t0 + n * (w + 1) / b.workers();
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
    if (share.begin == share.end) return;
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) items.expert[i] = ahead_in(l, share, from + i) ? known_expert(b.p, given.id[i]) : -1;
}
// Again, as they were kept.
DEVICE void load_kept_ids(const Block& b, const TokenLanes& l, const Share& share, u32 from, Items& items) {
    if (share.begin == share.end) return;
    const i32* topk = b.mine<i32>(b.p.topk);
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) items.expert[i] = arch::ld_received(topk + ahead_at(b, l, share, from + i));
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (!ahead_in(l, share, from + i)) items.expert[i] = -1;
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
// The id of a step as it was given; `keep_id` changes it.
DEVICE i32 given_id(const Block& b, const TokenLanes& l, const Share& share, Items& items, u32 t, bool in, u32 i) {
    if (reload(i)) {
        Given given;
        load_given_ids(b, l, share, i, given);
        take_given_ids(b, l, share, i, given, items);
    }
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
// The id as it was kept.
DEVICE i32 kept_id(const Block& b, const TokenLanes& l, const Share& share, Items& items, u32 t, bool in, u32 i) {
    if (reload(i)) load_kept_ids(b, l, share, i, items);
    if (EXPANDED) return select(items.expert, i % AHEAD);
    return i < AHEAD ? select(items.expert, i) : in ? load_valid(b, t, l.k) : -1;
}
DEVICE float weight_of(const Block& b, const TokenLanes& l, const Share& share, Items& items, u32 t, bool in, u32 i) {
    if (reload(i)) load_weights(b, l, share, i, items);
    if (EXPANDED) return select(items.weight, i % AHEAD);
    return i < AHEAD ? select(items.weight, i) : in ? load_weight(b, t, l.k) : 0.f;
}

DEVICE u32 same_expert(i32 expert, u32 lane) { return warp::match(expert >= 0 ? (u32)expert : 0x40000000u | lane); }

// Lanes of the warp that go to rank r with a token that no lower lane of the token sends there.
DEVICE u32 first_to(const TokenLanes& l, i32 dest, u32 r, u32 lane, u32& group) {
    const u32 all = warp::ballot(dest == (i32)r);
    group = all & l.mask();
    return warp::ballot(dest == (i32)r && (group & warp::below(lane)) == 0);
}

// Plain: steps that are looked at side by side, since one behind the other each would wait for its votes.
struct Steps {
    static constexpr u32 MANY = RANKS <= 2 ? 4 : RANKS <= 4 ? 2 : 1;

    static_assert(AHEAD % MANY == 0, "steps are taken from what was loaded ahead");

    u32 begin, end, per_step;                        // first token of all, end of the share, tokens of a step
    u32 firsts[MANY][RANKS], group[MANY][RANKS];     // as of `first_to`

    // Calls `each(token, in, group, index)` for the tokens of all steps, `index` counting those that go to rank r from `index` on.
    template <class Each>
    DEVICE void each_index(const TokenLanes& l, u32 r, i32 index, Each each) const {
#pragma unroll
        for (u32 j = 0; j < MANY; j++) {
            const u32 t = begin + j * per_step + l.group;
            each(t, l.active() && t < end, group[j][r], index + (i32)__popc(firsts[j][r] & warp::below(l.first())));
            index += (i32)__popc(firsts[j][r]);
        }
    }
    // Tokens that go to rank r; 0 for others.
    DEVICE u32 number(u32 r) const {
        u32 n = 0;
#pragma unroll
        for (u32 i = 0; i < RANKS; i++)
#pragma unroll
            for (u32 j = 0; j < MANY; j++)
                if (i == r) n += __popc(firsts[j][i]);
        return n;
    }
};
// Calls `work(steps)` for all of a worker's steps, with their ids as they are.
template <class Work>
DEVICE void each_steps(const Block& b, const TokenLanes& l, const Share& share, Items& items, Work work) {
    u32 i0 = 0;
#pragma unroll 1
    for (u32 t0 = share.begin; t0 < share.end; t0 += Steps::MANY * l.per_step, i0 += Steps::MANY) {
        Steps steps;
        steps.begin = t0;
        steps.end = share.end;
        steps.per_step = l.per_step;
#pragma unroll
        for (u32 j = 0; j < Steps::MANY; j++) {
            const u32 t = t0 + j * l.per_step + l.group;
            i32 e = -1;
#pragma unroll
            for (u32 i = 0; i < AHEAD; i += Steps::MANY)
                if (i == i0) e = items.expert[i + j];
            if (i0 >= AHEAD && l.active() && t < share.end) e = load_expert(b.p, t, l.k);
            const i32 dest = rank_of(b, e);
#pragma unroll
            for (u32 r = 0; r < RANKS; r++) steps.firsts[j][r] = first_to(l, dest, r, b.lane, steps.group[j][r]);
        }
        work(steps);
    }
}

// Rows of a small batch on their way back.
#pragma once
#include "arch/bf16.cuh"
#include "comm/packets.cuh"

constexpr u32 WARPS = THREADS / 32;
// A lane's share of a row: four packets, 28 values; with few tokens, where warps have nothing else to do, half of that, and all rows at once. Words of eight
// bytes of a piece lie `groups` words apart. Half h has words 3 h … 3 h + 2 and half a word of the last one: packets 2 h and 2 h + 1.
constexpr u32 PEERS = RANKS > 1 ? RANKS - 1 : 1;
constexpr u32 HALVES = FIXED && PEERS * FIXED_MAX_TOKENS <= FEW_TOKENS ? 2 : 1;
constexpr u32 PACKETS = GROUP_PACKETS / HALVES;
typedef Pieces<PACKETS> Piece;
constexpr u32 VALUES = sizeof(Piece) / 4, WHOLE = HALVES == 1 ? 7 : 3;
static_assert(sizeof(Piece) * HALVES == GROUP_BYTES && 2 * WHOLE + HALVES - 1 == VALUES, "packets are made of 56 bytes");

struct Back {
    const PacketCombineParams& q;
    const CombineParams& p;
    const Domain& d;
    Packets packets;
    u32 me, lane, warp;

    DEVICE Back(const PacketCombineParams& params)
        : q(params), p(params.call), d(params.call.domain), packets(d, params.area), me(d.rank), lane(threadIdx.x % 32),
          warp(threadIdx.x / 32) {}

    // Sizes: constants in a kernel that was compiled for them.
    DEVICE u32 max_tokens() const { return FIXED ? FIXED_MAX_TOKENS : p.max_tokens; }
    DEVICE u32 lanes() const { return FIXED ? FIXED_LANES : p.lanes; }
    DEVICE u32 local_experts() const { return FIXED ? FIXED_EXPERTS / RANKS : p.local_experts; }
    DEVICE u32 row_bytes() const { return FIXED ? FIXED_ROW_BYTES : p.row_bytes; }
    DEVICE u32 groups() const { return FIXED ? (FIXED_ROW_BYTES + GROUP_BYTES - 1) / GROUP_BYTES : q.groups; }
    // Parts of a row, one a warp.
    DEVICE u32 parts() const { return (groups() + 31) / 32; }

    DEVICE bool clerk() const { return blockIdx.x == gridDim.x - 1; }
    DEVICE Begun begun() const { return packets.begun(PACKETS_COMBINE, OPERATION_COMBINE, p.call); }
    template <class T>
    DEVICE const T* handle(u64 offset) const { return (const T*)(p.handle + offset); }
    DEVICE Place place(u32 peer, u32 index) const { return {OPERATION_COMBINE, PHASE_ARRIVAL, packets.epoch, peer, index}; }
    // Row here of the lane of a token, −1 for lanes that live elsewhere.
    DEVICE i32 row_of(u32 s, u32 t) const {
        return lane < lanes() ? arch::ld_received(handle<i32>(p.lane_place) + (u64)(s * max_tokens() + t) * lanes() + lane) : -1;
    }
    DEVICE u64 weight_at(i32 row) const { return EXPANDED ? (u64)row : (u64)row * lanes() + lane; }
    // Words of eight bytes that piece g has in a row.
    DEVICE u32 words(u32 g) const {
        const u32 all = row_bytes() / 8;
        if (FIXED && all % groups() == 0) return groups() % 32 == 0 || g < groups() ? all / groups() : 0;
        return g < groups() ? (all - g + groups() - 1) / groups() : 0;
    }
    // Whether a piece of so many words has word i; known beforehand if all pieces are full.
    DEVICE static bool has(u32 words, u32 i) { return words == GROUP_BYTES / 8 || i < words; }
    DEVICE void load(u64 row, u32 g, u32 half, u32 words, Piece& piece) const {
        const u64* at = (const u64*)row + g;
        if (HALVES == 2) piece.w[VALUES - 1] = has(words, 2 * WHOLE) ? arch::ld_stream((const u32*)(at + 2 * WHOLE * groups()) + half) : 0x80008000u;
        at += WHOLE * half * groups();
#pragma unroll
        for (u32 i = 0; i < WHOLE; i++, at += groups()) {
            const u64 w = has(words, WHOLE * half + i) ? arch::ld_stream(at) : 0x8000800080008000ull;
            piece.w[2 * i] = (u32)w;
            piece.w[2 * i + 1] = (u32)(w >> 32);
        }
    }
    DEVICE void store(u64 row, u32 g, u32 half, u32 words, const Piece& piece) const {
        u64* at = (u64*)row + g;
        if (HALVES == 2 && has(words, 2 * WHOLE)) ((u32*)(at + 2 * WHOLE * groups()))[half] = piece.w[VALUES - 1];
        at += WHOLE * half * groups();
#pragma unroll
        for (u32 i = 0; i < WHOLE; i++, at += groups())
            if (has(words, WHOLE * half + i)) *at = (u64)piece.w[2 * i + 1] << 32 | piece.w[2 * i];
    }
    DEVICE u64 x_row(u32 row) const { return p.x + (u64)row * row_bytes(); }
};

// Sums of BF16 values: FP32, one term after the other, one rounding at the end. Starts at −0, to which every term can be added without a change.
struct PieceSum {
    float v[2 * VALUES];
    DEVICE void clear() {
#pragma unroll
        for (u32 i = 0; i < 2 * VALUES; i++) v[i] = -0.f;
    }
    DEVICE void add(const Piece& t) {
#pragma unroll
        for (u32 j = 0; j < VALUES; j++) {
            v[2 * j] += arch::bf16_low(t.w[j]);
            v[2 * j + 1] += arch::bf16_high(t.w[j]);
        }
    }
    DEVICE Piece round() const {
        Piece r;
#pragma unroll
        for (u32 j = 0; j < VALUES; j++) r.w[j] = arch::bf16_pack(v[2 * j], v[2 * j + 1]);
        return r;
    }
};

// Rows that are loaded together, as many as registers hold.
constexpr u32 ROWS = 4 * HALVES;

// Adds the first N rows of those that the lanes in `which` hold, or all if there are fewer; all of them are on their way at once. Whole warp.
template <u32 N>
DEVICE void add_rows(const Back& b, i32 row, u32& which, u32 g, u32 half, PieceSum& sum) {
    const u32 words = b.words(g), count = __popc(which);
    Piece t[N];
    u32 at[N];
#pragma unroll
    for (u32 u = 0; u < N; u++, which &= which - 1) at[u] = (u32)warp::get(row, __ffs(which) - 1);
    // A row that is not there is −0, so that no register holds what was loaded before.
#pragma unroll
    for (u32 u = 0; u < N; u++) b.load(b.x_row(u < count ? at[u] : 0), g, half, u < count ? words : 0, t[u]);
#pragma unroll
    for (u32 u = 0; u < N; u++)
        if (HALVES == 1 || u < count) sum.add(t[u]);
}

// Sum of the rows that the lanes in `which` hold, in ascending order; the bits of a single one. Whole warp.
DEVICE Piece sum_rows(const Back& b, i32 row, u32 which, u32 g, u32 half) {
    // In the plain layout all lanes name the same row.
    if (!EXPANDED || (which & (which - 1)) == 0) {
        Piece single;
        const u32 at = (u32)warp::get(row, which ? __ffs(which) - 1 : 0);
        b.load(b.x_row(which ? at : 0), g, half, which ? b.words(g) : 0, single);
        return single;
    }
    PieceSum sum;
    sum.clear();
#pragma unroll 1
    while (which) {
        // Instructions take time, too.
        if (ROWS > 4 && __popc(which) <= 4) add_rows<4>(b, row, which, g, half, sum);
        else add_rows<ROWS>(b, row, which, g, half, sum);
    }
    return sum.round();
}

// What a warp is. With few tokens the first blocks send and the others sum, since what a multiprocessor reads queues behind what it has sent. With more, and in
// a single block, half of all blocks' warps do either; with one rank all sum.
struct Role {
    bool sends;
    u32 block, blocks, warp, warps;  // of those with this role

    DEVICE Role(const Back& b) {
        const bool apart = b.q.senders != 0;
        const u32 half = RANKS > 1 ? WARPS / 2 : 0;
        sends = apart ? blockIdx.x < b.q.senders : b.warp < half;
        block = apart && !sends ? blockIdx.x - b.q.senders : blockIdx.x;
        blocks = !apart ? gridDim.x : sends ? b.q.senders : gridDim.x - b.q.senders;
        warp = apart || sends ? b.warp : b.warp - half;
        warps = apart ? WARPS : sends ? half : WARPS - half;
    }
};

// Where a warp is: items are dealt out to blocks one by one, so that all blocks have the same number of rows to load.
struct Item {
    u32 number, step, start;

    DEVICE Item(const Role& role) : number(role.warp * role.blocks + role.block), step(role.blocks * role.warps), start(number) {}
    DEVICE void next() { number += step; }
    DEVICE bool first() const { return number == start; }
    DEVICE u32 half() const { return HALVES == 1 ? 0 : number % HALVES; }
    DEVICE u32 part(const Back& b) const { return number / HALVES % b.parts(); }
    DEVICE u32 unit(const Back& b) const { return number / HALVES / b.parts(); }
};

// A part of what came from a peer, as a sum, back to it.
struct Returned {
    const Back& b;
    u32 s = 0, t = 0, part = 0, half = 0;  // of HALVES
    i32 row = -1;
    bool some = false;

    DEVICE Returned(const Back& back) : b(back) {}
    // Nothing is waited for.
    DEVICE void load(const Item& item) {
        const u32 unit = item.unit(b);
        some = unit < PEERS * b.max_tokens();
        if (!some) return;
        s = (b.me + 1 + unit % PEERS) % RANKS;
        t = unit / PEERS;
        part = item.part(b);
        half = item.half();
        row = b.row_of(s, t);
    }
    DEVICE void send() const {
        const u32 which = warp::ballot(row >= 0), g = part * 32 + b.lane;
        if (which == 0) return;
        u32 weight = 0;
        const bool weights = part == 0 && half == 0 && b.p.weights;
        if (weights && row >= 0) weight = ((const u32*)b.p.weights)[b.weight_at(row)];
        const Piece sum = sum_rows(b, row, which, g, half);
        MARK(b.d, PC_SUMMED);
        if (g < b.groups()) b.packets.send(b.packets.back(s, b.me, t) + half * PACKETS * b.groups(), b.groups(), g, sum);
        if (weights) {
            u32 w[3];
#pragma unroll
            for (u32 i = 0; i < 3; i++) w[i] = warp::get(weight, (3 * b.lane + i) % 32);
            if (3 * b.lane < b.lanes()) b.packets.send(b.packets.back_weights(s, b.me, t) + b.lane, w[0], w[1], w[2]);
        }
    }
};

// A part of the result of one token. Lane k speaks for top-k lane k.
struct Result {
    const Back& b;
    u32 t = 0, part = 0, half = 0;
    i32 expert = -1, row = -1;  // of the lane, −1 for none; row here, −1 for lanes that live elsewhere
    bool some = false, first = false;

    DEVICE Result(const Back& back) : b(back) {}
    // Nothing is waited for.
    DEVICE void load(const Item& item) {
        t = item.unit(b);
        part = item.part(b);
        half = item.half();
        first = item.first();
        some = t < b.max_tokens();
        if (!some || t >= b.p.tokens) return;
        row = b.row_of(b.me, t);
        expert = b.lane < b.lanes() ? arch::ld_received(b.handle<i32>(b.p.topk) + (u64)t * b.lanes() + b.lane) : -1;
    }
    // False if a peer does not come. Whether there is a token or not, its slots are zeroed if it is their turn: by who has read them, or nobody.
    DEVICE bool finish() const {
        if (t < b.p.tokens && !write()) return false;
        if (t != b.packets.scrubbed()) return true;
#pragma unroll 1
        for (u32 s = 0; s < RANKS; s++)
            if (s != b.me) b.packets.scrub(b.packets.back(b.me, s, t), b.q.area.back_stride, half * PACKETS, PACKETS, b.groups(), g(), part * HALVES + half, b.parts() * HALVES);
        return true;
    }

private:
    DEVICE u32 g() const { return part * 32 + b.lane; }
    // False if a peer does not come.
    DEVICE bool write() const {
        const i32 dest = expert >= 0 ? expert / (i32)b.local_experts() : -1;
        // Lanes whose experts live here; the highest lane of each rank.
        const u32 own = warp::ballot(row >= 0), group = warp::match((u32)dest);
        const u32 terms = warp::ballot(dest >= 0 && group >> b.lane == 1);
        const Piece mine = sum_rows(b, row, own, g(), half);
        PieceSum sum;
        sum.clear();
        const u32 biases = add_biases(sum);
        Piece term = {};
        bool ok = true;
#pragma unroll 1
        for (u32 rest = terms; rest; rest &= rest - 1) {
            const u32 from = (u32)warp::get(dest, __ffs(rest) - 1);
            if (from == b.me) {
                term = mine;
            } else {
                const Vec16* slot = b.packets.back(b.me, from, t) + half * PACKETS * b.groups();
                Vec16 p[PACKETS] = {};
                if (g() < b.groups()) {
                    b.packets.load(slot, b.groups(), g(), p);
                    ok = b.packets.receive(slot, b.groups(), g(), p, b.place(from, t)) && ok;
                }
                term.take(p);
            }
            sum.add(term);
        }
        if (!warp::all(ok)) return false;
        MARK_IF(first, b.d, PC_ARRIVED_FIRST);
        MARK(b.d, PC_ARRIVED_LAST);
        const Piece result = biases == 0 && __popc(terms) <= 1 ? term : sum.round();
        b.store(b.p.out + (u64)t * b.row_bytes(), g(), half, b.words(g()), result);
        return part != 0 || half != 0 || write_weights(dest);
    }
    DEVICE u32 add_biases(PieceSum& sum) const {
        u32 n = 0;
#pragma unroll 1
        for (u32 i = 0; i < 2; i++) {
            const u64 bias = i ? b.p.bias1 : b.p.bias0;
            if (!bias) continue;
            Piece t0;
            b.load(bias + (u64)t * b.row_bytes(), g(), half, b.words(g()), t0);
            sum.add(t0);
            n++;
        }
        return n;
    }
    DEVICE bool write_weights(i32 dest) const {
        if (!b.p.out_weights) return true;
        bool ok = true;
        if (b.lane < b.lanes()) {
            u32 weight = 0;
            if (row >= 0) {
                weight = ((const u32*)b.p.weights)[b.weight_at(row)];
            } else if (dest >= 0) {
                Vec16 v;
                ok = b.packets.receive(b.packets.back_weights(b.me, dest, t) + b.lane / 3, b.place(dest, t), v);
                weight = b.lane % 3 == 0 ? v.x : b.lane % 3 == 1 ? v.y : v.z;
            }
            ((u32*)b.p.out_weights)[(u64)t * b.lanes() + b.lane] = weight;
        }
        return warp::all(ok);
    }
};

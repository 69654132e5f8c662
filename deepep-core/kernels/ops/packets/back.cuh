// Rows of a small batch on their way back.
#pragma once
#include "arch/bf16.cuh"
#include "comm/packets.cuh"

constexpr u32 WARPS = THREADS / 32;

// Four values to which every term can be added, and which can be added, without a change.
constexpr u64 MINUS_ZEROS = 0x8000800080008000ull;

struct Back {
    const PacketCombineParams& q;
    const CombineParams& p;
    const Domain& d;
    Packets packets;
    u32 me, lane, warp;

    DEVICE Back(const PacketCombineParams& params, u32 epoch)
        : q(params), p(params.call), d(params.call.domain), packets(d, params.area, epoch), me(d.rank), lane(threadIdx.x % 32),
          warp(threadIdx.x / 32) {}

    DEVICE Begun begun() const { return packets.begun(PACKETS_COMBINE, OPERATION_COMBINE, p.call); }
    template <class T>
    DEVICE const T* handle(u64 offset) const { return (const T*)(p.handle + offset); }
    DEVICE Place place(u32 peer, u32 index) const { return {OPERATION_COMBINE, PHASE_ARRIVAL, packets.epoch, peer, index}; }
    DEVICE u32 groups() const { return q.groups; }
    // Row here of the lane of a token, −1 for lanes that live elsewhere.
    DEVICE i32 row_of(u32 s, u32 t) const {
        return lane < p.lanes ? handle<i32>(p.lane_place)[(u64)(s * p.max_tokens + t) * p.lanes + lane] : -1;
    }
    DEVICE u64 weight_at(i32 row) const { return EXPANDED ? (u64)row : (u64)row * p.lanes + lane; }
    // Words that lane g of a row has in it.
    DEVICE u32 words(u32 g) const {
        const u32 all = p.row_bytes / 8;
        return g < groups() ? (all - g + groups() - 1) / groups() : 0;
    }
    DEVICE void load_group(u64 row, u32 g, u32 words, Group& group) const {
        const u64* at = (const u64*)row + g;
#pragma unroll
        for (u32 j = 0; j < GROUP_WORDS; j++, at += groups()) group.v[j] = j < words ? arch::ld_stream(at) : MINUS_ZEROS;
    }
    DEVICE u64 x_row(u32 row) const { return p.x + (u64)row * p.row_bytes; }
};

// Sums of BF16 values of groups: FP32, one term after the other, one rounding at the end. Starts at −0, to which every term can be added without a
// change.
struct GroupSum {
    float v[4 * GROUP_WORDS];
    DEVICE void clear() {
#pragma unroll
        for (u32 i = 0; i < 4 * GROUP_WORDS; i++) v[i] = -0.f;
    }
    DEVICE void add(const Group& t) {
#pragma unroll
        for (u32 j = 0; j < GROUP_WORDS; j++) {
            const u32 w[2] = {(u32)t.v[j], (u32)(t.v[j] >> 32)};
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                v[4 * j + 2 * i] += arch::bf16_low(w[i]);
                v[4 * j + 2 * i + 1] += arch::bf16_high(w[i]);
            }
        }
    }
    DEVICE Group round() const {
        Group r;
#pragma unroll
        for (u32 j = 0; j < GROUP_WORDS; j++)
            r.v[j] = (u64)arch::bf16_pack(v[4 * j + 2], v[4 * j + 3]) << 32 | arch::bf16_pack(v[4 * j], v[4 * j + 1]);
        return r;
    }
};

// Sum of the rows that the lanes in `which` hold, in ascending order; the bits of a single one. Whole warp.
DEVICE Group sum_rows(const Back& b, i32 row, u32 which, u32 g) {
    // Loaded together: as many as registers hold.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    constexpr u32 ROWS = 3;
#else
    constexpr u32 ROWS = RANKS == 2 ? 4 : 3;
#endif
    const u32 words = b.words(g);
    // In the plain layout all lanes name the same row.
    if (!EXPANDED || (which & (which - 1)) == 0) {
        Group single;
        const u32 at = (u32)warp::get(row, which ? __ffs(which) - 1 : 0);
        b.load_group(b.x_row(which ? at : 0), g, which ? words : 0, single);
        return single;
    }
    GroupSum sum;
    sum.clear();
#pragma unroll 1
    while (which) {
        Group t[ROWS];
#pragma unroll
        for (u32 u = 0; u < ROWS; u++) {
            const bool some = which != 0;
            const u32 at = (u32)warp::get(row, some ? __ffs(which) - 1 : 0);
            which &= which - 1;
            b.load_group(b.x_row(some ? at : 0), g, some ? words : 0, t[u]);
        }
#pragma unroll
        for (u32 u = 0; u < ROWS; u++) sum.add(t[u]);
    }
    return sum.round();
}

// By `warps` warps of a block: sums of what came from peers, back to them; a part of a row each.
DEVICE void send_back(const Back& b, u32 warp, u32 warps) {
    constexpr u32 PEERS = RANKS > 1 ? RANKS - 1 : 1;
    const u32 parts = (b.groups() + 31) / 32, units = PEERS * b.p.max_tokens;
    bool may_write = false;
    for (u32 item = warp;; item += warps) {
        const u32 part = item % parts, unit = blockIdx.x + gridDim.x * (item / parts);
        if (unit >= units) return;
        const u32 s = (b.me + 1 + unit % PEERS) % RANKS, t = unit / PEERS, g = part * 32 + b.lane;
        const i32 row = b.row_of(s, t);
        const u32 which = warp::ballot(row >= 0);
        if (which == 0) continue;
        u32 weight = 0;
        const bool weights = part == 0 && b.p.weights;
        if (weights && row >= 0) weight = ((const u32*)b.p.weights)[b.weight_at(row)];
        const Group sum = sum_rows(b, row, which, g);
        // Waited for behind the rows, once.
        if (!may_write && !b.packets.may_write(b.begun())) return;
        may_write = true;
        if (g < b.groups()) b.packets.send(b.packets.back(s, b.me, t), b.groups(), g, sum);
        if (weights) {
            u32 w[3];
#pragma unroll
            for (u32 i = 0; i < 3; i++) w[i] = warp::get(weight, (3 * b.lane + i) % 32);
            if (3 * b.lane < b.p.lanes) b.packets.send(b.packets.back_weights(s, b.me, t) + b.lane, w[0], w[1], w[2]);
        }
    }
}

// A part of the result of one token. Lane k speaks for top-k lane k.
struct Result {
    const Back& b;
    u32 t, g;
    i32 dest, row;  // rank of the lane's expert, −1 for none; row of the lane here, −1 for lanes that live elsewhere
    u32 own, terms; // lanes whose experts live here; the highest lane of each rank

    DEVICE Result(const Back& back, u32 token, u32 part) : b(back), t(token), g(part * 32 + back.lane) {
        row = b.row_of(b.me, t);
        const i32 e = b.lane < b.p.lanes ? b.handle<i32>(b.p.topk)[(u64)t * b.p.lanes + b.lane] : -1;
        dest = e >= 0 ? e / (i32)b.p.local_experts : -1;
        own = warp::ballot(row >= 0);
        const u32 group = warp::match((u32)dest);
        terms = warp::ballot(dest >= 0 && group >> b.lane == 1);
    }
    DEVICE bool inside() const { return g < b.groups(); }
    DEVICE u32 add_biases(GroupSum& sum) const {
        u32 n = 0;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u64 bias = i ? b.p.bias1 : b.p.bias0;
            if (!bias) continue;
            Group t0;
            b.load_group(bias + (u64)t * b.p.row_bytes, g, b.words(g), t0);
            sum.add(t0);
            n++;
        }
        return n;
    }
    DEVICE bool write() const {
        const Group mine = sum_rows(b, row, own, g);
        GroupSum sum;
        sum.clear();
        const u32 biases = add_biases(sum);
        Group term = {};
        bool ok = true;
#pragma unroll 1
        for (u32 rest = terms; rest; rest &= rest - 1) {
            const u32 from = (u32)warp::get(dest, __ffs(rest) - 1);
            if (from == b.me) term = mine;
            if (from != b.me && inside()) {
                const Vec16* slot = b.packets.back(b.me, from, t);
                Vec16 p[GROUP_PACKETS];
                b.packets.load(slot, b.groups(), g, p);
                ok = b.packets.receive(slot, b.groups(), g, p, b.place(from, t), term) && ok;
            }
            sum.add(term);
        }
        if (!warp::all(ok)) return false;
        const Group result = biases == 0 && __popc(terms) <= 1 ? term : sum.round();
        const u32 words = b.words(g);
        u64* out = (u64*)(b.p.out + (u64)t * b.p.row_bytes) + g;
#pragma unroll
        for (u32 j = 0; j < GROUP_WORDS; j++, out += b.groups())
            if (j < words) *out = result.v[j];
        return true;
    }
    DEVICE bool write_weights() const {
        if (!b.p.out_weights) return true;
        bool ok = true;
        if (b.lane < b.p.lanes) {
            u32 weight = 0;
            if (row >= 0) {
                weight = ((const u32*)b.p.weights)[b.weight_at(row)];
            } else if (dest >= 0) {
                Vec16 v;
                ok = b.packets.receive(b.packets.back_weights(b.me, dest, t) + b.lane / 3, b.place(dest, t), v);
                weight = b.lane % 3 == 0 ? v.x : b.lane % 3 == 1 ? v.y : v.z;
            }
            ((u32*)b.p.out_weights)[(u64)t * b.p.lanes + b.lane] = weight;
        }
        return warp::all(ok);
    }
};

DEVICE void reduce_back(const Back& b, u32 warp, u32 warps) {
    const u32 parts = (b.groups() + 31) / 32;
    for (u32 item = warp;; item += warps) {
        const u32 part = item % parts, t = blockIdx.x + gridDim.x * (item / parts);
        if (t >= b.p.tokens) return;
        const Result result(b, t, part);
        if (!result.write()) return;
        if (part == 0 && !result.write_weights()) return;
    }
}

// By all threads, after a block barrier: one slot of each peer.
DEVICE void scrub_back(const Back& b) {
    const u32 t = b.packets.scrubbed();
    if (t % gridDim.x != blockIdx.x) return;
    for (u32 s = 0; s < RANKS; s++)
        if (s != b.me) b.packets.scrub(b.packets.back(b.me, s, t), b.q.area.back_stride);
}

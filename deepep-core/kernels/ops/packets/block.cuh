// What the parts of a small dispatch share.
#pragma once
#include "comm/packets.cuh"
#include "ops/dispatch/output.cuh"
#include "ops/dispatch/report.cuh"

constexpr u32 WARPS = THREADS / 32;
constexpr u32 WORDS_OF_PACKET = 3;
// Ids in a packet, of 12 bits each; all bits set for none.
constexpr u32 IDS_OF_PACKET = 8, ID_BITS = 12, NO_ID = (1u << ID_BITS) - 1;
static_assert(IDS_OF_PACKET * ID_BITS == 32 * WORDS_OF_PACKET, "ids fill a packet");
// A lane's piece of a row: four packets.
constexpr u32 ROW_PACKETS = GROUP_PACKETS, ROW_WORDS = GROUP_BYTES / 8;
typedef Pieces<ROW_PACKETS> Row;
static_assert(sizeof(Row) == GROUP_BYTES && PACKET_BYTES == sizeof(Vec16), "packets are made of 56 bytes");

struct Control {
    u32 over;             // lowest rank over capacity; RANKS if none is
    i32 rows[MAX_RANKS];  // that each rank receives, if capacities matter
    i32 sums[64];         // of 32 experts each, of their rows and gaps
};
static_assert(sizeof(Control) <= PACKET_CONTROL_BYTES, "the host reserves too little shared memory");

// A token of any rank has a number, s · max_tokens + t, and a bit in maps. Unit u is one token of one rank. The first blocks send rows of own tokens, which are
// dealt out to them; the last ones place units, which are dealt out in the same way, and tell other ranks of ids. Where multiprocessors are few, all blocks do
// both. The last block, which has the fewest units, tells what is told once.
struct Block {
    const PacketDispatchParams& q;
    const DispatchParams& p;
    const Domain& d;
    Packets packets;
    Control& control;
    u32* to_rank;    // [R][words]: tokens that go to a rank
    u32* of_expert;  // [words][maps]: tokens of an expert; local experts only, unless capacities matter
    i32* start;      // [EL + 1]: first row of each local expert, counted from the first of its 32
    i32* counts;     // [EL]
    u32* ids;        // [units of this block][packets of ids][words]
    u32 me, lane, warp;

    DEVICE Block(const PacketDispatchParams& params, u8* shared)
        : q(params), p(params.call), d(params.call.domain), packets(d, params.area), control(*(Control*)shared),
          to_rank((u32*)(shared + PACKET_CONTROL_BYTES)), of_expert((u32*)(shared + params.of_expert)), start((i32*)(shared + params.start)),
          counts((i32*)(shared + params.counts)), ids((u32*)(shared + params.ids)), me(d.rank), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}
    // Found anew each time: few registers matter more.
    DEVICE u64 handle() const { return d.heap[me] + p.handles + (u64)(p.place >> 8 & 0xfff) * p.handle_stride; }
    DEVICE u64 output() const { return d.heap[me] + p.outputs + (u64)(p.place & 0xff) * p.output_stride; }

    // Sizes: constants in a kernel that was compiled for them.
    DEVICE u32 max_tokens() const { return FIXED ? FIXED_MAX_TOKENS : p.max_tokens; }
    DEVICE u32 lanes() const { return FIXED ? FIXED_LANES : p.lanes; }
    DEVICE u32 experts() const { return FIXED ? FIXED_EXPERTS : p.experts; }
    DEVICE u32 local_experts() const { return FIXED ? FIXED_EXPERTS / RANKS : p.local_experts; }
    DEVICE u32 row_words() const { return (FIXED ? FIXED_ROW_BYTES : p.row_bytes) / 8; }
    DEVICE u32 scale_packs() const { return FIXED ? FIXED_SCALE_PACKS : p.scale_packs; }
    DEVICE u32 groups() const { return FIXED ? (FIXED_ROW_BYTES + 4 * FIXED_SCALE_PACKS + GROUP_BYTES - 1) / GROUP_BYTES : q.groups; }
    DEVICE u32 words() const { return FIXED ? (RANKS * FIXED_MAX_TOKENS + 31) / 32 : q.words; }
    DEVICE bool limited() const { return !FIXED && q.limited; }
    // Lowest rank over capacity, RANKS if none is; after a block barrier.
    DEVICE u32 over() const { return limited() ? control.over : RANKS; }
    DEVICE bool all_experts() const { return !FIXED && q.all_experts; }
    DEVICE u32 maps() const { return all_experts() ? experts() : local_experts(); }
    // Parts of a row, one a warp.
    DEVICE u32 parts() const { return (groups() + 31) / 32; }

    DEVICE bool cached() const { return p.topk_idx == 0; }
    DEVICE bool sends() const { return blockIdx.x < q.senders; }
    DEVICE bool places() const { return blockIdx.x >= q.first; }
    // Of those that place.
    DEVICE u32 blocks() const { return gridDim.x - q.first; }
    DEVICE u32 block() const { return blockIdx.x - q.first; }
    DEVICE bool clerk() const { return blockIdx.x == gridDim.x - 1; }
    DEVICE Begun begun() const { return packets.begun(PACKETS_DISPATCH, OPERATION_DISPATCH, p.call); }
    template <class T>
    DEVICE T* mine(u64 offset) const { return (T*)(handle() + offset); }
    template <class T>
    DEVICE T* out(u64 offset) const { return (T*)(output() + offset); }
    DEVICE Place place(u32 phase, u32 peer, u32 index) const { return {OPERATION_DISPATCH, phase, packets.epoch, peer, index}; }
    DEVICE u32 number(u32 s, u32 t) const { return s * max_tokens() + t; }
    DEVICE u32 unit(u32 s, u32 t) const { return t * RANKS + (s + RANKS - me) % RANKS; }
    // How many units of lower numbers a unit's block has. Units are few: the product is exact.
    DEVICE u32 turn(u32 unit) const { return q.per_block ? __umulhi(unit, q.per_block) : unit; }

    // By all threads, before a block barrier.
    DEVICE void clear() const {
        if (EXPANDED)
#pragma unroll 1
            for (u32 i = threadIdx.x; i < (words() * maps() + 3) / 4; i += THREADS) ((Vec16*)of_expert)[i] = {0, 0, 0, 0};
        else if (clerk())
            for (u32 i = threadIdx.x; i < local_experts(); i += THREADS) counts[i] = 0;
        if (threadIdx.x == 0) control.over = RANKS;
    }
};

// Rank of an expert.
DEVICE u32 rank_of(const Block& b, u32 expert) {
    u32 r = 0;
#pragma unroll
    for (u32 i = 1; i < RANKS; i++) r += expert >= i * b.local_experts();
    return r;
}

// Calls `look(i)` for all words of a map; few of a known number side by side.
template <class Look>
DEVICE void each_word(const Block& b, Look look) {
    if constexpr (FIXED && (RANKS * FIXED_MAX_TOKENS + 31) / 32 <= 16) {
#pragma unroll
        for (u32 i = 0; i < (RANKS * FIXED_MAX_TOKENS + 31) / 32; i++) look(i);
    } else {
#pragma unroll 4
        for (u32 i = 0; i < b.words(); i++) look(i);
    }
}
// Bits of a map below `end`, and all. Words of a map lie `step` apart.
DEVICE u32 bits_below(const Block& b, const u32* map, u32 step, u32 end) {
    u32 n = 0;
    each_word(b, [&](u32 i) {
        const u32 below = end <= 32 * i ? 0 : end >= 32 * i + 32 ? ALL_LANES : (1u << end % 32) - 1;
        n += __popc(map[i * step] & below);
    });
    return n;
}
DEVICE u32 bits(const Block& b, const u32* map, u32 step) {
    u32 n = 0;
    each_word(b, [&](u32 i) { n += __popc(map[i * step]); });
    return n;
}
DEVICE bool bit(const u32* map, u32 at) { return map[at / 32] >> (at % 32) & 1; }

// Packets of a token's ids and of its weights.
DEVICE constexpr u32 id_packets(u32 lanes) { return (lanes + IDS_OF_PACKET - 1) / IDS_OF_PACKET; }
DEVICE constexpr u32 weight_packets(u32 lanes) { return (lanes + WORDS_OF_PACKET - 1) / WORDS_OF_PACKET; }
// Id k of a packet with these words.
DEVICE u32 id_of(const u32* words, u32 k) {
    const u32 at = k * ID_BITS, low = at / 32, high = low + 1 < WORDS_OF_PACKET ? low + 1 : low;
    return (u32)(((u64)words[high] << 32 | words[low]) >> at % 32) & NO_ID;
}

// What travels for a token are words of eight bytes: its row, then its scale packs. Word j of a lane's piece g lies j · groups + g words behind the start. Whether it is one of the row for every g:
DEVICE bool inside(const Block& b, u32 j) { return FIXED && (j + 1) * b.groups() <= b.row_words(); }

// A lane's piece of a row on its way from memory. Nothing is done with what is loaded, not even a move, which would wait for it.
struct Loading {
    u32 w[2 * ROW_WORDS];

    DEVICE void load(const Block& b, u32 token, u32 g) {
        const u32 words = b.row_words();
        const u64* row = (const u64*)(b.p.x + (u64)token * (8 * words)) + g;
        const u32* scales = (const u32*)b.p.scales + (i64)token * b.p.scale_row_stride;
#pragma unroll
        for (u32 j = 0; j < ROW_WORDS; j++) {
            u32 &low = w[2 * j], &high = w[2 * j + 1];
            if (inside(b, j)) {
                arch::ld_stream(row + j * b.groups(), low, high);
                continue;
            }
            const u32 i = j * b.groups() + g, pack = 2 * (i - words);
            const bool of_row = i < words;
            const u32* from = of_row ? (const u32*)(row + j * b.groups()) : scales + (i64)pack * b.p.scale_pack_stride;
            const u32* next = of_row ? from + 1 : from + b.p.scale_pack_stride;
            low = high = 0;
            if (of_row || pack < b.scale_packs()) low = arch::ld_stream(from);
            if (of_row || pack + 1 < b.scale_packs()) high = arch::ld_stream(next);
        }
    }
    DEVICE void finish(Row& row) const {
#pragma unroll
        for (u32 j = 0; j < 2 * ROW_WORDS; j++) row.w[j] = w[j];
    }
};
DEVICE void store_row(const Block& b, u64 output, u32 to, u32 g, const Row& row) {
    const u32 words = b.row_words();
    u64* at = (u64*)(output + b.p.rows + (u64)to * (8 * words)) + g;
#pragma unroll
    for (u32 j = 0; j < ROW_WORDS; j++, at += b.groups()) {
        const u32 low = row.w[2 * j], high = row.w[2 * j + 1], i = j * b.groups() + g;
        if (inside(b, j) || i < words) {
            *at = (u64)high << 32 | low;
            continue;
        }
        const u32 pack = 2 * (i - words);
        if (pack < b.scale_packs()) *scale_pack(b.p, output, to, pack) = low;
        if (pack + 1 < b.scale_packs()) *scale_pack(b.p, output, to, pack + 1) = high;
    }
}

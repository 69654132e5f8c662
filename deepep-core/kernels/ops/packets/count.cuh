// Positions in a small dispatch, from the ids of all tokens of all ranks.
#pragma once
#include "ops/packets/send.cuh"

// Sets the bits of a token.
struct Marks {
    const Block& b;
    u32 number;
    u32 ranks = 0;

    DEVICE Marks(const Block& block, u32 token) : b(block), number(token) {}
    DEVICE void add(u32 expert) {
        const u32 r = rank_of(b.p, expert), own = b.me * b.p.local_experts;
        ranks |= 1u << r;
        if (EXPANDED && (b.q.all_experts || r == b.me))
            atomicOr(b.of_expert + (b.q.all_experts ? expert : expert - own) * b.q.words + number / 32, 1u << number % 32);
        // Nobody but the caller wants to know, and block 0 tells.
        if (!EXPANDED && blockIdx.x == 0 && r == b.me) atomicAdd(b.counts + expert - own, 1);
    }
    DEVICE void finish() {
#pragma unroll
        for (u32 r = 0; r < RANKS; r++)
            if (ranks >> r & 1) atomicOr(b.to_rank + r * b.q.words + number / 32, 1u << number % 32);
    }
};

// By all threads: learns the ids of every token of every rank.
DEVICE void read_lanes(const Block& b) {
    const u32 most = b.p.max_tokens, lanes = b.p.lanes;
    const u32 count = (id_words(lanes) + 2) / 3;
    for (u32 i = threadIdx.x; i < RANKS * most; i += THREADS) {
        const u32 s = i / most, t = i % most;
        const Vec16 *head_at = b.packets.head(b.me, s), *at = b.packets.lanes(b.me, s, t);
        Vec16 head, p[2];
        const bool ok = wait_until(b.d, b.place(PHASE_TOTALS, s, t), b.packets.epoch, [&](u64& seen) {
            head = arch::ld_packet(head_at);
            p[0] = arch::ld_packet(at);
            if (count > 1) p[1] = arch::ld_packet(at + 1);
            seen = head.w;
            if (head.w != b.packets.epoch) return false;
            // Another call: its lanes may be fewer, and nobody waits for them.
            if (head.x != b.p.call || t >= head.y) return true;
            seen = p[0].w;
            return p[0].w == b.packets.epoch && (count == 1 || p[1].w == b.packets.epoch);
        });
        if (!ok) {
            b.control.failed = 1;
            return;
        }
        // Before anything of it is used: other shapes have their ids elsewhere.
        if (head.x != b.p.call) {
            if (t == 0) give_up(b.d, b.place(PHASE_PARAMETERS, s, 0), true, b.p.call, head.x, 0);
            b.control.failed = 1;
            return;
        }
        if (t == 0) b.control.tokens[s] = head.y;
        const u32 unit = b.unit(s, t), at_unit = unit / gridDim.x * lanes;
        const bool placed = unit % gridDim.x == blockIdx.x;
        Marks marks(b, b.number(s, t));
        for (u32 n = 0; n < count; n++) {
            Vec16 v = n == 0 ? p[0] : p[1];
            if (t >= head.y) v = {ALL_LANES, ALL_LANES, ALL_LANES, 0};
            else if (n > 1 && !b.packets.receive(at + n, b.place(PHASE_TOTALS, s, t), v)) {
                b.control.failed = 1;
                return;
            }
            const u32 w[3] = {v.x, v.y, v.z};
#pragma unroll
            for (u32 j = 0; j < IDS_OF_PACKET; j++) {
                const u32 k = n * IDS_OF_PACKET + j, id = j & 1 ? w[j / 2] >> 16 : w[j / 2] & 0xffffu;
                if (k >= lanes) continue;
                const bool valid = id < b.p.experts;
                if (placed) b.ids[at_unit + k] = (u16)(valid ? id : 0xffffu);
                if (valid) marks.add(id);
            }
        }
        marks.finish();
    }
}

DEVICE i32 rows_of(const Block& b, u32 map) { return (i32)bits_below(b.of_expert + map * b.q.words, RANKS * b.p.max_tokens); }
DEVICE i32 padded(const Block& b, i32 rows) { return (rows + b.p.alignment - 1) / b.p.alignment * b.p.alignment; }

// Whether all that comes fits, on every rank. Whole warp r < R.
DEVICE void check_capacity(const Block& b) {
    const u32 r = b.warp, local = b.p.local_experts;
    if (r >= RANKS) return;
    const u32 tokens = bits_below(b.to_rank + r * b.q.words, RANKS * b.p.max_tokens);
    i32 rows = (i32)tokens;
    if (EXPANDED) {
        i32 sum = 0;
        for (u32 j = b.lane; j < local; j += 32) sum += padded(b, rows_of(b, r * local + j));
        rows = warp::get(warp::inclusive_sum(sum, b.lane), 31);
    }
    if (b.lane != 0) return;
    b.control.rows[r] = rows;
    if (tokens > b.p.token_capacity || (u32)rows > b.p.row_capacity) atomicMin(&b.control.over, r);
}

// By all threads, after a block barrier: rows of each local expert and where they start. Ends with a block barrier.
DEVICE void count(const Block& b) {
    if (EXPANDED || blockIdx.x == 0) {
        const u32 local = b.p.local_experts, first = b.q.all_experts ? b.me * local : 0;
        i32 before = 0;
        for (u32 j0 = 0; j0 < local; j0 += THREADS) {
            const u32 j = j0 + threadIdx.x;
            const i32 rows = j < local ? EXPANDED ? rows_of(b, first + j) : b.counts[j] : 0, space = padded(b, rows);
            const i32 sum = warp::inclusive_sum(space, b.lane);
            if (b.lane == 31) b.control.sums[b.warp] = sum;
            __syncthreads();
            i32 start = before + sum - space;
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) {
                if (w < b.warp) start += b.control.sums[w];
                before += b.control.sums[w];
            }
            if (j < local) {
                b.counts[j] = rows;
                b.start[j] = start;
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) b.start[local] = before;
    }
    if (b.q.limited) check_capacity(b);
    __syncthreads();
}

DEVICE void write_counts(const Block& b) {
    const u32 over = b.control.over, r = over == RANKS ? b.me : over, local = b.p.local_experts, all = b.p.max_tokens;
    const u32* map = b.to_rank + r * b.q.words;
    const i32 tokens = (i32)bits_below(map, RANKS * all);
    i32 rows = tokens;
    if (EXPANDED) rows = over == RANKS ? b.start[local] : b.control.rows[r];
    write_counts(b.p, b.handle, b.packets.epoch, {over, tokens, rows}, b.start, [&](u32 j) { return b.counts[j]; },
                 [&](u32 s) { return (i32)bits_below(map, (s + 1) * all); });
}

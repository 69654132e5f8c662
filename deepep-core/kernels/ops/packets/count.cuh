// Positions in a small dispatch, from the ids of all tokens of all ranks.
#pragma once
#include "ops/packets/incoming.cuh"

// What a warp enters into the maps of 32 tokens with consecutive numbers: lane n has one of them.
struct Marks {
    const Block& b;
    u32 number;
    u32 ranks = 0;

    DEVICE Marks(const Block& block, u32 token) : b(block), number(token) {}
    // Of no expert, too: its id is larger than all others. No branches: all lanes of a warp are here.
    DEVICE void add(u32 expert) {
        if (expert < b.experts()) ranks |= 1u << rank_of(b, expert);
        const u32 local = expert - b.me * b.local_experts();
        if (EXPANDED) {
            const u32 map = b.all_experts() ? expert : local;
            if (map < b.maps()) atomicOr(b.of_expert + number / 32 * b.maps() + map, 1u << number % 32);
        } else if (b.clerk() && local < b.local_experts()) {
            // Nobody but the caller wants to know, and one block tells.
            atomicAdd(b.counts + local, 1);
        }
    }
    // Whole warp.
    DEVICE void finish() {
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            const u32 word = warp::ballot(ranks >> r & 1);
            if (b.lane == 0) b.to_rank[r * b.words() + number / 32] = word;
        }
    }
};

// All other ranks have made the same call; if not, the call ends everywhere before anything is placed. By one warp of each block, before it waits for anything
// else: in another call ids may lie elsewhere, and who waits for them learns of it by the abort.
DEVICE bool compare_heads(const Block& b) {
    bool ok = true;
    if (b.lane < RANKS && b.lane != b.me) {
        Vec16 head;
        ok = b.packets.receive(b.packets.head(b.me, b.lane), b.place(PHASE_TOTALS, b.lane, 0), head);
        if (ok && head.x != b.p.call) {
            give_up(b.d, b.place(PHASE_PARAMETERS, b.lane, 0), true, b.p.call, head.x, 0);
            ok = false;
        }
    }
    return warp::all(ok);
}

// One token, of which a thread learns the ids.
struct Token {
    const Block& b;
    u32 s, t;
    const Vec16* at;
    Vec16 p[2];

    DEVICE Token(const Block& block, u32 number) : b(block), s(0) {
#pragma unroll
        for (u32 r = 1; r < RANKS; r++) s += number >= r * b.max_tokens();
        t = number - s * b.max_tokens();
        at = b.packets.ids(b.me, s, t);
    }
    DEVICE Place place() const { return b.place(PHASE_TOTALS, s, t); }
    DEVICE bool look(u64& seen) {
        const bool two = id_packets(b.lanes()) > 1;
        p[0] = b.packets.load(at);
        if (two) p[1] = b.packets.load(at + b.max_tokens());
        seen = p[0].w;
        return p[0].w == b.packets.epoch && (!two || p[1].w == b.packets.epoch);
    }
    // Enters the ids into the maps, and into the list of this block's units. False if a packet does not come.
    DEVICE bool enter(Marks& marks) {
        const u32 unit = b.unit(s, t), n = b.turn(unit), packets = id_packets(b.lanes());
        const bool placed = unit - n * b.blocks() == b.block();
        u32* ids = b.ids + n * packets * WORDS_OF_PACKET;
#pragma unroll(FIXED ? id_packets(FIXED_LANES) : 1)
        for (u32 i = 0; i < packets; i++) {
            Vec16 v = i == 0 ? p[0] : p[1];
            if (i > 1 && !b.packets.receive(at + i * b.max_tokens(), place(), v)) return false;
            enter(marks, i, v, placed, ids + i * WORDS_OF_PACKET);
        }
        return true;
    }

private:
    DEVICE void enter(Marks& marks, u32 packet, const Vec16& v, bool placed, u32* ids) const {
        const u32 w[WORDS_OF_PACKET] = {v.x, v.y, v.z};
#pragma unroll
        for (u32 i = 0; i < WORDS_OF_PACKET; i++)
            if (placed) ids[i] = w[i];
#pragma unroll
        for (u32 j = 0; j < IDS_OF_PACKET; j++) {
            if (packet * IDS_OF_PACKET + j >= b.lanes()) break;
            marks.add(id_of(w, j));
        }
    }
};

// By all threads: learns the ids of every token of every rank. False after an abort.
DEVICE bool read_lanes(const Block& b) {
    const u32 all = RANKS * b.max_tokens();
    bool ok = true;
    for (u32 first = b.warp * 32; ok && first < all; first += THREADS) {
        const u32 number = first + b.lane;
        Marks marks(b, number);
        if (number < all) {
            Token token(b, number);
            // Nothing else is looked at: all blocks look at the same lines.
            ok = wait_until(b.d, token.place(), b.packets.epoch, [&](u64& seen) { return token.look(seen); }) && token.enter(marks);
        }
        ok = warp::all(ok);
        marks.finish();
    }
    return ok;
}

DEVICE const u32* map_of(const Block& b, u32 expert) { return b.of_expert + expert; }
DEVICE i32 padded(const Block& b, i32 rows) {
    const i32 a = (i32)b.p.alignment;
    if ((a & (a - 1)) == 0) return (rows + a - 1) & -a;
    return (rows + a - 1) / a * a;
}
// Rows and gaps before the 32 experts among which a local expert is.
DEVICE i32 rows_before(const Block& b, u32 local) {
    i32 n = 0;
    if constexpr (FIXED && FIXED_EXPERTS / RANKS <= 512) {
#pragma unroll
        for (u32 c = 0; c < (FIXED_EXPERTS / RANKS + 31) / 32; c++) n += c < local / 32 ? b.control.sums[c] : 0;
    } else {
#pragma unroll 4
        for (u32 c = 0; c < local / 32; c++) n += b.control.sums[c];
    }
    return n;
}

// By all threads, after a block barrier: rows of each local expert, and where they start. Ends with a block barrier.
DEVICE void count(const Block& b) {
    const u32 local = b.local_experts(), first = b.all_experts() ? b.me * local : 0;
    for (u32 j0 = b.warp * 32; j0 < local; j0 += THREADS) {
        const u32 j = j0 + b.lane;
        i32 rows = 0;
        if (j < local) rows = EXPANDED ? (i32)bits(b, map_of(b, first + j), b.maps()) : b.counts[j];
        const i32 space = padded(b, rows), sum = warp::inclusive_sum(space, b.lane);
        if (j < local) {
            b.counts[j] = rows;
            b.start[j] = sum - space;
        }
        if (b.lane == 31) b.control.sums[j0 / 32] = sum;
    }
    __syncthreads();
}
// By all threads, after a block barrier behind which nobody looks up starts: starts from the first row of all. Ends with a block barrier.
DEVICE void finish_starts(const Block& b) {
    const u32 local = b.local_experts();
    for (u32 j = threadIdx.x; j <= local; j += THREADS) b.start[j] = (j < local ? b.start[j] : 0) + rows_before(b, j == local ? (local + 31) / 32 * 32 : j);
    __syncthreads();
}

// By all threads, after a block barrier: whether all that comes fits, on every rank. Ends with a block barrier.
DEVICE void check_capacity(const Block& b) {
    const u32 r = b.warp, local = b.local_experts();
    if (r < RANKS) {
        const u32 tokens = bits(b, b.to_rank + r * b.words(), 1);
        i32 rows = (i32)tokens;
        if (EXPANDED) {
            i32 sum = 0;
            for (u32 j = b.lane; j < local; j += 32) sum += padded(b, (i32)bits(b, map_of(b, r * local + j), b.maps()));
            rows = warp::get(warp::inclusive_sum(sum, b.lane), 31);
        }
        if (b.lane == 0) {
            b.control.rows[r] = rows;
            if (tokens > b.p.token_capacity || (u32)rows > b.p.row_capacity) atomicMin(&b.control.over, r);
        }
    }
    __syncthreads();
}

// By all threads, after `finish_starts`.
DEVICE void write_counts(const Block& b) {
    const u32 over = b.over(), r = over == RANKS ? b.me : over, local = b.local_experts();
    const u32* map = b.to_rank + r * b.words();
    const i32 tokens = (i32)bits(b, map, 1);
    i32 rows = tokens;
    if (EXPANDED) rows = over == RANKS ? b.start[local] : b.control.rows[r];
    write_counts(b.p, b.handle(), b.packets.epoch, {over, tokens, rows}, b.start, [&](u32 j) { return b.counts[j]; },
                 [&](u32 s) { return (i32)bits_below(b, map, 1, (s + 1) * b.max_tokens()); });
}

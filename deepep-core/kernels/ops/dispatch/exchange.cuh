// Phase 2: counts of all blocks of all ranks, and from them every position; places of this call.
//
// Who writes: block c of rank s its counts into `counts[parity][s][c]` of every rank, the last block of rank s its place into `totals[parity][s]`.
// Who waits: every block that counts, for all of them. Why nothing is overwritten early: docs/protocol.md, section 2.
#pragma once
#include "ops/dispatch/count.cuh"

// First thing in the kernel, by one warp of the rank: this rank's slots may be written from now on. The place goes first: its release has nothing to wait for.
DEVICE void publish_place(const Block& b) {
    if (b.lane >= RANKS || aborted(b.d)) return;
    u64* cells = b.totals(b.lane, b.me);
    arch::st_release_sys(cells + CELL_PLACE, pack_cell(b.epoch, b.p.place));
    arch::st_relaxed_sys(cells + CELL_CALL, pack_cell(b.epoch, b.p.call));
}

// The places of all ranks, by the lanes r < R of one warp.
struct Places {
    u64 place = 0, call = 0;

    DEVICE bool poll(const Block& b, Place& at, u64& seen) {
        if (b.lane >= RANKS) return true;
        const u64* cells = b.totals(b.me, b.lane);
        call = arch::ld_relaxed_sys(cells + CELL_CALL);
        place = arch::ld_acquire_sys(cells + CELL_PLACE);
        if (cell_epoch(place) == b.epoch && cell_epoch(call) == b.epoch) return true;
        at = b.place(PHASE_TOTALS, b.lane, CELL_PLACE);
        seen = cell_epoch(place) != b.epoch ? cell_epoch(place) : cell_epoch(call);
        return false;
    }
    // When all have come: rank r's slots may be written, and this says where they are. False if it makes another call.
    DEVICE bool keep(const Block& b) const {
        const u32 r = b.lane;
        if (r >= RANKS) return true;
        const u32 value = (u32)place;
        b.control.output[r] = b.d.heap[r] + b.p.outputs + (u64)(value & 0xff) * b.p.output_stride;
        b.control.handle[r] = b.d.heap[r] + b.p.handles + (u64)(value >> 8 & 0xfff) * b.p.handle_stride;
        b.control.senders[r] = place_senders(value);
        if ((u32)call == b.p.call) return true;
        give_up(b.d, b.place(PHASE_PARAMETERS, r, CELL_CALL), true, b.p.call, (u32)call, 0);
        return false;
    }
};

// By one warp: places only; false for a lane whose rank's does not come.
DEVICE bool acquire_places(const Block& b) {
    Places places;
    const Place at = b.place(PHASE_TOTALS, b.lane, CELL_PLACE);
    return wait_for_all(b.d, at, b.epoch, [&](Place& at, u64& seen) { return places.poll(b, at, seen); }) && places.keep(b);
}

DEVICE u32 sum_lanes(u32 v, u32 lane, u32 most) {
#pragma unroll
    for (u32 distance = 1; distance < 32; distance <<= 1)
        if (distance < most) v += warp::get(v, lane ^ distance);
    return v;
}

// Plain. One warp gathers what all blocks of all ranks send to rank `to`: each lane looks at blocks of one rank, and at its place, which says how many there are.
DEVICE bool gather_rank(const Block& b, u32 to) {
    constexpr u32 BESIDE = 32 / RANKS, MANY = RANKS <= 2 ? 2 : 4;
    const u32 rank = b.lane % RANKS, own = b.lane / RANKS;
    const bool asks = own < BESIDE;
    const u64 *cells = b.counts(b.me, rank, 0) + to, *place_cell = b.totals(b.me, rank) + CELL_PLACE;
    u32 senders = 0, below = 0, all = 0;
#pragma unroll 1
    for (u32 c0 = own; warp::any(c0 == own || (asks && c0 < senders)); c0 += BESIDE * MANY) {
        u64 n[MANY];
        const bool ok = wait_for_all(b.d, b.place(PHASE_TOTALS, rank, CELL_PLACE), b.epoch, [&](Place& at, u64& seen) {
            // Blocks that there are not name the last one that there may be: loads without a condition are all under way together.
#pragma unroll
            for (u32 j = 0; j < MANY; j++) {
                const u32 c = c0 + BESIDE * j;
                n[j] = arch::ld_relaxed_sys(cells + (u64)(c < MAX_SENDERS ? c : MAX_SENDERS - 1) * b.d.count_cells);
            }
            const u64 place = arch::ld_relaxed_sys(place_cell);
            senders = asks ? place_senders((u32)place) : 0;
            bool ready = cell_epoch(place) == b.epoch;
            if (!ready) seen = cell_epoch(place);
#pragma unroll
            for (u32 j = 0; j < MANY; j++) {
                const u32 c = c0 + BESIDE * j;
                if (!ready || c >= senders || cell_epoch(n[j]) == b.epoch) continue;
                at = b.place(rank == b.me ? PHASE_PARTIALS : PHASE_TOTALS, rank, c);
                seen = cell_epoch(n[j]);
                ready = false;
            }
            return ready;
        });
        if (!warp::all(ok)) return false;
#pragma unroll
        for (u32 j = 0; j < MANY; j++) {
            const u32 c = c0 + BESIDE * j, count = c < senders ? (u32)n[j] : 0;
            all += count;
            if (rank < b.me || (rank == b.me && c < b.part)) below += count;
        }
    }
    // For the prefix sums of what comes here.
    if (b.tells() && to == b.me && asks) atomicAdd(&b.control.from[rank], all);
    all = sum_lanes(all, b.lane, 32);
    below = sum_lanes(below, b.lane, 32);
    if (b.lane == 0) {
        b.base()[b.p.experts + to] = (i32)below;
        b.total()[b.p.experts + to] = (i32)all;
    }
    return true;
}

// Expanded. What a warp gathers of a run of blocks: row i is block `first` + i / R of rank i mod R. Warp r < R sums the cells of rank r. Eight lanes share a
// column of four experts.
struct Gather {
    static constexpr u32 ROWS = 64, SHARING = 8, COLUMNS = 32 / SHARING;
    // All rows that a lane looks at are of one rank.
    static constexpr bool ONE_RANK = SHARING % RANKS == 0;

    const Block& b;
    const u32 first, rows;

    DEVICE Gather(const Block& block, u32 first_block, u32 blocks) : b(block), first(first_block), rows(RANKS * blocks) {}
    DEVICE u32 rank(u32 row) const { return row % RANKS; }
    DEVICE u32 block(u32 row) const { return first + row / RANKS; }
    // Cells of the blocks before this one: of lower ranks, and of lower blocks of this rank.
    DEVICE bool before(u32 row) const { return rank(row) < b.me || (rank(row) == b.me && block(row) < b.part); }
    // Offset of a cell of a row in this rank's counts.
    DEVICE u32 offset(u32 row, u32 cell) const { return (rank(row) * MAX_SENDERS + block(row)) * b.d.count_cells + cell; }
    DEVICE u32 last(u32 row) const { return row < rows ? row : rows - 1; }
    DEVICE u64 place_of(u32 r) const { return arch::ld_relaxed_sys(b.totals(b.me, r) + CELL_PLACE); }
    // Rows of a rank from this one on are of blocks that it does not have, if this is its place. No row, if its place has not come.
    DEVICE u32 absent_from(u64 place) const {
        const u32 senders = place_senders((u32)place);
        return cell_epoch(place) != b.epoch ? ~0u : senders > first ? (senders - first) * RANKS : 0;
    }
    // In a run behind the first one, whose barrier has published what the places say.
    DEVICE bool known_absent(u32 row) const { return first > 0 && block(row) >= b.control.senders[rank(row)]; }
    // `column`: of this lane, counted in fours of experts. `ranks`: this warp sums a rank's cells, too; `awaits`: and awaits the places.
    DEVICE bool run(u32 column, bool ranks, bool awaits, Places& places) const {
        constexpr u32 N = ROWS / SHARING;
        const u64* cells = b.counts(b.me, 0, 0);
        const u32 row_in_eight = b.lane % SHARING;
        const bool experts = 2 * column < b.pairs(), two = 2 * column + 1 < b.pairs();
        const u32 pair = COUNT_PAIRS + (experts ? 2 * column : 0);
        u32 below[4] = {}, all[4] = {}, rank_below = 0, rank_all = 0;
#pragma unroll 1
        for (u32 row0 = 0; row0 < rows; row0 += ROWS) {
            const u32 rank_row = row0 + b.lane, row = row0 + row_in_eight;
            u64 n[2], v[N][2];
            // Bits: cells that are not waited for and count nothing. Those that there are not, and what a rank's place says later that there is not.
            u32 none = 0, missing = 0, turn = 0;
#pragma unroll
            for (u32 j = 0; j < 2; j++)
                if (!ranks || rank_row + 32 * j >= rows || known_absent(rank_row + 32 * j)) none |= 1u << j;
#pragma unroll
            for (u32 j = 0; j < N; j++)
                if (!experts || row + SHARING * j >= rows || known_absent(row + SHARING * j)) none |= 4u << j;
            const bool ok = wait_for_all(b.d, b.place(PHASE_TOTALS, b.me, 0), b.epoch, [&](Place& at, u64& seen) {
                // Rows and columns that there are not name the last or first one: loads without a condition are all under way together.
                n[0] = n[1] = 0;
                if (ranks) {
#pragma unroll
                    for (u32 j = 0; j < 2; j++) n[j] = arch::ld_relaxed_sys(cells + offset(last(rank_row + 32 * j), b.warp));
                }
#pragma unroll
                for (u32 j = 0; j < N; j++) {
                    v[j][0] = v[j][1] = 0;
                    arch::ld_relaxed_sys(cells + offset(last(row + SHARING * j), pair), v[j][0], v[j][1]);
                }
                // Under way with them, what says which blocks there are not. Where a lane looks at several ranks, this would take too many registers: there, one
                // missing cell is asked for now and then.
                const u64 place = ONE_RANK ? place_of(rank(row_in_eight)) : 0;
                const bool placed = !awaits || places.poll(b, at, seen);
                missing = 0;
#pragma unroll
                for (u32 j = 0; j < 2; j++)
                    if (cell_epoch(n[j]) != b.epoch) missing |= 1u << j;
#pragma unroll
                for (u32 j = 0; j < N; j++)
                    if (cell_epoch(v[j][0]) != b.epoch || (two && cell_epoch(v[j][1]) != b.epoch)) missing |= 4u << j;
                missing &= ~none;
                const u32 absent = absent_from(place);
                if (ONE_RANK && absent < rows && missing != 0) {
#pragma unroll
                    for (u32 j = 0; j < 2; j++)
                        if (rank_row + 32 * j >= absent) none |= 1u << j;
#pragma unroll
                    for (u32 j = 0; j < N; j++)
                        if (row + SHARING * j >= absent) none |= 4u << j;
                    missing &= ~none;
                }
                if (missing == 0) return placed;
                const u32 first_bit = __ffs(missing) - 1, i = first_bit < 2 ? rank_row + 32 * first_bit : row + SHARING * (first_bit - 2);
                at = b.place(rank(i) == b.me ? PHASE_PARTIALS : PHASE_TOTALS, rank(i), block(i));
                // From registers: another load would lengthen every poll.
#pragma unroll
                for (u32 j = 0; j < 2; j++)
                    if (first_bit == j) seen = cell_epoch(n[j]);
#pragma unroll
                for (u32 j = 0; j < N; j++)
                    if (first_bit == 2 + j) seen = cell_epoch(cell_epoch(v[j][0]) != b.epoch ? v[j][0] : v[j][1]);
                if (!ONE_RANK && ++turn % 4 == 0 && i >= absent_from(place_of(rank(i)))) none |= 1u << first_bit;
                return false;
            });
            if (!warp::all(ok)) return false;
            if (ranks) {
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    const u32 i = rank_row + 32 * j, count = none >> j & 1 ? 0 : (u32)n[j];
                    rank_all += count;
                    if (before(i)) rank_below += count;
                    // For the prefix sums of what comes here.
                    if (b.tells() && b.warp == b.me) atomicAdd(&b.control.from[rank(last(i))], count);
                }
            }
            // Two experts at once: eight chunks have at most 65535 tokens.
            u32 pairs_below[2] = {}, pairs_all[2] = {};
#pragma unroll
            for (u32 j = 0; j < N; j++) {
                if (none >> (2 + j) & 1) v[j][0] = v[j][1] = 0;
                const bool lower = before(row + SHARING * j);
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    pairs_all[i] += (u32)v[j][i];
                    if (lower) pairs_below[i] += (u32)v[j][i];
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                all[i] += pairs_all[i / 2] >> 16 * (i % 2) & 0xffff;
                below[i] += pairs_below[i / 2] >> 16 * (i % 2) & 0xffff;
            }
        }
        if (ranks) {
            rank_all = sum_lanes(rank_all, b.lane, 32);
            rank_below = sum_lanes(rank_below, b.lane, 32);
            if (b.lane == 0) {
                b.base()[b.p.experts + b.warp] += rank_below;
                b.total()[b.p.experts + b.warp] += rank_all;
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            all[i] = sum_lanes(all[i], b.lane, SHARING);
            below[i] = sum_lanes(below[i], b.lane, SHARING);
            const u32 q = 4 * column + i;
            if (row_in_eight == 0 && q < b.p.experts) {
                b.base()[q] += below[i];
                b.total()[q] += all[i];
            }
        }
        return true;
    }
};

// Expanded, by all warps: adds the counts of a run of blocks of all ranks to `base` and `total`. The closer learns the places in the first one. False if something
// did not come.
DEVICE bool gather(const Block& b, u32 first, u32 blocks) {
    const Gather gather(b, first, blocks);
    const u32 columns = (b.pairs() + 1) / 2;
    bool ranks = b.warp < RANKS, awaits = b.warp == CLOSER && first == 0;
#pragma unroll 1
    for (u32 column = b.warp * Gather::COLUMNS; column < columns || ranks || awaits; column += WARPS * Gather::COLUMNS) {
        Places places;
        if (!gather.run(column + b.lane / Gather::SHARING, ranks, awaits, places)) return false;
        if (awaits && !warp::all(places.keep(b))) return false;
        ranks = awaits = false;
    }
    return true;
}

// The most sending blocks of a rank, this one among them.
DEVICE u32 most_senders(const Block& b) {
    u32 most = b.p.senders;
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) most = b.control.senders[r] > most ? b.control.senders[r] : most;
    return most < MAX_SENDERS ? most : MAX_SENDERS;
}

// By all threads: what this block's positions start from. Ends with a block barrier; false, for all of them, if something did not come.
DEVICE bool exchange_counts(const Block& b) {
    if (!EXPANDED) {
        // By warps that carry no rows, as far as there are any.
        bool ok = true;
        const u32 to = WATCHER - b.warp;
        if (to < RANKS) ok = gather_rank(b, to);
        if (b.warp == CLOSER) ok = acquire_places(b);
        return !__syncthreads_or(!ok);
    }
    // Other ranks may have more sending blocks: those come in a second turn.
    u32 first = 0;
    for (;;) {
        if (__syncthreads_or(!gather(b, first, (first == 0 ? b.p.senders : most_senders(b)) - first))) return false;
        if (first != 0 || most_senders(b) == b.p.senders) return true;
        first = b.p.senders;
    }
}

// By one warp: the start of each expert of rank r, and what that rank is about to receive.
DEVICE void scan_experts(const Block& b, u32 r) {
    constexpr u32 EACH = 4;
    const u32 local = b.p.local_experts, align = b.p.alignment;
    const bool power = (align & (align - 1)) == 0;  // as usual; a division takes longer
    i32 rows = 0;
    for (u32 j0 = 0; j0 < local; j0 += 32 * EACH) {
        const u32 j = j0 + b.lane * EACH, q = r * local + j;
        i32 padded[EACH], mine = 0;
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            const u32 n = j + i < local ? b.total()[q + i] + align - 1 : 0;
            padded[i] = (i32)(power ? n & ~(align - 1) : n / align * align);
            mine += padded[i];
        }
        const i32 sum = warp::inclusive_sum(mine, b.lane);
        i32 start = rows + sum - mine;
#pragma unroll
        for (u32 i = 0; i < EACH; i++) {
            if (j + i < local) {
                if (EXPANDED) b.base()[q + i] += start;
                if (r == b.me) b.start()[j + i] = start;
            }
            start += padded[i];
        }
        rows += warp::get(sum, 31);
    }
    if (b.lane == 0) {
        if (r == b.me) b.start()[local] = rows;
        b.control.rows[r] = rows;
    }
}

// Expanded, by all warps behind a block barrier; another one must follow.
DEVICE void scan_ranks(const Block& b) {
    const u32 r = WARPS - 1 - b.warp;
    if (r < RANKS) scan_experts(b, r);
}

// Lowest rank that is about to receive more than it has room for; RANKS if none is.
DEVICE u32 over_capacity(const Block& b) {
    u32 over = RANKS;
#pragma unroll
    for (i32 r = RANKS - 1; r >= 0; r--) {
        const u32 tokens = b.total()[b.p.experts + r], rows = EXPANDED ? b.control.rows[r] : tokens;
        if (tokens > b.p.token_capacity || rows > b.p.row_capacity) over = r;
    }
    return over;
}

// By the block that tells: tokens from ranks up to s, or none if too many come.
DEVICE i32 prefix_sum(const Block& b, u32 s) {
    u32 sum = 0;
#pragma unroll
    for (u32 i = 0; i < RANKS; i++)
        if (i <= s) sum += b.control.from[i];
    return (i32)sum;
}
DEVICE void write_prefix_sums(const Block& b, u32 over, u32 thread) {
    if (thread < RANKS) b.mine<i32>(b.p.rank_psum)[thread] = over == RANKS ? prefix_sum(b, thread) : 0;
}
// See report.cuh. In the expanded layout prefix sums came before tables.
DEVICE void tell_counts(const Block& b, u32 over, u32 thread, u32 threads) {
    const u32 local = b.p.local_experts, r = over == RANKS ? b.me : over;
    const i32 tokens = b.total()[b.p.experts + r];
    const Received received = {over, tokens, EXPANDED ? b.control.rows[r] : tokens};
    write_counts(
        b.p, (u64)b.mine<u8>(0), b.epoch, received, b.start(), [&](u32 j) { return b.total()[b.me * local + j]; },
        [&](u32 s) { return prefix_sum(b, s); }, thread, threads, EXPANDED);
}

// Plain, by a worker of block 0 among those before the closer: tokens of all ranks for experts of this one.
DEVICE bool sum_own_experts(const Block& b) {
    constexpr u32 SHARING = Gather::SHARING, N = 4;
    const u32 low = b.me * b.p.local_experts, high = low + b.p.local_experts, row_in_eight = b.lane % SHARING;
    const u32 rows = RANKS * most_senders(b), worker = b.warp - b.p.row_warps, workers = b.workers() - 1;
#pragma unroll 1
    for (u32 pair0 = low / 2 + worker * Gather::COLUMNS; pair0 < (high + 1) / 2; pair0 += workers * Gather::COLUMNS) {
        const u32 pair = pair0 + b.lane / SHARING;
        const bool mine = pair < (high + 1) / 2;
        u32 even = 0, odd = 0;
#pragma unroll 1
        for (u32 row0 = row_in_eight; row0 < rows + row_in_eight; row0 += N * SHARING) {
            u64 v[N];
            const bool ok = wait_for_all(b.d, b.place(PHASE_TOTALS, b.me, 0), b.epoch, [&](Place& at, u64& seen) {
                bool ready = true;
#pragma unroll
                for (u32 j = 0; j < N; j++) {
                    const u32 row = row0 + SHARING * j, s = row % RANKS, c = row / RANKS;
                    const bool there = mine && row < rows && c < b.control.senders[s];
                    v[j] = there ? arch::ld_relaxed_sys(b.counts(b.me, s, c) + COUNT_PAIRS + pair) : pack_cell(b.epoch, 0);
                }
#pragma unroll
                for (u32 j = 0; j < N; j++) {
                    if (cell_epoch(v[j]) == b.epoch) continue;
                    const u32 row = row0 + SHARING * j;
                    at = b.place(PHASE_TOTALS, row % RANKS, row / RANKS);
                    seen = cell_epoch(v[j]);
                    ready = false;
                }
                return ready;
            });
            if (!warp::all(ok)) return false;
#pragma unroll
            for (u32 j = 0; j < N; j++) {
                even += (u32)v[j] & 0xffff;
                odd += (u32)v[j] >> 16 & 0xffff;
            }
        }
        even = sum_lanes(even, b.lane, SHARING);
        odd = sum_lanes(odd, b.lane, SHARING);
        if (row_in_eight != 0 || !mine) continue;
        if (2 * pair >= low) b.total()[2 * pair] = even;
        if (2 * pair + 1 < high) b.total()[2 * pair + 1] = odd;
    }
    return true;
}

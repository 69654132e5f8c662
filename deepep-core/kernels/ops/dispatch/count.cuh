// Phases 1 and 2 of a sending block: counts of its chunk, of its rank, of all ranks; from them every position.
#pragma once
#include "ops/dispatch/block.cuh"
#include "ops/dispatch/report.cuh"

// Ids and weights of a warp's first steps, loaded together. An id is an expert, −1, or −2 for one that is out of range.
struct Items {
    i32 expert[AHEAD];
    float weight[AHEAD];
};

DEVICE float load_weight(const Block& b, u32 token, u32 k) {
    return b.p.weights ? ((const float*)b.p.weights)[(u64)token * b.p.lanes + k] : 0.f;
}

template <class T>
DEVICE T select(const T (&values)[AHEAD], u32 i) {
    T v = values[0];
#pragma unroll
    for (u32 j = 1; j < AHEAD; j++)
        if (i == j) v = values[j];
    return v;
}

// The tokens of one warp.
struct Share {
    u32 begin, end;
    DEVICE Share(const Block& b) {
        const u32 t0 = b.chunk(blockIdx.x), n = b.chunk(blockIdx.x + 1) - t0;
        begin = t0 + (u32)((u64)n * b.warp / WARPS);
        end = t0 + (u32)((u64)n * (b.warp + 1) / WARPS);
    }
};

DEVICE void load_items(const Block& b, const TokenLanes& l, const Share& share, Items& items) {
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
        const u32 t = share.begin + i * l.per_step + l.group;
        const bool in = l.active && t < share.end;
        items.expert[i] = in && !b.cached() ? load_expert(b.p, t, l.k) : -1;
        items.weight[i] = in ? load_weight(b, t, l.k) : 0.f;
    }
}

DEVICE u32 same_expert(i32 expert, u32 lane) { return warp::match(expert >= 0 ? (u32)expert : 0x40000000u | lane); }

// Lanes of the warp that go to rank r with a token that no lower lane of the token sends there.
DEVICE u32 first_to(const TokenLanes& l, i32 dest, u32 r, u32 lane, u32& group) {
    const u32 all = warp::ballot(dest == (i32)r);
    group = all & l.mask;
    return warp::ballot(dest == (i32)r && (group & warp::below(lane)) == 0);
}

// Counts this warp's tokens. Invalid ids become −1, here and in the handle.
DEVICE void count_tokens(const Block& b, const TokenLanes& l, const Share& share, Items& items) {
    u16* mine = b.warp_counts + b.warp * b.counts;
    i32* topk = b.mine<i32>(b.p.topk);
    u32 to_rank = 0;  // lane r: tokens for rank r
    u32 step = 0;
#pragma unroll 1
    for (u32 t0 = share.begin; t0 < share.end; t0 += l.per_step, step++) {
        const u32 t = t0 + l.group;
        const bool in = l.active && t < share.end;
        i32 e = -1;
        if (step < AHEAD) e = select(items.expert, step);
        else if (in) e = load_expert(b.p, t, l.k);
        u32 same = same_expert(e, b.lane);
        if (e == -2) report_expert(b.p, b.epoch, RECORD_BAD_EXPERT, t, l.k);
        const bool twice = e >= 0 && (same & l.mask & warp::below(b.lane));
        if (twice) report_expert(b.p, b.epoch, RECORD_DUPLICATE_EXPERT, t, l.k);
        if (e < 0 || twice) e = -1;
#pragma unroll
        for (u32 j = 0; j < AHEAD; j++)
            if (step == j) items.expert[j] = e;
        if (in) topk[(u64)t * b.p.lanes + l.k] = e;
        same &= warp::ballot(e >= 0);
        if (e >= 0 && (same & warp::below(b.lane)) == 0) mine[e] += __popc(same);
        const i32 dest = e >= 0 ? e / (i32)b.p.local_experts : -1;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            u32 group;
            const u32 firsts = first_to(l, dest, r, b.lane, group);
            if (b.lane == r) to_rank += __popc(firsts);
        }
        warp::sync();
    }
    if (b.lane < RANKS) mine[b.p.experts + b.lane] = to_rank;
}

// Publishes this block's counts and finds those of the rank.
DEVICE void sum_blocks(const Block& b) {
    const u32 c = blockIdx.x, n = b.p.senders;
    for (u32 q = threadIdx.x; q < b.counts; q += THREADS) {
        u32 sum = 0;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            u16* at = b.warp_counts + w * b.counts + q;
            const u32 v = *at;
            *at = sum;
            sum += v;
        }
        arch::st_relaxed_gpu(b.partials(c) + q, pack_cell(b.epoch, sum));
    }
    for (u32 q = threadIdx.x; q < b.counts; q += THREADS) {
        constexpr u32 BATCH = 8;
        u32 before = 0, all = 0;
        for (u32 first = 0; first < n; first += BATCH) {
            u64 v[BATCH];
            const bool ok = wait_until(b.d, b.place(PHASE_PARTIALS, b.me, first), b.epoch, [&](u64& seen) {
                bool complete = true;
#pragma unroll
                for (u32 i = 0; i < BATCH; i++)
                    v[i] = first + i < n ? arch::ld_relaxed_gpu(b.partials(first + i) + q) : pack_cell(b.epoch, 0);
#pragma unroll
                for (u32 i = 0; i < BATCH; i++)
                    if (cell_epoch(v[i]) != b.epoch) {
                        complete = false;
                        seen = cell_epoch(v[i]);
                    }
                return complete;
            });
            if (!ok) {
                b.control.failed = 1;
                return;
            }
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                all += (u32)v[i];
                if (first + i < c) before += (u32)v[i];
            }
        }
        b.base[q] = before;
        // Each rank gets the totals from one block.
        for (u32 r = c; r < RANKS; r += n)
            arch::st_relaxed_sys(b.totals(r, b.me) + CELL_COUNTS + q, pack_cell(b.epoch, all));
    }
}

// First thing in the kernel, by block 0: this rank's slots may be written from now on. The place goes first: its release has nothing to wait for.
DEVICE void publish_place(const Block& b) {
    if (threadIdx.x >= RANKS) return;
    u64* cells = b.totals(threadIdx.x, b.me);
    arch::st_release_sys(cells + CELL_PLACE, pack_cell(b.epoch, b.p.place));
    arch::st_relaxed_sys(cells + CELL_CALL, pack_cell(b.epoch, b.p.call));
}

// By lanes r < R of one warp: waits until rank r's slots may be written, and learns where they are.
DEVICE void acquire_places(const Block& b) {
    const u32 r = b.lane;
    if (r >= RANKS) return;
    const u64* cells = b.totals(b.me, r);
    u64 place = 0, call = 0;
    bool ok = wait_until(b.d, b.place(PHASE_TOTALS, r, CELL_PLACE), b.epoch, [&](u64& seen) {
        call = arch::ld_relaxed_sys(cells + CELL_CALL);
        place = arch::ld_acquire_sys(cells + CELL_PLACE);
        seen = cell_epoch(place) != b.epoch ? cell_epoch(place) : cell_epoch(call);
        return seen == b.epoch;
    });
    if (ok && (u32)call != b.p.call) {
        give_up(b.d, b.place(PHASE_PARAMETERS, r, CELL_CALL), true, b.p.call, (u32)call, 0);
        ok = false;
    }
    if (!ok) b.control.failed = 1;
    const u32 value = (u32)place;
    b.control.output[r] = b.d.heap[r] + b.p.outputs + (u64)(value & 0xff) * b.p.output_stride;
    b.control.handle[r] = b.d.heap[r] + b.p.handles + (u64)(value >> 8 & 0xfff) * b.p.handle_stride;
    b.control.senders[r] = value >> 20;
}

// Learns the counts of all ranks. Block 0 keeps the prefix sums of what comes here.
DEVICE void sum_ranks(const Block& b) {
    for (u32 q = threadIdx.x; q < b.counts; q += THREADS) {
        u64 v[RANKS];
        u32 missing = 0;
        const u64* cells = b.totals(b.me, 0) + CELL_COUNTS + q;
        const u64 start = arch::now_ns();
        for (u32 n = 1;; n++) {
            bool complete = true;
#pragma unroll
            for (u32 s = 0; s < RANKS; s++) v[s] = arch::ld_relaxed_sys(cells + (u64)s * b.d.cells);
#pragma unroll
            for (u32 s = 0; s < RANKS; s++)
                if (cell_epoch(v[s]) != b.epoch) {
                    complete = false;
                    missing = s;
                }
            if (complete) break;
            if (n & 31) continue;
            const bool other = aborted(b.d);
            const u64 waited = arch::now_ns() - start;
            if (other || waited > b.d.timeout_ns) {
                u64 seen = 0;
#pragma unroll
                for (u32 s = 0; s < RANKS; s++)
                    if (s == missing) seen = cell_epoch(v[s]);
                give_up(b.d, b.place(PHASE_TOTALS, missing, q), !other, b.epoch, seen, waited);
                b.control.failed = 1;
                return;
            }
        }
        u32 below = 0, all = 0;
        i32* psum = b.mine<i32>(b.p.rank_psum);
#pragma unroll
        for (u32 s = 0; s < RANKS; s++) {
            if (s < b.me) below += (u32)v[s];
            all += (u32)v[s];
            if (blockIdx.x == 0 && q == b.p.experts + b.me) psum[s] = all;
        }
        b.base[q] += below;
        b.total[q] = all;
    }
}

// By warp r < R: the start of each expert on rank r, and what that rank is about to receive.
DEVICE void scan_experts(const Block& b) {
    const u32 r = b.warp, local = b.p.local_experts, align = b.p.alignment;
    if (r >= RANKS) return;
    i32 rows = 0;
    for (u32 j0 = 0; j0 < local; j0 += 32) {
        const u32 j = j0 + b.lane, q = r * local + j;
        const i32 padded = j < local ? (b.total[q] + align - 1) / align * align : 0;
        const i32 sum = warp::inclusive_sum(padded, b.lane);
        const i32 start = rows + sum - padded;
        if (j < local) {
            if (EXPANDED) b.base[q] += start;
            if (r == b.me) b.start[j] = start;
        }
        rows += warp::get(sum, 31);
    }
    if (b.lane == 0) {
        const i32 tokens = b.total[b.p.experts + r];
        if (r == b.me) b.start[local] = rows;
        b.control.tokens[r] = tokens;
        b.control.rows[r] = EXPANDED ? rows : tokens;
        const bool over = (u32)tokens > b.p.token_capacity || (u32)b.control.rows[r] > b.p.row_capacity;
        if (over) atomicMin(&b.control.over, r);
    }
}

// By block 0, see report.cuh.
DEVICE void write_counts(const Block& b) {
    const u32 over = b.control.over, local = b.p.local_experts;
    const u32 r = over == RANKS ? b.me : over;
    const Received received = {over, b.control.tokens[r], b.control.rows[r]};
    // Prefix sums were written by other threads of this block before a block barrier.
    const i32* psum = b.mine<i32>(b.p.rank_psum);
    write_counts(b.p, (u64)b.mine<u8>(0), b.epoch, received, b.start, [&](u32 j) { return b.total[b.me * local + j]; },
                 [&](u32 s) { return psum[s]; });
}

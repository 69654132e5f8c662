// Moves as many bytes as a link or a memory carries. Rows are dealt out to the targets in turn, and to warps in turn.

// A warp's row in shared memory, the barrier its loads complete on, and its share of the rows.
struct Warp {
    u32 lane, slot, slots, vectors;
    Vec16* stage;
    u64* bar;
    u32 parity = 0;

    DEVICE Warp(const Transfer& t) {
        extern __shared__ Vec16 stages[];
        __shared__ u64 bars[32];
        const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
        lane = threadIdx.x % 32;
        slot = blockIdx.x * warps + warp;
        slots = gridDim.x * warps;
        vectors = t.row_bytes / 16;
        stage = stages + warp * vectors;
        bar = bars + warp;
    }
    DEVICE void open() {
        if (lane == 0) {
            arch::mbarrier_init(bar);
            arch::mbarrier_init_done();
        }
        __syncwarp();
    }
    // By one lane.
    DEVICE void load(const void* from, u32 bytes) {
        arch::mbarrier_expect(bar, bytes);
        arch::bulk_load(stage, from, bytes, bar);
    }
    // False if nothing comes within the time.
    DEVICE bool loaded(u64 timeout_ns) {
        const u32 phase = parity;
        parity ^= 1;
        if (arch::mbarrier_try_wait(bar, phase)) return true;
        const u64 start = arch::now_ns();
        while (!arch::mbarrier_try_wait(bar, phase))
            if (arch::now_ns() - start > timeout_ns) return false;
        return true;
    }
};

// Where row i of all targets' lies.
DEVICE u8* row_of(const Transfer& t, u32 i) { return (u8*)t.target[i % t.targets] + (u64)(i / t.targets) * t.row_bytes; }

// Does nothing.
extern "C" __global__ void ceiling_empty() {}

// 16-byte stores of values made on the spot. Rows of 2 KiB: four stores of each lane.
extern "C" __global__ void __launch_bounds__(512) ceiling_store(const __grid_constant__ Transfer t) {
    const u32 lane = threadIdx.x % 32, all = (u32)t.rows * t.targets;
    for (u32 i = (u32)(thread_of_grid() / 32); i < all; i += (u32)(threads_of_grid() / 32)) {
        const u64 first = (u64)(i / t.targets) * 128 + lane;
        Vec16* const out = (Vec16*)t.target[i % t.targets] + first;
#pragma unroll
        for (u32 k = 0; k < 128; k += 32) arch::st_stream(out + k, pattern(first + k, t.round));
    }
}

// Bulk stores: each warp sends one row of shared memory again and again.
extern "C" __global__ void __launch_bounds__(512) ceiling_bulk_store(const __grid_constant__ Transfer t) {
    Warp w(t);
    for (u32 c = w.lane; c < w.vectors; c += 32) w.stage[c] = pattern((u64)w.slot * w.vectors + c, t.round);
    arch::fence_proxy_shared();
    __syncwarp();
    if (w.lane) return;
    const u32 all = (u32)t.rows * t.targets;
    for (u32 i = w.slot; i < all; i += w.slots) {
        arch::bulk_store(row_of(t, i), w.stage, t.row_bytes);
        arch::bulk_commit();
        arch::bulk_wait_read();
    }
    arch::bulk_wait();
}

// Bulk reads of rows that `ceiling_fill` wrote. Compares every row if asked to, else each warp's last one.
extern "C" __global__ void __launch_bounds__(512) ceiling_bulk_read(const __grid_constant__ Transfer t) {
    Warp w(t);
    w.open();
    const u32 all = (u32)t.rows * t.targets;
    u64 wrong = 0;
    for (u32 i = w.slot; i < all; i += w.slots) {
        if (w.lane == 0) w.load(row_of(t, i), t.row_bytes);
        if (!w.loaded(t.timeout_ns)) {
            count(t.late, 1);
            return;
        }
        if (t.compare || i + w.slots >= all) {
            const u64 first = (u64)(i / t.targets) * w.vectors;
            for (u32 c = w.lane; c < w.vectors; c += 32)
                if (!same(w.stage[c], pattern(first + c, t.round))) wrong++;
        }
        __syncwarp();
    }
    count(t.wrong, wrong);
}

// Bulk loads from `source` and bulk stores to the first target.
extern "C" __global__ void __launch_bounds__(512) ceiling_bulk_copy(const __grid_constant__ Transfer t) {
    Warp w(t);
    w.open();
    if (w.lane) return;
    for (u32 i = w.slot; i < (u32)t.rows; i += w.slots) {
        w.load((const u8*)t.source + (u64)i * t.row_bytes, t.row_bytes);
        if (!w.loaded(t.timeout_ns)) {
            count(t.late, 1);
            break;
        }
        arch::bulk_store((u8*)t.target[0] + (u64)i * t.row_bytes, w.stage, t.row_bytes);
        arch::bulk_commit();
        arch::bulk_wait_read();
    }
    arch::bulk_wait();
}

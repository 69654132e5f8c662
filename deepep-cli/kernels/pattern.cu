// What the ceilings write: every 16-byte vector differs from every other and from those of other rounds, so that what has arrived can be told
// from what lay there before.

DEVICE Vec16 pattern(u64 index, u32 round) {
    const u32 low = (u32)index;
    return {low, low * 0x9e3779b1u + round, (u32)(index >> 32) ^ ~low, round};
}
DEVICE bool same(const Vec16& a, const Vec16& b) { return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w; }

// Adds to a counter; the lanes of a warp may come one by one.
DEVICE void count(u64 counter, u64 n) {
    if (n) atomicAdd((u64*)counter, n);
}

// The n-th of this block's threads in the grid.
DEVICE u64 thread_of_grid() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE u64 threads_of_grid() { return (u64)gridDim.x * blockDim.x; }

// Rows of the first target in order: vector c of row r is pattern(r * vectors + c).
extern "C" __global__ void ceiling_fill(const __grid_constant__ Transfer t) {
    Vec16* const out = (Vec16*)t.target[0];
    const u64 all = t.rows * (t.row_bytes / 16);
    for (u64 i = thread_of_grid(); i < all; i += threads_of_grid()) out[i] = pattern(i, t.round);
}

// Compares the rows of the first target: with what `ceiling_fill` writes, or, if there are slots, with what that many of them have stored.
extern "C" __global__ void ceiling_check(const __grid_constant__ Transfer t) {
    const u32 vectors = t.row_bytes / 16;
    const u64 all = t.rows * vectors;
    u64 wrong = 0;
    for (u64 i = thread_of_grid(); i < all; i += threads_of_grid()) {
        u64 index = i;
        if (t.slots) {
            const u64 slot = (i / vectors * t.targets + t.which) % t.slots;
            index = slot * vectors + i % vectors;
        }
        if (!same(arch::ld_received((const Vec16*)t.target[0] + i), pattern(index, t.round))) wrong++;
    }
    count(t.wrong, wrong);
}

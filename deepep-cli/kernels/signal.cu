// Words that devices send each other. One block; every wait ends at a deadline.

// Asks until it is so; false at the deadline.
template <class Ready>
DEVICE bool in_time(u64 timeout_ns, Ready ready) {
    const u64 start = arch::now_ns();
    for (u32 n = 1;; n++) {
        if (ready()) return true;
        if (n % 64 == 0 && arch::now_ns() - start > timeout_ns) return false;
    }
}

// Waits until a word has reached a value, counted so that wrapping does no harm.
DEVICE bool reached(const u32* word, u32 value, u64 timeout_ns) {
    return in_time(timeout_ns, [&] { return (i32)(arch::ld_acquire_sys(word) - value) >= 0; });
}

// A word goes round: each place waits for its own and passes it on; the leader begins.
extern "C" __global__ void ceiling_ring(const __grid_constant__ Ring r) {
    for (u32 n = 1; n <= r.rounds; n++) {
        if (r.leader) arch::st_release_sys((u32*)r.next, r.base + n);
        if (!reached((const u32*)r.own, r.base + n, r.timeout_ns)) {
            count(r.late, 1);
            return;
        }
        if (!r.leader) arch::st_release_sys((u32*)r.next, r.base + n);
    }
}

// All places meet: thread p tells place p, and waits for it. If there is a word of the host's, that comes first.
extern "C" __global__ void ceiling_meet(const __grid_constant__ Meeting m) {
    bool open = true;
    if (threadIdx.x == 0 && m.go) open = reached((const u32*)m.go, m.round, m.timeout_ns);
    open = __syncthreads_and(open);
    if (threadIdx.x >= m.places) return;
    if (open) arch::st_release_sys((u32*)m.words[threadIdx.x] + m.place, m.round);
    if (!open || !reached((const u32*)m.words[m.place] + threadIdx.x, m.round, m.timeout_ns)) count(m.late, 1);
}

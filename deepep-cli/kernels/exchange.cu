// Packets between all devices, as batches of a few tokens travel, and nothing else: launch, loads, packets over the link, polls, stores.
//
// Who writes: each device, its source in pieces of four packets, into its slots at every peer; and what has come to it, into `out`.
// Who waits: who stores a piece, for its packets. Their tag is that of the epoch, the number of this kernel among those of its kind; each block counts for itself.
// Why nothing is overwritten early: two kinds of kernels, with slots of their own, take turns on the stream of each device, A(1) B(1) A(2) B(2) …, and each ends when
//   it has taken all packets of all peers. Before A(e + 1) of a device writes to peer d, B(e) there has ended. So it has had a packet of d's B(e), which sends none
//   before d's A(e), the last reader of these slots, has ended. Likewise B(e + 1): A(e + 1) has had a packet of d's, which was sent after d's B(e).
// Why no old tag passes: slots are zeroed before a device's first kernel, and there are fewer than 65535 of each kind until they are zeroed again.
// Kernels may be launched while the one before them runs: they touch nothing before that has ended. All blocks of a kernel are resident at once, it sends before
//   it waits, and it waits for the other devices' kernels of its number and for the one before it, never for one behind it.
// Who gives up counts itself in `late`. Later kernels of this device then do nothing, and its peers give up in turn: each wait has a deadline, and only one kernel
//   of a device comes to it.

// PIECE_PACKETS packets carry PIECE_WORDS words of 8 bytes; word j of piece g lies at j · pieces + g.

// A warp's share, 32 pieces at a time. They are dealt out to blocks one by one, those that it sends as those that it receives.
struct Share {
    const Exchange& x;
    bool sends;
    u32 item, step;    // this one, and how far the next one is
    u32 peer = 0, g;   // piece of this lane
    Pieces<PIECE_PACKETS> piece;
    Vec16 p[PIECE_PACKETS];

    // The first blocks send and the others receive, or half of each block's warps do.
    DEVICE Share(const Exchange& exchange) : x(exchange) {
        const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32, half = warps / 2;
        const bool apart = x.senders != 0;
        sends = apart ? blockIdx.x < x.senders : warp < half;
        const u32 blocks = !apart ? gridDim.x : sends ? x.senders : gridDim.x - x.senders;
        const u32 block = apart && !sends ? blockIdx.x - x.senders : blockIdx.x;
        item = (apart || sends ? warp : warp - half) * blocks + block;
        step = blocks * (apart ? warps : half);
        find();
    }
    DEVICE void find() {
        u32 at = item;
        for (peer = 0; at >= x.items && peer < x.targets; peer++) at -= x.items;
        g = at * 32 + threadIdx.x % 32;
    }
    DEVICE bool next() {
        item += step;
        find();
        return some();
    }
    DEVICE bool some() const { return peer < x.targets; }
    DEVICE bool mine() const { return some() && g < x.pieces; }
    DEVICE u64* words(u64 of) const { return (u64*)of + (u64)peer * PIECE_WORDS * x.pieces + g; }
    DEVICE const Vec16* slot() const { return (const Vec16*)x.slots + (u64)peer * PIECE_PACKETS * x.pieces; }

    // What it sends, or a first look at what it receives. Nothing is waited for.
    DEVICE void load() {
        if (!mine()) return;
        if (!sends) return load_packets(slot(), x.pieces, g, x.zero, p);
        const u64* from = words(x.source);
#pragma unroll
        for (u32 j = 0; j < PIECE_WORDS; j++) arch::ld_stream(from + j * x.pieces, piece.w[2 * j], piece.w[2 * j + 1]);
    }
    DEVICE void send(u32 tag) const {
        if (mine()) piece.send((Vec16*)x.target[peer], x.pieces, g, tag);
    }
    // False if it does not come in time.
    DEVICE bool receive(u32 tag) {
        if (!mine()) return true;
        const bool came = in_time(x.timeout_ns, [&] {
            if (have_tag(p, tag)) return true;
            load_packets(slot(), x.pieces, g, x.zero, p);
            return false;
        });
        if (!came) return false;
        piece.take(p);
        u64* to = words(x.out);
#pragma unroll
        for (u32 j = 0; j < PIECE_WORDS; j++) to[j * x.pieces] = (u64)piece.w[2 * j + 1] << 32 | piece.w[2 * j];
        return true;
    }
};

// Two blocks fit on a multiprocessor: the next kernel starts early beside this one.
extern "C" __global__ void __launch_bounds__(512, 2) ceiling_exchange(const __grid_constant__ Exchange x) {
    arch::launch_dependents();
    Share share(x);
    arch::wait_for_predecessor();
    // All that is read is on its way at once; a look comes last, since something is done with it.
    u32* const epochs = (u32*)x.epochs;
    const u32 before = arch::ld_received(epochs + blockIdx.x);
    const u64 late = arch::ld_received((const u64*)x.late);
    share.load();
    const u32 epoch = before + 1, tag = packet_tag(epoch);
    bool ok = late == 0;
    // All warps have read the epoch.
    __syncthreads();
    if (share.sends && ok)
#pragma unroll 1
        for (bool some = share.some(); some; some = share.next()) {
            if (share.item >= share.step) share.load();
            share.send(tag);
        }
    if (threadIdx.x == 0) epochs[blockIdx.x] = epoch;
    if (share.sends || !ok) return;
#pragma unroll 1
    for (bool some = share.some(); some && ok; some = share.next()) {
        if (share.item >= share.step) share.load();
        ok = share.receive(tag);
    }
    if (!ok) count(x.late, 1);
}

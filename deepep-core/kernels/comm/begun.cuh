// Words in which a rank tells its peers that its kernel of an epoch has started, and with what call: epoch << 32 | digest of the call.
//
// Who writes: one block, near the start of a kernel, one word for each parity of the epoch. Who waits: one warp of every rank, for the epoch itself, to compare the
// digests; then the peers' kernels before that one have ended. A rank that is two calls ahead has put a newer word there, and nothing is compared: in a
// combine of rows. In packets no rank gets so far: before it ends its next call it waits for this rank's word of that one, which is told when this one has ended.
#pragma once
#include "comm/wait.cuh"

// `cells`: the words of one kind of operation in rank r's memory, two parities of R lines.
struct Begun {
    const Domain& d;
    u64 cells;
    u32 operation, epoch, digest;

    DEVICE u64* cell(u32 r, u32 from, u32 of) const { return cell64(d, r, cells + (u64)((of & 1) * RANKS + from) * CELL_LINE); }
    // By the first R threads of a block.
    DEVICE void tell() const { tell(threadIdx.x); }
    // By a thread for rank r, if there is one.
    DEVICE void tell(u32 r) const {
        if (r < RANKS && r != d.rank) arch::st_release_sys(cell(r, d.rank, epoch), pack_cell(epoch, digest));
    }
    // Rank r's kernel of epoch `of` has started. By one thread.
    DEVICE bool wait(u32 r, u32 of, u64& word) const {
        const u64* from = cell(d.rank, r, of);
        return wait_until(d, {operation, PHASE_STARTED, epoch, r, 0}, of, [&](u64& seen) {
            word = arch::ld_acquire_sys(from);
            seen = cell_epoch(word);
            return (i32)(cell_epoch(word) - of) >= 0;
        });
    }
    // All ranks have made the same call; if not, the call ends everywhere. By one warp of the rank, when it has nothing else to do: who waits for something that
    // a peer sends otherwise in another call learns of it by the abort.
    DEVICE void compare_all() const {
        const u32 r = threadIdx.x % 32;
        if (r < RANKS && r != d.rank) compare(r);
    }
    // Rank r has made the same call. By one thread.
    DEVICE bool compare(u32 r) const {
        u64 word = 0;
        if (!wait(r, epoch, word)) return false;
        if (cell_epoch(word) != epoch || (u32)word == digest) return true;
        give_up(d, {operation, PHASE_PARAMETERS, epoch, r, 0}, true, digest, (u32)word, 0);
        return false;
    }
};

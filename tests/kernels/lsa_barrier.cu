// NCCL's own LSA barrier between stores to all peers and loads of what they stored, many times over: a barrier that lets anybody
// through early, or that does not order the stores, is seen as a wrong word.

#include "prelude.h"
#include <nccl_device.h>

extern "C" __global__ void barrier_rounds(ncclDevComm comm, ncclWindow_t window, unsigned words, unsigned rounds,
                                          unsigned* wrong) {
    ncclTeam lsa = ncclTeamLsa(comm);
    ncclLsaBarrierSession<ncclCoopCta> barrier{ncclCoopCta(), comm, lsa, comm.lsaBarrier, blockIdx.x};
    // A slot for each block of each rank.
    size_t mine = (static_cast<size_t>(lsa.rank) * gridDim.x + blockIdx.x) * words;
    const unsigned* own = static_cast<const unsigned*>(ncclGetLocalPointer(window, 0));
    for (unsigned round = 1; round <= rounds; ++round) {
        for (int peer = 0; peer < lsa.nRanks; ++peer) {
            unsigned* slot = static_cast<unsigned*>(ncclGetLsaPointer(window, 0, peer)) + mine;
            for (unsigned i = threadIdx.x; i < words; i += blockDim.x) slot[i] = round * 1000003u + lsa.rank * 101u + i;
        }
        barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
        for (int from = 0; from < lsa.nRanks; ++from) {
            const volatile unsigned* slot = own + (static_cast<size_t>(from) * gridDim.x + blockIdx.x) * words;
            for (unsigned i = threadIdx.x; i < words; i += blockDim.x)
                if (slot[i] != round * 1000003u + from * 101u + i) atomicAdd(wrong, 1u);
        }
        // Nobody overwrites what another rank has not read yet.
        barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel);
    }
}

// Plain loads and stores to the memory of other ranks, through addresses that the host computed. No header of NCCL.

struct Peers {
    unsigned long long at[8];
};

// What rank `from` writes into word `index` of its slot in the memory of rank `to`.
__device__ unsigned value(unsigned seed, unsigned from, unsigned to, unsigned index) {
    unsigned mixed = seed * 2654435761u ^ (from * 40503u + to * 9176u + index);
    mixed ^= mixed >> 15;
    return mixed * 2246822519u;
}

// Fills this rank's slot in the memory of every rank.
extern "C" __global__ void write_peers(Peers peers, unsigned count, unsigned rank, unsigned words, unsigned seed) {
    for (unsigned peer = 0; peer < count; ++peer) {
        unsigned* slot = reinterpret_cast<unsigned*>(peers.at[peer]) + static_cast<unsigned long long>(rank) * words;
        for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
            slot[i] = value(seed, rank, peer, i);
    }
    __threadfence_system();
}

// Reads back, across the link, what this rank wrote into the memory of every rank.
extern "C" __global__ void check_peers(Peers peers, unsigned count, unsigned rank, unsigned words, unsigned seed,
                                       unsigned* wrong) {
    for (unsigned peer = 0; peer < count; ++peer) {
        const volatile unsigned* slot =
            reinterpret_cast<const unsigned*>(peers.at[peer]) + static_cast<unsigned long long>(rank) * words;
        for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
            if (slot[i] != value(seed, rank, peer, i)) atomicAdd(wrong, 1u);
    }
}

// Checks what every rank wrote into this rank's memory.
extern "C" __global__ void check_own(unsigned long long own, unsigned count, unsigned rank, unsigned words, unsigned seed,
                                     unsigned* wrong) {
    for (unsigned from = 0; from < count; ++from) {
        const volatile unsigned* slot =
            reinterpret_cast<const unsigned*>(own) + static_cast<unsigned long long>(from) * words;
        for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
            if (slot[i] != value(seed, from, rank, i)) atomicAdd(wrong, 1u);
    }
}

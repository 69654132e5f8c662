// Runs a collective's kernel on CPUs, against an oracle: all ranks at once, several calls one after the other without a wait between the
// ranks, with grids, chunks, sizes and alignments drawn from a seed.
//
// KERNEL is the source, ENTRY the kernel's function. Arguments: the seed, then the offsets of the layout.
#include KERNEL
#include "arch/multimem.cuh"
#include <random>

constexpr u32 CALLS = 6, MOST_BLOCKS = 3, CANARY = 64;
constexpr u8 POISON = 0xa5;

struct Layout {
    u64 bytes, abort, reported, flags, steps, epochs, calls, call_count, words, count, cells, stages, cell_count, slice;
};

static Domain domain(const Layout& l, u32 rank, u8* status) {
    Domain d = {};
    for (u32 r = 0; r < RANKS; r++) d.heap[r] = (u64)heaps[r];
    d.status = (u64)status;
    d.timeout_ns = 30ull * 1000 * 1000 * 1000;
    d.abort = l.abort;
    d.reported = l.reported;
    d.rank = rank;
    d.ranks = RANKS;
    return d;
}

// Runs `call(rank, block, number)` on all threads of all blocks of all ranks; the calls of a rank follow each other.
template <class Call>
static void run(u32 calls, u32 most_blocks, u32 threads, Call call) {
    std::vector<Block*> ranks, blocks;
    for (u32 r = 0; r < RANKS; r++) {
        ranks.push_back(new Block(most_blocks * threads));
        for (u32 b = 0; b < most_blocks; b++) blocks.push_back(new Block(threads));
    }
    std::vector<std::thread> all;
    for (u32 r = 0; r < RANKS; r++)
        for (u32 b = 0; b < most_blocks; b++)
            for (u32 t = 0; t < threads; t++)
                all.emplace_back([=] {
                    threadIdx.x = t;
                    blockDim.x = threads;
                    blockIdx.x = b;
                    this_block = blocks[r * most_blocks + b];
                    for (u32 n = 0; n < calls; n++) {
                        call(r, b, n);
                        ranks[r]->barrier.arrive_and_wait();
                    }
                });
    for (auto& thread : all) thread.join();
}

// Nobody gave up, or everybody because of the calls.
static void check_status(const std::vector<u8*>& status, bool same) {
    for (u8* s : status) {
        const StatusRecord& record = *(StatusRecord*)s;
        if (same && record.sequence) fail("a wait gave up", record.sequence);
        if (!same && record.phase != PHASE_PARAMETERS) fail("the other call was not noticed", record.phase);
    }
}

#ifdef DIFFER
constexpr bool SAME = false;
#else
constexpr bool SAME = true;
#endif

#if defined BARRIER || defined MEET
static void test(const Layout& l, std::mt19937&, const std::vector<u8*>& status) {
    constexpr u32 ROUNDS = 200;
    static std::atomic<u32> reached[RANKS];
    run(ROUNDS, 1, 32, [&](u32 rank, u32, u32 round) {
        if (threadIdx.x == 0) reached[rank] = round + 1;
#ifdef MEET
        CollectiveParams p = {domain(l, rank, status[rank])};
        p.calls = l.calls;
        p.call_count = l.call_count;
        p.digest = round;
#else
        MultimemBarrierParams p = {domain(l, rank, status[rank]), MULTICAST_BASE, l.words, l.count};
#endif
        gridDim.x = 1;
        ENTRY(p);
        for (u32 r = 0; r < RANKS; r++)
            if (reached[r] < round + 1 || reached[r] > round + 2) fail("a rank is not where it should be", reached[r]);
    });
}
#else
constexpr u32 SIZE = ELEMENT == ELEMENT_F32 ? 4 : 2;

static float read(const u8* p) {
    u32 word = 0;
    memcpy(&word, p, SIZE);
    return ELEMENT == ELEMENT_BF16 ? arch::bf16_low(word) : ELEMENT == ELEMENT_F16 ? arch::f16_low(word) : __uint_as_float(word);
}
static void write(u8* p, float value) {
    const u32 word = ELEMENT == ELEMENT_BF16  ? arch::bf16_pack(value, 0)
                     : ELEMENT == ELEMENT_F16 ? arch::f16_pack(value, 0)
                                              : __float_as_uint(value);
    memcpy(p, &word, SIZE);
}

enum Kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE };

struct Transfer {
    u64 bytes, given, got;
    u32 blocks, chunk, shift;
    bool in_place;
    // By rank: what is given; memory of both tensors; where they are in it.
    std::vector<u8> values[RANKS], memory[2][RANKS];
    u8 *input[RANKS], *output[RANKS];

    Transfer(const Layout& l, std::mt19937& random) {
        // Small enough for cells in kernels that use them; otherwise many chunks.
        const u32 most = CELLS ? (u32)l.cell_count * 4 : 30000;
        bytes = (1 + random() % (most / SIZE)) * SIZE;
        if (random() % 3 == 0) bytes = (bytes + 15) / 16 * 16;
        if (bytes > most) bytes = most;
        given = KIND == REDUCE_SCATTER ? bytes * RANKS : bytes;
        got = KIND == ALL_GATHER ? bytes * RANKS : bytes;
        blocks = 1 + random() % MOST_BLOCKS;
        chunk = 16 * (1 + random() % (l.slice / 16));
        shift = random() % 2 ? SIZE : 0;
        in_place = random() % 3 == 0;
        for (u32 r = 0; r < RANKS; r++) {
            values[r].resize(given);
            for (u64 i = 0; i < given; i += SIZE) write(&values[r][i], ((int)(random() % 4001) - 2000) / 256.f);
            u8* at[2];
            for (u32 m = 0; m < 2; m++) {
                memory[m][r].assign((given > got ? given : got) + 3 * CANARY, POISON);
                at[m] = (u8*)(((u64)memory[m][r].data() + CANARY + 15) / 16 * 16) + shift;
            }
            const u64 part = r * bytes;
            input[r] = at[0] + (in_place && KIND == ALL_GATHER ? part : 0);
            output[r] = in_place ? at[0] + (KIND == REDUCE_SCATTER ? part : 0) : at[1];
            memcpy(input[r], values[r].data(), given);
        }
    }

    CollectiveParams params(const Layout& l, u32 rank, u8* status) const {
        CollectiveParams p = {domain(l, rank, status), (u64)input[rank], (u64)output[rank], bytes};
        p.multicast = MULTICAST ? MULTICAST_BASE : 0;
        p.flags = l.flags;
        p.steps = l.steps;
        p.epochs = l.epochs;
        p.calls = l.calls;
        p.call_count = l.call_count;
        p.digest = SAME || rank != 1 ? 7 : 8;
        p.cells = l.cells;
        p.stages = l.stages;
        p.cell_count = l.cell_count;
        p.slice = l.slice;
        p.chunk = chunk;
        return p;
    }

    std::vector<u8> expected(u32 rank) const {
        std::vector<u8> all(got);
        for (u64 i = 0; i < got; i += SIZE) {
            if (KIND == ALL_GATHER) {
                memcpy(&all[i], &values[i / bytes][i % bytes], SIZE);
                continue;
            }
            const u64 from = KIND == REDUCE_SCATTER ? rank * bytes + i : i;
            float sum = read(&values[0][from]);
            for (u32 r = 1; r < RANKS; r++) sum += read(&values[r][from]);
            write(&all[i], sum);
        }
        return all;
    }

    void check(u32 number) const {
        for (u32 r = 0; r < RANKS; r++) {
            const auto all = expected(r);
            for (u64 i = 0; i < got; i++)
                if (output[r][i] != all[i]) {
                    printf("call %u: %llu bytes, %u blocks, chunks of %u, shift %u, in place %d: ", number, bytes, blocks, chunk, shift, in_place);
                    fail("differs at byte", i);
                }
            // Nothing is written around the tensor.
            if (in_place) continue;
            for (u32 i = 0; i < CANARY / 2; i++)
                if (output[r][got + i] != POISON || output[r][-1 - (int)i] != POISON) fail("written outside of the output, call", number);
        }
    }
};

static void test(const Layout& l, std::mt19937& random, const std::vector<u8*>& status) {
    std::vector<Transfer> calls;
    calls.reserve(CALLS);
    for (u32 n = 0; n < CALLS; n++) calls.emplace_back(l, random);
    run(CALLS, MOST_BLOCKS, THREADS, [&](u32 rank, u32 block, u32 n) {
        gridDim.x = calls[n].blocks;
        if (block < gridDim.x) ENTRY(calls[n].params(l, rank, status[rank]));
    });
    for (u32 n = 0; SAME && n < CALLS; n++) calls[n].check(n);
}
#endif

int main(int count, char** arguments) {
    Layout l;
    if (count != 2 + sizeof(l) / 8) return 2;
    for (u32 i = 0; i < sizeof(l) / 8; i++) ((u64*)&l)[i] = strtoull(arguments[2 + i], nullptr, 10);
    std::mt19937 random(atoi(arguments[1]));
    std::vector<u8*> status;
    for (u32 r = 0; r < RANKS; r++) {
        heaps.push_back((u8*)aligned_alloc(4096, (l.bytes + 4095) / 4096 * 4096));
        memset(heaps[r], 0, l.bytes);
        status.push_back((u8*)calloc(1, 4096));
    }
    test(l, random, status);
    check_status(status, SAME);
}

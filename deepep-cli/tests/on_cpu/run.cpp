// Runs the ceilings' kernels on CPUs, as a script says: one step after the other; the launches of a step all at once, each on its device.
//
// The script on the standard input: bytes to map at an address; then steps: a kernel's name, blocks, threads of a block (one warp at most, except of
// ceiling_exchange), launches, the bytes of a parameter, and the parameters. A step named "turns" is a number of turns, of devices, and of kernels that take turns on
// each device, while devices wait for each other in kernels only; then for each kernel its blocks and threads, and the parameters of all devices.
// A kernel named "flip" turns a bit of the byte at an address. The standard output gets the 64-bit words at the addresses that "show" names.
#include "arch/types.cuh"
#include <iostream>
#include <string>
#include <sys/mman.h>

// A block's shared memory, for `stages` and `bars` of the kernels.
struct Shared {
    alignas(128) u8 stages[64 << 10];
    u64 bars[32];
};
static thread_local Shared* shared;

#include KERNELS

// A kernel under way. Its end is waited for.
struct Launch {
    std::vector<std::thread> threads;

    template <class Parameter>
    Launch(void (*kernel)(Parameter), u32 blocks, u32 threads_of_block, const std::vector<u8>& bytes) {
        if (bytes.size() != sizeof(Parameter)) fail("a parameter has another size", bytes.size());
        Parameter parameter;
        memcpy(&parameter, bytes.data(), sizeof parameter);
        for (u32 b = 0; b < blocks; b++) {
            Block* block = new Block(threads_of_block);
            Shared* memory = new Shared;
            for (u32 t = 0; t < threads_of_block; t++)
                threads.emplace_back([=] {
                    threadIdx.x = t;
                    blockDim.x = threads_of_block;
                    blockIdx.x = b;
                    gridDim.x = blocks;
                    this_block = block;
                    shared = memory;
                    kernel(parameter);
                    // A thread that has returned waits for no other.
                    block->barrier.arrive_and_drop();
                });
        }
    }
    Launch(Launch&&) = default;
    ~Launch() {
        for (auto& thread : threads) thread.join();
    }
};

template <class Parameter>
static void launch(void (*kernel)(Parameter), u32 blocks, u32 threads, const std::vector<std::vector<u8>>& parameters) {
    std::vector<Launch> all;
    for (const std::vector<u8>& bytes : parameters) all.emplace_back(kernel, blocks, threads, bytes);
}

static u64 number() {
    u64 n;
    if (!(std::cin >> n)) fail("the script ends early", 0);
    return n;
}

static std::vector<u8> bytes(u64 n) {
    std::vector<u8> all(n);
    for (u8& byte : all) byte = (u8)number();
    return all;
}

// Kernels that exchange packets, on each device one after the other, with pauses.
static void take_turns() {
    const u32 turns = (u32)number(), devices = (u32)number(), kinds = (u32)number(), size = (u32)number();
    struct Kind {
        u32 blocks, threads;
        std::vector<std::vector<u8>> parameters;
    };
    std::vector<Kind> all(kinds);
    for (Kind& kind : all) {
        kind.blocks = (u32)number();
        kind.threads = (u32)number();
        for (u32 d = 0; d < devices; d++) kind.parameters.push_back(bytes(size));
    }
    std::vector<std::thread> streams;
    for (u32 d = 0; d < devices; d++)
        streams.emplace_back([&all, d, turns] {
            for (u32 n = 0; n < turns; n++)
                for (const Kind& kind : all) {
                    std::this_thread::sleep_for(std::chrono::microseconds((n * 7 + d * 5) % 11 * 30));
                    Launch(ceiling_exchange, kind.blocks, kind.threads, kind.parameters[d]);
                }
        });
    for (auto& stream : streams) stream.join();
}

int main() {
    std::string word;
    while (std::cin >> word) {
        if (word == "map") {
            void* const at = (void*)number();
            const u64 size = number();
            const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
            if (mmap(at, size, PROT_READ | PROT_WRITE, flags, -1, 0) != at) fail("no memory at", (u64)at);
            memset(at, 0xa5, size);
        } else if (word == "zero") {
            u8* const at = (u8*)number();
            memset(at, 0, number());
        } else if (word == "flip") {
            *(u8*)number() ^= 16;
        } else if (word == "copy") {
            u8* const to = (u8*)number();
            const u8* const from = (const u8*)number();
            memcpy(to, from, number());
        } else if (word == "show") {
            std::cout << *(u64*)number() << "\n";
        } else if (word == "turns") {
            take_turns();
        } else {
            const u32 blocks = (u32)number(), threads = (u32)number(), launches = (u32)number(), size = (u32)number();
            std::vector<std::vector<u8>> parameters;
            for (u32 i = 0; i < launches; i++) parameters.push_back(bytes(size));
            if (word == "ceiling_fill") launch(ceiling_fill, blocks, threads, parameters);
            else if (word == "ceiling_check") launch(ceiling_check, blocks, threads, parameters);
            else if (word == "ceiling_store") launch(ceiling_store, blocks, threads, parameters);
            else if (word == "ceiling_bulk_store") launch(ceiling_bulk_store, blocks, threads, parameters);
            else if (word == "ceiling_bulk_read") launch(ceiling_bulk_read, blocks, threads, parameters);
            else if (word == "ceiling_bulk_copy") launch(ceiling_bulk_copy, blocks, threads, parameters);
            else if (word == "ceiling_ring") launch(ceiling_ring, blocks, threads, parameters);
            else if (word == "ceiling_meet") launch(ceiling_meet, blocks, threads, parameters);
            else fail(("no kernel " + word).c_str(), 0);
        }
    }
}

// Kernels on CPUs, one fiber a thread: what the CPU versions of arch/ and of the language of kernels ask of the runtime.
//
// Fibers run one at a time and change places where they wait, where they meet, and at accesses that other ranks see; which goes on is drawn
// from a seed. Bulk copies and packets happen later than they are started, at times that are drawn, too. Either one thread runs all ranks' kernels (`fiber_run`),
// or each kernel has a thread of its own, which others' threads share memory with (`fiber_launch`).
#pragma once
#include <cstdint>

// Aligned accesses of 16 bytes are single-copy atomic on x86 processors with AVX.
typedef uint32_t FiberPacket __attribute__((vector_size(16), may_alias));

struct FiberIndex {
    unsigned x;
};

extern "C" {
extern __thread FiberIndex fiber_thread, fiber_block, fiber_grid, fiber_threads;

// Lets others run.
void fiber_yield();
// Tells what a thread saw that others may change: threads that see the same again and again wait for another thread of the machine.
void fiber_saw(const void* at, uint64_t value);
// All threads of a block meet; returns how many of them voted.
unsigned fiber_meet_block(unsigned vote);
// So many threads of a block meet at one of its named barriers.
void fiber_meet_part(unsigned id, unsigned threads);
// All lanes of a warp meet and tell each other a value.
void fiber_meet_warp(uint64_t value, uint64_t* all);
uint8_t* fiber_shared();
uint64_t fiber_now();

void fiber_barrier_init(uint64_t* bar);
void fiber_barrier_expect(uint64_t* bar, unsigned bytes);
bool fiber_barrier_try_wait(uint64_t* bar, unsigned parity);
void fiber_bulk_load(void* to, const void* from, unsigned bytes, uint64_t* bar);
void fiber_bulk_store(void* to, const void* from, unsigned bytes);
void fiber_bulk_commit();
// All groups of this thread but the newest `but` have read their source, or are complete.
void fiber_bulk_wait(unsigned but, bool only_read);

// A packet is on its way. It arrives as a whole, by the end of the kernel; the packets of a thread arrive in any order, except at one address.
void fiber_send(FiberPacket* to, FiberPacket packet);
// What this thread has sent to this address, or to any if there is none, has arrived: what comes behind a release of it, or what it reads itself. (On a device
// a release takes along what other threads of the block had sent before they met. Here that may still be on its way.)
void fiber_arrive(const void* at);

[[noreturn]] void fiber_fail(const char* what, uint64_t value);
}

// One-dimensional bulk copies between global and shared memory. Addresses and sizes are multiples of 16 bytes.
//
// Stores belong to the bulk groups of the thread that issues them, and only that thread can wait for them.
#pragma once
#include "arch/mbarrier.cuh"

namespace arch {

DEVICE void bulk_load(void* shared, const void* global, u32 bytes, u64* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(bar)) : "memory");
}
DEVICE void bulk_store(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}
// The same, and the L2 cache gives the lines up before others.
DEVICE void bulk_store_evict_first(void* global, const void* shared, u32 bytes) {
    asm volatile("{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
                 " cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, policy; }"
                 ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All stores of this thread have read their source: shared memory may be overwritten.
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// All groups of this thread but the newest `count` are complete, like bulk_wait; also the newest if they are too many.
DEVICE void bulk_wait_but(u32 count) {
    switch (count) {
        case 1: asm volatile("cp.async.bulk.wait_group 1;" ::: "memory"); break;
        case 2: asm volatile("cp.async.bulk.wait_group 2;" ::: "memory"); break;
        case 3: asm volatile("cp.async.bulk.wait_group 3;" ::: "memory"); break;
        case 4: asm volatile("cp.async.bulk.wait_group 4;" ::: "memory"); break;
        default: asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
// All stores of this thread are complete: a release or fence may publish them.
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace arch

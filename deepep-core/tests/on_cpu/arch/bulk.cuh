// Bulk copies that are done at once.
#pragma once
#include "arch/mbarrier.cuh"

namespace arch {

inline void bulk_check(const void* a, const void* b, u32 bytes) {
    if (((u64)a | (u64)b | bytes) % 16) fail("a misaligned bulk copy", bytes);
}
inline void bulk_load(void* shared, const void* global, u32 bytes, u64* bar) {
    bulk_check(shared, global, bytes);
    memcpy(shared, global, bytes);
    mbarrier_arrived(bar, bytes);
}
inline void bulk_store(void* global, const void* shared, u32 bytes) {
    bulk_check(global, shared, bytes);
    memcpy(global, shared, bytes);
}
inline void bulk_commit() {}
inline void bulk_wait_read() {}
inline void bulk_wait() {}

}  // namespace arch

#pragma once
#include "arch/mbarrier.cuh"

namespace arch {

inline void bulk_load(void* shared, const void* global, u32 bytes, u64* bar) { fiber_bulk_load(shared, global, bytes, (uint64_t*)bar); }
inline void bulk_store(void* global, const void* shared, u32 bytes) { fiber_bulk_store(global, shared, bytes); }
inline void bulk_store_evict_first(void* global, const void* shared, u32 bytes) { fiber_bulk_store(global, shared, bytes); }
inline void bulk_commit() { fiber_bulk_commit(); }
inline void bulk_wait_read() { fiber_bulk_wait(0, true); }
inline void bulk_wait() { fiber_bulk_wait(0, false); }
inline void bulk_wait_but(u32 count) { fiber_bulk_wait(count <= 4 ? count : 0, false); }

}  // namespace arch

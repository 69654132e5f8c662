// The device-wide clock in nanoseconds, and short sleeps.
#pragma once
#include "arch/types.cuh"

namespace arch {

DEVICE u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
// Stores the time. Other accesses may pass it.
DEVICE void stamp(u64* at) {
    asm volatile("{\n\t.reg .u64 t;\n\tmov.u64 t, %%globaltimer;\n\tst.global.u64 [%0], t;\n\t}" ::"l"(at));
}
DEVICE void sleep_ns(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

}  // namespace arch

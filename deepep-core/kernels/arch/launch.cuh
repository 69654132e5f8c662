// Programmatic dependent launch. Both are no-ops in a kernel that was launched without it.
#pragma once
#include "arch/types.cuh"

namespace arch {

// The next kernel of the stream may become resident.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// The kernel before has ended and its writes are visible.
DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A kernel's arguments are not in the multiprocessor's cache for constants when the kernel starts: whoever looks at one of another line of 64 bytes waits for
// it. So each warp looks at one first, all of them side by side. They need no predecessor's end.
template <class Params>
DEVICE void touch_arguments(const Params& params) {
    constexpr u32 LINE = 64 / 4, LAST = sizeof(Params) / 4 - 1;
    const u32 at = threadIdx.x / 32 * LINE;
    // The word has to matter to the assembler: with one value of it the warp sleeps for no time.
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x5a5a5a5b; @p nanosleep.u32 0; }" ::"r"(((const u32*)&params)[at < LAST ? at : LAST]));
}

}  // namespace arch

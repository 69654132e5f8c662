// Programmatic dependent launch. Both are no-ops in a kernel that was launched without it.
#pragma once
#include "arch/types.cuh"

namespace arch {

// The next kernel of the stream may become resident.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// The kernel before has ended and its writes are visible.
DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Parameters of a kernel come from memory when they are first looked at. Looks at each line of them, while the kernel before still runs.
template <class Params>
DEVICE void touch(const Params& params) {
    u32 all = 0;
#pragma unroll
    for (u32 i = 0; i < sizeof(Params) / 4; i += 16) all ^= ((const u32*)&params)[i];
    // Whatever they are: the assembler must not find out that nobody wants to know.
    if (all == 0x9e3779b9u) asm volatile("nanosleep.u32 0;");
}

}  // namespace arch

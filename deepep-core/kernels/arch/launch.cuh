// Programmatic dependent launch. Both are no-ops in a kernel that was launched without it.
#pragma once
#include "arch/types.cuh"

namespace arch {

// The next kernel of the stream may become resident.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// The kernel before has ended and its writes are visible.
DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace arch

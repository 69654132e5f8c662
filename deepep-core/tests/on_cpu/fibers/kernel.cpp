// One kernel, as a function that a fiber calls. KERNEL is the source, ENTRY the kernel's function, PARAMS its parameter struct, NAME the function's
// name. Several kernels live in one library, each in a namespace of its own.
#include "arch/types.cuh"

namespace SPACE {
#include KERNEL
}

extern "C" void NAME(const void* params) { SPACE::ENTRY(*(const SPACE::PARAMS*)params); }

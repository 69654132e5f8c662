//! Binding before every device is there would block.

use cuda_vmm::multicast::{Binding, Incomplete};
use cuda_vmm::{PhysicalMemory, Result};

fn too_early(object: &Incomplete, memory: &PhysicalMemory) -> Result<Binding> {
    object.bind(0, memory, 0, memory.size())
}

fn main() {}

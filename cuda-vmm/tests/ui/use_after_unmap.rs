//! Unmapping consumes the mapping.

use cuda_vmm::Mapping;

fn twice(mapping: Mapping) {
    let _ = mapping.unmap();
    let _ = mapping.unmap();
}

fn main() {}

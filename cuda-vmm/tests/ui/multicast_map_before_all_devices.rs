//! Mapping before every device is there would block.

use cuda_vmm::Result;
use cuda_vmm::multicast::{Incomplete, MappedObject};

fn too_early(object: &Incomplete) -> Result<MappedObject> {
    object.map()
}

fn main() {}

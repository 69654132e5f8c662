//! A mapped object tells no address before memory is bound behind it.

use cuda_vmm::DeviceAddress;
use cuda_vmm::multicast::MappedObject;

fn too_early(mapped: &MappedObject) -> DeviceAddress {
    mapped.address()
}

fn main() {}

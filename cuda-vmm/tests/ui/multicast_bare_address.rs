//! Memory is bound by its address only through a mapping that keeps it, or by who promises to keep it.

use cuda_vmm::multicast::{Binding, Object};
use cuda_vmm::{Device, Result};

fn bare(object: &Object, device: &Device, address: u64) -> Result<Binding> {
    object.bind_address(0, device, address, 2 << 20)
}

fn main() {}

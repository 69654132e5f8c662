//! The set of devices is closed once it is complete.

use cuda_vmm::multicast::Object;
use cuda_vmm::{Device, Result};

fn too_late(object: &mut Object, device: &Device) -> Result<()> {
    object.add_device(device)
}

fn main() {}

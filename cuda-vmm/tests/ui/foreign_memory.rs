//! Only this crate's objects are `Memory`: safe functions take no bare address.

use cuda_vmm::{Cuda, DeviceAddress, Memory};

struct Forged(u64);

impl Memory for Forged {
    fn address(&self) -> DeviceAddress {
        unreachable!()
    }

    fn size(&self) -> usize {
        usize::MAX
    }

    fn cuda(&self) -> &Cuda {
        unreachable!()
    }
}

fn main() {}

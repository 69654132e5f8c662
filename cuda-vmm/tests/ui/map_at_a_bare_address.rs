//! Memory is mapped into a reservation that this crate holds, never at a bare address.

use cuda_vmm::{DeviceAddress, PhysicalMemory, Reservation};

fn foreign(address: u64) -> DeviceAddress {
    DeviceAddress::new(address)
}

fn map(address: u64, memory: &PhysicalMemory) {
    Reservation::map(address, 0, memory);
}

fn main() {}

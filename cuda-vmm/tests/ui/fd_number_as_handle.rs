//! A number is no file descriptor.

use cuda_vmm::{Cuda, PhysicalMemory};

fn import(cuda: &Cuda) {
    let _ = PhysicalMemory::import_fd(cuda, 3_i32, 1 << 21);
}

fn main() {}

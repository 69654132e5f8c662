//! Opening another process's plain memory is a promise about its size, so that it needs `unsafe`.

use cuda_vmm::{Context, IpcHandle, IpcMemory};

fn open(context: &Context, handle: &IpcHandle) {
    let _ = IpcMemory::open(context, handle, 1 << 20);
}

fn main() {}

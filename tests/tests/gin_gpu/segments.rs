//! A window of several segments: device memory, host memory behind it, and device memory again, in one range of addresses.

use crate::arguments;
use crate::board::Board;
use crate::gpu::Gpu;
use crate::suite::with_dev;
use crate::world::{MIB, Shape, World, communicator, ranks, requirements};
use cuda_vmm::{Cuda, Grant, Properties, SegmentedRange};
use nccl_gin::{MemAlloc, WindowFlags, WindowMemory};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

const DEVICE: usize = 16 * MIB;
const HOST: usize = 16 * MIB;

struct Range(SegmentedRange);

// SAFETY: the range keeps its memory mapped until it is dropped, and does not move.
unsafe impl WindowMemory for Range {
    fn address(&self) -> NonNull<c_void> {
        NonNull::new(self.0.address().get() as *mut c_void).expect("a mapped range")
    }
    fn len(&self) -> usize {
        self.0.size()
    }
}

fn segments(rank: usize, shape: Shape, board: Board) {
    let (nccl, device, comm) = communicator(rank, shape, &board);
    let cuda = Cuda::get().unwrap();
    let here = cuda.device(device.ordinal()).unwrap();
    let _context = here.primary_context().unwrap();
    let node = here.host_numa_node().unwrap().expect("a NUMA node of the host");
    let range = SegmentedRange::builder(cuda)
        .create(Properties::device(device.ordinal()).shareable(), DEVICE)
        .create(Properties::host_numa(node).shareable(), HOST)
        .create(Properties::device(device.ordinal()).shareable(), DEVICE)
        .grant(Grant::device(device.ordinal()))
        .build()
        .unwrap();
    let gpu = Gpu::new(nccl, &device);
    let window = comm.register(Arc::new(Range(range)), WindowFlags::empty()).unwrap();
    let dev = comm.create_dev_comm(&requirements(nccl, shape)).unwrap();
    let memory = Arc::new(MemAlloc::new(nccl, &device, 2 * MIB).unwrap());
    let strict_address = memory.address().as_ptr() as u64;
    let strict = comm.register(memory, WindowFlags::STRICT_ORDERING).unwrap();
    let world = World { rank, shape, board, nccl, gpu, comm, window, strict, strict_address, dev };
    world.meet();
    let (to, from) = world.neighbours();
    let (w, report) = (world.window.as_raw() as u64, world.gpu.report());
    let half = DEVICE as u64;
    let mib = MIB as u64;
    let second = half + HOST as u64;
    // Device to device, device to host, host to device, host to host, and across a border at one end and at both.
    let routes = [
        (0, 4 * mib),
        (0, half),
        (half, 4 * mib),
        (half, half + 8 * mib),
        (0, half - mib),
        (half - 2 * mib, 2 * mib),
        (half - mib, second - 2 * mib),
        (second - mib, half - 2 * mib),
    ];
    for (index, (src, dst)) in routes.into_iter().enumerate() {
        for (inner, n) in [1000u64, 3 * MIB as u64].into_iter().enumerate() {
            let expect = (index * 2 + inner + 1) as u64;
            let mut arguments = arguments![w, src, dst, n, to, from, 0u32, expect, expect as i32, report];
            let what = format!("{n} bytes from {src} to {dst}");
            world.gpu.run(&what, "put_segments", 1, 512, &mut with_dev(&world, &mut arguments));
            world.meet();
        }
    }
    world.close();
}

#[test]
fn a_window_of_device_and_host_memory() {
    let shape = Shape { since: 23007, ..Shape::new(2, 2) };
    ranks("segments::a_window_of_device_and_host_memory", shape, &[], |rank, board| {
        segments(rank, shape, board)
    });
}

//! What the driver's own calls take, which the plugin's data path is made of: the floor under the figures.

use crate::world::{MIB, World};
use cuda_vmm_emu::sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CUmemcpyAttributes, CUmemcpySrcAccessOrder, CUstream, CUstream_flags,
    CUstreamBatchMemOpParams, CUstreamBatchMemOpType, Function,
};
use nccl_gin::Device;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const COUNT: usize = 200;

/// A stream, words in host memory that the GPU writes, and memory to copy from and to.
struct Probe<'a> {
    world: &'a World,
    stream: CUstream,
    words: *mut u64,
    device: u64,
    sequence: u64,
}

impl Probe<'_> {
    /// Writes the word of the host that is polled, and `more` words of the device before it.
    fn write(&mut self, more: usize) {
        self.sequence += 1;
        let word = |address| {
            let mut word = CUstreamBatchMemOpParams::default();
            word.writeValue.operation = CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64;
            word.writeValue.address = address;
            word.writeValue.__bindgen_anon_1.value64 = self.sequence;
            word
        };
        let mut words: Vec<_> = (0..more as u64).map(|index| word(self.device + 64 * index)).collect();
        words.push(word(self.words as u64));
        let driver = self.world.gpu.device.driver();
        // SAFETY: the words lie in memory of this probe, and the list outlives the call.
        unsafe { driver.cuStreamBatchMemOp(self.stream, words.len() as u32, words.as_mut_ptr(), 0) }.unwrap();
    }

    fn copy(&self, to: u64, from: u64, length: usize) {
        // SAFETY: both ranges lie in the probe's memory or a window.
        unsafe { self.world.gpu.device.driver().cuMemcpyAsync(to, from, length, self.stream) }.unwrap();
    }

    /// `overlap` is for a copy engine even inside the device.
    fn batch(&self, to: u64, from: u64, length: usize, count: usize, overlap: bool) {
        let mut attributes = CUmemcpyAttributes {
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            flags: overlap.into(),
            ..CUmemcpyAttributes::default()
        };
        let spread = |base: u64| (0..count).map(|index| base + (index * length) as u64).collect::<Vec<_>>();
        let (mut to, mut from, mut lengths) = (spread(to), spread(from), vec![length; count]);
        let driver = self.world.gpu.device.driver();
        // SAFETY: as above; the lists have `count` elements and outlive the call.
        unsafe {
            driver.cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                lengths.as_mut_ptr(),
                count,
                &mut attributes,
                &mut 0,
                1,
                self.stream,
            )
        }
        .unwrap();
    }

    /// Medians, in microseconds: until the calls have returned, and until the CPU sees the word that comes last.
    fn measure(&mut self, mut calls: impl FnMut(&mut Self)) -> (f64, f64) {
        let (mut returned, mut done) = (Vec::new(), Vec::new());
        for _ in 0..COUNT {
            let start = Instant::now();
            calls(self);
            returned.push(start.elapsed());
            // SAFETY: the probe's own page, which the GPU writes by whole words.
            let word = unsafe { AtomicU64::from_ptr(self.words) };
            while word.load(Ordering::Acquire) < self.sequence {
                assert!(start.elapsed() < Duration::from_secs(5), "the GPU does not write");
                std::hint::spin_loop();
            }
            done.push(start.elapsed());
        }
        let median = |list: &mut Vec<Duration>| {
            list.sort();
            list[list.len() / 2].as_secs_f64() * 1e6
        };
        (median(&mut returned), median(&mut done))
    }
}

/// Memory of the next rank's GPU, if that is another one. It stays until the process ends.
fn other_gpu(world: &World) -> Option<u64> {
    if world.shape.shares() {
        return None;
    }
    let driver = world.gpu.device.driver();
    let other = Device::open(world.shape.gpu(1) as i32).unwrap();
    other.make_current().unwrap();
    let mut address = 0;
    // SAFETY: the output is a local; both contexts are primary contexts that are retained.
    unsafe {
        driver.cuMemAlloc(&mut address, 2 * MIB).unwrap();
        world.gpu.device.make_current().unwrap();
        // It may be enabled already.
        driver.cuCtxEnablePeerAccess(other.context(), 0).ok();
    }
    std::mem::forget(other);
    Some(address)
}

/// Measures on rank 0 while the other ranks wait.
pub fn calls(world: &World, tell: &impl Fn(String)) {
    if world.rank == 0 {
        probe(world, tell);
    }
    world.meet();
}

fn probe(world: &World, tell: &impl Fn(String)) {
    let driver = world.gpu.device.driver();
    let (mut stream, mut words, mut least, mut greatest) = (std::ptr::null_mut(), std::ptr::null_mut(), 0, 0);
    // SAFETY: outputs are locals. The stream and the page stay until the process ends.
    unsafe {
        driver.cuCtxGetStreamPriorityRange(&mut least, &mut greatest).unwrap();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING.0;
        driver.cuStreamCreateWithPriority(&mut stream, flags, greatest).unwrap();
        driver.cuMemHostAlloc(&mut words, 4096, CU_MEMHOSTALLOC_DEVICEMAP).unwrap();
        words.cast::<u64>().write(0);
    }
    let device = world.strict_address;
    let mut probe = Probe { world, stream, words: words.cast(), device, sequence: 0 };
    let (to, from, host) = (device + 65_536, device + 1_048_576, words as u64 + 64);
    let mut plain = 0;
    // SAFETY: the output is a local; the memory stays until the process ends.
    unsafe { driver.cuMemAlloc(&mut plain, 2 * MIB) }.unwrap();
    let mut report = |what: &str, calls: &mut dyn FnMut(&mut Probe<'_>)| {
        let (returned, done) = probe.measure(calls);
        tell(format!("driver: {what}: {returned:.1} us to call, {done:.1} us until seen"));
    };
    for more in 0..3usize {
        report(&format!("{} words", more + 1), &mut |probe| probe.write(more));
    }
    report("copy of 8 B from the host, 2 words", &mut |probe| {
        probe.copy(to, host, 8);
        probe.write(1);
    });
    report("copy of 8 B to the host, 1 word", &mut |probe| {
        probe.copy(host, from, 8);
        probe.write(0);
    });
    for (what, to, from) in [("a window", to, from), ("plain memory", plain, plain + MIB as u64)] {
        report(&format!("copy of 8 B inside {what}, 2 words"), &mut |probe| {
            probe.copy(to, from, 8);
            probe.write(1);
        });
        report(&format!("the same by cuMemcpyDtoDAsync inside {what}, 2 words"), &mut |probe| {
            // SAFETY: both ranges are this process's memory of the device.
            unsafe { driver.cuMemcpyDtoDAsync(to, from, 8, stream) }.unwrap();
            probe.write(1);
        });
        report(&format!("the same by cuMemcpyPeerAsync inside {what}, 2 words"), &mut |probe| {
            let context = world.gpu.device.context();
            // SAFETY: as above, and the context is current.
            unsafe { driver.cuMemcpyPeerAsync(to, context, from, context, 8, stream) }.unwrap();
            probe.write(1);
        });
    }
    if let Some(other) = other_gpu(world) {
        report("copy of 8 B from the other GPU, 2 words", &mut |probe| {
            probe.copy(to, other, 8);
            probe.write(1);
        });
        for (length, count) in [(8, 1), (8, 2), (8, 16), (65_536, 1), (65_536, 8)] {
            report(
                &format!("batch of {count} copies of {length} B from the other GPU, 2 words"),
                &mut |probe| {
                    probe.batch(to, other, length, count, true);
                    probe.write(1);
                },
            );
        }
    }
    if !driver.has(Function::cuMemcpyBatchAsync_v2) {
        return;
    }
    for (length, count, overlap) in [
        (8, 1, true),
        (8, 2, true),
        (8, 2, false),
        (8, 16, true),
        (8, 16, false),
        (65_536, 1, true),
        (65_536, 8, true),
        (65_536, 8, false),
    ] {
        let how = if overlap { "by a copy engine" } else { "as the driver likes" };
        report(
            &format!("batch of {count} copies of {length} B inside a window {how}, 2 words"),
            &mut |probe| {
                probe.batch(to, from, length, count, overlap);
                probe.write(1);
            },
        );
    }
    for count in [1, 16] {
        report(&format!("batch of {count} copies of 8 B from the host, 2 words"), &mut |probe| {
            probe.batch(to, host, 8, count, true);
            probe.write(1);
        });
    }
}

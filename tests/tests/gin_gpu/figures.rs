//! Figures beside the copy engine's of the same run. They are measured only with `GIN_FIGURES=1`, and best in release mode and alone.

use crate::arguments;
use crate::board::Board;
use crate::driver;
use crate::suite::with_dev;
use crate::world::{DST, MIB, SRC, Shape, World, ranks};
use cuda_vmm_emu::sys::CUdevice_attribute;
use integration_tests::gpu::skipped;
use integration_tests::process::role;
use nccl_gin::{Device, MemAlloc, WindowMemory};
use std::sync::atomic::Ordering;

const SHAPE: Shape = Shape::new(2, 2);

#[test]
fn figures() {
    measured("figures::figures", &[]);
}

#[test]
fn figures_staged() {
    measured("figures::figures_staged", &[("NCCL_GIN_SOFT_STAGE", "1")]);
}

#[test]
fn figures_over_tcp() {
    measured("figures::figures_over_tcp", &[("NCCL_GIN_SOFT_TCP", "1")]);
}

/// Round trips alone, often: what changes with the machine's other work.
#[test]
fn round_trips_alone() {
    let test = "figures::round_trips_alone";
    if role(test).is_none() && std::env::var_os("GIN_FIGURES").is_none() {
        return skipped(test, "GIN_FIGURES=1 is not set");
    }
    ranks(test, SHAPE, &[], |rank, board| {
        let world = World::new(rank, SHAPE, board);
        round_trips(&world, 8, &|text| {
            if rank == 0 {
                eprintln!("gin NCCL {}, {text}", world.nccl.version());
            }
        });
        world.close();
    });
}

/// What the driver's calls take alone, which all else is made of.
#[test]
fn driver_calls() {
    let test = "figures::driver_calls";
    if role(test).is_none() && std::env::var_os("GIN_FIGURES").is_none() {
        return skipped(test, "GIN_FIGURES=1 is not set");
    }
    ranks(test, SHAPE, &[], |rank, board| {
        let world = World::new(rank, SHAPE, board);
        driver::calls(&world, &|text| eprintln!("gin {text}"));
        world.close();
    });
}

fn measured(test: &str, environment: &[(&str, &str)]) {
    if role(test).is_none() && std::env::var_os("GIN_FIGURES").is_none() {
        return skipped(test, "GIN_FIGURES=1 is not set");
    }
    ranks(test, SHAPE, environment, measure);
}

/// No processor is needed by the data path: it works where blocks that wait for it hold all of them.
#[test]
fn a_crowded_gpu() {
    ranks("figures::a_crowded_gpu", SHAPE, &[], |rank, board| {
        let world = World::new(rank, SHAPE, board);
        crowded(&world, 20, &|text| eprintln!("gin {text}"));
        world.close();
    });
}

fn measure(rank: usize, board: Board) {
    let world = World::new(rank, SHAPE, board);
    let w = world.window.as_raw() as u64;
    let (src, dst, report) = (SRC as u64, DST as u64, world.gpu.report());
    let run = |what: &str, name: &str, grid: u32, block: u32, arguments: &mut [*mut std::ffi::c_void]| {
        let nanoseconds = world.gpu.run(what, name, grid, block, &mut with_dev(&world, arguments));
        world.meet();
        nanoseconds as f64
    };
    let tell = |text: String| {
        if rank == 0 {
            eprintln!("gin {text}");
        }
    };
    tell(format!("NCCL {}", world.nccl.version()));

    assert_eq!(SHAPE.gpu(0) == SHAPE.gpu(1), SHAPE.shares(), "the ranks are not where the figures say");
    let rate = copy_engine(&world);
    let route = if SHAPE.shares() { "inside the GPU that both ranks share" } else { "between the GPUs" };
    tell(format!("copy engine, 64 MiB {route}: {rate:.1} GB/s"));

    let longest = round_trips(&world, 2, &tell);
    let mut sent = [0u64; 4];
    for n in [8usize, 4096, 65_536, MIB, 8 * MIB, 32 * MIB] {
        let count = (512 * MIB / n).clamp(16, 2000) as i32;
        let slots = (32 * MIB / n).clamp(1, 8) as i32;
        for repeat in 0..3 {
            let sends = i32::from(rank == 0);
            let mut arguments = arguments![
                w,
                src,
                dst,
                n as u64,
                slots,
                count,
                sends,
                1 - sends,
                16u32,
                sent[0],
                17u32,
                sent[1],
                report
            ];
            let one = run("puts one way", "stream_of_puts", 1, 1, &mut arguments);
            sent[0] += count as u64 * u64::from(rank == 1);
            sent[1] += 1;
            let mut arguments = arguments![
                w, src, dst, n as u64, slots, count, 1i32, 1i32, 18u32, sent[2], 19u32, sent[3], report
            ];
            let both = run("puts both ways", "stream_of_puts", 1, 1, &mut arguments);
            sent[2] += count as u64;
            sent[3] += 1;
            if repeat == 2 {
                let bytes = n as f64 * f64::from(count);
                tell(format!(
                    "puts of {n} bytes: one way {:.1} GB/s ({:.2} us each, {:.0} % of the copy engine), both ways {:.1} GB/s each",
                    bytes / one,
                    one / 1e3 / f64::from(count),
                    100.0 * bytes / one / rate,
                    bytes / both,
                ));
            }
        }
    }
    if world.gpu.has("barriers") {
        let time = run("barriers", "barriers", 1, 64, &mut arguments![0i32, 200i32, report]);
        tell(format!("barrier of all: {:.2} us", time / 1e3 / 200.0));
    }
    if world.gpu.has("get") {
        for n in [8u64, 4 * MIB as u64] {
            world.gpu.run("filling", "fill_bytes", 1, 512, &mut arguments![w, src, n, rank as i32, 7i32]);
            world.meet();
            let mut best = f64::MAX;
            for _ in 0..10 {
                let mut arguments = arguments![w, src, dst, n, 1 - rank as i32, 7i32, report];
                best = best.min(run("a get", "get", 1, 256, &mut arguments));
            }
            tell(format!("get and flush of {n} bytes: {:.1} us at best", best / 1e3));
        }
    }
    crowded(&world, longest.min(200), &tell);
    world.close();
}

/// Round trips of each kind, told `repeats` times. Returns how many make a second.
fn round_trips(world: &World, repeats: usize, tell: &impl Fn(String)) -> i32 {
    let (w, strict) = (world.window.as_raw() as u64, world.strict.as_raw() as u64);
    let modes = [
        "8-byte put with signal",
        "8-byte value with signal",
        "signal",
        "8-byte put with signal at an address",
    ];
    let mut base = [0u64; 4];
    // As many as take a second: that depends on whether the ranks share a GPU.
    let (mut count, mut longest) = (10i32, 0);
    for repeat in 0..repeats + 2 {
        for (mode, name) in modes.into_iter().enumerate() {
            let mut arguments = arguments![
                0i32,
                w,
                strict,
                SRC as u64,
                DST as u64,
                8192u64,
                11 + mode as u32,
                base[mode],
                count,
                mode as i32,
                world.gpu.report()
            ];
            let time = world.gpu.run(name, "ping_pong", 1, 1, &mut with_dev(world, &mut arguments)) as f64;
            world.meet();
            base[mode] += (count + count / 10 + 1) as u64;
            if repeat > 1 {
                tell(format!("round trip, {name}: {:.2} us", time / 1e3 / f64::from(count)));
            }
            if repeat == 0 && mode == 0 {
                longest = agree(world, (1e9 * f64::from(count) / time) as u64).clamp(20, 1000) as i32;
            }
        }
        count = longest;
    }
    longest
}

/// Rank 0's number, on all ranks.
fn agree(world: &World, number: u64) -> u64 {
    if world.rank == 0 {
        world.board.word(0).store(number, Ordering::Release);
    }
    world.meet();
    world.board.word(0).load(Ordering::Acquire)
}

/// With the GPU full of spinning blocks: half full if ranks run on it beside each other.
fn crowded(world: &World, count: i32, tell: &impl Fn(String)) {
    let driver = world.gpu.device.driver();
    let (mut blocks, mut processors) = (0, 0);
    // SAFETY: outputs are locals; the function belongs to the loaded module.
    unsafe {
        let function = world.gpu.function("crowded");
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, 512, 0).unwrap();
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        driver.cuDeviceGetAttribute(&mut processors, attribute, world.gpu.device.ordinal()).unwrap();
    }
    let words = MemAlloc::new(world.nccl, &world.gpu.device, 2 * MIB).unwrap();
    let address = words.address().as_ptr() as u64;
    world.gpu.zero(address, 64);
    world.meet();
    let grid = (blocks * processors) as u32 / if SHAPE.shares() && mps() { 2 } else { 1 };
    let (w, report) = (world.window.as_raw() as u64, world.gpu.report());
    let mut arguments =
        arguments![w, SRC as u64, DST as u64, 21u32, 0u64, count, report, address, address + 8];
    let arguments = &mut with_dev(world, &mut arguments);
    let time = world.gpu.run("a crowded GPU", "crowded", grid, 512, arguments) as f64;
    world.meet();
    tell(format!(
        "round trip with {grid} blocks of 512 threads resident: {:.2} us",
        time / 1e3 / f64::from(count)
    ));
}

/// Whether ranks on one GPU run beside each other, and not in turns.
fn mps() -> bool {
    std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_some()
}

/// Rate of copies over the same link, by the copy engine alone, by rank 0 while rank 1 waits.
fn copy_engine(world: &World) -> f64 {
    let length = 64 * MIB;
    let mut rate = 0.0;
    if world.rank == 0 {
        let driver = world.gpu.device.driver();
        let here = MemAlloc::new(world.nccl, &world.gpu.device, length).unwrap();
        let other = Device::open(SHAPE.gpu(1) as i32).unwrap();
        other.make_current().unwrap();
        let mut there = 0;
        // SAFETY: outputs are locals; the memory is freed below, when the copies are over.
        unsafe { driver.cuMemAlloc(&mut there, length) }.unwrap();
        world.gpu.device.make_current().unwrap();
        let to = here.address().as_ptr() as u64;
        if !SHAPE.shares() {
            // SAFETY: both contexts are primary contexts that are retained here.
            let _ = unsafe { driver.cuCtxEnablePeerAccess(other.context(), 0) };
        }
        for _ in 0..3 {
            rate = world.gpu.copy_rate(to, there, length, 40).max(rate);
        }
        // SAFETY: as above.
        unsafe { driver.cuMemFree(there) }.unwrap();
    }
    world.meet();
    rate
}

//! Communicators, windows and device communicators: what NCCL takes for two ranks, and what `nccl-gin` adds to the raw calls.
//!
//! `cargo bench -p benches --bench nccl`. The overhead is measured on a library whose calls do nothing. On GPUs two ranks work in two
//! threads of this process; multicast must be switched off (`NCCL_NVLS_ENABLE=0`), so that creating communicators creates none. They share a single
//! GPU if NCCL may let them (`NCCL_MULTI_RANK_GPU_ENABLE=1`, NCCL 2.30 and later).

use benches::nccl::{device, nothing};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use cuda_vmm::{Cuda, Grant, Properties, SegmentedRange};
use cuda_vmm_emu::{Config as EmulatorConfig, Emulator};
use nccl_gin::sys::{Nccl, ncclDevComm, v2_32};
use nccl_gin::{
    Communicator, Config, DevCommRequirements, Device, MemAlloc, UniqueId, WindowFlags, WindowMemory,
    multicast_disabled_by,
};
use std::ffi::c_void;
use std::hint::black_box;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const SIZES: [(&str, usize); 4] =
    [("2 MiB", 2 * MIB), ("64 MiB", 64 * MIB), ("1 GiB", 1024 * MIB), ("4 GiB", 4096 * MIB)];

/// A range of the software driver as a window's memory.
struct Range(SegmentedRange);

// SAFETY: the range stays mapped until it is dropped, and neither address nor size changes.
unsafe impl WindowMemory for Range {
    fn address(&self) -> NonNull<c_void> {
        let address = cuda_vmm::Memory::address(&self.0).get() as usize;
        NonNull::new(ptr::with_exposed_provenance_mut(address)).expect("a mapped range is not at null")
    }

    fn len(&self) -> usize {
        cuda_vmm::Memory::size(&self.0)
    }
}

/// Each operation by the raw table and by this crate, on a library that does nothing.
fn overhead(criterion: &mut Criterion) {
    let emulator = Emulator::new(EmulatorConfig::h200x2()).expect("an emulator");
    let (nccl, device) = (nothing(), device(&emulator));
    let cuda = Cuda::with_driver(emulator.driver()).expect("the software driver starts");
    let memory = SegmentedRange::builder(&cuda)
        .create(Properties::device(0).shareable(), 2 * MIB)
        .grant(Grant::device(0))
        .build();
    let memory = Arc::new(Range(memory.expect("a range")));
    let id = UniqueId::from_bytes([1; 128]);
    let init = || Communicator::init(&nccl, &device, &id, 2, 0, &Config::new()).expect("a communicator");
    let comm = init();
    let window = comm.register(memory.clone(), WindowFlags::empty()).expect("a window");
    let raw_comm = comm.as_raw();
    let (buffer, length) = (memory.address().as_ptr(), memory.len());

    let mut group = criterion.benchmark_group("nccl overhead");
    group.bench_function("LSA pointer/raw table", |b| {
        b.iter(|| {
            let mut out = ptr::null_mut();
            // SAFETY: the library never follows the handle, and the output is valid for one write.
            unsafe { nccl.ncclGetLsaDevicePointer(window.as_raw(), black_box(64), 1, &mut out) }
                .expect("it is there");
            out
        });
    });
    group.bench_function("LSA pointer/nccl-gin", |b| {
        b.iter(|| window.lsa_pointer(1, black_box(64)).expect("a pointer"));
    });
    group.bench_function("window/raw table", |b| {
        b.iter(|| {
            let mut out = ptr::null_mut();
            // SAFETY: the library follows nothing, and the output is valid for one write.
            unsafe {
                nccl.ncclCommWindowRegister(raw_comm, buffer, length, &mut out, 0).expect("it is there");
                nccl.ncclCommWindowDeregister(raw_comm, out).expect("it is there");
            }
        });
    });
    group.bench_function("window/nccl-gin", |b| {
        b.iter(|| {
            let window = comm.register(memory.clone(), WindowFlags::empty()).expect("a window");
            window.close().expect("closing it");
        });
    });
    group.bench_function("device communicator/raw table", |b| {
        b.iter(|| {
            let requirements = v2_32::ncclDevCommRequirements::default();
            let mut block = [0_u64; 64];
            let out: *mut ncclDevComm = block.as_mut_ptr().cast();
            // SAFETY: the library reads no field, and the block holds every layout.
            unsafe {
                nccl.ncclDevCommCreate(raw_comm, (&raw const requirements).cast(), out).expect("it is there");
                nccl.ncclDevCommDestroy(raw_comm, out).expect("it is there");
            }
        });
    });
    group.bench_function("device communicator/nccl-gin", |b| {
        let requirements = DevCommRequirements::new().lsa_barriers(16);
        b.iter(|| {
            comm.create_dev_comm(&requirements).expect("a device communicator").close().expect("closing it")
        });
    });
    group.bench_function("communicator/nccl-gin", |b| b.iter(|| init().close().expect("closing it")));
    group.finish();
    window.close().expect("closing the window");
    comm.close().expect("closing the communicator");
}

/// Two ranks of this process that do the same things side by side.
struct Pair {
    nccl: &'static Nccl,
    /// How many GPUs the two have.
    gpus: i32,
    devices: [Device; 2],
}

impl Pair {
    fn find() -> Result<Self, String> {
        if multicast_disabled_by().is_none() {
            return Err("multicast is not switched off: set NCCL_NVLS_ENABLE=0".into());
        }
        let nccl = Nccl::get().map_err(|error| error.to_string())?;
        let gpus = Cuda::get().map_err(|error| error.to_string())?.device_count().min(2);
        let shares = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1");
        if gpus < 2 && !(shares && nccl.version().code() >= 23000) {
            let version = nccl.version();
            return Err(format!(
                "{gpus} GPU(s), and NCCL {version}: two ranks share one with 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1"
            ));
        }
        let device = |ordinal| Device::open(ordinal).map_err(|error| error.to_string());
        Ok(Self { nccl, gpus, devices: [device(0)?, device(gpus - 1)?] })
    }

    fn communicators(&self) -> [Communicator; 2] {
        let id = UniqueId::new(self.nccl).expect("an id");
        let begin = |rank: usize| {
            let config = Config::new().timeout(Duration::from_secs(60));
            Communicator::begin(self.nccl, &self.devices[rank], &[id], 2, rank as u32, &config)
                .expect("a start")
        };
        [begin(0), begin(1)].map(|pending| pending.wait().expect("a communicator"))
    }

    /// Runs `work` on both ranks `rounds` times, in step, and returns what rank 0 spent in making.
    fn rounds<T>(
        comms: &[Communicator; 2],
        rounds: u64,
        make: impl Fn(&Communicator) -> T + Sync,
        end: impl Fn(T) + Sync,
    ) -> Duration {
        let (to_one, from_zero) = channel();
        let (to_zero, from_one) = channel();
        let run = |comm: &Communicator, (to, from): (Sender<()>, Receiver<()>)| {
            let meet = || {
                to.send(()).expect("the other rank is there");
                from.recv_timeout(Duration::from_secs(60)).expect("the other rank comes");
            };
            let mut spent = Duration::ZERO;
            for _ in 0..rounds {
                meet();
                let start = Instant::now();
                let made = make(comm);
                spent += start.elapsed();
                // Nobody gives back what the other has not made yet.
                meet();
                end(made);
            }
            spent
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| run(&comms[1], (to_zero, from_zero)));
            let spent = run(&comms[0], (to_one, from_one));
            other.join().expect("a rank does not panic");
            spent
        })
    }
}

fn gpus(criterion: &mut Criterion) {
    let pair = match Pair::find() {
        Ok(pair) => pair,
        Err(reason) => return eprintln!("skipped: NCCL with two ranks: {reason}"),
    };
    let label = |operation: &str| format!("{operation}, NCCL {}", pair.nccl.version());
    let mut group = criterion.benchmark_group(format!("two ranks, {} GPU(s)", pair.gpus));
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    group.bench_function(label("communicator"), |b| {
        b.iter_custom(|rounds| {
            let mut spent = Duration::ZERO;
            for _ in 0..rounds {
                let start = Instant::now();
                let comms = pair.communicators();
                spent += start.elapsed();
                close(comms);
            }
            spent
        });
    });
    let comms = pair.communicators();
    for (size, length) in SIZES {
        let memory = pair
            .devices
            .each_ref()
            .map(|device| Arc::new(MemAlloc::new(pair.nccl, device, length).expect("memory")));
        group.bench_function(BenchmarkId::new(label("window"), size), |b| {
            b.iter_custom(|rounds| {
                let make = |comm: &Communicator| {
                    let memory = memory[comm.rank() as usize].clone();
                    comm.register(memory, WindowFlags::empty()).expect("a window")
                };
                Pair::rounds(&comms, rounds, make, |window| window.close().expect("closing a window"))
            });
        });
    }
    group.bench_function(label("device communicator"), |b| {
        let requirements = DevCommRequirements::new().lsa_barriers(16);
        b.iter_custom(|rounds| {
            let make =
                |comm: &Communicator| comm.create_dev_comm(&requirements).expect("a device communicator");
            Pair::rounds(&comms, rounds, make, |made| made.close().expect("closing a device communicator"))
        });
    });
    let begun = [0, 1].map(|rank: usize| {
        let memory = Arc::new(MemAlloc::new(pair.nccl, &pair.devices[rank], 2 * MIB).expect("memory"));
        comms[rank].begin_register(memory, WindowFlags::empty()).expect("a start")
    });
    let windows = begun.map(|pending| pending.wait().expect("a window"));
    group.bench_function(label("LSA pointer"), |b| {
        b.iter(|| windows[0].lsa_pointer(1, black_box(64)).expect("a pointer"));
    });
    group.finish();
    for window in windows {
        window.close().expect("closing a window");
    }
    close(comms);
}

/// Closes both at once: it is collective.
fn close(comms: [Communicator; 2]) {
    std::thread::scope(|scope| {
        for thread in comms.map(|comm| scope.spawn(|| comm.close())) {
            thread.join().expect("closing does not panic").expect("closing");
        }
    });
}

criterion_group!(benches, overhead, gpus);
criterion_main!(benches);

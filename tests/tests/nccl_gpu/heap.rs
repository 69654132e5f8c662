//! The symmetric heap of `deepep-core` as a window: kernels reach the same memory by the heap's addresses and by NCCL's.

use crate::exchange::Plain;
use crate::rank::{MIB, Rank, most, place, run};
use cuda_vmm::Cuda;
use deepep_core::bootstrap::Bootstrap;
use deepep_core::domain::Domain;
use deepep_core::symmetric::{Registrar, Request, allocate};
use deepep_core::tensor::Space;
use deepep_core::{Error, Result};
use integration_tests::gpu::skipped;
use integration_tests::kernel::free_memory;
use integration_tests::meeting::Meeting;
use integration_tests::nvrtc::Nvrtc;
use nccl_gin::sys::Generation;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The tests' meeting as a bootstrap.
struct Files<'a> {
    meeting: &'a Meeting,
    rank: usize,
    size: usize,
    calls: AtomicU32,
}

impl Bootstrap for Files<'_> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.size
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(60)
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let name = |rank: usize| format!("gather {call} {rank}");
        self.meeting.leave(&name(self.rank), bytes);
        Ok((0..self.size).map(|rank| self.meeting.find(&name(rank))).collect())
    }
}

/// Whether NCCL maps a rank's own host memory in place of every other's.
const REUSE: &str = "NCCL_SYM_REUSE_SYSMEM_HANDLES";

/// Each kind of heap is made and registered that often.
const TURNS: u32 = 4;

/// All kinds of heaps. `reuse` says what the setting is.
fn heaps(test: &str, rank: &Rank, reuse: bool) {
    let nvrtc = match Nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(error) => return skipped(test, &error),
    };
    let driver = rank.device.driver();
    let plain = Plain::new(&nvrtc, driver);
    let (me, size) = (rank.rank as usize, rank.size as usize);
    let bootstrap = Files { meeting: &rank.meeting, rank: me, size, calls: AtomicU32::new(0) };
    let domain = Domain::discover(&bootstrap).unwrap();
    let cuda = Cuda::get().unwrap();
    let comm = rank.comm("id");
    let reuses = comm.reuses_host_memory();
    assert_eq!(reuses, reuse && rank.nccl.version().code() >= 23004);
    let mut free = Vec::new();
    // What the other rank's process has on this device comes and goes; a leak grows with every turn.
    for turn in 0..TURNS {
        for (host_bytes, hybrid) in [(0, false), (2 * MIB, false), (2 * MIB, true)] {
            let name = format!("turn {turn}, {host_bytes} bytes of host memory, hybrid {hybrid}");
            let request = Request {
                device_bytes: 4 * MIB,
                host_bytes,
                hybrid,
                device: rank.device.ordinal(),
                space: Space::Device,
            };
            let heap = Arc::new(allocate(&bootstrap, &domain, cuda, &request).unwrap());
            let registered = Registrar::register(&comm, &heap, &bootstrap);
            if host_bytes == 0 && !rank.has_windows() {
                let Err(Error::Nccl(error)) = registered else { panic!("a window that NCCL does not make") };
                rank.no_window(&error);
                continue;
            }
            if host_bytes > 0 && rank.nccl.generation() < Generation::V2_30 {
                let error = registered.unwrap_err().to_string();
                assert!(error.contains("2.30 or newer"), "{error}");
                continue;
            }
            // Of everybody's host memory a rank has imported the others', which the driver does not export again.
            if hybrid && size > 1 && !reuses {
                let error = registered.unwrap_err();
                assert!(matches!(error, Error::Nccl(nccl_gin::Error::Memory { .. })), "{error}");
                assert!(error.to_string().contains(&format!("set {REUSE}=1")), "{error}");
                continue;
            }
            if host_bytes > 0 && !hybrid && size > 1 && reuses {
                let error = registered.unwrap_err();
                assert!(matches!(error, Error::Nccl(nccl_gin::Error::Environment { .. })), "{error}");
                continue;
            }
            let window = registered.unwrap();
            assert_eq!(window.is_strictly_ordered(), rank.nccl.version().code() >= 22907);
            assert_eq!(window.window().address() as u64, heap.base());
            let nccls = window.window().lsa_pointers(0).unwrap();
            let nccls: Vec<u64> = nccls.into_iter().map(|address| address as u64).collect();
            // Of hybrid ranges every rank has the same host memory.
            let length = if hybrid { heap.device_bytes() } else { heap.bytes() };
            plain.through(rank, (heap.bases(), &nccls), heap.base(), length, &name, turn + 3);
            plain.through(rank, (&nccls, heap.bases()), heap.base(), length, &format!("{name}, back"), turn);
            window.close().unwrap();
            assert_eq!(Arc::strong_count(&heap), 1);
            rank.meeting.meet(&format!("{name}, closed"));
        }
        free.push(free_memory(driver));
        rank.meeting.meet(&format!("turn {turn}, counted"));
    }
    eprintln!("{test}: rank {}: free bytes after each turn: {free:?}", rank.rank);
    assert!(free.windows(2).any(|turns| turns[1] + MIB > turns[0]), "device memory is lost: {free:?}");
    comm.close().unwrap();
}

/// Runs in processes of its own for each value of the setting, which NCCL reads once.
fn with(test: &str, reuse: bool) {
    if let Some(rank) = Rank::here(test) {
        return heaps(test, &rank, reuse);
    }
    let size = most(2).max(1);
    if let Some(mut environment) = place(test, size) {
        environment.push((REUSE, if reuse { "1" } else { "0" }));
        run(test, size, &environment);
    }
}

#[test]
fn a_heap_is_a_window() {
    with("heap::a_heap_is_a_window", false);
}

#[test]
fn a_heap_of_everybodys_host_memory_is_a_window() {
    with("heap::a_heap_of_everybodys_host_memory_is_a_window", true);
}

//! What goes wrong: GPUs and memory that NCCL cannot share, ranks that die, ranks that disagree.

use crate::rank::{MIB, Rank, most, place, ranks, run, spawn, turn};
use cuda_vmm::{Cuda, Memory, PlainMemory};
use integration_tests::gpu;
use integration_tests::process::scratch;
use nccl_gin::{Communicator, Config, Device, Error, ForeignMemory, WindowFlags, WindowMemory};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an operation may take in the tests that kill a rank.
const SHORT: Duration = Duration::from_secs(5);
/// How much later than that the error may come: an abort joins NCCL's threads.
const GRACE: Duration = Duration::from_secs(30);

#[test]
fn sharing_a_gpu_without_leave_is_refused_with_the_remedy() {
    const TEST: &str = "faults::sharing_a_gpu_without_leave_is_refused_with_the_remedy";
    let Some(mut rank) = Rank::here(TEST) else {
        return gpu::cuda(TEST, 1).map_or((), |_| run(TEST, 2, &[("NCCL_MULTI_RANK_GPU_ENABLE", "0")]));
    };
    rank.device = Device::open(0).unwrap();
    let error = rank.try_comm("id", &Config::new().timeout(Duration::from_secs(30))).unwrap_err();
    eprintln!("{TEST}: rank {}: {error}", rank.rank);
    assert!(error.to_string().contains("NCCL_MULTI_RANK_GPU_ENABLE=1"), "{error}");
}

#[test]
fn memory_that_cannot_be_shared_is_refused() {
    const TEST: &str = "faults::memory_that_cannot_be_shared_is_refused";
    let Some(rank) = Rank::here(TEST) else { return ranks(TEST, most(2).max(1)) };
    let comm = rank.comm("id");
    let context = Cuda::get().unwrap().device(rank.device.ordinal()).unwrap().primary_context().unwrap();
    let plain = PlainMemory::new(&context, 4 * MIB).unwrap();
    let memory = rank.memory(2 * MIB);
    let at = |address: usize, length| {
        let address = NonNull::new(address as *mut c_void).expect("not null");
        // SAFETY: the memory outlives every use: no window comes of it.
        Arc::new(unsafe { ForeignMemory::new(address, length) })
    };
    let own = memory.address().as_ptr() as usize;
    for (memory, needle) in [
        (at(plain.address().get() as usize, 2 * MIB), "was not allocated with cuMemCreate"),
        (at(own + 256, MIB), "not a multiple of 4096"),
        (at(0x1000, 4096), "is no memory of CUDA"),
    ] {
        let error = comm.register(memory, WindowFlags::empty()).unwrap_err();
        assert!(matches!(error, Error::Memory { .. }) && error.to_string().contains(needle), "{error}");
    }
    if !rank.has_windows() {
        rank.no_window(&comm.register(memory, WindowFlags::empty()).unwrap_err());
        return comm.close().unwrap();
    }
    // Nothing was lost: the communicator makes windows as before.
    let window = comm.register(memory, WindowFlags::empty()).unwrap();
    assert!(matches!(window.lsa_pointer(rank.size, 0), Err(Error::Argument { .. })));
    window.close().unwrap();
    comm.close().unwrap();
}

/// A rank that dies at once, as by SIGKILL.
fn die() -> ! {
    let me = std::process::id().to_string();
    std::process::Command::new("kill").args(["-KILL", &me]).status().ok();
    std::process::abort()
}

/// Two ranks of which rank 1 dies: the other must end well.
fn one_dies(test: &str) {
    let Some(environment) = place(test, 2) else { return };
    let _turn = turn();
    let (folder, _) = scratch("meeting");
    let mut peers = spawn(test, 2, folder.path(), &environment);
    let victim = peers.pop().expect("two ranks");
    peers.pop().expect("two ranks").finish();
    victim.kill();
}

/// Checks that an error came within the configured time.
fn in_time(test: &str, error: &Error, start: Instant) {
    eprintln!("{test}: after {:?}: {error}", start.elapsed());
    assert!(start.elapsed() < SHORT + GRACE, "{error} came after {:?}", start.elapsed());
    assert!(matches!(error, Error::Timeout { .. } | Error::Nccl(_)), "{error}");
}

#[test]
fn a_rank_killed_in_init_becomes_an_error() {
    const TEST: &str = "faults::a_rank_killed_in_init_becomes_an_error";
    let Some(rank) = Rank::here(TEST) else { return one_dies(TEST) };
    let config = Config::new().timeout(SHORT);
    let id = rank.id("id");
    if rank.rank == 1 {
        let _pending = Communicator::begin(rank.nccl, &rank.device, &[id], 2, 1, &config).unwrap();
        die();
    }
    let start = Instant::now();
    // Either the connection breaks, or nobody answers.
    match Communicator::init(rank.nccl, &rank.device, &id, 2, 0, &config) {
        Err(error) => in_time(TEST, &error, start),
        // The victim may have come far enough for this rank to be done; then the next step must notice.
        Ok(comm) => {
            let start = Instant::now();
            in_time(TEST, &comm.register(rank.memory(2 * MIB), WindowFlags::empty()).unwrap_err(), start);
        }
    }
}

#[test]
fn a_rank_killed_in_register_becomes_an_error() {
    const TEST: &str = "faults::a_rank_killed_in_register_becomes_an_error";
    let Some(rank) = Rank::here(TEST) else { return one_dies(TEST) };
    let comm = rank.try_comm("id", &Config::new().timeout(SHORT)).unwrap();
    let memory = rank.memory(2 * MIB);
    let window = comm.register(memory.clone(), WindowFlags::empty()).unwrap();
    rank.meeting.meet("ready");
    if rank.rank == 1 {
        die();
    }
    let start = Instant::now();
    let error = comm.register(rank.memory(2 * MIB), WindowFlags::empty()).unwrap_err();
    in_time(TEST, &error, start);
    if matches!(error, Error::Timeout { .. }) {
        assert!(matches!(window.lsa_pointer(0, 0), Err(Error::Gone { .. })), "the communicator was aborted");
        assert!(matches!(window.close(), Err(Error::Gone { .. })));
    } else {
        drop(window);
        comm.abort().unwrap();
    }
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn ranks_that_disagree_about_their_number_do_not_hang() {
    const TEST: &str = "faults::ranks_that_disagree_about_their_number_do_not_hang";
    let Some(rank) = Rank::here(TEST) else { return ranks(TEST, 2) };
    let id = rank.id("id");
    let start = Instant::now();
    let size = 2 + rank.rank;
    let config = Config::new().timeout(SHORT);
    let error = Communicator::init(rank.nccl, &rank.device, &id, size, rank.rank, &config).unwrap_err();
    in_time(TEST, &error, start);
    rank.meeting.meet("done");
}

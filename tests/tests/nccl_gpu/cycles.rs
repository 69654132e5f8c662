//! Everything from a communicator to its end, several times, with nothing lost.

use crate::exchange::{Plain, barrier_rounds};
use crate::rank::{MIB, Rank, ranks};
use cuda_vmm::{Cuda, Grant, Properties, SegmentedRange};
use integration_tests::gpu::skipped;
use integration_tests::kernel::free_memory;
use integration_tests::nvrtc::Nvrtc;
use nccl_gin::sys::{Function, Generation};
use nccl_gin::{DevCommRequirements, Error, GinConnection, WindowFlags, WindowMemory};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// A cuda-vmm range as a window's memory.
struct Range(SegmentedRange);

// SAFETY: the range stays mapped, with access for its device, until it is dropped, and neither address nor size changes.
unsafe impl WindowMemory for Range {
    fn address(&self) -> NonNull<c_void> {
        NonNull::new(self.0.address().get() as *mut c_void).expect("a mapped range is not at null")
    }

    fn len(&self) -> usize {
        self.0.size()
    }
}

/// Device memory, host memory, device memory, back to back.
fn segmented(device: i32) -> Arc<Range> {
    let cuda = Cuda::get().unwrap();
    let node = cuda.device(device).unwrap().host_numa_node().unwrap().expect("a NUMA node for host memory");
    let range = SegmentedRange::builder(cuda)
        .create(Properties::device(device).shareable(), 4 * MIB)
        .create(Properties::host_numa(node).shareable(), 2 * MIB)
        .create(Properties::device(device).shareable(), 2 * MIB)
        .grant(Grant::device(device))
        .build()
        .unwrap();
    Arc::new(Range(range))
}

/// Everything once: from the communicator to its end.
fn cycle(rank: &Rank, nvrtc: &Nvrtc, plain: &Plain<'_>, turn: u32) {
    let name = |what: &str| format!("{what} {turn}");
    let comm = rank.comm(&name("id"));
    let properties = comm.properties().unwrap();
    assert_eq!((properties.rank, properties.size), (rank.rank, rank.size));
    if let Some(support) = &properties.support {
        assert!(support.device_api && !support.multimem, "{support:?}");
        assert_eq!(support.lsa_teams, 1);
    }
    assert_eq!(comm.team_lsa().unwrap().size, rank.size);

    let memory = rank.memory(4 * MIB);
    if !rank.has_windows() {
        rank.no_window(&comm.register(memory.clone(), WindowFlags::empty()).unwrap_err());
        // Nor device communicators, for the same reason.
        let error = comm.create_dev_comm(&DevCommRequirements::new().lsa_barriers(4)).unwrap_err();
        assert!(matches!(error, Error::Nccl(_) | Error::Nothing { .. }), "{error}");
        eprintln!("{error}");
        assert_eq!(Arc::strong_count(&memory), 1);
        return comm.close().unwrap();
    }
    let window = comm.register(memory.clone(), WindowFlags::empty()).unwrap();
    assert_eq!((window.address(), window.len()), (memory.address().as_ptr() as usize, 4 * MIB));
    plain.exchange(rank, &window, &name("NCCL's memory"), turn + 1);
    assert_eq!(window.multimem_pointer(0).unwrap(), None);

    // Memory of ours: one window over device and host memory.
    let range = segmented(rank.device.ordinal());
    let ours = comm.register(range.clone(), WindowFlags::empty());
    if rank.nccl.generation() < Generation::V2_30 {
        let error = ours.unwrap_err();
        assert!(matches!(error, Error::Memory { .. }) && error.to_string().contains("2.30"), "{error}");
    } else {
        let ours = ours.unwrap();
        plain.exchange(rank, &ours, &name("segmented memory"), turn + 17);
        ours.close().unwrap();
    }
    assert_eq!(Arc::strong_count(&range), 1);

    let error = comm.create_dev_comm(&DevCommRequirements::new().lsa_multimem(true)).unwrap_err();
    assert!(matches!(error, Error::MulticastOff { .. }), "{error}");
    if properties.support.is_some_and(|support| support.gin.is_none()) {
        let error = comm.create_dev_comm(&DevCommRequirements::new().gin(GinConnection::Full)).unwrap_err();
        assert!(
            matches!(error, Error::Unsupported { .. }) && error.to_string().contains("NCCL_GIN_PLUGIN"),
            "{error}"
        );
    }
    let gin = DevCommRequirements::new().lsa_barriers(4).gin(GinConnection::Full);
    if rank.nccl.generation() == Generation::V2_28_3 {
        // The one release with device communicators and without GIN.
        let error = comm.create_dev_comm(&gin).unwrap_err();
        assert!(matches!(error, Error::Unsupported { what: "GIN", .. }), "{error}");
        assert!(!rank.nccl.has(Function::ncclCommRevoke));
    }
    let dev_comm = comm.create_dev_comm(&DevCommRequirements::new().lsa_barriers(4)).unwrap();
    let info = dev_comm.info();
    assert_eq!((info.rank, info.size), (rank.rank, rank.size), "{info:?}");
    assert_eq!((info.lsa_rank, info.lsa_size, info.lsa_barriers), (rank.rank, rank.size, 4), "{info:?}");
    assert_eq!(dev_comm.as_bytes().len(), rank.nccl.generation().dev_comm_size());
    let rounds = if rank.shares { 20 } else { 2000 };
    barrier_rounds(rank, nvrtc, &window, &dev_comm, rounds, &name("barrier"));
    dev_comm.close().unwrap();
    window.close().unwrap();
    drop(memory);
    comm.close().unwrap();
}

/// Four cycles, and the device's free memory after each.
fn cycles(test: &str, rank: &Rank) {
    let nvrtc = match Nvrtc::find() {
        Ok(nvrtc) => nvrtc,
        Err(error) => return skipped(test, &error),
    };
    let driver = rank.device.driver();
    let plain = Plain::new(&nvrtc, driver);
    let mut free = Vec::new();
    for turn in 0..4 {
        cycle(rank, &nvrtc, &plain, turn);
        // All have closed before anybody looks, and nobody goes on before all have looked.
        rank.meeting.meet(&format!("closed {turn}"));
        free.push(free_memory(driver));
        rank.meeting.meet(&format!("counted {turn}"));
    }
    eprintln!("{test}: rank {}: free bytes after each cycle: {free:?}", rank.rank);
    // The first cycle loads NCCL's kernels and fills its and the driver's pools. What another rank's process has on this device comes and goes
    // after that; a leak grows with every cycle.
    let kept = free[1..].windows(2).any(|cycles| cycles[1] + MIB > cycles[0]);
    assert!(kept, "device memory is lost: {free:?}");
}

#[test]
fn one_rank() {
    const TEST: &str = "cycles::one_rank";
    match Rank::here(TEST) {
        Some(rank) => cycles(TEST, &rank),
        None => ranks(TEST, 1),
    }
}

#[test]
fn two_ranks() {
    const TEST: &str = "cycles::two_ranks";
    match Rank::here(TEST) {
        Some(rank) => cycles(TEST, &rank),
        None => ranks(TEST, 2),
    }
}

#[test]
fn four_ranks() {
    const TEST: &str = "cycles::four_ranks";
    match Rank::here(TEST) {
        Some(rank) => cycles(TEST, &rank),
        None => ranks(TEST, 4),
    }
}

#[test]
fn eight_ranks() {
    const TEST: &str = "cycles::eight_ranks";
    match Rank::here(TEST) {
        Some(rank) => cycles(TEST, &rank),
        None => ranks(TEST, 8),
    }
}

//! Memory that cannot become a window: refused before any rank waits.

use crate::child;
use crate::errors::{MIB2, contains};
use crate::fake::{Fake, Kind, world};
use nccl_gin::{Error, WindowFlags};
use std::sync::Arc;

#[test]
fn memory_that_nccl_cannot_export_is_refused_before_any_rank_waits() {
    for (version, pieces, shift, needle) in [
        (23203, &[(MIB2, Kind::Device)][..], 64, "not a multiple of 4096"),
        (23203, &[(MIB2, Kind::Plain)], 0, "was not allocated with cuMemCreate"),
        (23203, &[(MIB2, Kind::Private)], 0, "without a handle type"),
        (23203, &[(MIB2, Kind::Device), (MIB2, Kind::Plain)], 0, "was not allocated with cuMemCreate"),
        (23203, &[], 0, "it has no bytes"),
        (
            22907,
            &[(MIB2, Kind::Device), (MIB2, Kind::Device)],
            0,
            "several physical allocations, for which NCCL 2.30",
        ),
        (
            22809,
            &[(MIB2, Kind::Device), (MIB2, Kind::Device)],
            0,
            "several physical allocations, for which NCCL 2.30",
        ),
        // Told before the second allocation is asked about.
        (
            22809,
            &[(MIB2, Kind::Device), (MIB2, Kind::Private)],
            0,
            "several physical allocations, for which NCCL 2.30",
        ),
        (22809, &[(MIB2, Kind::Host)], 0, "host memory, for which NCCL 2.30"),
        // More than the 8 GiB of addresses that a device of 6 GiB gets.
        (23203, &[(MIB2, Kind::Device), (8 << 30, Kind::Host)], 0, "set NCCL_WIN_STRIDE=17179869184"),
    ] {
        let fake = Fake::new(version);
        let comm = fake.comm();
        let memory = fake.memory(pieces);
        let memory = Arc::new(crate::fake::Piece {
            start: memory.start + shift,
            length: memory.length.saturating_sub(shift),
        });
        let error = comm.register(memory.clone(), WindowFlags::empty()).unwrap_err();
        assert!(matches!(error, Error::Memory { .. }), "{error}");
        contains(&error, &[needle, "cannot become a window"]);
        world(|world| assert!(!world.log.contains(&"ncclCommWindowRegister")));
        assert_eq!(Arc::strong_count(&memory), 1);
        comm.close().unwrap();
        fake.finish();
    }
    // No memory of CUDA at all, and a range that leaves the address space.
    let fake = Fake::new(23203);
    let comm = fake.comm();
    for (start, length, needle) in [
        (0x1000, 4096, "is no memory of CUDA"),
        (usize::MAX - 4095, 8192, "beyond the end of the address space"),
    ] {
        let error =
            comm.register(Arc::new(crate::fake::Piece { start, length }), WindowFlags::empty()).unwrap_err();
        contains(&error, &[needle]);
    }
    comm.close().unwrap();
    fake.finish();
}

#[test]
fn what_the_driver_exports_becomes_a_window_whatever_it_tells() {
    let fake = Fake::new(23203);
    let comm = fake.comm();
    let memory = fake.memory(&[(MIB2, Kind::Device), (MIB2, Kind::Untold)]);
    comm.register(memory, WindowFlags::empty()).unwrap().close().unwrap();
    comm.close().unwrap();
    fake.finish();
}

/// Registers host memory that was imported, behind memory of the device, with a library of a version.
fn refuse_imported_host_memory(version: u32) {
    let fake = Fake::new(version);
    let comm = fake.comm();
    assert!(!comm.reuses_host_memory());
    let memory = fake.memory(&[(MIB2, Kind::Device), (MIB2, Kind::Imported)]);
    let error = comm.register(memory, WindowFlags::empty()).unwrap_err();
    assert!(matches!(error, Error::Memory { .. }), "{error}");
    contains(
        &error,
        &["imported from another process", "set NCCL_SYM_REUSE_SYSMEM_HANDLES=1", "2.30.4 or newer"],
    );
    world(|world| assert!(!world.log.contains(&"ncclCommWindowRegister")));
    comm.close().unwrap();
    fake.finish();
}

#[test]
fn imported_host_memory_needs_a_setting() {
    refuse_imported_host_memory(23203);
    for value in ["1", "0x1"] {
        let environment = [("NCCL_SYM_REUSE_SYSMEM_HANDLES", value.as_ref())];
        child::passes("memory::with_every_ranks_host_memory", &environment);
    }
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn with_every_ranks_host_memory() {
    let fake = Fake::new(23004);
    let comm = fake.comm();
    assert!(comm.reuses_host_memory());
    let pieces = [(MIB2, Kind::Device), (MIB2, Kind::Host), (MIB2, Kind::Imported)];
    comm.register(fake.memory(&pieces), WindowFlags::empty()).unwrap().close().unwrap();
    // Memory of a device is each rank's own, whatever the setting says.
    let private = fake.memory(&[(MIB2, Kind::Private)]);
    let error = comm.register(private, WindowFlags::empty()).unwrap_err();
    assert!(matches!(error, Error::Memory { .. }), "{error}");
    contains(&error, &["without a handle type", "register it where it was created"]);
    comm.close().unwrap();
    fake.finish();
    // Libraries that do not read the setting would import, and fail inside the collective call.
    refuse_imported_host_memory(23003);
}

#[test]
fn settings_of_the_environment_are_told_before_any_rank_waits() {
    child::passes("memory::without_host_memory", &[("NCCL_ELASTIC_BUFFER_REGISTER", "0".as_ref())]);
    child::passes("memory::with_a_stride", &[("NCCL_WIN_STRIDE", "12884901888".as_ref())]);
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn without_host_memory() {
    let fake = Fake::new(23203);
    let comm = fake.comm();
    let mixed = fake.memory(&[(MIB2, Kind::Device), (MIB2, Kind::Host)]);
    let error = comm.register(mixed, WindowFlags::empty()).unwrap_err();
    assert!(matches!(error, Error::Memory { .. }), "{error}");
    contains(&error, &["NCCL_ELASTIC_BUFFER_REGISTER=0", "unset it"]);
    world(|world| assert!(!world.log.contains(&"ncclCommWindowRegister")));
    // Memory of the device alone is as before.
    comm.register(fake.memory(&[(MIB2, Kind::Device)]), WindowFlags::empty()).unwrap().close().unwrap();
    comm.close().unwrap();
    fake.finish();
}

#[test]
#[ignore = "run by another test, in a process of its own"]
fn with_a_stride() {
    let fake = Fake::new(23203);
    let comm = fake.comm();
    const { assert!(crate::fake::cuda::MEMORY < 12 << 30) };
    let window = comm.register(fake.memory(&[(12 << 30, Kind::Host)]), WindowFlags::empty()).unwrap();
    window.close().unwrap();
    let long = fake.memory(&[((12 << 30) + MIB2, Kind::Host)]);
    let error = comm.register(long, WindowFlags::empty()).unwrap_err();
    contains(&error, &["NCCL_WIN_STRIDE says (12884901888 bytes)", "set NCCL_WIN_STRIDE=21474836480"]);
    comm.close().unwrap();
    fake.finish();
}

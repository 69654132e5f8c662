//! Bad input and failing drivers: typed errors, nothing leaked, on the software driver.

use cuda_vmm::share::{Descriptor, DescriptorError, Kind, Transport, receive, send};
use cuda_vmm::sys::{CUresult, Driver, Function, LoadError};
use cuda_vmm::{
    Capabilities, Cuda, Error, Grant, Granularities, Granularity, GrowableRange, HandleTypes, Location,
    PhysicalMemory, Properties, Reservation, SegmentedRange, Support, Uuid,
};
use cuda_vmm_emu::{Config, Emulator, Fabric};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

const MIB: usize = 1 << 20;
const SOON: Duration = Duration::from_secs(10);

/// Runs a body on a software driver and checks that nothing is left.
fn on(config: Config, body: impl FnOnce(&Emulator, &Cuda)) {
    let emulator = Emulator::new(config).unwrap();
    let cuda = Cuda::with_driver(emulator.driver()).unwrap();
    body(&emulator, &cuda);
    emulator.assert_empty();
}

fn fd_memory(cuda: &Cuda) -> PhysicalMemory {
    PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(0).handle_types(HandleTypes::POSIX_FD)).unwrap()
}

#[test]
fn sizes_and_offsets_are_checked_before_the_driver() {
    on(Config::h200x2(), |emulator, cuda| {
        let device = Properties::device(0);
        let creations = emulator.faults().calls(Function::cuMemCreate);
        assert!(matches!(PhysicalMemory::create(cuda, 0, &device), Err(Error::Zero { .. })));
        let error = PhysicalMemory::create(cuda, 2 * MIB + 1, &device).unwrap_err();
        assert!(
            matches!(error, Error::Misaligned { value: 0x20_0001, granularity: 0x20_0000, .. }),
            "{error}"
        );
        let error = PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(2)).unwrap_err();
        assert!(matches!(error, Error::UnknownDevice { ordinal: 2, count: 2 }), "{error}");
        assert_eq!(emulator.faults().calls(Function::cuMemCreate), creations);

        let granularity = Granularities::of(cuda, &device).unwrap().minimum;
        assert!(matches!(Reservation::new(cuda, 0, granularity), Err(Error::Zero { .. })));
        assert!(matches!(Reservation::new(cuda, 1, granularity), Err(Error::Misaligned { .. })));
        let reservation = Reservation::new(cuda, 8 * MIB, granularity).unwrap();
        let memory = PhysicalMemory::create(cuda, 4 * MIB, &device).unwrap();
        assert!(matches!(reservation.map(MIB, &memory), Err(Error::Misaligned { .. })));
        assert!(matches!(
            reservation.map(6 * MIB, &memory),
            Err(Error::OutOfBounds { limit: 0x80_0000, .. })
        ));
        let far = usize::MAX - 2 * MIB + 1;
        assert!(matches!(reservation.map(far, &memory), Err(Error::OutOfBounds { .. })));
        let _first = reservation.map(2 * MIB, &memory).unwrap();
        for offset in [0, 2 * MIB, 4 * MIB] {
            let error = reservation.map(offset, &memory).unwrap_err();
            assert!(
                matches!(error, Error::Overlap { mapped_offset: 0x20_0000, mapped_length: 0x40_0000, .. }),
                "{error}"
            );
        }
        assert_eq!(reservation.mapped_bytes(), 4 * MIB);
    });
}

#[test]
fn access_is_checked_before_the_driver() {
    on(Config::h200x2(), |_, cuda| {
        let memory = PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(0)).unwrap();
        let granularity = Granularities::of(cuda, memory.properties()).unwrap().minimum;
        let mapping = Reservation::new(cuda, 2 * MIB, granularity).unwrap().map(0, &memory).unwrap();
        assert!(matches!(mapping.set_access(&[]), Err(Error::Zero { .. })));
        let error = mapping.set_access(&[Grant::device(0), Grant::device(7)]).unwrap_err();
        assert!(matches!(error, Error::UnknownDevice { ordinal: 7, .. }), "{error}");
        let error = mapping.set_access(&[Grant::host()]).unwrap_err();
        assert!(matches!(error, Error::AccessNotPossible { memory: Location::Device(0), .. }), "{error}");
        assert!(matches!(mapping.access(Location::Device(-3)), Err(Error::UnknownDevice { .. })));
    });
}

#[test]
fn parts_outside_of_memory_are_refused() {
    on(Config::h200x2(), |_, cuda| {
        let range = SegmentedRange::builder(cuda)
            .create(Properties::device(0), 2 * MIB)
            .grant(Grant::device(0))
            .build()
            .unwrap();
        let context = cuda.device(0).unwrap().primary_context().unwrap();
        let end = 2 * MIB;
        assert!(matches!(context.upload(&range, end - 1, b"ab"), Err(Error::OutOfBounds { .. })));
        assert!(matches!(context.fill(&range, usize::MAX, 2, 0), Err(Error::OutOfBounds { .. })));
        assert!(matches!(context.download(&range, end + 1, &mut []), Err(Error::OutOfBounds { .. })));
        context.download(&range, end, &mut []).unwrap();
        // A device without access cannot copy there.
        let other = cuda.device(1).unwrap().primary_context().unwrap();
        let error = other.upload(&range, 0, b"ab").unwrap_err();
        assert!(error.status().is_some(), "{error}");
    });
}

#[test]
fn ranges_refuse_what_makes_no_range() {
    on(Config::h200x2(), |_, cuda| {
        let builder = || SegmentedRange::builder(cuda);
        assert!(matches!(builder().grant(Grant::device(0)).build(), Err(Error::Zero { .. })));
        let no_grant = builder().create(Properties::device(0), 2 * MIB).build();
        assert!(matches!(no_grant, Err(Error::Zero { what: "number of grants" })));
        let odd = builder().create(Properties::device(0), MIB).grant(Grant::device(0)).build();
        assert!(matches!(odd, Err(Error::Misaligned { .. })));
        let huge = usize::MAX / (2 * MIB) * (2 * MIB);
        let overflow = builder()
            .create(Properties::device(0), huge)
            .create(Properties::device(0), huge)
            .grant(Grant::device(0))
            .build();
        assert!(matches!(overflow, Err(Error::Overflow { .. })));
        let nowhere = builder().create(Properties::device(0), 2 * MIB).grant(Grant::device(9)).build();
        assert!(matches!(nowhere, Err(Error::UnknownDevice { .. })));

        let grow = |capacity, chunk| {
            GrowableRange::new(cuda, Properties::device(0), capacity, chunk, &[Grant::device(0)])
        };
        assert!(matches!(grow(4 * MIB, 0), Err(Error::Zero { .. })));
        assert!(matches!(grow(0, 2 * MIB), Err(Error::Zero { .. })));
        assert!(matches!(grow(4 * MIB, MIB), Err(Error::Misaligned { .. })));
        assert!(matches!(grow(6 * MIB, 4 * MIB), Err(Error::Misaligned { .. })));
        let empty = GrowableRange::new(cuda, Properties::device(0), 4 * MIB, 2 * MIB, &[]);
        assert!(matches!(empty, Err(Error::Zero { .. })));
    });
}

#[test]
fn objects_of_two_drivers_do_not_mix() {
    on(Config::h200x2(), |_, one| {
        on(Config::h200x2(), |_, two| {
            let memory = PhysicalMemory::create(one, 2 * MIB, &Properties::device(0)).unwrap();
            let granularity = Granularity::new(2 * MIB).unwrap();
            let foreign = Reservation::new(two, 2 * MIB, granularity).unwrap();
            let error = foreign.map(0, &memory).unwrap_err();
            assert!(matches!(error, Error::ForeignDriver { .. }), "{error}");
            let range =
                SegmentedRange::builder(one).existing(memory).grant(Grant::device(0)).build().unwrap();
            let context = two.device(0).unwrap().primary_context().unwrap();
            assert!(matches!(context.upload(&range, 0, b"a"), Err(Error::ForeignDriver { .. })));
        });
    });
}

#[test]
fn memory_that_is_not_exportable_says_so() {
    on(Config::h200x2(), |_, cuda| {
        let private = PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(0)).unwrap();
        let error = private.export_fd().unwrap_err();
        assert!(matches!(error, Error::NotExportable { available, .. } if available.is_empty()), "{error}");
        let (here, _there) = UnixStream::pair().unwrap();
        assert!(matches!(send(&here, &private, SOON), Err(Error::NotExportable { .. })));
        let error =
            PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(0).handle_types(HandleTypes::FABRIC))
                .unwrap_err();
        assert_eq!(error.status(), Some(CUresult::CUDA_ERROR_NOT_PERMITTED));
        assert!(error.to_string().contains("IMEX"), "{error}");
    });
}

#[test]
fn importing_what_is_no_memory_is_refused() {
    on(Config::h200x2(), |_, cuda| {
        let file = tempfile::tempfile().unwrap();
        let error = PhysicalMemory::import_fd(cuda, &file, 2 * MIB).unwrap_err();
        assert!(error.status().is_some() && error.to_string().contains("file descriptor"), "{error}");
        let (socket, _other) = UnixStream::pair().unwrap();
        assert!(PhysicalMemory::import_fd(cuda, &socket, 2 * MIB).is_err());
        let memory = fd_memory(cuda);
        let fd = memory.export_fd().unwrap();
        assert!(matches!(PhysicalMemory::import_fd(cuda, &fd, 0), Err(Error::Zero { .. })));
        assert!(matches!(PhysicalMemory::import_fd(cuda, &fd, 5), Err(Error::Misaligned { .. })));
        // More than there is: known when it is mapped.
        let large = PhysicalMemory::import_fd(cuda, &fd, 4 * MIB).unwrap();
        let granularity = Granularity::new(2 * MIB).unwrap();
        let error = Reservation::new(cuda, 4 * MIB, granularity).unwrap().map(0, &large).unwrap_err();
        assert_eq!(error.status(), Some(CUresult::CUDA_ERROR_INVALID_VALUE), "{error}");
    });
}

/// What `receive` makes of raw bytes and descriptors.
fn received(cuda: &Cuda, bytes: &[u8]) -> Error {
    let (here, mut there) = UnixStream::pair().unwrap();
    there.write_all(bytes).unwrap();
    drop(there);
    receive(cuda, &here, SOON).unwrap_err()
}

#[test]
fn hostile_messages_are_refused() {
    on(Config::h200x2(), |_, cuda| {
        let good = Descriptor {
            kind: Kind::Memory { location: Location::Device(0), device_uuid: Uuid([1; 16]) },
            transport: Transport::Socket,
            handle_types: HandleTypes::POSIX_FD,
            size: 2 * MIB as u64,
        };
        assert!(matches!(received(cuda, b""), Error::PeerClosed { received: 0, .. }));
        assert!(matches!(received(cuda, &good.encode()[..127]), Error::PeerClosed { received: 127, .. }));
        assert!(matches!(received(cuda, &[0xff; 128]), Error::Descriptor(DescriptorError::Magic)));
        assert!(matches!(received(cuda, &good.encode()), Error::DescriptorCount { received: 0, .. }));
        let pidfd = Descriptor { transport: Transport::Pidfd { pid: 1, fd: 1 }, ..good };
        let error = received(cuda, &pidfd.encode());
        assert!(matches!(error, Error::Descriptor(DescriptorError::Transport { .. })), "{error}");

        // A right message with the wrong memory: the descriptor says another device.
        let memory = fd_memory(cuda);
        let host = Kind::Memory { location: Location::Host, device_uuid: Uuid::default() };
        for wrong in [good, Descriptor { kind: host, ..good }] {
            let error = forged(cuda, &wrong, &memory, 1);
            assert!(matches!(error, Error::ImportMismatch { .. }), "{error}");
        }
        let multicast = Descriptor { kind: Kind::Multicast { devices: 2 }, ..good };
        let error = forged(cuda, &multicast, &memory, 1);
        assert!(matches!(error, Error::Descriptor(DescriptorError::Kind { .. })), "{error}");
        let error = forged(cuda, &Descriptor { size: MIB as u64, ..good }, &memory, 1);
        assert!(matches!(error, Error::Misaligned { .. }), "{error}");
        let before = std::fs::read_dir("/proc/self/fd").unwrap().count();
        let error = forged(cuda, &good, &memory, 3);
        assert!(matches!(error, Error::DescriptorCount { received: 3, expected: 1, .. }), "{error}");
        // The superfluous descriptors were closed. Other tests open some meanwhile, but not so many less.
        (0..100).for_each(|_| drop(forged(cuda, &good, &memory, 3)));
        let after = std::fs::read_dir("/proc/self/fd").unwrap().count();
        assert!(after < before + 100, "open files went from {before} to {after}");
    });
}

/// What `receive` makes of a descriptor with the descriptors of other memory.
fn forged(cuda: &Cuda, descriptor: &Descriptor, memory: &PhysicalMemory, fds: usize) -> Error {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let (here, there) = UnixStream::pair().unwrap();
    let owned: Vec<_> = (0..fds).map(|_| memory.export_fd().unwrap()).collect();
    let borrowed: Vec<_> = owned.iter().map(AsFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)));
    let bytes = descriptor.encode();
    sendmsg(&there, &[std::io::IoSlice::new(&bytes)], &mut ancillary, SendFlags::empty()).unwrap();
    receive(cuda, &here, SOON).unwrap_err()
}

#[test]
fn fabric_travels_over_a_socket_where_it_works() {
    on(Config::h200x2().fabric(Fabric::Working), |_, cuda| {
        let capabilities = Capabilities::probe(&cuda.device(0).unwrap()).unwrap();
        assert_eq!(capabilities.fabric, Support::Works);
        let both = PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(0).shareable()).unwrap();
        assert_eq!(both.handle_types(), HandleTypes::FABRIC | HandleTypes::POSIX_FD);
        let fabric = Properties::device(0).handle_types(HandleTypes::FABRIC);
        let memory = PhysicalMemory::create(cuda, 2 * MIB, &fabric).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        send(&there, &memory, SOON).unwrap();
        let import = receive(cuda, &here, SOON).unwrap();
        assert_eq!((import.size(), import.location()), (2 * MIB, Location::Device(0)));
    });
}

#[test]
fn a_machine_that_claims_fabric_and_refuses_is_told_apart() {
    on(Config::h200x2(), |_, cuda| {
        let capabilities = Capabilities::probe(&cuda.device(0).unwrap()).unwrap();
        assert_eq!(capabilities.fabric, Support::Refused(CUresult::CUDA_ERROR_NOT_PERMITTED));
        assert!(capabilities.posix_fd.works() && capabilities.host_numa.works());
    });
}

#[test]
fn out_of_memory_is_an_error_and_leaves_the_size() {
    on(Config::new(1).device(0, |device| device.memory(16 << 20)), |_, cuda| {
        let mut range =
            GrowableRange::new(cuda, Properties::device(0), 64 * MIB, 2 * MIB, &[Grant::device(0)]).unwrap();
        range.grow_to(8 * MIB).unwrap();
        let error = range.grow_to(32 * MIB).unwrap_err();
        assert_eq!(error.status(), Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY), "{error}");
        assert_eq!(range.size(), 8 * MIB);
        range.grow_to(16 * MIB).unwrap();
    });
}

/// Everything that one elastic buffer does, from nothing to gone.
fn everything(cuda: &Cuda) -> Result<(), Error> {
    let device = cuda.device(0)?;
    let context = device.primary_context()?;
    let range = SegmentedRange::builder(cuda)
        .create(Properties::device(0).shareable(), 4 * MIB)
        .create(Properties::host_numa(0).shareable(), 2 * MIB)
        .grant(Grant::device(0))
        .grant(Grant::device(1))
        .build()?;
    context.fill(&range, 0, 6 * MIB, 1)?;
    let (here, there) = UnixStream::pair().unwrap();
    for segment in range.segments() {
        send(&there, segment.mapping.memory(), SOON)?;
        let import = receive(cuda, &here, SOON)?;
        let copy = SegmentedRange::builder(cuda).existing(import).grant(Grant::device(1)).build()?;
        context.upload(&range, segment.offset, b"x")?;
        drop(copy);
    }
    let mut grown = GrowableRange::new(cuda, Properties::device(1), 8 * MIB, 2 * MIB, &[Grant::device(1)])?;
    grown.grow_to(6 * MIB)?;
    grown.shrink_to(2 * MIB)?;
    Ok(())
}

#[test]
fn whichever_call_fails_nothing_is_left() {
    // Destructors cannot report; a release that the driver refuses is a leak by the driver's own word, so those are left out.
    let releases = [
        Function::cuMemRelease,
        Function::cuMemUnmap,
        Function::cuMemAddressFree,
        Function::cuDevicePrimaryCtxRelease,
        Function::cuCtxPopCurrent,
    ];
    let mut failures = 0;
    for &function in Function::ALL {
        if releases.contains(&function) {
            continue;
        }
        for nth in 1.. {
            let mut done = false;
            on(Config::h200x2(), |emulator, cuda| {
                emulator.faults().fail_nth(function, nth, CUresult::CUDA_ERROR_UNKNOWN);
                let before = emulator.faults().calls(function);
                let result = everything(cuda);
                let called = emulator.faults().calls(function) - before;
                done = called < nth;
                if !done {
                    failures += 1;
                    let error = result.expect_err("a failed call was not reported");
                    // Every failure is the one that was planted, with the function's name.
                    assert_eq!(
                        error.status(),
                        Some(CUresult::CUDA_ERROR_UNKNOWN),
                        "{function:?} {nth}: {error}"
                    );
                    assert!(error.to_string().contains(function.symbol()), "{function:?} {nth}: {error}");
                } else {
                    result.unwrap();
                }
            });
            if done {
                break;
            }
        }
    }
    eprintln!("{failures} planted failures");
    assert!(failures > 50, "only {failures} calls were reached");
}

#[test]
fn a_driver_without_a_function_costs_only_that() {
    let emulator = Emulator::new(Config::h200x2()).unwrap();
    emulator.faults().remove(Function::cuMemExportToShareableHandle);
    let cuda = Cuda::with_driver(emulator.fresh_driver().unwrap()).unwrap();
    let memory = fd_memory(&cuda);
    let error = memory.export_fd().unwrap_err();
    assert!(
        error.status().is_none() && error.to_string().contains("cuMemExportToShareableHandle"),
        "{error}"
    );
    assert!(error.to_string().contains("needs CUDA 10.2"), "{error}");
    drop(memory);
    emulator.assert_empty();
}

#[test]
fn an_old_driver_has_no_multicast() {
    on(Config::h200x2().driver_version(12_000), |_, cuda| {
        assert!(!cuda.driver().has(Function::cuMulticastCreate));
        let capabilities = Capabilities::probe(&cuda.device(0).unwrap()).unwrap();
        assert_eq!(capabilities.multicast, Support::No);
    });
}

#[test]
fn no_driver_is_a_typed_error() {
    let error = Driver::open("/nonexistent/libcuda.so.1").map_err(Error::from).unwrap_err();
    assert!(matches!(error, Error::Load(LoadError::NotFound { .. })), "{error}");
}

#[test]
fn a_machine_without_a_driver_gets_errors_and_may_try_again() {
    // In a process of its own: the driver is the process's, and the variable names one that is not there.
    let test = "a_machine_without_a_driver_gets_errors_and_may_try_again";
    let (_folder, path) = integration_tests::process::scratch("libcuda.so.1");
    if integration_tests::process::role(test).is_none() {
        let environment = [("CUDA_VMM_DRIVER", path.to_str().unwrap())];
        return integration_tests::process::Peer::spawn(test, "without", &environment).finish();
    }
    let path = std::path::PathBuf::from(std::env::var_os("CUDA_VMM_DRIVER").unwrap());
    for _ in 0..2 {
        let error = Cuda::get().unwrap_err();
        assert!(matches!(&error, Error::Load(LoadError::NotFound { .. })), "{error}");
        assert!(error.to_string().contains("CUDA_VMM_DRIVER"), "{error}");
        assert!(matches!(Driver::get(), Err(LoadError::NotFound { .. })));
    }
    // The failure is not remembered: what appears there is looked at.
    std::fs::write(&path, "no library").unwrap();
    let error = Cuda::get().unwrap_err();
    assert!(
        error.to_string().contains("libcuda.so.1: ") && !error.to_string().contains("No such file"),
        "{error}"
    );
}

#[test]
fn the_limit_of_open_files_is_an_error() {
    // In a process of its own: the limit is the process's.
    let test = "the_limit_of_open_files_is_an_error";
    if integration_tests::process::role(test).is_none() {
        return integration_tests::process::Peer::spawn(test, "limited", &[]).finish();
    }
    on(Config::h200x2(), |_, cuda| {
        let memory = fd_memory(cuda);
        let (here, there) = UnixStream::pair().unwrap();
        // First the sender meets the limit, then the receiver.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let low = rustix::process::Rlimit { current: Some(64), maximum: limit.maximum };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, low).unwrap();
        let mut files: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        let error = send(&there, &memory, SOON).unwrap_err();
        assert!(error.status().is_some(), "{error}");
        // One free descriptor for the export; it is closed again when it is on its way, and taken before it arrives.
        files.pop();
        send(&there, &memory, SOON).unwrap();
        files.extend(std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()));
        let error = receive(cuda, &here, SOON).unwrap_err();
        assert!(matches!(error, Error::DescriptorCount { received: 0, truncated: true, .. }), "{error}");
        assert!(error.to_string().contains("limit of open files"), "{error}");
        drop(files);
        send(&there, &memory, SOON).unwrap();
        receive(cuda, &here, SOON).unwrap();
    });
}

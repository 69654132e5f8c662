//! Virtual memory management in one process: the same bodies on the software driver and on GPUs.

use cuda_vmm::{
    Access, Capabilities, Cuda, Error, Grant, Granularities, GrowableRange, HandleTypes, Location, Memory,
    PhysicalMemory, PlainMemory, Properties, Reservation, SegmentedRange, Shareable, Support,
};
use integration_tests::both;

const MIB: usize = 1 << 20;

/// Bytes that differ from call to call and from place to place.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

fn round_trip(cuda: &Cuda, device: i32, memory: &dyn Memory, offset: usize, length: usize) {
    let context = cuda.device(device).unwrap().primary_context().unwrap();
    let sent = noise((offset + length) as u64, length);
    context.fill(memory, offset, length, 0xee).unwrap();
    context.upload(memory, offset, &sent).unwrap();
    let mut back = vec![0; length];
    context.download(memory, offset, &mut back).unwrap();
    assert!(back == sent, "{length} bytes at offset {offset} came back changed");
}

/// A NUMA node that the first device knows, and that this machine must have.
fn node(cuda: &Cuda) -> i32 {
    cuda.device(0).unwrap().host_numa_node().unwrap().expect("device 0 names a NUMA node")
}

both!(a_mapping_is_used_and_queried, 1, |_, cuda| {
    let properties = Properties::device(0);
    let granularity = Granularities::of(cuda, &properties).unwrap();
    assert!(granularity.recommended >= granularity.minimum);
    let size = 2 * granularity.minimum.bytes();
    let memory = PhysicalMemory::create(cuda, size, &properties).unwrap();
    assert_eq!((memory.size(), memory.location()), (size, Location::Device(0)));
    let reservation = Reservation::new(cuda, 2 * size, granularity.minimum).unwrap();
    let mapping = reservation.map(size, &memory).unwrap();
    assert_eq!(mapping.address().get(), reservation.address().get() + size as u64);
    assert_eq!(mapping.access(Location::Device(0)).unwrap(), Access::None);
    mapping.set_access(&[Grant::device(0)]).unwrap();
    assert_eq!(mapping.access(Location::Device(0)).unwrap(), Access::ReadWrite);
    round_trip(cuda, 0, &mapping, 5, 4099);
    mapping.set_access(&[Grant::device(0).with(Access::Read)]).unwrap();
    assert_eq!(mapping.access(Location::Device(0)).unwrap(), Access::Read);
    // Memory outlives its mapping, and its bytes outlive it too.
    let memory = mapping.unmap().unwrap();
    assert_eq!(reservation.mapped_bytes(), 0);
    let again = reservation.map(0, &memory).unwrap();
    again.set_access(&[Grant::device(0)]).unwrap();
    let context = cuda.device(0).unwrap().primary_context().unwrap();
    let mut back = vec![0; 4099];
    context.download(&again, 5, &mut back).unwrap();
    assert!(back == noise(5 + 4099, 4099));
});

both!(device_and_host_memory_in_one_range, 1, |_, cuda| {
    let range = SegmentedRange::builder(cuda)
        .create(Properties::device(0).shareable(), 4 * MIB)
        .create(Properties::host_numa(node(cuda)).shareable(), 2 * MIB)
        .create(Properties::device(0), 2 * MIB)
        .grant(Grant::device(0))
        .build()
        .unwrap();
    assert_eq!(range.size(), 8 * MIB);
    assert_eq!(range.segments().map(|s| s.offset).collect::<Vec<_>>(), [0, 4 * MIB, 6 * MIB]);
    // Fills and copies go across the borders of the segments.
    round_trip(cuda, 0, &range, 0, 8 * MIB);
    round_trip(cuda, 0, &range, 4 * MIB - 3, 2 * MIB + 7);
    // The CPU sees host memory at the same address.
    let host = range.segment(1).unwrap().mapping;
    let pointer = host.host_pointer().expect("host memory has a host pointer");
    assert_eq!(pointer.as_ptr() as u64, range.address().get() + 4 * MIB as u64);
    // SAFETY: the segment is mapped for the CPU, and the copies above have been waited for.
    let bytes = unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), 2 * MIB) };
    let expected = noise((4 * MIB - 3 + 2 * MIB + 7) as u64, 2 * MIB + 7);
    assert!(bytes == &expected[3..3 + 2 * MIB]);
    bytes[..4].copy_from_slice(b"host");
    let mut back = [0; 4];
    let context = cuda.device(0).unwrap().primary_context().unwrap();
    context.download(&range, 4 * MIB, &mut back).unwrap();
    assert_eq!(&back, b"host");
    assert!(range.segment(0).unwrap().mapping.host_pointer().is_none());
    assert!(range.segment(3).is_none());
});

both!(both_devices_use_one_mapping, 2, |_, cuda| {
    let devices = cuda.devices().unwrap();
    assert!(devices[0].can_access(&devices[1]).unwrap() && devices[1].can_access(&devices[0]).unwrap());
    for owner in 0..2 {
        let range = SegmentedRange::builder(cuda)
            .create(Properties::device(owner), 2 * MIB)
            .grant(Grant::device(0))
            .grant(Grant::device(1))
            .build()
            .unwrap();
        let contexts: Vec<_> = devices.iter().map(|d| d.primary_context().unwrap()).collect();
        for (writer, reader) in [(0, 1), (1, 0)] {
            let sent = noise(owner as u64 * 2 + writer as u64, 2 * MIB);
            contexts[writer].upload(&range, 0, &sent).unwrap();
            let mut back = vec![0; 2 * MIB];
            contexts[reader].download(&range, 0, &mut back).unwrap();
            assert!(back == sent, "device {writer} wrote, device {reader} read other bytes");
        }
    }
});

both!(a_range_grows_and_shrinks_in_place, 1, |backend, cuda| {
    // On a GPU to 8 GiB; in software as far as it makes sense.
    let (most, chunk) = if backend.is_gpu() { (8 << 30, 64 * MIB) } else { (64 * MIB, 2 * MIB) };
    let mut range =
        GrowableRange::new(cuda, Properties::device(0), 2 * most, chunk, &[Grant::device(0)]).unwrap();
    let address = range.address();
    range.grow_to(2 * chunk).unwrap();
    round_trip(cuda, 0, &range, chunk - 9, 18);
    range.grow_to(most).unwrap();
    assert_eq!((range.size(), range.address()), (most, address));
    let context = cuda.device(0).unwrap().primary_context().unwrap();
    let mut back = vec![0; 18];
    context.download(&range, chunk - 9, &mut back).unwrap();
    assert!(back == noise((chunk + 9) as u64, 18), "growing changed what was there");
    round_trip(cuda, 0, &range, most - chunk - 1000, 2000);
    // A held chunk stops the shrinking at that chunk, and nothing is lost.
    let held = range.chunks()[2].clone();
    let error = range.shrink_to(chunk).unwrap_err();
    assert!(matches!(error, Error::StillShared { holders: 1, .. }), "{error}");
    assert_eq!(range.size(), 3 * chunk);
    drop(held);
    range.shrink_to(chunk).unwrap();
    range.grow_to(2 * chunk).unwrap();
    assert_eq!(range.address(), address);
    let error = range.grow_to(2 * most + chunk).unwrap_err();
    assert!(matches!(error, Error::OutOfBounds { .. }), "{error}");
    assert!(matches!(range.grow_to(chunk + 1), Err(Error::Misaligned { .. })));
    range.shrink_to(0).unwrap();
});

both!(fabric_falls_back_to_a_file_descriptor, 1, |_, cuda| {
    let both = HandleTypes::FABRIC | HandleTypes::POSIX_FD;
    for properties in [Properties::device(0), Properties::host_numa(node(cuda))] {
        assert_eq!(properties.shareable().shareability(), Shareable::BestAvailable);
        let memory = PhysicalMemory::create(cuda, 2 * MIB, &properties.shareable()).unwrap();
        let exactly = PhysicalMemory::create(cuda, 2 * MIB, &properties.handle_types(both));
        // What the driver gives when asked for both tells what the fallback must have given.
        match exactly {
            Ok(_) => assert_eq!(memory.handle_types(), both),
            Err(error) => {
                assert_eq!(memory.handle_types(), HandleTypes::POSIX_FD);
                eprintln!("FABRIC on {}: {error}", properties.location());
            }
        }
        memory.export_fd().unwrap();
        if !memory.handle_types().contains(HandleTypes::FABRIC) {
            let error = memory.export_fabric().unwrap_err();
            assert!(matches!(error, Error::NotExportable { .. }), "{error}");
        }
    }
});

both!(an_export_can_be_imported_here_and_twice, 1, |_, cuda| {
    let memory =
        PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(0).handle_types(HandleTypes::POSIX_FD))
            .unwrap();
    let fd = memory.export_fd().unwrap();
    let imports = [(); 2].map(|()| PhysicalMemory::import_fd(cuda, &fd, 2 * MIB).unwrap());
    drop(fd);
    assert!(imports.iter().all(|import| import.is_imported() && import.location() == Location::Device(0)));
    let map = |memory: &PhysicalMemory| {
        SegmentedRange::builder(cuda).existing(memory.clone()).grant(Grant::device(0)).build().unwrap()
    };
    let context = cuda.device(0).unwrap().primary_context().unwrap();
    let sent = noise(77, 2 * MIB);
    context.upload(&map(&memory), 0, &sent).unwrap();
    drop(memory);
    for import in imports {
        let mut back = vec![0; 2 * MIB];
        context.download(&map(&import), 0, &mut back).unwrap();
        assert!(back == sent, "an import shows other bytes");
    }
});

both!(an_import_is_not_exported_again, 1, |_, cuda| {
    for properties in [Properties::device(0), Properties::host_numa(node(cuda))] {
        let memory =
            PhysicalMemory::create(cuda, 2 * MIB, &properties.handle_types(HandleTypes::POSIX_FD)).unwrap();
        let import = PhysicalMemory::import_fd(cuda, memory.export_fd().unwrap(), 2 * MIB).unwrap();
        // What driver 580 says of host memory; what others say of memory of a device they may keep as well.
        if import.handle_types().is_empty() {
            let error = import.export_fd().unwrap_err();
            assert!(matches!(error, Error::NotExportable { imported: true, .. }), "{error}");
            assert!(error.to_string().contains("only the process that created it can export it"), "{error}");
        } else {
            eprintln!("imported memory on {}: {}", import.location(), import.handle_types());
            import.export_fd().unwrap();
        }
        memory.export_fd().unwrap();
    }
});

// The driver does not tell the size of what is imported: that it refuses to map more is what keeps a wrong size from doing harm.
both!(an_import_is_not_mapped_larger_than_it_is, 1, |_, cuda| {
    let memory =
        PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(0).handle_types(HandleTypes::POSIX_FD))
            .unwrap();
    let import = PhysicalMemory::import_fd(cuda, memory.export_fd().unwrap(), 4 * MIB).unwrap();
    let error = SegmentedRange::builder(cuda).existing(import).grant(Grant::device(0)).build().unwrap_err();
    assert!(error.status().is_some(), "{error}");
});

both!(a_shared_mapping_is_not_unmapped, 1, |_, cuda| {
    let memory = PhysicalMemory::create(cuda, 2 * MIB, &Properties::device(0)).unwrap();
    let granularity = Granularities::of(cuda, memory.properties()).unwrap().minimum;
    let mapping = Reservation::new(cuda, 2 * MIB, granularity).unwrap().map(0, &memory).unwrap();
    let other = mapping.clone();
    let rejected = mapping.unmap().unwrap_err();
    assert!(matches!(rejected.error, Error::StillShared { holders: 1, .. }), "{}", rejected.error);
    drop(other);
    assert!(rejected.object.unmap().unwrap() == memory);
});

both!(plain_memory_is_used, 1, |_, cuda| {
    let context = cuda.device(0).unwrap().primary_context().unwrap();
    let memory = PlainMemory::new(&context, 12345).unwrap();
    round_trip(cuda, 0, &memory, 0, 12345);
    let handle = memory.ipc_handle().unwrap();
    assert!(handle.as_bytes().iter().any(|&byte| byte != 0));
    assert!(matches!(PlainMemory::new(&context, 0), Err(Error::Zero { .. })));
});

both!(capabilities_tell_claims_from_facts, 1, |_, cuda| {
    for device in cuda.devices().unwrap() {
        let capabilities = Capabilities::probe(&device).unwrap();
        eprintln!("device {} ({}):", device.ordinal(), device.name().unwrap());
        for (name, support) in capabilities.rows() {
            eprintln!("  {name}: {support}");
        }
        assert_eq!(capabilities.virtual_memory, Support::Works);
        assert_eq!(capabilities.posix_fd, Support::Works);
        assert!(
            !matches!(capabilities.multicast, Support::Works | Support::Refused(_)),
            "multicast was tried"
        );
    }
});

both!(a_dma_buf_or_a_reason, 1, |_, cuda| {
    let range = SegmentedRange::builder(cuda)
        .create(Properties::device(0).gpu_direct_rdma(true), 2 * MIB)
        .create(Properties::device(0).gpu_direct_rdma(true), 2 * MIB)
        .grant(Grant::device(0))
        .build()
        .unwrap();
    let context = cuda.device(0).unwrap().primary_context().unwrap();
    match context.dma_buf(&range, 4096, 8192) {
        Ok(fd) => drop(fd),
        Err(error) => {
            assert!(error.status().is_some(), "{error}");
            eprintln!("dma-buf: {error}");
        }
    }
    assert!(matches!(context.dma_buf(&range, 1, 4096), Err(Error::Misaligned { .. })));
    assert!(matches!(context.dma_buf(&range, 0, 0), Err(Error::Zero { .. })));
    // Two segments are two pieces of physical memory.
    assert!(matches!(context.dma_buf(&range, 2 * MIB - 4096, 8192), Err(Error::OutOfBounds { .. })));
});

both!(a_thousand_cycles_leak_nothing, 1, |_, cuda| {
    let context = cuda.device(0).unwrap().primary_context().unwrap();
    let cycle = || {
        let range = SegmentedRange::builder(cuda)
            .create(Properties::device(0).shareable(), 4 * MIB)
            .create(Properties::host_numa(node(cuda)).shareable(), 2 * MIB)
            .grant(Grant::device(0))
            .build()
            .unwrap();
        let fd = range.segment(0).unwrap().mapping.memory().export_fd().unwrap();
        PhysicalMemory::import_fd(cuda, fd, 4 * MIB).unwrap();
    };
    // The driver keeps some memory for itself after the first uses.
    (0..10).for_each(|_| cycle());
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (before, fds) = (context.memory_info().unwrap().0, open());
    (0..1000).for_each(|_| cycle());
    let (after, fds_after) = (context.memory_info().unwrap().0, open());
    eprintln!(
        "free device memory before {before}, after {after}; open files before {fds}, after {fds_after}"
    );
    // Other tests of this process may run beside; a leak of these cycles would be 4000 MiB and a thousand files.
    assert!(before.saturating_sub(after) < 1000 * MIB, "free memory went from {before} to {after}");
    assert!(fds_after < fds + 500, "open files went from {fds} to {fds_after}");
});

both!(devices_say_who_they_are, 1, |_, cuda| {
    let mut uuids = Vec::new();
    for device in cuda.devices().unwrap() {
        assert!(!device.name().unwrap().is_empty());
        assert_eq!(device.pci_bus_id().unwrap().matches(':').count(), 2);
        assert!(device.total_memory().unwrap() > 1 << 30);
        uuids.push(device.uuid().unwrap().to_string());
        assert!(uuids.last().unwrap().starts_with("GPU-") && uuids.last().unwrap().len() == 40);
    }
    let count = uuids.len();
    uuids.sort();
    uuids.dedup();
    assert_eq!(uuids.len(), count, "two devices share a UUID");
    assert!(matches!(cuda.device(99), Err(Error::UnknownDevice { ordinal: 99, .. })));
    assert!(matches!(cuda.device(-1), Err(Error::UnknownDevice { .. })));
});

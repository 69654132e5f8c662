//! Reservations, physical memory, mappings and access: what works, and every rule that refuses.

mod common;

use common::*;
use cuda_vmm_emu::sys::{
    CUdevice_attribute, CUmemAccessDesc_v1, CUmemAllocationGranularity_flags, CUmemAllocationType,
    CUmemLocation, CUmemLocationType, CUresult, Function,
};
use cuda_vmm_emu::{Access, Config, EmulatorError, Fabric, Location};
use std::ptr;

/// Addresses far from where a process maps anything by itself.
const APART: u64 = 0x1000_0000_0000;

#[test]
fn a_range_of_device_and_host_memory_reads_back_through_one_address() {
    let (emulator, driver) = start(Config::default());
    let device = create(&driver, on_device(0), GRAIN, FD).unwrap();
    let host = create(&driver, on_node(0), 2 * GRAIN, FD).unwrap();
    let base = reserve(&driver, 3 * GRAIN);
    let boundary = base + GRAIN as u64;
    call!(driver, cuMemMap(base, GRAIN, 0, device, 0)).unwrap();
    call!(driver, cuMemMap(boundary, 2 * GRAIN, 0, host, 0)).unwrap();
    set_access(&driver, base, 3 * GRAIN, on_device(0), READ_WRITE).unwrap();
    set_access(&driver, boundary, 2 * GRAIN, on_host(), READ_WRITE).unwrap();

    // Across the boundary, by the helpers and by the CPU itself.
    emulator.write(boundary - 4, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    // SAFETY: both sides of the boundary are mapped readable and writable, and nobody else uses them.
    unsafe {
        assert_eq!(*((boundary - 1) as *const u8), 4);
        *(boundary as *mut u8) = 55;
    }
    assert_eq!(emulator.read(boundary - 4, 8).unwrap(), [1, 2, 3, 4, 55, 6, 7, 8]);

    let ledger = emulator.ledger();
    assert_eq!(ledger.mappings.len(), 2);
    assert_eq!(ledger.mappings[0].location, Some(Location::Device(0)));
    assert_eq!(ledger.mappings[0].host, Access::None);
    assert_eq!(ledger.mappings[1].devices, [Access::ReadWrite, Access::None]);
    assert_eq!(ledger.device_bytes, [GRAIN as u64, 0]);
    assert!(!ledger.is_empty() && ledger.to_string().contains("host NUMA node 0"), "{ledger}");

    call!(driver, cuMemUnmap(base, 3 * GRAIN)).unwrap();
    call!(driver, cuMemAddressFree(base, 3 * GRAIN)).unwrap();
    for handle in [device, host] {
        call!(driver, cuMemRelease(handle)).unwrap();
    }
    emulator.assert_empty();
    assert_eq!(emulator.ledger().to_string(), "nothing is alive");
}

#[test]
fn reservations_have_rules() {
    let (emulator, driver) = start(Config::default());
    let mut address = 0;
    for (size, alignment, hint, flags) in [
        (0, 0, 0, 0),
        (GRAIN + 1, 0, 0, 0),
        (GRAIN / 2, 0, 0, 0),
        (GRAIN, 3, 0, 0),
        (GRAIN, 0, 17, 0),
        (GRAIN, 0, 0, 1),
    ] {
        let refused = call!(driver, cuMemAddressReserve(&mut address, size, alignment, hint, flags));
        assert_eq!(refused, INVALID_VALUE, "{size} {alignment} {hint} {flags}");
    }
    assert_eq!(call!(driver, cuMemAddressReserve(ptr::null_mut(), GRAIN, 0, 0, 0)), INVALID_VALUE);
    let huge = call!(driver, cuMemAddressReserve(&mut address, 1 << 62, 0, 0, 0));
    assert_eq!(huge, Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));

    call!(driver, cuMemAddressReserve(&mut address, 1 << 40, 1 << 32, 0, 0)).unwrap();
    assert_eq!(address % (1 << 32), 0);
    assert_eq!(call!(driver, cuMemAddressFree(address, GRAIN)), INVALID_VALUE);
    assert_eq!(call!(driver, cuMemAddressFree(address + GRAIN as u64, GRAIN)), INVALID_VALUE);
    call!(driver, cuMemAddressFree(address, 1 << 40)).unwrap();
    assert_eq!(call!(driver, cuMemAddressFree(address, 1 << 40)), INVALID_VALUE);

    // A hint that is free is taken; one that is not, or is badly aligned, is no failure.
    let mut hinted = 0;
    call!(driver, cuMemAddressReserve(&mut hinted, GRAIN, 0, APART, 0)).unwrap();
    assert_eq!(hinted, APART);
    let mut other = 0;
    call!(driver, cuMemAddressReserve(&mut other, GRAIN, 0, APART, 0)).unwrap();
    assert_ne!(other, APART);
    let mut odd = 0;
    call!(driver, cuMemAddressReserve(&mut odd, GRAIN, 0, APART + GRAIN as u64 + 65536, 0)).unwrap();
    assert_eq!(odd % GRAIN as u64, 0);
    for address in [hinted, other, odd] {
        call!(driver, cuMemAddressFree(address, GRAIN)).unwrap();
    }
    emulator.assert_empty();
}

#[test]
fn creation_has_rules() {
    let (emulator, driver) = start(Config::default().numa_nodes([0, 1]));
    let mut handle = 0;
    let mut refuse = |expected: CUresult, size: usize, prop, flags| {
        let result = call!(driver, cuMemCreate(&mut handle, size, &prop, flags));
        assert_eq!(result, Err(expected), "{prop:?}");
    };
    let good = prop(on_device(0), NONE);
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    refuse(invalid, 0, good, 0);
    refuse(invalid, GRAIN - 1, good, 0);
    refuse(invalid, GRAIN, good, 1);
    refuse(CUresult::CUDA_ERROR_INVALID_DEVICE, GRAIN, prop(on_device(2), NONE), 0);
    refuse(CUresult::CUDA_ERROR_INVALID_DEVICE, GRAIN, prop(on_device(-1), NONE), 0);
    refuse(invalid, GRAIN, prop(on_node(2), NONE), 0);
    refuse(invalid, GRAIN, prop(on_host(), FD), 0);
    let current = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, id: 0 };
    refuse(invalid, GRAIN, prop(current, NONE), 0);
    let mut managed = good;
    managed.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_MANAGED;
    refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED, GRAIN, managed, 0);
    let mut reserved = good;
    reserved.allocFlags.reserved[3] = 1;
    refuse(invalid, GRAIN, reserved, 0);
    let mut win32 = good;
    win32.requestedHandleTypes.0 = 2;
    refuse(invalid, GRAIN, win32, 0);
    assert_eq!(call!(driver, cuMemCreate(ptr::null_mut(), GRAIN, &good, 0)), INVALID_VALUE);
    assert_eq!(call!(driver, cuMemCreate(&mut handle, GRAIN, ptr::null(), 0)), INVALID_VALUE);
    emulator.assert_empty();

    // And what is right works, and tells what it is.
    for location in [on_device(1), on_node(1)] {
        let mut wish = prop(location, FD);
        wish.allocFlags.usage = 2;
        let mut handle = 0;
        call!(driver, cuMemCreate(&mut handle, GRAIN, &wish, 0)).unwrap();
        let mut got = prop(on_host(), NONE);
        call!(driver, cuMemGetAllocationPropertiesFromHandle(&mut got, handle)).unwrap();
        assert_eq!(got, wish);
        call!(driver, cuMemRelease(handle)).unwrap();
    }
    let host = create(&driver, on_host(), GRAIN, NONE).unwrap();
    call!(driver, cuMemRelease(host)).unwrap();
    assert_eq!(call!(driver, cuMemRelease(host)), INVALID_VALUE);
    emulator.assert_empty();
}

#[test]
fn what_a_device_cannot_do_follows_its_attributes() {
    use CUdevice_attribute as A;
    let config = Config::new(1).host_memory(false).each_device(|device| {
        device
            .attribute(A::CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED, 0)
            .attribute(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 0)
            .attribute(A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0)
    });
    let (emulator, driver) = start(config);
    let mut handle = 0;
    let mut rdma = prop(on_device(0), NONE);
    rdma.allocFlags.gpuDirectRDMACapable = 1;
    let refused = call!(driver, cuMemCreate(&mut handle, GRAIN, &rdma, 0));
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    assert_eq!(create(&driver, on_node(0), GRAIN, NONE), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    assert_eq!(create(&driver, on_host(), GRAIN, NONE), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    // Compression is a wish; the handle tells that it was not granted.
    let mut compressed = prop(on_device(0), NONE);
    compressed.allocFlags.compressionType = 1;
    call!(driver, cuMemCreate(&mut handle, GRAIN, &compressed, 0)).unwrap();
    let mut got = compressed;
    call!(driver, cuMemGetAllocationPropertiesFromHandle(&mut got, handle)).unwrap();
    assert_eq!(got.allocFlags.compressionType, 0);
    call!(driver, cuMemRelease(handle)).unwrap();
    emulator.assert_empty();
}

#[test]
fn handle_types_are_refused_as_drivers_refuse_them() {
    let both = {
        let mut types = FD;
        types.0 |= FABRIC.0;
        types
    };
    for (config, types, expected) in [
        // The H200 machine: the attribute says yes, creating says no.
        (Config::h200x2(), FABRIC, Some(CUresult::CUDA_ERROR_NOT_PERMITTED)),
        (Config::h200x2(), both, Some(CUresult::CUDA_ERROR_NOT_PERMITTED)),
        (Config::h200x2(), FD, None),
        (Config::new(1).fabric(Fabric::Unsupported), both, Some(CUresult::CUDA_ERROR_NOT_SUPPORTED)),
        (Config::new(1).fabric(Fabric::Working), both, None),
        (Config::new(1).posix_fd(false), FD, Some(CUresult::CUDA_ERROR_NOT_SUPPORTED)),
        // A driver from before FABRIC does not know the number.
        (Config::new(1).driver_version(12_020), FABRIC, Some(CUresult::CUDA_ERROR_INVALID_VALUE)),
    ] {
        let (emulator, driver) = start(config.clone());
        let made = create(&driver, on_device(0), GRAIN, types);
        match expected {
            Some(code) => assert_eq!(made, Err(code), "{config:?}"),
            None => call!(driver, cuMemRelease(made.unwrap())).unwrap(),
        }
        emulator.assert_empty();
    }
}

#[test]
fn the_attribute_claims_fabric_where_creating_refuses_it() {
    let (_emulator, driver) = start(Config::h200x2());
    let mut value = 0;
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
    call!(driver, cuDeviceGetAttribute(&mut value, attribute, 1)).unwrap();
    assert_eq!(value, 1);
    assert_eq!(create(&driver, on_device(1), GRAIN, FABRIC), Err(CUresult::CUDA_ERROR_NOT_PERMITTED));
}

#[test]
fn mapping_has_rules() {
    let (emulator, driver) = start(Config::default());
    let handle = create(&driver, on_device(0), 2 * GRAIN, NONE).unwrap();
    let base = reserve(&driver, 4 * GRAIN);
    let at = |grains: usize| base + (grains * GRAIN) as u64;
    let map = |address, size, offset, handle| call!(driver, cuMemMap(address, size, offset, handle, 0));
    assert_eq!(map(base, 0, 0, handle), INVALID_VALUE);
    assert_eq!(map(base, GRAIN / 2, 0, handle), INVALID_VALUE);
    assert_eq!(map(base + 4096, GRAIN, 0, handle), INVALID_VALUE);
    assert_eq!(map(base, GRAIN, GRAIN, handle), INVALID_VALUE);
    assert_eq!(map(base, 4 * GRAIN, 0, handle), INVALID_VALUE);
    assert_eq!(map(base, GRAIN, 0, handle + 1), INVALID_VALUE);
    assert_eq!(map(at(3), 2 * GRAIN, 0, handle), INVALID_VALUE);
    assert_eq!(map(at(4), GRAIN, 0, handle), INVALID_VALUE);
    assert_eq!(map(1 << 40, GRAIN, 0, handle), INVALID_VALUE);
    assert_eq!(call!(driver, cuMemMap(base, GRAIN, 0, handle, 1)), INVALID_VALUE);

    map(at(1), 2 * GRAIN, 0, handle).unwrap();
    assert_eq!(map(at(0), 2 * GRAIN, 0, handle), INVALID_VALUE);
    assert_eq!(map(at(2), GRAIN, 0, handle), INVALID_VALUE);
    // The same memory twice is allowed, and both see it.
    map(at(3), GRAIN, 0, handle).unwrap();
    set_access(&driver, at(1), 3 * GRAIN, on_device(0), READ_WRITE).unwrap();
    emulator.write(at(1) + 7, b"twice").unwrap();
    assert_eq!(emulator.read(at(3) + 7, 5).unwrap(), b"twice");

    // Unmapping takes whole mappings that lie back to back, and nothing else.
    for (address, size) in
        [(at(1), GRAIN), (at(2), GRAIN), (at(0), 2 * GRAIN), (at(1), 4 * GRAIN), (at(1), 0), (at(0), GRAIN)]
    {
        assert_eq!(call!(driver, cuMemUnmap(address, size)), INVALID_VALUE, "{address:#x} {size}");
    }
    assert_eq!(call!(driver, cuMemAddressFree(base, 4 * GRAIN)), INVALID_VALUE);

    // Released memory lives on while it is mapped, and its handle can be had back.
    call!(driver, cuMemRelease(handle)).unwrap();
    assert_eq!(map(at(0), GRAIN, 0, handle), INVALID_VALUE);
    assert_eq!(emulator.read(at(1) + 7, 5).unwrap(), b"twice");
    assert_eq!(emulator.ledger().device_bytes[0], 2 * GRAIN as u64);
    let mut back = 0;
    call!(driver, cuMemRetainAllocationHandle(&mut back, (at(1) + 99) as *mut _)).unwrap();
    assert_eq!(back, handle);
    map(at(0), GRAIN, 0, back).unwrap();
    assert_eq!(call!(driver, cuMemRetainAllocationHandle(&mut back, ptr::null_mut())), INVALID_VALUE);
    call!(driver, cuMemRelease(back)).unwrap();

    call!(driver, cuMemUnmap(at(0), 4 * GRAIN)).unwrap();
    assert!(matches!(emulator.read(at(1), 1), Err(EmulatorError::NotMapped { .. })));
    call!(driver, cuMemAddressFree(base, 4 * GRAIN)).unwrap();
    emulator.assert_empty();
}

#[test]
fn a_mapping_stays_within_one_reservation() {
    let (emulator, driver) = start(Config::default());
    // Two reservations back to back are still two.
    let first = APART + (1 << 32);
    let (mut a, mut b) = (0, 0);
    call!(driver, cuMemAddressReserve(&mut a, GRAIN, 0, first, 0)).unwrap();
    call!(driver, cuMemAddressReserve(&mut b, GRAIN, 0, first + GRAIN as u64, 0)).unwrap();
    assert_eq!((a, b), (first, first + GRAIN as u64));
    let handle = create(&driver, on_device(0), 2 * GRAIN, NONE).unwrap();
    assert_eq!(call!(driver, cuMemMap(a, 2 * GRAIN, 0, handle, 0)), INVALID_VALUE);
    call!(driver, cuMemAddressFree(a, GRAIN)).unwrap();
    call!(driver, cuMemAddressFree(b, GRAIN)).unwrap();
    call!(driver, cuMemRelease(handle)).unwrap();
    emulator.assert_empty();
}

#[test]
fn access_has_rules() {
    let (emulator, driver) = start(Config::new(3).no_peer_access(0, 2));
    let handle = create(&driver, on_device(0), GRAIN, NONE).unwrap();
    let base = reserve(&driver, 2 * GRAIN);
    let second = base + GRAIN as u64;
    assert_eq!(set_access(&driver, base, GRAIN, on_device(0), READ), INVALID_VALUE);
    call!(driver, cuMemMap(base, GRAIN, 0, handle, 0)).unwrap();
    // No access yet, for anybody.
    assert_eq!(access_of(&driver, on_device(0), base), Ok(0));
    assert!(matches!(emulator.read(base, 1), Err(EmulatorError::NoAccess { .. })));

    assert_eq!(set_access(&driver, base, GRAIN / 2, on_device(0), READ), INVALID_VALUE);
    assert_eq!(set_access(&driver, base, 2 * GRAIN, on_device(0), READ), INVALID_VALUE);
    assert_eq!(set_access(&driver, second, GRAIN, on_device(0), READ), INVALID_VALUE);
    assert_eq!(
        set_access(&driver, base, GRAIN, on_device(3), READ),
        Err(CUresult::CUDA_ERROR_INVALID_DEVICE)
    );
    assert_eq!(set_access(&driver, base, GRAIN, on_device(2), READ), Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    assert_eq!(set_access(&driver, base, GRAIN, on_host(), READ), INVALID_VALUE);
    let mut two = READ;
    two.0 = 2;
    assert_eq!(set_access(&driver, base, GRAIN, on_device(0), two), INVALID_VALUE);
    assert_eq!(call!(driver, cuMemSetAccess(base, GRAIN, ptr::null(), 1)), INVALID_VALUE);
    assert_eq!(call!(driver, cuMemSetAccess(base, GRAIN, ptr::null(), 0)), INVALID_VALUE);

    // A descriptor that fails leaves everything as it was, the good entries too.
    let descs = [
        CUmemAccessDesc_v1 { location: on_device(0), flags: READ_WRITE },
        CUmemAccessDesc_v1 { location: on_device(2), flags: READ_WRITE },
    ];
    let refused = call!(driver, cuMemSetAccess(base, GRAIN, descs.as_ptr(), 2));
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    assert_eq!(access_of(&driver, on_device(0), base), Ok(0));

    let descs = [
        CUmemAccessDesc_v1 { location: on_device(0), flags: READ },
        CUmemAccessDesc_v1 { location: on_device(1), flags: READ },
    ];
    call!(driver, cuMemSetAccess(base, GRAIN, descs.as_ptr(), 2)).unwrap();
    assert_eq!(access_of(&driver, on_device(1), base + 5), Ok(1));
    assert_eq!(access_of(&driver, on_device(2), base), Ok(0));
    assert_eq!(emulator.read(base, 2).unwrap(), [0, 0]);
    assert!(matches!(emulator.write(base, &[1]), Err(EmulatorError::NoAccess { .. })));
    set_access(&driver, base, GRAIN, on_device(1), READ_WRITE).unwrap();
    emulator.write(base, &[1]).unwrap();
    for device in [0, 1] {
        set_access(&driver, base, GRAIN, on_device(device), NO_ACCESS).unwrap();
    }
    assert!(matches!(emulator.read(base, 1), Err(EmulatorError::NoAccess { .. })));
    assert_eq!(access_of(&driver, on_device(0), second), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(access_of(&driver, on_device(9), base), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));

    call!(driver, cuMemUnmap(base, GRAIN)).unwrap();
    call!(driver, cuMemAddressFree(base, 2 * GRAIN)).unwrap();
    call!(driver, cuMemRelease(handle)).unwrap();
    emulator.assert_empty();
}

#[test]
fn a_coherent_machine_gives_the_host_access_to_device_memory() {
    let (emulator, driver) = start(Config::new(1).host_access_to_devices(true));
    let memory = Mapped::new(&driver, 0, GRAIN, NONE);
    set_access(&driver, memory.address, GRAIN, on_host(), READ).unwrap();
    assert_eq!(access_of(&driver, on_node(0), memory.address), Ok(1));
    memory.free(&driver);
    emulator.assert_empty();
}

#[test]
fn a_device_runs_out_of_memory_and_gets_it_back() {
    let (emulator, driver) = start(Config::new(2).each_device(|device| device.memory(3 * GRAIN as u64)));
    let first = create(&driver, on_device(0), 2 * GRAIN, NONE).unwrap();
    let full = Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    assert_eq!(create(&driver, on_device(0), 2 * GRAIN, NONE), full);
    let second = create(&driver, on_device(0), GRAIN, NONE).unwrap();
    assert_eq!(create(&driver, on_device(0), GRAIN, NONE), full);
    let elsewhere = create(&driver, on_device(1), GRAIN, NONE).unwrap();
    let host = create(&driver, on_node(0), 64 * GRAIN, NONE).unwrap();

    make_current(&driver, 0);
    let (mut free, mut total) = (1, 1);
    call!(driver, cuMemGetInfo(&mut free, &mut total)).unwrap();
    assert_eq!((free, total), (0, 3 * GRAIN));
    let mut plain = 0;
    assert_eq!(call!(driver, cuMemAlloc(&mut plain, 1)), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    call!(driver, cuMemRelease(first)).unwrap();
    call!(driver, cuMemGetInfo(&mut free, &mut total)).unwrap();
    assert_eq!(free, 2 * GRAIN);
    for handle in [second, elsewhere, host] {
        call!(driver, cuMemRelease(handle)).unwrap();
    }
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn granularity_is_the_configured_one() {
    let config = Config::new(1).granularity(64 << 10).recommended_granularity(1 << 20);
    let (emulator, driver) = start(config);
    let mut bytes = 0;
    for (option, expected) in [
        (CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM, 64 << 10),
        (CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, 1 << 20),
    ] {
        let good = prop(on_device(0), NONE);
        call!(driver, cuMemGetAllocationGranularity(&mut bytes, &good, option)).unwrap();
        assert_eq!(bytes, expected);
        let bad = prop(on_device(1), NONE);
        let refused = call!(driver, cuMemGetAllocationGranularity(&mut bytes, &bad, option));
        assert_eq!(refused, Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    }
    let memory = Mapped::new(&driver, 0, 3 * (64 << 10), NONE);
    memory.free(&driver);
    emulator.assert_empty();
}

#[test]
fn what_is_left_goes_with_the_last_driver() {
    let (emulator, driver) = start(Config::default());
    let mut address = 0;
    call!(driver, cuMemAddressReserve(&mut address, GRAIN, 0, APART + (2 << 32), 0)).unwrap();
    let handle = create(&driver, on_device(0), GRAIN, FD).unwrap();
    call!(driver, cuMemMap(address, GRAIN, 0, handle, 0)).unwrap();
    set_access(&driver, address, GRAIN, on_device(0), READ_WRITE).unwrap();
    emulator.write(address, &[1; 100]).unwrap();
    let clone = emulator.clone();
    drop(emulator);
    assert_eq!(clone.read(address, 1).unwrap(), [1]);
    drop(clone);
    // The driver alone keeps it all alive.
    assert_eq!(access_of(&driver, on_device(0), address), Ok(3));
    let is_mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| line.starts_with(&format!("{address:x}-")))
    };
    assert!(is_mapped());
    drop(driver);
    assert!(!is_mapped());
}

#[test]
fn leaks_are_shown() {
    let (emulator, driver) = start(Config::default());
    create(&driver, on_device(1), GRAIN, NONE).unwrap();
    let ledger = emulator.ledger();
    assert_eq!(ledger.handles.len(), 1);
    assert!(ledger.to_string().contains("device 1: 2097152 bytes in use"), "{ledger}");
    let panicked = std::panic::catch_unwind(|| emulator.assert_empty());
    assert!(panicked.is_err());
    assert_eq!(emulator.faults().calls(Function::cuMemCreate), 1);
}

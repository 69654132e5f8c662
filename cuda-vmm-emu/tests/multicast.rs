//! Multicast objects: their order and rules, in one process and across several, and multimem operations in software.

mod common;

use common::process::{Peer, borrowed, owned, role};
use common::*;
use cuda_vmm_emu::sys::{
    CUmemGenericAllocationHandle, CUmulticastGranularity_flags, CUmulticastObjectProp, CUresult, Driver,
    Function,
};
use cuda_vmm_emu::{Config, Device, EmulatorError, Incident};
use half::{bf16, f16};
use rustix::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::time::{Duration, Instant};

const NOT_READY: Result<(), CUresult> = Err(CUresult::CUDA_ERROR_NOT_READY);

fn prop_of(devices: u32, size: usize) -> CUmulticastObjectProp {
    CUmulticastObjectProp { numDevices: devices, size, handleTypes: FD.0.into(), flags: 0 }
}

fn create_object(
    driver: &Driver,
    devices: u32,
    size: usize,
) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = 0;
    call!(driver, cuMulticastCreate(&mut handle, &prop_of(devices, size))).map(|()| handle)
}

/// An object over devices 0 and 1, with memory of both bound and the object mapped for both.
struct Team {
    object: CUmemGenericAllocationHandle,
    address: u64,
    memory: [Mapped; 2],
}

impl Team {
    fn new(driver: &Driver, size: usize) -> Self {
        let object = create_object(driver, 2, size).unwrap();
        for device in [0, 1] {
            call!(driver, cuMulticastAddDevice(object, device)).unwrap();
        }
        let memory = [0, 1].map(|device| Mapped::new(driver, device, size, FD));
        for memory in &memory {
            call!(driver, cuMulticastBindMem(object, 0, memory.handle, 0, size, 0)).unwrap();
        }
        let address = reserve(driver, size);
        call!(driver, cuMemMap(address, size, 0, object, 0)).unwrap();
        for device in [0, 1] {
            set_access(driver, address, size, on_device(device), READ_WRITE).unwrap();
        }
        Self { object, address, memory }
    }

    fn free(self, driver: &Driver) {
        let size = self.memory[0].size;
        call!(driver, cuMemUnmap(self.address, size)).unwrap();
        call!(driver, cuMemAddressFree(self.address, size)).unwrap();
        for device in [0, 1] {
            call!(driver, cuMulticastUnbind(self.object, device, 0, size)).unwrap();
        }
        call!(driver, cuMemRelease(self.object)).unwrap();
        for memory in self.memory {
            memory.free(driver);
        }
    }
}

#[test]
fn stores_reach_every_device_and_sums_come_from_all() {
    let (emulator, driver) = start(Config::new(2));
    let team = Team::new(&driver, GRAIN);
    let at = team.address + 4096;
    let [zero, one] = [team.memory[0].address + 4096, team.memory[1].address + 4096];

    emulator.multimem_store(0, at, &[1.5_f32, -2.0]).unwrap();
    for replica in [zero, one] {
        let bytes = emulator.read(replica, 8).unwrap();
        assert_eq!(bytes, [1.5_f32.to_ne_bytes(), (-2.0_f32).to_ne_bytes()].concat());
    }
    emulator.write(one, &10.0_f32.to_ne_bytes()).unwrap();
    let mut sums = [0.0_f32; 2];
    emulator.multimem_ld_reduce_add(1, at, &mut sums).unwrap();
    assert_eq!(sums, [11.5, -4.0]);
    emulator.multimem_red_add(1, at, &[0.25_f32, 1.0]).unwrap();
    emulator.multimem_ld_reduce_add(0, at, &mut sums).unwrap();
    assert_eq!(sums, [12.0, -2.0]);
    assert_eq!(emulator.read(zero, 4).unwrap(), 1.75_f32.to_ne_bytes());

    // Half precision: summed in single precision, rounded once.
    emulator.multimem_store(0, at, &[bf16::from_f32(256.0)]).unwrap();
    emulator.write(one, &bf16::from_f32(1.0).to_ne_bytes()).unwrap();
    let mut sum = [bf16::ZERO];
    emulator.multimem_ld_reduce_add(0, at, &mut sum).unwrap();
    assert_eq!(sum[0], bf16::from_f32(257.0), "to even: 256");
    assert_eq!(sum[0].to_f32(), 256.0);
    emulator.multimem_store(0, at, &[f16::from_f32(0.5), f16::from_f32(4.0)]).unwrap();
    let mut halves = [f16::ZERO; 2];
    emulator.multimem_ld_reduce_add(0, at, &mut halves).unwrap();
    assert_eq!(halves, [f16::from_f32(1.0), f16::from_f32(8.0)]);
    // Words wrap.
    emulator.multimem_store(0, at, &[u32::MAX]).unwrap();
    emulator.multimem_red_add(0, at, &[3_u32]).unwrap();
    let mut words = [0_u32];
    emulator.multimem_ld_reduce_add(0, at, &mut words).unwrap();
    assert_eq!(words, [4]);
    emulator.multimem_store(0, at, &[u64::MAX - 1]).unwrap();
    emulator.multimem_store(0, at + 8, &[-7_i32]).unwrap();
    let mut negative = [0_i32];
    emulator.multimem_ld_reduce_add(0, at + 8, &mut negative).unwrap();
    assert_eq!(negative, [-14]);

    let ledger = emulator.ledger();
    assert_eq!(ledger.bindings.len(), 2);
    assert!(ledger.to_string().contains("multicast object"), "{ledger}");
    team.free(&driver);
    emulator.assert_empty();
}

#[test]
fn multicast_addresses_take_nothing_but_multicast_operations() {
    let (emulator, driver) = start(Config::new(3));
    make_current(&driver, 0);
    let team = Team::new(&driver, GRAIN);
    let at = team.address;
    assert!(matches!(emulator.read(at, 1), Err(EmulatorError::NoAccess { .. })));
    assert!(matches!(emulator.write(at, &[1]), Err(EmulatorError::NoAccess { .. })));
    assert_eq!(call!(driver, cuMemsetD8Async(at, 1, 1, ptr::null_mut())), INVALID_VALUE);
    assert_eq!(
        call!(driver, cuMemcpyDtoDAsync(at, team.memory[0].address, 8, ptr::null_mut())),
        INVALID_VALUE
    );
    assert_eq!(access_of(&driver, on_device(1), at), Ok(3));
    assert_eq!(set_access(&driver, at, GRAIN, on_host(), READ), INVALID_VALUE);
    // Device 2 is not of the team.
    let stranger = set_access(&driver, at, GRAIN, on_device(2), READ);
    assert_eq!(stranger, Err(CUresult::CUDA_ERROR_INVALID_DEVICE));

    let store = |device, address, values: &[u32]| emulator.multimem_store(device, address, values);
    assert!(matches!(store(2, at, &[1]), Err(EmulatorError::NoAccess { .. })));
    assert!(matches!(store(0, at + 2, &[1]), Err(EmulatorError::Misaligned { .. })));
    assert!(matches!(store(0, at + GRAIN as u64 - 4, &[1, 2]), Err(EmulatorError::NotMapped { .. })));
    assert!(matches!(store(0, team.memory[0].address, &[1]), Err(EmulatorError::NotMulticast { .. })));
    assert!(matches!(store(0, 4, &[1]), Err(EmulatorError::NotMulticast { .. })));
    store(0, at, &[]).unwrap();
    set_access(&driver, at, GRAIN, on_device(1), READ).unwrap();
    assert!(matches!(store(1, at, &[1]), Err(EmulatorError::NoAccess { .. })));
    let mut sums = [9_u32];
    emulator.multimem_ld_reduce_add(1, at, &mut sums).unwrap();
    assert_eq!(sums, [0]);

    // The handle of the object can be had back, and says that it is no memory.
    let mut back = 0;
    call!(driver, cuMemRetainAllocationHandle(&mut back, at as *mut _)).unwrap();
    assert_eq!(back, team.object);
    let mut got = prop(on_device(0), NONE);
    assert_eq!(call!(driver, cuMemGetAllocationPropertiesFromHandle(&mut got, back)), INVALID_VALUE);
    call!(driver, cuMemRelease(back)).unwrap();
    team.free(&driver);
    leave(&driver, 0);
    emulator.assert_empty();
}

#[test]
fn every_wrong_order_is_refused() {
    let config = Config::new(3).multicast_deadline(Duration::from_millis(30));
    let (emulator, driver) = start(config.granularity(64 << 10).multicast_granularity(GRAIN, 2 * GRAIN));
    let mut bytes = 0;
    for (option, expected) in [
        (CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_MINIMUM, GRAIN),
        (CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_RECOMMENDED, 2 * GRAIN),
    ] {
        call!(driver, cuMulticastGetGranularity(&mut bytes, &prop_of(2, GRAIN), option)).unwrap();
        assert_eq!(bytes, expected);
    }
    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(create_object(&driver, 0, GRAIN), invalid);
    assert_eq!(create_object(&driver, 65, GRAIN), invalid);
    assert_eq!(create_object(&driver, 2, 0), invalid);
    assert_eq!(create_object(&driver, 2, GRAIN / 2), invalid);

    let object = create_object(&driver, 2, 2 * GRAIN).unwrap();
    let add = |device| call!(driver, cuMulticastAddDevice(object, device));
    let memory = [0, 1, 2].map(|device| Mapped::new(&driver, device, 2 * GRAIN, FD));
    let bind = |offset, memory: &Mapped, memory_offset, size| {
        call!(driver, cuMulticastBindMem(object, offset, memory.handle, memory_offset, size, 0))
    };
    let address = reserve(&driver, 2 * GRAIN);
    let map = |size| call!(driver, cuMemMap(address, size, 0, object, 0));

    // Before all devices are there: an observable wait, then an error.
    add(0).unwrap();
    assert_eq!(add(0), INVALID_VALUE);
    assert_eq!(add(3), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    let start = Instant::now();
    assert_eq!(bind(0, &memory[0], 0, GRAIN), NOT_READY);
    assert_eq!(map(GRAIN), NOT_READY);
    assert!(start.elapsed() >= Duration::from_millis(60));
    let incidents = emulator.ledger().incidents;
    let would_block = |function| Incident::WouldBlock { function, added: 1, devices: 2 };
    assert_eq!(incidents, [would_block(Function::cuMulticastBindMem), would_block(Function::cuMemMap)]);
    assert!(incidents[0].to_string().contains("waited forever"));
    add(1).unwrap();
    assert_eq!(add(2), INVALID_VALUE);

    // Binding: aligned, inside both, of the team, and not over another binding of the device.
    let small = 64 << 10;
    for (offset, memory_offset, size) in [
        (small, 0, GRAIN),
        (0, small, GRAIN),
        (0, 0, small),
        (0, 0, 0),
        (GRAIN, 0, 2 * GRAIN),
        (0, GRAIN, 2 * GRAIN),
        (usize::MAX - GRAIN + 1, 0, GRAIN),
    ] {
        assert_eq!(bind(offset, &memory[0], memory_offset, size), INVALID_VALUE, "{offset} {memory_offset}");
    }
    assert_eq!(bind(0, &memory[2], 0, GRAIN), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    let host = create(&driver, on_node(0), GRAIN, NONE).unwrap();
    assert_eq!(call!(driver, cuMulticastBindMem(object, 0, host, 0, GRAIN, 0)), INVALID_VALUE);
    assert_eq!(call!(driver, cuMulticastBindMem(object, 0, object, 0, GRAIN, 0)), INVALID_VALUE);
    assert_eq!(call!(driver, cuMulticastBindMem(host, 0, host, 0, GRAIN, 0)), INVALID_VALUE);
    assert_eq!(call!(driver, cuMulticastBindMem(object, 0, memory[0].handle, 0, GRAIN, 1)), INVALID_VALUE);
    call!(driver, cuMemRelease(host)).unwrap();

    bind(0, &memory[0], GRAIN, GRAIN).unwrap();
    assert_eq!(bind(0, &memory[0], 0, GRAIN), INVALID_VALUE);
    assert_eq!(bind(0, &memory[0], 0, 2 * GRAIN), INVALID_VALUE);
    let at = memory[1].address;
    let bind_address = |address, size| call!(driver, cuMulticastBindAddr(object, 0, address, size, 0));
    assert_eq!(bind_address(at + small as u64, GRAIN), INVALID_VALUE);
    assert_eq!(bind_address(at + GRAIN as u64, 2 * GRAIN), INVALID_VALUE);
    assert_eq!(bind_address(1 << 40, GRAIN), INVALID_VALUE);
    let named = |device| call!(driver, cuMulticastBindAddr_v2(object, device, 0, at, 2 * GRAIN, 0));
    assert_eq!(named(0), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    named(1).unwrap();
    let by_name = call!(driver, cuMulticastBindMem_v2(object, 0, GRAIN, memory[0].handle, 0, GRAIN, 0));
    assert_eq!(by_name, Ok(()));

    // Both halves of device 0 are swapped in its memory.
    assert_eq!(map(small), INVALID_VALUE);
    map(2 * GRAIN).unwrap();
    set_access(&driver, address, 2 * GRAIN, on_device(0), READ_WRITE).unwrap();
    emulator.multimem_store(0, address + GRAIN as u64 - 4, &[1_u32, 2]).unwrap();
    let word = |memory: &Mapped, offset: usize| emulator.read(memory.address + offset as u64, 4).unwrap()[0];
    assert_eq!((word(&memory[1], GRAIN - 4), word(&memory[1], GRAIN)), (1, 2));
    assert_eq!((word(&memory[0], 2 * GRAIN - 4), word(&memory[0], 0)), (1, 2));

    // Unbinding takes exactly what was bound; without a binding, a store has nowhere to go.
    let unbind = |device, offset, size| call!(driver, cuMulticastUnbind(object, device, offset, size));
    assert_eq!(unbind(1, 0, GRAIN), INVALID_VALUE);
    assert_eq!(unbind(0, 0, 2 * GRAIN), INVALID_VALUE);
    assert_eq!(unbind(2, 0, GRAIN), INVALID_VALUE);
    unbind(0, 0, GRAIN).unwrap();
    assert_eq!(unbind(0, 0, GRAIN), INVALID_VALUE);
    let nowhere = emulator.multimem_store(0, address, &[1_u32]).unwrap_err();
    assert_eq!(nowhere, EmulatorError::NotBound { offset: 0, end: 4, bound: 1, devices: 2 });
    emulator.multimem_store(0, address + GRAIN as u64, &[1_u32]).unwrap();

    // Bound memory stays while it is bound, and the object's end ends its bindings.
    for memory in memory {
        memory.free(&driver);
    }
    assert_eq!(emulator.ledger().device_bytes, [2 * GRAIN as u64, 2 * GRAIN as u64, 0]);
    emulator.multimem_store(0, address + GRAIN as u64, &[1_u32]).unwrap();
    call!(driver, cuMemRelease(object)).unwrap();
    assert_eq!(emulator.ledger().bindings.len(), 2, "the mapping keeps the object");
    call!(driver, cuMemUnmap(address, 2 * GRAIN)).unwrap();
    call!(driver, cuMemAddressFree(address, 2 * GRAIN)).unwrap();
    let ledger = emulator.ledger();
    assert!(ledger.is_empty(), "{ledger}");
}

#[test]
fn a_bind_waits_for_a_device_that_comes_in_time() {
    let (emulator, driver) = start(Config::new(2).multicast_deadline(Duration::from_secs(20)));
    let object = create_object(&driver, 2, GRAIN).unwrap();
    call!(driver, cuMulticastAddDevice(object, 0)).unwrap();
    let memory = Mapped::new(&driver, 0, GRAIN, FD);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            call!(driver, cuMulticastAddDevice(object, 1)).unwrap();
        });
        call!(driver, cuMulticastBindMem(object, 0, memory.handle, 0, GRAIN, 0)).unwrap();
    });
    call!(driver, cuMemRelease(object)).unwrap();
    memory.free(&driver);
    emulator.assert_empty();
}

#[test]
fn objects_run_out_and_machines_without_multicast_have_none() {
    let (emulator, driver) = start(Config::new(2).multicast_slots(2));
    let (one, two) = (create_object(&driver, 2, GRAIN).unwrap(), create_object(&driver, 2, GRAIN).unwrap());
    assert_eq!(create_object(&driver, 2, GRAIN), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    call!(driver, cuMemRelease(one)).unwrap();
    let three = create_object(&driver, 2, GRAIN).unwrap();
    for object in [two, three] {
        call!(driver, cuMemRelease(object)).unwrap();
    }
    emulator.assert_empty();

    let not_supported = CUresult::CUDA_ERROR_NOT_SUPPORTED;
    let (_without, driver) = start(Config::new(2).multicast(false));
    assert_eq!(create_object(&driver, 2, GRAIN), Err(not_supported));
    let (_claimed, driver) = start(Config::h200x2());
    let mut fabric = prop_of(2, GRAIN);
    fabric.handleTypes = FABRIC.0.into();
    let mut handle = 0;
    let refused = call!(driver, cuMulticastCreate(&mut handle, &fabric));
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_NOT_PERMITTED));
    let (_old, driver) = start(Config::new(2).driver_version(12_000));
    assert!(!driver.has(Function::cuMulticastCreate));
}

fn export(driver: &Driver, handle: u64) -> OwnedFd {
    let mut fd = -1;
    call!(driver, cuMemExportToShareableHandle((&raw mut fd).cast(), handle, FD, 0)).unwrap();
    owned(fd)
}

fn import(driver: &Driver, fd: &OwnedFd) -> u64 {
    let mut handle = 0;
    let number = fd.as_raw_fd() as usize as *mut _;
    call!(driver, cuMemImportFromShareableHandle(&mut handle, number, FD)).unwrap();
    handle
}

/// Emulators that each have one device of a machine, as processes with `CUDA_VISIBLE_DEVICES` do.
fn one_device(rank: u8) -> Config {
    Config::new(1).device(0, |device: Device| device.uuid([rank + 1; 16]))
}

/// One rank's part of a team: its device added, its memory bound, the object mapped.
fn join(driver: &Driver, object: u64) -> (Mapped, Mapped) {
    let memory = Mapped::new(driver, 0, GRAIN, FD);
    call!(driver, cuMulticastBindMem(object, 0, memory.handle, 0, GRAIN, 0)).unwrap();
    (memory, Mapped::of(driver, object, 0, GRAIN))
}

#[test]
fn a_team_of_processes_shares_an_object_and_a_dead_member_is_noticed() {
    const NAME: &str = "a_team_of_processes_shares_an_object_and_a_dead_member_is_noticed";
    const RANKS: u8 = 3;
    if let Some((role, channel)) = role() {
        let rank: u8 = role.parse().unwrap();
        let (emulator, driver) = start(one_device(rank));
        let (_, fds) = channel.receive();
        let object = import(&driver, &fds[0]);
        drop(fds);
        call!(driver, cuMulticastAddDevice(object, 0)).unwrap();
        let (memory, view) = join(&driver, object);
        channel.send(b"joined", &[]);
        channel.expect("add");
        for _ in 0..50 {
            emulator.multimem_red_add(0, view.address + 8, &[1_u32]).unwrap();
        }
        channel.send(b"added", &[]);
        channel.expect("go");
        assert_eq!(emulator.read(memory.address, 4).unwrap(), 42_u32.to_ne_bytes());
        view.free(&driver);
        memory.free(&driver);
        emulator.assert_empty();
        return;
    }
    let (emulator, driver) = start(one_device(0));
    let object = create_object(&driver, RANKS.into(), GRAIN).unwrap();
    call!(driver, cuMulticastAddDevice(object, 0)).unwrap();
    let peers: Vec<_> = (1..RANKS)
        .map(|rank| {
            let peer = Peer::start(NAME, &rank.to_string());
            peer.channel.send(b"object", &borrowed(&[export(&driver, object)]));
            peer
        })
        .collect();
    let (memory, view) = join(&driver, object);
    for peer in &peers {
        peer.channel.expect("joined");
    }
    emulator.multimem_store(0, view.address, &[42_u32]).unwrap();
    // All at once: every addition of every process reaches every replica.
    for peer in &peers {
        peer.channel.send(b"add", &[]);
    }
    for _ in 0..50 {
        emulator.multimem_red_add(0, view.address + 8, &[1_u32]).unwrap();
    }
    for peer in &peers {
        peer.channel.expect("added");
    }
    let total = 50 * u32::from(RANKS);
    assert_eq!(emulator.read(memory.address + 8, 4).unwrap(), total.to_ne_bytes());
    let mut sum = [0_u32];
    emulator.multimem_ld_reduce_add(0, view.address + 8, &mut sum).unwrap();
    assert_eq!(sum, [total * u32::from(RANKS)]);

    // One leaves in order, one is killed: its memory is missing from then on, and nothing hangs.
    let mut peers = peers.into_iter();
    peers.next().unwrap().kill();
    let missing = emulator.multimem_store(0, view.address, &[1_u32]).unwrap_err();
    assert_eq!(missing, EmulatorError::NotBound { offset: 0, end: 4, bound: 2, devices: 3 });
    let peer = peers.next().unwrap();
    peer.channel.send(b"go", &[]);
    peer.finish();
    let missing = emulator.multimem_store(0, view.address, &[1_u32]).unwrap_err();
    assert_eq!(missing, EmulatorError::NotBound { offset: 0, end: 4, bound: 1, devices: 3 });
    view.free(&driver);
    memory.free(&driver);
    emulator.assert_empty();
}

#[test]
fn what_is_no_object_is_not_imported_as_one() {
    let (emulator, driver) = start(Config::new(1));
    let object = create_object(&driver, 1, GRAIN).unwrap();
    let fd = export(&driver, object);
    let imported = import(&driver, &fd);
    // The same object: a device is added once, whoever does it.
    call!(driver, cuMulticastAddDevice(imported, 0)).unwrap();
    assert_eq!(call!(driver, cuMulticastAddDevice(object, 0)), INVALID_VALUE);
    // Memory is not an object, and an object is not memory.
    let memory = create(&driver, on_device(0), GRAIN, FD).unwrap();
    assert_eq!(call!(driver, cuMulticastAddDevice(memory, 0)), INVALID_VALUE);
    assert_eq!(call!(driver, cuMulticastUnbind(memory, 0, 0, GRAIN)), INVALID_VALUE);
    // A table that was tampered with is refused.
    rustix::io::pwrite(&fd, &[0xff; 8], 24).unwrap();
    let mut handle = 0;
    let number = fd.as_raw_fd() as usize as *mut _;
    assert_eq!(call!(driver, cuMemImportFromShareableHandle(&mut handle, number, FD)), INVALID_VALUE);
    for handle in [object, imported, memory] {
        call!(driver, cuMemRelease(handle)).unwrap();
    }
    emulator.assert_empty();
}

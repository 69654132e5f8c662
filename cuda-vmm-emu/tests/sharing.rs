//! Memory across emulators and across processes: descriptors and FABRIC handles, what is refused, and what survives whom.

mod common;

use common::process::{Peer, borrowed, owned, role};
use common::*;
use cuda_vmm_emu::sys::{
    CUipcMemHandle_v1, CUmemAllocationHandleType, CUmemFabricHandle, CUmemGenericAllocationHandle,
    CUmemRangeHandleType, CUresult, Driver,
};
use cuda_vmm_emu::{Config, Fabric, Location};
use rustix::fd::{AsRawFd, OwnedFd};
use std::ptr;

fn export(driver: &Driver, handle: CUmemGenericAllocationHandle) -> OwnedFd {
    let mut fd = -1;
    call!(driver, cuMemExportToShareableHandle((&raw mut fd).cast(), handle, FD, 0)).unwrap();
    owned(fd)
}

fn import(driver: &Driver, fd: i32) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = 0;
    call!(driver, cuMemImportFromShareableHandle(&mut handle, fd as usize as *mut _, FD)).map(|()| handle)
}

fn import_fabric(
    driver: &Driver,
    shared: &CUmemFabricHandle,
) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = 0;
    let shared = ptr::from_ref(shared).cast_mut().cast();
    call!(driver, cuMemImportFromShareableHandle(&mut handle, shared, FABRIC)).map(|()| handle)
}

#[test]
fn two_emulators_share_memory_by_descriptor() {
    let (exporter, ours) = start(Config::new(2));
    // The importer counts its devices the other way round.
    let (zero, one) = ([7; 16], [8; 16]);
    drop((exporter, ours));
    let (exporter, ours) = start(Config::new(2).device(0, |d| d.uuid(zero)).device(1, |d| d.uuid(one)));
    let (importer, theirs) = start(Config::new(2).device(0, |d| d.uuid(one)).device(1, |d| d.uuid(zero)));
    let mine = Mapped::new(&ours, 0, GRAIN, FD);
    let fd = export(&ours, mine.handle);
    // The same descriptor twice gives two handles of the same memory.
    let first = import(&theirs, fd.as_raw_fd()).unwrap();
    let second = import(&theirs, fd.as_raw_fd()).unwrap();
    assert_ne!(first, second);
    drop(fd);
    let mut got = prop(on_host(), NONE);
    call!(theirs, cuMemGetAllocationPropertiesFromHandle(&mut got, first)).unwrap();
    assert_eq!(got, prop(on_device(1), NONE), "found by the device's UUID, and without a handle type");
    let ledger = importer.ledger();
    assert!(ledger.handles.iter().all(|h| h.imported && h.location == Some(Location::Device(1))));
    assert_eq!(ledger.device_bytes, [0, 0], "the exporter's device pays");

    let view = Mapped::of(&theirs, first, 0, GRAIN);
    importer.write(view.address + 5, b"theirs").unwrap();
    assert_eq!(exporter.read(mine.address + 5, 6).unwrap(), b"theirs");
    // A machine that lacks the device cannot take its memory.
    let (_third, driver) = start(Config::new(1).device(0, |d| d.uuid([9; 16])));
    let fd = export(&ours, mine.handle);
    assert_eq!(import(&driver, fd.as_raw_fd()), Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    drop(fd);
    // The exporter goes; the importer's memory stays.
    mine.free(&ours);
    exporter.assert_empty();
    drop((exporter, ours));
    assert_eq!(importer.read(view.address + 5, 6).unwrap(), b"theirs");
    view.free(&theirs);
    call!(theirs, cuMemRelease(second)).unwrap();
    importer.assert_empty();
}

#[test]
fn imported_memory_is_exported_by_its_creator_alone() {
    let (exporter, ours) = start(Config::new(1).fabric(Fabric::Working));
    let (importer, theirs) = start(Config::new(1).fabric(Fabric::Working));
    let mut both = FD;
    both.0 |= FABRIC.0;
    for place in [on_device(0), on_node(0)] {
        let mine = create(&ours, place, GRAIN, both).unwrap();
        let imported = import(&theirs, export(&ours, mine).as_raw_fd()).unwrap();
        let mut got = prop(place, both);
        call!(theirs, cuMemGetAllocationPropertiesFromHandle(&mut got, imported)).unwrap();
        assert_eq!(got, prop(place, NONE));
        let view = Mapped::of(&theirs, imported, 0, GRAIN);
        // A reference by address is one to the same handle.
        let mut retained = 0;
        call!(theirs, cuMemRetainAllocationHandle(&mut retained, view.address as *mut _)).unwrap();
        for handle in [imported, retained] {
            let mut fd = -1;
            let mut shared = CUmemFabricHandle::default();
            let out = (&raw mut fd).cast();
            assert_eq!(call!(theirs, cuMemExportToShareableHandle(out, handle, FD, 0)), INVALID_VALUE);
            let out = (&raw mut shared).cast();
            assert_eq!(call!(theirs, cuMemExportToShareableHandle(out, handle, FABRIC, 0)), INVALID_VALUE);
            assert_eq!((fd, shared), (-1, CUmemFabricHandle::default()), "nothing is written");
        }
        call!(theirs, cuMemRelease(retained)).unwrap();
        view.free(&theirs);
        // Its creator still can.
        drop(export(&ours, mine));
        call!(ours, cuMemRelease(mine)).unwrap();
    }
    importer.assert_empty();
    exporter.assert_empty();
}

#[test]
fn exports_and_imports_have_rules() {
    let (emulator, driver) = start(Config::new(1).fabric(Fabric::Working));
    let plain = create(&driver, on_device(0), GRAIN, NONE).unwrap();
    let shared = create(&driver, on_device(0), GRAIN, FD).unwrap();
    let mut fd = -1;
    let mut export = |handle, kind, flags| {
        call!(driver, cuMemExportToShareableHandle((&raw mut fd).cast(), handle, kind, flags))
    };
    assert_eq!(export(plain, FD, 0), INVALID_VALUE);
    assert_eq!(export(shared, FABRIC, 0), INVALID_VALUE);
    assert_eq!(export(shared, NONE, 0), INVALID_VALUE);
    let mut both = FD;
    both.0 |= FABRIC.0;
    assert_eq!(export(shared, both, 0), INVALID_VALUE);
    assert_eq!(export(shared, FD, 1), INVALID_VALUE);
    assert_eq!(export(shared + 1, FD, 0), INVALID_VALUE);
    assert_eq!(call!(driver, cuMemExportToShareableHandle(ptr::null_mut(), shared, FD, 0)), INVALID_VALUE);

    let invalid = Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(import(&driver, -1), invalid);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert_eq!(import(&driver, file.as_raw_fd()), invalid);
    drop(file);
    let (pipe, _other) = std::io::pipe().unwrap();
    assert_eq!(import(&driver, pipe.as_raw_fd()), invalid);
    // Closed: a number that surely is not open.
    assert_eq!(import(&driver, 1_000_000), invalid);
    let mut handle = 0;
    let win32 = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_WIN32;
    let refused = call!(driver, cuMemImportFromShareableHandle(&mut handle, ptr::null_mut(), win32));
    assert_eq!(refused, INVALID_VALUE);
    assert_eq!(import_fabric(&driver, &CUmemFabricHandle::default()), invalid);
    assert_eq!(
        call!(driver, cuMemImportFromShareableHandle(&mut handle, ptr::null_mut(), FABRIC)),
        INVALID_VALUE
    );
    for handle in [plain, shared] {
        call!(driver, cuMemRelease(handle)).unwrap();
    }
    emulator.assert_empty();
}

#[test]
fn a_fabric_handle_pins_nothing() {
    let (exporter, ours) = start(Config::new(1).fabric(Fabric::Working));
    let (importer, theirs) = start(Config::new(1).fabric(Fabric::Working));
    let memory = Mapped::new(&ours, 0, GRAIN, FABRIC);
    exporter.write(memory.address, b"fabric").unwrap();
    let mut shared = CUmemFabricHandle::default();
    call!(ours, cuMemExportToShareableHandle((&raw mut shared).cast(), memory.handle, FABRIC, 0)).unwrap();

    // Without an IMEX channel, or without support, there is no way in.
    for (fabric, expected) in [
        (Fabric::NoImexChannel, CUresult::CUDA_ERROR_NOT_PERMITTED),
        (Fabric::Unsupported, CUresult::CUDA_ERROR_NOT_SUPPORTED),
    ] {
        let (_emulator, driver) = start(Config::new(1).fabric(fabric));
        assert_eq!(import_fabric(&driver, &shared), Err(expected));
    }
    let mut bent = shared;
    bent.data[20] ^= 1;
    assert_eq!(import_fabric(&theirs, &bent), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    let handle = import_fabric(&theirs, &shared).unwrap();
    memory.free(&ours);
    assert_eq!(import_fabric(&theirs, &shared), Err(CUresult::CUDA_ERROR_INVALID_HANDLE));
    // Who imported it in time has it.
    let view = Mapped::of(&theirs, handle, 0, GRAIN);
    assert_eq!(importer.read(view.address, 6).unwrap(), b"fabric");
    view.free(&theirs);
    exporter.assert_empty();
    importer.assert_empty();
}

#[test]
fn a_dma_buf_is_given_where_it_is_supported() {
    let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    let get = |driver: &Driver, address, size, fd: &mut i32| {
        let out = ptr::from_mut(fd).cast();
        call!(driver, cuMemGetHandleForAddressRange(out, address, size, kind, 0))
    };
    let (plain, driver) = start(Config::new(1));
    let memory = Mapped::new(&driver, 0, GRAIN, NONE);
    let mut fd = -1;
    let refused = get(&driver, memory.address, GRAIN, &mut fd);
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_NOT_SUPPORTED));
    memory.free(&driver);
    plain.assert_empty();

    let (emulator, driver) = start(Config::h200x2());
    let memory = Mapped::new(&driver, 0, GRAIN, NONE);
    assert_eq!(get(&driver, memory.address + 8, GRAIN, &mut fd), INVALID_VALUE);
    assert_eq!(get(&driver, memory.address, 2 * GRAIN, &mut fd), INVALID_VALUE);
    assert_eq!(get(&driver, memory.address, 0, &mut fd), INVALID_VALUE);
    get(&driver, memory.address, GRAIN, &mut fd).unwrap();
    let fd = owned(fd);
    emulator.write(memory.address + 3, b"dma").unwrap();
    let mut bytes = [0; 3];
    rustix::io::pread(&fd, &mut bytes, 3).unwrap();
    assert_eq!(&bytes, b"dma");
    memory.free(&driver);
    emulator.assert_empty();
}

/// Device and host memory of another process, mapped back to back.
fn map_both(driver: &Driver, fds: &[OwnedFd]) -> (u64, Vec<u64>) {
    let handles: Vec<_> = fds.iter().map(|fd| import(driver, fd.as_raw_fd()).unwrap()).collect();
    let base = reserve(driver, handles.len() * GRAIN);
    for (index, &handle) in handles.iter().enumerate() {
        let at = base + (index * GRAIN) as u64;
        call!(driver, cuMemMap(at, GRAIN, 0, handle, 0)).unwrap();
    }
    set_access(driver, base, handles.len() * GRAIN, on_device(1), READ_WRITE).unwrap();
    (base, handles)
}

fn unmap_both(driver: &Driver, base: u64, handles: &[u64]) {
    call!(driver, cuMemUnmap(base, handles.len() * GRAIN)).unwrap();
    call!(driver, cuMemAddressFree(base, handles.len() * GRAIN)).unwrap();
    for &handle in handles {
        call!(driver, cuMemRelease(handle)).unwrap();
    }
}

#[test]
fn two_processes_share_device_and_host_memory_and_either_may_die() {
    const NAME: &str = "two_processes_share_device_and_host_memory_and_either_may_die";
    if let Some((role, channel)) = role() {
        let (emulator, driver) = start(Config::h200x2());
        if role == "importer" || role == "doomed importer" {
            let (bytes, fds) = channel.receive();
            assert_eq!(bytes, b"memory");
            let (base, handles) = map_both(&driver, &fds);
            assert_eq!(emulator.read(base, 5).unwrap(), b"hello");
            emulator.write(base + GRAIN as u64 - 3, b"across").unwrap();
            channel.send(b"written", &[]);
            channel.expect("go");
            unmap_both(&driver, base, &handles);
            emulator.assert_empty();
        } else {
            assert_eq!(role, "doomed exporter");
            let memory = Mapped::new(&driver, 0, GRAIN, FD);
            emulator.write(memory.address, b"legacy").unwrap();
            channel.send(b"memory", &borrowed(&[export(&driver, memory.handle)]));
            channel.expect("never");
        }
        return;
    }
    let (emulator, driver) = start(Config::h200x2());
    for doomed in [false, true] {
        let device = create(&driver, on_device(0), GRAIN, FD).unwrap();
        let host = create(&driver, on_node(0), GRAIN, FD).unwrap();
        let fds = [export(&driver, device), export(&driver, host)];
        let (base, handles) = map_both(&driver, &fds);
        for handle in [device, host] {
            call!(driver, cuMemRelease(handle)).unwrap();
        }
        emulator.write(base, b"hello").unwrap();
        let peer = Peer::start(NAME, if doomed { "doomed importer" } else { "importer" });
        peer.channel.send(b"memory", &borrowed(&fds));
        peer.channel.expect("written");
        if doomed {
            peer.kill();
        } else {
            peer.channel.send(b"go", &[]);
            peer.finish();
        }
        assert_eq!(emulator.read(base + GRAIN as u64 - 3, 6).unwrap(), b"across");
        unmap_both(&driver, base, &handles);
        emulator.assert_empty();
    }

    // The exporter is killed: what was imported lives on, and is cleaned up as ever.
    let peer = Peer::start(NAME, "doomed exporter");
    let (_, fds) = peer.channel.receive();
    let handle = import(&driver, fds[0].as_raw_fd()).unwrap();
    peer.kill();
    let late = import(&driver, fds[0].as_raw_fd()).unwrap();
    call!(driver, cuMemRelease(late)).unwrap();
    let view = Mapped::of(&driver, handle, 1, GRAIN);
    assert_eq!(emulator.read(view.address, 6).unwrap(), b"legacy");
    emulator.write(view.address, b"mine now").unwrap();
    view.free(&driver);
    emulator.assert_empty();
}

#[test]
fn handles_of_64_bytes_reach_another_process_while_it_lives() {
    const NAME: &str = "handles_of_64_bytes_reach_another_process_while_it_lives";
    let config = || Config::new(2).fabric(Fabric::Working);
    if let Some((_, channel)) = role() {
        let (emulator, driver) = start(config());
        make_current(&driver, 0);
        let memory = Mapped::new(&driver, 0, GRAIN, FABRIC);
        emulator.write(memory.address, b"fabric").unwrap();
        let mut plain = 0;
        call!(driver, cuMemAlloc(&mut plain, 100)).unwrap();
        emulator.write(plain, b"plain").unwrap();
        let mut shared = CUmemFabricHandle::default();
        let out = (&raw mut shared).cast();
        call!(driver, cuMemExportToShareableHandle(out, memory.handle, FABRIC, 0)).unwrap();
        let mut ipc = CUipcMemHandle_v1::default();
        call!(driver, cuIpcGetMemHandle(&mut ipc, plain)).unwrap();
        channel.send(&[shared.data, ipc.reserved.map(|byte| byte as u8)].concat(), &[]);
        channel.expect("written");
        assert_eq!(emulator.read(memory.address, 6).unwrap(), b"FABRIC");
        assert_eq!(emulator.read(plain, 5).unwrap(), b"PLAIN");
        channel.send(b"seen", &[]);
        channel.expect("never");
        return;
    }
    let (emulator, driver) = start(config());
    make_current(&driver, 1);
    let peer = Peer::start(NAME, "exporter");
    let (bytes, _) = peer.channel.receive();
    let mut shared = CUmemFabricHandle::default();
    shared.data.copy_from_slice(&bytes[..64]);
    let mut ipc = CUipcMemHandle_v1::default();
    for (to, &from) in ipc.reserved.iter_mut().zip(&bytes[64..]) {
        *to = from as _;
    }
    let handle = import_fabric(&driver, &shared).unwrap();
    let view = Mapped::of(&driver, handle, 1, GRAIN);
    assert_eq!(emulator.read(view.address, 6).unwrap(), b"fabric");
    emulator.write(view.address, b"FABRIC").unwrap();
    let mut opened = 0;
    call!(driver, cuIpcOpenMemHandle(&mut opened, ipc, 1)).unwrap();
    assert_eq!(emulator.read(opened, 5).unwrap(), b"plain");
    emulator.write(opened, b"PLAIN").unwrap();
    peer.channel.send(b"written", &[]);
    peer.channel.expect("seen");
    peer.kill();
    // The handles lead nowhere any more; the memory that was taken up stays.
    let gone = CUresult::CUDA_ERROR_INVALID_HANDLE;
    assert_eq!(import_fabric(&driver, &shared), Err(gone));
    assert_eq!(emulator.read(view.address, 6).unwrap(), b"FABRIC");
    view.free(&driver);
    call!(driver, cuIpcCloseMemHandle(opened)).unwrap();
    assert_eq!(call!(driver, cuIpcOpenMemHandle(&mut opened, ipc, 1)), Err(gone));
    leave(&driver, 1);
    emulator.assert_empty();
}

#[test]
fn the_limit_of_descriptors_is_an_error_of_the_operating_system() {
    const NAME: &str = "the_limit_of_descriptors_is_an_error_of_the_operating_system";
    // In a process of its own: the limit is the whole process's.
    let Some((_, channel)) = role() else {
        let peer = Peer::start(NAME, "limited");
        peer.channel.expect("done");
        return peer.finish();
    };
    let (emulator, driver) = start(Config::new(1));
    let memory = create(&driver, on_device(0), GRAIN, FD).unwrap();
    let fd = export(&driver, memory);
    let mut hoard = Vec::new();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let low = rustix::process::Rlimit { current: Some(64), ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, low).unwrap();
    while let Ok(more) = rustix::io::dup(&fd) {
        hoard.push(more);
    }
    let full = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
    assert_eq!(create(&driver, on_device(0), GRAIN, FD), Err(full));
    assert_eq!(import(&driver, fd.as_raw_fd()), Err(full));
    let mut out = -1;
    let exported = call!(driver, cuMemExportToShareableHandle((&raw mut out).cast(), memory, FD, 0));
    assert_eq!(exported, Err(full));
    assert_eq!(emulator.ledger().device_bytes, [GRAIN as u64]);
    drop(hoard);
    let again = create(&driver, on_device(0), GRAIN, FD).unwrap();
    for handle in [memory, again] {
        call!(driver, cuMemRelease(handle)).unwrap();
    }
    emulator.assert_empty();

    channel.send(b"done", &[]);
}

//! The part of the NCCL in software that is about memory, windows, device communicators and teams.

use super::nccl::{OK, Outcome, begin, bytes, enter, free, handle, put};
use super::{Kind, world};
use nccl_gin::sys::{
    Generation, Version, ncclComm_t, ncclCommProperties_t, ncclDevComm_t, ncclDevCommRequirements_t,
    ncclResult_t, ncclTeam, ncclWindow_t, v2_32,
};
use std::ffi::{c_int, c_void};
use std::ptr;

pub(super) unsafe extern "C" fn mem_alloc(out: *mut *mut c_void, length: usize) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, "ncclMemAlloc") {
            return code;
        }
        assert!(world.pushed > 0, "allocated without a current device");
        if world.nothing.contains("ncclMemAlloc") {
            return OK;
        }
        let at = world.address(length);
        world.allocations.insert(at);
        world.ranges.push((at, length.next_multiple_of(1 << 21), Kind::Device));
        // SAFETY: the caller passes a valid pointer.
        unsafe { put(out, ptr::without_provenance_mut(at)) };
        OK
    })
}

pub(super) unsafe extern "C" fn mem_free(at: *mut c_void) -> ncclResult_t {
    world(|world| {
        assert!(world.allocations.remove(&at.addr()), "freed once");
        assert!(!world.windows.values().any(|&buffer| buffer == at.addr()), "a window of it is alive");
    });
    OK
}

pub(super) unsafe extern "C" fn register(
    comm: ncclComm_t,
    buffer: *mut c_void,
    length: usize,
    out: *mut ncclWindow_t,
    _: c_int,
) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, "ncclCommWindowRegister") {
            return code;
        }
        assert!(length > 0 && buffer.addr().is_multiple_of(4096));
        // From 2.29 on the call succeeds and gives nothing where windows are not supported.
        if world.version >= 22900 && !world.device_api {
            return OK;
        }
        let outcome = Outcome::Window(buffer.addr());
        begin(world, handle(comm), "ncclCommWindowRegister", out.expose_provenance(), outcome)
    })
}

pub(super) unsafe extern "C" fn deregister(comm: ncclComm_t, window: ncclWindow_t) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, "ncclCommWindowDeregister") {
            return code;
        }
        assert!(world.comms.contains_key(&handle(comm)) && world.pushed > 0);
        let known =
            world.windows.remove(&window.addr()).is_some() || world.allocations.remove(&window.addr());
        assert!(known, "given back once");
        free(window.addr());
        OK
    })
}

pub(super) unsafe extern "C" fn dev_comm_create(
    comm: ncclComm_t,
    requirements: *const ncclDevCommRequirements_t,
    out: *mut ncclDevComm_t,
) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, "ncclDevCommCreate") {
            return code;
        }
        let generation = Generation::of(Version::from_code(world.version)).unwrap();
        // SAFETY: the struct is of the library's generation.
        world.requirements = unsafe { bytes(requirements.cast(), generation.requirements_size()) };
        begin(world, handle(comm), "ncclDevCommCreate", out.expose_provenance(), Outcome::DevComm)
    })
}

pub(super) unsafe extern "C" fn dev_comm_destroy(comm: ncclComm_t, _: *const ncclDevComm_t) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, "ncclDevCommDestroy") {
            return code;
        }
        assert!(world.comms.contains_key(&handle(comm)));
        world.dev_comms -= 1;
        OK
    })
}

pub(super) unsafe extern "C" fn team_lsa(comm: ncclComm_t) -> ncclTeam {
    world(|world| {
        let (rank, size) = (world.comms[&handle(comm)].rank, world.lsa_size);
        if world.nothing.contains("ncclTeamLsa") {
            return ncclTeam { nRanks: 0, rank: 0, stride: 0 };
        }
        ncclTeam { nRanks: size, rank: rank % size, stride: 1 }
    })
}

pub(super) unsafe extern "C" fn team_rail(comm: ncclComm_t) -> ncclTeam {
    world(|world| {
        let (comm, lsa) = (&world.comms[&handle(comm)], world.lsa_size);
        ncclTeam { nRanks: comm.size / lsa, rank: comm.rank / lsa, stride: lsa }
    })
}

pub(super) unsafe extern "C" fn query(comm: ncclComm_t, out: *mut ncclCommProperties_t) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, "ncclCommQueryProperties") {
            return code;
        }
        let size = Generation::of(Version::from_code(world.version)).unwrap().properties_size().unwrap();
        // SAFETY: the struct is of the library's generation.
        world.properties = unsafe { bytes(out.cast(), size) };
        let comm = &world.comms[&handle(comm)];
        let rank = if world.garbled { 77 } else { comm.rank };
        let properties: *mut v2_32::ncclCommProperties = out.cast();
        // SAFETY: these fields lie in the part that every generation has.
        unsafe {
            (&raw mut (*properties).rank).write(rank);
            (&raw mut (*properties).nRanks).write(comm.size);
            (&raw mut (*properties).cudaDev).write(1);
            (&raw mut (*properties).deviceApiSupport).write(world.device_api);
            (&raw mut (*properties).nLsaTeams).write(comm.size / world.lsa_size);
            if size >= 144 {
                (&raw mut (*properties).devCommRuntimeVersionSize).write(248);
            }
        }
        OK
    })
}

fn address(function: &'static str, at: usize, out: *mut *mut c_void) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, function) {
            return code;
        }
        let at = if world.nothing.contains(function) { 0 } else { at };
        // SAFETY: the caller passes a valid pointer.
        unsafe { put(out, ptr::without_provenance_mut(at)) };
        OK
    })
}

pub(super) unsafe extern "C" fn lsa_pointer(
    _: ncclWindow_t,
    offset: usize,
    peer: c_int,
    out: *mut *mut c_void,
) -> ncclResult_t {
    address("ncclGetLsaDevicePointer", 0x7e00_0000_0000 + ((peer as usize * 4) << 32) + offset, out)
}

pub(super) unsafe extern "C" fn peer_pointer(
    _: ncclWindow_t,
    offset: usize,
    peer: c_int,
    out: *mut *mut c_void,
) -> ncclResult_t {
    let lsa = world(|world| world.lsa_size);
    let at = if peer < lsa { 0x7e00_0000_0000 + ((peer as usize * 4) << 32) + offset } else { 0 };
    address("ncclGetPeerDevicePointer", at, out)
}

pub(super) unsafe extern "C" fn multimem_pointer(
    _: ncclWindow_t,
    offset: usize,
    out: *mut *mut c_void,
) -> ncclResult_t {
    address("ncclGetLsaMultimemDevicePointer", 0x6000_0000_0000 + offset, out)
}

//! The part of NCCL that the crate needs. Operations are in progress for a few polls, as on a non-blocking communicator.

use super::{World, device_api, world};
use nccl_gin::sys::{
    Generation, Version, ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId, v2_28, v2_28_3, v2_29, v2_30,
    v2_32,
};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

pub(super) const OK: ncclResult_t = ncclResult_t::ncclSuccess;

/// A communicator of the fake.
pub struct Comm {
    pub rank: i32,
    pub size: i32,
    pub finalized: bool,
    pending: Option<Pending>,
    state: ncclResult_t,
}

/// An operation in progress.
struct Pending {
    function: &'static str,
    polls: u32,
    /// Where its result goes, and what it is.
    out: usize,
    result: Outcome,
}

pub(super) enum Outcome {
    Nothing,
    Comm { rank: i32, size: i32 },
    Window(usize),
    DevComm,
}

pub(super) fn resolve(name: &CStr) -> *const c_void {
    if world(|world| world.missing.iter().any(|missing| missing.as_bytes() == name.to_bytes())) {
        return ptr::null();
    }
    let old = world(|world| world.version) < 22900;
    match name.to_bytes() {
        b"ncclGetVersion" => version as *const c_void,
        b"ncclGetLastError" => last_error as *const c_void,
        b"ncclGetUniqueId" => unique_id as *const c_void,
        b"ncclCommInitRankConfig" => init as *const c_void,
        b"ncclCommInitRankScalable" => init_scalable as *const c_void,
        b"ncclCommGetAsyncError" => async_error as *const c_void,
        b"ncclCommUserRank" => user_rank as *const c_void,
        b"ncclCommCount" => count as *const c_void,
        b"ncclCommSplit" => split as *const c_void,
        b"ncclCommShrink" => shrink as *const c_void,
        b"ncclCommFinalize" => finalize as *const c_void,
        b"ncclCommDestroy" => destroy as *const c_void,
        b"ncclCommAbort" => abort as *const c_void,
        b"ncclMemAlloc" => device_api::mem_alloc as *const c_void,
        b"ncclMemFree" => device_api::mem_free as *const c_void,
        b"ncclCommWindowRegister" => device_api::register as *const c_void,
        b"ncclCommWindowDeregister" => device_api::deregister as *const c_void,
        b"ncclDevCommCreate" => device_api::dev_comm_create as *const c_void,
        b"ncclDevCommDestroy" => device_api::dev_comm_destroy as *const c_void,
        b"ncclTeamLsa" => device_api::team_lsa as *const c_void,
        b"ncclTeamRail" => device_api::team_rail as *const c_void,
        b"ncclGroupStart" => group_start as *const c_void,
        b"ncclGroupEnd" => group_end as *const c_void,
        // Since 2.28.7.
        b"ncclCommRevoke" if world(|world| world.version) >= 22807 => revoke as *const c_void,
        // Since 2.29.
        _ if old => ptr::null(),
        b"ncclCommQueryProperties" => device_api::query as *const c_void,
        b"ncclCommGetUniqueId" => grow_id as *const c_void,
        b"ncclCommGrow" => grow as *const c_void,
        b"ncclGetLsaDevicePointer" => device_api::lsa_pointer as *const c_void,
        b"ncclGetPeerDevicePointer" => device_api::peer_pointer as *const c_void,
        b"ncclGetLsaMultimemDevicePointer" => device_api::multimem_pointer as *const c_void,
        _ => ptr::null(),
    }
}

/// Notes a call, and whether it shall do its work: a code to return instead, if any.
pub(super) fn enter(world: &mut World, function: &'static str) -> Option<ncclResult_t> {
    world.log.push(function);
    world.fail.remove(function)
}

pub(super) fn handle(comm: ncclComm_t) -> usize {
    comm.addr()
}

/// Starts an operation on a communicator, which must be alive and idle.
pub(super) fn begin(
    world: &mut World,
    comm: usize,
    function: &'static str,
    out: usize,
    result: Outcome,
) -> ncclResult_t {
    assert!(world.pushed > 0, "{function} without a current device");
    let polls = world.polls;
    let comm = world.comms.get_mut(&comm).expect("a communicator that is alive");
    assert!(comm.pending.is_none(), "{function} while another operation is in progress");
    comm.pending = Some(Pending { function, polls, out, result });
    comm.state = ncclResult_t::ncclInProgress;
    // Non-blocking calls return either of the two.
    if polls == 0 { OK } else { ncclResult_t::ncclInProgress }
}

fn new_comm(world: &mut World, rank: i32, size: i32) -> usize {
    let id = world.address(1);
    world.comms.insert(id, Comm { rank, size, finalized: false, pending: None, state: OK });
    id
}

pub(super) unsafe fn put<T>(out: *mut T, value: T) {
    // SAFETY: the callers pass what the crate gave as an output, which is valid for a write.
    unsafe { out.write(value) };
}

pub(super) unsafe fn bytes(from: *const c_void, length: usize) -> Vec<u8> {
    // SAFETY: the callers pass a struct of at least this length.
    unsafe { std::slice::from_raw_parts(from.cast(), length) }.to_vec()
}

unsafe extern "C" fn version(out: *mut c_int) -> ncclResult_t {
    // SAFETY: the table passes a valid pointer.
    unsafe { put(out, world(|world| world.version) as c_int) };
    OK
}

unsafe extern "C" fn last_error(_: ncclComm_t) -> *const c_char {
    world(|world| world.last_error.as_ptr().cast())
}

unsafe extern "C" fn unique_id(out: *mut ncclUniqueId) -> ncclResult_t {
    if let Some(code) = world(|world| enter(world, "ncclGetUniqueId")) {
        return code;
    }
    // SAFETY: the caller passes a valid pointer.
    unsafe { put(out, ncclUniqueId { internal: [3; 128] }) };
    OK
}

unsafe fn create(
    function: &'static str,
    out: *mut ncclComm_t,
    rank: i32,
    size: i32,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, function) {
            return code;
        }
        let generation = Generation::of(Version::from_code(world.version)).unwrap();
        // SAFETY: the configuration is of the library's generation.
        world.config = unsafe { bytes(config.cast(), generation.config_size()) };
        if world.nothing.contains(function) {
            return OK;
        }
        let comm = new_comm(world, rank, size);
        // SAFETY: the caller passes a valid pointer.
        unsafe { put(out, ptr::without_provenance_mut(comm)) };
        begin(world, comm, function, 0, Outcome::Nothing)
    })
}

unsafe extern "C" fn init(
    out: *mut ncclComm_t,
    size: c_int,
    id: ncclUniqueId,
    rank: c_int,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    assert!(id.internal.iter().all(|&byte| byte == 7), "the identifier passes by value");
    // SAFETY: as for the C function.
    unsafe { create("ncclCommInitRankConfig", out, rank, size, config) }
}

unsafe extern "C" fn init_scalable(
    out: *mut ncclComm_t,
    size: c_int,
    rank: c_int,
    ids: c_int,
    _: *mut ncclUniqueId,
    config: *mut ncclConfig_t,
) -> ncclResult_t {
    assert!(ids > 1);
    // SAFETY: as for the C function.
    unsafe { create("ncclCommInitRankScalable", out, rank, size, config) }
}

unsafe extern "C" fn async_error(comm: ncclComm_t, out: *mut ncclResult_t) -> ncclResult_t {
    world(|world| {
        if let Some(code) = world.fail.remove("ncclCommGetAsyncError") {
            return code;
        }
        let id = handle(comm);
        let in_group = world.group_depth > 0;
        let comm = world.comms.get_mut(&id).expect("a communicator that is alive");
        if let Some(pending) = &mut comm.pending
            && !in_group
        {
            if pending.polls > 0 || world.stuck.contains(pending.function) {
                pending.polls = pending.polls.saturating_sub(1);
            } else {
                finish(world, id);
            }
        }
        // SAFETY: the caller passes a valid pointer.
        unsafe { put(out, world.comms[&id].state) };
        OK
    })
}

/// Ends an operation.
fn finish(world: &mut World, id: usize) {
    let comm = world.comms.get_mut(&id).expect("a communicator that is alive");
    let Some(pending) = comm.pending.take() else { return };
    let (rank, size) = (comm.rank, comm.size);
    comm.state = world.fail_later.remove(pending.function).unwrap_or(OK);
    if comm.state != OK || world.nothing.contains(pending.function) {
        return;
    }
    match pending.result {
        Outcome::Nothing => {}
        Outcome::Comm { rank, size } => {
            let child = new_comm(world, rank, size);
            // SAFETY: the crate keeps the output until the operation has ended.
            unsafe {
                put(
                    ptr::with_exposed_provenance_mut(pending.out),
                    ptr::without_provenance_mut::<c_void>(child),
                )
            };
        }
        Outcome::Window(buffer) => {
            // 2.28 without symmetric memory hands out a host structure; the fake's is no window.
            let host = world.version < 22900 && !world.device_api;
            // The smallest struct there is: whoever reads behind it is found by a sanitizer.
            let mut window = Box::new(v2_28_3::ncclWindow_vidmem::default());
            window.lsaFlatBase = ptr::without_provenance_mut(0x7e00_0000_0000);
            window.stride4G = 4;
            window.lsaRank = rank;
            let window = Box::into_raw(window).expose_provenance();
            if host {
                world.allocations.insert(window);
            } else {
                world.windows.insert(window, buffer);
            }
            // SAFETY: as above.
            unsafe { put(ptr::with_exposed_provenance_mut(pending.out), window) };
        }
        Outcome::DevComm => {
            world.dev_comms += 1;
            let rank = if world.garbled { 77 } else { rank };
            let lsa = (rank % world.lsa_size, world.lsa_size);
            // SAFETY: as above; the block has more bytes than any layout.
            unsafe { fill(world.version, ptr::with_exposed_provenance_mut(pending.out), (rank, size), lsa) };
        }
    }
}

/// Writes a device communicator in the layout of the declared version.
unsafe fn fill(version: u32, out: *mut c_void, (rank, size): (i32, i32), (lsa_rank, lsa_size): (i32, i32)) {
    macro_rules! fill {
        ($module:ident) => {{
            let mut value = $module::ncclDevComm::default();
            value.rank = rank;
            value.nRanks = size;
            value.lsaRank = lsa_rank;
            value.lsaSize = lsa_size;
            value.lsaBarrier.nBarriers = 3;
            // SAFETY: the caller's block holds it.
            unsafe { put(out.cast(), value) }
        }};
    }
    match Generation::of(Version::from_code(version)).unwrap() {
        Generation::V2_28_3 => fill!(v2_28_3),
        Generation::V2_28 => fill!(v2_28),
        Generation::V2_29 => fill!(v2_29),
        Generation::V2_30 => fill!(v2_30),
        _ => fill!(v2_32),
    }
}

unsafe extern "C" fn user_rank(comm: ncclComm_t, out: *mut c_int) -> ncclResult_t {
    if let Some(code) = world(|world| world.fail.remove("ncclCommUserRank")) {
        return code;
    }
    // SAFETY: the caller passes a valid pointer.
    unsafe { put(out, world(|world| world.comms[&handle(comm)].rank)) };
    OK
}

unsafe extern "C" fn count(comm: ncclComm_t, out: *mut c_int) -> ncclResult_t {
    // SAFETY: the caller passes a valid pointer.
    unsafe { put(out, world(|world| world.comms[&handle(comm)].size)) };
    OK
}

unsafe extern "C" fn split(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    out: *mut ncclComm_t,
    _: *mut ncclConfig_t,
) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, "ncclCommSplit") {
            return code;
        }
        let outcome = if color < 0 { Outcome::Nothing } else { Outcome::Comm { rank: key, size: 2 } };
        begin(world, handle(comm), "ncclCommSplit", out.expose_provenance(), outcome)
    })
}

unsafe extern "C" fn shrink(
    comm: ncclComm_t,
    exclude: *mut c_int,
    excluded: c_int,
    out: *mut ncclComm_t,
    _: *mut ncclConfig_t,
    flags: c_int,
) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, "ncclCommShrink") {
            return code;
        }
        // SAFETY: the caller passes a list of this length.
        world.exclude = unsafe { std::slice::from_raw_parts(exclude, excluded as usize) }.to_vec();
        world.exclude.push(flags);
        let size = world.comms[&handle(comm)].size - excluded;
        begin(world, handle(comm), "ncclCommShrink", out.expose_provenance(), Outcome::Comm { rank: 0, size })
    })
}

unsafe extern "C" fn grow_id(_: ncclComm_t, out: *mut ncclUniqueId) -> ncclResult_t {
    // SAFETY: the caller passes a valid pointer.
    unsafe { put(out, ncclUniqueId { internal: [5; 128] }) };
    OK
}

unsafe extern "C" fn grow(
    comm: ncclComm_t,
    size: c_int,
    id: *const ncclUniqueId,
    rank: c_int,
    out: *mut ncclComm_t,
    _: *mut ncclConfig_t,
) -> ncclResult_t {
    if world(|world| world.stuck.contains("ncclCommGrow")) {
        // Waits for other ranks until its communicator is aborted, as the real one does.
        while world(|world| world.comms.contains_key(&handle(comm))) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        return ncclResult_t::ncclInternalError;
    }
    world(|world| {
        if let Some(code) = enter(world, "ncclCommGrow") {
            return code;
        }
        let rank = if comm.is_null() {
            assert!(!id.is_null() && rank >= 0, "a new rank has an identifier and a rank");
            rank
        } else {
            assert_eq!(rank, -1, "a present rank keeps its rank");
            world.comms[&handle(comm)].rank
        };
        let child = new_comm(world, rank, size);
        // SAFETY: the caller passes a valid pointer.
        unsafe { put(out, ptr::without_provenance_mut(child)) };
        begin(world, child, "ncclCommGrow", 0, Outcome::Nothing)
    })
}

unsafe extern "C" fn revoke(comm: ncclComm_t, flags: c_int) -> ncclResult_t {
    assert_eq!(flags, 0);
    world(|world| {
        let code = enter(world, "ncclCommRevoke");
        code.unwrap_or_else(|| begin(world, handle(comm), "ncclCommRevoke", 0, Outcome::Nothing))
    })
}

unsafe extern "C" fn finalize(comm: ncclComm_t) -> ncclResult_t {
    world(|world| {
        if let Some(code) = enter(world, "ncclCommFinalize") {
            return code;
        }
        world.comms.get_mut(&handle(comm)).expect("a communicator that is alive").finalized = true;
        begin(world, handle(comm), "ncclCommFinalize", 0, Outcome::Nothing)
    })
}

unsafe extern "C" fn destroy(comm: ncclComm_t) -> ncclResult_t {
    world(|world| {
        let code = enter(world, "ncclCommDestroy");
        let comm = world.comms.remove(&handle(comm)).expect("destroyed once");
        assert!(comm.finalized && comm.pending.is_none());
        assert!(world.pushed > 0, "destroyed without a current device");
        code.unwrap_or(OK)
    })
}

unsafe extern "C" fn abort(comm: ncclComm_t) -> ncclResult_t {
    world(|world| {
        let code = enter(world, "ncclCommAbort");
        world.comms.remove(&handle(comm)).expect("aborted once");
        // What was made from it goes with it.
        let windows: Vec<usize> = world.windows.drain().map(|(window, _)| window).collect();
        for window in windows {
            free(window);
        }
        world.dev_comms = 0;
        code.unwrap_or(OK)
    })
}

pub(super) fn free(window: usize) {
    // SAFETY: the fake made it as a box, and removed it from its ledger.
    drop(unsafe { Box::from_raw(ptr::with_exposed_provenance_mut::<v2_28_3::ncclWindow_vidmem>(window)) });
}

unsafe extern "C" fn group_start() -> ncclResult_t {
    world(|world| {
        let code = enter(world, "ncclGroupStart");
        if code.is_none() {
            world.group_depth += 1;
        }
        code.unwrap_or(OK)
    })
}

unsafe extern "C" fn group_end() -> ncclResult_t {
    world(|world| {
        let code = enter(world, "ncclGroupEnd");
        world.group_depth -= 1;
        code.unwrap_or(OK)
    })
}

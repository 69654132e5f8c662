//! An NCCL and a device that do nothing, successfully: what is left is this crate's own cost.

use nccl_gin::Device;
use nccl_gin::sys::{
    Nccl, ncclComm_t, ncclCommProperties_t, ncclConfig_t, ncclDevComm_t, ncclDevCommRequirements_t,
    ncclResult_t, ncclTeam, ncclUniqueId, ncclWindow_t, v2_32,
};
use std::ffi::{CStr, c_int, c_void};
use std::ptr;

const OK: ncclResult_t = ncclResult_t::ncclSuccess;
/// What stands for a handle: it is never followed.
const HANDLE: *mut c_void = ptr::without_provenance_mut(0x1000);

unsafe extern "C" fn version(out: *mut c_int) -> ncclResult_t {
    // SAFETY: the table passes a valid pointer.
    unsafe { *out = 23203 };
    OK
}

unsafe extern "C" fn init(
    out: *mut ncclComm_t,
    _: c_int,
    _: ncclUniqueId,
    _: c_int,
    _: *mut ncclConfig_t,
) -> ncclResult_t {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = HANDLE.cast() };
    OK
}

unsafe extern "C" fn async_error(_: ncclComm_t, out: *mut ncclResult_t) -> ncclResult_t {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = OK };
    OK
}

unsafe extern "C" fn done(_: ncclComm_t) -> ncclResult_t {
    OK
}

unsafe extern "C" fn register(
    _: ncclComm_t,
    _: *mut c_void,
    _: usize,
    out: *mut ncclWindow_t,
    _: c_int,
) -> ncclResult_t {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = HANDLE.cast() };
    OK
}

unsafe extern "C" fn deregister(_: ncclComm_t, _: ncclWindow_t) -> ncclResult_t {
    OK
}

unsafe extern "C" fn team(_: ncclComm_t) -> ncclTeam {
    ncclTeam { nRanks: 2, rank: 0, stride: 1 }
}

unsafe extern "C" fn properties(_: ncclComm_t, out: *mut ncclCommProperties_t) -> ncclResult_t {
    let out: *mut v2_32::ncclCommProperties = out.cast();
    // SAFETY: the caller passes a struct of the version that this library tells.
    unsafe {
        (&raw mut (*out).rank).write(0);
        (&raw mut (*out).nRanks).write(2);
        (&raw mut (*out).deviceApiSupport).write(true);
    }
    OK
}

unsafe extern "C" fn create(
    _: ncclComm_t,
    _: *const ncclDevCommRequirements_t,
    out: *mut ncclDevComm_t,
) -> ncclResult_t {
    let out: *mut v2_32::ncclDevComm = out.cast();
    // SAFETY: the caller passes a block that holds the layout of the version that this library tells.
    unsafe {
        (&raw mut (*out).rank).write(0);
        (&raw mut (*out).nRanks).write(2);
        (&raw mut (*out).lsaSize).write(2);
    }
    OK
}

unsafe extern "C" fn destroy(_: ncclComm_t, _: *const ncclDevComm_t) -> ncclResult_t {
    OK
}

unsafe extern "C" fn pointer(
    _: ncclWindow_t,
    offset: usize,
    _: c_int,
    out: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = ptr::without_provenance_mut(0x7000_0000_0000 + offset) };
    OK
}

fn resolve(name: &CStr) -> *const c_void {
    match name.to_bytes() {
        b"ncclGetVersion" => version as *const c_void,
        b"ncclCommInitRankConfig" => init as *const c_void,
        b"ncclCommGetAsyncError" => async_error as *const c_void,
        b"ncclCommFinalize" | b"ncclCommDestroy" => done as *const c_void,
        b"ncclCommWindowRegister" => register as *const c_void,
        b"ncclCommWindowDeregister" => deregister as *const c_void,
        b"ncclTeamLsa" => team as *const c_void,
        b"ncclCommQueryProperties" => properties as *const c_void,
        b"ncclDevCommCreate" => create as *const c_void,
        b"ncclDevCommDestroy" => destroy as *const c_void,
        b"ncclGetLsaDevicePointer" => pointer as *const c_void,
        _ => ptr::null(),
    }
}

/// The library that does nothing.
#[must_use]
pub fn nothing() -> Nccl {
    // SAFETY: the functions have the signatures that NCCL's headers declare for their names.
    unsafe { Nccl::from_loader(resolve) }.expect("the library tells its version")
}

/// A device of the software driver.
#[must_use]
pub fn device(emulator: &cuda_vmm_emu::Emulator) -> Device {
    Device::with_driver(&emulator.driver(), 0).expect("the software driver has a device")
}

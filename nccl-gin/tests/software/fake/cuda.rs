//! The part of a CUDA driver that the crate needs.

use super::{Kind, world};
use cuda_vmm_sys::{
    CUcontext, CUdevice, CUdeviceptr, CUmemAllocationHandleType, CUmemAllocationProp_v1, CUmemLocationType,
    CUpointer_attribute, CUresult, CUstream,
};
use std::ffi::{CStr, c_int, c_uint, c_ulonglong, c_void};
use std::fs::File;
use std::os::fd::IntoRawFd;
use std::ptr;

const CONTEXT: usize = 0xc0_0000;

pub(super) fn resolve(name: &CStr) -> *const c_void {
    match name.to_bytes() {
        b"cuDriverGetVersion" => version as *const c_void,
        b"cuInit" => init as *const c_void,
        b"cuDeviceGet" => device as *const c_void,
        b"cuDeviceTotalMem_v2" => total_memory as *const c_void,
        b"cuDevicePrimaryCtxRetain" => retain as *const c_void,
        b"cuDevicePrimaryCtxRelease_v2" => release as *const c_void,
        b"cuCtxSetCurrent" => set_current as *const c_void,
        b"cuCtxPushCurrent_v2" => push as *const c_void,
        b"cuCtxPopCurrent_v2" => pop as *const c_void,
        b"cuMemGetAddressRange_v2" => address_range as *const c_void,
        b"cuMemRetainAllocationHandle" => retain_handle as *const c_void,
        b"cuMemGetAllocationPropertiesFromHandle" => handle_properties as *const c_void,
        b"cuMemExportToShareableHandle" => export_handle as *const c_void,
        b"cuMemRelease" => release_handle as *const c_void,
        b"cuPointerGetAttribute" => pointer_attribute as *const c_void,
        b"cuStreamCreate" => stream_create as *const c_void,
        b"cuStreamQuery" => stream_query as *const c_void,
        b"cuStreamDestroy_v2" => stream_destroy as *const c_void,
        b"cuMemcpyDtoHAsync_v2" => copy as *const c_void,
        _ => ptr::null(),
    }
}

unsafe extern "C" fn version(out: *mut c_int) -> CUresult {
    // SAFETY: the table passes a valid pointer.
    unsafe { *out = 13_000 };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn init(_: c_uint) -> CUresult {
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn device(out: *mut CUdevice, ordinal: c_int) -> CUresult {
    if !(0..2).contains(&ordinal) {
        return CUresult::CUDA_ERROR_INVALID_DEVICE;
    }
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = ordinal };
    CUresult::CUDA_SUCCESS
}

/// Bytes of the device's memory.
pub const MEMORY: usize = 6 << 30;

unsafe extern "C" fn total_memory(out: *mut usize, _: CUdevice) -> CUresult {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = MEMORY };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn retain(out: *mut CUcontext, _: CUdevice) -> CUresult {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = ptr::without_provenance_mut(CONTEXT) };
    world(|world| world.contexts += 1);
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn release(_: CUdevice) -> CUresult {
    world(|world| world.contexts -= 1);
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn set_current(context: CUcontext) -> CUresult {
    assert_eq!(context.addr(), CONTEXT);
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn push(context: CUcontext) -> CUresult {
    assert_eq!(context.addr(), CONTEXT);
    world(|world| world.pushed += 1);
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn pop(out: *mut CUcontext) -> CUresult {
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = ptr::without_provenance_mut(CONTEXT) };
    world(|world| world.pushed -= 1);
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn address_range(base: *mut CUdeviceptr, size: *mut usize, at: CUdeviceptr) -> CUresult {
    let at = at as usize;
    let found = world(|world| {
        world.ranges.iter().find(|(start, length, _)| (*start..start + length).contains(&at)).copied()
    });
    let Some((start, length, kind)) = found else { return CUresult::CUDA_ERROR_NOT_FOUND };
    // Some drivers give no base for host memory.
    // SAFETY: the caller passes valid pointers.
    unsafe {
        *base = if matches!(kind, Kind::Host | Kind::Imported) { 0 } else { start as CUdeviceptr };
        *size = length;
    }
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn retain_handle(handle: *mut u64, at: *mut c_void) -> CUresult {
    world(|world| {
        let found =
            world.ranges.iter().position(|(start, length, _)| (*start..start + length).contains(&at.addr()));
        match found {
            Some(index) if world.ranges[index].2 != Kind::Plain => {
                world.handles += 1;
                // SAFETY: the caller passes a valid pointer.
                unsafe { *handle = index as u64 };
                CUresult::CUDA_SUCCESS
            }
            _ => CUresult::CUDA_ERROR_INVALID_VALUE,
        }
    })
}

unsafe extern "C" fn handle_properties(out: *mut CUmemAllocationProp_v1, handle: u64) -> CUresult {
    let kind = world(|world| world.ranges[handle as usize].2);
    let mut properties = CUmemAllocationProp_v1::default();
    properties.location.type_ = match kind {
        Kind::Host | Kind::Imported => CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA,
        _ => CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
    };
    properties.requestedHandleTypes =
        CUmemAllocationHandleType(u32::from(matches!(kind, Kind::Device | Kind::Host)));
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = properties };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn export_handle(
    out: *mut c_void,
    handle: u64,
    _: CUmemAllocationHandleType,
    _: c_ulonglong,
) -> CUresult {
    if world(|world| matches!(world.ranges[handle as usize].2, Kind::Private | Kind::Imported)) {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    let null = File::open("/dev/null").expect("every system has it");
    // SAFETY: the caller passes a valid pointer to an int, and owns what it is given.
    unsafe { out.cast::<c_int>().write(null.into_raw_fd()) };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn release_handle(_: u64) -> CUresult {
    world(|world| world.handles -= 1);
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn pointer_attribute(
    out: *mut c_void,
    _: CUpointer_attribute,
    at: CUdeviceptr,
) -> CUresult {
    let device = world(|world| world.windows.contains_key(&(at as usize)));
    if !device {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: the caller passes a pointer that is valid for a memory type.
    unsafe { *out.cast::<c_uint>() = 2 };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn stream_create(out: *mut CUstream, _: c_uint) -> CUresult {
    world(|world| world.streams += 1);
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = ptr::without_provenance_mut(0x57) };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn stream_query(_: CUstream) -> CUresult {
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn stream_destroy(_: CUstream) -> CUresult {
    world(|world| world.streams -= 1);
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn copy(to: *mut c_void, from: CUdeviceptr, length: usize, _: CUstream) -> CUresult {
    // SAFETY: windows of the fake are structs on its heap, and the destination holds what is copied.
    unsafe {
        ptr::copy_nonoverlapping(ptr::with_exposed_provenance::<u8>(from as usize), to.cast(), length);
    }
    CUresult::CUDA_SUCCESS
}

//! What the tests share: an emulator that is initialised, and short forms of the calls that most of them make.

#![allow(dead_code, unused_imports)]

pub mod process;

use cuda_vmm_emu::sys::{
    CUcontext, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc_v1, CUmemAllocationHandleType,
    CUmemAllocationProp_v1, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation,
    CUmemLocationType, CUresult, CUstream, CallError, Driver,
};
use cuda_vmm_emu::{Config, Emulator};
use std::ptr;

pub const MIB: usize = 1 << 20;
/// Granularity of the default machine.
pub const GRAIN: usize = 2 * MIB;

pub const FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
pub const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
pub const NONE: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
pub const READ: CUmemAccess_flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ;
pub const READ_WRITE: CUmemAccess_flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
pub const NO_ACCESS: CUmemAccess_flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE;

pub const INVALID_VALUE: Result<(), CUresult> = Err(CUresult::CUDA_ERROR_INVALID_VALUE);

/// Calls a driver function; the result is `Ok`, or the code.
macro_rules! call {
    ($driver:expr, $function:ident ( $($argument:expr),* $(,)? )) => {{
        // SAFETY: the emulator follows only the pointers that the function writes to or reads, which are valid for the call; what it must not
        // be given otherwise, it refuses.
        let result = unsafe { $driver.$function($($argument),*) };
        $crate::common::code(result)
    }};
}

pub(crate) use call;

pub fn code(result: Result<(), CallError>) -> Result<(), CUresult> {
    result.map_err(|error| error.status().unwrap_or_else(|| panic!("{error}")))
}

/// An emulator and its driver, initialised.
pub fn start(config: Config) -> (Emulator, Driver) {
    let emulator = Emulator::new(config).expect("the configuration is valid");
    let driver = emulator.driver();
    call!(driver, cuInit(0)).unwrap();
    (emulator, driver)
}

/// The primary context of a device, retained, and current on this thread.
pub fn make_current(driver: &Driver, device: i32) -> CUcontext {
    let mut context = ptr::null_mut();
    call!(driver, cuDevicePrimaryCtxRetain(&mut context, device)).unwrap();
    call!(driver, cuCtxSetCurrent(context)).unwrap();
    context
}

/// Takes back what [`make_current`] did.
pub fn leave(driver: &Driver, device: i32) {
    call!(driver, cuCtxSetCurrent(ptr::null_mut())).unwrap();
    call!(driver, cuDevicePrimaryCtxRelease(device)).unwrap();
}

pub fn on_device(id: i32) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

pub fn on_node(id: i32) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, id }
}

pub fn on_host() -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, id: 0 }
}

pub fn prop(location: CUmemLocation, types: CUmemAllocationHandleType) -> CUmemAllocationProp_v1 {
    CUmemAllocationProp_v1 {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: types,
        location,
        ..Default::default()
    }
}

pub fn create(
    driver: &Driver,
    location: CUmemLocation,
    size: usize,
    types: CUmemAllocationHandleType,
) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = 0;
    call!(driver, cuMemCreate(&mut handle, size, &prop(location, types), 0)).map(|()| handle)
}

pub fn reserve(driver: &Driver, size: usize) -> CUdeviceptr {
    let mut address = 0;
    call!(driver, cuMemAddressReserve(&mut address, size, GRAIN, 0, 0)).unwrap();
    address
}

pub fn set_access(
    driver: &Driver,
    address: CUdeviceptr,
    size: usize,
    location: CUmemLocation,
    flags: CUmemAccess_flags,
) -> Result<(), CUresult> {
    call!(driver, cuMemSetAccess(address, size, &CUmemAccessDesc_v1 { location, flags }, 1))
}

pub fn access_of(driver: &Driver, location: CUmemLocation, address: CUdeviceptr) -> Result<u64, CUresult> {
    let mut flags = 99;
    call!(driver, cuMemGetAccess(&mut flags, &location, address)).map(|()| flags)
}

/// Memory of a device, mapped at addresses of its own for that device.
pub struct Mapped {
    pub address: CUdeviceptr,
    pub size: usize,
    pub handle: CUmemGenericAllocationHandle,
}

impl Mapped {
    pub fn new(driver: &Driver, device: i32, size: usize, types: CUmemAllocationHandleType) -> Self {
        let handle = create(driver, on_device(device), size, types).unwrap();
        Self::of(driver, handle, device, size)
    }

    /// Maps a handle.
    pub fn of(driver: &Driver, handle: CUmemGenericAllocationHandle, device: i32, size: usize) -> Self {
        let address = reserve(driver, size);
        call!(driver, cuMemMap(address, size, 0, handle, 0)).unwrap();
        set_access(driver, address, size, on_device(device), READ_WRITE).unwrap();
        Self { address, size, handle }
    }

    pub fn free(self, driver: &Driver) {
        call!(driver, cuMemUnmap(self.address, self.size)).unwrap();
        call!(driver, cuMemAddressFree(self.address, self.size)).unwrap();
        call!(driver, cuMemRelease(self.handle)).unwrap();
    }
}

pub fn new_stream(driver: &Driver, flags: u32) -> CUstream {
    let mut stream = ptr::null_mut();
    call!(driver, cuStreamCreate(&mut stream, flags)).unwrap();
    stream
}

//! The driver's calls, with nothing around them.

use cuda_vmm::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, Driver,
};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// Where the memory lies and who uses it: the first device.
const DEVICE: CUmemLocation = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
const FD: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Raw calls on one driver. Every function panics where the driver refuses, and the caller frees what it made.
#[derive(Clone, Copy, Debug)]
pub struct Raw<'driver>(pub &'driver Driver);

impl Raw<'_> {
    /// `cuMemCreate`, exportable as a file descriptor.
    #[must_use]
    pub fn create(self, size: usize) -> CUmemGenericAllocationHandle {
        let mut handle = 0;
        let properties = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: FD,
            location: DEVICE,
            ..Default::default()
        };
        // SAFETY: both pointers are valid for the call.
        unsafe { self.0.cuMemCreate(&mut handle, size, &properties, 0) }.expect("cuMemCreate");
        handle
    }

    /// `cuMemRelease`.
    pub fn release(self, handle: CUmemGenericAllocationHandle) {
        // SAFETY: made by `create` or `import`, and released once.
        unsafe { self.0.cuMemRelease(handle) }.expect("cuMemRelease");
    }

    /// `cuMemAddressReserve`.
    #[must_use]
    pub fn reserve(self, size: usize) -> CUdeviceptr {
        let mut address = 0;
        // SAFETY: `address` is valid for one write.
        unsafe { self.0.cuMemAddressReserve(&mut address, size, 2 << 20, 0, 0) }
            .expect("cuMemAddressReserve");
        address
    }

    /// `cuMemAddressFree`.
    pub fn free(self, address: CUdeviceptr, size: usize) {
        // SAFETY: exactly what `reserve` returned, with nothing mapped.
        unsafe { self.0.cuMemAddressFree(address, size) }.expect("cuMemAddressFree");
    }

    /// `cuMemMap`.
    pub fn map(self, address: CUdeviceptr, size: usize, handle: CUmemGenericAllocationHandle) {
        // SAFETY: the range is reserved and unmapped, and the handle is alive.
        unsafe { self.0.cuMemMap(address, size, 0, handle, 0) }.expect("cuMemMap");
    }

    /// `cuMemUnmap`.
    pub fn unmap(self, address: CUdeviceptr, size: usize) {
        // SAFETY: one whole mapping that nothing uses.
        unsafe { self.0.cuMemUnmap(address, size) }.expect("cuMemUnmap");
    }

    /// `cuMemSetAccess` for the first device.
    pub fn set_access(self, address: CUdeviceptr, size: usize) {
        let access = CUmemAccessDesc {
            location: DEVICE,
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: one whole mapping, and `access` is valid for one read.
        unsafe { self.0.cuMemSetAccess(address, size, &access, 1) }.expect("cuMemSetAccess");
    }

    /// `cuMemExportToShareableHandle`.
    #[must_use]
    pub fn export(self, handle: CUmemGenericAllocationHandle) -> OwnedFd {
        let mut number = -1_i32;
        // SAFETY: for a file descriptor the driver writes one int.
        unsafe { self.0.cuMemExportToShareableHandle(ptr::from_mut(&mut number).cast(), handle, FD, 0) }
            .expect("cuMemExportToShareableHandle");
        // SAFETY: the driver made it for us.
        unsafe { OwnedFd::from_raw_fd(number) }
    }

    /// `cuMemImportFromShareableHandle`, and the properties, which any importer must ask for.
    #[must_use]
    pub fn import(self, fd: BorrowedFd<'_>) -> CUmemGenericAllocationHandle {
        let (mut handle, mut properties) = (0, CUmemAllocationProp::default());
        let number = fd.as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: for a file descriptor the driver takes its number; the other pointers are valid for one write.
        unsafe {
            self.0
                .cuMemImportFromShareableHandle(&mut handle, number, FD)
                .expect("cuMemImportFromShareableHandle");
            self.0
                .cuMemGetAllocationPropertiesFromHandle(&mut properties, handle)
                .expect("cuMemGetAllocationPropertiesFromHandle");
        }
        handle
    }
}

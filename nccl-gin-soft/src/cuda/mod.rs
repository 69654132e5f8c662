//! The driver as this plugin uses it: one context, streams, copies and stream memory operations.

mod pinned;
mod stream;
mod warm;

pub(crate) use pinned::Pinned;
pub(crate) use stream::{Copies, Stream, Words};
pub(crate) use warm::warm_up;

use crate::error::{Error, Result};
use cuda_vmm_sys::{
    CUcontext, CUdevice, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUstreamCaptureMode, Driver, Function,
};
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{PoisonError, RwLock};

static INJECTED: RwLock<Option<Driver>> = RwLock::new(None);

/// Makes the plugin take its CUDA functions from `driver` in place of this process's `libcuda.so.1`: connections that are made from now on.
/// For tests on a driver in software, such as `cuda-vmm-emu`; only where the plugin is linked as a Rust library.
pub fn set_driver(driver: Driver) {
    *INJECTED.write().unwrap_or_else(PoisonError::into_inner) = Some(driver);
}

fn driver() -> Result<Driver> {
    if let Some(driver) = &*INJECTED.read().unwrap_or_else(PoisonError::into_inner) {
        return Ok(driver.clone());
    }
    Ok(Driver::get()?.clone())
}

/// Which form of the batched copy the driver has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Batch {
    /// CUDA 13.
    V2,
    /// CUDA 12.8.
    V1,
    /// None: copies go one by one.
    Single,
}

/// A CUDA context, and the driver that it belongs to.
pub(crate) struct Cuda {
    driver: Driver,
    context: usize,
    device: CUdevice,
    batch: Batch,
    greatest_priority: i32,
}

impl Cuda {
    /// The context that is current on this thread.
    pub(crate) fn current() -> Result<Self> {
        let driver = driver()?;
        let mut context: CUcontext = std::ptr::null_mut();
        let mut device = 0;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: each pointer is to a local and valid for the one write. `cuCtxGetDevice` and the priorities are asked with a context current.
        unsafe {
            driver.cuCtxGetCurrent(&mut context).map_err(Error::cuda("connecting"))?;
            if context.is_null() {
                return Err(Error::NoContext { attempt: "connecting" });
            }
            driver.cuCtxGetDevice(&mut device).map_err(Error::cuda("connecting"))?;
            driver
                .cuCtxGetStreamPriorityRange(&mut least, &mut greatest)
                .map_err(Error::cuda("asking for stream priorities"))?;
        }
        let batch = if driver.has(Function::cuMemcpyBatchAsync_v2) {
            Batch::V2
        } else if driver.has(Function::cuMemcpyBatchAsync) {
            Batch::V1
        } else {
            Batch::Single
        };
        Ok(Self { driver, context: context as usize, device, batch, greatest_priority: greatest })
    }

    /// Ordinal of the device.
    pub(crate) fn device(&self) -> CUdevice {
        self.device
    }

    /// Makes the context current until the guard goes.
    pub(crate) fn enter(&self, attempt: &'static str) -> Result<Entered<'_>> {
        // SAFETY: the context was current when the connection was made; NCCL keeps it until the connection is closed.
        unsafe { self.driver.cuCtxPushCurrent(self.context as CUcontext) }.map_err(Error::cuda(attempt))?;
        Ok(Entered(self))
    }

    /// Makes the calling thread, one of ours, work in this context for good, whatever other threads capture meanwhile.
    pub(crate) fn adopt_thread(&self) -> Result<()> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: as in `enter`; `mode` is valid for the exchange.
        unsafe {
            self.driver
                .cuCtxSetCurrent(self.context as CUcontext)
                .map_err(Error::cuda("entering the context on a thread of the plugin"))?;
            // Only graph captures of other threads need this: a driver without it has none to disturb.
            let _ = self.driver.cuThreadExchangeStreamCaptureMode(&mut mode);
        }
        Ok(())
    }

    /// The allocation that holds an address: its base and size, if the driver knows it.
    pub(crate) fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: both pointers are to locals. The driver checks the address.
        unsafe { self.driver.cuMemGetAddressRange(&mut base, &mut size, address) }.ok()?;
        Some((base, size as u64))
    }

    /// A file descriptor of the physical memory at an address, if it may be exported as one.
    pub(crate) fn export(&self, address: u64) -> Option<OwnedFd> {
        let mut handle: CUmemGenericAllocationHandle = 0;
        let mut fd: i32 = -1;
        // SAFETY: the pointers are to locals of the types that the driver writes (an int for a descriptor). The handle is released once,
        // after its last use; the descriptor that comes back is this process's own.
        unsafe {
            self.driver.cuMemRetainAllocationHandle(&mut handle, address as *mut c_void).ok()?;
            let exported = self.driver.cuMemExportToShareableHandle(
                (&raw mut fd).cast(),
                handle,
                CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                0,
            );
            let _ = self.driver.cuMemRelease(handle);
            exported.ok()?;
            (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
        }
    }

    /// Reserves addresses.
    pub(crate) fn reserve(&self, size: u64, alignment: u64) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the pointer is to a local.
        unsafe { self.driver.cuMemAddressReserve(&mut address, size as usize, alignment as usize, 0, 0) }
            .map_err(Error::cuda("reserving addresses for another rank's memory"))?;
        Ok(address)
    }

    /// Gives a reservation back.
    pub(crate) fn free_reservation(&self, address: u64, size: u64) {
        // SAFETY: the caller passes a reservation of `reserve` exactly, with nothing mapped in it.
        let _ = unsafe { self.driver.cuMemAddressFree(address, size as usize) };
    }

    /// Imports physical memory and maps it readable and writable for this device. Returns whether it is this device's own memory.
    pub(crate) fn map_import(&self, fd: BorrowedFd<'_>, address: u64, size: u64) -> Result<bool> {
        let mut handle: CUmemGenericAllocationHandle = 0;
        let access = CUmemAccessDesc {
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.device,
            },
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let size = size as usize;
        let mut properties = CUmemAllocationProp::default();
        // SAFETY: a descriptor is passed by value in the pointer, as the driver wants it; `access` and `properties` outlive their calls. The handle is released
        // once: the mapping keeps the memory. What was mapped is unmapped again if access cannot be given.
        unsafe {
            self.driver
                .cuMemImportFromShareableHandle(
                    &mut handle,
                    fd.as_raw_fd() as usize as *mut c_void,
                    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                )
                .map_err(Error::cuda("importing another rank's memory"))?;
            // What cannot be asked is taken for the device's own: that is right for all memory, if slower for some.
            let own = self.driver.cuMemGetAllocationPropertiesFromHandle(&mut properties, handle).is_err()
                || (properties.location.type_ == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE
                    && properties.location.id == self.device);
            let mapped = self.driver.cuMemMap(address, size, 0, handle, 0);
            let _ = self.driver.cuMemRelease(handle);
            mapped.map_err(Error::cuda("mapping another rank's memory"))?;
            if let Err(error) = self.driver.cuMemSetAccess(address, size, &access, 1) {
                let _ = self.driver.cuMemUnmap(address, size);
                return Err(Error::cuda("giving access to another rank's memory")(error));
            }
            Ok(own)
        }
    }

    /// Undoes [`Cuda::map_import`].
    pub(crate) fn unmap(&self, address: u64, size: u64) {
        // SAFETY: the caller passes a whole mapping, which nothing uses any more.
        let _ = unsafe { self.driver.cuMemUnmap(address, size as usize) };
    }
}

/// The context is current while this lives.
pub(crate) struct Entered<'a>(&'a Cuda);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: pops what `enter` pushed on this thread; the pointer is to a local.
        let _ = unsafe { self.0.driver.cuCtxPopCurrent(&mut context) };
    }
}

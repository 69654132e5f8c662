//! Handles of the driver that stand for physical memory or a multicast object: released once, exported and imported.

use crate::cuda::Cuda;
use crate::error::{Attempt, Error, Result};
use crate::properties::HandleTypes;
use crate::release::released;
use crate::share::FabricHandle;
use cuda_vmm_sys::ffi::{c_int, c_void};
use cuda_vmm_sys::{CUmemAllocationHandleType, CUmemFabricHandle, CUmemGenericAllocationHandle};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// One reference to what a handle stands for.
#[derive(Debug)]
pub(crate) struct Handle {
    cuda: Cuda,
    what: &'static str,
    raw: CUmemGenericAllocationHandle,
    imported: bool,
}

impl Handle {
    /// Takes over a reference that the driver gave out. `what` names the kind of object in errors.
    pub(crate) fn own(cuda: &Cuda, what: &'static str, raw: CUmemGenericAllocationHandle) -> Self {
        Self { cuda: cuda.clone(), what, raw, imported: false }
    }

    pub(crate) fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    pub(crate) fn as_raw(&self) -> CUmemGenericAllocationHandle {
        self.raw
    }

    pub(crate) fn import_fd(
        cuda: &Cuda,
        what: &'static str,
        fd: BorrowedFd<'_>,
        size: usize,
    ) -> Result<Self> {
        // The driver takes the descriptor's number in place of a pointer.
        let number = fd.as_raw_fd() as usize as *mut c_void;
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this kind the driver reads the descriptor's number, not memory; the descriptor is open while it is borrowed.
        unsafe { Self::import(cuda, what, number, kind, size) }
    }

    pub(crate) fn import_fabric(
        cuda: &Cuda,
        what: &'static str,
        handle: &FabricHandle,
        size: usize,
    ) -> Result<Self> {
        let mut raw = CUmemFabricHandle { data: *handle.as_bytes() };
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
        // SAFETY: for this kind the driver reads a CUmemFabricHandle, which `raw` is.
        unsafe { Self::import(cuda, what, std::ptr::from_mut(&mut raw).cast(), kind, size) }
    }

    /// # Safety
    /// `os_handle` must be what the driver expects for `kind`.
    unsafe fn import(
        cuda: &Cuda,
        what: &'static str,
        os_handle: *mut c_void,
        kind: CUmemAllocationHandleType,
        size: usize,
    ) -> Result<Self> {
        let mut raw = 0;
        // SAFETY: the caller's promise for `os_handle`; `raw` is valid for one write.
        unsafe { cuda.driver().cuMemImportFromShareableHandle(&mut raw, os_handle, kind) }.attempt(|| {
            format!("importing {what} of {size} bytes as {}", HandleTypes::from_bits_retain(kind.0))
        })?;
        let mut handle = Self::own(cuda, what, raw);
        handle.imported = true;
        Ok(handle)
    }

    /// `available` is what the object was created to be exported as.
    pub(crate) fn export_fd(&self, available: HandleTypes) -> Result<OwnedFd> {
        self.check_exportable(HandleTypes::POSIX_FD, available)?;
        let mut number: c_int = -1;
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this kind the driver writes one int, for which `number` is valid.
        unsafe { self.export(std::ptr::from_mut(&mut number).cast(), kind) }?;
        // SAFETY: the driver made this descriptor for the caller, who must close it; nobody else owns it.
        unsafe { own_fd(number, "exporting this handle") }
    }

    /// `available` is what the object was created to be exported as.
    pub(crate) fn export_fabric(&self, available: HandleTypes) -> Result<FabricHandle> {
        self.check_exportable(HandleTypes::FABRIC, available)?;
        let mut raw = CUmemFabricHandle::default();
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;
        // SAFETY: for this kind the driver writes a CUmemFabricHandle, for which `raw` is valid.
        unsafe { self.export(std::ptr::from_mut(&mut raw).cast(), kind) }?;
        Ok(FabricHandle::from_bytes(raw.data))
    }

    fn check_exportable(&self, wanted: HandleTypes, available: HandleTypes) -> Result<()> {
        if available.contains(wanted) {
            Ok(())
        } else {
            Err(Error::NotExportable { what: self.what, wanted, available, imported: self.imported })
        }
    }

    /// # Safety
    /// `out` must be valid for the write that the driver makes for `kind`.
    unsafe fn export(&self, out: *mut c_void, kind: CUmemAllocationHandleType) -> Result<()> {
        // SAFETY: the caller's promise for `out`; the handle is alive; flags must be 0.
        unsafe { self.cuda.driver().cuMemExportToShareableHandle(out, self.raw, kind, 0) }
            .attempt(|| format!("exporting {} as {}", self.what, HandleTypes::from_bits_retain(kind.0)))
    }
}

/// Takes over a file descriptor that the driver made. Programs that this process starts do not inherit it: they would keep the memory
/// behind it alive without knowing.
///
/// # Safety
/// If it is not negative, `number` must be an open descriptor that nobody else owns.
pub(crate) unsafe fn own_fd(number: c_int, what: &'static str) -> Result<OwnedFd> {
    if number < 0 {
        let why = format!("the driver returned {number} as a file descriptor");
        return Err(Error::Unsupported { what, why });
    }
    // SAFETY: the caller's promise.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
        .map_err(|errno| Error::Transport { step: what, cause: errno.into() })?;
    Ok(fd)
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: gives back the one reference that creation or import took; mappings keep what is behind it alive by themselves.
        released(self.what, unsafe { self.cuda.driver().cuMemRelease(self.raw) });
    }
}

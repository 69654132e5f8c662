//! Host memory that the GPU may read and write, and that another process may map.

use super::Cuda;
use crate::error::{Error, Result};
use cuda_vmm_sys::{CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Shared memory, page-locked and mapped for the device. Other processes and the GPU write to it: it is accessed by atomic words and
/// raw copies only.
pub(crate) struct Pinned {
    cuda: Arc<Cuda>,
    base: NonNull<u8>,
    length: usize,
    device: u64,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to this value, and is only given out as atomic words and as raw pointers, whose users are `unsafe`.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

/// Nobody may change the size: a mapped page that is cut off would end the process that touches it.
fn seals() -> SealFlags {
    SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL
}

impl Pinned {
    /// Makes zeroed memory. The context must be current.
    pub(crate) fn create(cuda: &Arc<Cuda>, length: usize) -> Result<Self> {
        let attempt = || format!("making {length} bytes of shared memory");
        let fd = memfd_create("nccl-gin-soft", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(Error::system(attempt()))?;
        ftruncate(&fd, length as u64).map_err(Error::system(attempt()))?;
        fcntl_add_seals(&fd, seals()).map_err(Error::system(attempt()))?;
        Self::map(cuda, fd, length)
    }

    /// Maps memory that another process made. The context must be current.
    pub(crate) fn open(cuda: &Arc<Cuda>, fd: OwnedFd, length: usize) -> Result<Self> {
        let attempt = || format!("mapping {length} bytes of another rank's shared memory");
        let size = fstat(&fd).map_err(Error::system(attempt()))?.st_size;
        let sealed = fcntl_get_seals(&fd).map_err(Error::system(attempt()))?;
        if size != length as i64 || !sealed.contains(seals()) {
            return Err(Error::System { attempt: attempt(), cause: Errno::INVAL });
        }
        Self::map(cuda, fd, length)
    }

    fn map(cuda: &Arc<Cuda>, fd: OwnedFd, length: usize) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice; the file cannot shrink below it (checked or sealed by the caller).
        let base = unsafe { mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, &fd, 0) }
            .map_err(Error::system(format!("mapping {length} bytes of shared memory")))?;
        let mut pinned = Self {
            cuda: Arc::clone(cuda),
            base: NonNull::new(base.cast())
                .ok_or(Error::System { attempt: "mapping shared memory".into(), cause: Errno::NOMEM })?,
            length,
            device: 0,
            fd,
        };
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        let mut device = 0;
        // SAFETY: the range is mapped whole and stays so until `drop` has unregistered it; `device` is a local.
        unsafe {
            cuda.driver
                .cuMemHostRegister(base, length, flags)
                .map_err(Error::cuda("page-locking shared memory (is RLIMIT_MEMLOCK large enough?)"))?;
            if let Err(error) = cuda.driver.cuMemHostGetDevicePointer(&mut device, base, 0) {
                let _ = cuda.driver.cuMemHostUnregister(base);
                return Err(Error::cuda("mapping shared memory for the device")(error));
            }
        }
        pinned.device = device;
        Ok(pinned)
    }

    /// For the other process.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The word at a byte offset, which must be a multiple of 8 inside the memory: all callers compute it from the layout.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.length, "word {offset} of {}", self.length);
        // SAFETY: aligned (the mapping is by pages) and inside, as just checked; lives as long as `self`; accessed as a word by all.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// `length` bytes at an offset, for raw copies; `None` if they are not inside.
    pub(crate) fn bytes(&self, offset: usize, length: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(length)?;
        if end > self.length {
            return None;
        }
        // SAFETY: inside the mapping, as just checked.
        Some(unsafe { self.base.add(offset) })
    }

    /// The device's address of an offset.
    pub(crate) fn device(&self, offset: usize) -> u64 {
        self.device + offset as u64
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let base = self.base.as_ptr().cast::<c_void>();
        if self.device != 0 {
            let Ok(_entered) = self.cuda.enter("unlocking shared memory") else { return };
            // SAFETY: registered once, by `map`; streams that use it were drained before. If that failed, the mapping is left in place: the
            // GPU must not write to addresses that are something else by then.
            if unsafe { self.cuda.driver.cuMemHostUnregister(base) }.is_err() {
                return;
            }
        }
        // SAFETY: mapped by `map` with this length, and nothing refers to it any more.
        let _ = unsafe { munmap(base, self.length) };
    }
}

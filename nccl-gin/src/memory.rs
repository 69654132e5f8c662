//! Memory that becomes a window.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::library;
use nccl_gin_sys::{Function, Nccl};
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};

/// Device memory whose owner keeps it mapped.
///
/// Implement it for the owner of a mapping (a cuda-vmm range, for example) to make windows of it. A window keeps its owner alive.
///
/// # Safety
/// From construction to drop, `address()..address() + len()` must be memory that is mapped and accessible on the communicator's device,
/// and both methods must return the same values each time.
pub unsafe trait WindowMemory: Send + Sync + 'static {
    /// The first byte, as the device addresses it.
    fn address(&self) -> NonNull<c_void>;

    /// Length in bytes.
    fn len(&self) -> usize;

    /// Whether there is no byte at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Memory that somebody else keeps mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignMemory {
    address: NonNull<c_void>,
    length: usize,
}

// SAFETY: an address and a length; what they stand for is the caller's promise to `new`.
unsafe impl Send for ForeignMemory {}
// SAFETY: as above.
unsafe impl Sync for ForeignMemory {}

impl ForeignMemory {
    /// Memory at an address of the device.
    ///
    /// # Safety
    /// It must stay mapped and accessible on the communicator's device until every window of it has been closed.
    #[must_use]
    pub const unsafe fn new(address: NonNull<c_void>, length: usize) -> Self {
        Self { address, length }
    }
}

// SAFETY: the caller of `new` keeps the memory mapped, and neither field changes.
unsafe impl WindowMemory for ForeignMemory {
    fn address(&self) -> NonNull<c_void> {
        self.address
    }

    fn len(&self) -> usize {
        self.length
    }
}

/// Device memory from NCCL, which can become a window (`ncclMemAlloc`).
///
/// It is freed when it is dropped, which a window of it delays.
pub struct MemAlloc {
    nccl: Nccl,
    device: Device,
    address: NonNull<c_void>,
    length: usize,
}

// SAFETY: the memory belongs to the device, and NCCL frees it from any thread on which the device is current.
unsafe impl Send for MemAlloc {}
// SAFETY: nothing is changed through a shared reference.
unsafe impl Sync for MemAlloc {}

impl MemAlloc {
    /// Allocates at least `length` bytes on `device`. Their contents are undefined.
    ///
    /// Where the device has no virtual memory management NCCL falls back to `cudaMalloc`; such memory cannot become a window, which is
    /// then refused.
    ///
    /// # Errors
    /// [`Error::Argument`] for no bytes at all, NCCL's error (out of memory, no GPU), or [`Error::Nothing`].
    #[doc(alias = "ncclMemAlloc")]
    pub fn new(nccl: &Nccl, device: &Device, length: usize) -> Result<Self> {
        if length == 0 {
            return Err(Error::argument("the length", 0, "at least 1 byte"));
        }
        let attempt = || format!("allocating {length} bytes on CUDA device {}", device.ordinal());
        let _current = device.enter()?;
        let mut address = ptr::null_mut();
        // SAFETY: the output is valid for one write, and the device is current.
        let result = unsafe { nccl.ncclMemAlloc(&mut address, length) }?;
        library::check(nccl, Function::ncclMemAlloc, result, attempt)?;
        let address = NonNull::new(address).ok_or_else(|| Error::Nothing {
            attempt: attempt(),
            function: Function::ncclMemAlloc,
            missing: "memory",
            advice: "see that the device has memory left; NCCL_DEBUG=WARN says more",
        })?;
        Ok(Self { nccl: nccl.clone(), device: device.clone(), address, length })
    }

    /// The device that it is on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }
}

// SAFETY: the memory stays mapped until drop, and neither field changes.
unsafe impl WindowMemory for MemAlloc {
    fn address(&self) -> NonNull<c_void> {
        self.address
    }

    fn len(&self) -> usize {
        self.length
    }
}

impl Drop for MemAlloc {
    #[doc(alias = "ncclMemFree")]
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        // SAFETY: the address came from ncclMemAlloc and is freed once; windows of it are gone, since each keeps its owner alive. A
        // failure (a driver that is shutting down) leaves nothing to be done.
        unsafe { self.nccl.ncclMemFree(self.address.as_ptr()) }.ok();
    }
}

impl fmt::Debug for MemAlloc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemAlloc")
            .field("address", &self.address)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

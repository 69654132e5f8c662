//! A word of host memory that every device reads.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_vmm::Context;
use cuda_vmm::sys::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE};

use super::{Attempt, Result};

/// A page-locked word, 0 at first. Dropping it frees it (`cuMemFreeHost`), when no kernel reads it any more.
#[derive(Debug)]
#[doc(alias = "cuMemFreeHost")]
pub struct PinnedWord {
    context: Context,
    host: *mut c_void,
    device: u64,
}

impl PinnedWord {
    /// Calls `cuMemHostAlloc`.
    ///
    /// # Errors
    /// [`GpuError::Driver`](super::GpuError::Driver).
    #[doc(alias = "cuMemHostAlloc")]
    #[doc(alias = "cuMemHostGetDevicePointer")]
    pub fn new(context: &Context) -> Result<Self> {
        let driver = context.device().cuda().driver();
        let _bound = context.bind()?;
        let mut word = Self { context: context.clone(), host: ptr::null_mut(), device: 0 };
        let flags = CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: `host` is valid for one write, and a context is current. Freed in Drop.
        unsafe { driver.cuMemHostAlloc(&mut word.host, 64, flags) }
            .attempt(|| "allocating page-locked host memory".into())?;
        // SAFETY: `device` is valid for one write; the memory was allocated with DEVICEMAP.
        unsafe { driver.cuMemHostGetDevicePointer(&mut word.device, word.host, 0) }
            .attempt(|| "asking for the device address of host memory".into())?;
        word.set(0);
        Ok(word)
    }

    /// Its address on every device.
    pub fn address(&self) -> u64 {
        self.device
    }

    /// Sets the word, for kernels that acquire it.
    pub fn set(&self, value: u32) {
        // SAFETY: the allocation is larger than a word, aligned to a page, alive, and only accessed atomically.
        unsafe { &*self.host.cast::<AtomicU32>() }.store(value, Ordering::Release);
    }
}

impl Drop for PinnedWord {
    fn drop(&mut self) {
        if self.host.is_null() {
            return;
        }
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: allocated by `new`, freed once.
            let _ = unsafe { self.context.device().cuda().driver().cuMemFreeHost(self.host) };
        }
    }
}

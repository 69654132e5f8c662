//! A stream, and plain work on it.

use std::ptr;
use std::time::{Duration, Instant};

use cuda_vmm::sys::{CUresult, CUstream, CUstream_flags};
use cuda_vmm::{Context, Memory};
use deepep_core::StreamRef;

use super::{Attempt, GpuError, Result};

/// A stream that does not wait for the default stream. Dropping it destroys it once its work is done (`cuStreamDestroy`).
#[derive(Debug)]
#[doc(alias = "cuStreamDestroy")]
pub struct Stream {
    context: Context,
    raw: CUstream,
}

// SAFETY: a stream may be used from any thread; the handle is an address that is never dereferenced here.
unsafe impl Send for Stream {}
// SAFETY: as above; calls on it are thread-safe in the driver.
unsafe impl Sync for Stream {}

impl Stream {
    /// Calls `cuStreamCreate`.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    #[doc(alias = "cuStreamCreate")]
    pub fn new(context: &Context) -> Result<Self> {
        let _bound = context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING.0;
        // SAFETY: `raw` is valid for one write, and a context is current. Destroyed in Drop.
        unsafe { context.device().cuda().driver().cuStreamCreate(&mut raw, flags) }
            .attempt(|| format!("creating a stream on device {}", context.device().ordinal()))?;
        Ok(Self { context: context.clone(), raw })
    }

    /// The context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The raw handle, alive as long as this.
    pub fn as_raw(&self) -> CUstream {
        self.raw
    }

    /// For operations of a buffer on this device.
    pub fn borrow(&self) -> StreamRef<'_> {
        // SAFETY: the stream exists for as long as it is borrowed, and belongs to the primary context of its device.
        unsafe { StreamRef::from_raw(self.raw.cast()) }
    }

    /// Waits until everything enqueued so far has run, without giving the processor away.
    ///
    /// # Errors
    /// [`GpuError::Late`] after `timeout`, [`GpuError::Driver`] with the failure of earlier work.
    #[doc(alias = "cuStreamQuery")]
    pub fn wait(&self, timeout: Duration, what: impl FnOnce() -> String) -> Result<()> {
        let _bound = self.context.bind()?;
        let start = Instant::now();
        loop {
            // SAFETY: the stream is alive, and its context is current.
            match unsafe { self.context.device().cuda().driver().cuStreamQuery(self.raw) } {
                Ok(()) => return Ok(()),
                Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => {
                    if start.elapsed() > timeout {
                        return Err(GpuError::Late { what: what(), seconds: timeout.as_secs_f64() });
                    }
                    std::hint::spin_loop();
                }
                Err(error) => return Err(error).attempt(what),
            }
        }
    }

    /// Enqueues a copy of the first `bytes` bytes by a copy engine.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    ///
    /// # Safety
    /// Both must have that many bytes, be reachable from this device, and live until the copy has run; nothing else writes them meanwhile.
    #[doc(alias = "cuMemcpyAsync")]
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        let _bound = self.context.bind()?;
        // SAFETY: the caller's promise.
        unsafe { self.context.device().cuda().driver().cuMemcpyAsync(to, from, bytes, self.raw) }
            .attempt(|| format!("copying {bytes} bytes from {from:#x} to {to:#x}"))
    }

    /// Enqueues setting all bytes of a memory.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    ///
    /// # Safety
    /// The memory must be on this device and live until this has run; nothing else uses it meanwhile.
    #[doc(alias = "cuMemsetD8Async")]
    pub unsafe fn fill(&self, memory: &dyn Memory, value: u8) -> Result<()> {
        let _bound = self.context.bind()?;
        let (address, bytes) = (memory.address().get(), memory.size());
        // SAFETY: the caller's promise.
        unsafe { self.context.device().cuda().driver().cuMemsetD8Async(address, value, bytes, self.raw) }
            .attempt(|| format!("setting {bytes} bytes at {address:#x}"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.bind() {
            // SAFETY: created by `new`, destroyed once. A failure is that of earlier work, which `wait` reports.
            let _ = unsafe { self.context.device().cuda().driver().cuStreamDestroy(self.raw) };
        }
    }
}

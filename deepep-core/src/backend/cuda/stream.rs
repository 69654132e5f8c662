//! Streams of this crate's own.

use std::ptr;

use cuda_vmm::Context;
use cuda_vmm::sys::{CUresult, CUstream, CUstream_flags};

use super::call_failed;
use crate::error::Result;

/// A stream of this crate's, independent of the device's default stream.
pub(crate) struct Stream {
    context: Context,
    raw: CUstream,
}

// SAFETY: streams may be used from any thread; the handle is an address that is never dereferenced here.
unsafe impl Send for Stream {}
// SAFETY: as above; calls on it are thread-safe in the driver.
unsafe impl Sync for Stream {}

impl Stream {
    pub(crate) fn new(context: &Context) -> Result<Self> {
        let _bound = context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING.0;
        // SAFETY: `raw` is valid for one write, and a context is current. Destroyed in Drop.
        unsafe { context.device().cuda().driver().cuStreamCreate(&mut raw, flags) }
            .map_err(|source| call_failed("creating a stream".into(), source))?;
        Ok(Self { context: context.clone(), raw })
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Whether all of its work has run. Its context is current.
    pub(crate) fn has_run(&self) -> Result<bool> {
        let driver = self.context.device().cuda().driver();
        // SAFETY: the stream is alive.
        match unsafe { driver.cuStreamQuery(self.raw) } {
            Ok(()) => Ok(true),
            Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(source) => Err(call_failed("waiting for a stream".into(), source)),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: created once, destroyed once. The driver lets enqueued work end, and does not wait for it here.
        let _ = unsafe { self.context.device().cuda().driver().cuStreamDestroy(self.raw) };
    }
}

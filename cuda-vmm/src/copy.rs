//! Copies that wait: for setting up, checking and tests. Work on a stream goes through the raw table.

use crate::context::Context;
use crate::error::{Attempt, Result};
use crate::memory::{Memory, check_part, pieces};
use cuda_vmm_sys::CallError;
use std::ptr;

impl Context {
    /// Writes `bytes` into memory at `offset` and waits for it. The device must have been granted access. Kernels that read the
    /// memory at the same time may see some bytes old and some new.
    ///
    /// Calls `cuMemcpyHtoDAsync`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`](crate::Error::OutOfBounds), [`Error::ForeignDriver`](crate::Error::ForeignDriver),
    /// [`Error::Call`](crate::Error::Call).
    #[doc(alias = "cuMemcpyHtoDAsync")]
    pub fn upload(&self, memory: &dyn Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        check_part(memory, "what is written", offset, bytes.len())?;
        let driver = self.device().cuda().driver();
        self.each_piece(memory, offset, bytes.len(), "writing", |address, done, length| {
            // SAFETY: the part lies inside memory that is alive, and the source inside `bytes`; the stream is waited for before
            // `bytes` can go.
            unsafe {
                driver.cuMemcpyHtoDAsync(address, bytes[done..].as_ptr().cast(), length, ptr::null_mut())
            }
        })
    }

    /// Reads memory at `offset` into `bytes`.
    ///
    /// Calls `cuMemcpyDtoHAsync`.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    #[doc(alias = "cuMemcpyDtoHAsync")]
    pub fn download(&self, memory: &dyn Memory, offset: usize, bytes: &mut [u8]) -> Result<()> {
        check_part(memory, "what is read", offset, bytes.len())?;
        let driver = self.device().cuda().driver();
        let target = bytes.as_mut_ptr();
        self.each_piece(memory, offset, bytes.len(), "reading", |address, done, length| {
            // SAFETY: as above; `target` is valid for `done + length` bytes, and nothing else uses `bytes` until the stream has been
            // waited for.
            unsafe { driver.cuMemcpyDtoHAsync(target.add(done).cast(), address, length, ptr::null_mut()) }
        })
    }

    /// Sets `length` bytes of memory at `offset` to one value.
    ///
    /// Calls `cuMemsetD8Async`.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    #[doc(alias = "cuMemsetD8Async")]
    pub fn fill(&self, memory: &dyn Memory, offset: usize, length: usize, value: u8) -> Result<()> {
        check_part(memory, "what is set", offset, length)?;
        let driver = self.device().cuda().driver();
        self.each_piece(memory, offset, length, "setting", |address, _, length| {
            // SAFETY: the part lies inside memory that is alive.
            unsafe { driver.cuMemsetD8Async(address, value, length, ptr::null_mut()) }
        })
    }

    /// Calls `work` with (address, bytes done before, length) for each piece of physical memory, then waits.
    fn each_piece(
        &self,
        memory: &dyn Memory,
        offset: usize,
        length: usize,
        verb: &str,
        mut work: impl FnMut(u64, usize, usize) -> Result<(), CallError>,
    ) -> Result<()> {
        self.device().cuda().check_same(memory.cuda(), "memory")?;
        let _bound = self.bind()?;
        let mut result = Ok(());
        for (at, part) in pieces(memory, offset, length) {
            result = work(memory.address().get() + at as u64, at - offset, part);
            if result.is_err() {
                break;
            }
        }
        // Also after a failure: what was started must not outlive the caller's bytes.
        // SAFETY: the null handle is the current context's default stream.
        let waited = unsafe { self.device().cuda().driver().cuStreamSynchronize(ptr::null_mut()) };
        result.and(waited).attempt(|| format!("{verb} {length} bytes at {} + {offset}", memory.address()))
    }
}

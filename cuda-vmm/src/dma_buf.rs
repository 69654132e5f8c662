//! dma-buf descriptors: how drivers of other devices reach GPU memory.

use crate::context::Context;
use crate::error::{Attempt, Error, Result};
use crate::handle::own_fd;
use crate::memory::{Memory, check_part};
use cuda_vmm_sys::{CUmemRangeHandleType, ffi::c_int};
use std::os::fd::OwnedFd;

/// Size that offset and length of a dma-buf must be multiples of: a page of the host.
fn page_size() -> usize {
    rustix::param::page_size()
}

impl Context {
    /// A dma-buf file descriptor of `length` bytes of memory from `offset` on, both multiples of the host's page size, inside one
    /// piece of physical memory. The memory must stay mapped while the descriptor is used.
    ///
    /// Calls `cuMemGetHandleForAddressRange`.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Misaligned`], [`Error::OutOfBounds`], or [`Error::Call`], for example
    /// `CUDA_ERROR_NOT_SUPPORTED` where the kernel's driver has no dma-buf.
    #[doc(alias = "cuMemGetHandleForAddressRange")]
    pub fn dma_buf(&self, memory: &dyn Memory, offset: usize, length: usize) -> Result<OwnedFd> {
        let granularity = page_size();
        for (what, value) in [("offset of a dma-buf", offset), ("length of a dma-buf", length)] {
            if !value.is_multiple_of(granularity) {
                return Err(Error::Misaligned { what, value, granularity });
            }
        }
        if length == 0 {
            return Err(Error::Zero { what: "length of a dma-buf" });
        }
        check_part(memory, "a dma-buf", offset, length)?;
        let limit = memory.piece_end(offset);
        if offset + length > limit {
            return Err(Error::OutOfBounds { what: "a dma-buf of one segment", offset, length, limit });
        }
        self.device().cuda().check_same(memory.cuda(), "memory")?;
        let _bound = self.bind()?;
        let (mut number, address): (c_int, _) = (-1, memory.address().get() + offset as u64);
        let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // SAFETY: for this kind the driver writes one int, for which `number` is valid; the range is mapped; flags 0.
        unsafe {
            self.device().cuda().driver().cuMemGetHandleForAddressRange(
                std::ptr::from_mut(&mut number).cast(),
                address,
                length,
                kind,
                0,
            )
        }
        .attempt(|| format!("exporting {length} bytes at {} + {offset} as a dma-buf", memory.address()))?;
        // SAFETY: the driver made this descriptor for the caller, who must close it.
        unsafe { own_fd(number, "exporting this memory as a dma-buf") }
    }
}

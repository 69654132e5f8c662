//! Reserved addresses.

use crate::core::Core;
use crate::memory::raw;
use crate::status::{Outcome, code, put, require, write};
use cuda_vmm_sys::CUdeviceptr;
use cuda_vmm_sys::ffi::c_ulonglong;
use std::sync::Arc;

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes.
impl Core {
    pub(crate) unsafe fn cuMemAddressReserve(
        self: &Arc<Self>,
        address: *mut CUdeviceptr,
        size: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: c_ulonglong,
    ) -> Outcome {
        let granularity = self.config.granularity as u64;
        require(!address.is_null() && flags == 0 && size > 0)?;
        require(
            (size as u64).is_multiple_of(granularity) && (alignment == 0 || alignment.is_power_of_two()),
        )?;
        require(hint.is_multiple_of(rustix::param::page_size() as u64))?;
        let alignment = (alignment as u64).max(granularity);
        let start = raw::reserve(size as u64, alignment, hint)?;
        write(&self.space).reservations.insert(start, size as u64);
        // SAFETY: not null, and the caller's contract.
        unsafe { put(address, start) }
    }

    pub(crate) unsafe fn cuMemAddressFree(self: &Arc<Self>, address: CUdeviceptr, size: usize) -> Outcome {
        let mut space = write(&self.space);
        require(space.reservations.get(&address) == Some(&(size as u64)))?;
        // Memory in it must be unmapped first.
        if space.overlaps(address, size as u64) {
            return Err(code::INVALID_VALUE);
        }
        space.reservations.remove(&address);
        raw::release(address, size as u64);
        Ok(())
    }
}

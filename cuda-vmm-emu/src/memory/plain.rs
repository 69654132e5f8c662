//! Plain memory: `cuMemAlloc`, page-locked host memory, and how much there is.

use crate::core::Core;
use crate::memory::backing::{FileKind, Metadata};
use crate::memory::physical::{Location, Physical};
use crate::memory::raw::{self, Protection};
use crate::memory::space::{Kind, Range};
use crate::status::{Outcome, code, put, read, require, write};
use cuda_vmm_sys::CUdeviceptr;
use cuda_vmm_sys::ffi::{c_uint, c_void};
use std::sync::Arc;

/// Where allocations start: as coarse as a device's own.
const ALIGNMENT: u64 = 2 << 20;

fn whole_pages(size: u64) -> Outcome<u64> {
    size.checked_next_multiple_of(rustix::param::page_size() as u64).ok_or(code::OUT_OF_MEMORY)
}

impl Core {
    /// Maps memory at addresses of its own, for the CPU and every device. Returns where, and how many bytes of addresses it takes.
    pub(crate) fn map_alone(&self, memory: &Physical) -> Outcome<(u64, u64)> {
        let size = memory.size();
        let address = raw::reserve(size, ALIGNMENT, 0)?;
        let mapped = raw::map_file(address, size, memory.backing.fd(), 0)
            .and_then(|()| raw::protect(address, size, Protection::ReadWrite));
        match mapped {
            Ok(()) => Ok((address, size)),
            Err(error) => {
                raw::release(address, size);
                Err(error)
            }
        }
    }
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes.
impl Core {
    pub(crate) unsafe fn cuMemAlloc(self: &Arc<Self>, address: *mut CUdeviceptr, size: usize) -> Outcome {
        require(!address.is_null() && size > 0)?;
        let device = self.current_healthy()?;
        let metadata = Metadata::new(FileKind::Plain, whole_pages(size as u64)?);
        let memory = Arc::new(Physical::create(self, Location::Device(device), metadata)?);
        let (start, reserved) = self.map_alone(&memory)?;
        let kind = Kind::Plain { memory, device, reserved };
        write(&self.space).ranges.insert(start, Range { size: size as u64, kind });
        // SAFETY: not null, and the caller's contract.
        unsafe { put(address, start) }
    }

    pub(crate) unsafe fn cuMemFree(self: &Arc<Self>, address: CUdeviceptr) -> Outcome {
        if address == 0 {
            return Ok(());
        }
        self.current()?;
        let device = match read(&self.space).ranges.get(&address) {
            Some(Range { kind: Kind::Plain { device, .. }, .. }) => *device,
            _ => return Err(code::INVALID_VALUE),
        };
        // Work that uses the memory ends first.
        let finished = self.finish_context(device);
        let mut space = write(&self.space);
        match space.ranges.get(&address) {
            Some(Range { kind: Kind::Plain { .. }, .. }) => space.remove_whole(address),
            _ => return Err(code::INVALID_VALUE),
        }
        finished
    }

    pub(crate) unsafe fn cuMemHostAlloc(
        self: &Arc<Self>,
        pointer: *mut *mut c_void,
        size: usize,
        flags: c_uint,
    ) -> Outcome {
        require(!pointer.is_null() && size > 0 && flags & !7 == 0)?;
        let device = self.current_healthy()?;
        let reserved = whole_pages(size as u64)?;
        let start = raw::anonymous(reserved)?;
        let kind = Kind::Host { device, reserved };
        write(&self.space).ranges.insert(start, Range { size: size as u64, kind });
        // SAFETY: not null, and the caller's contract.
        unsafe { put(pointer, start as *mut c_void) }
    }

    pub(crate) unsafe fn cuMemFreeHost(self: &Arc<Self>, pointer: *mut c_void) -> Outcome {
        let address = pointer as u64;
        self.current()?;
        let device = match read(&self.space).ranges.get(&address) {
            Some(Range { kind: Kind::Host { device, .. }, .. }) => *device,
            _ => return Err(code::INVALID_VALUE),
        };
        let finished = self.finish_context(device);
        let mut space = write(&self.space);
        match space.ranges.get(&address) {
            Some(Range { kind: Kind::Host { .. }, .. }) => space.remove_whole(address),
            _ => return Err(code::INVALID_VALUE),
        }
        finished
    }

    pub(crate) unsafe fn cuMemHostRegister(
        self: &Arc<Self>,
        pointer: *mut c_void,
        size: usize,
        flags: c_uint,
    ) -> Outcome {
        let (address, size) = (pointer as u64, size as u64);
        require(!pointer.is_null() && size > 0 && flags & !15 == 0)?;
        require(address.checked_add(size).is_some())?;
        let device = self.current_healthy()?;
        let mut space = write(&self.space);
        if space.overlaps(address, size) {
            let registered = |(_, range): (u64, &Range)| matches!(range.kind, Kind::Registered { .. });
            return match space.at(address) {
                Some(found) if registered(found) => Err(code::HOST_MEMORY_ALREADY_REGISTERED),
                None => Err(code::HOST_MEMORY_ALREADY_REGISTERED),
                Some(_) => Err(code::INVALID_VALUE),
            };
        }
        require(!space.overlaps_reservation(address, size) && raw::is_mapped(address, size))?;
        space.ranges.insert(address, Range { size, kind: Kind::Registered { device } });
        Ok(())
    }

    pub(crate) unsafe fn cuMemHostUnregister(self: &Arc<Self>, pointer: *mut c_void) -> Outcome {
        let address = pointer as u64;
        self.current()?;
        let mut space = write(&self.space);
        match space.ranges.get(&address) {
            Some(Range { kind: Kind::Registered { .. }, .. }) => {
                space.remove_whole(address);
                Ok(())
            }
            _ => Err(code::HOST_MEMORY_NOT_REGISTERED),
        }
    }

    pub(crate) unsafe fn cuMemHostGetDevicePointer(
        self: &Arc<Self>,
        device_pointer: *mut CUdeviceptr,
        pointer: *mut c_void,
        flags: c_uint,
    ) -> Outcome {
        require(flags == 0)?;
        self.current()?;
        match read(&self.space).at(pointer as u64) {
            Some((_, Range { kind: Kind::Host { .. } | Kind::Registered { .. }, .. })) => {}
            _ => return Err(code::INVALID_VALUE),
        }
        // SAFETY: the caller's contract.
        unsafe { put(device_pointer, pointer as u64) }
    }

    pub(crate) unsafe fn cuMemGetInfo(self: &Arc<Self>, free: *mut usize, total: *mut usize) -> Outcome {
        let account = &self.accounts[self.current()?];
        // SAFETY: the caller's contract.
        unsafe {
            put(free, (account.total - account.used()) as usize)?;
            put(total, account.total as usize)
        }
    }
}

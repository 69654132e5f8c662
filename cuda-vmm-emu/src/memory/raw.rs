//! The system calls behind addresses. What they are given was checked by their callers, who own the ranges.

use crate::status::{Outcome, code, os};
use rustix::fd::BorrowedFd;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};
use std::ffi::c_void;
use std::ptr;

/// What the CPU may do at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    None,
    Read,
    ReadWrite,
}

/// Reserves addresses without memory: `size` bytes at a multiple of `alignment` (a power of two), at `hint` if that is free and aligned.
pub(crate) fn reserve(size: u64, alignment: u64, hint: u64) -> Outcome<u64> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    if hint != 0 && hint.is_multiple_of(alignment) {
        // SAFETY: FIXED_NOREPLACE takes only addresses that nothing uses.
        let placed = unsafe {
            mmap_anonymous(
                hint as *mut c_void,
                size as usize,
                ProtFlags::empty(),
                flags | MapFlags::FIXED_NOREPLACE,
            )
        };
        match placed {
            Ok(address) if address as u64 == hint => return Ok(hint),
            // A kernel that does not know the flag takes the address as a hint only.
            Ok(elsewhere) => release(elsewhere as u64, size),
            Err(_) => {}
        }
    }
    let total = size.checked_add(alignment).ok_or(code::OUT_OF_MEMORY)?;
    // SAFETY: without FIXED, only free addresses are taken.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), total as usize, ProtFlags::empty(), flags) }
        .map_err(|_| code::OUT_OF_MEMORY)? as u64;
    let aligned = start.next_multiple_of(alignment);
    if aligned > start {
        release(start, aligned - start);
    }
    let (end, kept) = (start + total, aligned + size);
    if end > kept {
        release(kept, end - kept);
    }
    Ok(aligned)
}

/// Takes addresses of this emulator out of the process.
pub(crate) fn release(address: u64, size: u64) {
    // SAFETY: the range is this emulator's: it was mapped by `reserve` or `anonymous` and is not used from here on. Failure is impossible
    // for such a range but for a lack of kernel memory, in which the addresses stay taken.
    let _ = unsafe { munmap(address as *mut c_void, size as usize) };
}

/// Maps a file over reserved addresses, with no access.
pub(crate) fn map_file(address: u64, size: u64, file: BorrowedFd<'_>, offset: u64) -> Outcome {
    let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
    // SAFETY: the caller owns the range as reserved addresses, in which no memory is mapped; the file is sealed against shrinking and
    // holds `offset + size` bytes.
    unsafe { mmap(address as *mut c_void, size as usize, ProtFlags::empty(), flags, file, offset) }
        .map(drop)
        .map_err(os)
}

/// Sets what the CPU may do in a mapped range.
pub(crate) fn protect(address: u64, size: u64, protection: Protection) -> Outcome {
    let flags = match protection {
        Protection::None => MprotectFlags::empty(),
        Protection::Read => MprotectFlags::READ,
        Protection::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
    };
    // SAFETY: the caller owns the range as mapped memory, which only raw pointers refer to.
    unsafe { mprotect(address as *mut c_void, size as usize, flags) }.map_err(os)
}

/// Puts reserved addresses without memory back in the place of a mapping.
pub(crate) fn unmap(address: u64, size: u64) -> Outcome {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the caller owns the range as a mapping that it takes away; who still uses its addresses faults, as on a device.
    unsafe { mmap_anonymous(address as *mut c_void, size as usize, ProtFlags::empty(), flags) }
        .map(drop)
        .map_err(os)
}

/// Fresh zeroed memory that the CPU may use.
pub(crate) fn anonymous(size: u64) -> Outcome<u64> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: without FIXED, only free addresses are taken.
    unsafe { mmap_anonymous(ptr::null_mut(), size as usize, protection, flags) }
        .map(|address| address as u64)
        .map_err(os)
}

/// Whether all pages of a range are mapped in this process.
pub(crate) fn is_mapped(address: u64, size: u64) -> bool {
    let page = rustix::param::page_size() as u64;
    let start = address / page * page;
    let Some(end) = address.checked_add(size) else { return false };
    // SAFETY: an asynchronous msync changes nothing; for addresses that are not mapped it fails with ENOMEM.
    unsafe { rustix::mm::msync(start as *mut c_void, (end - start) as usize, rustix::mm::MsyncFlags::ASYNC) }
        .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_honour_alignment_and_hint() {
        let big = 1 << 30;
        let address = reserve(4 << 20, big, 0).unwrap();
        assert_eq!(address % big, 0);
        assert!(is_mapped(address, 4 << 20));
        release(address, 4 << 20);
        // Far from where a process maps anything by itself.
        let hint = 0x0fff_0000_0000;
        assert!(!is_mapped(hint, 1));
        assert_eq!(reserve(2 << 20, 2 << 20, hint), Ok(hint));
        let other = reserve(2 << 20, 2 << 20, hint).unwrap();
        assert_ne!(other, hint);
        release(hint, 2 << 20);
        release(other, 2 << 20);
        assert!(!is_mapped(hint, 1));
        assert_eq!(reserve(1 << 60, 1 << 21, 0), Err(code::OUT_OF_MEMORY));
        assert_eq!(reserve(u64::MAX, 1 << 21, 0), Err(code::OUT_OF_MEMORY));
    }
}

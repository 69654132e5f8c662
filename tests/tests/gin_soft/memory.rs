//! Memory of a test.

use crate::harness::{MIB, Rank};
use cuda_vmm_emu::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemLocation, CUmemLocationType,
};
use std::sync::atomic::{AtomicU64, Ordering};

/// Emulated device memory is in the process's own address space: the test looks at it directly, as a kernel would.
#[derive(Clone, Copy)]
pub struct Memory {
    pub base: u64,
    pub size: usize,
}

impl Memory {
    /// On this rank's device.
    pub fn device(rank: &Rank, size: usize, shareable: bool) -> Self {
        let location =
            CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: rank.device() };
        Self::segments(rank, &[(size, location)], shareable)
    }

    /// Allocations one behind the other.
    pub fn segments(rank: &Rank, parts: &[(usize, CUmemLocation)], shareable: bool) -> Self {
        let size = parts.iter().map(|(size, _)| size).sum();
        let mut base: CUdeviceptr = 0;
        let device =
            CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: rank.device() };
        let access = CUmemAccessDesc {
            location: device,
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: all pointers are to locals; each allocation is mapped whole into the reservation, and released once it is.
        unsafe {
            rank.driver.cuMemAddressReserve(&mut base, size, 2 * MIB, 0, 0).unwrap();
            let mut at = base;
            for &(length, location) in parts {
                let types = if shareable {
                    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                } else {
                    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
                };
                let property = CUmemAllocationProp {
                    type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
                    location,
                    requestedHandleTypes: types,
                    ..CUmemAllocationProp::default()
                };
                let mut handle = 0;
                rank.driver.cuMemCreate(&mut handle, length, &property, 0).unwrap();
                rank.driver.cuMemMap(at, length, 0, handle, 0).unwrap();
                rank.driver.cuMemRelease(handle).unwrap();
                rank.driver.cuMemSetAccess(at, length, &access, 1).unwrap();
                at += length as u64;
            }
        }
        Self { base, size }
    }

    pub fn free(self, rank: &Rank) {
        // SAFETY: the whole reservation of `segments`, used no more.
        unsafe {
            rank.driver.cuMemUnmap(self.base, self.size).unwrap();
            rank.driver.cuMemAddressFree(self.base, self.size).unwrap();
        }
    }

    /// Pageable host memory, which lives until the process ends.
    pub fn host(size: usize) -> Self {
        let memory: &'static mut [u64] = Vec::leak(vec![0u64; size / 8]);
        Self { base: memory.as_mut_ptr() as u64, size }
    }

    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.size);
        // SAFETY: inside mapped memory, aligned; the emulated GPU accesses words atomically as well.
        unsafe { AtomicU64::from_ptr((self.base as *mut u64).byte_add(offset)) }
    }

    pub fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    pub fn store(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    pub fn fill(&self, offset: usize, size: usize, pattern: impl Fn(usize) -> u8) {
        assert!(offset + size <= self.size);
        for index in 0..size {
            // SAFETY: inside mapped memory; nobody else uses these bytes at the moment (the tests see to it).
            unsafe { ((self.base as usize + offset + index) as *mut u8).write_volatile(pattern(index)) };
        }
    }

    #[track_caller]
    pub fn check(&self, offset: usize, size: usize, what: &str, pattern: impl Fn(usize) -> u8) {
        assert!(offset + size <= self.size);
        for index in 0..size {
            // SAFETY: as above.
            let found = unsafe { ((self.base as usize + offset + index) as *const u8).read_volatile() };
            assert_eq!(found, pattern(index), "{what}: byte {index} of {size} at {offset}");
        }
    }
}

/// Bytes that tell who wrote them, and when.
pub fn pattern(rank: usize, salt: usize) -> impl Fn(usize) -> u8 {
    move |index| (index * 131 + (index >> 8) * 7 + rank * 29 + salt * 17 + 3) as u8
}

//! The status block of a rank: pinned host memory that its kernels write and its host reads, without waiting for either.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use cuda_vmm::Context;
use cuda_vmm::sys::CallError;

use super::call_failed;
use crate::error::Result;
use crate::layout::{RecordKind, StatusLayout, StatusRecord};

/// `cuMemHostAlloc` flags: usable from every context, and mapped for devices.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

/// Pinned memory with the layout of a status block.
pub(crate) struct StatusBlock {
    context: Context,
    host: NonNull<u8>,
    device: u64,
    layout: StatusLayout,
}

// SAFETY: the memory is shared with the device anyway; the host reads it through atomics and volatile loads only.
unsafe impl Send for StatusBlock {}
// SAFETY: as above.
unsafe impl Sync for StatusBlock {}

impl StatusBlock {
    /// Allocates and zeroes a block.
    pub(crate) fn new(context: &Context, layout: StatusLayout) -> Result<Self> {
        let driver = context.device().cuda().driver();
        let _bound = context.bind()?;
        let failed =
            |source: CallError| call_failed(format!("pinning {} bytes for status", layout.bytes), source);
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is valid for one write, and a context is current.
        unsafe { driver.cuMemHostAlloc(&mut raw, layout.bytes, PORTABLE_AND_MAPPED) }.map_err(failed)?;
        let host = NonNull::new(raw.cast::<u8>()).unwrap_or(NonNull::dangling());
        let mut block = Self { context: context.clone(), host, device: 0, layout };
        // SAFETY: the driver gave that many bytes, page-aligned; nobody else knows them yet.
        unsafe { host.as_ptr().write_bytes(0, layout.bytes) };
        // SAFETY: the address is that of a mapped pinned allocation.
        unsafe { driver.cuMemHostGetDevicePointer(&mut block.device, raw, 0) }.map_err(failed)?;
        Ok(block)
    }

    /// Its address for kernels.
    pub(crate) fn device_address(&self) -> u64 {
        self.device
    }

    /// The newest record of a kind.
    pub(crate) fn report(&self, kind: RecordKind) -> Option<StatusRecord> {
        // SAFETY: the record lies inside the block, aligned to 128 bytes; its first word is the sequence.
        let sequence =
            unsafe { AtomicU32::from_ptr(self.host.as_ptr().add(self.layout.record(kind)).cast()) };
        loop {
            let before = sequence.load(Ordering::Acquire);
            if before == 0 {
                return None;
            }
            // SAFETY: as above. The device may be writing a newer record; the sequence tells.
            let record = unsafe { ptr::read_volatile(sequence.as_ptr().cast::<StatusRecord>()) };
            fence(Ordering::Acquire);
            if sequence.load(Ordering::Relaxed) == before && record.sequence == before {
                return Some(record);
            }
        }
    }

    /// A cell of the exact counts (see [`CountsLayout`](crate::layout::CountsLayout)), once the call with this tag has written it.
    pub(crate) fn count(&self, cell: usize, tag: u32) -> Option<u32> {
        if cell >= (self.layout.bytes - self.layout.counts) / 8 {
            return None;
        }
        // SAFETY: the cell lies inside the block and is 8-byte aligned.
        let cell = unsafe {
            AtomicU64::from_ptr(self.host.as_ptr().add(self.layout.counts).cast::<u64>().add(cell))
        };
        let value = cell.load(Ordering::Acquire);
        ((value >> 32) as u32 == tag).then_some(value as u32)
    }
}

impl Drop for StatusBlock {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        // SAFETY: allocated once by cuMemHostAlloc, freed once; whoever drops the block has waited for its kernels.
        let _ = unsafe { self.context.device().cuda().driver().cuMemFreeHost(self.host.as_ptr().cast()) };
    }
}

//! The status block of a rank: pinned host memory that its kernels write and its host reads, without waiting for either.

use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use cuda_vmm::Context;

use super::pinned::PinnedMemory;
use crate::error::Result;
use crate::layout::{RecordKind, StatusLayout, StatusRecord};

/// Times that a record which is being written is read again.
const READS: usize = 1000;

/// Pinned memory with the layout of a status block.
pub(crate) struct StatusBlock {
    memory: PinnedMemory,
    layout: StatusLayout,
}

impl StatusBlock {
    /// Allocates and zeroes a block.
    pub(crate) fn new(context: &Context, layout: StatusLayout) -> Result<Self> {
        Ok(Self { memory: PinnedMemory::new(context, layout.bytes)?, layout })
    }

    /// Its address for kernels.
    pub(crate) fn device_address(&self) -> u64 {
        self.memory.device()
    }

    /// The newest record of a kind.
    pub(crate) fn report(&self, kind: RecordKind) -> Option<StatusRecord> {
        // SAFETY: the record lies inside the block, aligned to 128 bytes; its first word is the sequence.
        let sequence =
            unsafe { AtomicU32::from_ptr(self.memory.host().as_ptr().add(self.layout.record(kind)).cast()) };
        // Whoever asks will ask again: a record that keeps changing is not waited for.
        for _ in 0..READS {
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
        None
    }

    /// A cell of the exact counts (see [`CountsLayout`](crate::layout::CountsLayout)), once the call with this tag has written it.
    pub(crate) fn count(&self, cell: usize, tag: u32) -> Option<u32> {
        if cell >= (self.layout.bytes - self.layout.counts) / 8 {
            return None;
        }
        // SAFETY: the cell lies inside the block and is 8-byte aligned.
        let cell = unsafe {
            AtomicU64::from_ptr(self.memory.host().as_ptr().add(self.layout.counts).cast::<u64>().add(cell))
        };
        let value = cell.load(Ordering::Acquire);
        ((value >> 32) as u32 == tag).then_some(value as u32)
    }
}

/// Writes a record as a kernel does: the sequence last.
///
/// # Safety
/// `at` is the place of a record in a status block.
#[cfg(test)]
pub(super) unsafe fn write_record(at: *mut u8, record: StatusRecord) {
    // SAFETY: the caller's promise.
    unsafe {
        let sequence = AtomicU32::from_ptr(at.cast());
        sequence.store(0, Ordering::Release);
        fence(Ordering::SeqCst);
        ptr::write_volatile(at.cast::<StatusRecord>(), StatusRecord { sequence: 0, ..record });
        sequence.store(record.sequence, Ordering::Release);
    }
}

/// What kernels do, for tests without any.
#[cfg(test)]
impl StatusBlock {
    /// Writes a record.
    pub(super) fn write_record(&self, kind: RecordKind, record: StatusRecord) {
        // SAFETY: the record lies inside the block, aligned; readers take it only when the sequence says that it is whole.
        unsafe { write_record(self.memory.host().as_ptr().add(self.layout.record(kind)), record) };
    }

    /// Writes a cell of the exact counts.
    pub(super) fn write_count(&self, cell: usize, tag: u32, value: u32) {
        // SAFETY: tests write cells that the layout has.
        let cell = unsafe {
            AtomicU64::from_ptr(self.memory.host().as_ptr().add(self.layout.counts).cast::<u64>().add(cell))
        };
        cell.store(u64::from(tag) << 32 | u64::from(value), Ordering::Release);
    }
}

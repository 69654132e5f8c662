//! One rank's view of the symmetric heap: where every rank's copy of an offset lies.

use std::any::Any;
use std::fmt;
use std::ops::Range;

use super::Segments;
use crate::error::{Error, Result};
use crate::tensor::Space;

/// The symmetric heap as one rank sees it: a range of the same layout on every rank, all of them mapped here.
///
/// An *offset* means the same thing on every rank; an address is valid on this rank only.
pub struct Heap {
    rank: usize,
    bases: Vec<u64>,
    bytes: usize,
    /// Kind of the segments, and bytes of device memory and of each host segment.
    segments: (Segments, usize, usize),
    space: Space,
    /// Unmaps and frees when dropped.
    memory: Box<dyn Any + Send + Sync>,
}

impl Heap {
    /// A heap of memory that `memory` owns.
    ///
    /// # Safety
    /// For as long as `memory` lives, the segments must lie one after the other from each base, be mapped for the processor of `space`, readable and writable,
    /// aligned to 256 bytes, and be zero at first; bases of different ranks must be different memory.
    pub(crate) unsafe fn from_parts(
        rank: usize,
        bases: Vec<u64>,
        segments: (Segments, usize, usize),
        space: Space,
        memory: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let (kind, device_bytes, host_bytes) = segments;
        let bytes = device_bytes + kind.host_segments(bases.len()) * host_bytes;
        Self { rank, bases, bytes, segments, space, memory }
    }

    /// What owns the memory, if it is of this type.
    pub(super) fn owner<T: Any>(&self) -> Option<&T> {
        self.memory.downcast_ref()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.bases.len()
    }

    /// Bytes of each rank's range.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Which segments a range is made of.
    pub fn segments(&self) -> Segments {
        self.segments.0
    }

    /// Bytes of device memory at the start of each range.
    pub fn device_bytes(&self) -> usize {
        self.segments.1
    }

    /// Where a rank's host memory lies here, as addresses; `None` if there is no host memory or no such rank.
    pub fn host_memory(&self, rank: usize) -> Option<Range<u64>> {
        let (kind, device_bytes, host_bytes) = self.segments;
        let base = *self.bases.get(rank)?;
        let start = match kind {
            Segments::Device => return None,
            Segments::Elastic => base + device_bytes as u64,
            // In the own range: it holds everybody's.
            Segments::HybridElastic => self.base() + (device_bytes + rank * host_bytes) as u64,
        };
        Some(start..start + host_bytes as u64)
    }

    /// Which processor can use the addresses.
    pub fn space(&self) -> Space {
        self.space
    }

    /// Where this rank's range starts.
    pub fn base(&self) -> u64 {
        self.bases[self.rank]
    }

    /// Where each rank's range starts here, by rank.
    pub fn bases(&self) -> &[u64] {
        &self.bases
    }

    /// Address here of an offset in a rank's range.
    ///
    /// # Errors
    /// [`Invalid`](Error::Invalid) for a rank or an offset that isn't there.
    pub fn address(&self, rank: usize, offset: usize) -> Result<u64> {
        let base = self.bases.get(rank).ok_or_else(|| {
            Error::invalid("rank", rank, format!("the heap has {} ranks", self.bases.len()))
        })?;
        if offset >= self.bytes {
            return Err(Error::invalid("offset", offset, format!("a rank's range has {} bytes", self.bytes)));
        }
        Ok(base + offset as u64)
    }

    /// The rank and offset of an address in any rank's range; `None` if it lies in none.
    pub fn locate(&self, address: u64) -> Option<(usize, usize)> {
        self.bases.iter().enumerate().find_map(|(rank, &base)| {
            let offset = address.checked_sub(base)?;
            (offset < self.bytes as u64).then_some((rank, offset as usize))
        })
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap")
            .field("rank", &self.rank)
            .field("ranks", &self.bases.len())
            .field("bytes", &self.bytes)
            .field("space", &self.space)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_and_addresses() {
        // SAFETY: the addresses are only computed with, never used.
        let heap = unsafe {
            let segments = (Segments::Elastic, 0x600, 0x200);
            Heap::from_parts(1, vec![0x1000, 0x9000], segments, Space::Host, Box::new(()))
        };
        assert_eq!((heap.base(), heap.bytes(), heap.device_bytes()), (0x9000, 0x800, 0x600));
        assert_eq!(heap.host_memory(0), Some(0x1600..0x1800));
        assert_eq!(heap.host_memory(2), None);
        assert_eq!(heap.address(0, 0x7ff).unwrap(), 0x17ff);
        assert_eq!(heap.locate(0x17ff), Some((0, 0x7ff)));
        assert_eq!(heap.locate(0x9000), Some((1, 0)));
        assert_eq!(heap.locate(0x1800), None);
        assert_eq!(heap.locate(0), None);
        assert!(heap.address(0, 0x800).is_err());
        assert!(heap.address(2, 0).is_err());
    }
}

//! One rank's view of the symmetric heap: where every rank's copy of an offset lies.

use std::any::Any;
use std::fmt;

use crate::error::{Error, Result};
use crate::tensor::Space;

/// The symmetric heap as one rank sees it: a range of the same layout on every rank, all of them mapped here.
///
/// An *offset* means the same thing on every rank; an address is valid on this rank only.
pub struct Heap {
    rank: usize,
    bases: Vec<u64>,
    bytes: usize,
    space: Space,
    /// Unmaps and frees when dropped.
    _memory: Box<dyn Any + Send + Sync>,
}

impl Heap {
    /// A heap of memory that `memory` owns.
    ///
    /// # Safety
    /// For as long as `memory` lives, `bytes` bytes from each base must be mapped for the processor of `space`, readable and writable,
    /// aligned to 256 bytes, and be zero at first; bases of different ranks must be different memory.
    pub(crate) unsafe fn from_parts(
        rank: usize,
        bases: Vec<u64>,
        bytes: usize,
        space: Space,
        memory: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { rank, bases, bytes, space, _memory: memory }
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
        let heap = unsafe { Heap::from_parts(1, vec![0x1000, 0x9000], 0x800, Space::Host, Box::new(())) };
        assert_eq!(heap.base(), 0x9000);
        assert_eq!(heap.address(0, 0x7ff).unwrap(), 0x17ff);
        assert_eq!(heap.locate(0x17ff), Some((0, 0x7ff)));
        assert_eq!(heap.locate(0x9000), Some((1, 0)));
        assert_eq!(heap.locate(0x1800), None);
        assert_eq!(heap.locate(0), None);
        assert!(heap.address(0, 0x800).is_err());
        assert!(heap.address(2, 0).is_err());
    }
}

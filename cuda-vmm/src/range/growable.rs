//! A range that grows and shrinks in place.

use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::granularity::{Granularities, Granularity};
use crate::location::Grant;
use crate::memory::{DeviceAddress, Memory};
use crate::physical::PhysicalMemory;
use crate::properties::Properties;
use crate::reservation::{Mapping, Reservation};

/// Memory of one kind that reserves many addresses and maps only as much as is needed: it grows and shrinks without moving, so that
/// addresses which kernels hold stay valid.
///
/// It grows in chunks of one size, each a physical allocation of its own.
#[derive(Debug)]
pub struct GrowableRange {
    reservation: Reservation,
    properties: Properties,
    chunk: usize,
    grants: Vec<Grant>,
    chunks: Vec<Mapping>,
}

impl GrowableRange {
    /// Reserves addresses for at most `capacity` bytes, a multiple of `chunk`, which is a multiple of the minimum
    /// [granularity](Granularities::of). Nothing is mapped yet. Every chunk will be open to `grants`.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Misaligned`], [`Error::UnknownDevice`], [`Error::AccessNotPossible`], or [`Error::Call`].
    pub fn new(
        cuda: &Cuda,
        properties: Properties,
        capacity: usize,
        chunk: usize,
        grants: &[Grant],
    ) -> Result<Self> {
        let granularity = Granularities::of(cuda, &properties)?.minimum;
        granularity.check("chunk of a growable range", chunk)?;
        check_multiple("capacity of a growable range", capacity, chunk)?;
        if capacity == 0 {
            return Err(Error::Zero { what: "capacity of a growable range" });
        }
        Grant::check(cuda, grants, std::iter::once(properties.location()))?;
        let alignment = Granularity::new(granularity.bytes())?;
        let reservation = Reservation::new(cuda, capacity, alignment)?;
        Ok(Self { reservation, properties, chunk, grants: grants.to_vec(), chunks: Vec::new() })
    }

    /// First address; it never changes.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.reservation.address()
    }

    /// Mapped bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.chunks.len() * self.chunk
    }

    /// Reserved bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.reservation.size()
    }

    /// Bytes that it grows and shrinks by.
    #[must_use]
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// The mapped chunks in the order of their addresses.
    #[must_use]
    pub fn chunks(&self) -> &[Mapping] {
        &self.chunks
    }

    /// Opens every chunk, those that are mapped and those to come, to more locations.
    ///
    /// Calls `cuMemSetAccess`.
    ///
    /// # Errors
    /// As [`Mapping::set_access`]. If the driver refuses, chunks before the one that failed keep the new access, and chunks to come
    /// are not opened.
    #[doc(alias = "cuMemSetAccess")]
    pub fn set_access(&mut self, grants: &[Grant]) -> Result<()> {
        Grant::check(self.reservation.cuda(), grants, std::iter::once(self.properties.location()))?;
        self.chunks.iter().try_for_each(|chunk| chunk.set_access(grants))?;
        // The last word counts for each location.
        self.grants.retain(|old| grants.iter().all(|new| new.location != old.location));
        self.grants.extend_from_slice(grants);
        Ok(())
    }

    /// Grows to `size` bytes, a multiple of the chunk. A range that is as large already stays as it is.
    ///
    /// # Errors
    /// [`Error::Misaligned`], [`Error::OutOfBounds`] beyond the capacity, or [`Error::Call`], for example when memory is
    /// exhausted; the range then has the size it had.
    pub fn grow_to(&mut self, size: usize) -> Result<()> {
        check_multiple("size of a growable range", size, self.chunk)?;
        if size > self.capacity() {
            let (offset, limit) = (self.size(), self.capacity());
            let length = size.saturating_sub(offset);
            return Err(Error::OutOfBounds { what: "growth", offset, length, limit });
        }
        let before = self.chunks.len();
        self.chunks.reserve((size / self.chunk).saturating_sub(before));
        while self.size() < size {
            match self.next_chunk() {
                Ok(mapping) => self.chunks.push(mapping),
                Err(error) => {
                    self.chunks.truncate(before);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn next_chunk(&self) -> Result<Mapping> {
        let memory = PhysicalMemory::create(self.reservation.cuda(), self.chunk, &self.properties)?;
        let mapping = self.reservation.map(self.size(), &memory)?;
        mapping.set_access(&self.grants)?;
        Ok(mapping)
    }

    /// Shrinks to `size` bytes, a multiple of the chunk, giving the memory behind it back. Nothing on any device may still use
    /// it. A range that is as small already stays as it is.
    ///
    /// # Errors
    /// [`Error::Misaligned`]; [`Error::StillShared`] if somebody holds a clone of a chunk's mapping, or [`Error::Call`]: the range is
    /// then shrunk up to that chunk.
    pub fn shrink_to(&mut self, size: usize) -> Result<()> {
        check_multiple("size of a growable range", size, self.chunk)?;
        while self.size() > size {
            let Some(last) = self.chunks.pop() else { break };
            if let Err(rejected) = last.unmap() {
                self.chunks.push(rejected.object);
                return Err(rejected.error);
            }
        }
        Ok(())
    }
}

fn check_multiple(what: &'static str, value: usize, granularity: usize) -> Result<()> {
    if value.is_multiple_of(granularity) {
        Ok(())
    } else {
        Err(Error::Misaligned { what, value, granularity })
    }
}

impl Memory for GrowableRange {
    fn address(&self) -> DeviceAddress {
        self.address()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn cuda(&self) -> &Cuda {
        self.reservation.cuda()
    }

    fn piece_end(&self, offset: usize) -> usize {
        offset / self.chunk * self.chunk + self.chunk
    }
}

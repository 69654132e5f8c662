//! Ranges of virtual addresses, and physical memory mapped into them.

use crate::cuda::Cuda;
use crate::error::{Attempt, Error, Result};
use crate::granularity::Granularity;
use crate::location::{Access, Grant, Location};
use crate::memory::{DeviceAddress, Memory};
use crate::physical::PhysicalMemory;
use crate::placed::Placed;
use crate::properties::Properties;
use crate::release::released;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// A reserved range of virtual addresses, the same for the CPU and every device. It uses no memory until something is
/// [mapped](Self::map) into it.
///
/// Clones share the range; mappings hold a clone, so that it is freed after the last of them.
#[derive(Clone, Debug)]
pub struct Reservation {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    cuda: Cuda,
    base: u64,
    size: usize,
    /// Length of each mapping by its offset, in bytes.
    mapped: Mutex<BTreeMap<usize, usize>>,
}

impl Reservation {
    /// Reserves `size` bytes of addresses, a multiple of the granularity of what is to be mapped, aligned to at least that granularity.
    ///
    /// Calls `cuMemAddressReserve`.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Misaligned`], or [`Error::Call`] if the address space is full.
    #[doc(alias = "cuMemAddressReserve")]
    pub fn new(cuda: &Cuda, size: usize, alignment: Granularity) -> Result<Self> {
        alignment.check("size of a reservation", size)?;
        let mut base = 0;
        // SAFETY: `base` is valid for one write; address 0 lets the driver choose, flags must be 0. Freed in Drop.
        unsafe { cuda.driver().cuMemAddressReserve(&mut base, size, alignment.bytes(), 0, 0) }
            .attempt(|| format!("reserving {size} bytes of addresses, aligned to {alignment}"))?;
        let mapped = Mutex::default();
        Ok(Self { inner: Arc::new(Inner { cuda: cuda.clone(), base, size, mapped }) })
    }

    /// First address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        DeviceAddress::new(self.inner.base)
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// The driver.
    #[must_use]
    pub fn cuda(&self) -> &Cuda {
        &self.inner.cuda
    }

    /// Bytes that are mapped now.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        self.inner.mapped().values().sum()
    }

    /// Maps all of `memory` at `offset` bytes. Nobody may use it before [`Mapping::set_access`].
    ///
    /// Calls `cuMemMap`.
    ///
    /// # Errors
    /// [`Error::Misaligned`] if `offset` is no multiple of the memory's granularity, [`Error::OutOfBounds`], [`Error::Overlap`],
    /// [`Error::ForeignDriver`], or [`Error::Call`].
    #[doc(alias = "cuMemMap")]
    pub fn map(&self, offset: usize, memory: &PhysicalMemory) -> Result<Mapping> {
        let inner = &self.inner;
        inner.cuda.check_same(memory.cuda(), "physical memory")?;
        inner.cuda.granularities(memory.properties())?.minimum.check_offset("offset of a mapping", offset)?;
        let length = memory.size();
        let what = || format!("mapping {length} bytes of {} at offset {offset}", memory.location());
        // SAFETY: the handle is that of `memory`, which is `length` bytes long and is kept beside the placement.
        let placed = unsafe { Placed::new(self, offset, length, memory.as_raw(), what) }?;
        Ok(Mapping { inner: Arc::new(MappingInner { placed, memory: memory.clone() }) })
    }

    /// Notes that a range is mapped, or about to be.
    pub(crate) fn claim(&self, offset: usize, length: usize) -> Result<()> {
        let limit = self.size();
        if offset.checked_add(length).is_none_or(|end| end > limit) {
            return Err(Error::OutOfBounds { what: "a mapping", offset, length, limit });
        }
        let mut mapped = self.inner.mapped();
        if let Some((&mapped_offset, &mapped_length)) = mapped.range(..offset + length).next_back()
            && mapped_offset + mapped_length > offset
        {
            return Err(Error::Overlap { offset, length, mapped_offset, mapped_length });
        }
        mapped.insert(offset, length);
        Ok(())
    }

    /// Ends the claim that starts at an offset.
    pub(crate) fn unclaim(&self, offset: usize) {
        self.inner.mapped().remove(&offset);
    }
}

impl Inner {
    fn mapped(&self) -> std::sync::MutexGuard<'_, BTreeMap<usize, usize>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: exactly what was reserved; every mapping holds the reservation, so that nothing is mapped any more.
        released("reservation", unsafe { self.cuda.driver().cuMemAddressFree(self.base, self.size) });
    }
}

/// Physical memory mapped into a reservation.
///
/// Clones share the mapping; the last one unmaps it. [`unmap`](Self::unmap) does so on the spot and returns the memory.
#[derive(Clone, Debug)]
pub struct Mapping {
    inner: Arc<MappingInner>,
}

#[derive(Debug)]
struct MappingInner {
    // Before the memory: unmapped first.
    placed: Placed,
    memory: PhysicalMemory,
}

impl Mapping {
    /// First address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.inner.placed.address()
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.inner.placed.size()
    }

    /// Offset in the reservation, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.inner.placed.offset()
    }

    /// The reservation.
    #[must_use]
    pub fn reservation(&self) -> &Reservation {
        self.inner.placed.reservation()
    }

    /// The physical memory.
    #[must_use]
    pub fn memory(&self) -> &PhysicalMemory {
        &self.inner.memory
    }

    fn cuda(&self) -> &Cuda {
        self.inner.memory.cuda()
    }

    /// Sets what each named location may do with the mapping; other locations keep what they have. The CPU can be granted
    /// access to host memory only.
    ///
    /// Calls `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`Error::Zero`] for an empty list, [`Error::UnknownDevice`], [`Error::AccessNotPossible`], or [`Error::Call`].
    #[doc(alias = "cuMemSetAccess")]
    pub fn set_access(&self, grants: &[Grant]) -> Result<()> {
        Grant::check(self.cuda(), grants, std::iter::once(self.inner.memory.location()))?;
        self.inner.placed.set_access(grants, || self.inner.memory.location().to_string())
    }

    /// What a location may do with the mapping.
    ///
    /// Calls `cuMemGetAccess`.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] or [`Error::Call`].
    #[doc(alias = "cuMemGetAccess")]
    pub fn access(&self, location: Location) -> Result<Access> {
        self.inner.placed.access(location)
    }

    /// Where the CPU finds host memory: `None` for memory of a device. Access must have been [granted](Grant::host_numa) before
    /// anything is read or written through it.
    #[must_use]
    pub fn host_pointer(&self) -> Option<NonNull<u8>> {
        let address = self.address().get() as usize as *mut u8;
        NonNull::new(address).filter(|_| self.inner.memory.location().is_host())
    }

    /// Unmaps the memory and returns it. Nothing on any device may still use the addresses.
    ///
    /// Calls `cuMemUnmap`.
    ///
    /// # Errors
    /// [`Rejected`] with the mapping: [`Error::StillShared`] if a clone of it exists, [`Error::Call`] if the driver refuses.
    #[doc(alias = "cuMemUnmap")]
    pub fn unmap(self) -> Result<PhysicalMemory, Rejected<Self>> {
        let holders = Arc::strong_count(&self.inner) - 1;
        let mut inner = match Arc::try_unwrap(self.inner) {
            Ok(inner) => inner,
            Err(inner) => {
                // Another holder may have gone in between: at least one is left.
                let error = Error::StillShared { what: "a mapping", holders: holders.max(1) };
                return Err(Rejected { object: Self { inner }, error });
            }
        };
        match inner.placed.unmap() {
            Ok(()) => Ok(inner.memory.clone()),
            Err(error) => Err(Rejected { object: Self { inner: Arc::new(inner) }, error }),
        }
    }
}

impl Memory for Mapping {
    fn address(&self) -> DeviceAddress {
        self.address()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn cuda(&self) -> &Cuda {
        self.cuda()
    }
}

/// A refused operation that consumes its object: the error, and the object back.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Rejected<T: std::fmt::Debug> {
    /// The object, as it was.
    pub object: T,
    /// Why.
    pub error: Error,
}

impl<T: std::fmt::Debug> From<Rejected<T>> for Error {
    /// The error alone; the object is dropped.
    fn from(rejected: Rejected<T>) -> Self {
        rejected.error
    }
}

/// Granularity that addresses of all these kinds of memory share.
pub(crate) fn common_granularity(
    cuda: &Cuda,
    kinds: impl IntoIterator<Item = Properties>,
) -> Result<Granularity> {
    let mut bytes = 1;
    for properties in kinds {
        bytes = bytes.max(cuda.granularities(&properties)?.minimum.bytes());
    }
    Granularity::new(bytes)
}

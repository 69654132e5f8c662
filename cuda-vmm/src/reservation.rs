//! Ranges of virtual addresses, and physical memory mapped into them.

use crate::cuda::Cuda;
use crate::error::{Attempt, Error, Result};
use crate::granularity::Granularity;
use crate::location::{Access, Grant, Location};
use crate::memory::{DeviceAddress, Memory};
use crate::physical::PhysicalMemory;
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
    /// # Errors
    /// [`Error::Misaligned`] if `offset` is no multiple of the memory's granularity, [`Error::OutOfBounds`], [`Error::Overlap`],
    /// [`Error::ForeignDriver`], or [`Error::Call`].
    #[doc(alias = "cuMemMap")]
    pub fn map(&self, offset: usize, memory: &PhysicalMemory) -> Result<Mapping> {
        let inner = &self.inner;
        inner.cuda.check_same(memory.cuda(), "physical memory")?;
        inner.cuda.granularities(memory.properties())?.minimum.check_offset("offset of a mapping", offset)?;
        let length = memory.size();
        // The claim is made before the call, and taken back by Drop of the claim if the driver refuses.
        let claim = Claim::new(self, offset, length)?;
        // SAFETY: the range lies inside this reservation, nothing is mapped there (the claim), and the handle is alive. The offset
        // into the memory and the flags must be 0.
        unsafe { inner.cuda.driver().cuMemMap(claim.address(), length, 0, memory.as_raw(), 0) }
            .attempt(|| format!("mapping {length} bytes of {} at offset {offset}", memory.location()))?;
        Ok(Mapping { inner: Arc::new(MappingInner { memory: memory.clone(), mapped: true, claim }) })
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

/// A part of a reservation that is mapped, or about to be.
#[derive(Debug)]
struct Claim {
    reservation: Reservation,
    offset: usize,
    length: usize,
}

impl Claim {
    fn new(reservation: &Reservation, offset: usize, length: usize) -> Result<Self> {
        let limit = reservation.size();
        let outside = Error::OutOfBounds { what: "a mapping", offset, length, limit };
        if offset.checked_add(length).is_none_or(|end| end > limit) {
            return Err(outside);
        }
        let mut mapped = reservation.inner.mapped();
        if let Some((&mapped_offset, &mapped_length)) = mapped.range(..offset + length).next_back()
            && mapped_offset + mapped_length > offset
        {
            return Err(Error::Overlap { offset, length, mapped_offset, mapped_length });
        }
        mapped.insert(offset, length);
        Ok(Self { reservation: reservation.clone(), offset, length })
    }

    fn address(&self) -> u64 {
        self.reservation.inner.base + self.offset as u64
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.reservation.inner.mapped().remove(&self.offset);
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
    memory: PhysicalMemory,
    mapped: bool,
    // After the memory: the claim on the addresses ends last.
    claim: Claim,
}

impl Mapping {
    /// First address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        DeviceAddress::new(self.inner.claim.address())
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.inner.claim.length
    }

    /// Offset in the reservation, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.inner.claim.offset
    }

    /// The reservation.
    #[must_use]
    pub fn reservation(&self) -> &Reservation {
        &self.inner.claim.reservation
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
    /// # Errors
    /// [`Error::Zero`] for an empty list, [`Error::UnknownDevice`], [`Error::AccessNotPossible`], or [`Error::Call`].
    #[doc(alias = "cuMemSetAccess")]
    pub fn set_access(&self, grants: &[Grant]) -> Result<()> {
        if grants.is_empty() {
            return Err(Error::Zero { what: "number of grants" });
        }
        for grant in grants {
            match grant.location {
                Location::Device(ordinal) => self.cuda().check_device(ordinal)?,
                location if !self.inner.memory.location().is_host() => {
                    return Err(Error::AccessNotPossible { location, memory: self.inner.memory.location() });
                }
                _ => {}
            }
        }
        // On the stack for any realistic number of devices.
        let mut small = [Grant::host().as_raw(); 8];
        let large: Vec<_>;
        let raw = if let Some(few) = small.get_mut(..grants.len()) {
            few.iter_mut().zip(grants).for_each(|(raw, grant)| *raw = grant.as_raw());
            &*few
        } else {
            large = grants.iter().map(|grant| grant.as_raw()).collect();
            &large[..]
        };
        // SAFETY: the range is exactly one mapping, which is alive; `raw` is valid for its length.
        unsafe {
            self.cuda().driver().cuMemSetAccess(self.address().get(), self.size(), raw.as_ptr(), raw.len())
        }
        .attempt(|| format!("granting access to {} bytes of {}", self.size(), self.inner.memory.location()))
    }

    /// What a location may do with the mapping.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] or [`Error::Call`].
    #[doc(alias = "cuMemGetAccess")]
    pub fn access(&self, location: Location) -> Result<Access> {
        if let Location::Device(ordinal) = location {
            self.cuda().check_device(ordinal)?;
        }
        let (mut flags, raw) = (0, location.as_raw());
        // SAFETY: `flags` is valid for one write, `raw` for one read, and the address is mapped.
        unsafe { self.cuda().driver().cuMemGetAccess(&mut flags, &raw, self.address().get()) }
            .attempt(|| format!("asking for the access of {location}"))?;
        Access::from_raw(flags).ok_or_else(|| Error::Unsupported {
            what: "the access that the driver reports",
            why: format!("flags {flags} are unknown"),
        })
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
        match inner.unmap() {
            Ok(()) => Ok(inner.memory.clone()),
            Err(source) => {
                inner.mapped = true;
                let error =
                    Error::Call { attempt: format!("unmapping {} bytes", inner.claim.length), source };
                Err(Rejected { object: Self { inner: Arc::new(inner) }, error })
            }
        }
    }
}

impl MappingInner {
    fn unmap(&mut self) -> Result<(), cuda_vmm_sys::CallError> {
        self.mapped = false;
        // SAFETY: exactly one whole mapping. That no work on a device uses it any more is what dropping its last owner means.
        unsafe { self.memory.cuda().driver().cuMemUnmap(self.claim.address(), self.claim.length) }
    }
}

impl Drop for MappingInner {
    fn drop(&mut self) {
        if self.mapped {
            let result = self.unmap();
            released("mapping", result);
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
    #[source]
    pub error: Error,
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

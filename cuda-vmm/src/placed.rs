//! What is mapped where: a handle in a part of a reservation, unmapped once.

use crate::cuda::Cuda;
use crate::error::{Attempt, Error, Result};
use crate::location::{Access, Grant, Location};
use crate::memory::DeviceAddress;
use crate::release::released;
use crate::reservation::Reservation;
use cuda_vmm_sys::{CUmemGenericAllocationHandle, CallError};

/// A part of a reservation that is mapped, or about to be.
#[derive(Debug)]
struct Claim {
    reservation: Reservation,
    offset: usize,
    length: usize,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.reservation.unclaim(self.offset);
    }
}

/// A handle mapped into a reservation. Who holds it keeps what the handle stands for.
#[derive(Debug)]
pub(crate) struct Placed {
    mapped: bool,
    claim: Claim,
}

impl Placed {
    /// Maps `length` bytes of a handle at an offset. `what` says in errors what was attempted.
    ///
    /// # Safety
    /// The handle is alive, and what it stands for has `length` bytes.
    pub(crate) unsafe fn new(
        reservation: &Reservation,
        offset: usize,
        length: usize,
        handle: CUmemGenericAllocationHandle,
        what: impl FnOnce() -> String,
    ) -> Result<Self> {
        reservation.claim(offset, length)?;
        // The claim is made before the call, and taken back by Drop of the claim if the driver refuses.
        let claim = Claim { reservation: reservation.clone(), offset, length };
        let address = reservation.address().get() + offset as u64;
        // SAFETY: the range lies inside the reservation, nothing is mapped there (the claim), and the caller promises the handle. The
        // offset into the object and the flags must be 0.
        unsafe { reservation.cuda().driver().cuMemMap(address, length, 0, handle, 0) }.attempt(what)?;
        Ok(Self { mapped: true, claim })
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        DeviceAddress::new(self.claim.reservation.address().get() + self.claim.offset as u64)
    }

    pub(crate) fn size(&self) -> usize {
        self.claim.length
    }

    pub(crate) fn offset(&self) -> usize {
        self.claim.offset
    }

    pub(crate) fn reservation(&self) -> &Reservation {
        &self.claim.reservation
    }

    fn cuda(&self) -> &Cuda {
        self.claim.reservation.cuda()
    }

    /// Sets the access of locations that were checked. `what` names the mapped object in errors.
    pub(crate) fn set_access(&self, grants: &[Grant], what: impl FnOnce() -> String) -> Result<()> {
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
        .attempt(|| format!("granting access to {} bytes of {}", self.size(), what()))
    }

    pub(crate) fn access(&self, location: Location) -> Result<Access> {
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

    /// Unmaps on the spot. If the driver refuses, it stays mapped.
    pub(crate) fn unmap(&mut self) -> Result<()> {
        self.unmap_raw().attempt(|| format!("unmapping {} bytes", self.claim.length))?;
        self.mapped = false;
        Ok(())
    }

    fn unmap_raw(&self) -> Result<(), CallError> {
        // SAFETY: exactly one whole mapping. That no work on a device uses it any more is what dropping its last owner means.
        unsafe { self.cuda().driver().cuMemUnmap(self.address().get(), self.claim.length) }
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        if self.mapped {
            released("mapping", self.unmap_raw());
        }
    }
}

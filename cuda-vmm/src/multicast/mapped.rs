//! A multicast object at addresses: before anybody may use them, and after.

use super::{Binding, Object};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::location::{Grant, Location};
use crate::memory::DeviceAddress;
use crate::placed::Placed;
use crate::reservation::{Rejected, Reservation};

/// A multicast object, mapped. It tells no address: there may be no memory behind it yet. [`activate`](Self::activate) does.
///
/// Dropping it unmaps the object.
#[derive(Debug)]
pub struct MappedObject {
    // Before the object: unmapped first. Boxed, so that results that give it back stay small.
    placed: Box<Placed>,
    object: Object,
}

impl Object {
    /// Maps the object at addresses of its own choice.
    ///
    /// Calls `cuMemMap`.
    ///
    /// # Errors
    /// [`Error::Call`].
    #[doc(alias = "cuMemMap")]
    pub fn map(&self) -> Result<MappedObject> {
        let granularities = self.granularities();
        let recommended = granularities.recommended;
        let alignment = if recommended.divides(self.size()) { recommended } else { granularities.minimum };
        self.map_at(&Reservation::new(self.cuda(), self.size(), alignment)?, 0)
    }

    /// Maps the object at `offset` bytes of a reservation. The address must be a multiple of the minimum
    /// [granularity](Self::granularities).
    ///
    /// Calls `cuMemMap`.
    ///
    /// # Errors
    /// [`Error::ForeignDriver`], [`Error::Misaligned`], [`Error::OutOfBounds`], [`Error::Overlap`], or [`Error::Call`].
    #[doc(alias = "cuMemMap")]
    pub fn map_at(&self, reservation: &Reservation, offset: usize) -> Result<MappedObject> {
        self.cuda().check_same(reservation.cuda(), "a reservation")?;
        let overflow = || Error::Overflow { what: "an address" };
        let base = usize::try_from(reservation.address().get()).map_err(|_| overflow())?;
        let address = base.checked_add(offset).ok_or_else(overflow)?;
        self.minimum().check_offset("address of a multicast object", address)?;
        let what = || format!("mapping a multicast object of {} bytes at offset {offset}", self.size());
        // SAFETY: the handle is that of the object, which has that size and is kept beside the placement. Every device was added, so that
        // this does not block.
        let placed = unsafe { Placed::new(reservation, offset, self.size(), self.as_raw(), what) }?;
        Ok(MappedObject { placed: Box::new(placed), object: self.clone() })
    }
}

impl MappedObject {
    /// The object.
    #[must_use]
    pub fn object(&self) -> &Object {
        &self.object
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.placed.size()
    }

    /// The reservation.
    #[must_use]
    pub fn reservation(&self) -> &Reservation {
        self.placed.reservation()
    }

    /// Offset in the reservation, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.placed.offset()
    }

    /// Gives out the address to the devices of `grants`, now that `bindings` are the memory behind every byte of it, on every device.
    /// For objects whose devices were all added by this process; the others need a [`Team`](super::Team), because nobody sees alone what the
    /// others have bound.
    ///
    /// # Errors
    /// With the mapping and the bindings: [`Error::MissingDevices`] if other processes have devices in the object,
    /// [`Error::ForeignBinding`], [`Error::NotBound`], [`Error::Zero`] without grants, [`Error::NotInTeam`], or [`Error::Call`].
    pub fn activate(
        self,
        bindings: Vec<Binding>,
        grants: &[Grant],
    ) -> Result<Multicast, Rejected<(Self, Vec<Binding>)>> {
        let (added, devices) = (self.object.added().len() as u32, self.object.devices());
        let all_here = if added == devices {
            Ok(())
        } else {
            let what_to_do = "the others are in other processes: a Team activates with them";
            Err(Error::MissingDevices { added, devices, what_to_do })
        };
        match all_here.and_then(|()| self.prepare(&bindings, grants)) {
            Ok(()) => Ok(self.assume_active(bindings)),
            Err(error) => Err(Rejected { object: (self, bindings), error }),
        }
    }

    /// Checks that every byte is bound on every device of this process, and grants access.
    pub(super) fn prepare(&self, bindings: &[Binding], grants: &[Grant]) -> Result<()> {
        if bindings.iter().any(|binding| binding.object() != &self.object) {
            return Err(Error::ForeignBinding);
        }
        for device in self.object.added() {
            check_bound(device, bindings, self.size())?;
        }
        self.set_access(grants)
    }

    /// Unmaps the object on the spot, with the driver's answer, which dropping cannot give.
    ///
    /// Calls `cuMemUnmap`.
    ///
    /// # Errors
    /// [`Rejected`] with the mapping: [`Error::Call`] if the driver refuses.
    #[doc(alias = "cuMemUnmap")]
    pub fn unmap(mut self) -> Result<(), Rejected<Self>> {
        self.placed.unmap().map_err(|error| Rejected { object: self, error })
    }

    /// For who knows that every device of every process has bound its memory.
    pub(super) fn assume_active(self, bindings: Vec<Binding>) -> Multicast {
        Multicast { mapped: self, bindings }
    }

    fn set_access(&self, grants: &[Grant]) -> Result<()> {
        if grants.is_empty() {
            return Err(Error::Zero { what: "number of grants" });
        }
        for grant in grants {
            self.object.member("who is to get access", grant.location)?;
        }
        self.placed.set_access(grants, || "a multicast object".into())
    }
}

/// Refuses a device of which some byte is not bound.
fn check_bound(device: &Device, bindings: &[Binding], size: usize) -> Result<()> {
    let mut ranges: Vec<_> = bindings
        .iter()
        .filter(|binding| binding.device() == device)
        .map(|binding| (binding.offset(), binding.size()))
        .collect();
    ranges.sort_unstable();
    // Bindings of one object do not overlap, so that the next starts where the last ended, or there is a hole.
    let mut end = 0;
    for (offset, length) in ranges {
        if offset != end {
            break;
        }
        end += length;
    }
    if end == size { Ok(()) } else { Err(Error::NotBound { ordinal: device.ordinal(), offset: end }) }
}

/// A multicast object that is ready for use: mapped, with memory of every device behind every byte.
///
/// Its address is for `multimem` instructions of the devices that were granted access. Plain loads and stores, copies and the CPU do not
/// reach memory through it; they use the memory that is bound.
///
/// Dropping it unmaps the object, then undoes the bindings, then releases the object. No device may still use the address, here or, for an
/// object of several processes, in any of them.
#[derive(Debug)]
pub struct Multicast {
    // In this order: unmapped, then unbound.
    mapped: MappedObject,
    bindings: Vec<Binding>,
}

impl Multicast {
    /// First address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.mapped.placed.address()
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.mapped.size()
    }

    /// The object.
    #[must_use]
    pub fn object(&self) -> &Object {
        &self.mapped.object
    }

    /// The bindings of this process's devices.
    #[must_use]
    pub fn bindings(&self) -> &[Binding] {
        &self.bindings
    }

    /// Sets what more devices of this process may do with the address; others keep what they have.
    ///
    /// Calls `cuMemSetAccess`.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::NotInTeam`], or [`Error::Call`].
    #[doc(alias = "cuMemSetAccess")]
    pub fn set_access(&self, grants: &[Grant]) -> Result<()> {
        self.mapped.set_access(grants)
    }

    /// What a location may do with the address.
    ///
    /// Calls `cuMemGetAccess`.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] or [`Error::Call`].
    #[doc(alias = "cuMemGetAccess")]
    pub fn access(&self, location: Location) -> Result<crate::Access> {
        self.mapped.placed.access(location)
    }

    /// Takes the address back: the mapping and the bindings, to be undone one by one with the driver's answers.
    #[must_use]
    pub fn deactivate(self) -> (MappedObject, Vec<Binding>) {
        (self.mapped, self.bindings)
    }
}

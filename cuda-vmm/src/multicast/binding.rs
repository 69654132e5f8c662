//! Memory of one device as a part of a multicast object.

use super::Object;
use crate::cuda::Cuda;
use crate::device::Device;
use crate::error::{Attempt, Error, Result};
use crate::location::Location;
use crate::physical::PhysicalMemory;
use crate::release::released;
use crate::reservation::Rejected;
use cuda_vmm_sys::CallError;

/// A part of an object that is bound on a device, or about to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BoundRange {
    pub(super) ordinal: i32,
    pub(super) offset: usize,
    pub(super) size: usize,
}

impl BoundRange {
    fn overlaps(&self, other: &Self) -> bool {
        // Both were checked against the object's size, so that the sums do not overflow.
        self.ordinal == other.ordinal
            && self.offset < other.offset + other.size
            && other.offset < self.offset + self.size
    }
}

/// A range that nobody else may bind through this object.
#[derive(Debug)]
struct Claim {
    object: Object,
    range: BoundRange,
}

impl Claim {
    fn new(object: &Object, range: BoundRange) -> Result<Box<Self>> {
        let mut bound = object.bound();
        if let Some(other) = bound.iter().find(|other| other.overlaps(&range)) {
            return Err(Error::BindingOverlap {
                ordinal: range.ordinal,
                offset: range.offset,
                length: range.size,
                bound_offset: other.offset,
                bound_length: other.size,
            });
        }
        bound.push(range);
        drop(bound);
        Ok(Box::new(Self { object: object.clone(), range }))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.object.bound().retain(|range| *range != self.range);
    }
}

/// What a binding keeps alive.
#[derive(Debug)]
enum Kept {
    Memory {
        _memory: PhysicalMemory,
    },
    Mapping {
        _mapping: crate::Mapping,
    },
    /// The caller keeps it.
    Foreign,
}

/// Memory of one device, bound to a part of a multicast object. Dropping it undoes the binding with exactly the values that it was made
/// with; it keeps the object and the memory until then. Nothing on any device may still use that part of the object.
#[derive(Debug)]
pub struct Binding {
    live: bool,
    device: Device,
    // The claim holds the object. Boxed, so that results that give a binding back stay small.
    claim: Box<Claim>,
    _kept: Kept,
}

impl Object {
    /// Binds `size` bytes of memory, from `memory_offset` on, at `offset` of the object. All three must be multiples of the minimum
    /// [granularity](Self::granularities), and the memory that of a device that this process added. If the object can be exported, the memory
    /// must be, too.
    ///
    /// Calls `cuMulticastBindMem`.
    ///
    /// # Errors
    /// Before the driver is called: [`Error::ForeignDriver`], [`Error::NotInTeam`], [`Error::Zero`], [`Error::Misaligned`],
    /// [`Error::OutOfBounds`], [`Error::BindingOverlap`], [`Error::Unsupported`] for memory that is not exportable. [`Error::Call`] if it
    /// refuses: `CUDA_ERROR_SYSTEM_NOT_READY` may pass, if all members release everything and try again.
    #[doc(alias = "cuMulticastBindMem")]
    pub fn bind(
        &self,
        offset: usize,
        memory: &PhysicalMemory,
        memory_offset: usize,
        size: usize,
    ) -> Result<Binding> {
        let device = self.check_memory(memory)?;
        self.minimum().check_offset("offset in the memory of a binding", memory_offset)?;
        let claim = self.claim(device, offset, size)?;
        check_source(memory_offset, size, memory.size())?;
        // SAFETY: both handles are alive, and the binding keeps them so; every device was added, so that this does not block; offsets
        // and size were checked above; flags must be 0.
        unsafe {
            self.cuda().driver().cuMulticastBindMem(
                self.as_raw(),
                offset,
                memory.as_raw(),
                memory_offset,
                size,
                0,
            )
        }
        .attempt(|| attempted(device, offset, size))?;
        let kept = Kept::Memory { _memory: memory.clone() };
        Ok(Binding { live: true, device: device.clone(), claim, _kept: kept })
    }

    /// Binds `size` bytes of mapped memory by its address, from `mapping_offset` of the mapping on, at `offset` of the object. The rules
    /// are those of [`bind`](Self::bind), with the address in place of the offset in the memory.
    ///
    /// Calls `cuMulticastBindAddr`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    #[doc(alias = "cuMulticastBindAddr")]
    pub fn bind_mapping(
        &self,
        offset: usize,
        mapping: &crate::Mapping,
        mapping_offset: usize,
        size: usize,
    ) -> Result<Binding> {
        let device = self.check_memory(mapping.memory())?;
        check_source(mapping_offset, size, mapping.size())?;
        let address = mapping.address().get() + mapping_offset as u64;
        let kept = Kept::Mapping { _mapping: mapping.clone() };
        // SAFETY: the range is inside of a mapping, which the binding keeps.
        unsafe { self.bind_at(offset, device, address, size, kept) }
    }

    /// Binds memory that another library allocated, by its address: that of `cuMemCreate`, or of a stream-ordered pool.
    ///
    /// Calls `cuMulticastBindAddr`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    ///
    /// # Safety
    /// The `size` bytes at `address` must be memory of `device`, in one allocation of those kinds, which stays allocated and mapped for as
    /// long as the binding lives.
    #[doc(alias = "cuMulticastBindAddr")]
    pub unsafe fn bind_address(
        &self,
        offset: usize,
        device: &Device,
        address: u64,
        size: usize,
    ) -> Result<Binding> {
        self.cuda().check_same(device.cuda(), "a device")?;
        let device = self.member("memory", Location::Device(device.ordinal()))?;
        // SAFETY: the caller's promise.
        unsafe { self.bind_at(offset, device, address, size, Kept::Foreign) }
    }

    /// # Safety
    /// The range is memory of `device` and stays mapped while `kept` lives; for [`Kept::Foreign`] the caller sees to it.
    unsafe fn bind_at(
        &self,
        offset: usize,
        device: &Device,
        address: u64,
        size: usize,
        kept: Kept,
    ) -> Result<Binding> {
        let value = usize::try_from(address).map_err(|_| Error::Overflow { what: "an address" })?;
        self.minimum().check_offset("address of a binding", value)?;
        let claim = self.claim(device, offset, size)?;
        // SAFETY: the object is alive, and the caller promises the memory; every device was added, so that this does not block; address,
        // offset and size were checked above; flags must be 0.
        unsafe { self.cuda().driver().cuMulticastBindAddr(self.as_raw(), offset, address, size, 0) }
            .attempt(|| attempted(device, offset, size))?;
        Ok(Binding { live: true, device: device.clone(), claim, _kept: kept })
    }

    /// The device of memory that may be bound.
    fn check_memory(&self, memory: &PhysicalMemory) -> Result<&Device> {
        self.cuda().check_same(memory.cuda(), "physical memory")?;
        let device = self.member("memory", memory.location())?;
        if self.is_shared() && !memory.may_be_shared() {
            let why =
                "the object is visible to other processes, and the memory was not created for export".into();
            return Err(Error::Unsupported { what: "binding this memory", why });
        }
        Ok(device)
    }

    fn claim(&self, device: &Device, offset: usize, size: usize) -> Result<Box<Claim>> {
        self.minimum().check("size of a binding", size)?;
        self.minimum().check_offset("offset of a binding", offset)?;
        let limit = self.size();
        if offset.checked_add(size).is_none_or(|end| end > limit) {
            return Err(Error::OutOfBounds { what: "a binding", offset, length: size, limit });
        }
        Claim::new(self, BoundRange { ordinal: device.ordinal(), offset, size })
    }
}

fn check_source(offset: usize, length: usize, limit: usize) -> Result<()> {
    if offset.checked_add(length).is_some_and(|end| end <= limit) {
        Ok(())
    } else {
        Err(Error::OutOfBounds { what: "the memory of a binding", offset, length, limit })
    }
}

fn attempted(device: &Device, offset: usize, size: usize) -> String {
    format!("binding {size} bytes of device {} at offset {offset} of a multicast object", device.ordinal())
}

impl Binding {
    /// The object.
    #[must_use]
    pub fn object(&self) -> &Object {
        &self.claim.object
    }

    /// The device whose memory is bound.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where it starts in the object, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.claim.range.offset
    }

    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.claim.range.size
    }

    /// Undoes the binding on the spot, with the driver's answer, which dropping it cannot give.
    ///
    /// Calls `cuMulticastUnbind`.
    ///
    /// # Errors
    /// [`Rejected`] with the binding: [`Error::Call`] if the driver refuses; it then still stands.
    #[doc(alias = "cuMulticastUnbind")]
    pub fn unbind(mut self) -> Result<(), Rejected<Self>> {
        let BoundRange { offset, size, .. } = self.claim.range;
        let what =
            || format!("unbinding {size} bytes of device {} at offset {offset}", self.device.ordinal());
        match self.unbind_raw().attempt(what) {
            Ok(()) => {
                self.live = false;
                Ok(())
            }
            Err(error) => Err(Rejected { object: self, error }),
        }
    }

    fn cuda(&self) -> &Cuda {
        self.claim.object.cuda()
    }

    fn unbind_raw(&self) -> Result<(), CallError> {
        let BoundRange { offset, size, .. } = self.claim.range;
        let object = self.claim.object.as_raw();
        // SAFETY: exactly the device, offset and size of the bind; the object is alive. That no work on a device uses it any more is what
        // dropping the binding means.
        unsafe { self.cuda().driver().cuMulticastUnbind(object, self.device.as_raw(), offset, size) }
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        if self.live {
            released("a binding", self.unbind_raw());
        }
    }
}

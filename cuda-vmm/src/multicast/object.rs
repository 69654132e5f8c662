//! The object itself: before all its devices are there, and after.

use super::agreement::Agreement;
use super::binding::BoundRange;
use super::outcome::{Step, agree};
use super::{ObjectProperties, check_switch, support, until};
use crate::capabilities::Support;
use crate::cuda::Cuda;
use crate::device::Device;
use crate::error::{Attempt, Error, Result};
use crate::granularity::{Granularities, Granularity};
use crate::handle::Handle;
use crate::location::Location;
use crate::properties::{HandleTypes, Shareable};
use crate::reservation::Rejected;
use crate::share::{
    Arrived, Deadline, Descriptor, DescriptorError, FabricHandle, Kind, receive_handle, send_handle,
};
use cuda_vmm_sys::{CUdevice_attribute, CUmemGenericAllocationHandle, CUresult};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a handle of this kind is called in errors.
const WHAT: &str = "a multicast object";

#[derive(Debug)]
struct Inner {
    handle: Handle,
    devices: u32,
    size: usize,
    granularities: Granularities,
    handle_types: HandleTypes,
    imported: bool,
    /// Devices that this process added.
    added: Vec<Device>,
    /// What is bound through this handle.
    bound: Mutex<Vec<BoundRange>>,
}

/// A multicast object that lacks devices. It can be exported and imported, and devices are added to it; it cannot be bound or mapped: the
/// driver would block until the last device is there.
#[derive(Debug)]
pub struct Incomplete {
    inner: Box<Inner>,
}

/// A multicast object with all its devices: memory can be bound to it, and it can be mapped.
///
/// Clones share the handle; the last of them, of the bindings and of the mappings gives it back (`cuMemRelease`).
#[derive(Clone, Debug)]
pub struct Object {
    inner: Arc<Inner>,
}

/// What an object tells with all its devices and without.
macro_rules! common {
    ($($ty:ident)*) => { $(
        impl $ty {
            /// Number of devices that the object is for.
            #[must_use]
            pub fn devices(&self) -> u32 {
                self.inner.devices
            }

            /// Devices that this process added.
            #[must_use]
            pub fn added(&self) -> &[Device] {
                &self.inner.added
            }

            /// Bytes of each device.
            #[must_use]
            pub fn size(&self) -> usize {
                self.inner.size
            }
        }
    )* };
}

common!(Incomplete Object);

impl Incomplete {
    /// Creates an object without devices.
    ///
    /// Calls `cuMulticastCreate`.
    ///
    /// # Errors
    /// [`Error::MulticastDisabled`], [`Error::Zero`], [`Error::Misaligned`] before the driver is called; [`Error::Call`] if it refuses:
    /// `CUDA_ERROR_OUT_OF_MEMORY` when the fabric has no object left, `CUDA_ERROR_ILLEGAL_STATE` without a working fabric manager,
    /// `CUDA_ERROR_NOT_PERMITTED` for FABRIC without an IMEX channel.
    #[doc(alias = "cuMulticastCreate")]
    pub fn create(cuda: &Cuda, properties: &ObjectProperties) -> Result<Self> {
        check_switch()?;
        let granularities = properties.granularities(cuda)?;
        granularities.minimum.check("size of a multicast object", properties.size())?;
        let (devices, size) = (properties.devices(), properties.size());
        let attempt = |types: HandleTypes| {
            let (mut raw, wanted) = (0, properties.as_raw(types));
            // SAFETY: `raw` is valid for one write and `wanted` for one read. `Handle` releases it.
            unsafe { cuda.driver().cuMulticastCreate(&mut raw, &wanted) }.attempt(|| {
                format!(
                    "creating a multicast object of {size} bytes for {devices} devices, exportable as {types}"
                )
            })?;
            Ok((Handle::own(cuda, WHAT, raw), types))
        };
        let (handle, types) = match properties.shareability() {
            Shareable::Exactly(types) => attempt(types)?,
            Shareable::BestAvailable => best_available(cuda, attempt)?,
        };
        Ok(Self::new(handle, devices, size, granularities, types, false))
    }

    fn new(
        handle: Handle,
        devices: u32,
        size: usize,
        granularities: Granularities,
        handle_types: HandleTypes,
        imported: bool,
    ) -> Self {
        let (added, bound) = (Vec::new(), Mutex::default());
        let inner = Inner { handle, devices, size, granularities, handle_types, imported, added, bound };
        Self { inner: Box::new(inner) }
    }

    /// Imports an object from the file descriptor that [`export_fd`](Self::export_fd) made. Devices and size must be those that it was
    /// created with: the driver does not tell. That the descriptor is one of a multicast object shows when a device is added.
    ///
    /// Calls `cuMemImportFromShareableHandle`.
    ///
    /// # Errors
    /// [`Error::MulticastDisabled`], [`Error::Zero`], [`Error::Misaligned`]; [`Error::Call`] if the descriptor is no export of CUDA.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import_fd(cuda: &Cuda, fd: impl AsFd, properties: &ObjectProperties) -> Result<Self> {
        Self::import(cuda, properties, HandleTypes::POSIX_FD, || {
            Handle::import_fd(cuda, WHAT, fd.as_fd(), properties.size())
        })
    }

    /// Imports an object from a FABRIC handle. The exporter must be alive until this returns.
    ///
    /// Calls `cuMemImportFromShareableHandle`.
    ///
    /// # Errors
    /// As [`import_fd`](Self::import_fd).
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import_fabric(cuda: &Cuda, handle: &FabricHandle, properties: &ObjectProperties) -> Result<Self> {
        Self::import(cuda, properties, HandleTypes::FABRIC, || {
            Handle::import_fabric(cuda, WHAT, handle, properties.size())
        })
    }

    fn import(
        cuda: &Cuda,
        properties: &ObjectProperties,
        types: HandleTypes,
        import: impl FnOnce() -> Result<Handle>,
    ) -> Result<Self> {
        check_switch()?;
        let granularities = properties.granularities(cuda)?;
        granularities.minimum.check("size of an imported multicast object", properties.size())?;
        let (devices, size) = (properties.devices(), properties.size());
        Ok(Self::new(import()?, devices, size, granularities, types, true))
    }

    /// Exports the object as a file descriptor, which keeps it alive.
    ///
    /// Calls `cuMemExportToShareableHandle`.
    ///
    /// # Errors
    /// [`Error::NotExportable`] if it was not created for that, or [`Error::Call`].
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export_fd(&self) -> Result<OwnedFd> {
        self.inner.handle.export_fd(self.inner.handle_types)
    }

    /// Exports the object as a FABRIC handle. The handle pins nothing: keep the object alive until every importer has imported it.
    ///
    /// Calls `cuMemExportToShareableHandle`.
    ///
    /// # Errors
    /// [`Error::NotExportable`] if it was not created for that, or [`Error::Call`].
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export_fabric(&self) -> Result<FabricHandle> {
        self.inner.handle.export_fabric(self.inner.handle_types)
    }

    /// Sends the object to the process at the other end of a connected Unix stream socket, as [`share::send`](crate::share::send) does
    /// for memory.
    ///
    /// # Errors
    /// [`Error::NotExportable`], [`Error::TimedOut`], [`Error::Transport`].
    pub fn send(&self, socket: impl AsFd, timeout: Duration) -> Result<()> {
        let Inner { handle, devices, size, handle_types, .. } = &*self.inner;
        let describe = |transport| {
            let (kind, handle_types) = (Kind::Multicast { devices: *devices }, *handle_types);
            Ok(Descriptor { kind, transport, handle_types, size: *size as u64 })
        };
        let deadline = Deadline::new("sending a multicast object to another process", timeout);
        send_handle(socket.as_fd(), handle, *handle_types, describe, &deadline)
    }

    /// Receives an object that [`send`](Self::send) sent, and imports it.
    ///
    /// # Errors
    /// [`Error::MulticastDisabled`]; as [`share::receive`](crate::share::receive); [`Error::Descriptor`] also for memory.
    pub fn receive(cuda: &Cuda, socket: impl AsFd, timeout: Duration) -> Result<Self> {
        check_switch()?;
        let deadline = Deadline::new("receiving a multicast object from another process", timeout);
        let (descriptor, arrived) = receive_handle(socket.as_fd(), &deadline)?;
        let Kind::Multicast { devices } = descriptor.kind else {
            let (found, expected) = (descriptor.kind.name(), WHAT);
            return Err(DescriptorError::Kind { found, expected }.into());
        };
        let properties = ObjectProperties::new(devices, descriptor.size());
        match arrived {
            Arrived::Fd(fd) => Self::import_fd(cuda, fd, &properties),
            Arrived::Fabric(handle) => Self::import_fabric(cuda, &handle, &properties),
        }
    }

    /// Adds a device. Each is added once, by one process.
    ///
    /// Calls `cuMulticastAddDevice`.
    ///
    /// # Errors
    /// [`Error::ForeignDriver`], [`Error::DeviceTwice`], [`Error::TeamFull`], [`Error::Unsupported`] before the driver is called;
    /// [`Error::Call`] if it refuses, and then the device is not added.
    #[doc(alias = "cuMulticastAddDevice")]
    pub fn add_device(&mut self, device: &Device) -> Result<()> {
        let inner = &mut *self.inner;
        inner.handle.cuda().check_same(device.cuda(), "a device")?;
        let ordinal = device.ordinal();
        if inner.added.contains(device) {
            return Err(Error::DeviceTwice { ordinal });
        }
        if inner.added.len() >= inner.devices as usize {
            return Err(Error::TeamFull { ordinal, devices: inner.devices });
        }
        check_supported(device)?;
        // Memory for the entry first: nothing may fail after the driver has the device.
        inner.added.reserve(1);
        // SAFETY: the handle is alive, and the device comes from the same driver.
        unsafe { inner.handle.cuda().driver().cuMulticastAddDevice(inner.handle.as_raw(), device.as_raw()) }
            .attempt(|| format!("adding device {ordinal} to a multicast object for {}", inner.devices))?;
        inner.added.push(device.clone());
        Ok(())
    }

    /// The object with all its devices, if this process created it and added them all.
    ///
    /// # Errors
    /// [`Error::MissingDevices`] with the object: some are missing, or it was imported, so that only
    /// [agreement](Self::complete_with) tells.
    pub fn complete(self) -> Result<Object, Rejected<Self>> {
        let (added, devices) = (self.inner.added.len() as u32, self.inner.devices);
        let what_to_do = match (added == devices, self.inner.imported) {
            (true, false) => return Ok(self.assume_complete()),
            (_, true) => {
                "it was imported, so that all members must agree that every device is there (complete_with)"
            }
            (false, false) => "add the others first, or agree with the processes that do (complete_with)",
        };
        Err(Rejected { object: self, error: Error::MissingDevices { added, devices, what_to_do } })
    }

    /// The object with all its devices, if all members agree that every one is there. Every member calls this, also one whose own device
    /// could not be added: that ends in an error on all of them.
    ///
    /// # Errors
    /// With the object: [`Error::MissingDevices`] if there are fewer devices than the object is for; [`Error::Disagreement`],
    /// [`Error::BadMessage`], or what [`Agreement::exchange`] returns.
    pub fn complete_with(
        self,
        agreement: &mut dyn Agreement,
        timeout: Duration,
    ) -> Result<Object, Rejected<Self>> {
        match self.count_devices(agreement, until(timeout)) {
            Ok(()) => Ok(self.assume_complete()),
            Err(error) => Err(Rejected { object: self, error }),
        }
    }

    fn count_devices(&self, agreement: &mut dyn Agreement, deadline: Instant) -> Result<()> {
        let mine = [self.inner.added.len() as u32, self.inner.devices];
        let payload: Vec<u8> = mine.iter().flat_map(|value| value.to_le_bytes()).collect();
        let members = agree(agreement, Step::Add, Ok(payload), deadline).map_err(|verdict| verdict.error)?;
        let mut added = 0_u32;
        for (rank, member) in members.iter().enumerate() {
            let theirs = member.number(4);
            if theirs != self.inner.devices {
                let (mine, theirs) = (self.inner.devices.into(), theirs.into());
                let what = "the number of devices of the multicast object";
                return Err(Error::Disagreement { what, rank, mine, theirs });
            }
            added = added.saturating_add(member.number(0));
        }
        let (devices, what_to_do) = (self.inner.devices, "every member adds its own before they agree");
        if added == devices { Ok(()) } else { Err(Error::MissingDevices { added, devices, what_to_do }) }
    }

    /// For who knows that every device was added.
    pub(super) fn assume_complete(self) -> Object {
        Object { inner: Arc::from(self.inner) }
    }

    /// What the object can be exported as.
    #[must_use]
    pub fn handle_types(&self) -> HandleTypes {
        self.inner.handle_types
    }
}

impl Object {
    /// The driver.
    #[must_use]
    pub fn cuda(&self) -> &Cuda {
        self.inner.handle.cuda()
    }

    /// The raw handle, alive as long as this object or a clone of it.
    #[must_use]
    pub fn as_raw(&self) -> CUmemGenericAllocationHandle {
        self.inner.handle.as_raw()
    }

    /// What offsets, sizes and addresses must be, and should be, multiples of.
    #[must_use]
    pub fn granularities(&self) -> Granularities {
        self.inner.granularities
    }

    /// Whether the object, and so all memory bound to it, is visible to other processes.
    pub(super) fn is_shared(&self) -> bool {
        self.inner.imported || !self.inner.handle_types.is_empty()
    }

    pub(super) fn bound(&self) -> MutexGuard<'_, Vec<BoundRange>> {
        self.inner.bound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device at a location, if this process added it.
    pub(super) fn member(&self, what: &'static str, location: Location) -> Result<&Device> {
        let found = self.inner.added.iter().find(|device| Location::Device(device.ordinal()) == location);
        found.ok_or(Error::NotInTeam { what, location })
    }

    pub(super) fn minimum(&self) -> Granularity {
        self.inner.granularities.minimum
    }
}

impl PartialEq for Object {
    /// Whether both are the same handle. Two imports of one object are not.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Object {}

/// Refuses a device without multicast.
pub(super) fn check_supported(device: &Device) -> Result<()> {
    match support(device)? {
        Support::SwitchedOff(variable) => Err(Error::MulticastDisabled { variable }),
        Support::No => {
            let why = format!("device {} or its driver has none", device.ordinal());
            Err(Error::Unsupported { what: "multicast", why })
        }
        _ => Ok(()),
    }
}

/// FABRIC and fd where the driver really creates that, else fd alone.
fn best_available<T>(cuda: &Cuda, attempt: impl Fn(HandleTypes) -> Result<T>) -> Result<T> {
    const FABRIC: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
    let mut claimed = cuda.device_count() > 0;
    for device in cuda.devices()? {
        claimed &= device.claims(FABRIC)? && cuda.may_have_fabric(Location::Device(device.ordinal()));
    }
    if claimed {
        match attempt(HandleTypes::FABRIC | HandleTypes::POSIX_FD) {
            // The claim was wrong: there is no IMEX channel, or the platform cannot.
            Err(error)
                if matches!(
                    error.status(),
                    Some(CUresult::CUDA_ERROR_NOT_PERMITTED | CUresult::CUDA_ERROR_NOT_SUPPORTED)
                ) => {}
            other => return other,
        }
    }
    attempt(HandleTypes::POSIX_FD)
}

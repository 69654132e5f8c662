//! Physical memory: a handle, before it has an address.

use crate::cuda::Cuda;
use crate::error::{Attempt, Error, Result};
use crate::handle::Handle;
use crate::location::Location;
use crate::properties::{HandleTypes, Properties, Shareable};
use crate::share::FabricHandle;
use cuda_vmm_sys::{
    CUdevice_attribute, CUmemAllocationHandleType, CUmemAllocationProp, CUmemGenericAllocationHandle,
    CUresult,
};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// What a handle of this kind is called in errors.
const WHAT: &str = "physical memory";

/// Physical memory on a device or on the host. It has no address until it is [mapped](crate::Reservation::map).
///
/// Clones share the handle; the last one gives it back (`cuMemRelease`). Mappings hold a clone, and memory that another process
/// imported lives on there.
#[derive(Clone, Debug)]
pub struct PhysicalMemory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    handle: Handle,
    size: usize,
    properties: Properties,
    handle_types: HandleTypes,
    imported: bool,
}

impl PhysicalMemory {
    /// Creates `size` bytes of physical memory. `size` must be a multiple of the minimum
    /// [granularity](crate::Granularities::of).
    ///
    /// Calls `cuMemCreate`.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Misaligned`], [`Error::UnknownDevice`]; [`Error::Call`] if the driver refuses, for example
    /// `CUDA_ERROR_OUT_OF_MEMORY`, or `CUDA_ERROR_NOT_PERMITTED` for FABRIC without an IMEX channel.
    #[doc(alias = "cuMemCreate")]
    pub fn create(cuda: &Cuda, size: usize, properties: &Properties) -> Result<Self> {
        properties.check(cuda)?;
        cuda.granularities(properties)?.minimum.check("size of physical memory", size)?;
        let attempt = |types: HandleTypes| {
            let mut raw = properties.as_raw();
            raw.requestedHandleTypes = CUmemAllocationHandleType(types.bits());
            let mut handle = 0;
            // SAFETY: `handle` is valid for one write and `raw` for one read; flags must be 0. `Handle` releases it.
            unsafe { cuda.driver().cuMemCreate(&mut handle, size, &raw, 0) }.attempt(|| {
                format!("creating {size} bytes on {}, exportable as {types}", properties.location())
            })?;
            Ok(Handle::own(cuda, WHAT, handle))
        };
        let (handle, types) = match properties.shareability() {
            Shareable::Exactly(types) => (attempt(types)?, types),
            Shareable::BestAvailable => best_available(cuda, properties.location(), attempt)?,
        };
        let (properties, imported) = (*properties, false);
        Ok(Self { inner: Arc::new(Inner { handle, size, properties, handle_types: types, imported }) })
    }

    /// Imports memory from the file descriptor that [`export_fd`](Self::export_fd) made, here or in another process. `size` is
    /// the size in bytes it was created with: the driver does not tell, and refuses to map more than there is.
    ///
    /// The descriptor may be closed afterwards. Importing it again gives a second handle to the same memory.
    ///
    /// Calls `cuMemImportFromShareableHandle`.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Misaligned`], or [`Error::Call`] if the descriptor is no export of CUDA memory.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import_fd(cuda: &Cuda, fd: impl AsFd, size: usize) -> Result<Self> {
        check_import_size(size)?;
        Self::adopt(Handle::import_fd(cuda, WHAT, fd.as_fd(), size)?, size, true)
    }

    /// Imports memory from a FABRIC handle. The exporter must be alive until this returns; afterwards this process holds the
    /// memory on its own.
    ///
    /// Calls `cuMemImportFromShareableHandle`.
    ///
    /// # Errors
    /// As [`import_fd`](Self::import_fd).
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import_fabric(cuda: &Cuda, handle: &FabricHandle, size: usize) -> Result<Self> {
        check_import_size(size)?;
        Self::adopt(Handle::import_fabric(cuda, WHAT, handle, size)?, size, true)
    }

    /// Takes over one reference to memory that other code created or imported, `size` bytes long: it is released with this object, or
    /// at once if this fails.
    ///
    /// Calls `cuMemRelease`.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Misaligned`], or [`Error::Call`].
    ///
    /// # Safety
    /// `raw` must be a handle of `cuda`'s driver with a reference that nobody else gives back.
    #[doc(alias = "cuMemRelease")]
    pub unsafe fn from_raw(cuda: &Cuda, raw: CUmemGenericAllocationHandle, size: usize) -> Result<Self> {
        let handle = Handle::own(cuda, WHAT, raw);
        check_import_size(size)?;
        Self::adopt(handle, size, false)
    }

    /// The memory that other code (another library's allocator) mapped at an address, `size` bytes long, with a reference of its own
    /// (`cuMemRetainAllocationHandle`): it outlives the other code's mapping.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Misaligned`], or [`Error::Call`] if nothing of virtual memory management is mapped there.
    ///
    /// # Safety
    /// The mapping must stay for as long as this call takes.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub unsafe fn retain(cuda: &Cuda, address: u64, size: usize) -> Result<Self> {
        check_import_size(size)?;
        let mut raw = 0;
        // SAFETY: `raw` is valid for one write; the driver looks the address up and reads nothing there.
        unsafe {
            cuda.driver().cuMemRetainAllocationHandle(&mut raw, address as usize as *mut std::ffi::c_void)
        }
        .attempt(|| format!("asking for the physical memory mapped at {address:#x}"))?;
        Self::adopt(Handle::own(cuda, WHAT, raw), size, false)
    }

    /// Asks the driver what the memory is. `cuMemGetAllocationPropertiesFromHandle` does not tell the size.
    fn adopt(handle: Handle, size: usize, imported: bool) -> Result<Self> {
        let mut raw = CUmemAllocationProp::default();
        // SAFETY: `raw` is valid for one write, and the handle is alive.
        unsafe { handle.cuda().driver().cuMemGetAllocationPropertiesFromHandle(&mut raw, handle.as_raw()) }
            .attempt(|| "asking for the properties of physical memory".into())?;
        let properties = Properties::from_raw(&raw).ok_or_else(|| Error::Unsupported {
            what: "imported memory",
            why: format!(
                "it is at a location of kind {}, which this crate does not know",
                raw.location.type_.0
            ),
        })?;
        handle.cuda().granularities(&properties)?.minimum.check("size of imported memory", size)?;
        let handle_types = HandleTypes::from_bits_retain(raw.requestedHandleTypes.0);
        Ok(Self { inner: Arc::new(Inner { handle, size, properties, handle_types, imported }) })
    }

    /// Exports the memory as a file descriptor, which [`import_fd`](Self::import_fd) takes in another process. The descriptor
    /// keeps the memory alive.
    ///
    /// Calls `cuMemExportToShareableHandle`.
    ///
    /// # Errors
    /// [`Error::NotExportable`] if it was not created for that or was imported, or [`Error::Call`].
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export_fd(&self) -> Result<OwnedFd> {
        self.inner.handle.export_fd(self.inner.handle_types)
    }

    /// Exports the memory as a FABRIC handle. The handle pins nothing: keep the memory alive until every importer has imported it.
    ///
    /// Calls `cuMemExportToShareableHandle`.
    ///
    /// # Errors
    /// [`Error::NotExportable`] if it was not created for that or was imported, or [`Error::Call`].
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export_fabric(&self) -> Result<FabricHandle> {
        self.inner.handle.export_fabric(self.inner.handle_types)
    }

    /// The driver.
    #[must_use]
    pub fn cuda(&self) -> &Cuda {
        self.inner.handle.cuda()
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.inner.handle
    }

    /// The raw handle, alive as long as this object or a clone of it.
    #[must_use]
    pub fn as_raw(&self) -> CUmemGenericAllocationHandle {
        self.inner.handle.as_raw()
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// Where the memory lies, with this process's device ordinals.
    #[must_use]
    pub fn location(&self) -> Location {
        self.inner.properties.location()
    }

    /// The properties that were asked for; for imported memory, what the driver reports.
    #[must_use]
    pub fn properties(&self) -> &Properties {
        &self.inner.properties
    }

    /// What the memory can be exported as. Of imported memory drivers tell nothing (seen with 580): only its creator can export it.
    #[must_use]
    pub fn handle_types(&self) -> HandleTypes {
        self.inner.handle_types
    }

    /// Whether other processes may reach the memory: it was created for that, or imported.
    pub(crate) fn may_be_shared(&self) -> bool {
        self.inner.imported || !self.inner.handle_types.is_empty()
    }

    /// Whether it was imported from another process (or from this one).
    #[must_use]
    pub fn is_imported(&self) -> bool {
        self.inner.imported
    }
}

/// FABRIC and fd where the driver really creates that, else fd alone.
fn best_available(
    cuda: &Cuda,
    location: Location,
    attempt: impl Fn(HandleTypes) -> Result<Handle>,
) -> Result<(Handle, HandleTypes)> {
    let claimed = match location {
        Location::Device(ordinal) => cuda
            .device(ordinal)?
            .claims(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?,
        // Every device of a machine says the same of its host.
        Location::HostNuma(_) | Location::Host if cuda.device_count() == 0 => false,
        Location::HostNuma(_) | Location::Host => cuda
            .device(0)?
            .claims(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED)?,
    };
    if claimed && cuda.may_have_fabric(location) {
        let both = HandleTypes::FABRIC | HandleTypes::POSIX_FD;
        match attempt(both) {
            Ok(handle) => return Ok((handle, both)),
            // The claim was wrong: there is no IMEX channel, or the platform cannot.
            Err(error)
                if matches!(
                    error.status(),
                    Some(
                        CUresult::CUDA_ERROR_NOT_PERMITTED
                            | CUresult::CUDA_ERROR_NOT_SUPPORTED
                            | CUresult::CUDA_ERROR_INVALID_DEVICE
                    )
                ) =>
            {
                cuda.has_no_fabric(location);
            }
            Err(error) => return Err(error),
        }
    }
    Ok((attempt(HandleTypes::POSIX_FD)?, HandleTypes::POSIX_FD))
}

fn check_import_size(size: usize) -> Result<()> {
    if size == 0 { Err(Error::Zero { what: "size of imported memory" }) } else { Ok(()) }
}

impl PartialEq for PhysicalMemory {
    /// Whether both are the same handle. Two imports of one memory are not.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for PhysicalMemory {}

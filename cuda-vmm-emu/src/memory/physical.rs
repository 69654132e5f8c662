//! Physical memory: where it is, how much of a device it takes, and the handles that refer to it.

use crate::config::{Config, Fabric};
use crate::core::{Core, fresh_handle};
use crate::memory::backing::{Backing, FileKind, Metadata};
use crate::multicast::Multicast;
use crate::status::{Outcome, code, get, lock, put, require};
use cuda_vmm_sys::ffi::c_ulonglong;
use cuda_vmm_sys::{
    CUdevice_attribute, CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp_v1,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// On the device with an ordinal.
    Device(usize),
    /// On the host at large.
    Host,
    /// On a host NUMA node.
    HostNuma(i32),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(ordinal) => write!(f, "device {ordinal}"),
            Self::Host => f.write_str("host"),
            Self::HostNuma(node) => write!(f, "host NUMA node {node}"),
        }
    }
}

impl Location {
    /// Understands the location of a new allocation.
    fn of_request(config: &Config, location: CUmemLocation) -> Outcome<Self> {
        match location.type_ {
            CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => usize::try_from(location.id)
                .ok()
                .filter(|&ordinal| ordinal < config.devices.len())
                .map(Self::Device)
                .ok_or(code::INVALID_DEVICE),
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA => {
                const NUMA: CUdevice_attribute =
                    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
                // The attribute is younger than the feature, which came with 12.2.
                let off = config.driver_version >= 12_090 && !config.can(0, NUMA);
                require(config.driver_version >= 12_020 && config.numa_nodes.contains(&location.id))?;
                if off { Err(code::NOT_SUPPORTED) } else { Ok(Self::HostNuma(location.id)) }
            }
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST => {
                require(config.driver_version >= 12_020 && config.host_memory)?;
                Ok(Self::Host)
            }
            // HOST_NUMA_CURRENT is refused for allocations by the driver as well.
            _ => Err(code::INVALID_VALUE),
        }
    }

    pub(crate) fn raw(self) -> CUmemLocation {
        let (type_, id) = match self {
            Self::Device(ordinal) => (CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, ordinal as i32),
            Self::Host => (CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, 0),
            Self::HostNuma(node) => (CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, node),
        };
        CUmemLocation { type_, id }
    }
}

/// How much of a device's memory is in use.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) total: u64,
    used: AtomicU64,
}

impl Account {
    pub(crate) fn new(total: u64) -> Self {
        Self { total, used: AtomicU64::new(0) }
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    pub(crate) fn charge(self: &Arc<Self>, size: u64) -> Outcome<Charge> {
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                used.checked_add(size).filter(|&sum| sum <= self.total)
            })
            .map_err(|_| code::OUT_OF_MEMORY)?;
        Ok(Charge { account: Arc::clone(self), size })
    }
}

/// A part of a device's memory, given back when dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    account: Arc<Account>,
    size: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.size, Ordering::AcqRel);
    }
}

/// One physical allocation.
#[derive(Debug)]
pub(crate) struct Physical {
    /// Its handle.
    pub(crate) handle: u64,
    pub(crate) location: Location,
    pub(crate) backing: Backing,
    pub(crate) imported: bool,
    _charge: Option<Charge>,
}

impl Physical {
    pub(crate) fn size(&self) -> u64 {
        self.backing.metadata.size
    }

    /// What it can be exported as. Of imported memory drivers tell no handle type, and only its creator can export it.
    pub(crate) fn handle_types(&self) -> u32 {
        if self.imported { 0 } else { self.backing.metadata.handle_types }
    }

    pub(crate) fn create(core: &Core, location: Location, mut metadata: Metadata) -> Outcome<Self> {
        let mut charge = None;
        if let Location::Device(ordinal) = location {
            charge = Some(core.accounts[ordinal].charge(metadata.size)?);
            metadata.uuid = core.config.devices[ordinal].uuid;
        }
        let raw = location.raw();
        metadata.location_type = raw.type_.0;
        metadata.location_id = raw.id;
        let backing = Backing::create(metadata)?;
        Ok(Self { handle: fresh_handle() as u64, location, backing, imported: false, _charge: charge })
    }

    /// Memory that another emulator made. It is on the device with the UUID that the file names.
    pub(crate) fn import(config: &Config, backing: Backing) -> Outcome<Self> {
        let metadata = &backing.metadata;
        let location = match location_type(metadata.location_type) {
            CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => {
                let found = config.devices.iter().position(|device| device.uuid == metadata.uuid);
                Location::Device(found.ok_or(code::INVALID_DEVICE)?)
            }
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA => Location::HostNuma(metadata.location_id),
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST => Location::Host,
            _ => return Err(code::INVALID_VALUE),
        };
        Ok(Self { handle: fresh_handle() as u64, location, backing, imported: true, _charge: None })
    }
}

/// A location type by its number, which may be any.
fn location_type(number: u32) -> CUmemLocationType {
    let mut kind = CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID;
    kind.0 = number;
    kind
}

/// What a handle refers to.
#[derive(Clone, Debug)]
pub(crate) enum Object {
    Physical(Arc<Physical>),
    Multicast(Arc<Multicast>),
}

impl Object {
    pub(crate) fn handle(&self) -> u64 {
        match self {
            Self::Physical(memory) => memory.handle,
            Self::Multicast(object) => object.handle,
        }
    }

    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Physical(memory) => memory.size(),
            Self::Multicast(object) => object.size,
        }
    }
}

/// A handle that was given out, and how often it must be released.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) object: Object,
    pub(crate) references: u64,
}

/// The handles that are valid.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    pub(crate) held: HashMap<u64, Held>,
}

impl Handles {
    /// Adds a reference to an object's handle, which may be its first.
    pub(crate) fn retain(&mut self, object: Object) -> u64 {
        let handle = object.handle();
        self.held.entry(handle).or_insert(Held { object, references: 0 }).references += 1;
        handle
    }

    pub(crate) fn object(&self, handle: u64) -> Outcome<Object> {
        self.held.get(&handle).map(|held| held.object.clone()).ok_or(code::INVALID_VALUE)
    }

    pub(crate) fn physical(&self, handle: u64) -> Outcome<Arc<Physical>> {
        match self.object(handle)? {
            Object::Physical(memory) => Ok(memory),
            Object::Multicast(_) => Err(code::INVALID_VALUE),
        }
    }

    pub(crate) fn multicast(&self, handle: u64) -> Outcome<Arc<Multicast>> {
        match self.object(handle)? {
            Object::Multicast(object) => Ok(object),
            Object::Physical(_) => Err(code::INVALID_VALUE),
        }
    }
}

/// Checks the handle types that are asked for. Which error a driver returns tells its users whether to try another type.
pub(crate) fn check_handle_types(config: &Config, types: u32) -> Outcome {
    const FD: u32 = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
    const FABRIC: u32 = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;
    require(types & !config.known_handle_types() == 0)?;
    if types & FD != 0 && !config.posix_fd {
        return Err(code::NOT_SUPPORTED);
    }
    if types & FABRIC != 0 {
        match config.fabric {
            Fabric::Unsupported => return Err(code::NOT_SUPPORTED),
            Fabric::NoImexChannel => return Err(code::NOT_PERMITTED),
            Fabric::Working => {}
        }
    }
    Ok(())
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes.
impl Core {
    pub(crate) unsafe fn cuMemGetAllocationGranularity(
        self: &Arc<Self>,
        granularity: *mut usize,
        prop: *const CUmemAllocationProp_v1,
        option: CUmemAllocationGranularity_flags,
    ) -> Outcome {
        // SAFETY: the caller's contract.
        let prop = unsafe { get(prop)? };
        require(prop.type_ == CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED)?;
        Location::of_request(&self.config, prop.location)?;
        let bytes = match option {
            CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM => self.config.granularity,
            CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED => {
                self.config.recommended_granularity
            }
            _ => return Err(code::INVALID_VALUE),
        };
        // SAFETY: the caller's contract.
        unsafe { put(granularity, bytes) }
    }

    pub(crate) unsafe fn cuMemCreate(
        self: &Arc<Self>,
        handle: *mut CUmemGenericAllocationHandle,
        size: usize,
        prop: *const CUmemAllocationProp_v1,
        flags: c_ulonglong,
    ) -> Outcome {
        require(!handle.is_null() && flags == 0)?;
        // SAFETY: the caller's contract.
        let prop = unsafe { get(prop)? };
        match prop.type_ {
            CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED => {}
            CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_MANAGED => return Err(code::NOT_SUPPORTED),
            _ => return Err(code::INVALID_VALUE),
        }
        let location = Location::of_request(&self.config, prop.location)?;
        require(size > 0 && size.is_multiple_of(self.config.granularity))?;
        require(prop.allocFlags.reserved == [0; 4])?;
        let types = prop.requestedHandleTypes.0;
        // Memory of the host at large cannot be shared between processes.
        require(location != Location::Host || types == 0)?;
        check_handle_types(&self.config, types)?;

        let mut metadata = Metadata::new(FileKind::Allocation, size as u64);
        metadata.handle_types = types;
        metadata.usage = prop.allocFlags.usage;
        if let Location::Device(ordinal) = location {
            use CUdevice_attribute as A;
            // Compression is a wish: what was got is read back from the handle.
            if self.config.can(ordinal, A::CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED) {
                metadata.compression = prop.allocFlags.compressionType;
            }
            let rdma =
                self.config.can(ordinal, A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
            if prop.allocFlags.gpuDirectRDMACapable != 0 && !rdma {
                return Err(code::NOT_SUPPORTED);
            }
            metadata.rdma = prop.allocFlags.gpuDirectRDMACapable;
        }
        let memory = Arc::new(Physical::create(self, location, metadata)?);
        let value = lock(&self.handles).retain(Object::Physical(memory));
        // SAFETY: not null, and the caller's contract.
        unsafe { put(handle, value) }
    }

    pub(crate) unsafe fn cuMemRelease(self: &Arc<Self>, handle: CUmemGenericAllocationHandle) -> Outcome {
        let mut handles = lock(&self.handles);
        let held = handles.held.get_mut(&handle).ok_or(code::INVALID_VALUE)?;
        held.references -= 1;
        if held.references == 0 {
            let gone = handles.held.remove(&handle);
            // The last reference may end a multicast object, which takes locks of its own.
            drop(handles);
            drop(gone);
        }
        Ok(())
    }

    pub(crate) unsafe fn cuMemGetAllocationPropertiesFromHandle(
        self: &Arc<Self>,
        prop: *mut CUmemAllocationProp_v1,
        handle: CUmemGenericAllocationHandle,
    ) -> Outcome {
        let memory = lock(&self.handles).physical(handle)?;
        let metadata = &memory.backing.metadata;
        let mut out = CUmemAllocationProp_v1 {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            location: memory.location.raw(),
            ..Default::default()
        };
        out.requestedHandleTypes.0 = memory.handle_types();
        out.allocFlags.compressionType = metadata.compression;
        out.allocFlags.gpuDirectRDMACapable = metadata.rdma;
        out.allocFlags.usage = metadata.usage;
        // SAFETY: the caller's contract.
        unsafe { put(prop, out) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_gives_no_more_than_it_has() {
        let account = Arc::new(Account::new(100));
        let first = account.charge(60).unwrap();
        assert_eq!(account.charge(41).map(drop), Err(code::OUT_OF_MEMORY));
        assert_eq!(account.charge(u64::MAX).map(drop), Err(code::OUT_OF_MEMORY));
        let second = account.charge(40).unwrap();
        assert_eq!(account.used(), 100);
        drop(first);
        assert_eq!(account.used(), 40);
        drop(second);
        assert_eq!(account.used(), 0);
    }
}

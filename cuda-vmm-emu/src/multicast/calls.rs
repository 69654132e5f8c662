//! The functions of multicast objects.

use super::{MAX_TEAM, Multicast};
use crate::core::Core;
use crate::memory::physical::{Location, Object, Physical, check_handle_types};
use crate::memory::space::{Kind, Range};
use crate::status::{Outcome, code, get, lock, put, read, require};
use cuda_vmm_sys::ffi::c_ulonglong;
use cuda_vmm_sys::{
    CUdevice, CUdevice_attribute, CUdeviceptr, CUmemGenericAllocationHandle, CUmulticastGranularity_flags,
    CUmulticastObjectProp, Function,
};
use std::sync::Arc;

/// What is to be bound: memory by its handle, or by its address.
enum Target {
    Handle { handle: CUmemGenericAllocationHandle, offset: u64 },
    Address(CUdeviceptr),
}

impl Core {
    fn check_multicast(&self, prop: &CUmulticastObjectProp) -> Outcome {
        if !self.config.multicast {
            return Err(code::NOT_SUPPORTED);
        }
        require(prop.flags == 0 && (1..=MAX_TEAM).contains(&prop.numDevices))
    }

    fn bind(
        &self,
        function: Function,
        object: CUmemGenericAllocationHandle,
        device: Option<CUdevice>,
        offset: usize,
        target: Target,
        size: usize,
        flags: c_ulonglong,
    ) -> Outcome {
        let (offset, size) = (offset as u64, size as u64);
        require(flags == 0 && size > 0)?;
        let device = device.map(|device| self.ordinal(device)).transpose()?;
        let object = lock(&self.handles).multicast(object)?;
        let aligned = |value: u64| value.is_multiple_of(object.granularity);
        require(aligned(offset) && aligned(size))?;
        require(offset.checked_add(size).is_some_and(|end| end <= object.size))?;
        let (memory, memory_offset) = match target {
            Target::Handle { handle, offset } => (lock(&self.handles).physical(handle)?, offset),
            Target::Address(address) => {
                require(aligned(address))?;
                self.mapped_at(address, size)?
            }
        };
        require(aligned(memory_offset))?;
        require(memory_offset.checked_add(size).is_some_and(|end| end <= memory.size()))?;
        // Memory of the host takes part in no multicast.
        let Location::Device(owner) = memory.location else { return Err(code::INVALID_VALUE) };
        if device.is_some_and(|device| device != owner) {
            return Err(code::INVALID_DEVICE);
        }
        object.await_devices(self, function)?;
        object.bind(owner, self.config.devices[owner].uuid, offset, memory, memory_offset, size)
    }

    /// The memory of a mapping that holds a whole range, and the range's offset in it.
    fn mapped_at(&self, address: u64, size: u64) -> Outcome<(Arc<Physical>, u64)> {
        match read(&self.space).at(address) {
            Some((
                start,
                Range { size: mapped, kind: Kind::Mapping { object: Object::Physical(memory), .. } },
            )) if size <= mapped - (address - start) => Ok((Arc::clone(memory), address - start)),
            _ => Err(code::INVALID_VALUE),
        }
    }
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes.
impl Core {
    pub(crate) unsafe fn cuMulticastGetGranularity(
        self: &Arc<Self>,
        granularity: *mut usize,
        prop: *const CUmulticastObjectProp,
        option: CUmulticastGranularity_flags,
    ) -> Outcome {
        // SAFETY: the caller's contract.
        self.check_multicast(&unsafe { get(prop)? })?;
        let bytes = match option {
            CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_MINIMUM => {
                self.config.multicast_granularity
            }
            CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_RECOMMENDED => {
                self.config.multicast_recommended_granularity
            }
            _ => return Err(code::INVALID_VALUE),
        };
        // SAFETY: the caller's contract.
        unsafe { put(granularity, bytes) }
    }

    pub(crate) unsafe fn cuMulticastCreate(
        self: &Arc<Self>,
        handle: *mut CUmemGenericAllocationHandle,
        prop: *const CUmulticastObjectProp,
    ) -> Outcome {
        require(!handle.is_null())?;
        // SAFETY: the caller's contract.
        let prop = unsafe { get(prop)? };
        self.check_multicast(&prop)?;
        require(prop.size > 0 && prop.size % self.config.multicast_granularity == 0)?;
        let types = u32::try_from(prop.handleTypes).map_err(|_| code::INVALID_VALUE)?;
        check_handle_types(&self.config, types)?;
        let object = Multicast::create(self, prop.size as u64, prop.numDevices, types)?;
        let value = lock(&self.handles).retain(Object::Multicast(Arc::new(object)));
        // SAFETY: not null, and the caller's contract.
        unsafe { put(handle, value) }
    }

    pub(crate) unsafe fn cuMulticastAddDevice(
        self: &Arc<Self>,
        handle: CUmemGenericAllocationHandle,
        device: CUdevice,
    ) -> Outcome {
        let ordinal = self.ordinal(device)?;
        let object = lock(&self.handles).multicast(handle)?;
        if !self.config.can(ordinal, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED) {
            return Err(code::NOT_SUPPORTED);
        }
        object.add_device(self.config.devices[ordinal].uuid)
    }

    pub(crate) unsafe fn cuMulticastBindMem(
        self: &Arc<Self>,
        object: CUmemGenericAllocationHandle,
        offset: usize,
        memory: CUmemGenericAllocationHandle,
        memory_offset: usize,
        size: usize,
        flags: c_ulonglong,
    ) -> Outcome {
        let target = Target::Handle { handle: memory, offset: memory_offset as u64 };
        self.bind(Function::cuMulticastBindMem, object, None, offset, target, size, flags)
    }

    pub(crate) unsafe fn cuMulticastBindMem_v2(
        self: &Arc<Self>,
        object: CUmemGenericAllocationHandle,
        device: CUdevice,
        offset: usize,
        memory: CUmemGenericAllocationHandle,
        memory_offset: usize,
        size: usize,
        flags: c_ulonglong,
    ) -> Outcome {
        let target = Target::Handle { handle: memory, offset: memory_offset as u64 };
        self.bind(Function::cuMulticastBindMem_v2, object, Some(device), offset, target, size, flags)
    }

    pub(crate) unsafe fn cuMulticastBindAddr(
        self: &Arc<Self>,
        object: CUmemGenericAllocationHandle,
        offset: usize,
        address: CUdeviceptr,
        size: usize,
        flags: c_ulonglong,
    ) -> Outcome {
        let target = Target::Address(address);
        self.bind(Function::cuMulticastBindAddr, object, None, offset, target, size, flags)
    }

    pub(crate) unsafe fn cuMulticastBindAddr_v2(
        self: &Arc<Self>,
        object: CUmemGenericAllocationHandle,
        device: CUdevice,
        offset: usize,
        address: CUdeviceptr,
        size: usize,
        flags: c_ulonglong,
    ) -> Outcome {
        let target = Target::Address(address);
        self.bind(Function::cuMulticastBindAddr_v2, object, Some(device), offset, target, size, flags)
    }

    pub(crate) unsafe fn cuMulticastUnbind(
        self: &Arc<Self>,
        handle: CUmemGenericAllocationHandle,
        device: CUdevice,
        offset: usize,
        size: usize,
    ) -> Outcome {
        let ordinal = self.ordinal(device)?;
        let object = lock(&self.handles).multicast(handle)?;
        object.unbind(self.config.devices[ordinal].uuid, offset as u64, size as u64)
    }
}

//! What the driver tells about an address.

use crate::core::Core;
use crate::memory::access::{Access, Accessor};
use crate::memory::physical::{Location, Object};
use crate::memory::space::{Kind, Range};
use crate::status::{Outcome, code, lock, put, read, require};
use cuda_vmm_sys::ffi::{c_int, c_uint, c_ulonglong, c_void};
use cuda_vmm_sys::{CUcontext, CUdeviceptr, CUmemorytype, CUpointer_attribute};
use std::sync::Arc;

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes.
impl Core {
    pub(crate) unsafe fn cuMemGetAddressRange(
        self: &Arc<Self>,
        base: *mut CUdeviceptr,
        size: *mut usize,
        address: CUdeviceptr,
    ) -> Outcome {
        let space = read(&self.space);
        let (start, range) = space.at(address).ok_or(code::INVALID_VALUE)?;
        require(!matches!(range.kind, Kind::Host { .. } | Kind::Registered { .. }))?;
        // SAFETY: the caller's contract; either may be null.
        unsafe {
            if !base.is_null() {
                put(base, start)?;
            }
            if !size.is_null() {
                put(size, range.size as usize)?;
            }
        }
        Ok(())
    }

    pub(crate) unsafe fn cuPointerGetAttribute(
        self: &Arc<Self>,
        data: *mut c_void,
        attribute: CUpointer_attribute,
        address: CUdeviceptr,
    ) -> Outcome {
        use CUpointer_attribute as A;
        require(!data.is_null())?;
        let contexts = lock(&self.contexts);
        let space = read(&self.space);
        let (start, range) = space.at(address).ok_or(code::INVALID_VALUE)?;
        let location = range.location();
        let on_host = matches!(location, Some(Location::Host | Location::HostNuma(_)));
        let owner = match range.kind {
            Kind::Plain { device, .. }
            | Kind::Opened { device, .. }
            | Kind::Host { device, .. }
            | Kind::Registered { device } => Some(device),
            Kind::Mapping { .. } => None,
        };
        // SAFETY: `data` is not null, and valid for the attribute's type by the caller's contract.
        unsafe {
            match attribute {
                A::CU_POINTER_ATTRIBUTE_CONTEXT => {
                    let handle = owner.map_or(0, |device| contexts.devices[device].handle);
                    put(data.cast::<CUcontext>(), handle as CUcontext)
                }
                A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
                    let kind = if on_host {
                        CUmemorytype::CU_MEMORYTYPE_HOST
                    } else {
                        CUmemorytype::CU_MEMORYTYPE_DEVICE
                    };
                    put(data.cast::<c_uint>(), kind.0)
                }
                A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => put(data.cast::<CUdeviceptr>(), address),
                A::CU_POINTER_ATTRIBUTE_HOST_POINTER => {
                    require(on_host)?;
                    put(data.cast::<*mut c_void>(), address as *mut c_void)
                }
                A::CU_POINTER_ATTRIBUTE_BUFFER_ID => put(data.cast::<c_ulonglong>(), start),
                A::CU_POINTER_ATTRIBUTE_IS_MANAGED | A::CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => {
                    put(data.cast::<c_uint>(), 0)
                }
                A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                    let ordinal = match (location, owner) {
                        (Some(Location::Device(ordinal)), _) | (_, Some(ordinal)) => ordinal as c_int,
                        _ => -1,
                    };
                    put(data.cast::<c_int>(), ordinal)
                }
                A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
                    put(data.cast::<c_uint>(), c_uint::from(matches!(range.kind, Kind::Plain { .. })))
                }
                A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => {
                    let base = space.reservation(address).map_or(start, |(base, _)| base);
                    put(data.cast::<CUdeviceptr>(), base)
                }
                A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => {
                    let size = space.reservation(address).map_or(range.size, |(_, size)| size);
                    put(data.cast::<usize>(), size as usize)
                }
                A::CU_POINTER_ATTRIBUTE_MAPPED => put(data.cast::<c_uint>(), 1),
                A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => put(data.cast::<CUdeviceptr>(), start),
                A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE => put(data.cast::<usize>(), range.size as usize),
                A::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => {
                    put(data.cast::<c_ulonglong>(), handle_types(range))
                }
                A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => {
                    let capable = match &range.kind {
                        Kind::Mapping { object: Object::Physical(memory), .. } => {
                            memory.backing.metadata.rdma != 0
                        }
                        Kind::Plain { .. } => true,
                        _ => false,
                    };
                    put(data.cast::<c_uint>(), c_uint::from(capable))
                }
                A::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => {
                    let access = match (&range.kind, self.current_in(&contexts)) {
                        (Kind::Mapping { access, .. }, Some(device)) => access.of(Accessor::Device(device)),
                        (Kind::Mapping { .. }, None) => Access::None,
                        _ => Access::ReadWrite,
                    };
                    put(data.cast::<c_uint>(), access.flags().0)
                }
                _ => Err(code::INVALID_VALUE),
            }
        }
    }
}

fn handle_types(range: &Range) -> c_ulonglong {
    match &range.kind {
        Kind::Mapping { object: Object::Physical(memory), .. } => memory.handle_types().into(),
        Kind::Mapping { object: Object::Multicast(object), .. } => object.handle_types.into(),
        _ => 0,
    }
}

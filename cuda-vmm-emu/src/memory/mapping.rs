//! Mappings of physical memory and multicast objects, and their access.

use crate::core::Core;
use crate::memory::access::{self, AccessTable, Accessor};
use crate::memory::physical::Object;
use crate::memory::raw;
use crate::memory::space::{Kind, Range};
use crate::status::{Outcome, array, code, get, lock, put, read, require, write};
use cuda_vmm_sys::ffi::{c_ulonglong, c_void};
use cuda_vmm_sys::{CUdeviceptr, CUmemAccessDesc_v1, CUmemGenericAllocationHandle, CUmemLocation};
use std::sync::Arc;

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes.
impl Core {
    pub(crate) unsafe fn cuMemMap(
        self: &Arc<Self>,
        address: CUdeviceptr,
        size: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: c_ulonglong,
    ) -> Outcome {
        let size = size as u64;
        require(flags == 0 && offset == 0 && size > 0)?;
        let object = lock(&self.handles).object(handle)?;
        let granularity = match &object {
            Object::Physical(_) => self.config.granularity,
            Object::Multicast(object) => object.granularity.max(self.config.granularity as u64) as usize,
        } as u64;
        require(
            size.is_multiple_of(granularity) && address.is_multiple_of(granularity) && size <= object.size(),
        )?;
        if let Object::Multicast(object) = &object {
            object.await_devices(self, cuda_vmm_sys::Function::cuMemMap)?;
        }

        let mut space = write(&self.space);
        let (start, reserved) = space.reservation(address).ok_or(code::INVALID_VALUE)?;
        require(size <= reserved - (address - start) && !space.overlaps(address, size))?;
        if let Object::Physical(memory) = &object {
            raw::map_file(address, size, memory.backing.fd(), 0)?;
        }
        let access = AccessTable::none(self.config.devices.len());
        space.ranges.insert(address, Range { size, kind: Kind::Mapping { object, access } });
        Ok(())
    }

    pub(crate) unsafe fn cuMemUnmap(self: &Arc<Self>, address: CUdeviceptr, size: usize) -> Outcome {
        let mut gone = Vec::new();
        {
            let mut space = write(&self.space);
            let starts = space.whole_mappings(address, size as u64)?;
            raw::unmap(address, size as u64)?;
            gone.extend(starts.iter().filter_map(|start| space.ranges.remove(start)));
        }
        // The last reference may end a multicast object, which takes locks of its own.
        drop(gone);
        Ok(())
    }

    pub(crate) unsafe fn cuMemSetAccess(
        self: &Arc<Self>,
        address: CUdeviceptr,
        size: usize,
        desc: *const CUmemAccessDesc_v1,
        count: usize,
    ) -> Outcome {
        require(count > 0)?;
        // SAFETY: the caller's contract.
        let grants = unsafe { array(desc, count)? }
            .into_iter()
            .map(|desc| access::grant(&self.config, desc))
            .collect::<Outcome<Vec<_>>>()?;
        let mut space = write(&self.space);
        let starts = space.whole_mappings(address, size as u64)?;
        // Everything is checked before anything changes.
        let mut changed = Vec::with_capacity(starts.len());
        for start in starts {
            let range = &space.ranges[&start];
            let Kind::Mapping { object, access } = &range.kind else { return Err(code::INVALID_VALUE) };
            let mut access = access.clone();
            for &(who, level) in &grants {
                match (object, who) {
                    (Object::Physical(memory), _) => access::may_grant(&self.config, who, memory.location)?,
                    (Object::Multicast(object), Accessor::Device(ordinal)) => {
                        let uuid = self.config.devices[ordinal].uuid;
                        if !object.has_device(uuid)? {
                            return Err(code::INVALID_DEVICE);
                        }
                    }
                    (Object::Multicast(_), Accessor::Host) => return Err(code::INVALID_VALUE),
                }
                access.set(who, level);
            }
            changed.push((start, range.size, matches!(object, Object::Physical(_)), access));
        }
        for (start, size, physical, new) in changed {
            if physical {
                raw::protect(start, size, new.protection())?;
            }
            if let Some(Range { kind: Kind::Mapping { access, .. }, .. }) = space.ranges.get_mut(&start) {
                *access = new;
            }
        }
        Ok(())
    }

    pub(crate) unsafe fn cuMemGetAccess(
        self: &Arc<Self>,
        flags: *mut c_ulonglong,
        location: *const CUmemLocation,
        address: CUdeviceptr,
    ) -> Outcome {
        // SAFETY: the caller's contract.
        let who = access::accessor(&self.config, unsafe { get(location)? })?;
        let space = read(&self.space);
        let Some((_, Range { kind: Kind::Mapping { access, .. }, .. })) = space.at(address) else {
            return Err(code::INVALID_VALUE);
        };
        // SAFETY: the caller's contract.
        unsafe { put(flags, c_ulonglong::from(access.of(who).flags().0)) }
    }

    pub(crate) unsafe fn cuMemRetainAllocationHandle(
        self: &Arc<Self>,
        handle: *mut CUmemGenericAllocationHandle,
        address: *mut c_void,
    ) -> Outcome {
        require(!handle.is_null())?;
        // In the order of the locks: handles, then space.
        let mut handles = lock(&self.handles);
        let space = read(&self.space);
        let Some((_, Range { kind: Kind::Mapping { object, .. }, .. })) = space.at(address as u64) else {
            return Err(code::INVALID_VALUE);
        };
        let value = handles.retain(object.clone());
        // SAFETY: not null, and the caller's contract.
        unsafe { put(handle, value) }
    }
}

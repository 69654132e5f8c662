//! Memory across processes: descriptors, FABRIC handles, IPC handles, dma-buf.
//!
//! A descriptor is the memory's own file. The handles of 64 bytes name it by process, descriptor number and inode, and pin nothing: who takes
//! one up opens the file through the exporter's entries in `/proc`, as long as the exporter has it.

use crate::config::Fabric;
use crate::core::Core;
use crate::memory::backing::{Backing, FileId, FileKind, checksum, file_id};
use crate::memory::physical::{Object, Physical};
use crate::memory::space::{Kind, Range};
use crate::multicast::Multicast;
use crate::status::{Outcome, code, get, lock, os, put, read, require, write};
use bytemuck::{Pod, Zeroable};
use cuda_vmm_sys::ffi::{c_int, c_uint, c_ulonglong, c_void};
use cuda_vmm_sys::{
    CUdeviceptr, CUipcMemHandle_v1, CUmemAllocationHandleType, CUmemFabricHandle,
    CUmemGenericAllocationHandle, CUmemRangeHandleType,
};
use rustix::fd::AsFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::IntoRawFd;
use std::sync::Arc;

const FABRIC_MAGIC: [u8; 8] = *b"emufabrc";
const IPC_MAGIC: [u8; 8] = *b"emuipcmm";

/// What a handle of 64 bytes says.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Locator {
    magic: [u8; 8],
    process: u32,
    descriptor: i32,
    device: u64,
    inode: u64,
    /// The exporting emulator, in its process.
    emulator: u64,
    /// Bytes that the exporter allocated, which may be fewer than the file has.
    size: u64,
    checksum: u64,
    reserved: u64,
}

impl Locator {
    fn bytes(magic: [u8; 8], core: &Core, backing: &Backing, size: u64) -> [u8; 64] {
        let mut locator = Self {
            magic,
            process: std::process::id(),
            descriptor: backing.number(),
            device: backing.id.device,
            inode: backing.id.inode,
            emulator: core.id,
            size,
            checksum: 0,
            reserved: 0,
        };
        locator.checksum = checksum(bytemuck::bytes_of(&locator));
        bytemuck::cast(locator)
    }

    fn parse(magic: [u8; 8], bytes: [u8; 64]) -> Outcome<Self> {
        let locator: Self = bytemuck::cast(bytes);
        let sum = checksum(bytemuck::bytes_of(&Self { checksum: 0, ..locator }));
        require(locator.magic == magic && locator.checksum == sum)?;
        Ok(locator)
    }

    fn id(&self) -> FileId {
        FileId { device: self.device, inode: self.inode }
    }

    /// Opens the file, if the exporter still has it.
    fn open(&self) -> Outcome<Backing> {
        open_of_process(self.process, self.descriptor, self.id()).and_then(Backing::open)
    }
}

/// Opens another process's descriptor anew, if it still is the file that it was.
pub(crate) fn open_of_process(process: u32, descriptor: i32, id: FileId) -> Outcome<rustix::fd::OwnedFd> {
    let path = format!("/proc/{process}/fd/{descriptor}");
    let fd =
        rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(
            |errno| match errno {
                // The exporter has released it, or is gone.
                Errno::NOENT | Errno::SRCH | Errno::NXIO => code::INVALID_HANDLE,
                errno => os(errno),
            },
        )?;
    if file_id(fd.as_fd())? != id {
        return Err(code::INVALID_HANDLE);
    }
    Ok(fd)
}

impl Core {
    fn fabric_works(&self) -> Outcome {
        match self.config.fabric {
            Fabric::Unsupported => Err(code::NOT_SUPPORTED),
            Fabric::NoImexChannel => Err(code::NOT_PERMITTED),
            Fabric::Working => Ok(()),
        }
    }

    /// Takes a file as an object of this emulator, if it was exported as `kind` allows.
    fn adopt(&self, backing: Backing, kind: CUmemAllocationHandleType) -> Outcome<Object> {
        if backing.is(FileKind::Multicast) {
            let object = Multicast::import(&self.config, backing)?;
            require(object.handle_types & kind.0 != 0)?;
            return Ok(Object::Multicast(Arc::new(object)));
        }
        require(backing.is(FileKind::Allocation) && backing.metadata.handle_types & kind.0 != 0)?;
        require(backing.metadata.size.is_multiple_of(self.config.granularity as u64))?;
        Ok(Object::Physical(Arc::new(Physical::import(&self.config, backing)?)))
    }
}

/// The functions of `cuda.h`, by their names there.
///
/// # Safety
/// All take the C function's contract over: pointers are null or valid for what the function reads and writes.
impl Core {
    pub(crate) unsafe fn cuMemExportToShareableHandle(
        self: &Arc<Self>,
        out: *mut c_void,
        handle: CUmemGenericAllocationHandle,
        kind: CUmemAllocationHandleType,
        flags: c_ulonglong,
    ) -> Outcome {
        require(!out.is_null() && flags == 0)?;
        let object = lock(&self.handles).object(handle)?;
        let (backing, types) = match &object {
            Object::Physical(memory) => (&memory.backing, memory.handle_types()),
            Object::Multicast(object) => (object.backing(), object.handle_types),
        };
        // The type must be one alone, and one that was asked for at creation, here.
        require(kind.0.is_power_of_two() && types & kind.0 != 0)?;
        match kind {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => {
                let fd = backing.duplicate()?.into_raw_fd();
                // SAFETY: not null; for this type the caller passes a pointer to an int.
                unsafe { put(out.cast::<c_int>(), fd) }
            }
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC => {
                self.fabric_works()?;
                let data = Locator::bytes(FABRIC_MAGIC, self, backing, object.size());
                // SAFETY: not null; for this type the caller passes a pointer to a FABRIC handle.
                unsafe { put(out.cast::<CUmemFabricHandle>(), CUmemFabricHandle { data }) }
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    pub(crate) unsafe fn cuMemImportFromShareableHandle(
        self: &Arc<Self>,
        handle: *mut CUmemGenericAllocationHandle,
        shared: *mut c_void,
        kind: CUmemAllocationHandleType,
    ) -> Outcome {
        require(!handle.is_null())?;
        let backing = match kind {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => {
                if !self.config.posix_fd {
                    return Err(code::NOT_SUPPORTED);
                }
                let fd = i32::try_from(shared as usize).map_err(|_| code::INVALID_VALUE)?;
                Backing::open_raw(fd)?
            }
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC => {
                require(self.config.known_handle_types() & kind.0 != 0)?;
                self.fabric_works()?;
                // SAFETY: for this type the caller passes a pointer to a FABRIC handle.
                let data = unsafe { get(shared.cast::<CUmemFabricHandle>())? }.data;
                Locator::parse(FABRIC_MAGIC, data)?.open()?
            }
            _ => return Err(code::INVALID_VALUE),
        };
        let object = self.adopt(backing, kind)?;
        let value = lock(&self.handles).retain(object);
        // SAFETY: not null, and the caller's contract.
        unsafe { put(handle, value) }
    }

    pub(crate) unsafe fn cuMemGetHandleForAddressRange(
        self: &Arc<Self>,
        handle: *mut c_void,
        address: CUdeviceptr,
        size: usize,
        kind: CUmemRangeHandleType,
        flags: c_ulonglong,
    ) -> Outcome {
        require(!handle.is_null() && size > 0 && flags & !1 == 0)?;
        require(kind == CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)?;
        if !self.config.dma_buf {
            return Err(code::NOT_SUPPORTED);
        }
        let page = rustix::param::page_size() as u64;
        require(address.is_multiple_of(page) && (size as u64).is_multiple_of(page))?;
        let space = read(&self.space);
        // The descriptor is that of the memory's file, whose first byte must be the range's.
        let fd = match space.ranges.get(&address) {
            Some(Range { kind: Kind::Mapping { object: Object::Physical(memory), .. }, size: mapped }) => {
                require(size as u64 <= *mapped)?;
                memory.backing.duplicate()?
            }
            Some(Range { kind: Kind::Plain { memory, .. }, .. }) => {
                require(size as u64 <= memory.size())?;
                memory.backing.duplicate()?
            }
            _ => return Err(code::INVALID_VALUE),
        };
        // SAFETY: not null; for this type the caller passes a pointer to an int.
        unsafe { put(handle.cast::<c_int>(), fd.into_raw_fd()) }
    }

    pub(crate) unsafe fn cuIpcGetMemHandle(
        self: &Arc<Self>,
        handle: *mut CUipcMemHandle_v1,
        address: CUdeviceptr,
    ) -> Outcome {
        self.current_healthy()?;
        let space = read(&self.space);
        // Memory of the virtual memory functions, and of another process, has no such handle.
        let (size, memory) = match space.at(address) {
            Some((_, Range { size, kind: Kind::Plain { memory, .. } })) => (*size, memory),
            _ => return Err(code::INVALID_VALUE),
        };
        let data = Locator::bytes(IPC_MAGIC, self, &memory.backing, size);
        // SAFETY: the caller's contract.
        unsafe { put(handle, CUipcMemHandle_v1 { reserved: bytemuck::cast(data) }) }
    }

    pub(crate) unsafe fn cuIpcOpenMemHandle(
        self: &Arc<Self>,
        address: *mut CUdeviceptr,
        handle: CUipcMemHandle_v1,
        flags: c_uint,
    ) -> Outcome {
        require(!address.is_null() && flags == 1)?;
        let device = self.current_healthy()?;
        let locator = Locator::parse(IPC_MAGIC, bytemuck::cast(handle.reserved))?;
        if locator.process == std::process::id() && locator.emulator == self.id {
            // As the driver: not in the process that exported it.
            return Err(code::INVALID_CONTEXT);
        }
        {
            let mut space = write(&self.space);
            let open = space.ranges.iter_mut().find_map(|(&start, range)| match &mut range.kind {
                Kind::Opened { memory, device: of, references, .. }
                    if memory.backing.id == locator.id() && *of == device =>
                {
                    *references += 1;
                    Some(start)
                }
                _ => None,
            });
            if let Some(start) = open {
                // SAFETY: not null, and the caller's contract.
                return unsafe { put(address, start) };
            }
        }
        let backing = locator.open()?;
        require(backing.is(FileKind::Plain) && (1..=backing.metadata.size).contains(&locator.size))?;
        let memory = Arc::new(Physical::import(&self.config, backing)?);
        if let crate::Location::Device(owner) = memory.location
            && !self.config.reaches(device, owner)
        {
            return Err(code::PEER_ACCESS_UNSUPPORTED);
        }
        let (start, reserved) = self.map_alone(&memory)?;
        let kind = Kind::Opened { memory, device, references: 1, reserved };
        write(&self.space).ranges.insert(start, Range { size: locator.size, kind });
        // SAFETY: not null, and the caller's contract.
        unsafe { put(address, start) }
    }

    pub(crate) unsafe fn cuIpcCloseMemHandle(self: &Arc<Self>, address: CUdeviceptr) -> Outcome {
        self.current()?;
        let device = match read(&self.space).ranges.get(&address) {
            Some(Range { kind: Kind::Opened { device, .. }, .. }) => *device,
            _ => return Err(code::INVALID_VALUE),
        };
        let finished = self.finish_context(device);
        let mut space = write(&self.space);
        match space.ranges.get_mut(&address) {
            Some(Range { kind: Kind::Opened { references, .. }, .. }) => {
                *references -= 1;
                if *references == 0 {
                    space.remove_whole(address);
                }
            }
            _ => return Err(code::INVALID_VALUE),
        }
        finished
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::memory::backing::Metadata;

    #[test]
    fn a_handle_survives_the_journey_and_no_other_bytes_pass() {
        let core = Core::new(Config::new(1));
        let backing = Backing::create(Metadata::new(FileKind::Plain, 4096)).unwrap();
        let bytes = Locator::bytes(IPC_MAGIC, &core, &backing, 100);
        let locator = Locator::parse(IPC_MAGIC, bytes).unwrap();
        assert_eq!((locator.size, locator.id()), (100, backing.id));
        assert_eq!(locator.open().unwrap().id, backing.id);

        assert_eq!(Locator::parse(FABRIC_MAGIC, bytes).map(drop), Err(code::INVALID_VALUE));
        for byte in 0..64 {
            let mut bent = bytes;
            bent[byte] ^= 1;
            assert_eq!(Locator::parse(IPC_MAGIC, bent).map(drop), Err(code::INVALID_VALUE), "byte {byte}");
        }
        drop(backing);
        assert_eq!(locator.open().map(drop), Err(code::INVALID_HANDLE));
    }
}

//! What the driver says about memory that is to become a window, ahead of the collective call: a rank that fails inside it leaves the
//! others waiting.

use crate::device::Device;
use crate::environment::{self, WindowSettings};
use crate::error::{Error, Result};
use cuda_vmm_sys::{
    CUdeviceptr, CUmemAllocationHandleType, CUmemAllocationProp_v1, CUmemGenericAllocationHandle,
    CUmemLocationType, CallError, Driver,
};
use nccl_gin_sys::{Generation, NCCL_WIN_REQUIRED_ALIGNMENT, Nccl};
use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

/// Addresses come in units of 4 GiB.
const UNIT: usize = 1 << 32;

/// Checks that NCCL can export `length` bytes at `address` to other processes. The device is current.
pub(crate) fn check(device: &Device, nccl: &Nccl, address: usize, length: usize) -> Result<()> {
    check_with(device, nccl.generation(), address, length, environment::windows(nccl.version()))
}

fn check_with(
    device: &Device,
    generation: Generation,
    address: usize,
    length: usize,
    settings: WindowSettings,
) -> Result<()> {
    let refuse = |reason: String| Error::Memory { address, length, reason };
    if length == 0 {
        return Err(refuse("it has no bytes".into()));
    }
    if !address.is_multiple_of(NCCL_WIN_REQUIRED_ALIGNMENT as usize) {
        return Err(refuse(format!("its address is not a multiple of {NCCL_WIN_REQUIRED_ALIGNMENT}")));
    }
    let Some(end) = address.checked_add(length) else {
        return Err(refuse("it reaches beyond the end of the address space".into()));
    };
    let mut next = address;
    let mut segments = 0;
    while next < end {
        if segments > 0 && generation < Generation::V2_30 {
            return Err(refuse(
                "it spans several physical allocations, for which NCCL 2.30 or newer is needed".into(),
            ));
        }
        let segment = Segment::at(device, next).map_err(refuse)?;
        segments += 1;
        if segment.on_host && generation < Generation::V2_30 {
            return Err(refuse("part of it is host memory, for which NCCL 2.30 or newer is needed".into()));
        }
        if segment.on_host && !settings.host_memory {
            return Err(refuse(
                "part of it is host memory, which NCCL_ELASTIC_BUFFER_REGISTER=0 keeps out of windows: set it to 1, or unset it, before \
                 the process's first call of NCCL"
                    .into(),
            ));
        }
        segment.check_shared(next, settings).map_err(refuse)?;
        next = segment.end;
    }
    check_stride(device, length, settings).map_err(refuse)
}

/// Whether a rank's windows have addresses enough: as many bytes as NCCL_WIN_STRIDE says, or else as the largest device of the communicator has
/// memory, which a range with host memory may exceed. Of the devices this one is known.
fn check_stride(device: &Device, length: usize, settings: WindowSettings) -> std::result::Result<(), String> {
    let (space, from) = match settings.stride {
        Some(stride) => (stride, "NCCL_WIN_STRIDE says"),
        None => match device.total_memory() {
            Some(total) => (total, "the device has memory"),
            None => return Ok(()),
        },
    };
    if length <= space.next_multiple_of(UNIT) {
        return Ok(());
    }
    // NCCL's own windows need some too.
    let enough = (length + UNIT).next_multiple_of(UNIT);
    Err(format!(
        "it is longer than the addresses that NCCL sets aside for a rank's windows, as many as {from} ({space} bytes): set \
         NCCL_WIN_STRIDE={enough} in the environment of every rank, before its first call of NCCL"
    ))
}

/// One physical allocation.
struct Segment {
    end: usize,
    on_host: bool,
    /// Why NCCL cannot export it, if it cannot.
    private: Option<CallError>,
}

impl Segment {
    /// The allocation mapped at `address`; otherwise why it is none for NCCL.
    fn at(device: &Device, address: usize) -> Result<Self, String> {
        let driver = device.driver();
        let (mut base, mut size) = (0, 0);
        // SAFETY: both outputs are valid for one write.
        unsafe { driver.cuMemGetAddressRange(&mut base, &mut size, address as CUdeviceptr) }
            .map_err(|error| format!("{address:#x} is no memory of CUDA ({error})"))?;
        // Some drivers give no base for host memory; the address is then where the allocation starts.
        let start = if base == 0 { address } else { base as usize };
        let end = start.saturating_add(size);
        if end <= address {
            return Err(format!("the driver says that the allocation at {address:#x} ends at {end:#x}"));
        }
        let mut handle = 0;
        // SAFETY: the output is valid for one write, and the address is mapped. The reference is given back below.
        unsafe { driver.cuMemRetainAllocationHandle(&mut handle, address as *mut _) }.map_err(|error| {
            format!(
                "{address:#x} was not allocated with cuMemCreate, so it cannot be shared ({error}); use MemAlloc or a cuda-vmm range, \
                 not cudaMalloc"
            )
        })?;
        let mut properties = CUmemAllocationProp_v1::default();
        // SAFETY: the output is valid for one write, and the handle is alive.
        let told = unsafe { driver.cuMemGetAllocationPropertiesFromHandle(&mut properties, handle) };
        // Imported memory has no handle type either, and driver 580 refuses to export it. An attempt shows what this one does.
        let private = match told {
            Ok(()) if properties.requestedHandleTypes.0 == 0 => export(driver, handle).err(),
            _ => None,
        };
        // SAFETY: the reference that was retained above is given back once.
        unsafe { driver.cuMemRelease(handle) }.ok();
        told.map_err(|error| format!("the driver does not tell how {address:#x} was allocated ({error})"))?;
        let on_host = match properties.location.type_ {
            CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => false,
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA => true,
            other => {
                return Err(format!(
                    "{address:#x} lies at a location of type {}, which NCCL does not take",
                    other.0
                ));
            }
        };
        Ok(Self { end, on_host, private })
    }

    /// Whether NCCL can give the memory to the peers, or need not: with the setting each of them has the same host memory already.
    fn check_shared(&self, address: usize, settings: WindowSettings) -> std::result::Result<(), String> {
        let Some(error) = &self.private else { return Ok(()) };
        let what = format!(
            "{address:#x} was allocated without a handle type, or imported from another process, so this process cannot share it ({error})"
        );
        match (self.on_host, settings.reuses_host_memory) {
            (true, true) => Ok(()),
            (true, false) => Err(format!(
                "{what}; if the host memory in every rank's window is the same physical memory, set {}=1 before each process's first call \
                 of NCCL, which must be {} or newer: NCCL then exports none of it, and maps a rank's own in place of every other's",
                environment::REUSE,
                environment::REUSE_SINCE
            )),
            (false, _) => Err(format!("{what}; register it where it was created")),
        }
    }
}

/// Exports memory as NCCL will, and drops what comes of it.
fn export(driver: &Driver, handle: CUmemGenericAllocationHandle) -> std::result::Result<(), CallError> {
    let mut number: c_int = -1;
    let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: for a file descriptor the output is one int, valid for the write; the handle is alive.
    unsafe { driver.cuMemExportToShareableHandle((&raw mut number).cast(), handle, kind, 0) }?;
    if number >= 0 {
        // SAFETY: the driver made the descriptor for this call, and nobody else knows it.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
    }
    Ok(())
}

//! What a device claims, and what really works.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::physical::PhysicalMemory;
use crate::properties::{HandleTypes, Properties};
use cuda_vmm_sys::{CUdevice_attribute as Attribute, CUresult, CallError, Function};
use std::fmt;

/// How far a capability goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Support {
    /// The device does not claim it.
    No,
    /// The device claims it; it was not tried.
    Claimed,
    /// It was tried, and works.
    Works,
    /// The device claims it, but trying it failed with this code.
    Refused(CUresult),
    /// The device claims it, but the driver lacks this function, which it needs.
    MissingFunction(Function),
    /// It is there, but an environment variable switches it off for this process.
    SwitchedOff(&'static str),
}

impl Support {
    /// Whether it was tried and works.
    #[must_use]
    pub fn works(self) -> bool {
        self == Self::Works
    }

    fn claimed(claimed: bool) -> Self {
        if claimed { Self::Claimed } else { Self::No }
    }
}

impl fmt::Display for Support {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::No => f.write_str("no"),
            Self::Claimed => f.write_str("claimed, not tried"),
            Self::Works => f.write_str("works"),
            Self::Refused(code) => write!(f, "claimed, but refused: {code}"),
            Self::MissingFunction(function) => {
                write!(f, "claimed, but the driver lacks {}", function.symbol())
            }
            Self::SwitchedOff(variable) => write!(f, "switched off by {variable}"),
        }
    }
}

/// What a device can do with memory. Made by [`probe`](Self::probe), which tries what can be tried without side effects beyond a moment's
/// use of one granule of memory; a multicast object is never created.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Virtual memory management: physical memory on the device.
    pub virtual_memory: Support,
    /// Export as a POSIX file descriptor, up to the import into this process.
    pub posix_fd: Support,
    /// Export as a FABRIC handle, up to the import into this process. That another host can import it is a matter of its IMEX domain,
    /// which nothing here tells.
    pub fabric: Support,
    /// NUMA node of the host next to the device.
    pub host_numa_node: Option<i32>,
    /// Physical memory on that node.
    pub host_numa: Support,
    /// Export of that memory as a POSIX file descriptor.
    pub host_numa_fd: Support,
    /// Export of that memory as a FABRIC handle.
    pub host_numa_fabric: Support,
    /// Multicast objects: claimed or not, and whether they are switched off. Never tried.
    pub multicast: Support,
    /// Memory that network cards reach.
    pub gpu_direct_rdma: Support,
    /// dma-buf file descriptors of address ranges.
    pub dma_buf: Support,
    /// 64-bit stream memory operations (write and wait).
    pub stream_memory_operations: Support,
}

impl Capabilities {
    /// Finds out what `device` can do.
    ///
    /// # Errors
    /// [`Error::Call`] for failures that say nothing about a capability, for example `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn probe(device: &Device) -> Result<Self> {
        let claims = |attribute| device.claims(attribute);
        let here = |types| Properties::device(device.ordinal()).handle_types(types);
        let (fd, fabric) = (HandleTypes::POSIX_FD, HandleTypes::FABRIC);
        let node = device.host_numa_node()?;
        let numa_claimed = node.is_some()
            && claims(Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?;
        let there = |types| Properties::host_numa(node.unwrap_or(0)).handle_types(types);
        Ok(Self {
            virtual_memory: tried(
                device,
                claims(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?,
                &here(HandleTypes::empty()),
            )?,
            posix_fd: tried(
                device,
                claims(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?,
                &here(fd),
            )?,
            fabric: tried(
                device,
                claims(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?,
                &here(fabric),
            )?,
            host_numa_node: node,
            host_numa: tried(device, numa_claimed, &there(HandleTypes::empty()))?,
            host_numa_fd: tried(device, numa_claimed, &there(fd))?,
            host_numa_fabric: tried(
                device,
                numa_claimed && claims(Attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED)?,
                &there(fabric),
            )?,
            multicast: crate::multicast::support(device)?,
            gpu_direct_rdma: Support::claimed(claims(
                Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            )?),
            dma_buf: Support::claimed(claims(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)?),
            stream_memory_operations: Support::claimed(claims(
                Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
            )?),
        })
    }

    /// Each capability with its name in the field's terms, for reports.
    #[must_use]
    pub fn rows(&self) -> Vec<(&'static str, Support)> {
        vec![
            ("virtual memory management", self.virtual_memory),
            ("export as POSIX fd", self.posix_fd),
            ("export as FABRIC handle", self.fabric),
            ("host-NUMA memory", self.host_numa),
            ("host-NUMA export as POSIX fd", self.host_numa_fd),
            ("host-NUMA export as FABRIC handle", self.host_numa_fabric),
            ("multicast", self.multicast),
            ("GPUDirect RDMA", self.gpu_direct_rdma),
            ("dma-buf", self.dma_buf),
            ("64-bit stream memory operations", self.stream_memory_operations),
        ]
    }
}

/// Creates one granule, and exports and imports it as far as its handle types go.
fn tried(device: &Device, claimed: bool, properties: &Properties) -> Result<Support> {
    if !claimed {
        return Ok(Support::No);
    }
    match attempt(device, properties) {
        Ok(()) => Ok(Support::Works),
        Err(Error::Call { cause: CallError::Missing(missing), .. }) => {
            Ok(Support::MissingFunction(missing.function))
        }
        Err(error) => match error.status() {
            // Says something about this moment, not about the device.
            None | Some(CUresult::CUDA_ERROR_OUT_OF_MEMORY | CUresult::CUDA_ERROR_OPERATING_SYSTEM) => {
                Err(error)
            }
            Some(code) => Ok(Support::Refused(code)),
        },
    }
}

fn attempt(device: &Device, properties: &Properties) -> Result<(), Error> {
    let cuda = device.cuda();
    let size = cuda.granularities(properties)?.minimum.bytes();
    let memory = PhysicalMemory::create(cuda, size, properties)?;
    if memory.handle_types().contains(HandleTypes::FABRIC) {
        PhysicalMemory::import_fabric(cuda, &memory.export_fabric()?, size)?;
    } else if memory.handle_types().contains(HandleTypes::POSIX_FD) {
        PhysicalMemory::import_fd(cuda, memory.export_fd()?, size)?;
    }
    Ok(())
}

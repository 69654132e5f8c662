//! What physical memory is to be like: where it lies, how it can be exported, how it is stored.

use crate::cuda::Cuda;
use crate::error::Result;
use crate::location::Location;
use cuda_vmm_sys::{
    CUmemAllocationCompType, CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType,
};
use std::fmt;

bitflags::bitflags! {
    /// Ways to hand memory to another process, as a set.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct HandleTypes: u32 {
        /// A POSIX file descriptor: processes of one host.
        const POSIX_FD = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
        /// A FABRIC handle: any process of the same IMEX domain, also on other hosts of the NVLink fabric.
        const FABRIC = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;
        // The driver may know more.
        const _ = !0;
    }
}

impl fmt::Display for HandleTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() { f.write_str("nothing") } else { bitflags::parser::to_writer(self, f) }
    }
}

/// Which handle types memory is created with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Shareable {
    /// With exactly these; an empty set keeps the memory in this process.
    Exactly(HandleTypes),
    /// With FABRIC and POSIX fd if the driver creates such memory, else with POSIX fd. Drivers claim FABRIC where there is no
    /// access to an IMEX channel, and only creating memory tells.
    BestAvailable,
}

/// Properties of physical memory. Memory on a device that stays in the process unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Properties {
    location: Location,
    shareable: Shareable,
    gpu_direct_rdma: bool,
    compressible: bool,
}

impl Properties {
    /// Memory at a location.
    #[must_use]
    pub const fn new(location: Location) -> Self {
        let shareable = Shareable::Exactly(HandleTypes::empty());
        Self { location, shareable, gpu_direct_rdma: false, compressible: false }
    }

    /// Memory of the device with this ordinal.
    #[must_use]
    pub const fn device(ordinal: i32) -> Self {
        Self::new(Location::Device(ordinal))
    }

    /// Host memory of a NUMA node (CUDA 12.2 and later).
    #[must_use]
    pub const fn host_numa(node: i32) -> Self {
        Self::new(Location::HostNuma(node))
    }

    /// Host memory, on whichever node (CUDA 12.2 and later).
    #[must_use]
    pub const fn host() -> Self {
        Self::new(Location::Host)
    }

    /// Can be exported as exactly these handle types.
    #[must_use]
    pub const fn handle_types(mut self, types: HandleTypes) -> Self {
        self.shareable = Shareable::Exactly(types);
        self
    }

    /// Can be exported to other processes in the best way that the driver offers ([`Shareable::BestAvailable`]).
    #[must_use]
    pub const fn shareable(mut self) -> Self {
        self.shareable = Shareable::BestAvailable;
        self
    }

    /// Can be registered with a network card (`gpuDirectRDMACapable`).
    #[must_use]
    pub const fn gpu_direct_rdma(mut self, yes: bool) -> Self {
        self.gpu_direct_rdma = yes;
        self
    }

    /// Asks for compressible memory. The driver may give plain memory: [`PhysicalMemory::properties`](crate::PhysicalMemory)
    /// tells what was asked, `cuMemGetAllocationPropertiesFromHandle` what was given.
    #[must_use]
    pub const fn compressible(mut self, yes: bool) -> Self {
        self.compressible = yes;
        self
    }

    /// Where the memory lies.
    #[must_use]
    pub const fn location(&self) -> Location {
        self.location
    }

    /// How it can be exported.
    #[must_use]
    pub const fn shareability(&self) -> Shareable {
        self.shareable
    }

    /// Whether a network card can be let at it.
    #[must_use]
    pub const fn is_gpu_direct_rdma(&self) -> bool {
        self.gpu_direct_rdma
    }

    /// Whether it is, or was asked to be, compressible.
    #[must_use]
    pub const fn is_compressible(&self) -> bool {
        self.compressible
    }

    pub(crate) fn check(&self, cuda: &Cuda) -> Result<()> {
        match self.location {
            Location::Device(ordinal) => cuda.check_device(ordinal),
            Location::HostNuma(_) | Location::Host => Ok(()),
        }
    }

    pub(crate) fn as_raw(&self) -> CUmemAllocationProp {
        let mut raw = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            location: self.location.as_raw(),
            ..Default::default()
        };
        let types = match self.shareable {
            Shareable::Exactly(types) => types,
            // Granularity does not depend on it; creation asks for FABRIC first by itself.
            Shareable::BestAvailable => HandleTypes::POSIX_FD,
        };
        raw.requestedHandleTypes = CUmemAllocationHandleType(types.bits());
        raw.allocFlags.gpuDirectRDMACapable = u8::from(self.gpu_direct_rdma);
        if self.compressible {
            raw.allocFlags.compressionType = CUmemAllocationCompType::CU_MEM_ALLOCATION_COMP_GENERIC.0 as u8;
        }
        raw
    }

    pub(crate) fn from_raw(raw: &CUmemAllocationProp) -> Option<Self> {
        let location = Location::from_raw(raw.location)?;
        Some(Self {
            location,
            shareable: Shareable::Exactly(HandleTypes::from_bits_retain(raw.requestedHandleTypes.0)),
            gpu_direct_rdma: raw.allocFlags.gpuDirectRDMACapable != 0,
            compressible: raw.allocFlags.compressionType != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raw_properties_and_back() {
        let properties = Properties::host_numa(1)
            .handle_types(HandleTypes::POSIX_FD | HandleTypes::FABRIC)
            .gpu_direct_rdma(true)
            .compressible(true);
        let raw = properties.as_raw();
        assert_eq!(raw.requestedHandleTypes.0, 9);
        assert_eq!(Properties::from_raw(&raw), Some(properties));
        assert!(properties.is_gpu_direct_rdma() && properties.is_compressible());
        assert_eq!(Properties::host().location(), Location::Host);
    }

    #[test]
    fn handle_types_read_well() {
        assert_eq!(HandleTypes::empty().to_string(), "nothing");
        assert_eq!((HandleTypes::POSIX_FD | HandleTypes::FABRIC).to_string(), "POSIX_FD | FABRIC");
    }
}

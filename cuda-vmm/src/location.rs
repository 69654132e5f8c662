//! Where memory lies, and who may use it.

use crate::cuda::Cuda;
use crate::error::{Error, Result};
use cuda_vmm_sys::{CUmemAccess_flags, CUmemAccessDesc, CUmemLocation, CUmemLocationType};
use std::fmt;

/// A place for memory, and a place that accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Location {
    /// The device with this ordinal.
    Device(i32),
    /// Host memory, or the CPUs, of this NUMA node (CUDA 12.2 and later).
    HostNuma(i32),
    /// Host memory, or the CPUs, wherever (CUDA 12.2 and later).
    Host,
}

impl Location {
    /// Whether this is host memory, or the CPUs.
    #[must_use]
    pub const fn is_host(self) -> bool {
        matches!(self, Self::HostNuma(_) | Self::Host)
    }

    pub(crate) fn as_raw(self) -> CUmemLocation {
        let (type_, id) = match self {
            Self::Device(ordinal) => (CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, ordinal),
            Self::HostNuma(node) => (CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, node),
            Self::Host => (CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, 0),
        };
        CUmemLocation { type_, id }
    }

    pub(crate) fn from_raw(raw: CUmemLocation) -> Option<Self> {
        match raw.type_ {
            CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => Some(Self::Device(raw.id)),
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA => Some(Self::HostNuma(raw.id)),
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST => Some(Self::Host),
            _ => None,
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(ordinal) => write!(f, "device {ordinal}"),
            Self::HostNuma(node) => write!(f, "host NUMA node {node}"),
            Self::Host => f.write_str("the host"),
        }
    }
}

/// What a location may do with mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Access {
    /// Nothing: every use faults.
    None,
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

impl Access {
    pub(crate) fn from_raw(flags: u64) -> Option<Self> {
        match u32::try_from(flags).ok()? {
            x if x == CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE.0 => Some(Self::None),
            x if x == CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ.0 => Some(Self::Read),
            x if x == CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE.0 => Some(Self::ReadWrite),
            _ => None,
        }
    }

    fn as_raw(self) -> CUmemAccess_flags {
        match self {
            Self::None => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
            Self::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            Self::ReadWrite => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    }
}

/// Who may do what with mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// Who.
    pub location: Location,
    /// What.
    pub access: Access,
}

impl Grant {
    /// A device may read and write.
    #[must_use]
    pub const fn device(ordinal: i32) -> Self {
        Self { location: Location::Device(ordinal), access: Access::ReadWrite }
    }

    /// The CPUs of a NUMA node may read and write; in practice all CPUs of the host.
    #[must_use]
    pub const fn host_numa(node: i32) -> Self {
        Self { location: Location::HostNuma(node), access: Access::ReadWrite }
    }

    /// The CPUs may read and write.
    #[must_use]
    pub const fn host() -> Self {
        Self { location: Location::Host, access: Access::ReadWrite }
    }

    /// The same location, with another access.
    #[must_use]
    pub const fn with(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Refuses what cannot be granted to memory at any of `places`: an empty list, devices that do not exist, and the CPU where no
    /// place is host memory.
    pub(crate) fn check(
        cuda: &Cuda,
        grants: &[Self],
        places: impl Iterator<Item = Location> + Clone,
    ) -> Result<()> {
        if grants.is_empty() {
            return Err(Error::Zero { what: "number of grants" });
        }
        for Self { location, .. } in grants {
            if let Location::Device(ordinal) = *location {
                cuda.check_device(ordinal)?;
            } else if !places.clone().any(Location::is_host)
                && let Some(memory) = places.clone().next()
            {
                return Err(Error::AccessNotPossible { location: *location, memory });
            }
        }
        Ok(())
    }

    pub(crate) fn as_raw(self) -> CUmemAccessDesc {
        CUmemAccessDesc { location: self.location.as_raw(), flags: self.access.as_raw() }
    }
}

//! Who may do what with a mapping.

use crate::config::Config;
use crate::memory::physical::Location;
use crate::memory::raw::Protection;
use crate::status::{Outcome, code, require};
use cuda_vmm_sys::{CUmemAccess_flags, CUmemAccessDesc_v1, CUmemLocation, CUmemLocationType};

/// What a location may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Nothing.
    #[default]
    None,
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

/// What an access needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Read,
    Write,
}

impl Access {
    pub(crate) fn allows(self, need: Need) -> bool {
        match need {
            Need::Read => self >= Self::Read,
            Need::Write => self == Self::ReadWrite,
        }
    }

    fn from_flags(flags: CUmemAccess_flags) -> Outcome<Self> {
        match flags {
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE => Ok(Self::None),
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ => Ok(Self::Read),
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE => Ok(Self::ReadWrite),
            _ => Err(code::INVALID_VALUE),
        }
    }

    pub(crate) fn flags(self) -> CUmemAccess_flags {
        match self {
            Self::None => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
            Self::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            Self::ReadWrite => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }
    }
}

/// Who accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accessor {
    Host,
    Device(usize),
}

/// Access of every location to one mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AccessTable {
    pub(crate) host: Access,
    pub(crate) devices: Vec<Access>,
}

impl AccessTable {
    pub(crate) fn none(devices: usize) -> Self {
        Self { host: Access::None, devices: vec![Access::None; devices] }
    }

    pub(crate) fn of(&self, who: Accessor) -> Access {
        match who {
            Accessor::Host => self.host,
            Accessor::Device(ordinal) => self.devices.get(ordinal).copied().unwrap_or_default(),
        }
    }

    pub(crate) fn set(&mut self, who: Accessor, access: Access) {
        match who {
            Accessor::Host => self.host = access,
            Accessor::Device(ordinal) => {
                if let Some(entry) = self.devices.get_mut(ordinal) {
                    *entry = access;
                }
            }
        }
    }

    /// What the CPU may do: what any location may, since it stands for them all.
    pub(crate) fn protection(&self) -> Protection {
        match self.devices.iter().copied().max().unwrap_or_default().max(self.host) {
            Access::None => Protection::None,
            Access::Read => Protection::Read,
            Access::ReadWrite => Protection::ReadWrite,
        }
    }
}

/// Who a location of an access descriptor or query is.
pub(crate) fn accessor(config: &Config, location: CUmemLocation) -> Outcome<Accessor> {
    match location.type_ {
        CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => {
            let ordinal = usize::try_from(location.id).map_err(|_| code::INVALID_DEVICE)?;
            if ordinal >= config.devices.len() {
                return Err(code::INVALID_DEVICE);
            }
            Ok(Accessor::Device(ordinal))
        }
        // The id of a NUMA node is not looked at: all of the host has access, or none of it.
        CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST | CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA => {
            Ok(Accessor::Host)
        }
        _ => Err(code::INVALID_VALUE),
    }
}

/// One entry of an access descriptor, understood.
pub(crate) fn grant(config: &Config, desc: CUmemAccessDesc_v1) -> Outcome<(Accessor, Access)> {
    Ok((accessor(config, desc.location)?, Access::from_flags(desc.flags)?))
}

/// Whether a location may be given access to memory at all.
pub(crate) fn may_grant(config: &Config, who: Accessor, memory: Location) -> Outcome {
    match (who, memory) {
        (Accessor::Host, Location::Device(_)) => require(config.host_access_to_devices),
        (Accessor::Device(ordinal), Location::Device(owner)) if !config.reaches(ordinal, owner) => {
            Err(code::NOT_SUPPORTED)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_may_what_any_location_may() {
        let mut table = AccessTable::none(2);
        assert_eq!(table.protection(), Protection::None);
        table.set(Accessor::Device(1), Access::Read);
        assert_eq!(table.protection(), Protection::Read);
        table.set(Accessor::Host, Access::ReadWrite);
        assert_eq!(table.protection(), Protection::ReadWrite);
        assert_eq!(table.of(Accessor::Device(0)), Access::None);
        assert!(table.of(Accessor::Device(1)).allows(Need::Read));
        assert!(!table.of(Accessor::Device(1)).allows(Need::Write));
        table.set(Accessor::Device(7), Access::Read);
        assert_eq!(table.of(Accessor::Device(7)), Access::None);
    }
}

//! What a communicator supports.

use crate::bytes::Bytes;
use nccl_gin_sys::{
    NCCL_API_MAGIC, Nccl, ncclCommProperties_t, ncclGinConnectionType_t, ncclGinType_t, v2_32,
};
use std::fmt;
use std::mem::offset_of;

/// A way in which NCCL moves data for GIN (`ncclGinType_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GinType {
    /// A CPU thread that carries out the GPU's requests.
    Proxy,
    /// The GPU drives the NIC itself (DOCA GPUNetIO).
    Gdaki,
    /// GPI (2.30.5 and later).
    Gpi,
    /// AWS EFA, driven by the GPU (2.31 and later).
    EfaGda,
    /// One that a newer NCCL has.
    Other(u32),
}

impl GinType {
    /// `None` for `NCCL_GIN_TYPE_NONE`.
    pub(crate) fn from_raw(raw: u32) -> Option<Self> {
        Some(match ncclGinType_t(raw) {
            ncclGinType_t::NCCL_GIN_TYPE_NONE => return None,
            ncclGinType_t::NCCL_GIN_TYPE_PROXY => Self::Proxy,
            ncclGinType_t::NCCL_GIN_TYPE_GDAKI => Self::Gdaki,
            ncclGinType_t::NCCL_GIN_TYPE_GPI => Self::Gpi,
            ncclGinType_t::NCCL_GIN_TYPE_EFA_GDA => Self::EfaGda,
            ncclGinType_t(other) => Self::Other(other),
        })
    }

    pub(crate) fn to_raw(self) -> u32 {
        match self {
            Self::Proxy => ncclGinType_t::NCCL_GIN_TYPE_PROXY.0,
            Self::Gdaki => ncclGinType_t::NCCL_GIN_TYPE_GDAKI.0,
            Self::Gpi => ncclGinType_t::NCCL_GIN_TYPE_GPI.0,
            Self::EfaGda => ncclGinType_t::NCCL_GIN_TYPE_EFA_GDA.0,
            Self::Other(raw) => raw,
        }
    }
}

impl fmt::Display for GinType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Proxy => f.write_str("proxy"),
            Self::Gdaki => f.write_str("GDAKI"),
            Self::Gpi => f.write_str("GPI"),
            Self::EfaGda => f.write_str("EFA GDA"),
            Self::Other(raw) => write!(f, "type {raw}"),
        }
    }
}

/// Which ranks GIN connects (`ncclGinConnectionType_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GinConnection {
    /// Every rank with every other.
    Full,
    /// Ranks with the same place in their LSA teams (2.29.7 and later).
    Rail,
    /// Ranks at this distance (2.31 and later).
    Stride(u32),
}

impl GinConnection {
    pub(crate) fn to_raw(self) -> u32 {
        match self {
            Self::Full => ncclGinConnectionType_t::NCCL_GIN_CONNECTION_FULL.0,
            Self::Rail => ncclGinConnectionType_t::NCCL_GIN_CONNECTION_RAIL.0,
            Self::Stride(_) => ncclGinConnectionType_t::NCCL_GIN_CONNECTION_CUSTOM_STRIDE.0,
        }
    }
}

/// What a communicator supports (`ncclCommProperties_t`).
///
/// NCCL 2.28 does not tell; there all that is known is the rank, the size and the device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "ncclCommProperties_t")]
pub struct Properties {
    /// This process's rank.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// CUDA ordinal of the device.
    pub cuda_device: i32,
    /// What else the library tells; `None` for NCCL 2.28.
    pub support: Option<Support>,
}

/// What NCCL 2.29 and later tell about a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Support {
    /// NVML index of the device.
    pub nvml_device: i32,
    /// Whether windows and device communicators can be made.
    pub device_api: bool,
    /// Whether multicast (NVLink SHARP) can be used on the LSA team.
    pub multimem: bool,
    /// How GIN reaches every rank, if it can.
    pub gin: Option<GinType>,
    /// How GIN reaches the ranks of a rail, if it can.
    pub railed_gin: Option<GinType>,
    /// Number of LSA teams.
    pub lsa_teams: u32,
    /// Whether the host can put and signal (`ncclPutSignal`).
    pub host_rma: bool,
    /// Bytes of a device communicator in the library's own layout (2.31 and later).
    pub device_communicator_size: Option<usize>,
    /// Smallest distance of ranks that GIN can connect (2.31 and later).
    pub gin_min_stride: Option<u32>,
}

impl Properties {
    /// A struct that asks the loaded library for all that this crate knows of.
    pub(crate) fn request(nccl: &Nccl) -> Request {
        let mut bytes = Bytes::zeroed();
        let size = nccl.generation().properties_size().unwrap_or_default();
        bytes.put(offset_of!(v2_32::ncclCommProperties, size), size);
        bytes.put(offset_of!(v2_32::ncclCommProperties, magic), NCCL_API_MAGIC);
        bytes.put(offset_of!(v2_32::ncclCommProperties, version), nccl.declared_version().code());
        Request { bytes, size }
    }
}

/// A properties struct on its way to NCCL and back.
pub(crate) struct Request {
    bytes: Bytes<256>,
    size: usize,
}

const _: () = assert!(size_of::<v2_32::ncclCommProperties>() <= 256);

impl Request {
    pub(crate) fn as_mut_ptr(&mut self) -> *mut ncclCommProperties_t {
        self.bytes.as_mut_ptr().cast()
    }

    pub(crate) fn decode(&self) -> Properties {
        macro_rules! get {
            ($field:ident) => {
                self.bytes.get(offset_of!(v2_32::ncclCommProperties, $field))
            };
        }
        let count = |value: i32| u32::try_from(value).unwrap_or(0);
        let later = self.size > offset_of!(v2_32::ncclCommProperties, devCommRuntimeVersionSize);
        Properties {
            rank: count(get!(rank)),
            size: count(get!(nRanks)),
            cuda_device: get!(cudaDev),
            support: Some(Support {
                nvml_device: get!(nvmlDev),
                device_api: get!(deviceApiSupport),
                multimem: get!(multimemSupport),
                gin: GinType::from_raw(get!(ginType)),
                railed_gin: GinType::from_raw(get!(railedGinType)),
                lsa_teams: count(get!(nLsaTeams)),
                host_rma: get!(hostRmaSupport),
                device_communicator_size: later.then(|| get!(devCommRuntimeVersionSize)),
                gin_min_stride: later.then(|| count(get!(ginMinStride))),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::nccl_of;

    #[test]
    fn the_request_is_of_the_loaded_generation() {
        for (code, size) in [(22907, 56), (23003, 56), (23007, 56), (23102, 144), (23203, 152), (23305, 152)]
        {
            let request = Properties::request(&nccl_of(code));
            assert_eq!(request.bytes.get::<usize>(0), size);
            assert_eq!(request.bytes.get::<u32>(8), 0xcafe_beef);
            assert_eq!(request.bytes.get::<u32>(12), code.min(23203));
            assert!(request.bytes.as_slice()[16..].iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn each_field_is_read_from_its_place() {
        // Offsets as the headers of 2.31.2 have them.
        let mut request = Properties::request(&nccl_of(23102));
        for (offset, value) in [(16, 3), (20, 8), (24, 1), (28, 5), (36, 2), (40, 2), (48, 3), (64, 4)] {
            request.bytes.put::<i32>(offset, value);
        }
        request.bytes.put(32, true);
        request.bytes.put(44, true);
        request.bytes.put::<usize>(136, 248);
        let properties = request.decode();
        assert_eq!((properties.rank, properties.size, properties.cuda_device), (3, 8, 1));
        let support = properties.support.unwrap();
        assert_eq!(
            support,
            Support {
                nvml_device: 5,
                device_api: true,
                multimem: false,
                gin: Some(GinType::Proxy),
                railed_gin: Some(GinType::Gdaki),
                lsa_teams: 2,
                host_rma: true,
                device_communicator_size: Some(248),
                gin_min_stride: Some(4),
            }
        );
    }

    #[test]
    fn types_of_a_newer_library_are_values_like_any_other() {
        assert_eq!(GinType::from_raw(0), None);
        for raw in [2, 3, 4, 5, 17] {
            assert_eq!(GinType::from_raw(raw).unwrap().to_raw(), raw);
        }
        assert_eq!(GinType::Other(17).to_string(), "type 17");
    }
}

//! Requirements as the loaded library reads them, or the reason why it cannot have them.

use super::DevCommRequirements;
use crate::bytes::Bytes;
use crate::config::UNDEFINED;
use crate::error::{Error, Result};
use crate::hint::{NO_GIN, NO_SYMMETRIC_MEMORY};
use crate::properties::{GinConnection, Support};
use nccl_gin_sys::{
    Generation, NCCL_API_MAGIC, Nccl, Version, ncclDevCommRequirements_t, v2_28, v2_28_3, v2_32,
};
use std::mem::offset_of;

/// Bytes that are always set aside for a device communicator: more than any known layout has.
pub(crate) const DEV_COMM_CAPACITY: usize = 512;

/// What decides which requirements can be met.
pub(crate) struct Limits<'a> {
    /// What the communicator supports, if the library tells.
    pub(crate) support: Option<&'a Support>,
    /// The setting that switches multicast off, if any.
    pub(crate) multicast_off: Option<&'static str>,
}

/// Requirements as one generation of NCCL reads them.
#[derive(Clone)]
pub(crate) struct Encoded {
    bytes: Bytes<128>,
    /// Version that the device communicator's layout is of.
    pub(crate) version: Version,
    /// Bytes that the library will write.
    pub(crate) dev_comm_size: usize,
}

impl Encoded {
    pub(crate) fn as_ptr(&self) -> *const ncclDevCommRequirements_t {
        self.bytes.as_ptr().cast()
    }
}

const _: () = assert!(size_of::<v2_32::ncclDevCommRequirements>() <= 128);

/// NCCL's default for `ginContextCount`.
const DEFAULT_CONTEXTS: u32 = 4;

impl DevCommRequirements {
    /// The struct for the loaded library.
    pub(crate) fn encode(&self, nccl: &Nccl, limits: &Limits<'_>) -> Result<Encoded> {
        self.check_version(nccl)?;
        self.check_sense()?;
        self.check_support(limits)?;
        match nccl.generation() {
            Generation::V2_28_3 => Ok(self.encode_2_28_3(nccl)),
            Generation::V2_28 => Ok(self.encode_2_28(nccl)),
            _ => self.encode_2_29(nccl, limits),
        }
    }

    /// Each option against the version that has it.
    fn check_version(&self, nccl: &Nccl) -> Result<()> {
        let stride = matches!(self.gin, Some(GinConnection::Stride(_)));
        for (set, what, since) in [
            // 2.28.3 has barriers of the LSA team and nothing else.
            (self.gin.is_some(), "GIN", 22807),
            (self.barriers > 0, "barriers over all ranks", 22807),
            (self.all_to_all_blocks > 0, "all_to_all", 22807),
            (self.gin == Some(GinConnection::Rail), "a railed GIN connection", 22907),
            (self.gin_exclusive_contexts, "gin_exclusive_contexts", 22907),
            (self.gin_queue_depth.is_some(), "gin_queue_depth", 22907),
            (self.gin_traffic_class.is_some(), "gin_traffic_class", 23000),
            (self.world_barriers > 0, "world_barriers", 23000),
            (!self.gin_strong_signals, "a device communicator without strong GIN signals", 23005),
            (!self.gin_va_signals, "a device communicator without GIN signals by address", 23005),
            (stride, "a strided GIN connection", 23100),
            (self.gin_type.is_some(), "gin_type", 23100),
            (self.runtime_version, "runtime_version", 23100),
        ] {
            let since = Version::from_code(since);
            if set && nccl.version() < since {
                let reason = format!("it needs NCCL {since} or newer, and {} is loaded", nccl.version());
                return Err(Error::Unsupported { what, reason });
            }
        }
        Ok(())
    }

    /// Options that only make sense together, and numbers that C's `int` can hold.
    fn check_sense(&self) -> Result<()> {
        if self.gin.is_none() {
            for (set, what) in [
                (self.gin_signals > 0, "gin_signals"),
                (self.gin_counters > 0, "gin_counters"),
                (self.gin_contexts.is_some(), "gin_contexts"),
                (self.gin_exclusive_contexts, "gin_exclusive_contexts"),
                (self.gin_queue_depth.is_some(), "gin_queue_depth"),
                (self.gin_traffic_class.is_some(), "gin_traffic_class"),
                (self.gin_type.is_some(), "gin_type"),
                (self.rail_barriers > 0, "rail_barriers"),
                (self.world_barriers > 0, "world_barriers"),
            ] {
                if set {
                    return Err(Error::Unsupported {
                        what,
                        reason: "it needs GIN: say which connection with gin(…)".into(),
                    });
                }
            }
        }
        for (what, value) in [
            ("barriers", self.barriers),
            ("lsa_barriers", self.lsa_barriers),
            ("rail_barriers", self.rail_barriers),
            ("world_barriers", self.world_barriers),
            ("all_to_all blocks", self.all_to_all_blocks),
            ("all_to_all slots", self.all_to_all_slots),
            ("gin_contexts", self.gin_contexts.unwrap_or(0)),
            ("gin_signals", self.gin_signals),
            ("gin_counters", self.gin_counters),
            ("gin_queue_depth", self.gin_queue_depth.unwrap_or(0)),
            ("gin_traffic_class", self.gin_traffic_class.unwrap_or(0)),
            ("the stride", if let Some(GinConnection::Stride(stride)) = self.gin { stride } else { 1 }),
        ] {
            if i32::try_from(value).is_err() {
                return Err(Error::argument(what, value, format!("at most {}", i32::MAX)));
            }
        }
        if self.gin == Some(GinConnection::Stride(0)) {
            return Err(Error::argument("the stride", 0, "at least 1"));
        }
        if (self.all_to_all_blocks == 0) != (self.all_to_all_slots == 0) {
            let value = format!("{} blocks of {} slots", self.all_to_all_blocks, self.all_to_all_slots);
            return Err(Error::argument("the low-latency all-to-all", value, "both, or neither"));
        }
        Ok(())
    }

    /// Each option against what the communicator supports.
    fn check_support(&self, limits: &Limits<'_>) -> Result<()> {
        if self.lsa_multimem
            && let Some(setting) = limits.multicast_off
        {
            return Err(Error::MulticastOff { what: "lsa_multimem", setting });
        }
        let Some(support) = limits.support else { return Ok(()) };
        if !support.device_api {
            return Err(Error::Unsupported {
                what: "a device communicator",
                reason: NO_SYMMETRIC_MEMORY.into(),
            });
        }
        if self.lsa_multimem && !support.multimem {
            let reason = "the LSA team has no multicast (NVLink SHARP)".into();
            return Err(Error::Unsupported { what: "lsa_multimem", reason });
        }
        let (what, usable) = match self.gin {
            None => return Ok(()),
            Some(GinConnection::Full) => ("a full GIN connection", support.gin.is_some()),
            Some(GinConnection::Rail) => ("a railed GIN connection", support.railed_gin.is_some()),
            Some(GinConnection::Stride(stride)) => (
                "a strided GIN connection",
                support.railed_gin.is_some() && support.gin_min_stride.is_none_or(|least| stride >= least),
            ),
        };
        if !usable {
            return Err(Error::Unsupported { what, reason: NO_GIN.into() });
        }
        Ok(())
    }

    /// 2.28.3: no size, no magic, no version; two lists, and what the LSA team gets. [`DevCommRequirements::check_version`] has refused
    /// everything else.
    fn encode_2_28_3(&self, nccl: &Nccl) -> Encoded {
        let mut bytes = Bytes::zeroed();
        bytes.put(offset_of!(v2_28_3::ncclDevCommRequirements, lsaMultimem), self.lsa_multimem);
        bytes.put(offset_of!(v2_28_3::ncclDevCommRequirements, lsaBarrierCount), self.lsa_barriers);
        Encoded { bytes, version: nccl.version(), dev_comm_size: Generation::V2_28_3.dev_comm_size() }
    }

    /// 2.28.7 to 2.28.9: the same without size, magic and version, and GIN, which is only switched on.
    fn encode_2_28(&self, nccl: &Nccl) -> Encoded {
        let mut bytes = Bytes::zeroed();
        macro_rules! put {
            ($($field:ident = $value:expr;)*) => {
                $(bytes.put(offset_of!(v2_28::ncclDevCommRequirements, $field), $value);)*
            };
        }
        put! {
            lsaMultimem = self.lsa_multimem;
            barrierCount = self.barriers;
            lsaBarrierCount = self.lsa_barriers;
            railGinBarrierCount = self.rail_barriers;
            lsaLLA2ABlockCount = self.all_to_all_blocks;
            lsaLLA2ASlotCount = self.all_to_all_slots;
            ginForceEnable = self.gin.is_some();
            ginContextCount = if self.gin.is_some() { self.gin_contexts.unwrap_or(DEFAULT_CONTEXTS) } else { 0 };
            ginSignalCount = self.gin_signals;
            ginCounterCount = self.gin_counters;
        }
        Encoded { bytes, version: nccl.version(), dev_comm_size: Generation::V2_28.dev_comm_size() }
    }

    /// 2.29 and later: one struct that grew at its end. All of it is filled; the size says how much the library reads.
    fn encode_2_29(&self, nccl: &Nccl, limits: &Limits<'_>) -> Result<Encoded> {
        let generation = nccl.generation();
        let version = nccl.declared_version();
        let mut bytes = Bytes::zeroed();
        macro_rules! put {
            ($($field:ident = $value:expr;)*) => {
                $(bytes.put(offset_of!(v2_32::ncclDevCommRequirements, $field), $value);)*
            };
        }
        let stride = if let Some(GinConnection::Stride(stride)) = self.gin { stride } else { 1 };
        put! {
            size = generation.requirements_size();
            magic = NCCL_API_MAGIC;
            version = version.code();
            lsaMultimem = self.lsa_multimem;
            barrierCount = self.barriers;
            lsaBarrierCount = self.lsa_barriers;
            railGinBarrierCount = self.rail_barriers;
            lsaLLA2ABlockCount = self.all_to_all_blocks;
            lsaLLA2ASlotCount = self.all_to_all_slots;
            ginForceEnable = false;
            ginContextCount = self.gin_contexts.unwrap_or(DEFAULT_CONTEXTS);
            ginSignalCount = self.gin_signals;
            ginCounterCount = self.gin_counters;
            ginConnectionType = self.gin.map_or(0, GinConnection::to_raw);
            ginExclusiveContexts = self.gin_exclusive_contexts;
            ginQueueDepth = self.gin_queue_depth.unwrap_or(0);
            ginTrafficClass = self.gin_traffic_class.map_or(UNDEFINED, u32::cast_signed);
            worldGinBarrierCount = self.world_barriers;
            ginStrongSignalsRequired = self.gin_strong_signals;
            ginVaSignalsRequired = self.gin_va_signals;
            ginCustomStride = stride;
            ginType = self.gin_type.map_or(0, |kind| kind.to_raw());
            useRuntimeVersion = self.runtime_version;
        }
        let (version, dev_comm_size) = if self.runtime_version {
            let told = limits.support.and_then(|support| support.device_communicator_size);
            (nccl.version(), told.unwrap_or_else(|| generation.dev_comm_size()))
        } else {
            (version, generation.dev_comm_size())
        };
        if dev_comm_size > DEV_COMM_CAPACITY {
            return Err(Error::Unsupported {
                what: "runtime_version",
                reason: format!(
                    "this library's device communicator has {dev_comm_size} bytes, more than {DEV_COMM_CAPACITY}"
                ),
            });
        }
        Ok(Encoded { bytes, version, dev_comm_size })
    }
}

#[cfg(test)]
#[path = "encode_tests.rs"]
mod tests;

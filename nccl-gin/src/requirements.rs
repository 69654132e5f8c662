//! What a device communicator must have.

mod encode;

pub(crate) use encode::{DEV_COMM_CAPACITY, Limits};

use crate::properties::{GinConnection, GinType};

/// What a device communicator must have: a builder for `ncclDevCommRequirements_t`.
///
/// Nothing is asked for at first: such a device communicator can compute peers' addresses and no more. What the loaded version or the
/// communicator cannot give is refused, with the reason, when the device communicator is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "ncclDevCommRequirements_t")]
#[must_use]
pub struct DevCommRequirements {
    barriers: u32,
    lsa_barriers: u32,
    rail_barriers: u32,
    world_barriers: u32,
    all_to_all_blocks: u32,
    all_to_all_slots: u32,
    lsa_multimem: bool,
    gin: Option<GinConnection>,
    gin_type: Option<GinType>,
    gin_contexts: Option<u32>,
    gin_exclusive_contexts: bool,
    gin_signals: u32,
    gin_counters: u32,
    gin_queue_depth: Option<u32>,
    gin_traffic_class: Option<u32>,
    gin_strong_signals: bool,
    gin_va_signals: bool,
    runtime_version: bool,
}

impl Default for DevCommRequirements {
    fn default() -> Self {
        Self::new()
    }
}

impl DevCommRequirements {
    /// No resources at all.
    pub const fn new() -> Self {
        Self {
            barriers: 0,
            lsa_barriers: 0,
            rail_barriers: 0,
            world_barriers: 0,
            all_to_all_blocks: 0,
            all_to_all_slots: 0,
            lsa_multimem: false,
            gin: None,
            gin_type: None,
            gin_contexts: None,
            gin_exclusive_contexts: false,
            gin_signals: 0,
            gin_counters: 0,
            gin_queue_depth: None,
            gin_traffic_class: None,
            gin_strong_signals: true,
            gin_va_signals: true,
            runtime_version: false,
        }
    }

    /// Barriers over all ranks, one for each CTA that uses them (`barrierCount`; NCCL 2.28.7 and later).
    pub const fn barriers(mut self, count: u32) -> Self {
        self.barriers = count;
        self
    }

    /// Barriers over the LSA team, one for each CTA that uses them (`lsaBarrierCount`).
    pub const fn lsa_barriers(mut self, count: u32) -> Self {
        self.lsa_barriers = count;
        self
    }

    /// Barriers over the rail, through GIN (`railGinBarrierCount`).
    pub const fn rail_barriers(mut self, count: u32) -> Self {
        self.rail_barriers = count;
        self
    }

    /// Barriers over all ranks, through GIN alone (`worldGinBarrierCount`; NCCL 2.30 and later).
    pub const fn world_barriers(mut self, count: u32) -> Self {
        self.world_barriers = count;
        self
    }

    /// A low-latency all-to-all over the LSA team for so many CTAs, with so many slots each (`lsaLLA2ABlockCount`,
    /// `lsaLLA2ASlotCount`); `ncclLLA2ACalcSlots` tells how many slots given elements need. NCCL 2.28.7 and later.
    #[doc(alias = "ncclLLA2ACalcSlots")]
    pub const fn all_to_all(mut self, blocks: u32, slots: u32) -> Self {
        self.all_to_all_blocks = blocks;
        self.all_to_all_slots = slots;
        self
    }

    /// Multicast addresses for the LSA team (`lsaMultimem`). NCCL creates multicast objects for it, so it is off unless asked for, and
    /// refused where the environment switches multicast off
    /// ([`multicast_disabled_by`](crate::multicast_disabled_by)).
    pub const fn lsa_multimem(mut self, on: bool) -> Self {
        self.lsa_multimem = on;
        self
    }

    /// GIN, to these ranks (`ginConnectionType`; NCCL 2.28.7 and later, where 2.28 knows only [`GinConnection::Full`], `ginForceEnable`).
    pub const fn gin(mut self, connection: GinConnection) -> Self {
        self.gin = Some(connection);
        self
    }

    /// Which kind of GIN (`ginType`; NCCL 2.31 and later).
    pub const fn gin_type(mut self, kind: GinType) -> Self {
        self.gin_type = Some(kind);
        self
    }

    /// GIN contexts, which work side by side (`ginContextCount`). A hint: the device communicator says how many it has.
    pub const fn gin_contexts(mut self, count: u32) -> Self {
        self.gin_contexts = Some(count);
        self
    }

    /// Whether the GIN contexts are this device communicator's alone (`ginExclusiveContexts`; NCCL 2.29.7 and later).
    pub const fn gin_exclusive_contexts(mut self, on: bool) -> Self {
        self.gin_exclusive_contexts = on;
        self
    }

    /// GIN signals, which start at 0 (`ginSignalCount`).
    pub const fn gin_signals(mut self, count: u32) -> Self {
        self.gin_signals = count;
        self
    }

    /// GIN counters, which start at 0 (`ginCounterCount`).
    pub const fn gin_counters(mut self, count: u32) -> Self {
        self.gin_counters = count;
        self
    }

    /// Requests that a GIN queue holds (`ginQueueDepth`; NCCL 2.29.7 and later).
    pub const fn gin_queue_depth(mut self, depth: u32) -> Self {
        self.gin_queue_depth = Some(depth);
        self
    }

    /// Traffic class of GIN's packets (`ginTrafficClass`; NCCL 2.30 and later).
    pub const fn gin_traffic_class(mut self, class: u32) -> Self {
        self.gin_traffic_class = Some(class);
        self
    }

    /// Whether kernels use strong signals, which cover all earlier puts of a context (`ginStrongSignalsRequired`). On unless switched
    /// off; NCCL before 2.30.5 has no other signals.
    pub const fn gin_strong_signals(mut self, on: bool) -> Self {
        self.gin_strong_signals = on;
        self
    }

    /// Whether kernels signal by address (`ginVaSignalsRequired`). On unless switched off; tested by NCCL 2.30.5 and later.
    pub const fn gin_va_signals(mut self, on: bool) -> Self {
        self.gin_va_signals = on;
        self
    }

    /// Whether the device code is compiled, at run time, with the headers of the loaded library
    /// ([`Nccl::include_dir`](nccl_gin_sys::Nccl::include_dir)), so that the device communicator may have that library's own layout
    /// (`useRuntimeVersion`; NCCL 2.31 and later). Off, it has the layout of the newest release that this crate knows and the library
    /// accepts ([`DevComm::declared_version`](crate::DevComm::declared_version)).
    pub const fn runtime_version(mut self, on: bool) -> Self {
        self.runtime_version = on;
        self
    }

    pub(crate) const fn wants_multimem(&self) -> bool {
        self.lsa_multimem
    }
}

//! The structs whose layout is another in each generation. A struct that two of them share is declared in the newer one.

macro_rules! generations {
    ($($module:ident: $release:literal, $since:literal;)*) => { $(
        #[doc = concat!("Layouts of the ", $release, " generation, as the headers of ", $since, " declare them.")]
        ///
        /// In the signatures of [`Nccl`](crate::Nccl) these structs are opaque: cast the pointer to the layout that
        /// [`Nccl::generation`](crate::Nccl::generation) names.
        #[allow(
            missing_docs,
            non_camel_case_types,
            non_snake_case,
            non_upper_case_globals,
            unsafe_op_in_unsafe_fn,
            unused_imports,
            clippy::all,
            clippy::undocumented_unsafe_blocks,
            rustdoc::all
        )]
        pub mod $module;
    )* };
}

generations! {
    v2_28_3: "2.28.3", "2.28.3";
    v2_28: "2.28", "2.28.9";
    v2_29: "2.29", "2.29.7";
    v2_30: "2.30", "2.30.7";
    v2_31: "2.31", "2.31.2";
    v2_32: "2.32", "2.32.3";
}

/// What code that handles several generations at once relies on.
const _: () = {
    use core::mem::{offset_of, size_of};

    macro_rules! each {
        ($ty:ident: $modules:tt; $($field:ident)*) => { $(each!(@ $ty $modules $field);)* };
        (@ $ty:ident [$($module:ident)*] $field:ident) => {
            $(assert!(offset_of!($module::$ty, $field) == offset_of!(v2_32::$ty, $field));)*
        };
    }
    // From 2.29 on the requirements and the properties only grow at the end.
    each!(ncclDevCommRequirements: [v2_29 v2_30 v2_31];
        size magic version resourceRequirementsList teamRequirementsList lsaMultimem barrierCount lsaBarrierCount
        railGinBarrierCount lsaLLA2ABlockCount lsaLLA2ASlotCount ginForceEnable ginContextCount ginSignalCount
        ginCounterCount ginConnectionType ginExclusiveContexts ginQueueDepth);
    each!(ncclDevCommRequirements: [v2_30 v2_31];
        ginTrafficClass worldGinBarrierCount ginStrongSignalsRequired ginVaSignalsRequired);
    each!(ncclDevCommRequirements: [v2_31];
        ginCustomStride ginType useRuntimeVersion cftCaps cftBarrierCount);
    each!(ncclCommProperties: [v2_29 v2_30 v2_31];
        size magic version rank nRanks cudaDev nvmlDev deviceApiSupport multimemSupport ginType nLsaTeams
        hostRmaSupport railedGinType);
    each!(ncclCommProperties: [v2_31];
        commHash ginMinStride ginConnectionType ginSupport devCommRuntimeVersionSize);
    // The configuration only grows at the end, from 2.28 on.
    each!(ncclConfig_t: [v2_28_3 v2_28 v2_29 v2_30 v2_31];
        size magic version blocking cgaClusterSize minCTAs maxCTAs netName splitShare trafficClass commName
        collnetEnable CTAPolicy shrinkShare nvlsCTAs nChannelsPerNetPeer nvlinkCentricSched);
    each!(ncclConfig_t: [v2_29 v2_30 v2_31]; graphUsageMode numRmaCtx);
    each!(ncclConfig_t: [v2_30 v2_31]; maxP2pPeers graphStreamOrdering);
    // The part of a window that addresses are computed from is the same in every generation.
    each!(ncclWindow_vidmem: [v2_28_3 v2_28 v2_29 v2_30 v2_31];
        winHost lsaFlatBase lsaRank worldRank stride4G mcOffset4K);
    each!(ncclWindow_vidmem: [v2_28 v2_29 v2_30 v2_31]; ginOffset4K);
    assert!(size_of::<v2_31::ncclDevComm>() == size_of::<v2_32::ncclDevComm>());
};

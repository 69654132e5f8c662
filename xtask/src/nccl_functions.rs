//! The NCCL functions that `nccl-gin-sys` offers: the one list that its table is generated from.

/// One function: its C name and what it does, in a line.
pub struct NcclFunction {
    /// Name in `nccl.h` or `nccl_device.h`, and in the shared object.
    pub name: &'static str,
    /// What the call does.
    pub doc: &'static str,
}

const fn f(name: &'static str, doc: &'static str) -> NcclFunction {
    NcclFunction { name, doc }
}

/// Declared by some version's headers, but left out of the table, with the reason.
pub const LEFT_OUT: &[(&str, &str)] = &[
    ("ncclResetDebugInit", "not part of the API and due to be removed"),
    ("ncclCftBarrierCreateRequirement", "declared from 2.31 on, exported by no library up to 2.32.3"),
];

/// Every function, by subject.
#[rustfmt::skip]
pub const FUNCTIONS: &[NcclFunction] = &[
    // Version and errors
    f("ncclGetVersion", "Version of the library, as `10000 * major + 100 * minor + patch`."),
    f("ncclGetErrorString", "Description of a result code, a static C string."),
    f("ncclGetLastError", "Text of the last error, a C string that the next error of the process replaces."),
    // Communicators
    f("ncclGetUniqueId", "Makes an identifier for a new communicator, and starts the listener behind it."),
    f("ncclCommGetUniqueId", "Makes an identifier with which new ranks join a communicator that grows."),
    f("ncclCommInitRank", "Creates this rank's part of a communicator, with the default configuration."),
    f("ncclCommInitRankConfig", "Creates this rank's part of a communicator, with a configuration."),
    f("ncclCommInitRankScalable", "Creates this rank's part of a communicator from several identifiers."),
    f("ncclCommInitAll", "Creates the communicators of all ranks in one process, one a device."),
    f("ncclCommSplit", "Makes a communicator of the ranks that pass the same colour, ordered by key."),
    f("ncclCommShrink", "Makes a communicator without the ranks that are listed."),
    f("ncclCommGrow", "Makes a larger communicator of the present ranks and new ones."),
    f("ncclCommRevoke", "Stops what a communicator has in flight; it can then only be destroyed or made smaller."),
    f("ncclCommFinalize", "Flushes a communicator on all ranks, as the first half of destroying it."),
    f("ncclCommDestroy", "Destroys a communicator."),
    f("ncclCommAbort", "Stops what a communicator has in flight and destroys it, without the other ranks."),
    f("ncclCommGetAsyncError", "State of a communicator: success, an error, or in progress."),
    f("ncclCommCount", "Number of ranks of a communicator."),
    f("ncclCommCuDevice", "CUDA ordinal of a communicator's device."),
    f("ncclCommUserRank", "This process's rank in a communicator."),
    f("ncclCommSuspend", "Releases what a communicator can give back while it is not used."),
    f("ncclCommResume", "Takes back what a suspended communicator released."),
    f("ncclCommMemStats", "One figure about a communicator's device memory, in bytes."),
    f("ncclSetEncryption", "Sets the encryption of NCCL's own TCP connections."),
    // Groups
    f("ncclGroupStart", "Opens a group on the calling thread: calls are queued until it ends."),
    f("ncclGroupEnd", "Ends the calling thread's group and starts what was queued."),
    f("ncclGroupSimulateEnd", "Ends the calling thread's group and estimates the time it would take."),
    // Memory and windows
    f("ncclMemAlloc", "Allocates device memory that can become a window, on the current device."),
    f("ncclMemFree", "Frees memory from `ncclMemAlloc`."),
    f("ncclCommRegister", "Registers a local buffer for zero-copy operations."),
    f("ncclCommDeregister", "Gives the registration of a local buffer back."),
    f("ncclCommWindowRegister", "Makes a window of memory that every rank registers; succeeds with null where windows are not supported."),
    f("ncclCommWindowDeregister", "Gives a window back."),
    f("ncclWinGetUserPtr", "Address that a window was registered with, or null."),
    f("ncclGetLsaDevicePointer", "Address, on this device, of a byte of an LSA peer's window."),
    f("ncclGetPeerDevicePointer", "Address, on this device, of a byte of a world peer's window, or null for a peer outside the LSA team."),
    f("ncclGetMultimemDevicePointer", "Multicast address of a byte of a window for a team's multicast handle."),
    f("ncclGetLsaMultimemDevicePointer", "Multicast address of a byte of a window for the LSA team, or null."),
    f("ncclGetMultimemDeviceLeInfo", "CFT object and offset of a byte of a window, multicast."),
    f("ncclGetCftDeviceLeInfo", "CFT object and offset of a byte of a CFT peer's window."),
    f("ncclGetPeerDeviceLeInfo", "CFT object and offset of a byte of a world peer's window."),
    // Device communicators
    f("ncclCommQueryProperties", "What a communicator supports."),
    f("ncclDevCommCreate", "Creates a device communicator; collective."),
    f("ncclDevCommDestroy", "Destroys a device communicator."),
    f("ncclLsaBarrierCreateRequirement", "Resources that barriers of an LSA team need."),
    f("ncclGinBarrierCreateRequirement", "Resources that barriers over GIN need."),
    f("ncclLLA2ACalcSlots", "Slots that a low-latency all-to-all needs for given elements."),
    f("ncclLLA2ACreateRequirement", "Resources that a low-latency all-to-all needs."),
    // Teams
    f("ncclTeamWorld", "All ranks of a communicator."),
    f("ncclTeamLsa", "The ranks whose memory this one can address by load and store."),
    f("ncclTeamRail", "The ranks with the same place in their LSA teams."),
    f("ncclTeamCft", "The ranks of a CFT team."),
    f("ncclTeamCftMultimem", "The ranks of the CFT multicast team."),
    f("ncclTeamRankToWorld", "World rank of a rank of a team."),
    f("ncclTeamRankToLsa", "LSA rank of a rank of a team, or -1."),
    // One-sided operations on a stream
    f("ncclPutSignal", "Writes to a peer's window and signals, in stream order."),
    f("ncclSignal", "Signals a peer, in stream order."),
    f("ncclWaitSignal", "Waits for signals, in stream order."),
    // Collectives
    f("ncclReduce", "Reduces to one rank."),
    f("ncclBcast", "Sends one rank's buffer to all, in place."),
    f("ncclBroadcast", "Sends one rank's buffer to all."),
    f("ncclAllReduce", "Reduces to all ranks."),
    f("ncclReduceScatter", "Reduces, and gives each rank its part."),
    f("ncclAllGather", "Gives every rank all ranks' parts."),
    f("ncclAlltoAll", "Gives every rank its part of all ranks' buffers."),
    f("ncclGather", "Gives one rank all ranks' parts."),
    f("ncclScatter", "Gives each rank its part of one rank's buffer."),
    f("ncclReduceConfig", "`ncclReduce` with options for this call."),
    f("ncclBroadcastConfig", "`ncclBroadcast` with options for this call."),
    f("ncclAllReduceConfig", "`ncclAllReduce` with options for this call."),
    f("ncclReduceScatterConfig", "`ncclReduceScatter` with options for this call."),
    f("ncclAllGatherConfig", "`ncclAllGather` with options for this call."),
    f("ncclAlltoAllConfig", "`ncclAlltoAll` with options for this call."),
    f("ncclGatherConfig", "`ncclGather` with options for this call."),
    f("ncclScatterConfig", "`ncclScatter` with options for this call."),
    f("ncclSend", "Sends to a rank, in stream order."),
    f("ncclRecv", "Receives from a rank, in stream order."),
    f("ncclRedOpCreatePreMulSum", "Makes a reduction that scales before it sums."),
    f("ncclRedOpDestroy", "Destroys a reduction that was made."),
    // Parameters
    f("ncclParamBind", "Handle of a parameter, by its name."),
    f("ncclParamGetI8", "Value of a parameter of 8 bits, signed."),
    f("ncclParamGetI16", "Value of a parameter of 16 bits, signed."),
    f("ncclParamGetI32", "Value of a parameter of 32 bits, signed."),
    f("ncclParamGetI64", "Value of a parameter of 64 bits, signed."),
    f("ncclParamGetU8", "Value of a parameter of 8 bits, unsigned."),
    f("ncclParamGetU16", "Value of a parameter of 16 bits, unsigned."),
    f("ncclParamGetU32", "Value of a parameter of 32 bits, unsigned."),
    f("ncclParamGetU64", "Value of a parameter of 64 bits, unsigned."),
    f("ncclParamGetStr", "Value of a parameter that is a string."),
    f("ncclParamGet", "Bytes of a parameter's value."),
    f("ncclParamGetParameter", "Value of a parameter as text, by its name."),
    f("ncclParamGetAllParameterKeys", "Names of all parameters."),
    f("ncclParamDumpAll", "Prints all parameters to the log."),
];

/// Types that every generation declares with the same layout, beyond those that the functions reach.
pub const EXTRA_TYPES: &[&str] =
    &["ncclTeamRequirements", "ncclGinConnectionType_t", "ncclGinType_t", "ncclRedOp_t"];

/// Macros that become constants.
pub const MACROS: &[&str] = &[
    "NCCL_UNIQUE_ID_BYTES",
    "NCCL_API_MAGIC",
    "NCCL_SPLIT_NOCOLOR",
    "NCCL_WIN_DEFAULT",
    "NCCL_WIN_COLL_SYMMETRIC",
    "NCCL_WIN_STRICT_ORDERING",
    "NCCL_WIN_GIN_ONLY",
    "NCCL_WIN_CFT_COUNTED",
    "NCCL_WIN_REQUIRED_ALIGNMENT",
    "NCCL_CTA_POLICY_DEFAULT",
    "NCCL_CTA_POLICY_EFFICIENCY",
    "NCCL_CTA_POLICY_ZERO",
    "NCCL_SHRINK_DEFAULT",
    "NCCL_SHRINK_ABORT",
    "NCCL_REVOKE_DEFAULT",
    "NCCL_SUSPEND_MEM",
];

/// Structs whose layout is another in each generation: opaque in the signatures, and declared in full once a generation.
/// Each is a regular expression of the names that headers give it, and the name that the signatures use.
pub const VERSIONED: &[(&str, &str)] = &[
    ("ncclConfig_v[0-9]+", "ncclConfig_t"),
    ("ncclCollConfig_v[0-9]+", "ncclCollConfig_t"),
    ("ncclDevCommRequirements", "ncclDevCommRequirements"),
    ("ncclDevComm", "ncclDevComm"),
    ("ncclCommProperties", "ncclCommProperties"),
    ("ncclWindow_vidmem", "ncclWindow_vidmem"),
];

/// Structs that the versioned ones hold and that differ between generations too.
pub const VERSIONED_PARTS: &[&str] = &["ncclResourceWindow_vidmem.*"];

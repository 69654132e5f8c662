//! The driver functions that `cuda-vmm-sys` offers: the one list that its table is generated from.

/// One driver function in one of its versions.
pub struct Function {
    /// Method of the table: the C name, with a suffix where the table holds two versions of it.
    pub method: &'static str,
    /// Name that `cuGetProcAddress` knows.
    pub name: &'static str,
    /// CUDA version that introduced this form, as `cuda.h` counts (12010 is 12.1).
    pub since: u32,
    /// Name that the shared object exports, for `dlsym`.
    pub symbol: &'static str,
    /// What the call does, in a line.
    pub doc: &'static str,
}

const fn f(name: &'static str, since: u32, doc: &'static str) -> Function {
    Function { method: name, name, since, symbol: name, doc }
}

/// A form whose exported name carries a version suffix.
const fn v(name: &'static str, since: u32, symbol: &'static str, doc: &'static str) -> Function {
    Function { method: name, name, since, symbol, doc }
}

/// A second form of a function that the table already holds.
const fn second(name: &'static str, since: u32, symbol: &'static str, doc: &'static str) -> Function {
    Function { method: symbol, name, since, symbol, doc }
}

/// Every function, by subject.
#[rustfmt::skip]
pub const FUNCTIONS: &[Function] = &[
    // Start and errors
    f("cuInit", 2000, "Initialises the driver; every other call but the version and the error texts needs it first."),
    f("cuDriverGetVersion", 2020, "Newest CUDA version that the driver supports, as `1000 * major + 10 * minor`."),
    f("cuGetErrorName", 6000, "Name of a result code, a static C string."),
    f("cuGetErrorString", 6000, "Description of a result code, a static C string."),
    // Devices
    f("cuDeviceGet", 2000, "Handle of the device with an ordinal."),
    f("cuDeviceGetCount", 2000, "Number of devices."),
    f("cuDeviceGetName", 2000, "Name of a device, NUL-terminated."),
    v("cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2", "UUID of a device, or of its MIG instance."),
    f("cuDeviceGetAttribute", 2000, "One attribute of a device."),
    v("cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2", "Bytes of memory on a device."),
    f("cuDeviceGetPCIBusId", 4010, "PCI address of a device, as `domain:bus:device.function`."),
    // Contexts
    f("cuDevicePrimaryCtxRetain", 7000, "Retains the primary context of a device, creating it on first use."),
    v("cuDevicePrimaryCtxRelease", 11000, "cuDevicePrimaryCtxRelease_v2", "Gives one retained reference to the primary context back."),
    f("cuDevicePrimaryCtxGetState", 7000, "Flags of the primary context and whether it is active."),
    f("cuCtxSetCurrent", 4000, "Makes a context current on the calling thread."),
    f("cuCtxGetCurrent", 4000, "Context that is current on the calling thread, or null."),
    v("cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2", "Pushes a context onto the calling thread's stack."),
    v("cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2", "Pops the calling thread's current context."),
    f("cuCtxGetDevice", 2000, "Device of the current context."),
    f("cuCtxSynchronize", 2000, "Waits for all work of the current context."),
    f("cuCtxGetStreamPriorityRange", 5050, "Lowest and highest stream priority of the current context."),
    // Peers
    f("cuDeviceCanAccessPeer", 4000, "Whether one device can address another's memory."),
    f("cuDeviceGetP2PAttribute", 8000, "One attribute of the link between two devices."),
    f("cuCtxEnablePeerAccess", 4000, "Lets the current context address the allocations of another."),
    f("cuCtxDisablePeerAccess", 4000, "Takes that access back."),
    // Virtual memory management
    f("cuMemGetAllocationGranularity", 10020, "Granularity of physical allocations with given properties, in bytes."),
    f("cuMemAddressReserve", 10020, "Reserves a range of virtual addresses."),
    f("cuMemAddressFree", 10020, "Frees a reserved range, exactly as it was reserved."),
    f("cuMemCreate", 10020, "Creates a physical allocation and returns its handle."),
    f("cuMemRelease", 10020, "Gives a handle back; the memory lives on while it is mapped or exported."),
    f("cuMemMap", 10020, "Maps a physical allocation into a reserved range, without access yet."),
    f("cuMemUnmap", 10020, "Unmaps whole mappings of a range."),
    f("cuMemSetAccess", 10020, "Sets who may read and write a mapped range."),
    f("cuMemGetAccess", 10020, "Access that a location has to an address."),
    f("cuMemExportToShareableHandle", 10020, "Exports an allocation as a file descriptor or FABRIC handle."),
    f("cuMemImportFromShareableHandle", 10020, "Imports an allocation that another process exported."),
    f("cuMemGetAllocationPropertiesFromHandle", 10020, "Properties an allocation was created with."),
    f("cuMemRetainAllocationHandle", 11000, "Handle of the allocation mapped at an address, with a reference of its own."),
    f("cuMemGetHandleForAddressRange", 11070, "dma-buf file descriptor of an address range."),
    v("cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2", "Base and size of the allocation that holds an address."),
    // Multicast
    f("cuMulticastGetGranularity", 12010, "Granularity of a multicast object with given properties, in bytes."),
    f("cuMulticastCreate", 12010, "Creates a multicast object."),
    f("cuMulticastAddDevice", 12010, "Adds a device to a multicast object."),
    f("cuMulticastBindMem", 12010, "Binds a part of a physical allocation; blocks until every device has been added."),
    f("cuMulticastBindAddr", 12010, "Binds memory by its address; blocks until every device has been added."),
    second("cuMulticastBindMem", 13010, "cuMulticastBindMem_v2", "Binds a part of a physical allocation for a named device."),
    second("cuMulticastBindAddr", 13010, "cuMulticastBindAddr_v2", "Binds memory by its address for a named device."),
    f("cuMulticastUnbind", 12010, "Unbinds what one bind call bound, with exactly its offset and size."),
    // Plain memory
    v("cuMemAlloc", 3020, "cuMemAlloc_v2", "Allocates device memory in the current context."),
    v("cuMemFree", 3020, "cuMemFree_v2", "Frees device memory."),
    f("cuMemHostAlloc", 2020, "Allocates page-locked host memory."),
    f("cuMemFreeHost", 2000, "Frees page-locked host memory."),
    v("cuMemHostRegister", 6050, "cuMemHostRegister_v2", "Page-locks host memory that exists already."),
    f("cuMemHostUnregister", 4000, "Undoes the page-locking of a registered range."),
    v("cuMemHostGetDevicePointer", 3020, "cuMemHostGetDevicePointer_v2", "Device address of page-locked host memory."),
    v("cuMemGetInfo", 3020, "cuMemGetInfo_v2", "Free and total bytes of the current context's device."),
    f("cuPointerGetAttribute", 4000, "One attribute of an address."),
    // Copies and sets
    f("cuMemcpyAsync", 4000, "Copies between any two addresses, in stream order."),
    v("cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2", "Copies host to device, in stream order."),
    v("cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2", "Copies device to host, in stream order."),
    v("cuMemcpyDtoDAsync", 3020, "cuMemcpyDtoDAsync_v2", "Copies device to device, in stream order."),
    v("cuMemcpy2DAsync", 3020, "cuMemcpy2DAsync_v2", "Copies rows of bytes with any distances between them, in stream order."),
    f("cuMemcpyPeerAsync", 4000, "Copies between two contexts' memories, in stream order."),
    f("cuMemcpyBatchAsync", 12080, "Many copies in one call, with the index of the first that failed."),
    second("cuMemcpyBatchAsync", 13000, "cuMemcpyBatchAsync_v2", "Many copies in one call."),
    f("cuMemsetD8Async", 3020, "Sets bytes, in stream order."),
    f("cuMemsetD32Async", 3020, "Sets 32-bit words, in stream order."),
    // Legacy inter-process memory
    f("cuIpcGetMemHandle", 4010, "Handle of an allocation of `cuMemAlloc` for another process."),
    v("cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2", "Maps another process's allocation."),
    f("cuIpcCloseMemHandle", 4010, "Unmaps it."),
    // Streams and events
    f("cuStreamCreate", 2000, "Creates a stream in the current context."),
    f("cuStreamCreateWithPriority", 5050, "Creates a stream with a priority."),
    v("cuStreamDestroy", 4000, "cuStreamDestroy_v2", "Destroys a stream once its work is done."),
    f("cuStreamSynchronize", 2000, "Waits for all work of a stream."),
    f("cuStreamQuery", 2000, "Whether a stream has finished; `CUDA_ERROR_NOT_READY` while it has not."),
    f("cuStreamWaitEvent", 3020, "Makes a stream wait for an event."),
    f("cuStreamGetCtx", 9020, "Context of a stream."),
    f("cuStreamGetId", 12000, "Number of a stream, which no other stream of the process ever has."),
    f("cuEventCreate", 2000, "Creates an event in the current context."),
    v("cuEventDestroy", 4000, "cuEventDestroy_v2", "Destroys an event."),
    f("cuEventRecord", 2000, "Records an event in a stream."),
    f("cuEventQuery", 2000, "Whether an event has happened; `CUDA_ERROR_NOT_READY` while it has not."),
    f("cuEventSynchronize", 2000, "Waits for an event."),
    f("cuEventElapsedTime", 2000, "Milliseconds between two events."),
    f("cuLaunchHostFunc", 10000, "Calls a host function in stream order."),
    // Stream memory operations
    v("cuStreamWriteValue32", 11070, "cuStreamWriteValue32_v2", "Writes a 32-bit word in stream order."),
    v("cuStreamWriteValue64", 11070, "cuStreamWriteValue64_v2", "Writes a 64-bit word in stream order."),
    v("cuStreamWaitValue32", 11070, "cuStreamWaitValue32_v2", "Makes a stream wait for a 32-bit word."),
    v("cuStreamWaitValue64", 11070, "cuStreamWaitValue64_v2", "Makes a stream wait for a 64-bit word."),
    v("cuStreamBatchMemOp", 11070, "cuStreamBatchMemOp_v2", "Several waits and writes in one call."),
    // Capture and graphs
    v("cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2", "Starts to capture a stream into a graph."),
    f("cuStreamEndCapture", 10000, "Ends the capture and returns the graph."),
    f("cuStreamIsCapturing", 10000, "Whether a stream is being captured."),
    f("cuThreadExchangeStreamCaptureMode", 10010, "Swaps the calling thread's capture mode."),
    f("cuGraphInstantiateWithFlags", 11040, "Makes a graph executable."),
    f("cuGraphUpload", 11010, "Uploads an executable graph ahead of its first launch."),
    f("cuGraphLaunch", 10000, "Launches an executable graph in a stream."),
    v("cuGraphExecUpdate", 12000, "cuGraphExecUpdate_v2", "Updates an executable graph from a changed graph."),
    f("cuGraphExecDestroy", 10000, "Destroys an executable graph."),
    f("cuGraphDestroy", 10000, "Destroys a graph."),
    // Code
    f("cuModuleLoadData", 2000, "Loads a cubin, PTX or fat binary from memory."),
    f("cuModuleLoadDataEx", 2010, "Loads code from memory with options for the just-in-time compiler."),
    f("cuModuleUnload", 2000, "Unloads a module."),
    f("cuModuleGetFunction", 2000, "A kernel of a module, by name."),
    v("cuModuleGetGlobal", 3020, "cuModuleGetGlobal_v2", "Address and size of a module's variable."),
    f("cuLibraryLoadData", 12000, "Loads code from memory, independent of contexts."),
    f("cuLibraryUnload", 12000, "Unloads a library."),
    f("cuLibraryGetKernel", 12000, "A kernel of a library, by name."),
    f("cuLibraryGetModule", 12000, "Module of a library in the current context."),
    f("cuKernelGetFunction", 12000, "Function of a kernel in the current context."),
    f("cuFuncGetAttribute", 2020, "One attribute of a function."),
    f("cuFuncSetAttribute", 9000, "Sets one attribute of a function, as the limit of dynamic shared memory."),
    f("cuFuncLoad", 12040, "Loads a function ahead of its first launch."),
    f("cuOccupancyMaxActiveBlocksPerMultiprocessor", 6050, "Blocks of a function that fit on one multiprocessor."),
    f("cuOccupancyMaxActiveClusters", 11070, "Clusters of a launch that fit on the device."),
    f("cuLaunchKernel", 4000, "Launches a kernel."),
    f("cuLaunchKernelEx", 11060, "Launches a kernel with attributes, as clusters or programmatic dependent launch."),
    f("cuLaunchCooperativeKernel", 9000, "Launches a kernel whose blocks are all resident at once."),
];

/// Types and constants that no signature names, but callers need.
pub const EXTRA_TYPES: &[&str] = &[
    "CUdevice_attribute",
    "CUdevice_P2PAttribute",
    "CUmemAllocationCompType",
    "CUmemAllocationHandleType",
    "CUmemAllocationType",
    "CUmemAccess_flags",
    "CUmemHandleType",
    "CUmemFabricHandle",
    "CUmemRangeHandleType",
    "CUmemRangeFlags",
    "CUmemorytype",
    "CUmulticastGranularity_flags",
    "CUctx_flags",
    "CUevent_flags",
    "CUstream_flags",
    "CUstreamWriteValue_flags",
    "CUstreamWaitValue_flags",
    "CUstreamBatchMemOpType",
    "CUipcMem_flags",
    "CUdriverProcAddress_flags",
    "CUdriverProcAddressQueryResult",
    "CUgraphInstantiate_flags",
    "CUlaunchAttributeID",
    // Names without a version, as callers write them.
    "CUcontext",
    "CUdevice",
    "CUdeviceptr",
    "CUevent",
    "CUfunction",
    "CUgraph",
    "CUgraphExec",
    "CUgraphExecUpdateResultInfo",
    "CUhostFn",
    "CUipcMemHandle",
    "CUkernel",
    "CUlaunchAttribute",
    "CUlaunchAttributeValue",
    "CUlaunchConfig",
    "CUlibrary",
    "CUmemAccessDesc",
    "CUmemAllocationProp",
    "CUmemGenericAllocationHandle",
    "CUmemLocation",
    "CUmemcpyAttributes",
    "CUmodule",
    "CUmulticastObjectProp",
    "CUstream",
    "CUstreamBatchMemOpParams",
    "CUuuid",
];

/// `#define`s of `cuda.h` to keep, as regular expressions.
pub const MACROS: &[&str] = &[
    "CU_IPC_HANDLE_SIZE",
    "CU_MEMHOSTALLOC_.*",
    "CU_MEMHOSTREGISTER_.*",
    "CU_MEM_CREATE_USAGE_.*",
    "CU_DEVICE_CPU",
    "CU_DEVICE_INVALID",
];

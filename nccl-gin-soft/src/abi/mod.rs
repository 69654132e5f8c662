//! What NCCL and a plugin agree on: codes, properties, and one table of functions for each version of the interface.
//!
//! | table | NCCL that loads it | where its library is named |
//! |---|---|---|
//! | [`ncclRmaPlugin_v14`](rma_v14::RmaV14) | 2.30.5 and later, up to at least 2.32.3 | `NCCL_RMA_PLUGIN` |
//! | [`ncclGinPlugin_v13`](gin_v13::GinV13) | 2.30.3 and 2.30.4; later ones take it where the table above is missing | `NCCL_GIN_PLUGIN` |
//! | [`ncclGinPlugin_v12`](gin_v12::GinV12) | 2.29.7 | `NCCL_GIN_PLUGIN` |
//!
//! The order of the fields is the interface. Sizes and offsets are asserted when the crate is compiled.
//!
//! # What every table promises
//! NCCL calls `init` for each communicator, and then for each connection of it: `listen`, an all-gather of the handles over its own
//! bootstrap, `connect`, `closeListen`. Contexts and memory registrations belong to a connection; `closeColl` comes last. `connect` and
//! the registrations are collective over the connection's ranks and come in the same order on all of them: so a registration's handle on
//! one rank names the same registration on the others. Puts, gets and flushes return a request, which `test` asks about until
//! it is done, never again after; they may come from several threads at a time, while another one registers memory. Among the operations of one
//! context to one rank, a strong signal must not be seen before any earlier put, a weak one not before its own. Nothing is
//! ordered across contexts or ranks.

use std::ffi::{c_char, c_int, c_ulong};

pub mod gin_v12;
pub mod gin_v13;
pub mod rma_v14;

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct ResultCode(pub c_int);

impl ResultCode {
    /// `ncclSuccess`.
    pub const SUCCESS: Self = Self(0);
    /// `ncclUnhandledCudaError`.
    pub const UNHANDLED_CUDA_ERROR: Self = Self(1);
    /// `ncclSystemError`.
    pub const SYSTEM_ERROR: Self = Self(2);
    /// `ncclInternalError`.
    pub const INTERNAL_ERROR: Self = Self(3);
    /// `ncclInvalidArgument`.
    pub const INVALID_ARGUMENT: Self = Self(4);
    /// `ncclInvalidUsage`.
    pub const INVALID_USAGE: Self = Self(5);
    /// `ncclRemoteError`.
    pub const REMOTE_ERROR: Self = Self(6);
}

/// `ncclDebugLogger_t`: level, subsystems, file, line, and a `printf` format with its arguments.
pub type Logger = Option<unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...)>;

/// Level of a warning.
pub const LOG_WARN: c_int = 2;
/// Level of information.
pub const LOG_INFO: c_int = 3;
/// Subsystems of the plugin's messages: initialisation and network.
pub const LOG_SUBSYSTEMS: c_ulong = 1 | 16;

/// Host memory (`NCCL_PTR_HOST`).
pub const PTR_HOST: c_int = 1;
/// Device memory (`NCCL_PTR_CUDA`).
pub const PTR_CUDA: c_int = 2;
/// Device memory of which NCCL also passes a dma-buf (`NCCL_PTR_DMABUF`). NCCL registers windows of several segments only with a plugin that has it.
pub const PTR_DMABUF: c_int = 4;

/// Registration flag: puts into this memory keep their order.
pub const MR_FORCE_ORDER: u64 = 1;
/// Registration flag: an array of signals that nobody but the plugin writes (the device resets by keeping an offset).
pub const MR_SIGNAL_NEVER_RESET: u64 = 2;

/// Signal operation: adds one; the value that comes along is not used.
pub const SIGNAL_INC: u32 = 1;
/// Signal operation: adds the value.
pub const SIGNAL_ADD: u32 = 2;

/// `NCCL_NET_DEVICE_GIN_PROXY`: a thread of NCCL's calls the plugin on behalf of the kernels.
pub const NET_DEVICE_GIN_PROXY: c_int = 2;

/// Bytes of a listen handle (`NCCL_NET_HANDLE_MAXSIZE`).
pub const HANDLE_SIZE: usize = 128;

/// `ncclNetVDeviceProps_t`, with room for as many devices as an adapter may consist of: eight, and four before NCCL 2.30.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct VirtualDevice<const N: usize = 8> {
    /// Devices that this one stands for.
    pub ndevs: c_int,
    /// Their numbers.
    pub devs: [c_int; N],
}

/// What `ncclNetProperties_v12_t` ends with, and version 11 does not.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Rails {
    /// Rail; -1 if not known.
    pub rail_id: i16,
    /// Plane; -1 if not known.
    pub plane_id: i16,
}

/// `ncclNetProperties_v12_t`; with room for four devices and no rails `ncclNetProperties_v11_t`, which goes with [`gin_v12`]. NCCL has either on its stack:
/// nothing may be written behind the smaller one.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NetProperties<const DEVICES: usize = 8, End = Rails> {
    /// Name, for logs. Must not be a network interface's: NCCL would take the two for one.
    pub name: *const c_char,
    /// Path of the PCI device below `/sys`; null puts the device under the first CPU.
    pub pci_path: *const c_char,
    /// Identity of the adapter.
    pub guid: u64,
    /// Bits of [`PTR_HOST`], [`PTR_CUDA`] and [`PTR_DMABUF`].
    pub ptr_support: c_int,
    /// Whether a registration serves all connections.
    pub reg_is_global: c_int,
    /// Whether receives must be flushed.
    pub force_flush: c_int,
    /// Mbit/s.
    pub speed: c_int,
    /// Port number.
    pub port: c_int,
    /// µs.
    pub latency: f32,
    /// Connections that may exist.
    pub max_comms: c_int,
    /// A 32nd of the requests that NCCL may have outstanding for a rank and context; that number must be a power of two.
    pub max_recvs: c_int,
    /// Kind of offload: [`NET_DEVICE_GIN_PROXY`].
    pub net_device_type: c_int,
    /// Version of the offload.
    pub net_device_version: c_int,
    /// What the device consists of.
    pub v_props: VirtualDevice<DEVICES>,
    /// Largest transfer between two ranks.
    pub max_p2p_bytes: usize,
    /// Largest collective transfer.
    pub max_coll_bytes: usize,
    /// Requests that one call may combine.
    pub max_multi_request_size: c_int,
    /// What this version has more.
    pub end: End,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<VirtualDevice>() == 36 && size_of::<VirtualDevice<4>>() == 20);
    assert!(size_of::<NetProperties>() == 128);
    assert!(offset_of!(NetProperties, guid) == 16);
    assert!(offset_of!(NetProperties, ptr_support) == 24);
    assert!(offset_of!(NetProperties, speed) == 36);
    assert!(offset_of!(NetProperties, latency) == 44);
    assert!(offset_of!(NetProperties, net_device_type) == 56);
    assert!(offset_of!(NetProperties, v_props) == 64);
    assert!(offset_of!(NetProperties, max_p2p_bytes) == 104);
    assert!(offset_of!(NetProperties, max_multi_request_size) == 120);
    assert!(offset_of!(NetProperties, end) == 124);
};

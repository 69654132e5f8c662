//! `ncclRmaPlugin_v14`: 2.30.5 and later.

use super::{Logger, NetProperties, ResultCode};
use std::ffi::{c_char, c_int, c_void};

/// `ncclRmaConfig_v14_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RmaConfig {
    /// Contexts that the operations' `context` counts.
    pub n_contexts: c_int,
    /// Traffic class; not used here.
    pub traffic_class: c_int,
    /// Distance, in ranks of the communicator, of two neighbours of this connection.
    pub rank_stride: c_int,
}

/// The table, in the order of the C struct. See the [module above](super) for what holds in every version.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RmaV14 {
    /// Name, for logs.
    pub name: *const c_char,
    /// Starts the plugin for a communicator. May be called several times; each has its `finalize`.
    pub init: unsafe extern "C" fn(ctx: *mut *mut c_void, comm_id: u64, log: Logger) -> ResultCode,
    /// Number of devices.
    pub devices: unsafe extern "C" fn(ndev: *mut c_int) -> ResultCode,
    /// Properties of a device. The strings must live as long as the library.
    pub get_properties: unsafe extern "C" fn(dev: c_int, props: *mut NetProperties) -> ResultCode,
    /// Opens a door for the other ranks and describes it in 128 bytes.
    pub listen: unsafe extern "C" fn(
        ctx: *mut c_void,
        dev: c_int,
        handle: *mut c_void,
        listen_comm: *mut *mut c_void,
    ) -> ResultCode,
    /// Connects all ranks; collective. `ctx` may be that of another plugin (2.30.7 passes the net's for its host side) and is not looked at.
    pub connect: unsafe extern "C" fn(
        ctx: *mut c_void,
        handles: *mut *mut c_void,
        nranks: c_int,
        rank: c_int,
        listen_comm: *mut c_void,
        coll_comm: *mut *mut c_void,
    ) -> ResultCode,
    /// Makes a set of contexts. Ordering is within one.
    pub create_context: unsafe extern "C" fn(
        coll_comm: *mut c_void,
        config: *mut RmaConfig,
        ctx: *mut *mut c_void,
    ) -> ResultCode,
    /// Registers memory; collective. The handle must not be null, and must be below 2⁶³: it travels through kernels.
    pub reg_mr_sym: unsafe extern "C" fn(
        coll_comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
        flags: u64,
        mhandle: *mut *mut c_void,
    ) -> ResultCode,
    /// The same, with a dma-buf of the memory. The descriptor is the caller's and is closed after the call.
    pub reg_mr_sym_dma_buf: unsafe extern "C" fn(
        coll_comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
        offset: u64,
        fd: c_int,
        flags: u64,
        mhandle: *mut *mut c_void,
    ) -> ResultCode,
    /// Ends a registration on this rank. The memory itself may be gone already (NCCL frees its host arrays first).
    pub dereg_mr_sym: unsafe extern "C" fn(coll_comm: *mut c_void, mhandle: *mut c_void) -> ResultCode,
    /// Ends a set of contexts.
    pub destroy_context: unsafe extern "C" fn(ctx: *mut c_void) -> ResultCode,
    /// Ends a connection. After it NCCL may unload the library: no thread may be left.
    pub close_coll: unsafe extern "C" fn(coll_comm: *mut c_void) -> ResultCode,
    /// Closes the door.
    pub close_listen: unsafe extern "C" fn(listen_comm: *mut c_void) -> ResultCode,
    /// Copies `size` bytes into a rank's memory. Must return a request. Done means that the source may be written again.
    pub iput: unsafe extern "C" fn(
        ctx: *mut c_void,
        context: c_int,
        src_off: u64,
        src: *mut c_void,
        size: usize,
        dst_off: u64,
        dst: *mut c_void,
        rank: u32,
        request: *mut *mut c_void,
    ) -> ResultCode,
    /// The same, and then adds to a 64-bit word of that rank's. With size 0 the two memory handles may be null.
    pub iput_signal: unsafe extern "C" fn(
        ctx: *mut c_void,
        context: c_int,
        src_off: u64,
        src: *mut c_void,
        size: usize,
        dst_off: u64,
        dst: *mut c_void,
        rank: u32,
        signal_off: u64,
        signal: *mut c_void,
        signal_value: u64,
        signal_op: u32,
        strong: bool,
        request: *mut *mut c_void,
    ) -> ResultCode,
    /// Copies from a rank's memory. Done means that the data is here.
    pub iget: unsafe extern "C" fn(
        ctx: *mut c_void,
        context: c_int,
        remote_off: u64,
        remote: *mut c_void,
        size: usize,
        local_off: u64,
        local: *mut c_void,
        rank: u32,
        request: *mut *mut c_void,
    ) -> ResultCode,
    /// Makes what earlier gets brought visible. A null request means that there was nothing to do.
    pub iflush: unsafe extern "C" fn(
        ctx: *mut c_void,
        context: c_int,
        mhandle: *mut c_void,
        rank: u32,
        request: *mut *mut c_void,
    ) -> ResultCode,
    /// Whether a request is done; if so, it is freed. An error ends NCCL's progress thread and becomes the communicator's.
    pub test:
        unsafe extern "C" fn(coll_comm: *mut c_void, request: *mut c_void, done: *mut c_int) -> ResultCode,
    /// Called in each turn of NCCL's progress thread, which does not look at the result.
    pub progress: unsafe extern "C" fn(ctx: *mut c_void) -> ResultCode,
    /// Whether something has failed: `ncclCommGetAsyncError` asks, with requests outstanding or without.
    pub query_last_error: unsafe extern "C" fn(ctx: *mut c_void, has_error: *mut bool) -> ResultCode,
    /// Ends what `init` started.
    pub finalize: unsafe extern "C" fn(ctx: *mut c_void) -> ResultCode,
}

// SAFETY: the name points to a string of the library that is never written; all else is addresses of functions.
unsafe impl Sync for RmaV14 {}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<RmaConfig>() == 12);
    assert!(size_of::<RmaV14>() == 168);
    assert!(offset_of!(RmaV14, listen) == 32);
    assert!(offset_of!(RmaV14, create_context) == 48);
    assert!(offset_of!(RmaV14, dereg_mr_sym) == 72);
    assert!(offset_of!(RmaV14, iput) == 104);
    assert!(offset_of!(RmaV14, iget) == 120);
    assert!(offset_of!(RmaV14, test) == 136);
    assert!(offset_of!(RmaV14, finalize) == 160);
};

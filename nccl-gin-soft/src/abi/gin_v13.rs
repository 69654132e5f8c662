//! `ncclGinPlugin_v13`: 2.30.3 and 2.30.4, and what later versions accept in place of an RMA table.

use super::{Logger, NetProperties, ResultCode};
use std::ffi::{c_char, c_int, c_void};

/// `ncclGinConfig_v13_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GinConfig {
    /// Signals a context; 0 where NCCL keeps them itself.
    pub n_signals: c_int,
    /// Counters a context; 0 likewise.
    pub n_counters: c_int,
    /// Contexts that the operations' `context` counts.
    pub n_contexts: c_int,
    /// Depth of the device's queues.
    pub queue_depth: c_int,
    /// Traffic class; not used here.
    pub traffic_class: c_int,
}

/// The table, in the order of the C struct. What each function does is said at [`RmaV14`](super::rma_v14::RmaV14); here only what differs.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GinV13 {
    /// Name, for logs.
    pub name: *const c_char,
    /// As in version 14.
    pub init: unsafe extern "C" fn(ctx: *mut *mut c_void, comm_id: u64, log: Logger) -> ResultCode,
    /// As in version 14.
    pub devices: unsafe extern "C" fn(ndev: *mut c_int) -> ResultCode,
    /// As in version 14.
    pub get_properties: unsafe extern "C" fn(dev: c_int, props: *mut NetProperties) -> ResultCode,
    /// As in version 14.
    pub listen: unsafe extern "C" fn(
        ctx: *mut c_void,
        dev: c_int,
        handle: *mut c_void,
        listen_comm: *mut *mut c_void,
    ) -> ResultCode,
    /// As in version 14.
    pub connect: unsafe extern "C" fn(
        ctx: *mut c_void,
        handles: *mut *mut c_void,
        nranks: c_int,
        rank: c_int,
        listen_comm: *mut c_void,
        coll_comm: *mut *mut c_void,
    ) -> ResultCode,
    /// `dev_handle` may be null, and what is written there is not used for a proxy: NCCL makes the device's side itself.
    pub create_context: unsafe extern "C" fn(
        coll_comm: *mut c_void,
        config: *mut GinConfig,
        ctx: *mut *mut c_void,
        dev_handle: *mut *mut c_void,
    ) -> ResultCode,
    /// `gin_handle`, if not null, gets what kernels name the memory by: the same handle.
    pub reg_mr_sym: unsafe extern "C" fn(
        coll_comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
        flags: u64,
        mhandle: *mut *mut c_void,
        gin_handle: *mut *mut c_void,
    ) -> ResultCode,
    /// The same, with a dma-buf.
    pub reg_mr_sym_dma_buf: unsafe extern "C" fn(
        coll_comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
        offset: u64,
        fd: c_int,
        flags: u64,
        mhandle: *mut *mut c_void,
        gin_handle: *mut *mut c_void,
    ) -> ResultCode,
    /// As in version 14.
    pub dereg_mr_sym: unsafe extern "C" fn(coll_comm: *mut c_void, mhandle: *mut c_void) -> ResultCode,
    /// As in version 14.
    pub destroy_context: unsafe extern "C" fn(ctx: *mut c_void) -> ResultCode,
    /// As in version 14.
    pub close_coll: unsafe extern "C" fn(coll_comm: *mut c_void) -> ResultCode,
    /// As in version 14.
    pub close_listen: unsafe extern "C" fn(listen_comm: *mut c_void) -> ResultCode,
    /// As in version 14.
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
    /// Every signal is a strong one.
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
        request: *mut *mut c_void,
    ) -> ResultCode,
    /// As in version 14.
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
    /// As in version 14.
    pub iflush: unsafe extern "C" fn(
        ctx: *mut c_void,
        context: c_int,
        mhandle: *mut c_void,
        rank: u32,
        request: *mut *mut c_void,
    ) -> ResultCode,
    /// As in version 14.
    pub test:
        unsafe extern "C" fn(coll_comm: *mut c_void, request: *mut c_void, done: *mut c_int) -> ResultCode,
    /// As in version 14.
    pub progress: unsafe extern "C" fn(ctx: *mut c_void) -> ResultCode,
    /// As in version 14.
    pub query_last_error: unsafe extern "C" fn(ctx: *mut c_void, has_error: *mut bool) -> ResultCode,
    /// As in version 14.
    pub finalize: unsafe extern "C" fn(ctx: *mut c_void) -> ResultCode,
}

// SAFETY: the name points to a string of the library that is never written; all else is addresses of functions.
unsafe impl Sync for GinV13 {}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<GinConfig>() == 20);
    assert!(size_of::<GinV13>() == 168);
    assert!(offset_of!(GinV13, listen) == 32);
    assert!(offset_of!(GinV13, create_context) == 48);
    assert!(offset_of!(GinV13, iput) == 104);
    assert!(offset_of!(GinV13, test) == 136);
    assert!(offset_of!(GinV13, finalize) == 160);
};

//! `ncclGinPlugin_v12`: 2.29.7. Neither gets nor flushes.

use super::{Logger, NetProperties, ResultCode};
use std::ffi::{c_char, c_int, c_void};

/// `ncclNetProperties_v11_t`.
pub type NetPropertiesV11 = NetProperties<4, ()>;

/// The table, in the order of the C struct. What each function does is said at [`RmaV14`](super::rma_v14::RmaV14); here only what differs.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GinV12 {
    /// Name, for logs.
    pub name: *const c_char,
    /// As in version 14.
    pub init: unsafe extern "C" fn(ctx: *mut *mut c_void, comm_id: u64, log: Logger) -> ResultCode,
    /// As in version 14.
    pub devices: unsafe extern "C" fn(ndev: *mut c_int) -> ResultCode,
    /// Writes the older form of the properties.
    pub get_properties: unsafe extern "C" fn(dev: c_int, props: *mut NetPropertiesV11) -> ResultCode,
    /// As in version 14.
    pub listen: unsafe extern "C" fn(
        ctx: *mut c_void,
        dev: c_int,
        handle: *mut c_void,
        listen_comm: *mut *mut c_void,
    ) -> ResultCode,
    /// The connection has `n_connections` contexts from the start.
    pub connect: unsafe extern "C" fn(
        ctx: *mut c_void,
        handles: *mut *mut c_void,
        nranks: c_int,
        rank: c_int,
        n_connections: c_int,
        queue_depth: c_int,
        listen_comm: *mut c_void,
        coll_comm: *mut *mut c_void,
    ) -> ResultCode,
    /// Not called for a proxy.
    pub create_context: unsafe extern "C" fn(
        coll_comm: *mut c_void,
        n_signals: c_int,
        n_counters: c_int,
        n_contexts: c_int,
        ctx: *mut *mut c_void,
        dev_handle: *mut *mut c_void,
    ) -> ResultCode,
    /// As in version 13.
    pub reg_mr_sym: unsafe extern "C" fn(
        coll_comm: *mut c_void,
        data: *mut c_void,
        size: usize,
        kind: c_int,
        flags: u64,
        mhandle: *mut *mut c_void,
        gin_handle: *mut *mut c_void,
    ) -> ResultCode,
    /// As in version 13.
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
    /// Not called for a proxy.
    pub destroy_context: unsafe extern "C" fn(ctx: *mut c_void) -> ResultCode,
    /// As in version 14.
    pub close_coll: unsafe extern "C" fn(coll_comm: *mut c_void) -> ResultCode,
    /// As in version 14.
    pub close_listen: unsafe extern "C" fn(listen_comm: *mut c_void) -> ResultCode,
    /// `connection` is the context.
    pub iput: unsafe extern "C" fn(
        coll_comm: *mut c_void,
        src_off: u64,
        src: *mut c_void,
        size: usize,
        dst_off: u64,
        dst: *mut c_void,
        rank: u32,
        connection: c_int,
        request: *mut *mut c_void,
    ) -> ResultCode,
    /// `connection` is the context; every signal is a strong one.
    pub iput_signal: unsafe extern "C" fn(
        coll_comm: *mut c_void,
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
        connection: c_int,
        request: *mut *mut c_void,
    ) -> ResultCode,
    /// 2.29.7 does not look at the result.
    pub test:
        unsafe extern "C" fn(coll_comm: *mut c_void, request: *mut c_void, done: *mut c_int) -> ResultCode,
    /// Takes the connection.
    pub progress: unsafe extern "C" fn(coll_comm: *mut c_void) -> ResultCode,
    /// For a proxy, `ctx` is an object of NCCL's own: it is not looked at, and the answer is for all connections of the process.
    pub query_last_error: unsafe extern "C" fn(ctx: *mut c_void, has_error: *mut bool) -> ResultCode,
    /// As in version 14.
    pub finalize: unsafe extern "C" fn(ctx: *mut c_void) -> ResultCode,
}

// SAFETY: the name points to a string of the library that is never written; all else is addresses of functions.
unsafe impl Sync for GinV12 {}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<GinV12>() == 152);
    assert!(size_of::<NetPropertiesV11>() == 112);
    assert!(offset_of!(NetPropertiesV11, net_device_type) == 56);
    assert!(offset_of!(NetPropertiesV11, max_p2p_bytes) == 88);
    assert!(offset_of!(NetPropertiesV11, max_multi_request_size) == 104);
    assert!(offset_of!(GinV12, connect) == 40);
    assert!(offset_of!(GinV12, reg_mr_sym) == 56);
    assert!(offset_of!(GinV12, close_coll) == 88);
    assert!(offset_of!(GinV12, iput) == 104);
    assert!(offset_of!(GinV12, test) == 120);
    assert!(offset_of!(GinV12, finalize) == 144);
};

//! What versions 12 and 13 have in a form of their own.

use super::operations::{give, place};
use super::{comm, connect, create, put, reg_v14, run};
use crate::abi::ResultCode;
use crate::abi::gin_v13::GinConfig;
use crate::ops::Signal;
use std::ffi::{c_int, c_void};

pub(super) unsafe extern "C" fn connect_v12(
    ctx: *mut c_void,
    handles: *mut *mut c_void,
    nranks: c_int,
    rank: c_int,
    _n_connections: c_int,
    _queue_depth: c_int,
    listen_comm: *mut c_void,
    coll_comm: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: the same contract.
    unsafe { connect(ctx, handles, nranks, rank, listen_comm, coll_comm) }
}

pub(super) unsafe extern "C" fn create_context_v13(
    coll_comm: *mut c_void,
    config: *mut GinConfig,
    ctx: *mut *mut c_void,
    _dev_handle: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: as in version 14.
    run("createContext", || unsafe {
        create(coll_comm, config.as_ref().map_or(1, |config| config.n_contexts), ctx)
    })
}

pub(super) unsafe extern "C" fn create_context_v12(
    coll_comm: *mut c_void,
    _n_signals: c_int,
    _n_counters: c_int,
    n_contexts: c_int,
    ctx: *mut *mut c_void,
    _dev_handle: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: as in version 14.
    run("createContext", || unsafe { create(coll_comm, n_contexts, ctx) })
}

pub(super) unsafe extern "C" fn reg_v13(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    flags: u64,
    mhandle: *mut *mut c_void,
    gin_handle: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: the same contract, and `gin_handle` is null or a valid place.
    unsafe {
        let code = reg_v14(coll_comm, data, size, kind, flags, mhandle);
        if code == ResultCode::SUCCESS && !gin_handle.is_null() {
            *gin_handle = *mhandle;
        }
        code
    }
}

pub(super) unsafe extern "C" fn reg_dma_buf_v13(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    mhandle: *mut *mut c_void,
    gin_handle: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: the same contract.
    unsafe { reg_v13(coll_comm, data, size, kind, flags, mhandle, gin_handle) }
}

pub(super) unsafe extern "C" fn iput_v12(
    coll_comm: *mut c_void,
    src_off: u64,
    src: *mut c_void,
    size: usize,
    dst_off: u64,
    dst: *mut c_void,
    rank: u32,
    connection: c_int,
    request: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: NCCL passes a live connection and a valid place.
    run("iput", || unsafe {
        let comm = comm(coll_comm)?;
        let context = connection.max(0) as usize;
        give(request, comm.put(context, place(src, src_off), size as u64, place(dst, dst_off), rank, None))
    })
}

pub(super) unsafe extern "C" fn iput_signal_v12(
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
) -> ResultCode {
    // SAFETY: NCCL passes a live connection and a valid place.
    run("iputSignal", || unsafe {
        let comm = comm(coll_comm)?;
        let context = connection.max(0) as usize;
        let signal = Signal { word: place(signal, signal_off), value: signal_value, operation: signal_op };
        give(
            request,
            comm.put(context, place(src, src_off), size as u64, place(dst, dst_off), rank, Some(signal)),
        )
    })
}

pub(super) unsafe extern "C" fn progress_v12(coll_comm: *mut c_void) -> ResultCode {
    // SAFETY: NCCL passes a live connection.
    run("progress", || unsafe { comm(coll_comm)?.progress() })
}

pub(super) unsafe extern "C" fn query_last_error_v12(_ctx: *mut c_void, has_error: *mut bool) -> ResultCode {
    // SAFETY: NCCL passes a valid place; `ctx` is not ours.
    run("queryLastError", || unsafe { put(has_error, crate::failure::any()) })
}

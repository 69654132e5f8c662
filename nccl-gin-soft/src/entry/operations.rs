//! The functions of the data path: puts, gets, and whether they are done.

use super::{comm, contexts, put, run};
use crate::abi::ResultCode;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::ops::{Place, Signal};
use crate::ticket::Ticket;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

pub(super) fn place(handle: *mut c_void, offset: u64) -> Place {
    Place { handle: handle as usize, offset }
}

/// # Safety
/// `request` is valid for a write.
pub(super) unsafe fn give(request: *mut *mut c_void, ticket: Result<Ticket>) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe { put(request, ticket?.encode() as *mut c_void) }
}

/// # Safety
/// As for [`contexts`].
unsafe fn context_of<'a>(ctx: *mut c_void, context: c_int) -> Result<(&'a Arc<Comm>, usize)> {
    // SAFETY: the caller's contract.
    let contexts = unsafe { contexts(ctx)? };
    let index = usize::try_from(context).map_err(|_| Error::Argument(format!("context {context}")))?;
    Ok((&contexts.comm, contexts.first + index))
}

pub(super) unsafe extern "C" fn iput(
    ctx: *mut c_void,
    context: c_int,
    src_off: u64,
    src: *mut c_void,
    size: usize,
    dst_off: u64,
    dst: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: NCCL passes live contexts and a valid place.
    run("iput", || unsafe {
        let (comm, context) = context_of(ctx, context)?;
        give(request, comm.put(context, place(src, src_off), size as u64, place(dst, dst_off), rank, None))
    })
}

pub(super) unsafe extern "C" fn iput_signal(
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
) -> ResultCode {
    // SAFETY: NCCL passes live contexts and a valid place.
    run("iputSignal", || unsafe {
        let (comm, context) = context_of(ctx, context)?;
        let signal = Signal { word: place(signal, signal_off), value: signal_value, operation: signal_op };
        give(
            request,
            comm.put(context, place(src, src_off), size as u64, place(dst, dst_off), rank, Some(signal)),
        )
    })
}

/// Every signal is a strong one here: all of a context is in one stream.
pub(super) unsafe extern "C" fn iput_signal_v14(
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
    _strong: bool,
    request: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: the same contract.
    unsafe {
        iput_signal(
            ctx,
            context,
            src_off,
            src,
            size,
            dst_off,
            dst,
            rank,
            signal_off,
            signal,
            signal_value,
            signal_op,
            request,
        )
    }
}

pub(super) unsafe extern "C" fn iget(
    ctx: *mut c_void,
    context: c_int,
    remote_off: u64,
    remote: *mut c_void,
    size: usize,
    local_off: u64,
    local: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: NCCL passes live contexts and a valid place.
    run("iget", || unsafe {
        let (comm, context) = context_of(ctx, context)?;
        give(
            request,
            comm.get(context, place(remote, remote_off), size as u64, place(local, local_off), rank),
        )
    })
}

/// A get is reported as done by the GPU, behind its copy: there is nothing left to flush.
pub(super) unsafe extern "C" fn iflush(
    _ctx: *mut c_void,
    _context: c_int,
    _mhandle: *mut c_void,
    _rank: u32,
    request: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: NCCL passes a valid place.
    run("iflush", || unsafe { give(request, Ok(Ticket::Done)) })
}

pub(super) unsafe extern "C" fn test(
    coll_comm: *mut c_void,
    request: *mut c_void,
    done: *mut c_int,
) -> ResultCode {
    // SAFETY: NCCL passes a live connection and a valid place; the request is a number.
    run("test", || unsafe {
        put(done, 0)?;
        let is_done = comm(coll_comm)?.test(request as usize)?;
        put(done, c_int::from(is_done))
    })
}

pub(super) unsafe extern "C" fn progress(ctx: *mut c_void) -> ResultCode {
    // SAFETY: NCCL passes live contexts.
    run("progress", || unsafe { contexts(ctx)?.comm.progress() })
}

pub(super) unsafe extern "C" fn query_last_error(ctx: *mut c_void, has_error: *mut bool) -> ResultCode {
    // SAFETY: NCCL passes live contexts and a valid place.
    run("queryLastError", || unsafe { put(has_error, contexts(ctx)?.comm.has_failed()) })
}

//! The functions behind the exported tables: version 14's, and what all versions share.
//!
//! Pointers that NCCL gets from here are: for a connection and a listening rank, `Arc`s and boxes; for registrations and requests, numbers.

mod older;
mod tables;

pub use tables::{GIN_V12, GIN_V13, RMA_V14};

use crate::abi::rma_v14::RmaConfig;
use crate::abi::{
    HANDLE_SIZE, Logger, NET_DEVICE_GIN_PROXY, NetProperties, PTR_CUDA, PTR_DMABUF, PTR_HOST, ResultCode,
    VirtualDevice,
};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::log::warning;
use crate::net::{Handle, Listener};
use crate::ops::{Place, Signal};
use crate::settings::{self, Settings};
use crate::ticket::Ticket;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const NAME: &CStr = c"GIN_SOFT";
/// No network interface has this name.
const DEVICE: &CStr = c"ginsoft0";

/// What NCCL gets as a set of contexts.
struct Contexts {
    comm: Arc<Comm>,
    first: usize,
}

/// Runs a function's body: an error is logged and becomes its code, a panic goes no further. A failed connection was logged when it failed: NCCL
/// keeps asking such a one, millions of times a second.
fn run(what: &str, body: impl FnOnce() -> Result<()>) -> ResultCode {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ResultCode::SUCCESS,
        Ok(Err(error)) => {
            if !matches!(error, Error::Failed(_)) {
                warning!("{what}: {error}");
            }
            error.code()
        }
        Err(_) => {
            warning!("{what}: panicked; this is a defect of nccl-gin-soft");
            ResultCode::INTERNAL_ERROR
        }
    }
}

fn null(what: &str) -> Error {
    Error::Argument(format!("{what} is null"))
}

/// Writes a result.
///
/// # Safety
/// `place` is null or valid for a write.
unsafe fn put<T>(place: *mut T, value: T) -> Result<()> {
    if place.is_null() {
        return Err(null("the place of a result"));
    }
    // SAFETY: not null, and the caller's contract.
    unsafe { place.write(value) };
    Ok(())
}

/// The connection behind a pointer, without taking it over.
///
/// # Safety
/// `pointer` is null or came from `connect` and was not closed.
unsafe fn comm(pointer: *mut c_void) -> Result<ManuallyDrop<Arc<Comm>>> {
    if pointer.is_null() {
        return Err(null("the connection"));
    }
    // SAFETY: the pointer came from `Arc::into_raw` and that reference is still there; it is not dropped here.
    Ok(ManuallyDrop::new(unsafe { Arc::from_raw(pointer.cast::<Comm>()) }))
}

/// The contexts behind a pointer.
///
/// # Safety
/// `pointer` is null or came from `create_context` and was not destroyed.
unsafe fn contexts<'a>(pointer: *mut c_void) -> Result<&'a Contexts> {
    // SAFETY: the caller's contract; a box that is alive.
    unsafe { pointer.cast::<Contexts>().as_ref() }.ok_or_else(|| null("the context"))
}

unsafe extern "C" fn init(ctx: *mut *mut c_void, _comm_id: u64, log: Logger) -> ResultCode {
    crate::log::set(log);
    // SAFETY: NCCL passes a valid place; the value is never followed.
    run("init", || unsafe { put(ctx, NAME.as_ptr().cast_mut().cast()) })
}

unsafe extern "C" fn devices(ndev: *mut c_int) -> ResultCode {
    // SAFETY: NCCL passes a valid place.
    run("devices", || unsafe { put(ndev, 1) })
}

unsafe extern "C" fn get_properties(dev: c_int, props: *mut NetProperties) -> ResultCode {
    run("getProperties", || {
        if dev != 0 {
            return Err(Error::Argument(format!("device {dev} of 1")));
        }
        let dma_buf = if settings::dma_buf() { PTR_DMABUF } else { 0 };
        let properties = NetProperties {
            name: DEVICE.as_ptr(),
            pci_path: std::ptr::null::<c_char>(),
            guid: 0,
            ptr_support: PTR_HOST | PTR_CUDA | dma_buf,
            reg_is_global: 0,
            force_flush: 0,
            speed: 400_000,
            port: 0,
            latency: 0.0,
            max_comms: 1 << 16,
            max_recvs: 8,
            net_device_type: NET_DEVICE_GIN_PROXY,
            net_device_version: 0,
            v_props: VirtualDevice { ndevs: 1, devs: [0; 8] },
            max_p2p_bytes: 1 << 40,
            max_coll_bytes: 1 << 40,
            max_multi_request_size: 1,
            rail_id: -1,
            plane_id: -1,
        };
        // SAFETY: NCCL passes a valid place; in version 11 of the struct, which is as large, the last two fields are padding.
        unsafe { put(props, properties) }
    })
}

unsafe extern "C" fn listen(
    _ctx: *mut c_void,
    _dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> ResultCode {
    run("listen", || {
        let listener = Box::new(Listener::open(&Settings::from_env())?);
        // SAFETY: NCCL passes room for a handle, and a valid place. The box is given back by `close_listen`.
        unsafe {
            put(handle.cast::<[u8; HANDLE_SIZE]>(), listener.handle.encode())?;
            put(listen_comm, Box::into_raw(listener).cast())
        }
    })
}

unsafe extern "C" fn close_listen(listen_comm: *mut c_void) -> ResultCode {
    run("closeListen", || {
        if listen_comm.is_null() {
            return Err(null("the listening object"));
        }
        // SAFETY: not null: a box from `listen`, given back once.
        drop(unsafe { Box::from_raw(listen_comm.cast::<Listener>()) });
        Ok(())
    })
}

unsafe extern "C" fn connect(
    _ctx: *mut c_void,
    handles: *mut *mut c_void,
    nranks: c_int,
    rank: c_int,
    listen_comm: *mut c_void,
    coll_comm: *mut *mut c_void,
) -> ResultCode {
    run("connect", || {
        let bad = || Error::Argument(format!("rank {rank} of {nranks}"));
        let (count, rank) =
            (usize::try_from(nranks).map_err(|_| bad())?, usize::try_from(rank).map_err(|_| bad())?);
        if handles.is_null() {
            return Err(null("the list of handles"));
        }
        let mut decoded = Vec::with_capacity(count);
        for peer in 0..count {
            // SAFETY: the list has `nranks` pointers, each to a handle's bytes, of any alignment.
            let bytes = unsafe {
                let pointer = *handles.add(peer);
                if pointer.is_null() {
                    return Err(null("a handle"));
                }
                pointer.cast::<[u8; HANDLE_SIZE]>().read_unaligned()
            };
            decoded.push(Handle::decode(&bytes, peer)?);
        }
        // SAFETY: null, or a box from `listen` that `close_listen` was not called for yet.
        let listener = unsafe { listen_comm.cast::<Listener>().as_ref() };
        let comm = Comm::connect(&decoded, rank, listener.ok_or_else(|| null("the listening object"))?)?;
        // SAFETY: NCCL passes a valid place; the reference is given back by `close_coll`.
        unsafe { put(coll_comm, Arc::into_raw(comm).cast_mut().cast()) }
    })
}

/// # Safety
/// As for [`comm`]; `ctx` is valid for a write.
unsafe fn create(coll_comm: *mut c_void, count: c_int, ctx: *mut *mut c_void) -> Result<()> {
    // SAFETY: the caller's contract.
    let comm = Arc::clone(&*unsafe { comm(coll_comm)? });
    let first = comm.new_contexts(usize::try_from(count).unwrap_or(1));
    // SAFETY: the caller's contract; the box is given back by `destroy_context`.
    unsafe { put(ctx, Box::into_raw(Box::new(Contexts { comm, first })).cast()) }
}

unsafe extern "C" fn create_context_v14(
    coll_comm: *mut c_void,
    config: *mut RmaConfig,
    ctx: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: NCCL passes a live connection, null or a valid configuration, and a valid place.
    run("createContext", || unsafe {
        create(coll_comm, config.as_ref().map_or(1, |config| config.n_contexts), ctx)
    })
}

unsafe extern "C" fn destroy_context(ctx: *mut c_void) -> ResultCode {
    run("destroyContext", || {
        if !ctx.is_null() {
            // SAFETY: a box from `create`, given back once.
            drop(unsafe { Box::from_raw(ctx.cast::<Contexts>()) });
        }
        Ok(())
    })
}

unsafe extern "C" fn close_coll(coll_comm: *mut c_void) -> ResultCode {
    run("closeColl", || {
        if coll_comm.is_null() {
            return Err(null("the connection"));
        }
        // SAFETY: not null: a reference from `connect`, given back once.
        let comm = unsafe { Arc::from_raw(coll_comm.cast::<Comm>()) };
        comm.close();
        Ok(())
    })
}

unsafe extern "C" fn reg_v14(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    flags: u64,
    mhandle: *mut *mut c_void,
) -> ResultCode {
    run("regMrSym", || {
        if data.is_null() || size == 0 || (kind != PTR_HOST && kind != PTR_CUDA) {
            return Err(Error::Argument(format!("memory {data:p} of {size} bytes and kind {kind}")));
        }
        // SAFETY: NCCL passes a live connection and a valid place.
        unsafe { put(mhandle, comm(coll_comm)?.register(data as usize, size, kind, flags)? as *mut c_void) }
    })
}

unsafe extern "C" fn reg_dma_buf_v14(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    mhandle: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: the same contract; the address says all that the dma-buf would.
    unsafe { reg_v14(coll_comm, data, size, kind, flags, mhandle) }
}

unsafe extern "C" fn dereg_mr_sym(coll_comm: *mut c_void, mhandle: *mut c_void) -> ResultCode {
    // SAFETY: NCCL passes a live connection; the handle is a number.
    run("deregMrSym", || unsafe { comm(coll_comm)?.deregister(mhandle as usize) })
}

fn place(handle: *mut c_void, offset: u64) -> Place {
    Place { handle: handle as usize, offset }
}

/// # Safety
/// `request` is valid for a write.
unsafe fn give(request: *mut *mut c_void, ticket: Result<Ticket>) -> Result<()> {
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

unsafe extern "C" fn iput(
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

unsafe extern "C" fn iput_signal(
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
unsafe extern "C" fn iput_signal_v14(
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

unsafe extern "C" fn iget(
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
unsafe extern "C" fn iflush(
    _ctx: *mut c_void,
    _context: c_int,
    _mhandle: *mut c_void,
    _rank: u32,
    request: *mut *mut c_void,
) -> ResultCode {
    // SAFETY: NCCL passes a valid place.
    run("iflush", || unsafe { give(request, Ok(Ticket::Done)) })
}

unsafe extern "C" fn test(coll_comm: *mut c_void, request: *mut c_void, done: *mut c_int) -> ResultCode {
    // SAFETY: NCCL passes a live connection and a valid place; the request is a number.
    run("test", || unsafe {
        put(done, 0)?;
        let is_done = comm(coll_comm)?.test(request as usize)?;
        put(done, c_int::from(is_done))
    })
}

unsafe extern "C" fn progress(ctx: *mut c_void) -> ResultCode {
    // SAFETY: NCCL passes live contexts.
    run("progress", || unsafe { contexts(ctx)?.comm.progress() })
}

unsafe extern "C" fn query_last_error(ctx: *mut c_void, has_error: *mut bool) -> ResultCode {
    // SAFETY: NCCL passes live contexts and a valid place.
    run("queryLastError", || unsafe { put(has_error, contexts(ctx)?.comm.has_failed()) })
}

unsafe extern "C" fn finalize(_ctx: *mut c_void) -> ResultCode {
    ResultCode::SUCCESS
}

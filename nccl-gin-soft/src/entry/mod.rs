//! The functions behind the exported tables: version 14's, and what all versions share.
//!
//! Pointers that NCCL gets from here are: for a connection and a listening rank, `Arc`s and boxes; for registrations and requests, numbers.

mod older;
mod operations;
mod tables;

pub use tables::{GIN_V12, GIN_V13, RMA_V14};

use crate::abi::gin_v12::NetPropertiesV11;
use crate::abi::rma_v14::RmaConfig;
use crate::abi::{
    HANDLE_SIZE, Logger, NET_DEVICE_GIN_PROXY, NetProperties, PTR_CUDA, PTR_DMABUF, PTR_HOST, Rails,
    ResultCode, VirtualDevice,
};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::log::warning;
use crate::net::{Handle, Listener};
use crate::settings::{self, Settings};
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

/// What NCCL is told of the one device.
fn properties<const DEVICES: usize, End>(dev: c_int, end: End) -> Result<NetProperties<DEVICES, End>> {
    if dev != 0 {
        return Err(Error::Argument(format!("device {dev} of 1")));
    }
    let dma_buf = if settings::dma_buf() { PTR_DMABUF } else { 0 };
    Ok(NetProperties {
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
        v_props: VirtualDevice { ndevs: 1, devs: [0; DEVICES] },
        max_p2p_bytes: 1 << 40,
        max_coll_bytes: 1 << 40,
        max_multi_request_size: 1,
        end,
    })
}

unsafe extern "C" fn get_properties(dev: c_int, props: *mut NetProperties) -> ResultCode {
    // SAFETY: NCCL passes a valid place.
    run("getProperties", || unsafe { put(props, properties(dev, Rails { rail_id: -1, plane_id: -1 })?) })
}

unsafe extern "C" fn get_properties_v11(dev: c_int, props: *mut NetPropertiesV11) -> ResultCode {
    // SAFETY: as above, for the smaller struct.
    run("getProperties", || unsafe { put(props, properties(dev, ())?) })
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

unsafe extern "C" fn finalize(_ctx: *mut c_void) -> ResultCode {
    ResultCode::SUCCESS
}

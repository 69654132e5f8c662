//! A driver that takes its time, and takes liberties: streams pause at random, and the copies of a batch run in any order.

use cuda_vmm_emu::sys::ffi::{c_int, c_uint, c_void};
use cuda_vmm_emu::sys::{
    CUdeviceptr, CUmemcpyAttributes_v1, CUresult, CUstream, CUstreamBatchMemOpParams, CallError, Driver,
    Function,
};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

static INNER: OnceLock<Driver> = OnceLock::new();
static RANDOM: AtomicU64 = AtomicU64::new(1);

/// Wraps the driver of this process. One a process.
pub fn wrap(inner: Driver, seed: u64) -> Driver {
    RANDOM.store(seed | 1, Ordering::Relaxed);
    let loader_driver = inner.clone();
    assert!(INNER.set(inner).is_ok(), "one delayed driver a process");
    let loader = move |name: &std::ffi::CStr| match name.to_bytes() {
        b"cuMemcpyAsync" => memcpy as *const c_void,
        b"cuMemcpyBatchAsync_v2" => memcpy_batch as *const c_void,
        b"cuStreamBatchMemOp_v2" => batch_mem_op as *const c_void,
        b"cuDriverGetVersion" => version as *const c_void,
        bytes => {
            let function = Function::ALL.iter().find(|function| function.symbol().as_bytes() == bytes);
            function.and_then(|&function| loader_driver.address(function).ok()).unwrap_or(std::ptr::null())
        }
    };
    // SAFETY: the four functions have the signatures of cuda.h for their names; all others are the wrapped driver's own.
    unsafe { Driver::from_loader(loader) }.expect("the emulator tells its version")
}

fn inner() -> &'static Driver {
    INNER.get().expect("set before any call")
}

fn random() -> u64 {
    let next = |x: u64| {
        let x = x ^ (x << 13);
        let x = x ^ (x >> 7);
        x ^ (x << 17)
    };
    let before = RANDOM.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |x| Some(next(x)));
    next(before.unwrap_or_else(|x| x))
}

fn code(result: Result<(), CallError>) -> CUresult {
    match result {
        Ok(()) => CUresult::CUDA_SUCCESS,
        Err(error) => error.status().unwrap_or(CUresult::CUDA_ERROR_NOT_FOUND),
    }
}

unsafe extern "C" fn pause(microseconds: *mut c_void) {
    std::thread::sleep(std::time::Duration::from_micros(microseconds as u64));
}

/// Makes a stream wait for a while, sometimes.
fn delay(stream: CUstream) {
    if random().is_multiple_of(4) {
        // SAFETY: the function makes no CUDA call, and takes a number.
        let _ = unsafe { inner().cuLaunchHostFunc(stream, Some(pause), (random() % 200) as *mut c_void) };
    }
}

unsafe extern "C" fn version(out: *mut c_int) -> CUresult {
    // SAFETY: the caller's contract.
    code(unsafe { inner().cuDriverGetVersion(out) })
}

unsafe extern "C" fn memcpy(to: CUdeviceptr, from: CUdeviceptr, length: usize, stream: CUstream) -> CUresult {
    delay(stream);
    // SAFETY: the caller's contract.
    code(unsafe { inner().cuMemcpyAsync(to, from, length, stream) })
}

unsafe extern "C" fn memcpy_batch(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    _attributes: *mut CUmemcpyAttributes_v1,
    _starts: *mut usize,
    _attribute_count: usize,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arrays have `count` elements.
    let (to, from, sizes) = unsafe {
        (
            std::slice::from_raw_parts(to, count),
            std::slice::from_raw_parts(from, count),
            std::slice::from_raw_parts(sizes, count),
        )
    };
    let start = random() as usize % count;
    // Backwards from anywhere.
    for index in (0..count).rev().map(|index| (index + start) % count) {
        delay(stream);
        // SAFETY: the caller's contract for each copy of the batch.
        let result = unsafe { inner().cuMemcpyAsync(to[index], from[index], sizes[index], stream) };
        if result.is_err() {
            return code(result);
        }
    }
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn batch_mem_op(
    stream: CUstream,
    count: c_uint,
    params: *mut CUstreamBatchMemOpParams,
    flags: c_uint,
) -> CUresult {
    for index in 0..count as usize {
        delay(stream);
        // SAFETY: the caller's array has `count` elements.
        let result = unsafe { inner().cuStreamBatchMemOp(stream, 1, params.add(index), flags) };
        if result.is_err() {
            return code(result);
        }
    }
    CUresult::CUDA_SUCCESS
}

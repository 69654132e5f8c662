//! Result codes as the implementation hands them on, and writes through a caller's pointers.

use cuda_vmm_sys::CUresult;
use rustix::io::Errno;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What an emulated function gives back: a value, or the code that the caller of the C function sees.
pub(crate) type Outcome<T = ()> = Result<T, CUresult>;

/// The result codes that the emulator returns, without their long prefix.
pub(crate) mod code {
    use cuda_vmm_sys::CUresult;
    macro_rules! codes {
        ($($short:ident = $long:ident),* $(,)?) => { $(pub(crate) const $short: CUresult = CUresult::$long;)* };
    }
    codes! {
        SUCCESS = CUDA_SUCCESS,
        INVALID_VALUE = CUDA_ERROR_INVALID_VALUE,
        OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY,
        NOT_INITIALIZED = CUDA_ERROR_NOT_INITIALIZED,
        DEINITIALIZED = CUDA_ERROR_DEINITIALIZED,
        NO_DEVICE = CUDA_ERROR_NO_DEVICE,
        INVALID_DEVICE = CUDA_ERROR_INVALID_DEVICE,
        INVALID_CONTEXT = CUDA_ERROR_INVALID_CONTEXT,
        PEER_ACCESS_UNSUPPORTED = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
        PEER_ACCESS_ALREADY_ENABLED = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
        PEER_ACCESS_NOT_ENABLED = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
        CONTEXT_IS_DESTROYED = CUDA_ERROR_CONTEXT_IS_DESTROYED,
        HOST_MEMORY_ALREADY_REGISTERED = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        HOST_MEMORY_NOT_REGISTERED = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
        INVALID_HANDLE = CUDA_ERROR_INVALID_HANDLE,
        OPERATING_SYSTEM = CUDA_ERROR_OPERATING_SYSTEM,
        NOT_READY = CUDA_ERROR_NOT_READY,
        ILLEGAL_ADDRESS = CUDA_ERROR_ILLEGAL_ADDRESS,
        LAUNCH_TIMEOUT = CUDA_ERROR_LAUNCH_TIMEOUT,
        LAUNCH_FAILED = CUDA_ERROR_LAUNCH_FAILED,
        NOT_PERMITTED = CUDA_ERROR_NOT_PERMITTED,
        NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED,
        NOT_FOUND = CUDA_ERROR_NOT_FOUND,
        ILLEGAL_STATE = CUDA_ERROR_ILLEGAL_STATE,
        COOPERATIVE_LAUNCH_TOO_LARGE = CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
        STREAM_CAPTURE_UNSUPPORTED = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        STREAM_CAPTURE_INVALIDATED = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        STREAM_CAPTURE_MERGE = CUDA_ERROR_STREAM_CAPTURE_MERGE,
        STREAM_CAPTURE_UNMATCHED = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
        STREAM_CAPTURE_UNJOINED = CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
        STREAM_CAPTURE_ISOLATION = CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
        STREAM_CAPTURE_IMPLICIT = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        CAPTURED_EVENT = CUDA_ERROR_CAPTURED_EVENT,
        STREAM_CAPTURE_WRONG_THREAD = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
        UNKNOWN = CUDA_ERROR_UNKNOWN,
    }
}

/// The code for a failed system call, as the driver reports such failures.
pub(crate) fn os(errno: Errno) -> CUresult {
    match errno {
        Errno::NOMEM | Errno::NOSPC => code::OUT_OF_MEMORY,
        Errno::ACCESS | Errno::PERM => code::NOT_PERMITTED,
        _ => code::OPERATING_SYSTEM,
    }
}

/// Fails with `INVALID_VALUE` unless the condition holds.
pub(crate) fn require(condition: bool) -> Outcome {
    if condition { Ok(()) } else { Err(code::INVALID_VALUE) }
}

/// Writes a result through a caller's pointer; a null pointer is refused.
///
/// # Safety
/// `out` is null or valid for one write of `T`, as the C function's contract says.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> Outcome {
    require(!out.is_null())?;
    // SAFETY: not null, and valid for a write by the caller's contract.
    unsafe { out.write(value) };
    Ok(())
}

/// Reads an argument through a caller's pointer; a null pointer is refused.
///
/// # Safety
/// `from` is null or valid for one read of `T`, as the C function's contract says.
pub(crate) unsafe fn get<T: Copy>(from: *const T) -> Outcome<T> {
    require(!from.is_null())?;
    // SAFETY: not null, and valid for a read by the caller's contract.
    Ok(unsafe { from.read() })
}

/// Reads an array of arguments; null is refused unless the array is empty.
///
/// # Safety
/// `from` is null or valid for reads of `count` values, which nothing changes meanwhile.
pub(crate) unsafe fn array<T: Copy>(from: *const T, count: usize) -> Outcome<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    require(!from.is_null() && count <= isize::MAX as usize / size_of::<T>().max(1))?;
    // SAFETY: not null, and valid for `count` reads by the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts(from, count) }.to_vec())
}

/// Locks a mutex, whatever a panicking holder left: each critical section keeps its data consistent step by step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Read-locks, likewise.
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Write-locks, likewise.
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_pointers_are_refused() {
        // SAFETY: null is refused before it is used.
        unsafe {
            assert_eq!(put(std::ptr::null_mut::<u8>(), 1), Err(code::INVALID_VALUE));
            assert_eq!(get(std::ptr::null::<u8>()), Err(code::INVALID_VALUE));
            assert_eq!(array(std::ptr::null::<u8>(), 0), Ok(Vec::new()));
            assert_eq!(array(std::ptr::null::<u8>(), 1), Err(code::INVALID_VALUE));
            assert_eq!(array([7_u32, 8].as_ptr(), 2), Ok(vec![7, 8]));
        }
    }

    #[test]
    fn system_errors_become_the_codes_that_the_driver_uses() {
        assert_eq!(os(Errno::NOMEM), code::OUT_OF_MEMORY);
        assert_eq!(os(Errno::MFILE), code::OPERATING_SYSTEM);
        assert_eq!(os(Errno::PERM), code::NOT_PERMITTED);
    }
}

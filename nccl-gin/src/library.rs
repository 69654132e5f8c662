//! Results of NCCL's calls.

use crate::error::{NcclError, Result};
use crate::hint;
use nccl_gin_sys::{Function, Nccl, ncclComm_t, ncclResult_t};
use std::ffi::{CStr, c_char};
use std::ptr;

/// Turns a code into an error, unless it is success or, for a non-blocking communicator, in progress.
pub(crate) fn check(
    nccl: &Nccl,
    function: Function,
    result: ncclResult_t,
    attempt: impl FnOnce() -> String,
) -> Result<()> {
    if matches!(result, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) {
        return Ok(());
    }
    Err(failure(nccl, function, result, attempt()).into())
}

/// The error for a code that NCCL returned or reported.
pub(crate) fn failure(
    nccl: &Nccl,
    function: Function,
    result: ncclResult_t,
    attempt: String,
) -> Box<NcclError> {
    let text = last_error(nccl);
    let hint = hint::for_result(function, result, &text);
    Box::new(NcclError { attempt, function, result, text, hint })
}

/// What NCCL says about the last error, on one line.
fn last_error(nccl: &Nccl) -> String {
    // SAFETY: the communicator is not used for the answer; null is what the function's documentation names for "any".
    let text = unsafe { nccl.ncclGetLastError(ptr::null_mut::<nccl_gin_sys::ncclComm>() as ncclComm_t) };
    text.map_or(String::new(), to_line)
}

/// A C string of the library's as one line; empty for null.
fn to_line(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, and NCCL's texts are NUL-terminated and lie in a buffer that stays in place; a failure of another thread meanwhile garbles the text at worst.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

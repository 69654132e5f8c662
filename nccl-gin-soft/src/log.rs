//! Messages through NCCL's own logger, so that `NCCL_DEBUG` rules them.

use crate::abi::{LOG_SUBSYSTEMS, Logger};
use std::ffi::{CString, c_int, c_void};
use std::fmt::Arguments;
use std::sync::atomic::{AtomicPtr, Ordering};

static LOGGER: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Keeps the logger that `init` was given. NCCL's code stays loaded longer than ours.
pub(crate) fn set(logger: Logger) {
    let address = logger.map_or(std::ptr::null_mut(), |logger| logger as *mut c_void);
    LOGGER.store(address, Ordering::Release);
}

pub(crate) fn message(level: c_int, line: u32, text: Arguments<'_>) {
    let address = LOGGER.load(Ordering::Acquire);
    if address.is_null() {
        return;
    }
    let Ok(text) = CString::new(format!("GIN-SOFT {text}").replace('\0', "?")) else { return };
    // SAFETY: the address was a `Logger` when it was stored, and null was excluded: same type, same size.
    let logger: Logger = unsafe { std::mem::transmute(address) };
    if let Some(logger) = logger {
        // SAFETY: NCCL's logger may be called from any thread; format and argument are C strings that live through the call, and the format
        // takes exactly one string.
        unsafe {
            logger(
                level,
                LOG_SUBSYSTEMS,
                c"nccl-gin-soft".as_ptr(),
                line as c_int,
                c"%s".as_ptr(),
                text.as_ptr(),
            );
        }
    }
}

macro_rules! warning {
    ($($part:tt)*) => { $crate::log::message($crate::abi::LOG_WARN, line!(), format_args!($($part)*)) };
}
macro_rules! info {
    ($($part:tt)*) => { $crate::log::message($crate::abi::LOG_INFO, line!(), format_args!($($part)*)) };
}
pub(crate) use {info, warning};

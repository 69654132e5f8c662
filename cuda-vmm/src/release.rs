//! What destructors do when the driver refuses.

use cuda_vmm_sys::{CUresult, CallError};
use std::sync::atomic::{AtomicU64, Ordering};

static FAILED: AtomicU64 = AtomicU64::new(0);

/// Number of releases that the driver refused in this process. Destructors neither panic nor report; what could not be released
/// is leaked and counted here. Refusals because the driver has shut down at the end of the process do not count.
#[must_use]
pub fn failed_releases() -> u64 {
    FAILED.load(Ordering::Relaxed)
}

/// Takes note of a destructor's call. `_what` names the object for debuggers.
pub(crate) fn released(_what: &'static str, result: Result<(), CallError>) {
    match result {
        Ok(()) => {}
        Err(error) if error.status() == Some(CUresult::CUDA_ERROR_DEINITIALIZED) => {}
        Err(_) => {
            FAILED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

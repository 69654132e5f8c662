//! A driver in front of another one that adds up the time which its calls take.
//!
//! A wrapper's own cost is what is left of an operation when the time inside the driver is taken off. Measured so it does not drown in the noise of
//! a call that takes a millisecond.

use cuda_vmm::Cuda;
use cuda_vmm::sys::{CUresult, Driver};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The driver behind it.
static TARGET: AtomicPtr<Driver> = AtomicPtr::new(ptr::null_mut());
/// Nanoseconds spent in calls.
static INSIDE: AtomicU64 = AtomicU64::new(0);

/// Time spent inside the driver since this was last asked.
pub fn take_inside() -> Duration {
    Duration::from_nanos(INSIDE.swap(0, Ordering::Relaxed))
}

/// One function for each of the table, with its signature, that calls the same function of the target and notes how long that took.
macro_rules! forward {
    ($(
        $(#[$doc:meta])*
        $method:ident = $name:literal, $symbol:literal, $since:literal: fn($($argument:ident: $type:ty),* $(,)?);
    )*) => {
        /// The function of an exported name, or null.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        fn forwarding(symbol: &[u8]) -> *const c_void {
            $(
                unsafe extern "C" fn $method($($argument: $type),*) -> CUresult {
                    let start = Instant::now();
                    // SAFETY: set before this function is handed out, to a driver that is never freed.
                    let target = unsafe { &*TARGET.load(Ordering::Acquire) };
                    // SAFETY: the same function with the same arguments.
                    let result = unsafe { target.$method($($argument),*) };
                    let code = match result {
                        Ok(()) => CUresult::CUDA_SUCCESS,
                        Err(error) => error.status().unwrap_or(CUresult::CUDA_ERROR_NOT_FOUND),
                    };
                    let nanoseconds = start.elapsed().as_nanos() as u64;
                    INSIDE.fetch_add(nanoseconds, Ordering::Relaxed);
                    code
                }
                if symbol == $symbol.as_bytes() {
                    return $method as *const c_void;
                }
            )*
            ptr::null()
        }
    };
}

cuda_vmm::sys::for_each_function!(forward);

/// Runs `work` on `cuda`'s driver with a watch in front of it. One at a time, and nothing that was made inside may outlive it.
pub fn watched(cuda: &Cuda, work: impl FnOnce(&Cuda)) {
    // Never freed: a few bytes for each driver that is measured.
    TARGET.store(Box::into_raw(Box::new(cuda.driver().clone())), Ordering::Release);
    // SAFETY: each function has the signature that cuda.h declares for its name.
    let driver = unsafe { Driver::from_loader(|name| forwarding(name.to_bytes())) };
    let driver = driver.expect("the target tells its version");
    work(&Cuda::with_driver(driver).expect("the target starts"));
}

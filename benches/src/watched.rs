//! A driver in front of another one that adds up the time which its calls take.
//!
//! A wrapper's own cost is what is left of an operation when the time inside the driver is taken off. Measured so it does not drown in the noise of
//! a call that takes a millisecond.

use crate::front::{Front, function};
use cuda_vmm::Cuda;
use cuda_vmm::sys::{CUresult, Driver};
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

/// Makes every call, and notes how long it took.
struct Watch;

impl Front for Watch {
    #[inline(always)]
    fn call(_: Option<usize>, forward: impl FnOnce(&Driver) -> CUresult) -> CUresult {
        let start = Instant::now();
        // SAFETY: set before a function is handed out, to a driver that is never freed.
        let code = forward(unsafe { &*TARGET.load(Ordering::Acquire) });
        INSIDE.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        code
    }
}

/// Runs `work` on `cuda`'s driver with a watch in front of it. One at a time, and nothing that was made inside may outlive it.
pub fn watched(cuda: &Cuda, work: impl FnOnce(&Cuda)) {
    // Never freed: a few bytes for each driver that is measured.
    TARGET.store(Box::into_raw(Box::new(cuda.driver().clone())), Ordering::Release);
    // SAFETY: each function has the signature that cuda.h declares for its name.
    let driver = unsafe { Driver::from_loader(|name| function::<Watch>(name.to_bytes())) };
    let driver = driver.expect("the target tells its version");
    work(&Cuda::with_driver(driver).expect("the target starts"));
}

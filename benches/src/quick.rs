//! A driver in software whose part in an operation is nothing: what is left is the library's own time.
//!
//! Everything is made on the emulator. From [`Quick::start`] on, what an operation asks of a driver returns at once, successfully: no work, no order, no events.

use crate::front::{Front, function};
use cuda_vmm::Cuda;
use cuda_vmm::sys::{CUresult, Driver};
use cuda_vmm_emu::{Config, Emulator};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether calls of operations do nothing.
static NOTHING: AtomicBool = AtomicBool::new(false);
/// The driver behind it.
static TARGET: OnceLock<Driver> = OnceLock::new();

/// That driver. There is one in a process.
#[derive(Debug)]
pub struct Quick {
    /// For a buffer's builder.
    pub cuda: Cuda,
    _emulator: Emulator,
}

impl Quick {
    /// Makes it.
    ///
    /// # Panics
    /// The second time, or if the emulator does not start.
    #[must_use]
    pub fn new() -> Self {
        let emulator = Emulator::new(Config::h200x2()).expect("an emulator");
        assert!(TARGET.set(emulator.driver()).is_ok(), "there is one in a process");
        // SAFETY: each function has the signature that cuda.h declares for its name.
        let driver = unsafe { Driver::from_loader(|name| function::<Calls>(name.to_bytes())) };
        let cuda =
            Cuda::with_driver(driver.expect("the emulator tells its version")).expect("the emulator starts");
        Self { cuda, _emulator: emulator }
    }

    /// From here on calls of operations do nothing, until [`stop`](Self::stop).
    pub fn start(&self) {
        NOTHING.store(true, Ordering::Release);
    }

    /// The emulator is back.
    pub fn stop(&self) {
        NOTHING.store(false, Ordering::Release);
    }
}

impl Default for Quick {
    fn default() -> Self {
        Self::new()
    }
}

/// What the emulator has no part in at any time: kernels.
const KERNELS: [&str; 5] =
    ["cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx"];
/// What else an operation asks of a driver.
const OPERATIONS: [&str; 7] = [
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuStreamIsCapturing",
    "cuStreamGetId",
    "cuStreamWaitEvent",
    "cuEventRecord",
    "cuMemcpyDtoDAsync_v2",
];

/// Whether a call does nothing, or the emulator makes it.
struct Calls;

impl Front for Calls {
    const APART: &'static [&'static [&'static str]] = &[&KERNELS, &OPERATIONS];

    #[inline(always)]
    fn call(list: Option<usize>, forward: impl FnOnce(&Driver) -> CUresult) -> CUresult {
        match list {
            Some(0) => CUresult::CUDA_SUCCESS,
            Some(_) if NOTHING.load(Ordering::Relaxed) => CUresult::CUDA_SUCCESS,
            _ => TARGET.get().map_or(CUresult::CUDA_ERROR_DEINITIALIZED, forward),
        }
    }
}

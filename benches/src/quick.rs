//! A driver in software whose part in an operation is nothing: what is left is the library's own time.
//!
//! Everything is made on the emulator. From [`Quick::start`] on, what an operation asks of a driver returns at once, successfully: no work, no order, no events.

use cuda_vmm::Cuda;
use cuda_vmm::sys::ffi::c_void;
use cuda_vmm::sys::{CUresult, Driver};
use cuda_vmm_emu::{Config, Emulator};
use std::ptr;
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
        let driver = unsafe { Driver::from_loader(|name| function(name.to_bytes())) };
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

/// One function for each of the table, with its signature.
macro_rules! functions {
    ($(
        $(#[$doc:meta])*
        $method:ident = $name:literal, $symbol:literal, $since:literal: fn($($argument:ident: $type:ty),* $(,)?);
    )*) => {
        /// The functions of an exported name that do nothing and forward; null if there are none.
        #[allow(non_snake_case, unused_variables, clippy::too_many_arguments)]
        fn function(symbol: &[u8]) -> *const c_void {
            $(
                extern "C" fn $method($($argument: $type),*) -> CUresult {
                    const KERNEL: bool = is_in(&KERNELS, $symbol);
                    const OPERATION: bool = is_in(&OPERATIONS, $symbol);
                    if KERNEL || (OPERATION && NOTHING.load(Ordering::Relaxed)) {
                        return CUresult::CUDA_SUCCESS;
                    }
                    let Some(target) = TARGET.get() else { return CUresult::CUDA_ERROR_DEINITIALIZED };
                    // SAFETY: the same function with the same arguments.
                    match unsafe { target.$method($($argument),*) } {
                        Ok(()) => CUresult::CUDA_SUCCESS,
                        Err(error) => error.status().unwrap_or(CUresult::CUDA_ERROR_NOT_FOUND),
                    }
                }
                if symbol == $symbol.as_bytes() {
                    return $method as *const c_void;
                }
            )*
            ptr::null()
        }
    };
}

cuda_vmm::sys::for_each_function!(functions);

/// Whether a name is in a list.
const fn is_in(list: &[&str], name: &str) -> bool {
    let mut i = 0;
    while i < list.len() {
        if is_same(list[i].as_bytes(), name.as_bytes()) {
            return true;
        }
        i += 1;
    }
    false
}

const fn is_same(a: &[u8], b: &[u8]) -> bool {
    let mut i = 0;
    while i < a.len() && i < b.len() && a[i] == b[i] {
        i += 1;
    }
    i == a.len() && i == b.len()
}

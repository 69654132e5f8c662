//! Drivers to measure on.

use crate::front::{Front, function};
use cuda_vmm::Cuda;
use cuda_vmm::sys::ffi::{c_int, c_void};
use cuda_vmm::sys::{CUmemAllocationGranularity_flags, CUmemAllocationProp, CUresult, Driver};
use cuda_vmm_emu::{Config, Emulator};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A driver with a name.
#[derive(Debug)]
pub struct Backend {
    /// `nothing`, `cold`, `emulator` or `gpu`.
    pub name: &'static str,
    /// The driver.
    pub cuda: Cuda,
}

/// The backends of this machine: a driver whose calls do nothing (what is left is our own cost), the software driver, and the GPU if
/// there is one.
#[must_use]
pub fn all() -> Vec<Backend> {
    let mut all = vec![Backend { name: "nothing", cuda: nothing() }];
    let emulator = Emulator::new(Config::h200x2()).expect("an emulator");
    let cuda = Cuda::with_driver(emulator.driver()).expect("the software driver starts");
    all.push(Backend { name: "emulator", cuda });
    match Cuda::get() {
        Ok(cuda) if cuda.device_count() > 0 => all.push(Backend { name: "gpu", cuda: cuda.clone() }),
        Ok(_) => eprintln!("skipped: gpu: the driver shows no device"),
        Err(error) => eprintln!("skipped: gpu: {error}"),
    }
    all
}

/// Whether calls that do nothing leave the caches cold.
static COLD: AtomicBool = AtomicBool::new(false);

/// Leaves the caches as a call does that goes into the kernel and waits there for long: other code has run, and other data has been touched.
#[cold]
fn cool() {
    const LINES: usize = (16 << 20) / 64;
    static OTHER: Mutex<Vec<[u8; 64]>> = Mutex::new(Vec::new());
    let Ok(mut other) = OTHER.lock() else { return };
    other.resize(LINES, [0; 64]);
    for line in other.iter_mut() {
        line[0] = line[0].wrapping_add(1);
    }
    std::thread::sleep(Duration::from_micros(50));
}

/// Runs `work` with a driver whose calls do nothing and leave the caches cold.
pub fn cold(work: impl FnOnce(&Backend)) {
    COLD.store(true, Ordering::Relaxed);
    work(&Backend { name: "cold", cuda: nothing() });
    COLD.store(false, Ordering::Relaxed);
}

/// Makes no call, successfully. Results stay what the callers start with: zero.
struct Nothing;

impl Front for Nothing {
    #[inline(always)]
    fn call(_: Option<usize>, _: impl FnOnce(&Driver) -> CUresult) -> CUresult {
        if COLD.load(Ordering::Relaxed) {
            cool();
        }
        CUresult::CUDA_SUCCESS
    }
}

unsafe extern "C" fn version(out: *mut c_int) -> CUresult {
    // SAFETY: the table passes a valid pointer.
    unsafe { *out = 13_000 };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn one(out: *mut c_int) -> CUresult {
    // SAFETY: cuDeviceGetCount's argument is valid for one write.
    unsafe { *out = 1 };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn granularity(
    out: *mut usize,
    _: *const CUmemAllocationProp,
    _: CUmemAllocationGranularity_flags,
) -> CUresult {
    // SAFETY: cuMemGetAllocationGranularity's first argument is valid for one write.
    unsafe { *out = 2 << 20 };
    CUresult::CUDA_SUCCESS
}

/// A driver whose calls do nothing, successfully.
fn nothing() -> Cuda {
    // SAFETY: each function has the signature that cuda.h declares for its name.
    let driver = unsafe {
        Driver::from_loader(|name| -> *const c_void {
            match name.to_bytes() {
                b"cuDriverGetVersion" => version as *const c_void,
                b"cuDeviceGetCount" => one as *const c_void,
                b"cuMemGetAllocationGranularity" => granularity as *const c_void,
                other => function::<Nothing>(other),
            }
        })
    }
    .expect("the driver that does nothing loads");
    Cuda::with_driver(driver).expect("the driver that does nothing starts")
}

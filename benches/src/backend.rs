//! Drivers to measure on.

use cuda_vmm::Cuda;
use cuda_vmm::sys::ffi::{c_int, c_void};
use cuda_vmm::sys::{CUresult, Driver};
use cuda_vmm_emu::{Config, Emulator};
use std::ptr;

/// A driver with a name.
#[derive(Debug)]
pub struct Backend {
    /// `nothing`, `emulator` or `gpu`.
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

extern "C" fn succeed() -> CUresult {
    CUresult::CUDA_SUCCESS
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

unsafe extern "C" fn granularity(out: *mut usize) -> CUresult {
    // SAFETY: cuMemGetAllocationGranularity's first argument is valid for one write.
    unsafe { *out = 2 << 20 };
    CUresult::CUDA_SUCCESS
}

/// A driver whose calls do nothing, successfully.
fn nothing() -> Cuda {
    // SAFETY: with the C calling convention a function may ignore arguments that it is passed. The ones with results that matter
    // write them; for the others zero, which the callers start with, is the result.
    let driver = unsafe {
        Driver::from_loader(|name| -> *const c_void {
            match name.to_bytes() {
                b"cuGetProcAddress_v2" => ptr::null(),
                b"cuDriverGetVersion" => version as *const c_void,
                b"cuDeviceGetCount" => one as *const c_void,
                b"cuMemGetAllocationGranularity" => granularity as *const c_void,
                _ => succeed as *const c_void,
            }
        })
    }
    .expect("the driver that does nothing loads");
    Cuda::with_driver(driver).expect("the driver that does nothing starts")
}

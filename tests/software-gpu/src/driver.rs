//! The exported functions of the driver; the others are found through `cuGetProcAddress`.

use cuda_vmm_emu::sys::ffi::{CStr, c_char, c_int, c_void};
use cuda_vmm_emu::sys::{CUdevice_attribute, CUresult, Function};
use cuda_vmm_emu::{Config, Emulator};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::image::HostCode;

/// The one emulator of this process; lives as long as the process does.
fn emulator() -> Option<&'static Emulator> {
    static EMULATOR: OnceLock<Option<Emulator>> = OnceLock::new();
    EMULATOR.get_or_init(|| Emulator::new(machine()).ok()).as_ref()
}

fn machine() -> Config {
    let number = |name: &str, usual: usize| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
    };
    let multiprocessors = number("SOFTWARE_GPU_MULTIPROCESSORS", 12) as c_int;
    let device = |device: cuda_vmm_emu::Device| {
        device
            .name("GPU in software")
            .memory(64 << 30)
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, multiprocessors)
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 9)
    };
    Config::new(number("SOFTWARE_GPU_DEVICES", 2))
        .each_device(device)
        .multicast(false)
        .stream_deadline(Duration::from_secs(600))
        .kernels(Arc::new(HostCode))
}

/// `cuGetProcAddress` of `cuda.h`.
///
/// # Safety
/// `symbol` is a C string; `address` is valid for a write, and `status` if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    address: *mut *mut c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_int,
) -> CUresult {
    if symbol.is_null() || address.is_null() {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, and a C string by the caller's contract.
    let name = unsafe { CStr::from_ptr(symbol) };
    let function = Function::ALL.iter().copied().filter(|f| f.name().as_bytes() == name.to_bytes());
    let found = function
        .filter(|f| f.since() as c_int <= version)
        .find_map(|f| emulator()?.driver().address(f).ok())
        .unwrap_or(std::ptr::null());
    // SAFETY: the caller's contract.
    unsafe {
        *address = found.cast_mut();
        if !status.is_null() {
            *status = c_int::from(found.is_null());
        }
    }
    if found.is_null() { CUresult::CUDA_ERROR_NOT_FOUND } else { CUresult::CUDA_SUCCESS }
}

/// `cuDriverGetVersion` of `cuda.h`.
///
/// # Safety
/// `version` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    match emulator() {
        _ if version.is_null() => CUresult::CUDA_ERROR_INVALID_VALUE,
        None => CUresult::CUDA_ERROR_NOT_INITIALIZED,
        Some(emulator) => {
            // SAFETY: not null, and the caller's contract.
            unsafe { *version = emulator.driver().version() };
            CUresult::CUDA_SUCCESS
        }
    }
}

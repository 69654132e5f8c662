//! Kernels of the tests on a device, through the raw driver, with every wait limited.

use cuda_vmm::sys::ffi::c_void;
use cuda_vmm::sys::{CUdevice_attribute, CUdeviceptr, CUfunction, CUmodule, CUresult, Driver};
use std::ffi::CStr;
use std::ptr;
use std::time::{Duration, Instant};

/// Longest time that a kernel may run.
const LIMIT: Duration = Duration::from_secs(60);

/// A module that is loaded in the current context.
#[derive(Debug)]
pub struct Module<'a> {
    driver: &'a Driver,
    raw: CUmodule,
}

impl<'a> Module<'a> {
    /// Loads a cubin in the current context.
    #[must_use]
    pub fn load(driver: &'a Driver, cubin: &[u8]) -> Self {
        let mut raw = ptr::null_mut();
        // SAFETY: the image is a whole cubin, and the output is valid for one write.
        unsafe { driver.cuModuleLoadData(&mut raw, cubin.as_ptr().cast()) }.expect("loading a module");
        Self { driver, raw }
    }

    /// A kernel of the module.
    #[must_use]
    pub fn kernel(&self, name: &CStr) -> CUfunction {
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, and the output is valid for one write.
        unsafe { self.driver.cuModuleGetFunction(&mut function, self.raw, name.as_ptr()) }
            .expect("finding a kernel");
        function
    }

    /// Runs a kernel on the null stream and waits for it, for a limited time.
    ///
    /// # Safety
    /// `arguments` must be the addresses of values of the types that the kernel takes, and what the kernel follows must be valid.
    pub unsafe fn run(&self, kernel: CUfunction, blocks: u32, threads: u32, arguments: &mut [*mut c_void]) {
        let (stream, parameters) = (ptr::null_mut(), arguments.as_mut_ptr());
        // SAFETY: the caller's arguments fit the kernel; they are copied before the call returns.
        unsafe {
            self.driver.cuLaunchKernel(
                kernel,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                parameters,
                ptr::null_mut(),
            )
        }
        .expect("launching a kernel");
        wait(self.driver);
    }
}

impl Drop for Module<'_> {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`, unloaded once; `run` has waited for its kernels.
        unsafe { self.driver.cuModuleUnload(self.raw) }.ok();
    }
}

/// Waits for the null stream, for a limited time.
pub fn wait(driver: &Driver) {
    let end = Instant::now() + LIMIT;
    loop {
        // SAFETY: the null stream is that of the current context.
        match unsafe { driver.cuStreamQuery(ptr::null_mut()) } {
            Ok(()) => return,
            Err(error) if error.status() == Some(CUresult::CUDA_ERROR_NOT_READY) => {
                assert!(Instant::now() < end, "a kernel did not end within {LIMIT:?}");
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(error) => panic!("a kernel failed: {error}"),
        }
    }
}

/// A word of device memory that kernels count in.
#[derive(Debug)]
pub struct Counter<'a> {
    driver: &'a Driver,
    address: CUdeviceptr,
}

impl<'a> Counter<'a> {
    /// A counter at 0.
    #[must_use]
    pub fn new(driver: &'a Driver) -> Self {
        let mut address = 0;
        // SAFETY: the output is valid for one write, and the new memory holds what is set.
        unsafe {
            driver.cuMemAlloc(&mut address, 4).expect("allocating a counter");
            driver.cuMemsetD32Async(address, 0, 1, ptr::null_mut()).expect("clearing a counter");
        }
        wait(driver);
        Self { driver, address }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Its value.
    #[must_use]
    pub fn value(&self) -> u32 {
        let mut value = u32::MAX;
        // SAFETY: source and destination hold four bytes; the copy is waited for.
        unsafe { self.driver.cuMemcpyDtoHAsync((&raw mut value).cast(), self.address, 4, ptr::null_mut()) }
            .expect("reading a counter");
        wait(self.driver);
        value
    }
}

impl Drop for Counter<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once.
        unsafe { self.driver.cuMemFree(self.address) }.ok();
    }
}

/// The architecture of the current context's device, such as `sm_90`.
#[must_use]
pub fn architecture(driver: &Driver) -> String {
    let mut device = 0;
    // SAFETY: the output is valid for one write.
    unsafe { driver.cuCtxGetDevice(&mut device) }.expect("the current device");
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: the output is valid for one write.
        unsafe { driver.cuDeviceGetAttribute(&mut value, attribute, device) }.expect("an attribute");
        value
    };
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    format!("sm_{major}{minor}")
}

/// Free bytes on the current context's device.
#[must_use]
pub fn free_memory(driver: &Driver) -> usize {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both outputs are valid for one write.
    unsafe { driver.cuMemGetInfo(&mut free, &mut total) }.expect("the free memory");
    free
}
